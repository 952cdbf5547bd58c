"""The kernels of the embedding's forward and backward pass."""

from __future__ import annotations

from opake.kernels._triton import find_group, jit, tl

__all__ = [
    "embedding_bwd_kernel",
    "embedding_fwd_kernel",
    "embedding_keys_kernel",
    "embedding_partial_kernel",
    "embedding_starts_kernel",
]


@jit
def embedding_fwd_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    ids_ptr,
    out_ptr,
    groups,
    rows,
    size,
    cols,
    weight_group,
    weight_row,
    ids_group,
    ids_row,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    group = find_group()
    blocks = tl.cdiv(cols, block_cols)
    row = (tl.program_id(0) // blocks).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = (tl.program_id(0) % blocks) * block_cols + tl.arange(0, block_cols)[None, :]
    exists = row < tl.where(group < groups, rows, 0)
    ids = tl.load(ids_ptr + group * ids_group + row * ids_row, mask=exists, other=-1).to(tl.int64)
    inside = (ids >= 0) & (ids < size)
    weight_ptr += group * weight_group + ids * weight_row
    mask = inside[:, None] & (col < cols)
    x = tl.load(weight_ptr[:, None] + col, mask=mask, other=float("nan"))
    at = (group * rows + row)[:, None] * cols + col
    tl.store(out_ptr + at, x, mask=exists[:, None] & (col < cols))


@jit
def embedding_keys_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    keys_ptr,
    groups,
    rows,
    size,
    ids_group,
    ids_row,
    padding_idx,
    total,
    block: tl.constexpr,
):
    """Number the rows of all groups' gradients; tokens without a gradient come behind them."""
    group = find_group()
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    exists = row < tl.where(group < groups, rows, 0)
    ids = tl.load(ids_ptr + group * ids_group + row * ids_row, mask=exists, other=-1).to(tl.int64)
    used = (ids >= 0) & (ids < size) & (ids != padding_idx)
    key = tl.where(used, group * size + ids, total)
    tl.store(keys_ptr + group * rows + row, key.to(keys_ptr.dtype.element_ty), mask=exists)


@jit
def embedding_starts_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, starts_ptr, count, total, steps: tl.constexpr, block: tl.constexpr
):
    """Search the sorted keys for where every row of the gradient begins."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    low = tl.zeros((block,), tl.int64)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (tl.load(keys_ptr + middle, mask=open_, other=0) < row)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    tl.store(starts_ptr + row, low, mask=row <= total)


@jit
def _add_rows(  # type: ignore[no-untyped-def]
    sums, ptr, order_ptr, shift, begin, end, gap, skipped, stride, col, cols, at_once: tl.constexpr
):
    """Add rows ``order[begin:end] - shift``, or rows ``begin`` to ``end`` without an order, with
    ``skipped`` left out from ``gap`` on."""
    for first in range(begin, end - skipped, at_once):
        at = first + tl.arange(0, at_once)
        exists = at < end - skipped
        row = at
        if order_ptr is not None:
            at += tl.where(at >= gap, skipped, 0)
            row = tl.load(order_ptr + at, mask=exists, other=0) - shift
        mask = exists[:, None] & (col < cols)[None, :]
        x = tl.load(ptr + row.to(tl.int64)[:, None] * stride + col[None, :], mask=mask, other=0.0)
        sums += tl.sum(x.to(tl.float32), 0)
    return sums


@jit
def embedding_partial_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    order_ptr,
    keys_ptr,
    partial_ptr,
    total,
    rows,
    size,
    cols,
    grad_group,
    grad_row,
    chunk,
    at_once: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Sum those chunks of the sorted tokens that belong to one row of the gradient altogether."""
    blocks = tl.cdiv(cols, block_cols)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * block_cols + tl.arange(0, block_cols)
    begin = index * chunk
    key = tl.load(keys_ptr + begin).to(tl.int64)
    last = tl.load(keys_ptr + begin + chunk - 1).to(tl.int64)
    if (key == last) & (key < total):
        group = key // size
        grad_ptr += group * grad_group
        shift = group * rows
        end = begin + chunk
        sums = tl.zeros((block_cols,), tl.float32)
        sums = _add_rows(
            sums, grad_ptr, order_ptr, shift, begin, end, end, 0, grad_row, col, cols, at_once
        )
        tl.store(partial_ptr + index * cols + col, sums, mask=col < cols)


@jit
def embedding_bwd_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    order_ptr,
    starts_ptr,
    partial_ptr,
    dweight_ptr,
    groups,
    rows,
    size,
    cols,
    grad_group,
    grad_row,
    chunk,
    chunk_bits,
    height: tl.constexpr,
    at_once: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Write rows of the gradient once: sums of tokens, and of chunks where there are many."""
    group = find_group()
    blocks = tl.cdiv(cols, block_cols)
    top = (tl.program_id(0) // blocks).to(tl.int64) * height
    col = (tl.program_id(0) % blocks) * block_cols + tl.arange(0, block_cols)
    grad_ptr += group * grad_group
    shift = group * rows
    bottom = tl.minimum(top + height, tl.where(group < groups, size, 0))
    # Most rows have no token, and are written all at once.
    tile = top + tl.arange(0, height)
    exists = tile < bottom
    at = group * size + tile
    begins = tl.load(starts_ptr + at, mask=exists, other=0)
    ends = tl.load(starts_ptr + at + 1, mask=exists, other=0)
    zeros = tl.zeros((height, block_cols), dweight_ptr.dtype.element_ty)
    mask = (exists & (begins == ends))[:, None] & (col < cols)[None, :]
    tl.store(dweight_ptr + at[:, None] * cols + col[None, :], zeros, mask=mask)
    full = tl.sum((begins < ends).to(tl.int32), 0)
    for row in range(top, tl.where(full > 0, bottom, top)):
        key = group * size + row
        begin = tl.load(starts_ptr + key)
        end = tl.load(starts_ptr + key + 1)
        # Chunks that lie inside altogether are summed already; the rest is before and after them.
        low, high = (begin + chunk - 1) >> chunk_bits, end >> chunk_bits
        high = tl.maximum(low, high)
        skipped, gap = (high - low) * chunk, low * chunk
        sums = tl.zeros((block_cols,), tl.float32)
        sums = _add_rows(
            sums, grad_ptr, order_ptr, shift, begin, end, gap, skipped, grad_row, col, cols, at_once
        )
        sums = _add_rows(sums, partial_ptr, None, 0, low, high, high, 0, cols, col, cols, at_once)
        sums = sums.to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + key * cols + col, sums, mask=col < tl.where(begin < end, cols, 0))
