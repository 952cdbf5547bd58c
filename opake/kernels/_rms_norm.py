"""The kernels of the RMS norms, with and without a residual that is added first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._autograd import Gradients
from opake.kernels._layout import empty_like, rows_of
from opake.kernels._norm import (
    BACKWARD_SWEEP,
    BACKWARD_TILES,
    FORWARD_SWEEP,
    RowTile,
    plan,
    sum_partials,
)
from opake.kernels._triton import Launch, jit, tl

__all__ = ["BACKWARD", "FORWARD", "Options", "launch_backward", "launch_forward"]


@jit
def _rms_norm_fwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    rows,
    cols,
    programs,
    x_group,
    x_row,
    r_group,
    r_row,
    w_group,
    eps,
    offset,
    gemma: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    loop: tl.constexpr,
    stages: tl.constexpr,
):
    """Norm of some rows of a group; with ``r_ptr``, of the sums x + r, which go to ``s_ptr``."""
    group = (tl.program_id(0) // programs).to(tl.int64)
    x_ptr += group * x_group
    y_ptr += group * rows * cols
    if r_ptr is not None:
        r_ptr += group * r_group
        s_ptr += group * rows * cols
    if w_ptr is not None:
        w_ptr += group * w_group
    col = tl.arange(0, block)[None, :]
    first_row = (tl.program_id(0) % programs).to(tl.int64) * block_rows
    every = tl.full((), block_rows, tl.int64) * programs
    if not loop and w_ptr is not None:
        w = _weight(w_ptr, col, cols, offset, gemma)
    for start in tl.range(first_row, rows, every, num_stages=stages):
        row = (start + tl.arange(0, block_rows)[:, None]).to(tl.int64)
        if loop:
            acc = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = _sums(x_ptr, r_ptr, s_ptr, row, first + col, x_row, r_row, mask)
                acc += x * x
            rstd = tl.rsqrt(tl.sum(acc, 1, keep_dims=True) / cols + eps)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = _sums(x_ptr, r_ptr, s_ptr, row, first + col, x_row, r_row, mask)
                if r_ptr is not None:
                    s_cols = s_ptr + row * cols + first + col
                    tl.store(s_cols, x.to(s_ptr.dtype.element_ty), mask=mask)
                y = x * rstd
                if not gemma:
                    y = _rounded(y, x_ptr, s_ptr)
                if w_ptr is not None:
                    y = y * _weight(w_ptr, first + col, cols, offset, gemma)
                y_cols = y_ptr + row * cols + first + col
                tl.store(y_cols, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (row < rows) & (col < cols)
            x = _sums(x_ptr, r_ptr, s_ptr, row, col, x_row, r_row, mask)
            if r_ptr is not None:
                tl.store(s_ptr + row * cols + col, x.to(s_ptr.dtype.element_ty), mask=mask)
            rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / cols + eps)
            y = x * rstd
            if not gemma:
                y = _rounded(y, x_ptr, s_ptr)
            if w_ptr is not None:
                y = y * w
            tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _sums(x_ptr, r_ptr, s_ptr, row, col, x_row, r_row, mask):  # type: ignore[no-untyped-def]
    """x, or x + r rounded as it is stored, in fp32."""
    x = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0).to(tl.float32)
    if r_ptr is not None:
        x += tl.load(r_ptr + row * r_row + col, mask=mask, other=0.0).to(tl.float32)
        x = x.to(s_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def _rounded(y, x_ptr, s_ptr):  # type: ignore[no-untyped-def]
    """Round to the dtype of what is normed."""
    if s_ptr is None:
        return y.to(x_ptr.dtype.element_ty).to(tl.float32)
    else:  # noqa: RET505  (only one of the two is compiled)
        return y.to(s_ptr.dtype.element_ty).to(tl.float32)


@jit
def _weight(w_ptr, col, cols, offset, gemma: tl.constexpr):  # type: ignore[no-untyped-def]
    """``weight + offset``, rounded as the formula rounds it."""
    w = tl.load(w_ptr + col, mask=col < cols, other=0.0).to(tl.float32) + offset
    if not gemma:
        w = w.to(w_ptr.dtype.element_ty).to(tl.float32)
    return w


@jit
def _rms_norm_bwd_kernel(  # type: ignore[no-untyped-def]
    dy_ptr,
    x_ptr,
    w_ptr,
    ds_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    cols,
    programs,
    dy_group,
    dy_row,
    x_group,
    x_row,
    w_group,
    ds_group,
    ds_row,
    eps,
    offset,
    gemma: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    loop: tl.constexpr,
    stages: tl.constexpr,
):
    """Gradients of some rows of a group: of the rows, and this program's part of the weight's.

    With n = x * rstd and g = dy * w: dx = rstd * (g - n * mean(g * n)) and dw = sum of dy * n.
    ``ds_ptr`` holds another gradient of x, to be added.
    """
    group = (tl.program_id(0) // programs).to(tl.int64)
    dy_ptr += group * dy_group
    x_ptr += group * x_group
    if w_ptr is not None:
        w_ptr += group * w_group
    if ds_ptr is not None:
        ds_ptr += group * ds_group
    if dx_ptr is not None:
        dx_ptr += group * rows * cols
    if dw_ptr is not None:
        dw_ptr += tl.program_id(0).to(tl.int64) * cols
    col = tl.arange(0, block)[None, :]
    first_row = (tl.program_id(0) % programs).to(tl.int64) * block_rows
    every = tl.full((), block_rows, tl.int64) * programs
    if not loop:
        if w_ptr is not None:
            w = _weight(w_ptr, col, cols, offset, gemma)
        acc = tl.zeros((block_rows, block), tl.float32)
    for start in tl.range(first_row, rows, every, num_stages=stages):
        row = (start + tl.arange(0, block_rows)[:, None]).to(tl.int64)
        x_rows = x_ptr + row * x_row
        dy_rows = dy_ptr + row * dy_row
        if loop:
            squares = tl.zeros((block_rows, block), tl.float32)
            products = tl.zeros((block_rows, block), tl.float32)
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                g = tl.load(dy_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                if w_ptr is not None:
                    g = g * _weight(w_ptr, first + col, cols, offset, gemma)
                squares += x * x
                products += g * x
            rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / cols + eps)
            mean = tl.sum(products, 1, keep_dims=True) * rstd / cols
            tl.debug_barrier()
            for first in range(0, cols, block):
                mask = (row < rows) & (first + col < cols)
                x = tl.load(x_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_rows + first + col, mask=mask, other=0.0).to(tl.float32)
                n = x * rstd
                if dw_ptr is not None:
                    # The program's own sums wait in memory, where no other program looks; the
                    # barrier above shows them to threads that did not write them.
                    sums = dw_ptr + first + col
                    inside = first + col < cols
                    dw = tl.sum(dy * n, 0)[None, :]
                    if start >= every:
                        dw += tl.load(sums, mask=inside, other=0.0).to(tl.float32)
                    tl.store(sums, dw.to(dw_ptr.dtype.element_ty), mask=inside)
                if dx_ptr is not None:
                    g = dy
                    if w_ptr is not None:
                        g = g * _weight(w_ptr, first + col, cols, offset, gemma)
                    dx = rstd * (g - n * mean)
                    if ds_ptr is not None:
                        ds_cols = ds_ptr + row * ds_row + first + col
                        dx += tl.load(ds_cols, mask=mask, other=0.0).to(tl.float32)
                    dx_rows = dx_ptr + row * cols + first + col
                    tl.store(dx_rows, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (row < rows) & (col < cols)
            x = tl.load(x_rows + col, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + col, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / cols + eps)
            n = x * rstd
            if dw_ptr is not None:
                acc += tl.where(row < rows, dy * n, 0.0)  # 0 * inf, where eps is 0
            if dx_ptr is not None:
                g = dy
                if w_ptr is not None:
                    g = g * w
                mean = tl.sum(g * n, 1, keep_dims=True) / cols
                dx = rstd * (g - n * mean)
                if ds_ptr is not None:
                    ds_cols = ds_ptr + row * ds_row + col
                    dx += tl.load(ds_cols, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if not loop and dw_ptr is not None:
        dw = tl.sum(acc, 0)[None, :].to(dw_ptr.dtype.element_ty)
        tl.store(dw_ptr + col, dw, mask=col < cols)


# ---- launchers

# Not contracted: what a mean takes away from a row of one has to be all of it.
FORWARD = Launch(
    _rms_norm_fwd_kernel,
    {"": RowTile(per_thread=64, per_program=4096, longest=16384, per_sm=0)},
    FORWARD_SWEEP,
    contract=False,
)
BACKWARD = Launch(_rms_norm_bwd_kernel, BACKWARD_TILES, BACKWARD_SWEEP, contract=False)


class Options(NamedTuple):
    """What is no tensor: numbers, and the casting mode as a flag."""

    eps: float
    offset: float
    gemma: bool


def launch_forward(
    batch: int, options: Options, x: Tensor, residual: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The norm of ``x``, or of ``x + residual``, and that sum."""
    total = None
    dtype = x.dtype
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        total = empty_like(x, dtype)
    if weight is not None and not options.gemma and weight.dtype != dtype:
        dtype = torch.promote_types(dtype, weight.dtype)
    y = empty_like(x, dtype)
    if not x.numel():
        return y, total
    x, groups, rows, cols, *strides = rows_of(x, batch)
    how = plan(FORWARD, groups, rows, cols, x.device)
    r, w, w_stride = None, None, 0
    if residual is None:
        strides += (0, 0)
    else:
        r, *_, group_stride, row_stride = rows_of(residual, batch)
        strides += (group_stride, row_stride)
    if weight is not None:
        w, *_, w_stride, _ = rows_of(weight, batch)
    integers = (rows, cols, how.programs, *strides, w_stride)
    constants = (options.gemma, *how.constants)
    grid = (groups * how.programs, 1, 1)
    FORWARD(grid, (x, r, w, y, total), integers, constants, how.warps, options[:2])
    return y, total


