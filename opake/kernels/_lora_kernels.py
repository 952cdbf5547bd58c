"""Kernels that add a product of low rank to what a large product left, and go on from there.

All that a block needs is loaded before anything is computed: one load after the other, their
latencies take longer than the memory's bandwidth. ``short`` says that no rank is above a block's.
"""

from __future__ import annotations

from opake.kernels._moe_activations import activation_of
from opake.kernels._triton import jit, tl

__all__ = ["accumulate_kernel", "gated_bwd_kernel", "gated_fwd_kernel"]


@jit
def _place(  # type: ignore[no-untyped-def]
    row_blocks, col_blocks, block_rows: tl.constexpr, block_cols: tl.constexpr, steps: tl.constexpr
):
    """The program's group, the rows (R, 1) of its first block, and columns (1, C), int64."""
    program = tl.program_id(0)
    group = (program // (row_blocks * col_blocks)).to(tl.int64)
    first_row = ((program // col_blocks) % row_blocks).to(tl.int64) * (steps * block_rows)
    first_col = (program % col_blocks).to(tl.int64) * block_cols
    row = first_row + tl.arange(0, block_rows)[:, None]
    col = first_col + tl.arange(0, block_cols)[None, :]
    return group, row, col


@jit
def _left(ptr, where, group, row, rows, first, wide: tl.constexpr, block_rank: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block (R, K) of the first factor of a product; zero if there is none."""
    if ptr is None:
        block = 0.0
    else:
        rank, step_group, step_row, _, _, _ = where
        k = first + tl.arange(0, block_rank).to(tl.int64)[None, :]
        mask = (row < rows) & (k < rank)
        block = tl.load(ptr + group * step_group + row * step_row + k, mask=mask, other=0.0)
        if wide:
            block = block.to(tl.float32)
    return block


@jit
def _right(ptr, where, group, col, cols, first, wide: tl.constexpr, block_rank: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block (K, C) of the second factor."""
    if ptr is None:
        block = 0.0
    else:
        rank, _, _, step_group, step_rank, step_col = where
        k = first + tl.arange(0, block_rank).to(tl.int64)[:, None]
        mask = (k < rank) & (col < cols)
        ptrs = ptr + group * step_group + k * step_rank + col * step_col
        block = tl.load(ptrs, mask=mask, other=0.0)
        if wide:
            block = block.to(tl.float32)
    return block


@jit
def _plus(  # type: ignore[no-untyped-def]
    acc,
    left,
    right,
    left_ptr,
    right_ptr,
    where,
    at,
    sizes,
    scale,
    wide: tl.constexpr,
    block_rank: tl.constexpr,
    short: tl.constexpr,
):
    """A block of ``acc`` and of ``scale`` times the product whose first factors are there already.

    In fp32; without ``scale``, times 1.
    """
    if right_ptr is not None:
        total = acc if scale is None else tl.zeros_like(acc)
        total = tl.dot(left, right, total, input_precision="ieee")
        if not short:
            group, row, col = at
            rows, cols = sizes
            for first in range(block_rank, where[0], block_rank):
                left = _left(left_ptr, where, group, row, rows, first, wide, block_rank)
                right = _right(right_ptr, where, group, col, cols, first, wide, block_rank)
                total = tl.dot(left, right, total, input_precision="ieee")
        if scale is None:
            acc = total
        else:
            acc += total * scale
    return acc


@jit
def accumulate_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    left_ptr,
    right_ptr,
    rows,
    cols,
    row_blocks,
    col_blocks,
    rank,
    left_group,
    left_row,
    right_group,
    right_rank,
    right_col,
    scale,
    wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    block_rank: tl.constexpr,
    short: tl.constexpr,
):
    group, row, col = _place(row_blocks, col_blocks, block_rows, block_cols, 1)
    where = (rank, left_group, left_row, right_group, right_rank, right_col)
    mask = (row < rows) & (col < cols)
    out_ptrs = out_ptr + group * rows * cols + row * cols + col
    acc = tl.load(out_ptrs, mask=mask, other=0.0)
    left = _left(left_ptr, where, group, row, rows, 0, wide, block_rank)
    right = _right(right_ptr, where, group, col, cols, 0, wide, block_rank)
    at, sizes = (group, row, col), (rows, cols)
    acc = _plus(
        acc.to(tl.float32),
        left,
        right,
        left_ptr,
        right_ptr,
        where,
        at,
        sizes,
        scale,
        wide,
        block_rank,
        short,
    )
    tl.debug_barrier()  # a small block is loaded by several threads, and by all before it is stored
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def gated_fwd_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    gate_left_ptr,
    gate_right_ptr,
    up_left_ptr,
    up_right_ptr,
    out_ptr,
    rows,
    cols,
    row_blocks,
    col_blocks,
    gate_group,
    gate_row,
    up_group,
    up_row,
    gate_rank,
    gate_left_group,
    gate_left_row,
    gate_right_group,
    gate_right_rank,
    gate_right_col,
    up_rank,
    up_left_group,
    up_left_row,
    up_right_group,
    up_right_rank,
    up_right_col,
    gate_scale,
    up_scale,
    activation: tl.constexpr,
    wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    block_rank: tl.constexpr,
    short: tl.constexpr,
):
    g, row, col = _place(row_blocks, col_blocks, block_rows, block_cols, 1)
    of_gate = (
        gate_rank,
        gate_left_group,
        gate_left_row,
        gate_right_group,
        gate_right_rank,
        gate_right_col,
    )
    of_up = (up_rank, up_left_group, up_left_row, up_right_group, up_right_rank, up_right_col)
    at, sizes = (g, row, col), (rows, cols)
    mask = (row < rows) & (col < cols)
    gate = tl.load(gate_ptr + g * gate_group + row * gate_row + col, mask=mask, other=0.0)
    up = tl.load(up_ptr + g * up_group + row * up_row + col, mask=mask, other=0.0)
    a = _left(gate_left_ptr, of_gate, g, row, rows, 0, wide, block_rank)
    b = _right(gate_right_ptr, of_gate, g, col, cols, 0, wide, block_rank)
    c = _left(up_left_ptr, of_up, g, row, rows, 0, wide, block_rank)
    d = _right(up_right_ptr, of_up, g, col, cols, 0, wide, block_rank)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    gate = _plus(
        gate,
        a,
        b,
        gate_left_ptr,
        gate_right_ptr,
        of_gate,
        at,
        sizes,
        gate_scale,
        wide,
        block_rank,
        short,
    )
    up = _plus(
        up, c, d, up_left_ptr, up_right_ptr, of_up, at, sizes, up_scale, wide, block_rank, short
    )
    value, _ = activation_of(gate, activation)
    out_ptrs = out_ptr + g * rows * cols + row * cols + col
    tl.store(out_ptrs, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def gated_bwd_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_left_ptr,
    grad_right_ptr,
    gate_left_ptr,
    gate_right_ptr,
    up_left_ptr,
    up_right_ptr,
    dgate_ptr,
    da_ptr,
    rows,
    cols,
    row_blocks,
    col_blocks,
    gate_group,
    gate_row,
    up_group,
    up_row,
    grad_rank,
    grad_left_group,
    grad_left_row,
    grad_right_group,
    grad_right_rank,
    grad_right_col,
    gate_rank,
    gate_left_group,
    gate_left_row,
    gate_right_group,
    gate_right_rank,
    gate_right_col,
    up_rank,
    up_left_group,
    up_left_row,
    up_right_group,
    up_right_rank,
    up_right_col,
    gate_scale,
    up_scale,
    activation: tl.constexpr,
    wide: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    block_rank: tl.constexpr,
    short: tl.constexpr,
    steps: tl.constexpr,
):
    """Gradients of gate, to ``dgate_ptr``, and of up, to where the incoming one was.

    And of the third layer's A, to ``da_ptr`` (G, row blocks, rank, columns), a sum for every
    program, of ``steps`` blocks below each other; only where its rank is no longer than a block.
    """
    g, row, col = _place(row_blocks, col_blocks, block_rows, block_cols, steps)
    of_grad = (
        grad_rank,
        grad_left_group,
        grad_left_row,
        grad_right_group,
        grad_right_rank,
        grad_right_col,
    )
    of_gate = (
        gate_rank,
        gate_left_group,
        gate_left_row,
        gate_right_group,
        gate_right_rank,
        gate_right_col,
    )
    of_up = (up_rank, up_left_group, up_left_row, up_right_group, up_right_rank, up_right_col)
    b = _right(grad_right_ptr, of_grad, g, col, cols, 0, wide, block_rank)
    d = _right(gate_right_ptr, of_gate, g, col, cols, 0, wide, block_rank)
    f = _right(up_right_ptr, of_up, g, col, cols, 0, wide, block_rank)
    da = tl.zeros((block_rank, block_cols), tl.float32)
    sizes = (rows, cols)
    for _ in range(steps):
        at = (g, row, col)
        mask = (row < rows) & (col < cols)
        here = g * rows * cols + row * cols + col
        grad = tl.load(grad_ptr + here, mask=mask, other=0.0)
        gate = tl.load(gate_ptr + g * gate_group + row * gate_row + col, mask=mask, other=0.0)
        up = tl.load(up_ptr + g * up_group + row * up_row + col, mask=mask, other=0.0)
        a = _left(grad_left_ptr, of_grad, g, row, rows, 0, wide, block_rank)
        c = _left(gate_left_ptr, of_gate, g, row, rows, 0, wide, block_rank)
        e = _left(up_left_ptr, of_up, g, row, rows, 0, wide, block_rank)
        grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
        gate = _plus(
            gate,
            c,
            d,
            gate_left_ptr,
            gate_right_ptr,
            of_gate,
            at,
            sizes,
            gate_scale,
            wide,
            block_rank,
            short,
        )
        grad = _plus(
            grad,
            a,
            b,
            grad_left_ptr,
            grad_right_ptr,
            of_grad,
            at,
            sizes,
            None,
            wide,
            block_rank,
            short,
        )
        up = _plus(
            up, e, f, up_left_ptr, up_right_ptr, of_up, at, sizes, up_scale, wide, block_rank, short
        )
        value, slope = activation_of(gate, activation)
        if da_ptr is not None:
            hidden = (value * up).to(grad_ptr.dtype.element_ty)  # as the forward pass rounded it
            hidden = hidden.to(a.dtype)
            da = tl.dot(tl.trans(a), hidden, da, input_precision="ieee")
        tl.debug_barrier()  # a small block is loaded by several threads, by all before it is stored
        tl.store(grad_ptr + here, (grad * value).to(grad_ptr.dtype.element_ty), mask=mask)
        dgate = grad * up * slope
        tl.store(dgate_ptr + here, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        row += block_rows
    if da_ptr is not None:
        k = tl.arange(0, block_rank)[:, None]
        block = (tl.program_id(0) // col_blocks).to(tl.int64)  # groups and row blocks
        da_ptr += (block * grad_rank + k) * cols + col
        tl.store(da_ptr, da, mask=(k < grad_rank) & (col < cols))
