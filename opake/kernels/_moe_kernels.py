"""The matrix products of experts: rows of one expert times its weight, and rows times rows.

Gate and up lie in pairs, (gate 0, up 0, gate 1, up 1, ...), wherever a kernel has both: what a
program multiplies by two halves of a weight it then holds side by side, in the same threads.
A *slot* is a token at one of its K experts, a *row* a slot's place when slots are sorted by expert.
"""

from __future__ import annotations

from opake.kernels._moe_activations import activation_of
from opake.kernels._triton import jit, tl

__all__ = ["moe_pull_back_kernel", "moe_rows_kernel", "moe_up_kernel", "moe_weight_kernel"]


@jit
def _tile(tiles_ptr, cols, together: tl.constexpr, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a program's group, rows, which of them exist, and columns.

    ``together`` tiles of rows run side by side, over all columns, so that the cache has the weight.
    """
    pid = tl.program_id(0)
    across = together * tl.cdiv(cols, width)
    tiles_ptr += (pid // across * together + pid % together).to(tl.int64) * 3
    row = tl.load(tiles_ptr + 1) + tl.arange(0, height)
    exists = row < tl.load(tiles_ptr + 2)
    return tl.load(tiles_ptr), row, exists, pid % across // together * width


@jit
def _product(  # type: ignore[no-untyped-def]
    a_ptrs,
    b_ptrs,
    b_step,
    inner,
    wide: tl.constexpr,
    even: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """Sum ``a (height, inner) @ b (inner, width)`` in fp32."""
    acc = tl.zeros((height, width), tl.float32)
    k = tl.arange(0, depth)
    for first in tl.range(0, inner, depth, num_stages=stages):
        if even:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            exists = k < inner - first
            a = tl.load(a_ptrs, mask=exists[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=exists[:, None], other=0.0)
        if wide:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += depth
        b_ptrs += b_step
    return acc


@jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Split columns into the first and the last."""
    height: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (height, 2, width // 2)), (0, 2, 1)))


@jit
def _activate(  # type: ignore[no-untyped-def]
    acc, scale, pairs_ptr, h_ptr, slot, row, exists, first, half, activation: tl.constexpr
):
    """Store gate and up, and the weighted h."""
    height: tl.constexpr = acc.shape[0]
    width: tl.constexpr = acc.shape[1]
    if pairs_ptr is not None:
        col = first + tl.arange(0, width)
        pairs_ptr += slot[:, None] * (2 * half) + col[None, :]
        mask = exists[:, None] & (col < 2 * half)[None, :]
        tl.store(pairs_ptr, acc.to(pairs_ptr.dtype.element_ty), mask=mask)
    gate, up = tl.split(tl.reshape(acc, (height, width // 2, 2)))
    value, _ = activation_of(gate, activation)
    col = first // 2 + tl.arange(0, width // 2)
    h_ptr += row[:, None] * half + col[None, :]
    mask = exists[:, None] & (col < half)[None, :]
    tl.store(h_ptr, (value * up * scale).to(h_ptr.dtype.element_ty), mask=mask)


@jit
def moe_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    order_ptr,
    tiles_ptr,
    scale_ptr,
    pairs_ptr,
    h_ptr,
    top_k,
    examples,
    inner,
    half,
    x_row,
    weight_example,
    weight_expert,
    weight_row,
    activation: tl.constexpr,
    wide: tl.constexpr,
    even: tl.constexpr,
    together: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """``h[row] = activation(gate) * up * scale[slot]``; ``pairs[slot]`` has gate and up."""
    group, row, exists, first = _tile(tiles_ptr, 2 * half, together, height, width)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    slot = tl.load(order_ptr + row, mask=exists, other=0)
    col = first + tl.arange(0, width)
    near = col % (2 * half)  # what lies outside is read elsewhere, and not stored
    k = tl.arange(0, depth)
    x_ptr += (slot // top_k)[:, None] * x_row + k[None, :]
    weight_ptr += group % examples * weight_example + group // examples * weight_expert
    at = (near % 2 * half + near // 2).to(tl.int64) * weight_row
    weight_ptr += at[None, :] + k[:, None]
    acc = _product(x_ptr, weight_ptr, depth, inner, wide, even, height, width, depth, stages)
    scale = tl.load(scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)[:, None]
    acc = acc.to(h_ptr.dtype.element_ty).to(tl.float32)  # as the backward pass will find them
    left, right = _halves(acc)
    _activate(left, scale, pairs_ptr, h_ptr, slot, row, exists, first, half, activation)
    first += width // 2
    _activate(right, scale, pairs_ptr, h_ptr, slot, row, exists, first, half, activation)


@jit
def moe_rows_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    weight_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    examples,
    inner,
    cols,
    half,
    weight_example,
    weight_expert,
    weight_inner,
    weight_col,
    pairs: tl.constexpr,
    wide: tl.constexpr,
    even: tl.constexpr,
    together: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """``out[slot] = a[row] @ weight``, whose rows come in pairs or one after the other."""
    group, row, exists, first = _tile(tiles_ptr, cols, together, height, width)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    col = first + tl.arange(0, width)
    near = (col % cols).to(tl.int64)
    k = tl.arange(0, depth)
    a_ptr += tl.where(exists, row, 0)[:, None] * inner + k[None, :]
    weight_ptr += group % examples * weight_example + group // examples * weight_expert
    if pairs:
        at = k % 2 * half + k // 2
        step = tl.cast(weight_inner, tl.int64) * (depth // 2)
    else:
        at = k
        step = tl.cast(weight_inner, tl.int64) * depth
    weight_ptr += at.to(tl.int64)[:, None] * weight_inner + near[None, :] * weight_col
    acc = _product(a_ptr, weight_ptr, step, inner, wide, even, height, width, depth, stages)
    slot = tl.load(order_ptr + row, mask=exists, other=0)
    out_ptr += slot[:, None] * cols + col[None, :]
    mask = exists[:, None] & (col < cols)[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _pull_back(  # type: ignore[no-untyped-def]
    dh,
    scale,
    pairs_ptr,
    dpairs_ptr,
    h_ptr,
    slot,
    row,
    exists,
    first,
    half,
    activation: tl.constexpr,
):
    """Store what ``dh`` makes of gate and up, and h; return the sums of ``dh * h``."""
    height: tl.constexpr = dh.shape[0]
    width: tl.constexpr = dh.shape[1]
    both = 2 * first + tl.arange(0, 2 * width)
    here = exists[:, None] & (both < 2 * half)[None, :]
    pairs_ptr += slot[:, None] * (2 * half) + both[None, :]
    pairs = tl.load(pairs_ptr, mask=here, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, (height, width, 2)))
    value, slope = activation_of(gate, activation)
    h = value * up
    col = first + tl.arange(0, width)
    mask = exists[:, None] & (col < half)[None, :]
    sums = tl.sum(tl.where(mask, dh * h, 0.0), 1)
    if h_ptr is not None:
        h_ptr += row[:, None] * half + col[None, :]
        tl.store(h_ptr, (h * scale).to(h_ptr.dtype.element_ty), mask=mask)
    if dpairs_ptr is not None:
        dh *= scale
        dtype = dpairs_ptr.dtype.element_ty
        found = tl.join((dh * up * slope).to(dtype), (dh * value).to(dtype))
        dpairs_ptr += row[:, None] * (2 * half) + both[None, :]
        tl.store(dpairs_ptr, tl.reshape(found, (height, 2 * width)), mask=here)
    return sums


@jit
def moe_pull_back_kernel(  # type: ignore[no-untyped-def]
    dh_ptr,
    pairs_ptr,
    order_ptr,
    starts_ptr,
    scale_ptr,
    dpairs_ptr,
    h_ptr,
    dscale_ptr,
    slots,
    groups,
    half,
    activation: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Pull ``dh[slot]`` back to gate and up, ``dpairs[row]``, and to the slot's weight.

    The weight also goes into ``h[row]``, for the gradient of ``down``. Rows that have no expert
    are left out; their weights' gradients are zero.
    """
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    slot = tl.load(order_ptr + row, mask=row < slots, other=0)
    exists = row < tl.load(starts_ptr + groups)
    scale = tl.load(scale_ptr + slot, mask=exists, other=0.0).to(tl.float32)[:, None]
    sums = tl.zeros((block_rows,), tl.float32)
    for first in range(0, half, block_cols):
        col = first + tl.arange(0, block_cols)
        mask = exists[:, None] & (col < half)[None, :]
        dh = tl.load(dh_ptr + slot[:, None] * half + col[None, :], mask=mask, other=0.0)
        sums += _pull_back(
            dh.to(tl.float32),
            scale,
            pairs_ptr,
            dpairs_ptr,
            h_ptr,
            slot,
            row,
            exists,
            first,
            half,
            activation,
        )
    if dscale_ptr is not None:
        tl.store(dscale_ptr + slot, sums, mask=row < slots)


@jit
def moe_weight_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    starts_ptr,
    out_ptr,
    examples,
    experts,
    rows,
    cols,
    a_row,
    b_row,
    pairs: tl.constexpr,
    wide: tl.constexpr,
    together: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """``out[expert] = a.T @ b`` over the rows of one expert (and example)."""
    down, across = tl.cdiv(rows, height), tl.cdiv(cols, width)
    tile = tl.program_id(0) % (down * across)
    group = (tl.program_id(0) // (down * across)).to(tl.int64)
    # Blocks of ``together`` by all: what they read then stays in the cache.
    strip = tile // (together * across)
    tall = tl.minimum(down - strip * together, together)
    tile = tile % (together * across)
    top = (strip * together + tile % tall) * height
    left = tile // tall * width
    m, n = top + tl.arange(0, height), left + tl.arange(0, width)
    begin = tl.load(starts_ptr + group)
    count = (tl.load(starts_ptr + group + 1) - begin).to(tl.int32)
    a_ptr += (m % rows)[None, :]
    b_ptr += (n % cols)[None, :]
    k = tl.arange(0, depth)
    acc = tl.zeros((height, width), tl.float32)
    for first in tl.range(0, count, depth, num_stages=stages):
        exists = k < count - first
        row = begin + first + k
        a = tl.load(a_ptr + row[:, None] * a_row, mask=exists[:, None], other=0.0)
        b = tl.load(b_ptr + row[:, None] * b_row, mask=exists[:, None], other=0.0)
        if wide:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    mask = (m < rows)[:, None] & (n < cols)[None, :]
    if pairs:
        m = m % 2 * (rows // 2) + m // 2
    out_ptr += (group % examples * experts + group // examples) * rows * cols
    out_ptr += m.to(tl.int64)[:, None] * cols + n[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)
