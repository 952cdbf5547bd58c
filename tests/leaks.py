"""What the libraries around a scope hold in their modules, by identity and in order."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

LIBRARIES = (
    "accelerate",
    "peft",
    "torch._functorch",
    "torch.autograd",
    "torch.func",
    "torch.nn.modules",
    "torch.utils.checkpoint",
    "transformers",
)
"""The packages whose modules, classes and functions are looked at."""

WRITTEN_BY_PYTHON = frozenset({"__slotnames__", "__warningregistry__"})
"""Names that the interpreter and its standard library write into a namespace on their own:
``copyreg`` the slots of a class at its first copy, ``warnings`` what a module has shown."""

_CONTAINERS = (dict, list, set, deque)
_DESCRIPTORS = (classmethod, functools.cached_property, functools.partial, property, staticmethod)
_LOOKED_INTO = (
    *_CONTAINERS,
    *_DESCRIPTORS,
    types.FunctionType,
    functools._lru_cache_wrapper,
)


class _Place(NamedTuple):
    """Something that holds other things, and what it holds, kept alive."""

    name: str
    owner: Any
    keys: list[Any]
    values: list[Any]


class Leaks:
    """Everything that the loaded modules of :data:`LIBRARIES` hold; what differs is a leak.

    That is every global of a module, and every attribute, raw, of a class that is defined in one;
    of every function among these its code, defaults, attributes and closure cells; and the
    contents of containers and of the modules' own objects that these hold, such as registries.
    Objects are compared by identity, and their order counts. Not seen are the insides of built-in
    types, the contents of an ``lru_cache`` among them.

    Nothing is left out but :data:`WRITTEN_BY_PYTHON` and what an import leaves in a package: a
    submodule under its own name, and in a lazy package of transformers, under a name that it
    declares, the very object that the submodule named there defines. What a library keeps after
    its first use is to be made before the snapshot is taken, by such a use of stock.
    """

    def __init__(self) -> None:
        self._modules = {name: m for name, m in sys.modules.items() if _in_library(name)}
        self._places = _read(self._modules)

    def __len__(self) -> int:
        return len(self._places)

    def changes(self) -> list[str]:
        """Name every key that holds another object now, or stands in another place."""
        replaced = [n for n, m in self._modules.items() if sys.modules.get(n) is not m]
        found = [f"sys.modules: {name!r} is another" for name in replaced]
        for place in self._places:
            if not _is_unchanged(place):
                keys, values = _contents(place.owner)
                found += [f"{place.name}: {what}" for what in _differences(place, keys, values)]
        return found


def _is_unchanged(place: _Place) -> bool:
    """Tell at a glance, for most places, that nothing has changed; False says nothing."""
    owner, keys, values = place.owner, place.keys, place.values
    if type(owner) is types.FunctionType:
        now = owner.__dict__
        held = [owner.__code__, owner.__defaults__, owner.__kwdefaults__]
        held += map(_cell, owner.__closure__ or ())
        same = len(held) + len(now) == len(values) and all(map(is_, held, values))
        return same and (not now or _has(now, keys[len(held) :], values[len(held) :]))
    if type(owner) is list:
        return len(owner) == len(values) and all(map(is_, owner, values))
    if type(owner) is dict:
        return _has(owner, keys, values)
    return isinstance(owner, types.ModuleType | type) and _has(owner.__dict__, keys, values)


def _has(namespace: Mapping[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    same = len(namespace) == len(values) and all(map(is_, namespace.values(), values))
    return same and all(map(is_, namespace, keys))


def _differences(place: _Place, keys: list[Any], values: list[Any]) -> Iterator[str]:
    was = dict(zip(place.keys, place.values, strict=True))
    now = dict(zip(keys, values, strict=True))
    for key in [key for key in now if key not in was]:
        if _is_import(place.owner, key, now[key]):
            del now[key]
        else:
            yield f"{key!r} is new: {now[key]!r:.80}"
    for key in was:
        if key not in now:
            yield f"{key!r} is gone"
        elif now[key] is not was[key]:
            yield f"{key!r} was {was[key]!r:.80}, is {now[key]!r:.80}"
    if was.keys() == now.keys() and list(was) != list(now):
        yield "another order"


def _is_import(owner: Any, key: Any, value: Any) -> bool:
    if not isinstance(owner, types.ModuleType):
        return False
    if isinstance(value, types.ModuleType):
        return sys.modules.get(f"{owner.__name__}.{key}") is value
    # transformers' own lazy packages say where each name of theirs is defined.
    home = getattr(owner, "_class_to_module", {}).get(key)
    defined = vars(sys.modules.get(f"{owner.__name__}.{home}", owner))
    return home is not None and defined.get(key) is value


def _in_library(name: Any) -> bool:
    return isinstance(name, str) and f"{name}.".startswith(tuple(f"{p}." for p in LIBRARIES))


def _read(modules: dict[str, types.ModuleType]) -> list[_Place]:
    places: list[_Place] = []
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque(modules.items())
    while todo:
        name, owner = todo.popleft()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, types.FunctionType | type):
            name = f"{owner.__module__}.{owner.__qualname__}"
        place = _Place(name, owner, *_contents(owner))
        places.append(place)
        held = zip(place.keys, place.values, strict=True)
        todo += [(f"{name}.{key}", value) for key, value in held if _is_place(owner, value)]
    return places


def _is_place(holder: Any, value: Any) -> bool:
    """Tell whether to look into ``value``, found in ``holder``."""
    if isinstance(value, _LOOKED_INTO):
        return True
    if isinstance(value, type):
        return _in_library(value.__module__)
    named = isinstance(holder, types.ModuleType | type)
    return named and _in_library(type(value).__module__) and hasattr(value, "__dict__")


def _contents(owner: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of what ``owner`` holds."""
    if isinstance(owner, types.FunctionType):
        keys, values = _of_function(owner)
    elif isinstance(owner, _CONTAINERS):
        keys, values = _of_container(owner)
    elif isinstance(owner, _DESCRIPTORS):
        keys = [name for name in _HELD if hasattr(owner, name)]
        values = [getattr(owner, name) for name in keys]
    else:
        keys, values = [], []
    attributes = getattr(owner, "__dict__", None)
    if attributes:
        names = [name for name in attributes if name not in WRITTEN_BY_PYTHON]
        # Attributes of a container do not stand in for its keys.
        keys += [f".{name}" for name in names] if isinstance(owner, _CONTAINERS) else names
        values += [attributes[name] for name in names]
    return keys, values


_HELD = ("__func__", "fget", "fset", "fdel", "func", "args", "keywords")
"""What a descriptor or a partial holds."""


def _of_container(container: Any) -> tuple[list[Any], list[Any]]:
    # By way of the built-in class: lazy mappings load what they map when they are asked.
    if isinstance(container, dict):
        cls = OrderedDict if isinstance(container, OrderedDict) else dict
        return list(cls.keys(container)), list(cls.values(container))
    if isinstance(container, set):
        values = list(set.__iter__(container))
        return [id(value) for value in values], values
    values = list(container)
    return [f"[{index}]" for index in range(len(values))], values


def _of_function(function: types.FunctionType) -> tuple[list[Any], list[Any]]:
    keys = ["__code__", "__defaults__", "__kwdefaults__"]
    values = [function.__code__, function.__defaults__, function.__kwdefaults__]
    if function.__closure__:
        keys += [f"<{name}>" for name in function.__code__.co_freevars]
        values += [_cell(cell) for cell in function.__closure__]
    return keys, values


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
