"""What functorch is doing right now, and what lies under its wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SYMBOLS = (
    ("torch._C", "_are_functorch_transforms_active", ()),
    ("torch._C", "_functorch.get_unwrapped", ()),
    ("torch._C", "_functorch.is_batchedtensor", ()),
    ("torch._C", "_functorch.is_functorch_wrapped_tensor", ()),
    ("torch._C", "_functorch.maybe_get_bdim", ()),
)


def transforms_active() -> bool:
    """Tell whether the caller runs inside a functorch transform (vmap, grad, jvp, ...).

    ``peek_interpreter_stack() is not None`` would be true under dynamo outside any transform.
    """
    return torch._C._are_functorch_transforms_active()


def needs_grad(tensor: Tensor) -> bool:
    """Tell whether any transform, or autograd beneath them all, differentiates by ``tensor``."""
    return any(level.requires_grad for level in levels(tensor))


def levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yield ``tensor`` as every functorch level has it, the plain one last."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        yield tensor
        tensor = functorch.get_unwrapped(tensor)
    yield tensor


def unwrap(tensor: Tensor) -> Tensor:
    """Return the plain tensor under every functorch level, mapped dimensions in front."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        inner = functorch.get_unwrapped(tensor)
        if functorch.is_batchedtensor(tensor):
            inner = inner.movedim(functorch.maybe_get_bdim(tensor), 0)
        tensor = inner
    return tensor
