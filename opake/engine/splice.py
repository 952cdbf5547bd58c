"""Wrappers that other libraries put around a patched ``forward`` inside a scope.

accelerate's hooks and mixed precision keep the ``forward`` they found and put their own in its
place. When our layer leaves, what they kept has to become what lies below it. They are known by
the attributes they leave; nothing of accelerate is imported.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from opake.engine.reclass import stock_class
from opake.engine.slots import MISSING

KEPT = ("_old_forward", "_original_forward")
"""Instance attributes under which accelerate keeps the ``forward`` it replaced."""


def splice(module: nn.Module, old: Any, new: Any) -> bool:
    """Replace ``old`` by ``new`` in the wrappers around it; False where they are not known.

    ``old`` and ``new`` are values of the module's ``forward`` slot; MISSING stands for the
    ``forward`` of its class.
    """
    if not any(name in vars(module) for name in KEPT):
        return False
    if new is MISSING:
        new = types.MethodType(stock_class(module).forward, module)
    pairs = [(old, new)]
    if isinstance(old, types.MethodType):
        pairs.append((old.__func__, getattr(new, "__func__", new)))
    hits = 0
    for name in KEPT:
        for before, after in pairs:
            if vars(module).get(name) is before:
                vars(module)[name] = after
                hits += 1
    for holder in _chain(vars(module).get("forward")):
        hits += _replace(holder, pairs)
    return hits > 0


def _chain(start: Any) -> Iterator[Any]:
    """Yield every function and callable object reachable through wrappers."""
    todo, seen = [start], set()
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
            todo.extend(v for v in map(_contents, item.__closure__ or ()) if callable(v))
        elif hasattr(item, "__dict__") and hasattr(item, "__wrapped__"):
            todo.extend(v for v in vars(item).values() if callable(v))


def _replace(holder: Any, pairs: list[tuple[Any, Any]]) -> int:
    hits = 0
    for before, after in pairs:
        for cell in getattr(holder, "__closure__", None) or ():
            if _contents(cell) is before:
                cell.cell_contents = after
                hits += 1
        attributes = vars(holder) if hasattr(holder, "__dict__") else {}
        for name in [name for name, value in attributes.items() if value is before]:
            attributes[name] = after
            hits += 1
    return hits


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
