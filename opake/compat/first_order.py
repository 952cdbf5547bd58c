"""Gradients that keep no graph of themselves.

``torch.func.grad`` runs its backward with ``create_graph=True`` always, so that it can be
differentiated again, and with that keeps every intermediate of the backward alive. Under
``torch.no_grad`` nobody can differentiate its result; there it needs first-order state only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

SYMBOLS = (
    (
        "torch._functorch.eager_transforms",
        "grad_and_value_impl",
        ("func", "argnums", "has_aux", "args", "kwargs"),
    ),
    (
        "torch._functorch.eager_transforms",
        "_autograd_grad",
        ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    ),
)


def autograd_grad(*args: Any, **kwargs: Any) -> Any:
    """Run functorch's ``_autograd_grad`` without a graph of the backward."""
    return eager_transforms._autograd_grad(*args, **{**kwargs, "create_graph": False})


@functools.cache
def grad_and_value(stock: Callable[..., Any], first_order: Callable[..., Any]) -> Any:
    """Return ``stock``, except under ``no_grad`` at entry, where it is ``first_order``.

    A transform nested inside enters with gradients enabled and is stock again.
    """

    @functools.wraps(stock)
    def grad_and_value_impl(*args: Any, **kwargs: Any) -> Any:
        # Forward mode, from outside, is a second order too.
        second = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if second or torch.compiler.is_compiling():
            return stock(*args, **kwargs)
        return first_order(*args, **kwargs)

    return grad_and_value_impl
