"""Patched ``nn.Module`` instances: a derived class whose copies and pickles come out stock.

A module with live slots gets a cached subclass of its own class, which keeps the name and adds
nothing but ``__reduce_ex__`` and the like: ``copy``, ``deepcopy``, ``pickle`` and ``torch.save``
then see the stock class and the base values. The patched ``forward`` itself sits in the instance,
where ``torch.compile`` guards it. Only where a class wraps the ``forward`` of its subclasses (as
transformers' checkpointing layers do) does the derived class carry ``forward`` too, so that the
wrapping is kept; the instance then holds a function that calls the ``forward`` of its class.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from opake._lock import LOCK
from opake.engine.slots import MISSING, STOCK
from opake.errors import UnpatchableTarget

if TYPE_CHECKING:
    from opake.engine.stacks import Stack

KEY = "_opake_slots"
"""The one name that a patched module carries in its ``__dict__`` while it is patched."""

KEPT = ("_old_forward", "_original_forward")
"""Instance attributes under which accelerate keeps the ``forward`` it replaced."""

_NAMES = "_opake_names"
_LIBRARIES = ("torch", "transformers", "typing")
_SHARDERS = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls"),
    ("torch.distributed._composable.replicate_with_fsdp", "cls_to_replicate_cls"),
)
_DERIVED: dict[type, type] = {}
_SHARED: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


class Table(dict[str, "Stack"]):
    """The stacks of one module, and its stock class."""

    def __init__(self, stock: type) -> None:
        super().__init__()
        self.stock = stock

    def __reduce__(self) -> tuple[Any, ...]:
        # Whoever copies a module's __dict__ by hand gets no stacks with it.
        return type(None), ()


class _Entry(NamedTuple):
    """How a function becomes the ``forward`` of the instances of one stock class."""

    derived: type
    function: Any  # what the instance binds


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
        derived = derive(type(module))
        found = vars(module)[KEY] = Table(type(module))
        _change_class(module, found.stock, derived)
    return found


def release(module: nn.Module, key: str) -> None:
    """Forget the stack under ``key``; with the last one, restore the stock class."""
    found: Table | None = vars(module).get(KEY)
    if found is None:
        return
    found.pop(key, None)
    if not found:
        _change_class(module, found.stock, found.stock)
        del vars(module)[KEY]


def bind(module: nn.Module, function: Any) -> types.MethodType:
    """Return ``function`` as the bound ``forward`` of ``module``."""
    stock = stock_class(module)
    if _wraps_forward(stock):
        function = _entry(stock, function).function
    return types.MethodType(function, module)


def unwrap(function: Any) -> Any:
    """Return what was given to :func:`bind` where ``function`` comes from there."""
    entry, inner = getattr(function, "_opake_entry", (None, None))
    return inner if entry is function else function  # functools.wraps copies attributes


def follow_forward(module: nn.Module, forward: Any) -> None:
    """Make the class of ``module`` the one that belongs to ``forward``, the top of its stack."""
    found: Table | None = vars(module).get(KEY)
    if found is None or not _wraps_forward(found.stock):
        return
    bound = getattr(forward, "__func__", None)
    function = unwrap(bound)
    ours = function is not bound
    wanted = _entry(found.stock, function).derived if ours else derive(found.stock)
    _change_class(module, found.stock, wanted)


def derive(stock: type) -> type:
    """Return the cached subclass of ``stock`` for patched instances.

    Raises :class:`~opake.errors.UnpatchableTarget` where it cannot be subclassed.
    """
    if stock not in _DERIVED:
        _DERIVED.setdefault(stock, _make(stock, {}))
    return _DERIVED[stock]


def _wraps_forward(stock: type) -> bool:
    return "forward" in vars(derive(stock))


def _entry(stock: type, function: Any) -> _Entry:
    # The stock class wraps the forward of every subclass, so the patched one goes through it too.
    # Kept on the function: a cache here would keep every closure ever patched in alive.
    made: dict[type, _Entry] = vars(function).setdefault("_opake_entries", {})
    if stock not in made:
        derived = _make(stock, {"forward": function})

        # By way of the class: it may have been subclassed since, and the outermost wrapper acts.
        @functools.wraps(function, updated=())
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs)

        forward._opake_entry = (forward, function)  # type: ignore[attr-defined]
        made[stock] = _Entry(derived, forward)
    return made[stock]


# ---- the derived class


def _make(stock: type, namespace: dict[str, Any]) -> type:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        return _reduce_as(stock, self, protocol)

    def _replicate_for_data_parallel(self: Any) -> Any:
        replica = stock._replicate_for_data_parallel(self)  # type: ignore[attr-defined]
        forward = vars(replica).get("forward")
        if isinstance(forward, types.MethodType) and forward.__self__ is self:
            vars(replica)["forward"] = types.MethodType(forward.__func__, replica)
        return replica

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # `type(model)(config)` makes a model of the stock class, which outlives the scope.
        if STOCK in vars(cls) and (args or kwargs):
            return stock(*args, **kwargs)
        own: Any = stock.__new__
        return own(cls) if own is object.__new__ else own(cls, *args, **kwargs)

    namespace = {
        **namespace,
        **_copiers(stock),
        "__new__": new,
        STOCK: stock,
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__reduce_ex__": reduce_ex,
        "_replicate_for_data_parallel": _replicate_for_data_parallel,
    }
    try:
        derived: type = _subclass(stock, namespace)
    except Exception as error:
        raise UnpatchableTarget(
            f"{stock.__module__}.{stock.__qualname__} cannot be subclassed, which an instance "
            f"patch needs: {error}"
        ) from error
    type.__setattr__(derived, _NAMES, {*vars(derived), _NAMES})
    return derived


def _subclass(stock: Any, namespace: dict[str, Any]) -> Any:
    """Return a subclass of ``stock`` that the registering hooks of its bases do not see.

    An ``__init_subclass__`` often registers what is defined, and ours has the name of the class
    it stands for. Hooks of libraries, and those that deal with ``forward``, run: checkpointing
    layers wrap it there.
    """
    hooks = [base for base in stock.__mro__[:-1] if "__init_subclass__" in vars(base)]
    wanted = [base for base in hooks if _is_wanted(base)]
    if hooks == wanted:
        return type(stock)(stock.__name__, (stock,), namespace)
    derived = type(stock)(stock.__name__, (nn.Module,), namespace)
    derived.__bases__ = (stock,)
    for base in wanted[:1]:
        vars(base)["__init_subclass__"].__func__(derived)
    return derived


def _is_wanted(base: type) -> bool:
    hook = getattr(vars(base)["__init_subclass__"], "__func__", None)
    code = getattr(hook, "__code__", None)
    return base.__module__.partition(".")[0] in _LIBRARIES or (
        code is not None and "forward" in code.co_names
    )


def _hand_down(derived: type) -> None:
    """Move what somebody else wrote on ``derived`` to the stock class, where they meant it."""
    names: set[str] = vars(derived)[_NAMES]
    if len(vars(derived)) == len(names):
        return
    for name in [name for name in vars(derived) if name not in names]:
        if not name.startswith("__"):  # those are caches of copyreg, abc and the like
            type.__setattr__(vars(derived)[STOCK], name, vars(derived)[name])
            type.__delattr__(derived, name)


def _copiers(stock: type) -> dict[str, Any]:
    """Return the copy methods that ``stock`` has of its own, run on a stock stand-in."""

    def delegate(name: str) -> Any:
        own = getattr(stock, name)

        @functools.wraps(own)
        def copier(self: nn.Module, *args: Any) -> Any:
            return own(_stand_in(stock, self), *args)

        return copier

    return {name: delegate(name) for name in ("__copy__", "__deepcopy__") if hasattr(stock, name)}


def _reduce_as(stock: Any, module: Any, protocol: Any) -> Any:
    # A class made of ours by somebody else (torch's parametrize) answers for itself.
    ours = STOCK in vars(type(module))
    reduced = stock.__reduce_ex__(_stand_in(stock, module) if ours else module, protocol)
    if not isinstance(reduced, tuple):
        return reduced
    construct, args, *rest = reduced
    # pickle insists that the class given to __newobj__ is that of the object: go round it.
    if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
        cls, *more = args
        construct, args = cls.__new__, (cls, *more)
        if not more and construct is object.__new__:
            construct, args = copyreg._reconstructor, (cls, object, None)  # type: ignore[attr-defined]
    elif construct is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
        cls, more, named = args
        construct, args = functools.partial(cls.__new__, cls, *more, **named), ()
    return construct, args, *rest


def _stand_in(stock: type, module: nn.Module) -> Any:
    """Return a stock object with the attributes that ``module`` has outside any scope."""
    with LOCK:  # no scope may leave between the look at the slots and the look at the stacks
        state = clean_state(module)
    stand_in: Any = object.__new__(stock)
    vars(stand_in).update(state)
    members = (member for base in stock.__mro__ for member in vars(base).values())
    for member in members:
        if isinstance(member, types.MemberDescriptorType):  # __slots__
            with contextlib.suppress(AttributeError):  # unset
                member.__set__(stand_in, member.__get__(module))
    return stand_in


def clean_state(module: nn.Module) -> dict[str, Any]:
    """Return the instance attributes with the base values in every slot that is ours."""
    state = dict(vars(module))
    state.pop(KEY, None)
    for name, stack in table(module).items():
        if stack.is_ours(state.get(name, MISSING)):
            _put(state, name, stack.base)
        elif name == "forward":
            # accelerate came in between: what it keeps is ours.
            for kept in KEPT:
                if stack.is_ours(state.get(kept, MISSING)):
                    state[kept] = below(module, stack.base)
    return state


def below(module: nn.Module, forward: Any) -> Any:
    """Return the bound ``forward`` that a base value stands for."""
    if forward is MISSING:
        return types.MethodType(stock_class(module).forward, module)  # type: ignore[attr-defined]
    return forward


def is_stock(module: nn.Module, forward: Any) -> bool:
    """Tell whether ``forward`` is the module's own, or what the decorators of that wrap.

    accelerate leaves such a method behind when it removes its wrappers.
    """
    if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
        return False
    function = stock_class(module).forward  # type: ignore[attr-defined]
    while function is not None and function is not forward.__func__:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _put(state: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        state.pop(name, None)
    else:
        state[name] = value


# ---- changing the class of an instance


def _change_class(module: nn.Module, stock: type, new: type) -> None:
    cls = type(module)
    if cls is new:
        return
    if cls is stock or vars(cls).get(STOCK) is stock:
        if cls is not stock:
            _hand_down(cls)
        try:
            object.__setattr__(module, "__class__", new)
        except TypeError as error:
            del vars(module)[KEY]
            raise UnpatchableTarget(
                f"{stock.__qualname__} instances cannot be patched: {error}"
            ) from error
        return
    for dynamic in cls.__mro__:
        for ours in dynamic.__bases__:
            if vars(ours).get(STOCK) is stock and ours is not new:
                _change_base(module, dynamic, ours, new)
                return


def _change_base(module: nn.Module, dynamic: type, ours: type, new: type) -> None:
    """Replace ``ours`` by ``new`` under a class that was made of it inside the scope."""
    for name, attribute in _SHARDERS:
        classes: dict[type, type] = getattr(sys.modules.get(name), attribute, {})
        if classes.get(ours) is dynamic:  # torch keeps it for all modules of a class
            del classes[ours]
            _SHARED[dynamic] = classes
    wrapper = vars(dynamic).get("forward")
    around_ours = "forward" in vars(ours) and _wrapped(wrapper) is vars(ours)["forward"]
    bases = tuple(new if base is ours else base for base in dynamic.__bases__)
    if dynamic in _SHARED and dynamic is type(module):
        skip = ("__dict__", "__weakref__", *(("forward",) if around_ours else ()))
        made = _SHARED[dynamic]
        if new not in made:
            namespace = {key: value for key, value in vars(dynamic).items() if key not in skip}
            meta: Any = type(dynamic)
            made[new] = meta(dynamic.__name__, bases, namespace)
        object.__setattr__(module, "__class__", made[new])
        return
    dynamic.__bases__ = bases
    if around_ours:
        type.__delattr__(dynamic, "forward")


def _wrapped(function: Any) -> Any:
    return getattr(function, "__wrapped__", None)
