"""Launching the kernels of _lora_kernels.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._lora_kernels import accumulate_kernel, gated_bwd_kernel, gated_fwd_kernel
from opake.kernels._triton import INTERPRETED, Launch, power_of_two

__all__ = [
    "ACCUMULATE",
    "GATED_BACKWARD",
    "GATED_FORWARD",
    "LONGEST",
    "DotTile",
    "LowRank",
    "accumulate",
    "gated",
    "pull_gated",
    "short",
]

LONGEST = 64
"""Ranks above are left to cuBLAS: what is read more of than of the product pays no longer."""


class DotTile(NamedTuple):
    """The block of one program."""

    rows: int
    cols: int
    warps: int
    steps: int = 16
    """How many blocks below each other a program adds up, where it adds up anything."""


class LowRank(NamedTuple):
    """``scale`` (G, N, R) @ (G, R, M), or (R, M), not computed yet; without ``right``, no more."""

    left: Tensor
    right: Tensor | None
    scale: float = 1.0

    @property
    def strides(self) -> tuple[int, ...]:
        """The rank, then what a kernel finds both by; the last dimension on the left is dense."""
        left, right = self.left, self.right
        first = (left.shape[2], left.stride(0), left.stride(1))
        if right is None:
            return (*first, 0, 0, 0)
        return (*first, right.stride(0) if right.dim() == 3 else 0, *right.stride()[-2:])


# ---- launchers

_SWEEP = [
    DotTile(rows, cols, warps)
    for rows, cols in ((16, 128), (16, 256), (32, 64), (32, 128), (64, 64))
    for warps in (4, 8)
]
_SUMS = [
    DotTile(16, cols, warps, steps) for cols, warps in ((64, 4), (128, 8)) for steps in (8, 16, 32)
]
ACCUMULATE = Launch(accumulate_kernel, {"": DotTile(16, 128, 4)}, _SWEEP)
GATED_FORWARD = Launch(gated_fwd_kernel, {"": DotTile(32, 64, 4)}, _SWEEP)
GATED_BACKWARD = Launch(gated_bwd_kernel, {"": DotTile(16, 64, 4, 32)}, _SUMS)  # others spill

_INTERPRETED = DotTile(32, 64, 1, 2)
_WIDE = DotTile(32, 64, 8)
"""Where products are of fp32 and take no tensor cores, which keeps both factors in registers."""


class _Plan(NamedTuple):
    grid: tuple[int, int, int]
    integers: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int
    steps: int


def _plan(
    launch: Launch, out: Tensor, products: tuple[LowRank | None, ...], sums: bool = False
) -> _Plan:
    """How ``out`` (G, N, M) is computed by blocks."""
    groups, rows, cols = out.shape
    tile = launch.tile(out.device, out.numel())
    wide = _wide(products)
    if not isinstance(tile, DotTile):
        tile = _INTERPRETED
    elif wide:
        tile = _WIDE
    row_blocks, col_blocks = -(-rows // tile.rows), -(-cols // tile.cols)
    steps = min(tile.steps, power_of_two(row_blocks)) if sums else 1
    row_blocks = -(-row_blocks // steps)
    longest, block_rank = _ranks(products)
    return _Plan(
        (groups * row_blocks * col_blocks, 1, 1),
        (rows, cols, row_blocks, col_blocks),
        (wide, tile.rows, tile.cols, block_rank, longest <= block_rank),
        tile.warps,
        steps,
    )


def _wide(products: tuple[LowRank | None, ...]) -> bool:
    return INTERPRETED or any(x.left.dtype == torch.float32 for x in products if x is not None)


def _ranks(products: tuple[LowRank | None, ...]) -> tuple[int, int]:
    """The longest rank, and how much of it a block takes."""
    longest = max((x.left.shape[2] for x in products if x is not None), default=1)
    in_registers = any(x.left.dtype == torch.float32 for x in products if x is not None)
    return longest, 16 if longest <= 16 or in_registers else 32


def short(products: tuple[LowRank | None, ...]) -> bool:
    """Whether no rank is longer than a block."""
    longest, block_rank = _ranks(products)
    return longest <= block_rank


def _strides(product: LowRank | None) -> tuple[int, ...]:
    return (0,) * 6 if product is None else product.strides


def _pointers(product: LowRank | None) -> tuple[Tensor | None, ...]:
    return (None, None) if product is None else (product.left, product.right)


def _scales(products: tuple[LowRank | None, ...]) -> tuple[float, ...]:
    return tuple([1.0 if product is None else product.scale for product in products])


def accumulate(out: Tensor, product: LowRank) -> None:
    """Add to ``out``, (G, N, M), contiguous."""
    if not out.numel():
        return
    right = product.right
    if right is not None and right.dim() == 2 and out.shape[0] > 1 and product.left.is_contiguous():
        out = out.view(1, -1, out.shape[2])
        product = product._replace(left=product.left.view(1, -1, product.left.shape[2]))
    how = _plan(ACCUMULATE, out, (product,))
    integers = (*how.integers, *product.strides)
    tensors = (out, *_pointers(product))
    ACCUMULATE(how.grid, tensors, integers, how.constants, how.warps, (product.scale,))


def gated(
    activation: str,
    gate: Tensor,
    up: Tensor,
    plus: tuple[LowRank | None, LowRank | None],
    out: Tensor | None = None,
) -> Tensor:
    """``activation(gate + plus[0]) * (up + plus[1])`` of (G, N, M)."""
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    how = _plan(GATED_FORWARD, out, plus)
    tensors = (gate, up, *_pointers(plus[0]), *_pointers(plus[1]), out)
    strides = (*gate.stride()[:2], *up.stride()[:2], *_strides(plus[0]), *_strides(plus[1]))
    constants = (activation, *how.constants)
    integers = (*how.integers, *strides)
    GATED_FORWARD(how.grid, tensors, integers, constants, how.warps, _scales(plus))
    return out


def pull_gated(
    activation: str,
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    plus: tuple[LowRank | None, LowRank | None, LowRank | None],
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up; the latter in the place of ``grad + plus[0]``, (G, N, M).

    ``plus[0]`` has no scale. With ``sums``, which :func:`short` must allow, also ``left^T hidden``
    of it, (G, R, M) in its dtype, what is hidden being
    ``activation(gate + plus[1]) * (up + plus[2])``.
    """
    dgate = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    how = _plan(GATED_BACKWARD, grad, plus, sums)
    parts, left = None, None if plus[0] is None else plus[0].left
    if sums and left is not None:
        shape = (grad.shape[0], how.integers[2], left.shape[2], grad.shape[2])
        parts = torch.empty(shape, dtype=torch.float32, device=grad.device)
    if grad.numel():
        pointers = [x for product in plus for x in _pointers(product)]
        strides = [n for product in plus for n in _strides(product)]
        integers = (*how.integers, *gate.stride()[:2], *up.stride()[:2], *strides)
        tensors = (grad, gate, up, *pointers, dgate, parts)
        constants = (activation, *how.constants, how.steps)
        GATED_BACKWARD(how.grid, tensors, integers, constants, how.warps, _scales(plus[1:]))
    if parts is None or left is None:
        return dgate, grad, None
    return dgate, grad, parts.sum(1).to(left.dtype)
