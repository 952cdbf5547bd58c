"""New functions made of old ones: a wrapper around a ``forward``, a ``forward`` with private globals.

Results are cached, so that entering a scope again installs the very same function and
``torch.compile`` finds its graphs again.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from opake.errors import MissingTarget

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

_COMPOSED: dict[tuple[Any, Any], Any] = {}
_PERMANENT: set[types.FunctionType] = set()


def compose(inner: Any, wrapper: Wrapper, *, permanent: bool) -> types.FunctionType:
    """Return ``forward(self, ...)`` that calls ``wrapper(wrapped, self, args, kwargs)``.

    ``inner`` takes ``self``. The result is cached for ever where ``inner`` is ``permanent`` (it
    came from a class, not from an instance) and ``wrapper`` is a module-level function.
    """
    permanent = (permanent or inner in _PERMANENT) and _is_module_level(wrapper)
    if permanent and (inner, wrapper) in _COMPOSED:
        return _COMPOSED[inner, wrapper]

    @functools.wraps(inner, updated=())
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # partial, not MethodType: dynamo cannot trace a bound method that is built here.
        return wrapper(functools.partial(inner, self), self, args, kwargs)

    assert isinstance(forward, types.FunctionType)
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

    The function that reads the names may sit at the bottom of a chain of decorators: every
    function on the way is copied with it, and nothing of the original is written.
    Raises :class:`~opake.errors.MissingTarget` where no function of the chain reads them.
    """
    permanent = permanent or function in _PERMANENT
    key = (function, tuple(sorted(replacements.items(), key=lambda item: item[0])))
    clone = _COMPOSED.get(key) if permanent else None
    if clone is None:
        clone = _clone(function, replacements)
        if clone is None:
            raise MissingTarget(
                f"{function.__module__}.{function.__qualname__} reads none of "
                f"{', '.join(replacements)}"
            )
        if permanent:
            _COMPOSED[key] = clone
            _PERMANENT.add(clone)
    _refresh(clone)
    return clone


def _clone(function: types.FunctionType, replacements: Mapping[str, Any]) -> Any:
    read = _names(function.__code__) & set(replacements) & set(function.__globals__)
    if read:
        namespace = {**function.__globals__, **replacements}
        clone = _copy(function, namespace, function.__closure__)
        clone._opake_origin = (function.__globals__, dict(replacements))  # type: ignore[attr-defined]
        return clone
    for index, cell in enumerate(function.__closure__ or ()):
        inner = _contents(cell)
        if not isinstance(inner, types.FunctionType):
            continue
        clone = _clone(inner, replacements)
        if clone is not None:
            cells = list(function.__closure__ or ())
            cells[index] = types.CellType(clone)
            outer = _copy(function, function.__globals__, tuple(cells))
            if getattr(outer, "__wrapped__", None) is inner:
                outer.__wrapped__ = clone  # type: ignore[attr-defined]
            outer._opake_inner = clone  # type: ignore[attr-defined]
            return outer
    return None


def _copy(function: types.FunctionType, namespace: Any, cells: Any) -> types.FunctionType:
    clone = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, cells
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(clone, function)
    if "__wrapped__" in vars(function):
        clone.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]
    else:
        del clone.__wrapped__  # type: ignore[attr-defined]
    return clone


def _refresh(clone: Any) -> None:
    """Take up what the module's globals have become since the clone was made."""
    while not hasattr(clone, "_opake_origin"):
        clone = clone._opake_inner
    live, replacements = clone._opake_origin
    clone.__globals__.update(live)
    clone.__globals__.update(replacements)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _is_module_level(function: Any) -> bool:
    if getattr(function, "_opake_permanent", False):  # made by a cached factory
        return True
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
