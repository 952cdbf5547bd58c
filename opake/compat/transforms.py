"""What functorch is doing right now, and what lies under its wrappers."""

from __future__ import annotations

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
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def unwrap(tensor: Tensor) -> Tensor:
    """Return the plain tensor under every functorch level, mapped dimensions in front."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        inner = functorch.get_unwrapped(tensor)
        if functorch.is_batchedtensor(tensor):
            inner = inner.movedim(functorch.maybe_get_bdim(tensor), 0)
        tensor = inner
    return tensor
