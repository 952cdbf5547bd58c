"""Refusing indices that point outside, on the CPU, where PyTorch refuses them too."""

from __future__ import annotations

import torch
from torch import Tensor

from opake.kernels._guard import launchable

__all__ = ["check_indices"]


def check_indices(name: str, indices: Tensor, size: int, ignored: int | None = None) -> None:
    """Raise where an index on the CPU is neither in [0, ``size``) nor ``ignored``.

    All mapped examples are looked at. On a GPU nothing is: to look is to wait for it.

    Raises:
        IndexError: there is such an index; the message has the first.
    """
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        return
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(indices):
        indices = functorch.get_unwrapped(indices)
    if not launchable((indices,)):
        return
    outside = (indices < 0) | (indices >= size)
    if ignored is not None:
        outside &= indices != ignored
    if outside.any():
        first = indices[outside][0].item()
        raise IndexError(f"{name} holds {first}, which is outside of the {size} there are")
