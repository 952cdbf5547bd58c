"""Places that hold a value: a class attribute, a module global, an instance attribute, a key.

A slot is read and written raw. Reading never runs a descriptor, ``__getattr__`` or
``__missing__``; what is absent reads as :data:`MISSING`, and writing :data:`MISSING` deletes.
"""

from __future__ import annotations

import sys
import types
from collections import ChainMap
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from opake.errors import InvalidArgument, MissingTarget, UnpatchableTarget


class _Missing:
    """The type of :data:`MISSING`; one instance, also after copying and pickling."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()

STOCK: Final = "_opake_stock"
"""Where the derived class of a patched module keeps the class that it stands for."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds a value: ``owner`` and the ``key`` it is found under."""

    owner: Any
    key: Any

    @property
    def place(self) -> Hashable:
        """What two slots of the same place have in common, however they name their owner."""
        return type(self), id(self.owner), self.key

    def read(self) -> Any:
        """Return the raw value, or :data:`MISSING`."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Store ``value`` raw; :data:`MISSING` deletes."""
        raise NotImplementedError

    def inherited(self) -> bool:
        """Tell whether a lookup finds a value that the slot itself does not hold."""
        return False

    def same(self, one: Any, other: Any) -> bool:
        """Tell whether two values, read from the slot or written to it, are one."""
        return one is other

    def __str__(self) -> str:
        return f"{_owner_name(self.owner)}.{self.key}"


