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

    def fmodel_by_slots(params: dict[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        return functional_call(model, _by_slots(model, params), args, kwargs, tie_weights=False)

    return (fmodel_by_slots if _shares_modules(model) else fmodel), params


def _shares_modules(model: nn.Module) -> bool:
    every = [module for _, module in model.named_modules(remove_duplicate=False)]
    return len({id(module) for module in every}) < len(every)


def _by_slots(model: nn.Module, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name every place that holds a parameter of ``params`` once.

    ``functional_call`` fills a module that has two names twice, and then puts back as the
    parameter what it had put there first.
    """
    owners = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    slots: dict[tuple[int, str], tuple[str, Tensor]] = {}
    given: dict[Tensor, Tensor] = {}
    others = dict(params)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix, _, attribute = name.rpartition(".")
        slots.setdefault((owners[prefix], attribute), (name, parameter))
        if name in others:
            given[parameter] = others.pop(name)
    return others | {name: given[x] for name, x in slots.values() if x in given}
