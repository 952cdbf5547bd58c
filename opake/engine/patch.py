"""The kinds of reversible change."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

from opake.engine import rebind, reclass, slots, stacks
from opake.engine.slots import MISSING, Slot
from opake.errors import AlreadyPatched, RestoreError, UnpatchableTarget


class Patch:
    """One reversible change. Subclass it with :meth:`apply` and :meth:`revert`.

    A :class:`~opake.PatchSet` calls :meth:`check` on all its patches first, then :meth:`apply` in
    order; when it leaves, or when one ``apply`` raised, it calls :meth:`revert` on each, in
    reverse, including the one that raised.
    """

    how = "custom"
    """One word for :meth:`opake.PatchSet.explain`: what kind of change this is."""

    process_wide: bool = False
    """True where the change has no module to hang on, and refers to none: it is undone when the
    set was lost together with its modules."""

    def check(self) -> None:
        """Raise if the patch cannot be applied. Changes nothing."""

    def apply(self) -> None:
        """Make the change."""
        raise NotImplementedError

    def revert(self) -> str | None:
        """Undo whatever :meth:`apply` did so far; nothing, if it did nothing.

        Returns a note where a foreign value was found and left alone.
        """
        raise NotImplementedError

    @property
    def target(self) -> str:
        """What is changed, for people."""
        return type(self).__qualname__

    def changes(self) -> list[tuple[str, Any, Any]]:
        """Return ``(slot, before, after)`` for what is changed right now."""
        return []


class SlotPatch(Patch):
    """A change of one slot; the base of the kinds below."""

    def __init__(self, slot: Slot, *, create: bool = False) -> None:
        self.slot = slot
        self.create = create
        self.process_wide = not isinstance(slot.owner, nn.Module)
        self.holder: Any = None
        self._layer: stacks.Layer | None = None

    def build(self, below: Any) -> Any:
        """Return the value to store over ``below`` (MISSING where the slot is empty)."""
        raise NotImplementedError

    def check(self) -> None:
        self._require_free()
        if not self.process_wide:
            reclass.derive(reclass.stock_class(self.slot.owner))  # raises where it cannot be done
        stack = stacks.find(self.slot)
        if stack is not None:
            stack.require_ours()

    def _require_free(self) -> None:
        if self._layer is not None:
            raise AlreadyPatched(f"{self!r} is applied already")
        slots.require_present(self.slot, create=self.create)

    def apply(self) -> None:
        self._require_free()
        self._layer = stacks.Layer(self.build, self.holder)
        stacks.push(self.slot, self._layer)

    def revert(self) -> str | None:
        if self._layer is None:
            return None
        restored = stacks.remove(self.slot, self._layer)
        self._layer = None
        return None if restored else f"{self.slot}: left as somebody else wrote it"

    @property
    def target(self) -> str:
        return str(self.slot)

    def changes(self) -> list[tuple[str, Any, Any]]:
        stack = stacks.find(self.slot)
        if self._layer is None or stack is None:
            return []
        return [(str(self.slot), stack.base, self.slot.read())]

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self.target})"


class AttributePatch(SlotPatch):
    """Replace attribute ``name`` of a class, a module or an instance by ``value``.

    The raw value is stored, descriptors and all. An attribute that is only inherited is shadowed
    and deleted again. ``create=True`` allows a name that does not exist.
    """

    how = "attribute"

    def __init__(self, owner: Any, name: str, value: Any, *, create: bool = False) -> None:
        super().__init__(slots.attribute_slot(owner, name), create=create)
        self.value = slots.require_value(value)

    def build(self, below: Any) -> Any:
        return self.value


class ItemPatch(SlotPatch):
    """Replace ``mapping[key]`` by ``value``. ``create=True`` allows a new key."""

    how = "item"

    def __init__(self, mapping: Any, key: Any, value: Any, *, create: bool = False) -> None:
        super().__init__(slots.item_slot(mapping, key), create=create)
        self.value = slots.require_value(value)

    def build(self, below: Any) -> Any:
        return self.value


class GlobalPatch(Patch):
    """Replace a module global and every copy of it that ``from module import name`` made.

    All loaded modules are searched for the very object, under any name, and searched again at
    :meth:`revert` for those that imported ``value`` meanwhile. Process-wide by nature. ``value``
    must not find the original through a global: that is replaced too.
    """

    how = "global"
    process_wide = True

    def __init__(self, module: types.ModuleType, name: str, value: Any) -> None:
        if not isinstance(module, types.ModuleType):
            raise UnpatchableTarget(f"GlobalPatch needs a module, found {module!r}")
        self._home = AttributePatch(module, name, _searchable(value))
        self._copies: list[AttributePatch] = []
        self._original: Any = None
        self._bystanders: set[Hashable] = set()

    def check(self) -> None:
        self._home.check()
        _searchable(stacks.base(self._home.slot))

    @stacks.locked
    def apply(self) -> None:
        self.check()
        self._original = stacks.base(self._home.slot)
        live = _GLOBALS.setdefault(id(self._original), [])
        _adopt_imports(live)
        # Whoever holds the replacement already, such as its own module, is left alone.
        self._bystanders = {slot.place for slot in _held(self._home.value)}
        live.append(self)
        self._home.apply()
        layered = [s.slot for s in stacks.globals_over(self._original)]
        for slot in [s for s in layered if s.place != self._home.slot.place]:
            self._apply_copy(slot)
        for slot in _held(self._original):
            self._apply_copy(slot)

    @stacks.locked
    def revert(self) -> str | None:
        live = _GLOBALS.get(id(self._original), [])
        if self in live:
            _adopt_imports(live)
        notes, failed = [], []
        for patch in (*reversed(self._copies), self._home):
            try:
                notes.append(patch.revert())
            except Exception as error:
                failed.append(f"{patch.target}: {error}")
        if self in live:
            live.remove(self)
            if not live:
                del _GLOBALS[id(self._original)]
        self._copies.clear()
        if failed:
            raise RestoreError("; ".join(failed))
        return "; ".join(note for note in notes if note) or None

    def _apply_copy(self, slot: Slot) -> None:
        copy = AttributePatch(slot.owner, slot.key, self._home.value)
        self._copies.append(copy)
        copy.apply()

    @property
    def target(self) -> str:
        return self._home.target

    def changes(self) -> list[tuple[str, Any, Any]]:
        return [row for patch in (self._home, *self._copies) for row in patch.changes()]


_GLOBALS: dict[int, list[GlobalPatch]] = {}
"""The live patches of one original object, in the order in which they came, by its id."""

_ATOMS = (type(None), type(...), bool, int, float, complex, str, bytes)


def _searchable(value: Any) -> Any:
    if isinstance(value, _ATOMS):
        raise UnpatchableTarget(
            f"GlobalPatch finds copies by identity, and {value!r} is everywhere; use AttributePatch"
        )
    return slots.require_value(value)


def _held(value: Any) -> list[Slot]:
    """Return the globals that hold ``value`` without a patch."""
    found = [slots.attribute_slot(module, name) for module, name in slots.holders(value)]
    return [slot for slot in found if stacks.find(slot) is None]


def _adopt_imports(live: list[GlobalPatch]) -> None:
    """Treat the globals that imported a replacement meanwhile as if they had been there before."""
    bystanders = {place for patch in live for place in patch._bystanders}
    for value in [patch._home.value for patch in live]:
        for slot in _held(value):
            if slot.place not in bystanders:
                slot.write(live[0]._original)
                for patch in live:
                    patch._apply_copy(slot)


class ForwardPatch(SlotPatch):
    """Run ``wrapper(wrapped, instance, args, kwargs)`` as the ``forward`` of one module.

    ``wrapped`` is what lies below: the ``forward`` that the module's class has on entering, or
    whatever the instance had before. The class is not touched, and the signature stays that of the
    stock ``forward``. ``slot`` names another method.
    """

    how = "forward"

    def __init__(
        self, module: nn.Module, wrapper: rebind.Wrapper, *, slot: str = "forward"
    ) -> None:
        if not callable(wrapper):
            raise UnpatchableTarget(f"the wrapper of a ForwardPatch is callable, found {wrapper!r}")
        super().__init__(slots.attribute_slot(_require_module(module), slot))
        self.wrapper = wrapper
        self._made = _Last()

    def build(self, below: Any) -> Any:
        inner, permanent = _function_below(self.slot.owner, self.slot.key, below)
        if inner is None:
            make = functools.partial(rebind.compose_over, below, self.wrapper)
            return _bind(self.slot, self._made.get(below, make))
        make = functools.partial(rebind.compose, inner, self.wrapper, permanent=permanent)
        return _bind(self.slot, self._made.get(inner, make))


class RebindPatch(SlotPatch):
    """Let the ``forward`` of one module see other globals than its class does.

    ``replacements`` maps names that the code of ``forward`` reads from its module, such as free
    functions, to what this one module shall find there. ``slot`` names another method.
    """

    how = "rebind"

    def __init__(
        self, module: nn.Module, replacements: Mapping[str, Any], *, slot: str = "forward"
    ) -> None:
        super().__init__(slots.attribute_slot(_require_module(module), slot))
        self.replacements = dict(replacements)
        self._made = _Last()

    def check(self) -> None:
        super().check()
        stack = stacks.find(self.slot)
        self._function(self.slot.read() if stack is None else stack.top)

    def build(self, below: Any) -> Any:
        return _bind(self.slot, self._function(below))

    def _function(self, below: Any) -> Any:
        inner, permanent = _function_below(self.slot.owner, self.slot.key, below)
        if not isinstance(inner, types.FunctionType):
            raise UnpatchableTarget(f"{self.slot} is no plain method: {inner or below!r}")
        make = functools.partial(rebind.rebind, inner, self.replacements, permanent=permanent)
        function = self._made.get(inner, make)
        rebind.refresh(function)
        return function


class LossPatch(AttributePatch):
    """Replace a transformers model's loss by ``fn(logits, labels, vocab_size, **kwargs)``."""

    how = "loss"

    def __init__(self, model: nn.Module, fn: Callable[..., Any]) -> None:
        # loss_function is a property without a deleter; it reads this attribute first.
        super().__init__(model, "_loss_function", fn, create=True)


class _Last:
    """What was made last, and of what: entering again over the same function makes nothing new."""

    def __init__(self) -> None:
        self._of: Any = None
        self._made: Any = None

    def get(self, of: Any, make: Callable[[], Any]) -> Any:
        if self._made is None or self._of is not of:
            self._of, self._made = of, make()
        return self._made


def _bind(slot: Slot, function: Any) -> Any:
    if slot.key == "forward":
        return reclass.bind(slot.owner, function)
    return types.MethodType(function, slot.owner)


def _require_module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UnpatchableTarget(f"expected an nn.Module, found {type(module).__qualname__}")
    return module


def _function_below(module: nn.Module, name: str, below: Any) -> tuple[Any, bool]:
    """Return the function below that takes ``self``, or None, and whether it is the class's."""
    stock = getattr(reclass.stock_class(module), name, None)
    if below is MISSING:
        return stock, True
    if isinstance(below, types.MethodType) and below.__self__ is module:
        function = reclass.unwrap(below.__func__)
        return function, function is stock
    return None, False
