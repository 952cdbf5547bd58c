"""Layers over a slot: a base value and what live patches put on top of it.

Any layer can leave at any time. The slot then holds what the remaining layers make of the base,
and the base itself, absent if it was absent, once the last layer is gone. A value that somebody
else wrote in the meantime is never overwritten.

The stacks of an ``nn.Module`` live in its own ``__dict__``, so that a lost handle keeps no model
alive; those of any other owner live in a table here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from opake._lock import LOCK as LOCK
from opake.engine import reclass
from opake.engine.slots import MISSING, Slot
from opake.engine.splice import splice
from opake.errors import ForeignWrite

_P = ParamSpec("_P")
_R = TypeVar("_R")

_STACKS: dict[Hashable, Stack] = {}
_NOTHING = object()


def locked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hold the lock during every call.

    In a frame of its own: in CPython 3.12, an interrupt inside an inlined comprehension leaves the
    with block around it without a release.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with LOCK:
            return function(*args, **kwargs)

    return call


class Layer:
    """One live patch on a slot: ``build(below)`` makes its value from the value beneath it."""

    __slots__ = ("build", "keepalive", "stack", "value")

    def __init__(self, build: Callable[[Any], Any], keepalive: Any = None) -> None:
        self.build = build
        self.keepalive = keepalive
        self.value: Any = MISSING
        self.stack: Stack | None = None


class Stack:
    """The base value of a slot and the layers on it, bottom first."""

    __slots__ = ("_pending", "_reported", "_stale", "base", "layers", "place", "slot", "written")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.place = slot.place
        self.base = slot.read()
        self.written = self.base
        self.layers: list[Layer] = []
        self._pending = self.base
        self._stale: list[Any] = []
        self._reported: Any = _NOTHING

    def is_ours(self, value: Any) -> bool:
        """Tell whether ``value``, just read from the slot, is what we put there."""
        if value is self.written or value is self._pending:
            return True
        return any(self.slot.same(value, known) for known in (self.written, *self._stale))

    def require_ours(self) -> Any:
        """Return what the slot holds; ForeignWrite where somebody else wrote it."""
        found = self.slot.read()
        if not self.is_ours(found):
            raise ForeignWrite(
                f"{self.slot} was rewritten while patched; undo that, or leave the patches on it, "
                "before patching it again"
            )
        return found

    @property
    def top(self) -> Any:
        """What the slot is meant to hold now."""
        return self.layers[-1].value if self.layers else self.base

    def push(self, layer: Layer) -> None:
        """Put ``layer`` on top; raises as :meth:`require_ours`."""
        found = self.require_ours()
        layer.value = layer.build(self.top)
        self.layers.append(layer)
        self._write(found, layer.value)

    def remove(self, layer: Layer) -> bool:
        """Take ``layer`` out. Returns False where somebody else's value is left in the slot.

        Each such value is reported once, to whichever layer leaves first.
        """
        index = self.layers.index(layer)
        value = self.layers[index - 1].value if index else self.base
        values, failure = [], None
        for above in self.layers[index + 1 :]:
            try:
                value = above.build(value)
            except Exception as error:
                # That layer keeps what it made last; ours leaves all the same.
                value, failure = above.value, error
            values.append(value)
        restored = self._settle(value)
        for above, value in zip(self.layers[index + 1 :], values, strict=True):
            above.value = value
        del self.layers[index]
        if failure is not None:
            raise failure
        return restored

    def _settle(self, value: Any) -> bool:
        """Bring ``value`` into the slot, or into what a known wrapper put around ours."""
        found = self.slot.read()
        if self.is_ours(found):
            self._write(found, value)
            return True
        known = self.slot.same(found, value) or self._splice(value) or self._moved(found)
        if not known:
            self._stale.append(self.written)  # whoever wrote over it may put it back
        self.written = self._pending = value
        if known or self.slot.same(found, self._reported):
            return True
        self._reported = found
        return False

    def _splice(self, value: Any) -> bool:
        if self.slot.key != "forward" or not isinstance(self.slot.owner, nn.Module):
            return False
        return splice(self.slot.owner, self.written, value)

    def _moved(self, found: Any) -> bool:
        """Deal with our own value from another slot of the module: accelerate's removed hook."""
        owner = self.slot.owner
        if not isinstance(owner, nn.Module):
            return False
        if found is MISSING:
            return self.slot.key in reclass.KEPT
        if self.slot.key == "forward" and reclass.is_stock(owner, found):
            return True
        for other in reclass.table(owner).values():
            if other is not self and other.is_ours(found):
                self.slot.write(reclass.below(owner, other.base))
                return True
        return False

    def _write(self, found: Any, value: Any) -> None:
        # Both what is there and what comes count as ours until the write is known to have
        # happened: an interrupt may arrive between any two lines.
        self.written = found
        self._pending = value
        if found is not value:
            self.slot.write(value)
        self.written = value


def push(slot: Slot, layer: Layer) -> None:
    """Push ``layer`` on the stack of ``slot``, creating the stack if there is none."""
    with LOCK:
        try:
            stack = find(slot)
            if stack is None:
                stack = Stack(slot)
                _enter(stack)
            layer.stack = stack
            stack.push(layer)
            _follow(stack)
        except BaseException:
            remove(slot, layer)
            raise


def remove(slot: Slot, layer: Layer) -> bool:
    """Remove ``layer`` from the stack of ``slot``; see :meth:`Stack.remove`.

    A layer that is not there (any more) counts as restored.
    """
    with LOCK:
        stack = layer.stack or find(slot)
        try:
            present = stack is not None and layer in stack.layers
            return stack.remove(layer) if stack is not None and present else True
        finally:
            # Also where the layer is gone: an interrupt may have come right after it left.
            _follow(stack)
            if stack is None or not stack.layers:
                _drop(slot, stack)


def find(slot: Slot) -> Stack | None:
    """Return the live stack of ``slot``."""
    if isinstance(slot.owner, nn.Module):
        return reclass.table(slot.owner).get(slot.key)
    return _STACKS.get(slot.place)


def base(slot: Slot) -> Any:
    """Return the value of ``slot`` beneath every live layer."""
    stack = find(slot)
    return slot.read() if stack is None else stack.base


def globals_over(value: Any) -> list[Stack]:
    """Return the live stacks on module globals whose base is ``value``."""
    found = [stack for stack in _STACKS.values() if stack.base is value]
    return [stack for stack in found if isinstance(stack.slot.owner, types.ModuleType)]


def _enter(stack: Stack) -> None:
    if isinstance(stack.slot.owner, nn.Module):
        reclass.adopt(stack.slot.owner)[stack.slot.key] = stack
    else:
        _STACKS[stack.place] = stack


def _drop(slot: Slot, stack: Stack | None) -> None:
    if isinstance(slot.owner, nn.Module):
        reclass.release(slot.owner, slot.key)
    elif stack is not None and _STACKS.get(stack.place) is stack:
        del _STACKS[stack.place]


def _follow(stack: Stack | None) -> None:
    if stack is None or stack.slot.key != "forward" or not isinstance(stack.slot.owner, nn.Module):
        return
    reclass.follow_forward(stack.slot.owner, stack.top)
