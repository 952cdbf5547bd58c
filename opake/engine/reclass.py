"""Patched ``nn.Module`` instances: a derived class whose copies and pickles come out stock.

A module with live slots gets a cached subclass of its own class, which keeps the name and adds
nothing but ``__reduce_ex__``: ``copy``, ``deepcopy``, ``pickle`` and ``torch.save`` then see the
stock class and the base values. The patched ``forward`` itself sits in the instance, where
``torch.compile`` guards it. Only where a class wraps the ``forward`` of its subclasses (as
transformers' checkpointing layers do) does the derived class carry ``forward`` too, so that the
wrapping is kept.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from opake.engine.slots import MISSING
from opake.errors import UnpatchableTarget

if TYPE_CHECKING:
    from opake.engine.stacks import Stack

KEY = "_opake_slots"
"""The one name that a patched module carries in its ``__dict__`` while it is patched."""


class Table(dict[str, "Stack"]):
    """The stacks of one module, with its stock class and the sets that hold it."""

    def __init__(self, stock: type) -> None:
        super().__init__()
        self.stock = stock
        self.derived = stock
        self.holders: list[Any] = []


def table(module: nn.Module) -> dict[str, Stack]:
    """Return the stacks of ``module``, empty where it is not patched."""
    return vars(module).get(KEY) or {}


def stock_class(module: nn.Module) -> type:
    """Return the class that ``module`` has outside any scope."""
    found = vars(module).get(KEY)
    return found.stock if found is not None else type(module)


def adopt(module: nn.Module) -> Table:
    """Give ``module`` a table of stacks and its derived class."""
    found: Table | None = vars(module).get(KEY)
    if found is None:
        derived = _derived(type(module))
        found = vars(module)[KEY] = Table(type(module))
        _change_class(module, found, derived)
    return found


def release(module: nn.Module, key: str) -> None:
    """Forget the stack under ``key``; with the last one, restore the stock class."""
    found: Table | None = vars(module).get(KEY)
    if found is None:
        return
    found.pop(key, None)
    if not found:
        _change_class(module, found, found.stock)
        del vars(module)[KEY]


def bind(module: nn.Module, function: Any) -> types.MethodType:
    """Return ``function`` as the bound ``forward`` of ``module``."""
    derived = _with_forward(stock_class(module), function)
    return types.MethodType(vars(derived).get("forward", function), module)


def follow_forward(module: nn.Module) -> None:
    """Make the class of ``module`` the one that belongs to its present ``forward``."""
    found: Table | None = vars(module).get(KEY)
    if found is None:
        return
    function = getattr(vars(module).get("forward"), "__func__", None)
    wanted = getattr(function, "_opake_class", None)
    if wanted is None or wanted.__base__ is not found.stock:
        wanted = _derived(found.stock)
    if wanted is not found.derived:
        _change_class(module, found, wanted)


def clean_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the instance ``state`` with the base values in every slot that is ours."""
    state = dict(state)
    state.pop(KEY, None)
    for name, stack in table(module).items():
        if not stack.is_ours(state.get(name, MISSING)):
            continue
        if stack.base is MISSING:
            state.pop(name, None)
        else:
            state[name] = stack.base
    return state


@functools.cache
def _derived(stock: type) -> type:
    return _make(stock, {})


def _with_forward(stock: type, function: Any) -> type:
    plain = _derived(stock)
    if "forward" not in vars(plain):
        return plain
    # The stock class wraps the forward of every subclass, so the patched one goes through it too.
    # Kept on the function: a cache here would keep every closure ever patched in alive.
    made: dict[type, type] = vars(function).setdefault("_opake_classes", {})
    if stock not in made:
        derived = made[stock] = _make(stock, {"forward": function})
        vars(derived)["forward"]._opake_class = derived
    return made[stock]


def _make(stock: type, namespace: dict[str, Any]) -> type:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = stock.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        construct, args, *rest = reduced
        if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
            construct, args = copyreg._reconstructor, (stock, object, None)  # type: ignore[attr-defined]
        args = tuple(stock if isinstance(arg, type) and arg is type(self) else arg for arg in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = clean_state(self, rest[0])
        return construct, args, *rest

    def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
        replica = stock._replicate_for_data_parallel(self)  # type: ignore[attr-defined]
        forward = vars(replica).get("forward")
        if getattr(forward, "__self__", None) is self:
            vars(replica)["forward"] = types.MethodType(forward.__func__, replica)  # type: ignore[union-attr]
        return replica

    namespace = {
        **namespace,
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
    }
    try:
        return type(stock)(stock.__name__, (stock,), namespace)
    except Exception as error:
        raise UnpatchableTarget(
            f"{stock.__module__}.{stock.__qualname__} cannot be subclassed, which an instance "
            f"patch needs: {error}"
        ) from error


def _change_class(module: nn.Module, found: Table, new: type) -> None:
    old = found.derived
    if type(module) is old:
        try:
            object.__setattr__(module, "__class__", new)
        except TypeError as error:
            del vars(module)[KEY]
            raise UnpatchableTarget(
                f"{old.__qualname__} instances cannot be patched: {error}"
            ) from error
    elif old in type(module).__mro__:
        _splice_bases(type(module), old, new)
    found.derived = new


def _splice_bases(dynamic: type, old: type, new: type) -> None:
    """Replace ``old`` by ``new`` under a class that was made from ours inside the scope."""
    dynamic.__bases__ = tuple(new if base is old else base for base in dynamic.__bases__)
    if "forward" in vars(dynamic) and "forward" in vars(old):
        type.__delattr__(dynamic, "forward")  # a wrapper made around our forward
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    classes = getattr(fsdp, "cls_to_fsdp_cls", {})
    for key in [key for key in classes if key is old]:
        del classes[key]
