"""Launching elementwise kernels over tensors of one shape, however they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from opake.kernels._triton import Launch, axes, find_group, jit, power_of_two, tl


@jit
def block(rows, cols, block_rows: tl.constexpr, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a program's rows (R, 1) and columns (1, C), int64, and which of them exist (R, C)."""
    row = find_group() * block_rows + tl.arange(0, block_rows)[:, None]
    col = tl.program_id(0).to(tl.int64) * block_cols + tl.arange(0, block_cols)[None, :]
    return row, col, (row < rows) & (col < cols)


def elementwise(
    launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[torch.dtype | Tensor | None]
) -> list[Tensor | None]:
    """Run a kernel over ``inputs``, tensors of one shape, and return its outputs.

    The kernel takes a pointer to each input and output, then rows, columns and every tensor's row
    stride, then the block's rows and columns. An output is a dtype, a tensor to write to, or None,
    which the kernel must skip. Inputs are read where they lie if all tensors share a view as
    matrices, and are copied otherwise.
    """
    first = inputs[0]
    allocate = not any(isinstance(x, Tensor) for x in outputs)
    if allocate and _alike(first.shape, tuple([x.stride() for x in inputs])):
        # None of the outputs is a tensor, so each is a dtype or None.
        found = [x if x is None else torch.empty_like(first, dtype=x) for x in outputs]  # type: ignore[arg-type]
        _run(launch, [*inputs, *found], 1, first.numel(), None)
        return found
    found = [
        torch.empty(first.shape, dtype=x, device=first.device) if isinstance(x, torch.dtype) else x
        for x in outputs
    ]
    if not first.numel():
        return found
    view = _matrix_of([*inputs, *found])
    if view is None:
        inputs = [x.contiguous() for x in inputs]
        if allocate:
            return elementwise(launch, inputs, outputs)
        view = _matrix_of([*inputs, *found])
        assert view is not None, "a tensor to write to must be a matrix of contiguous rows"
    _run(launch, [*inputs, *found], *view)
    return found


def _run(
    launch: Launch,
    tensors: Sequence[Tensor | None],
    rows: int,
    cols: int,
    strides: tuple[int, ...] | None,
) -> None:
    if not rows * cols:
        return
    first = tensors[0]
    assert first is not None
    tile = launch.tile(first.device, rows * cols)
    width = tile.elements if rows == 1 else min(tile.elements, power_of_two(cols))
    height = tile.elements // width if rows > 1 else 1
    grid = axes(-(-cols // width), -(-rows // height))
    integers = (rows, cols, *(strides or (0,) * len(tensors)))
    launch(grid, tensors, integers, (height, width), tile.warps)


Strides = tuple[int, ...]


@lru_cache(4096)
def _alike(shape: Sequence[int], strides: tuple[Strides, ...]) -> bool:
    """Tell whether tensors fill their memory without gaps, all in the same order."""
    if all(_contiguous(shape, stride) for stride in strides):
        return True
    stride = strides[0]
    if any(other != stride for other in strides):
        return False
    order = sorted(range(len(shape)), key=lambda i: (stride[i], shape[i]), reverse=True)
    return _contiguous([shape[i] for i in order], [stride[i] for i in order])


def _matrix_of(tensors: Sequence[Tensor | None]) -> tuple[int, int, Strides] | None:
    shape = next(x.shape for x in tensors if x is not None)
    return _matrix(shape, tuple([None if x is None else x.stride() for x in tensors]))


@lru_cache(4096)
def _matrix(
    shape: torch.Size, strides: tuple[Strides | None, ...]
) -> tuple[int, int, Strides] | None:
    """Rows, columns and row strides of all tensors seen as matrices of contiguous rows."""
    for split in range(len(shape) - 1, -1, -1):
        rows = [0 if stride is None else _row_stride(shape, stride, split) for stride in strides]
        if None not in rows:
            return shape[:split].numel(), shape[split:].numel(), tuple(rows)  # type: ignore[arg-type]
    return None


def _row_stride(shape: Sequence[int], stride: Strides, split: int) -> int | None:
    """The distance of rows, the dimensions from ``split`` on; None where there is not just one."""
    if not _contiguous(shape[split:], stride[split:]):
        return None
    outer = [(size, step) for size, step in zip(shape, stride, strict=True)][:split]
    outer = [(size, step) for size, step in outer if size != 1]
    if not outer:
        return 0
    distance = outer[-1][1]
    expected = distance
    for size, step in reversed(outer):
        if step != expected:
            return None
        expected *= size
    return distance


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
