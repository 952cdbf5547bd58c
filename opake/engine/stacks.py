"""Layers over a slot: a base value and what live patches put on top of it.

Any layer can leave at any time. The slot then holds what the remaining layers make of the base,
and the base itself, absent if it was absent, once the last layer is gone. A value that somebody
else wrote in the meantime is never overwritten.

The stacks of an ``nn.Module`` live in its own ``__dict__``, so that a lost handle keeps no model
alive; those of any other owner live in a table here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opake._lock import LOCK as LOCK
from opake.engine import reclass
from opake.engine.slots import MISSING, Slot
from opake.engine.splice import splice
from opake.errors import ForeignWrite

_STACKS: dict[tuple[int, Any], Stack] = {}


class Layer:
    """One live patch on a slot: ``build(below)`` makes its value from the value beneath it."""

    __slots__ = ("build", "keepalive", "value")

    def __init__(self, build: Callable[[Any], Any], keepalive: Any = None) -> None:
        self.build = build
        self.keepalive = keepalive
        self.value: Any = MISSING


class Stack:
    """The base value of a slot and the layers on it, bottom first."""

    __slots__ = ("_pending", "base", "layers", "slot", "surrendered", "written")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.base = slot.read()
        self.written = self.base
        self._pending = self.base
        self.layers: list[Layer] = []
        self.surrendered = False

    def is_ours(self, value: Any) -> bool:
        """Tell whether ``value``, just read from the slot, is what we put there."""
        return not self.surrendered and (value is self.written or value is self._pending)

    def require_ours(self) -> None:
        """Raise :class:`~opake.errors.ForeignWrite` where somebody else wrote the slot."""
        if not self.is_ours(self.slot.read()):
            raise ForeignWrite(
                f"{self.slot} was rewritten while patched; undo that, or leave the patches on it, "
                "before patching it again"
            )

    def push(self, layer: Layer) -> None:
        """Put ``layer`` on top; raises as :meth:`require_ours`."""
        self.require_ours()
        layer.value = layer.build(self.written)
        self.layers.append(layer)
        self._write(layer.value)

    def remove(self, layer: Layer) -> bool:
        """Take ``layer`` out. Returns False where somebody else's value was left in the slot."""
        index = self.layers.index(layer)
        rest = self.layers[index + 1 :]
        value = self.layers[index - 1].value if index else self.base
        if not self.surrendered:
            for above in rest:
                value = above.value = above.build(value)
            if self.is_ours(self.slot.read()):
                self._write(value)
            elif self._splice(value):
                self.written = self._pending = value
            else:
                self.surrendered = True
        del self.layers[index]
        return not self.surrendered

    def _splice(self, value: Any) -> bool:
        if self.slot.key != "forward" or not isinstance(self.slot.owner, nn.Module):
            return False
        return splice(self.slot.owner, self.written, value)

    def _write(self, value: Any) -> None:
        # Both the old and the new value count as ours until the write is known to have happened:
        # an interrupt may arrive between any two lines.
        self._pending = value
        if self.slot.read() is not value:
            self.slot.write(value)
        self.written = value


def push(slot: Slot, layer: Layer) -> None:
    """Push ``layer`` on the stack of ``slot``, creating the stack if there is none."""
    with LOCK:
        table, key = _table(slot)
        stack = table.get(key)
        try:
            if stack is None:
                stack = table[key] = Stack(slot)
            stack.push(layer)
            _follow(stack)
        except BaseException:
            if stack is not None and layer in stack.layers:
                stack.remove(layer)
            _drop_if_empty(slot)
            raise


def remove(slot: Slot, layer: Layer) -> bool:
    """Remove ``layer`` from the stack of ``slot``; see :meth:`Stack.remove`.

    A layer that is not there (any more) counts as restored.
    """
    with LOCK:
        stack = find(slot)
        if stack is None or layer not in stack.layers:
            _drop_if_empty(slot)
            return True
        restored = stack.remove(layer)
        _follow(stack)
        _drop_if_empty(slot)
        return restored


def find(slot: Slot) -> Stack | None:
    """Return the live stack of ``slot``."""
    if isinstance(slot.owner, nn.Module):
        return reclass.table(slot.owner).get(slot.key)
    return _STACKS.get((id(slot.owner), slot.key))


def base(slot: Slot) -> Any:
    """Return the value of ``slot`` beneath every live layer."""
    stack = find(slot)
    return slot.read() if stack is None else stack.base


def _table(slot: Slot) -> tuple[dict[Any, Stack], Any]:
    if isinstance(slot.owner, nn.Module):
        return reclass.adopt(slot.owner), slot.key
    return _STACKS, (id(slot.owner), slot.key)


def _follow(stack: Stack) -> None:
    if isinstance(stack.slot.owner, nn.Module) and stack.slot.key == "forward":
        reclass.follow_forward(stack.slot.owner)


def _drop_if_empty(slot: Slot) -> None:
    stack = find(slot)
    if stack is not None and stack.layers:
        return
    if isinstance(slot.owner, nn.Module):
        reclass.release(slot.owner, slot.key)
    elif stack is not None:
        del _STACKS[(id(slot.owner), slot.key)]
