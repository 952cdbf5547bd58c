"""What functorch is doing right now, and what lies under its wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

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


def in_mode(mode: Callable[[Any], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Return a wrapper that runs a module in ``mode(module)`` under a transform.

    A graph that dynamo traces has stock's operators, which its compiler takes apart itself.
    """

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not transforms_active() or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        with mode(instance):
            return wrapped(*args, **kwargs)

    forward._opake_permanent = True  # type: ignore[attr-defined]
    return forward


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
