"""New functions made of old ones: a ``forward`` in a wrapper, a ``forward`` with private globals.

Results are cached, so that entering a scope again installs the very same function and
``torch.compile`` finds its graphs again. The cache is for ever, so only what lives for ever goes
in: functions of classes, wrapped by functions of modules. The patches themselves keep the rest.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from opake.engine.splice import contents
from opake.errors import MissingTarget

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

_COMPOSED: dict[tuple[Any, Any], types.FunctionType] = {}
_PERMANENT: set[types.FunctionType] = set()


def compose(inner: Any, wrapper: Wrapper, *, permanent: bool) -> types.FunctionType:
    """Return ``forward(self, ...)`` that calls ``wrapper(wrapped, self, args, kwargs)``.

    ``inner`` takes ``self``. The result is cached for ever where ``inner`` is ``permanent`` (it
    came from a class, not from an instance) and ``wrapper`` is a module-level function.
    """
    permanent = (permanent or inner in _PERMANENT) and _is_permanent(wrapper)
    if permanent and (inner, wrapper) in _COMPOSED:
        return _COMPOSED[inner, wrapper]

    @functools.wraps(inner, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # partial, not MethodType: dynamo cannot trace a bound method that is built here.
        return wrapper(functools.partial(inner, self), self, args, kwargs)

    assert isinstance(forward, types.FunctionType)
    # accelerate, unwrapping a model, takes what it finds at the end of the chain of __wrapped__.
    del forward.__wrapped__
    with contextlib.suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(inner)
    if permanent:
        _COMPOSED[inner, wrapper] = forward
        _PERMANENT.add(forward)
    return forward


def compose_over(inner: Callable[..., Any], wrapper: Wrapper) -> types.FunctionType:
    """Return the same as :func:`compose` for an ``inner`` that takes no ``self``."""

    @functools.wraps(inner, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, self, args, kwargs)

    assert isinstance(forward, types.FunctionType)
    # inspect.signature drops the first parameter of a bound method; inner has no self to drop.
    del forward.__wrapped__
    _copy_signature(inner, forward)
    return forward


def rebind(function: Any, replacements: Mapping[str, Any], *, permanent: bool = True) -> Any:
    """Return a copy of ``function`` that sees ``replacements`` in place of its module's globals.

    The functions that read the names may sit anywhere in a chain of decorators: every function
    on the way is copied with them, and nothing of the original is written. The other globals are
    those that the module has now; calling again brings them up to date.
    Raises :class:`~opake.errors.MissingTarget` where no function of the chain reads them.
    """
    permanent = (permanent or function in _PERMANENT) and all(
        map(_is_permanent, replacements.values())
    )
    # Names are unique, so sorting never compares two functions.
    key = (function, tuple(sorted(replacements.items()))) if permanent else None
    clone: Any = _COMPOSED.get(key) if key is not None else None
    if clone is None:
        cloner = _Cloner(replacements)
        clone = cloner.clone(function)
        if clone is function:
            raise MissingTarget(
                f"{function.__module__}.{function.__qualname__} reads none of "
                f"{', '.join(replacements)}"
            )
        clone._opake_cloner = cloner
        if key is not None:
            _COMPOSED[key] = clone
            _PERMANENT.add(clone)
    refresh(clone)
    return clone


def refresh(clone: Any) -> None:
    """Take up what the module's globals have become since the clone was made."""
    cloner: _Cloner = clone._opake_cloner
    for live, private, names in cloner.namespaces.values():
        private.update({name: live[name] for name in names if name in live})
        private.update({name: cloner.replacements[name] for name in names & {*cloner.replacements}})


class _Cloner:
    """Copies functions, and what they close over, for one set of replacements."""

    def __init__(self, replacements: Mapping[str, Any]) -> None:
        self.replacements = dict(replacements)
        # Of each module: its globals, the private ones, and the names that are read from them.
        self.namespaces: dict[int, tuple[dict[str, Any], dict[str, Any], set[str]]] = {}
        self._made: dict[types.FunctionType, Any] = {}

    def clone(self, function: Any) -> Any:
        """Return a copy of ``function``, or ``function`` where nothing of it reads the names."""
        if not isinstance(function, types.FunctionType):
            return self._clone_object(function)
        if function in self._made:
            return self._made[function]
        self._made[function] = function  # a function may close over itself
        old = [(cell, contents(cell)) for cell in function.__closure__ or ()]
        new = [(cell, held, self.clone(held)) for cell, held in old]
        cells = tuple(cell if to is held else types.CellType(to) for cell, held, to in new)
        space = self._namespace(function)
        if space is function.__globals__ and all(to is held for _, held, to in new):
            return function
        made = self._made[function] = _copy(function, space, cells)
        if "__wrapped__" in vars(made):
            made.__wrapped__ = self.clone(made.__wrapped__)  # type: ignore[attr-defined]
        return made

    def _clone_object(self, item: Any) -> Any:
        """Copy a callable object that wraps a function, as accelerate's mixed precision makes."""
        if isinstance(item, type) or not (callable(item) and "__wrapped__" in _attributes(item)):
            return item
        old = _attributes(item)
        new = {name: self.clone(value) for name, value in old.items()}
        if all(new[name] is value for name, value in old.items()):
            return item
        made: Any = object.__new__(type(item))  # it may refuse to be copied
        vars(made).update(new)
        return made

    def _namespace(self, function: types.FunctionType) -> dict[str, Any]:
        live, names = function.__globals__, _names(function.__code__)
        if not names & set(self.replacements) & set(live):
            return live
        # No __name__ (unless it is read): dynamo would look the globals up in the module of that
        # name, and guard what it finds there.
        always = {"__builtins__", "__package__", "__spec__"}
        _, private, wanted = self.namespaces.setdefault(id(live), (live, {}, always))
        wanted |= names
        return private


def _copy(
    function: types.FunctionType, space: dict[str, Any], cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__,
        space,
        function.__name__,
        function.__defaults__,
        cells if function.__closure__ else None,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function, updated=())
    del made.__wrapped__  # type: ignore[attr-defined]
    # What the engine notes on a function is about that one function.
    vars(made).update((k, v) for k, v in vars(function).items() if not k.startswith("_opake_"))
    return made


def _attributes(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(item, "__dict__", {})
    return found


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _is_permanent(function: Any) -> bool:
    if isinstance(function, type) or getattr(function, "_opake_permanent", False):
        return True  # the mark: made by a cached factory
    return isinstance(function, types.FunctionType) and "<locals>" not in function.__qualname__


def _copy_signature(source: Callable[..., Any], target: Any) -> None:
    try:
        signature = inspect.signature(source)
    except (TypeError, ValueError):
        return
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self, *signature.parameters.values()]
    if all(p.name != "self" for p in parameters[1:]):
        target.__signature__ = signature.replace(parameters=parameters)
