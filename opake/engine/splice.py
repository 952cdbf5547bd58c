"""Wrappers that other libraries put around a patched ``forward`` inside a scope.

accelerate's hooks and mixed precision, and opake's own ``with_batch_dim``, keep the ``forward``
they found and put their own in its place. When our layer leaves, what they kept has to become
what lies below it. They are known by the attributes they leave; nothing of them is imported.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from opake.engine.reclass import KEPT, below

MARK = "_opake_with_batch_dim"
"""The attribute by which ``opake.functional.with_batch_dim`` marks its wrappers."""

_Pairs = list[tuple[Any, Any]]


def splice(module: nn.Module, old: Any, new: Any) -> bool:
    """Replace ``old`` by ``new`` in the wrappers around it; False where they are not known.

    ``old`` and ``new`` are values of the module's ``forward`` slot; MISSING stands for the
    ``forward`` of its class.
    """
    attributes = vars(module)
    new = below(module, new)
    pairs = [(old, new)]
    if isinstance(old, types.MethodType):
        pairs.append((old.__func__, getattr(new, "__func__", None) or _taking_self(new)))
    chain = list(_chain(attributes.get("forward"), pairs))
    if not any(name in attributes for name in KEPT) and not any(map(_is_marked, chain)):
        return False
    kept = {name: attributes[name] for name in KEPT if name in attributes}
    hits = _replace_values(attributes, kept, pairs)
    for holder in chain:
        hits += _replace_cells(holder, pairs)
        if hasattr(holder, "__dict__"):
            hits += _replace_values(vars(holder), dict(vars(holder)), pairs)
    return hits > 0


def _chain(start: Any, pairs: _Pairs) -> Iterator[Any]:
    """Yield every function and callable object around the old values of ``pairs``."""
    todo, seen = [start], {id(old) for old, _ in pairs}
    while todo:
        item = todo.pop()
        if id(item) in seen or item is None or isinstance(item, nn.Module | type):
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, types.MethodType):
            todo.append(item.__func__)
        elif isinstance(item, functools.partial):
            todo.append(item.func)
        elif isinstance(item, types.FunctionType):
            todo.append(getattr(item, "__wrapped__", None))
            todo.extend(v for v in map(contents, item.__closure__ or ()) if callable(v))
        elif hasattr(item, "__dict__") and hasattr(item, "__wrapped__"):
            todo.extend(v for v in vars(item).values() if callable(v))


def _replace_values(target: dict[str, Any], looked_at: dict[str, Any], pairs: _Pairs) -> int:
    hits = 0
    for name, value in looked_at.items():
        for before, after in pairs:
            if value is before:
                target[name] = after
                hits += 1
    return hits


def _replace_cells(holder: Any, pairs: _Pairs) -> int:
    hits = 0
    for cell in getattr(holder, "__closure__", None) or ():
        for before, after in pairs:
            if contents(cell) is before:
                cell.cell_contents = after
                hits += 1
    return hits


def _taking_self(forward: Any) -> Any:
    """Return ``forward``, which takes no ``self``, as a function that does."""

    @functools.wraps(forward, updated=())
    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return function


def _is_marked(function: Any) -> bool:
    return MARK in getattr(function, "__dict__", {})


def contents(cell: types.CellType) -> Any:
    """Return what a closure cell holds, None where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
