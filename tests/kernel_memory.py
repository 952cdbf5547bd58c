"""Memory larger than the machine's, of which tests touch a few pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE: untouched pages are nobody's."""


def far(x: Tensor, dim: int) -> Tensor:
    """A copy of ``x`` in which ``dim``'s last index begins past 2**31 elements."""
    size = x.shape[dim]
    inner = x.movedim(dim, 0)[0]
    step = -(-(2**31 + 64) // (size - 1)) // 64 * 64 + 64
    elements = (size - 1) * step + inner.numel() + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, elements * x.element_size(), flags), dtype=x.dtype)
    strides = _contiguous(inner.shape)
    strides.insert(dim, step)
    return memory.as_strided(x.shape, strides).copy_(x)


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides
