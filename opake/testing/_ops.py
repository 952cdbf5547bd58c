"""Registered operators as what is compared: drawn examples, judged where kernels run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from opake import kernels
from opake.kernels import Draw, Op
from opake.testing._transforms import TRANSFORMS, Example, check, drawn

__all__ = ["example_of", "kernel_dtypes", "right"]


class _LargeDraw(Draw):
    """Draws shapes of up to half a million times two thousand elements."""

    def shape(self, *, min_dims: int = 0, max_dims: int = 4, max_elements: int = 2048) -> list[int]:
        room = max_elements << self.integer(0, 11)
        return super().shape(min_dims=min_dims, max_dims=max_dims, max_elements=room)


def example_of(
    op: Op,
    integer: Callable[[int, int], int],
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    *,
    large: bool = False,
    transforms: Sequence[str] = TRANSFORMS,
) -> Example:
    """Draw a call of ``op`` and what to do with it, from ``integer(low, high)``."""
    draw = (_LargeDraw if large else Draw)(integer, device, dtypes)
    return drawn(integer, op.examples(draw), transforms)


def right(op: Op, example: Example) -> bool:
    """Assert that ``op`` is right however small the example is; return whether its kernels ran."""
    with kernels.config(min_elements=0):
        return check(
            op.function,
            op.reference,
            example,
            ran=lambda: kernels.last_backend(op) == "triton",
        )


def kernel_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """What kernels compute there; Triton's interpreter does not know bf16 by itself."""
    from opake.kernels._triton import interprets_bfloat16

    halves: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    if device.startswith("cpu") and not interprets_bfloat16():
        halves = (torch.float16,)
    return (torch.float32, *halves)
