"""The kernels of the layer norm."""

from __future__ import annotations

from opake.kernels._norm import BACKWARD_SWEEP, BACKWARD_TILES, FORWARD_SWEEP, RowTile
from opake.kernels._triton import Launch, jit, tl

__all__ = ["BACKWARD", "FORWARD"]


@jit
def _layer_norm_fwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    rows,
    cols,
    programs,
    heads,
    x_group,
    x_row,
    x_head,
    w_group,
    w_head,
    b_group,
    b_head,
    eps,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    loop: tl.constexpr,
    stages: tl.constexpr,
):
    head = ((tl.program_id(0) // programs) % heads).to(tl.int64)
    group = (tl.program_id(0) // programs // heads).to(tl.int64)
    x_ptr += group * x_group + head * x_head
    y_ptr += (group * rows * heads + head) * cols
    if w_ptr is not None:
        w_ptr += group * w_group + head * w_head
    if b_ptr is not None:
        b_ptr += group * b_group + head * b_head
    col = tl.arange(0, block)[None, :]
    first_row = (tl.program_id(0) % programs).to(tl.int64) * block_rows
    every = tl.full((), block_rows, tl.int64) * programs
    for start in tl.range(first_row, rows, every, num_stages=stages):
        row = (start + tl.arange(0, block_rows)[:, None]).to(tl.int64)
        x_rows = x_ptr + row * x_row
        y_rows = y_ptr + row * heads * cols
        if loop:
            acc = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                acc += tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(acc, 1, keep_dims=True) / cols
            acc = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                centred = tl.where(mask, x - mean, 0.0)
                acc += centred * centred
            rstd = tl.rsqrt(tl.sum(acc, 1, keep_dims=True) / cols + eps)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                y = _scaled((x - mean) * rstd, w_ptr, b_ptr, first + col, cols)
                tl.store(y_rows + first + col, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (row < rows) & (col < cols)
            x = tl.load(x_rows + col, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(x, 1, keep_dims=True) / cols
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / cols + eps)
            y = _scaled(centred * rstd, w_ptr, b_ptr, col, cols)
            tl.store(y_rows + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _scaled(n, w_ptr, b_ptr, col, cols):  # type: ignore[no-untyped-def]
    """``n * weight + bias``, each if it is there."""
    if w_ptr is not None:
        n = n * tl.load(w_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    if b_ptr is not None:
        n = n + tl.load(b_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    return n


@jit
def _layer_norm_bwd_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    x_ptr,
    w_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    cols,
    programs,
    heads,
    dy_group,
    dy_row,
    dy_head,
    x_group,
    x_row,
    x_head,
    w_group,
    w_head,
    eps,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    loop: tl.constexpr,
    stages: tl.constexpr,
):
    """Gradients of some rows of a group: of the rows, and this program's part of the others.

    With n = (x - mean) * rstd and g = dy * w: dx = rstd * (g - mean(g) - n * mean(g * n)),
    dw = sum of dy * n and db = sum of dy.
    """
    head = ((tl.program_id(0) // programs) % heads).to(tl.int64)
    group = (tl.program_id(0) // programs // heads).to(tl.int64)
    dy_ptr += group * dy_group + head * dy_head
    x_ptr += group * x_group + head * x_head
    if w_ptr is not None:
        w_ptr += group * w_group + head * w_head
    if dx_ptr is not None:
        dx_ptr += (group * rows * heads + head) * cols
    if dw_ptr is not None:
        dw_ptr += tl.program_id(0).to(tl.int64) * cols
    if db_ptr is not None:
        db_ptr += tl.program_id(0).to(tl.int64) * cols
    col = tl.arange(0, block)[None, :]
    first_row = (tl.program_id(0) % programs).to(tl.int64) * block_rows
    every = tl.full((), block_rows, tl.int64) * programs
    dw = tl.zeros((block_rows, block), tl.float32)
    db = tl.zeros((block_rows, block), tl.float32)
    for start in tl.range(first_row, rows, every, num_stages=stages):
        row = (start + tl.arange(0, block_rows)[:, None]).to(tl.int64)
        x_rows = x_ptr + row * x_row
        dy_rows = dy_ptr + row * dy_row
        if loop:
            acc = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                acc += tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(acc, 1, keep_dims=True) / cols
            squares = tl.zeros((block_rows, block), tl.float32)
            plain = tl.zeros((block_rows, block), tl.float32)
            products = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                centred = tl.where(mask, x - mean, 0.0)
                g = _scaled(dy, w_ptr, None, first + col, cols)
                squares += centred * centred
                plain += g
                products += g * centred
            rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / cols + eps)
            mean_g = tl.sum(plain, 1, keep_dims=True) / cols
            mean_gn = tl.sum(products, 1, keep_dims=True) * rstd / cols
            tl.debug_barrier()
            for first in range(0, cols, block):
                inside = first + col < cols
                mask = (row < rows) & inside
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                n = (x - mean) * rstd
                # The program's own sums wait in memory, where no other program looks; the barrier
                # above makes them seen by threads that did not write them.
                if dw_ptr is not None:
                    sums = tl.sum(dy * n, 0)[None, :]
                    if start >= every:
                        sums += tl.load(dw_ptr + first + col, mask=inside, other=0.0)
                    tl.store(dw_ptr + first + col, sums, mask=inside)
                if db_ptr is not None:
                    sums = tl.sum(dy, 0)[None, :]
                    if start >= every:
                        sums += tl.load(db_ptr + first + col, mask=inside, other=0.0)
                    tl.store(db_ptr + first + col, sums, mask=inside)
                if dx_ptr is not None:
                    g = _scaled(dy, w_ptr, None, first + col, cols)
                    dx = rstd * (g - mean_g - n * mean_gn)
                    dx_cols = dx_ptr + row * heads * cols + first + col
                    tl.store(dx_cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (row < rows) & (col < cols)
            x = tl.load(x_rows + col, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + col, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(x, 1, keep_dims=True) / cols
            centred = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / cols + eps)
            n = centred * rstd
            if dw_ptr is not None:
                dw += tl.where(row < rows, dy * n, 0.0)  # 0 * inf, where eps is 0
            if db_ptr is not None:
                db += dy
            if dx_ptr is not None:
                g = _scaled(dy, w_ptr, None, col, cols)
                mean_g = tl.sum(g, 1, keep_dims=True) / cols
                mean_gn = tl.sum(g * n, 1, keep_dims=True) / cols
                dx = rstd * (g - mean_g - n * mean_gn)
                dx_cols = dx_ptr + row * heads * cols + col
                tl.store(dx_cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if not loop:
        if dw_ptr is not None:
            tl.store(dw_ptr + col, tl.sum(dw, 0)[None, :], mask=col < cols)
        if db_ptr is not None:
            tl.store(db_ptr + col, tl.sum(db, 0)[None, :], mask=col < cols)


# Not contracted: what a mean takes away from a row of one has to be all of it.
FORWARD = Launch(
    _layer_norm_fwd_kernel,
    {"": RowTile(per_thread=32, per_program=4096, longest=16384, per_sm=0)},
    FORWARD_SWEEP,
    contract=False,
)
BACKWARD = Launch(_layer_norm_bwd_kernel, BACKWARD_TILES, BACKWARD_SWEEP, contract=False)
