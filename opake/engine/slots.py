"""Places that hold a value: a class attribute, a module global, an instance attribute, a key.

A slot is read and written raw. Reading never runs a descriptor, ``__getattr__`` or
``__missing__``; what is absent reads as :data:`MISSING`, and writing :data:`MISSING` deletes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from opake.errors import MissingTarget, UnpatchableTarget


class _Missing:
    """The type of :data:`MISSING`; one instance, also after copying and pickling."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds a value: ``owner`` and the ``key`` it is found under."""

    owner: Any
    key: Any

    def read(self) -> Any:
        """Return the raw value, or :data:`MISSING`."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Store ``value`` raw; :data:`MISSING` deletes."""
        raise NotImplementedError

    def inherited(self) -> bool:
        """Tell whether a lookup finds a value that the slot itself does not hold."""
        return False

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
        return any(self.key in vars(base) for base in self.owner.__mro__)


class NamespaceSlot(Slot):
    """A name in the ``__dict__`` of a module or of an instance."""

    def read(self) -> Any:
        return vars(self.owner).get(self.key, MISSING)

    def write(self, value: Any) -> None:
        # Through the dict: the setters of nn.Module would register parameters and modules.
        if value is MISSING:
            del vars(self.owner)[self.key]
        else:
            vars(self.owner)[self.key] = value

    def inherited(self) -> bool:
        return hasattr(self.owner, self.key)


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
        return self.owner[self.key] if self.key in self.owner else MISSING

    def write(self, value: Any) -> None:
        if value is MISSING:
            del self.owner[self.key]
        else:
            self.owner[self.key] = value

    def __str__(self) -> str:
        return f"{_owner_name(self.owner)}[{self.key!r}]"


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
    if isinstance(descriptor, types.MemberDescriptorType):
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
    return ItemSlot(mapping, key)


def require_present(slot: Slot, *, create: bool) -> None:
    """Raise :class:`~opake.errors.MissingTarget` where nothing is there to be replaced."""
    if not create and slot.read() is MISSING and not slot.inherited():
        raise MissingTarget(f"{slot} does not exist; pass create=True to add it")


def _class_slot(owner: type, name: str) -> ClassSlot:
    if owner.__flags__ & (1 << 8):  # Py_TPFLAGS_IMMUTABLETYPE
        raise UnpatchableTarget(f"{owner.__qualname__} is a builtin type: its attributes are fixed")
    if _data_descriptor(type(owner), name) is not None:
        raise UnpatchableTarget(f"{owner.__qualname__}.{name} is managed by the type itself")
    return ClassSlot(owner, name)


def _data_descriptor(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            is_data = hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")
            return found if is_data else None
    return None


def _owner_name(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    if isinstance(owner, MutableMapping):
        return f"<{type(owner).__qualname__} of {len(owner)}>"
    return f"<{type(owner).__qualname__} at {id(owner) % 2**32:#x}>"


def holders(value: Any) -> list[tuple[types.ModuleType, str]]:
    """Return every global of every loaded module that is ``value`` itself, aliases included."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, held in list(vars(module).items())
        if held is value
    ]
