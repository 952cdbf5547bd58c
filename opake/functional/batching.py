"""Give a function the batch dimension that ``vmap`` takes away."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch
from torch import nn

from opake.errors import InvalidArgument

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

# Patches of a model's forward recognise the wrapper by this attribute; the cell of ``fn`` in its
# closure is the only other place than ``__wrapped__`` that holds what it wraps.
_MARK = "_opake_with_batch_dim"
_ALWAYS = sys.maxsize


def with_batch_dim(
    fn: _Fn,
    batch_argnums: Iterable[int] = (),
    batch_kwargs: Iterable[str] | Mapping[str, int] | None = None,
    *,
    min_ndim: int | None = None,
) -> _Fn:
    """Give the named tensor arguments of ``fn`` a leading batch dimension on the way in.

    ``batch_argnums`` are positions, ``batch_kwargs`` names; either is found however it is passed.
    What is absent, ``None`` or no tensor is skipped; names that ``fn`` does not take are ignored.

    ``min_ndim=None``: each is unsqueezed at dimension 0, the output is returned untouched.
    ``min_ndim=N``: only tensors of fewer than N dimensions are, once (``batch_kwargs`` may map
    names to thresholds of their own); if any was, dimension 0 of every output tensor is squeezed
    where its size is 1, through tuples, lists and mappings, whose classes are kept.

    Raises `InvalidArgument` for a threshold that is no positive int or a position not in ``fn``.
    """
    by_index, by_name = _thresholds(fn, batch_argnums, batch_kwargs, min_ndim)

    # A module's __dict__ holds its parameters and must not be copied onto a function.
    @functools.wraps(fn, updated=("__dict__",) if inspect.isroutine(fn) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        unsqueezed = False
        for index, threshold in by_index.items():
            if index < len(positional) and _lacks_batch_dim(positional[index], threshold):
                positional[index] = positional[index].unsqueeze(0)
                unsqueezed = True
        for name, threshold in by_name.items():
            if name in kwargs and _lacks_batch_dim(kwargs[name], threshold):
                kwargs[name] = kwargs[name].unsqueeze(0)
                unsqueezed = True
        output = fn(*positional, **kwargs)
        return _squeeze_batch_dim(output) if unsqueezed and min_ndim is not None else output

    vars(wrapper)[_MARK] = True
    return cast(_Fn, wrapper)


def _lacks_batch_dim(value: Any, threshold: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim < threshold


def _thresholds(
    fn: Callable[..., Any],
    batch_argnums: Iterable[int],
    batch_kwargs: Iterable[str] | Mapping[str, int] | None,
    min_ndim: int | None,
) -> tuple[dict[int, int], dict[str, int]]:
    """The number of dimensions below which an argument is unsqueezed, by position and by name."""
    if isinstance(batch_kwargs, str):
        raise InvalidArgument(
            f"with_batch_dim: batch_kwargs={batch_kwargs!r} is one string; "
            f"pass a list of names: [{batch_kwargs!r}]"
        )
    default = _ALWAYS if min_ndim is None else _check_threshold("min_ndim", min_ndim)
    by_name = dict.fromkeys(batch_kwargs or (), default)
    if isinstance(batch_kwargs, Mapping) and min_ndim is not None:
        for name, threshold in batch_kwargs.items():
            by_name[name] = _check_threshold(f"batch_kwargs[{name!r}]", threshold)
    names, takes_more = _positional_names(fn)
    by_index = {index: by_name[name] for index, name in enumerate(names) if name in by_name}
    for index in batch_argnums:
        if index < 0 or (index >= len(names) and not takes_more):
            raise InvalidArgument(
                f"with_batch_dim: batch_argnums has {index}, but the positional arguments of "
                f"{getattr(fn, '__name__', type(fn).__name__)} are 0 to {len(names) - 1} {names}"
            )
        by_index.setdefault(index, default)
        if index < len(names):
            by_name.setdefault(names[index], default)
    return by_index, by_name


def _check_threshold(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(
            f"with_batch_dim: {what} must be a positive int (the fewest dimensions of a batched "
            f"argument), found {value!r}"
        )
    return value


def _positional_names(fn: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the parameters that can be passed by position, and whether more can."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):  # builtins without a signature
        return [], True
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return names, any(p.kind == p.VAR_POSITIONAL for p in parameters)


def _squeeze_batch_dim(value: Any) -> Any:
    """Squeeze dimension 0 of every tensor in nested containers; what has none comes back as is."""
    if isinstance(value, torch.Tensor):
        return value.squeeze(0) if value.ndim and value.shape[0] == 1 else value
    if isinstance(value, (tuple, list)):
        items = [_squeeze_batch_dim(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _rebuild_sequence(value, items)
    if isinstance(value, Mapping):
        squeezed = {key: _squeeze_batch_dim(item) for key, item in value.items()}
        if all(squeezed[key] is item for key, item in value.items()):
            return value
        return _rebuild_mapping(value, squeezed)
    return value


def _rebuild_sequence(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_make"):  # a namedtuple takes its fields one by one
        return value._make(items)
    if isinstance(value, tuple) or type(value) is list:
        return type(value)(items)
    rebuilt = copy.copy(value)
    rebuilt[:] = items
    return rebuilt


def _rebuild_mapping(value: Mapping[Any, Any], squeezed: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return cast(Callable[[dict[Any, Any]], Any], type(value))(squeezed)
    # A copy keeps what the class holds beside its items; ModelOutput refuses update().
    rebuilt = copy.copy(value)
    for key, item in squeezed.items():
        rebuilt[key] = item
    return rebuilt
