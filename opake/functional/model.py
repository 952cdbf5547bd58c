"""A model as a function of its trainable parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from opake.errors import InvalidArgument, NotAModel


def make_functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Split a model into a function and its trainable parameters.

    Returns ``(fmodel, params)``. ``params`` maps the name of every parameter that requires a
    gradient to a detached tensor over the same memory; tied parameters appear once, under their
    first name. ``fmodel(params, *args, **kwargs)`` calls the model with these in place of its own
    and follows `torch.func.functional_call`: tied weights stay tied, and names that ``params``
    leaves out keep the model's own values.

    Raises `NotAModel` if ``model`` is no ``nn.Module``, `InvalidArgument` if nothing in it is
    trainable.
    """
    if not isinstance(model, nn.Module):
        raise NotAModel(
            f"make_functional: expected a torch.nn.Module, found {type(model).__name__}; "
            "pass the model itself"
        )
    params = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not params:
        raise InvalidArgument(
            f"make_functional: {type(model).__name__} has no parameter that requires a gradient; "
            "call requires_grad_(True) on what shall be trained, or add adapters, and try again"
        )

    def fmodel(params: dict[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        return functional_call(model, params, args, kwargs)

    return fmodel, params
