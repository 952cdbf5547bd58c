"""The kinds of reversible change."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opake.engine import rebind, reclass, slots, stacks
from opake.engine.slots import MISSING, Slot
from opake.errors import AlreadyPatched, UnpatchableTarget


class Patch:
    """One reversible change. Subclass it with :meth:`apply` and :meth:`revert`.

    A :class:`~opake.PatchSet` calls :meth:`check` on all its patches first, then :meth:`apply` in
    order; when it leaves, or when one ``apply`` raised, it calls :meth:`revert` on each, in
    reverse, including the one that raised.
    """

    how = "custom"
    """One word for :meth:`opake.PatchSet.explain`: what kind of change this is."""

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
        self._layer: stacks.Layer | None = None
        self.holder: Any = None

    def build(self, below: Any) -> Any:
        """Return the value to store over ``below`` (MISSING where the slot is empty)."""
        raise NotImplementedError

    def check(self) -> None:
        if self._layer is not None:
            raise AlreadyPatched(f"{self!r} is applied already")
        slots.require_present(self.slot, create=self.create)
        stack = stacks.find(self.slot)
        if stack is not None:
            stack.require_ours()

    def apply(self) -> None:
        self.check()
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
        self.value = value

    def build(self, below: Any) -> Any:
        return self.value


class ItemPatch(SlotPatch):
    """Replace ``mapping[key]`` by ``value``. ``create=True`` allows a new key."""

    how = "item"

    def __init__(self, mapping: Any, key: Any, value: Any, *, create: bool = False) -> None:
        super().__init__(slots.item_slot(mapping, key), create=create)
        self.value = value

    def build(self, below: Any) -> Any:
        return self.value


class GlobalPatch(Patch):
    """Replace a module global and every copy of it that ``from module import name`` made.

    All loaded modules are searched for the very object, under any name. At :meth:`revert` they
    are searched again for modules that imported ``value`` meanwhile. Process-wide by nature.
    """

    how = "global"

    def __init__(self, module: types.ModuleType, name: str, value: Any) -> None:
        self._home = AttributePatch(module, name, value)
        self._copies: list[AttributePatch] = []
        self._bystanders: set[tuple[int, str]] = set()

    def check(self) -> None:
        self._home.check()

    def apply(self) -> None:
        self._home.check()
        original = self._home.slot.read()
        # Whoever holds the replacement already (the module that defines it) is left alone.
        self._bystanders = {(id(m), name) for m, name in slots.holders(self._home.value)}
        self._home.apply()
        for module, name in slots.holders(original):
            copy = AttributePatch(module, name, self._home.value)
            self._copies.append(copy)
            copy.apply()

    def revert(self) -> str | None:
        notes = [copy.revert() for copy in reversed(self._copies)]
        notes.append(self._home.revert())
        if self._copies or self._bystanders:
            self._restore_late_imports()
        self._copies.clear()
        self._bystanders.clear()
        return "; ".join(note for note in notes if note) or None

    def _restore_late_imports(self) -> None:
        now = self._home.slot.read()
        for module, name in slots.holders(self._home.value):
            slot = slots.attribute_slot(module, name)
            if (id(module), name) not in self._bystanders and stacks.find(slot) is None:
                slot.write(now)

    @property
    def target(self) -> str:
        return self._home.target

    def changes(self) -> list[tuple[str, Any, Any]]:
        return [row for patch in (self._home, *self._copies) for row in patch.changes()]


class ForwardPatch(SlotPatch):
    """Run ``wrapper(wrapped, instance, args, kwargs)`` as the ``forward`` of one module.

    ``wrapped`` is what lies below: the ``forward`` of the module's class, or whatever the instance
    had before. The class is not touched, and the signature stays that of the stock ``forward``.
    """

    how = "forward"

    def __init__(self, module: nn.Module, wrapper: rebind.Wrapper) -> None:
        if not isinstance(module, nn.Module):
            raise UnpatchableTarget(
                f"ForwardPatch needs an nn.Module, found {type(module).__qualname__}"
            )
        if not callable(wrapper):
            raise UnpatchableTarget(f"the wrapper of a ForwardPatch is callable, found {wrapper!r}")
        super().__init__(slots.attribute_slot(module, "forward"), create=False)
        self.wrapper = wrapper
        self._made: dict[Any, Any] = {}

    def build(self, below: Any) -> Any:
        module = self.slot.owner
        inner, own = _function_below(module, below)
        if inner is None:
            return reclass.bind(module, rebind.compose_over(below, self.wrapper))
        if inner not in self._made:
            self._made = {inner: rebind.compose(inner, self.wrapper, permanent=not own)}
        return reclass.bind(module, self._made[inner])


class RebindPatch(SlotPatch):
    """Let the ``forward`` of one module see other globals than its class does.

    ``replacements`` maps names that the code of ``forward`` reads from its module, such as free
    functions, to what this one module shall find there.
    """

    how = "rebind"

    def __init__(
        self, module: nn.Module, replacements: Mapping[str, Any], *, slot: str = "forward"
    ) -> None:
        super().__init__(slots.attribute_slot(module, slot), create=False)
        self.replacements = dict(replacements)

    def build(self, below: Any) -> Any:
        module = self.slot.owner
        inner, own = _function_below(module, below)
        if inner is None:
            raise UnpatchableTarget(f"{self.slot} is no plain method: {below!r}")
        function = rebind.rebind(inner, self.replacements, permanent=not own)
        if self.slot.key == "forward":
            return reclass.bind(module, function)
        return types.MethodType(function, module)


class LossPatch(AttributePatch):
    """Replace the loss of one transformers model by ``fn(logits, labels, vocab_size, **kwargs)``."""

    how = "loss"

    def __init__(self, model: nn.Module, fn: Callable[..., Any]) -> None:
        # loss_function is a property without a deleter; it reads this attribute first.
        super().__init__(model, "_loss_function", fn, create=True)


def _function_below(module: nn.Module, below: Any) -> tuple[Any, bool]:
    """Return the function below that takes ``self``, or None, and whether the instance owns it."""
    if below is MISSING:
        return reclass.stock_class(module).forward, False
    if isinstance(below, types.MethodType) and below.__self__ is module:
        function = below.__func__
        # Under the wrapper that the module's class puts around every forward lies our own.
        return (function.__wrapped__ if hasattr(function, "_opake_class") else function), True
    return None, True
