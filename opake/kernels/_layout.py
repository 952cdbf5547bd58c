"""Seeing a tensor as groups of rows, the shape that row kernels take, without copying it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "as_output", "empty_like", "grouped", "rows_of"]


class Rows(NamedTuple):
    """A tensor seen as (groups, rows, H), H contiguous, by its strides alone.

    Views cost microseconds each, which a small kernel has not got.
    """

    tensor: Tensor
    groups: int
    rows: int
    cols: int
    group_stride: int
    row_stride: int


def rows_of(x: Tensor, batch: int) -> Rows:
    """See ``x`` (batch dimensions, dimensions of rows, H) as rows, copied only where it must be."""
    if not batch and x.is_contiguous():
        cols = x.shape[-1]
        return Rows(x, 1, x.numel() // cols if cols else 0, cols, 0, cols)
    view = grouped(x, batch)
    groups, rows, cols = view.shape
    return Rows(view, groups, rows, cols, view.stride(0), view.stride(1))


def grouped(x: Tensor, batch: int, inner: int = 1) -> Tensor:
    """Return ``x`` as (groups, rows, its last ``inner`` dimensions), a copy only where it must be.

    Args:
        x: (batch dimensions, dimensions of rows, ``inner`` dimensions).
        batch: how many leading dimensions are folded into groups. Without any there is one group.
        inner: how many trailing dimensions a row keeps. The last one comes out contiguous.
    """
    shape = x.shape
    split = len(shape) - inner
    if x.stride(-1) != 1 and shape[-1] > 1:
        x = x.contiguous()
    if not batch:
        if split == 1:
            return x.unsqueeze(0)
        return x.reshape(1, _numel(shape[:split]), *shape[split:])
    if batch == 1 and split == 2:
        return x
    return x.reshape(_numel(shape[:batch]), _numel(shape[batch:split]), *shape[split:])


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty, contiguous tensor of the shape and device of ``x``."""
    if not x.is_contiguous():
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_like(x) if dtype is None else torch.empty_like(x, dtype=dtype)


def as_output(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` in another shape, for good: autograd lets nobody write to views it was given."""
    found: Tensor = torch.ops.aten._unsafe_view(x, shape)
    return found
