"""A config that answers one question differently and is the original in everything else.

Configs are shared: by all modules of a model, and often by several models. A patched module gets
a view over the same ``__dict__``; whatever is set on either is seen by both.
"""

from __future__ import annotations

import copy
import functools
import operator
from dataclasses import dataclass
from typing import Any

FIELD = "_attn_implementation_internal"

SYMBOLS = (("transformers.configuration_utils", "PreTrainedConfig._attn_implementation", ()),)


@dataclass
class _State:
    original: Any
    stock: Any
    ours: str
    live: bool = False


def attention_view(config: Any, ours: str) -> Any:
    """Return a view of ``config`` whose ``_attn_implementation`` is ``ours``.

    It answers so only between :func:`switch` on and off, and only while the config says what it
    says now: an implementation that the user sets meanwhile wins. Copies and pickles of the view
    are copies and pickles of the original.
    """
    view: Any = object.__new__(_view_class(type(config)))  # type: ignore[arg-type]
    object.__setattr__(view, "__dict__", vars(config))
    object.__setattr__(view, "_opake_view", _State(config, vars(config).get(FIELD), ours))
    return view


def switch(view: Any, live: bool) -> None:
    """Let ``view`` answer with our implementation, or with stock's again."""
    state = view._opake_view
    state.live = live
    shared = vars(state.original)
    if not live and shared.get(FIELD) == state.ours:  # somebody read our key and set it
        shared[FIELD] = state.stock


@dataclass
class Quiet:
    """Whether a view of :func:`quiet_view` answers 0."""

    live: bool = False


def quiet_view(config: Any, names: tuple[str, ...], quiet: Quiet) -> Any:
    """Return a view of ``config``, itself or a view, that answers 0 for ``names`` while ``quiet``.

    In everything else it answers what ``config`` does.
    """
    state = getattr(config, "_opake_view", None)
    if state is None:
        used = vars(config).get(FIELD)
        state = _State(config, used, used)
    view: Any = object.__new__(_quiet_class(type(state.original), names))  # type: ignore[arg-type]
    object.__setattr__(view, "__dict__", vars(state.original))
    object.__setattr__(view, "_opake_view", state)
    object.__setattr__(view, "_opake_quiet", quiet)
    return view


@functools.cache
def _quiet_class(stock: Any, names: tuple[str, ...]) -> Any:
    def answer(name: str) -> property:
        def get(self: Any) -> Any:
            return 0.0 if self._opake_quiet.live else vars(self)[name]

        def set_stocks(self: Any, value: Any) -> None:
            vars(self)[name] = value

        return property(get, set_stocks)

    view = _view_class(stock)
    namespace = {
        "__slots__": ("_opake_quiet",),
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__eq__": view.__eq__,  # transformers makes one for every class of configs without it
        "__hash__": stock.__hash__,
        **{name: answer(name) for name in names},
    }
    return type(stock)(stock.__name__, (view,), namespace)


@functools.cache
def _view_class(stock: Any) -> Any:
    field = stock._attn_implementation

    def get(self: Any) -> Any:
        state = self._opake_view
        current = self._attn_implementation_internal
        return state.ours if state.live and current == state.stock else current

    def set_any(self: Any, name: str, value: Any) -> None:
        # What was read here may be written back; the shared dict must say it in stock's words.
        state = self._opake_view
        is_key = name in (FIELD, "_attn_implementation") and value == state.ours
        stock.__setattr__(self, name, state.stock if is_key else value)

    def reduce(self: Any, protocol: Any) -> Any:
        # The original itself, by way of the standard library: loads without opake.
        return operator.getitem, ((self._opake_view.original,), 0)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._opake_view.original, memo)

    def equal(self: Any, other: Any) -> Any:
        mine = self._opake_view.original
        return mine == getattr(other, "_opake_view", _State(other, None, "")).original

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)  # what `type(view)(...)` makes is no view

    namespace = {
        "__slots__": ("_opake_view",),
        "__new__": new,
        "__doc__": stock.__doc__,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__eq__": equal,
        "__hash__": stock.__hash__,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
        "__copy__": lambda self: copy.copy(self._opake_view.original),
        "__setattr__": set_any,
        "_attn_implementation": property(get, field.fset),
    }
    return type(stock)(stock.__name__, (stock,), namespace)