class ClassSlot(Slot):
    """An attribute in the ``__dict__`` of a class."""

    def read(self) -> Any:
        return vars(self.owner).get(self.key, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            type.__delattr__(self.owner, self.key)
        else:
            type.__setattr__(self.owner, self.key, value)

    def inherited(self) -> bool:
        return _in_mro(self.owner, self.key)


class NamespaceSlot(Slot):
    """A name in the ``__dict__`` of a module or of an instance."""

    @property
    def place(self) -> Hashable:
        # The same as that of an item of this dict: people patch globals() too.
        return ItemSlot, id(vars(self.owner)), self.key

    def read(self) -> Any:
        return vars(self.owner).get(self.key, MISSING)

    def write(self, value: Any) -> None:
        # Through the dict: the setters of nn.Module would register parameters and modules.
        if value is MISSING:
            del vars(self.owner)[self.key]
        else:
            vars(self.owner)[self.key] = value

    def same(self, one: Any, other: Any) -> bool:
        if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
            # Whoever takes a wrapper off a method binds what was in it anew.
            return one.__func__ is other.__func__ and one.__self__ is other.__self__
        return one is other

    def inherited(self) -> bool:
        # The class first: hasattr alone would run a cached_property, which stores its result.
        return _in_mro(type(self.owner), self.key) or hasattr(self.owner, self.key)


class MemberSlot(Slot):
    """An attribute that an instance keeps in ``__slots__``."""

    def read(self) -> Any:
        try:
            return object.__getattribute__(self.owner, self.key)
        except AttributeError:
            return MISSING

    def write(self, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(self.owner, self.key)
        else:
            object.__setattr__(self.owner, self.key, value)

    def inherited(self) -> bool:
        return True  # the member exists even while it is unset


class ItemSlot(Slot):
    """A key of a mutable mapping."""

    def read(self) -> Any:
        return MISSING if self._shared() or self.key not in self.owner else self.owner[self.key]

    def write(self, value: Any) -> None:
        if value is MISSING:
            del self.owner[self.key]
        else:
            self.owner[self.key] = value

    def inherited(self) -> bool:
        return self._shared()

    def same(self, one: Any, other: Any) -> bool:
        # os.environ and its like make a new str at every reading.
        made_anew = type(one) is type(other) is str and not isinstance(self.owner, dict)
        return one is other or (made_anew and one == other)

    def _shared(self) -> bool:
        # A registry may keep entries on its class and write to the instance, as transformers' do.
        # Such a key is absent from the instance, and has to be absent again.
        if isinstance(self.owner, dict) or self.key not in self.owner:
            return False
        own = getattr(self.owner, "__dict__", {}).values()
        return not _any_dict_holds(own, self.key) and any(
            _any_dict_holds(vars(base).values(), self.key) for base in type(self.owner).__mro__
        )

    def __str__(self) -> str:
        return f"{_owner_name(self.owner)}[{self.key!r}]"


class ChainSlot(ItemSlot):
    """A key of the first mapping of a ``ChainMap``, the one that it writes to."""

    def __init__(self, chain: ChainMap[Any, Any], key: Any) -> None:
        super().__init__(chain.maps[0], key)
        object.__setattr__(self, "chain", chain)

    @property
    def place(self) -> Hashable:
        return ItemSlot, id(self.owner), self.key

    def inherited(self) -> bool:
        return self.key in self.chain  # type: ignore[attr-defined]


def attribute_slot(owner: Any, name: str) -> Slot:
    """Return the slot of attribute ``name`` on a class, a module or an instance.

    Raises :class:`~opake.errors.UnpatchableTarget` for builtin types, for names that a property
    or another data descriptor answers, and for instances without a ``__dict__``.
    """
    if not isinstance(name, str):
        raise UnpatchableTarget(f"an attribute name is a str, found {name!r}")
    if isinstance(owner, type):
        return _class_slot(owner, name)
    if isinstance(owner, types.ModuleType):
        return NamespaceSlot(owner, name)
    descriptor = _data_descriptor(type(owner), name)
    if isinstance(descriptor, types.MemberDescriptorType) and not _is_builtin(
        descriptor.__objclass__
    ):
        return MemberSlot(owner, name)
    if descriptor is not None:
        raise UnpatchableTarget(
            f"{type(owner).__qualname__}.{name} is a {type(descriptor).__name__}: an instance "
            "attribute of that name is never read; patch the class, or the attribute it stores in"
        )
    if not hasattr(owner, "__dict__"):
        raise UnpatchableTarget(f"{type(owner).__qualname__} instances have no attribute {name!r}")
    return NamespaceSlot(owner, name)


def item_slot(mapping: Any, key: Any) -> ItemSlot:
    """Return the slot of ``key`` in a mutable mapping."""
    if not isinstance(mapping, MutableMapping):
        raise UnpatchableTarget(
            f"ItemPatch needs a mutable mapping, found {type(mapping).__qualname__}"
        )
    try:
        hash(key)
    except TypeError as error:
        raise UnpatchableTarget(f"a key of a mapping is hashable, found {key!r}") from error
    return ChainSlot(mapping, key) if isinstance(mapping, ChainMap) else ItemSlot(mapping, key)


def require_present(slot: Slot, *, create: bool) -> None:
    """Raise :class:`~opake.errors.MissingTarget` where nothing is there to be replaced."""
    if not create and slot.read() is MISSING and not slot.inherited():
        raise MissingTarget(f"{slot} does not exist; pass create=True to add it")


def require_value(value: Any) -> Any:
    """Return ``value``; a patch replaces or adds, it does not delete."""
    if value is MISSING:
        raise InvalidArgument("MISSING is no value to patch in: a patch cannot delete")
    return value


def holders(value: Any) -> list[tuple[types.ModuleType, str]]:
    """Return every global of every loaded module that is ``value`` itself, aliases included."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, held in list(vars(module).items())
        if held is value
    ]


def _class_slot(owner: type, name: str) -> ClassSlot:
    owner = vars(owner).get(STOCK, owner)  # type(module) inside a scope means the class outside
    if _is_builtin(owner):
        raise UnpatchableTarget(f"{owner.__qualname__} is a builtin type: its attributes are fixed")
    if _data_descriptor(type(owner), name) is not None:
        raise UnpatchableTarget(f"{owner.__qualname__}.{name} is managed by the type itself")
    return ClassSlot(owner, name)


def _is_builtin(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 8))  # Py_TPFLAGS_IMMUTABLETYPE


def _in_mro(cls: type, name: str) -> bool:
    for base in cls.__mro__:  # noqa: SIM110  # any() is slower, and this runs for every patch
        if name in base.__dict__:
            return True
    return False


def _data_descriptor(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            is_data = hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")
            return found if is_data else None
    return None


def _any_dict_holds(values: Any, key: Any) -> bool:
    return any(isinstance(value, dict) and key in value for value in list(values))


def _owner_name(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    if isinstance(owner, MutableMapping):
        return f"<{type(owner).__qualname__} of {len(owner)}>"
    return f"<{type(owner).__qualname__} at {id(owner) % 2**32:#x}>"