def launch_backward(
    batch: int,
    options: Options,
    wanted: Any,
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
) -> Gradients:
    """Gradients of what is normed, with ``ds`` added, and of the weight."""
    want_x, want_w = wanted
    dx = empty_like(x) if want_x else None
    dw = empty_like(weight) if want_w and weight is not None else None
    if not x.numel():
        return dx, dw if dw is None else dw.zero_()
    x, groups, rows, cols, *x_strides = rows_of(x, batch)
    dy, *_, dy_group, dy_row = rows_of(dy, batch)
    how = plan(BACKWARD, groups, rows, cols, x.device)
    s, w, w_stride, s_strides, partial = None, None, 0, [0, 0], dw
    if weight is not None:
        w, *_, w_stride, _ = rows_of(weight, batch)
    if ds is not None:
        s, _, _, _, *s_strides = rows_of(ds, batch)
    # One program's sums are final, unless it adds them up in memory.
    final = how.programs == 1 and (not how.loop or rows == 1)
    if dw is not None and not final:
        partial = dw.new_empty((groups, how.programs, cols), dtype=torch.float32)
    integers = (rows, cols, how.programs, dy_group, dy_row, *x_strides, w_stride, *s_strides)
    constants = (options.gemma, *how.constants)
    tensors = (dy, x, w, s, dx, partial)
    BACKWARD((groups * how.programs, 1, 1), tensors, integers, constants, how.warps, options[:2])
    if dw is not None and partial is not None and not final:
        sum_partials(partial, dw)
    return dx, dw
