"""Looking at modules: the forward that their class has, and one that somebody else put there."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from typing import Any

from torch import nn

from opake.engine.reclass import is_stock, stock_class, table
from opake.engine.splice import MARK
from opake.errors import ForeignWrite

KEPT = "_old_forward"


@functools.cache
def _names(forward: Any) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in found if p.kind in kinds)[1:]


def built_class(module: nn.Module) -> Any:
    """Return the class that a module was built as, beneath our own and FSDP's."""
    return _beneath_fsdp(stock_class(module))


@functools.cache
def _beneath_fsdp(cls: type) -> type:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = () if fsdp is None else fsdp.FSDPModule
    return next(c for c in cls.__mro__ if not issubclass(c, sharded))


def stock_method(module: nn.Module, name: str = "forward") -> Any:
    """Return the function that the module's own class has under ``name``."""
    return getattr(stock_class(module), name)


def is_of_file(function: Any, cls: type) -> bool:
    """Tell whether a method was written where its class was, or elsewhere in transformers.

    Somebody may have put another in its place.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    home = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if code is None:
        return False
    upstream = os.path.dirname(str(importlib.import_module("transformers").__file__)) + os.sep
    return bool(code.co_filename == home or code.co_filename.startswith(upstream))


def own_slot(module: nn.Module, method: str = "forward") -> str:
    """Return where the module's own method is: under accelerate's hook, what the hook kept."""
    return KEPT if method == "forward" and KEPT in vars(module) else method


def positional(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of ``module.forward``."""
    # A subclass's forward(*args, **kwargs) takes what its base takes.
    named = (_names(cls.forward) for cls in stock_class(module).__mro__ if hasattr(cls, "forward"))
    return next(filter(None, named), ())


def foreign_forward(module: nn.Module) -> str | None:
    """Name whoever gave this instance a ``forward`` of its own that we cannot wrap, or None."""
    forward = vars(module).get("forward")
    if forward is None or "forward" in table(module):
        return None
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    if is_stock(module, forward):
        return None
    known = ("_hf_hook", "_old_forward", "_original_forward")
    if any(name in vars(module) for name in known) or hasattr(function, MARK):
        return None
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def refuse_foreign_forward(module: nn.Module) -> None:
    """Raise :class:`~opake.errors.ForeignWrite` where :func:`foreign_forward` finds one."""
    owner = foreign_forward(module)
    if owner is not None:
        raise ForeignWrite(
            f"{stock_class(module).__qualname__} instance has a forward of its own already, from "
            f"{owner}: undo that first, or open the scope before it is put there"
        )
