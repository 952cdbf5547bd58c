"""Ordered sets of patches that are applied and undone together."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from opake.engine import shared, stacks
from opake.engine.patch import Patch, SlotPatch
from opake.engine.report import Change, Diff, Report, Row
from opake.errors import (
    AlreadyPatched,
    InvalidArgument,
    OpakeError,
    RestoreError,
    RestoreWarning,
    UnpatchableTarget,
)

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("opake")

_LIVE: weakref.WeakSet[PatchSet] = weakref.WeakSet()
_ANCHORED: list[PatchSet] = []


class PatchSet:
    """Patches that are applied in order and undone together.

    A context manager, a decorator, and a pair :meth:`patch` / :meth:`unpatch`. ``a + b`` joins two
    sets. A set can be used again after it left, but not while it is applied.

    Args:
        patches: the changes, in the order in which they are applied.
        strict: raise :class:`~opake.errors.RestoreError` after leaving if somebody else's value
            was found in a slot (it is left as it is either way), instead of a warning.
    """

    def __init__(self, patches: Iterable[Patch] = (), *, strict: bool = False) -> None:
        self.patches = tuple(patches)
        for patch in self.patches:
            if not isinstance(patch, Patch):
                raise UnpatchableTarget(f"a PatchSet is made of Patch objects, found {patch!r}")
        if len({id(patch) for patch in self.patches}) < len(self.patches):
            raise InvalidArgument("the same Patch object is in the set twice; make one for each")
        self.strict = strict
        self.opened_at = ""
        self._applied: list[Patch] | None = None

    @property
    def applied(self) -> bool:
        """True while the changes are in place."""
        return self._applied is not None

    # ---- applying and undoing

    def patch(self) -> PatchSet:
        """Apply every patch, or none: if one raises, those before it are undone."""
        begun = False
        try:  # around everything: an interrupt may come when all is applied, before we return
            with stacks.LOCK:
                self._require_idle()
                for patch in self.patches:
                    patch.check()
                begun, self._applied = True, []
                self._anchor()
                for patch in self.patches:
                    self._applied.append(patch)
                    logger.debug("apply %r", patch)
                    patch.apply()
                self.opened_at = _caller()
                _LIVE.add(self)
                return self
        except BaseException as error:
            if begun:
                with stacks.LOCK:
                    self._undo().note_on(error)
            raise

    def unpatch(self) -> None:
        """Undo every change; a second call does nothing.

        Raises :class:`~opake.errors.RestoreError` after trying every slot, if one failed.
        """
        with stacks.LOCK:
            try:
                outcome = self._undo()
            except BaseException:  # an interrupt that came between two patches
                self._undo()
                raise
        outcome.tell(self.strict)

    def _require_idle(self) -> None:
        if self.applied:
            raise AlreadyPatched(
                f"this set is applied already (opened at {self.opened_at}); unpatch it first, "
                "or build a second set"
            )
        mine = {id(patch) for patch in self.patches}
        for other in _LIVE:
            shared_patch = next((p for p in other._applied or () if id(p) in mine), None)
            if shared_patch is not None:
                raise AlreadyPatched(
                    f"{shared_patch!r} is applied already, by the set opened at "
                    f"{other.opened_at}; a Patch object serves one live set at a time"
                )

    def _undo(self) -> _Outcome:
        outcome = _Outcome()
        while self._applied is not None:
            try:
                self._undo_last(self._applied, outcome)
            except BaseException as error:  # an interrupt: go on, raise it at the end
                outcome.interrupt = outcome.interrupt or error
        return outcome

    def _undo_last(self, pending: list[Patch], outcome: _Outcome) -> None:
        if not pending:
            self._release()
            _LIVE.discard(self)
            self._applied = None
            return
        patch = pending[-1]
        try:
            note = patch.revert()
        except Exception as error:
            pending.pop()
            outcome.fail(patch, error)
        except BaseException as error:
            if outcome.retried is not patch:
                outcome.retried = patch
                raise  # and once more: the interrupt may have come before the write
            pending.pop()
            outcome.fail(patch, error)
        else:
            pending.pop()
            if note:
                outcome.left.append(note)

    # ---- lifetime: a set lives as long as what it patched

    def _anchor(self) -> None:
        for patch in self.patches:
            if isinstance(patch, SlotPatch):
                # Only what a module owns may hold the set: a global slot would keep models alive.
                patch.holder = None if patch.process_wide else self
        if any(isinstance(p, SlotPatch) and not p.process_wide for p in self.patches):
            shared.watch(self, [patch for patch in self.patches if patch.process_wide])
        else:
            _ANCHORED.append(self)

    def _release(self) -> None:
        for patch in self.patches:
            if isinstance(patch, SlotPatch):
                patch.holder = None
        shared.unwatch(self)
        if self in _ANCHORED:
            _ANCHORED.remove(self)

    # ---- context manager, decorator, container

    def __enter__(self) -> PatchSet:
        return self.patch()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.unpatch()
        except (OpakeError, RestoreWarning) as restore:  # a warning, where warnings are errors
            if error is None:
                raise
            # The exception of the body always gets out; what went wrong here rides along.
            error.add_note(f"opake: {restore}")
            logger.error("%s", restore)
        finally:
            if self.applied:  # interrupted before the first step
                self._undo()

    def __call__(self, function: F) -> F:
        """Decorate ``function``: every call runs inside the set."""
        kinds = (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        run = getattr(type(function), "__call__", None)  # noqa: B004  # of a callable object
        if isinstance(function, type) or any(kind(f) for kind in kinds for f in (function, run)):
            raise UnpatchableTarget(
                f"{function!r} returns before its body has run, so the patches would be gone; "
                "use `with` inside it"
            )
        if not callable(function):
            raise UnpatchableTarget(f"a PatchSet decorates functions, found {function!r}")

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __add__(self, other: PatchSet) -> PatchSet:
        if not isinstance(other, PatchSet):
            return NotImplemented
        return PatchSet((*self.patches, *other.patches), strict=self.strict or other.strict)

    def __len__(self) -> int:
        return len(self.patches)

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)

    def __bool__(self) -> bool:
        return True

    # ---- seeing

    def explain(self) -> Report:
        """Return one row per patch; nothing is applied."""
        return Report(Row("-", p.target, p.how, 1, "on") for p in self.patches)

    def diff(self) -> Diff:
        """Return the slots that are changed right now, with the values before and after."""
        changes = (change for patch in self._applied or () for change in patch.changes())
        return Diff({change[0]: Change(*change) for change in changes}.values())

    def __repr__(self) -> str:
        state = f"applied at {self.opened_at}" if self.applied else "not applied"
        return f"<{type(self).__qualname__}: {len(self)} patches, {state}>"


@dataclass
class _Outcome:
    """What happened while a set was undone."""

    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    cause: BaseException | None = None
    interrupt: BaseException | None = None
    retried: Patch | None = None

    def fail(self, patch: Patch, error: BaseException) -> None:
        self.cause = self.cause or error
        self.failed.append(f"{patch!r}: {type(error).__name__}: {error}")

    @property
    def text(self) -> str:
        lines = []
        if self.failed:
            lines += ["could not restore:", *(f"  {note}" for note in self.failed)]
        if self.left:
            lines += ["left as somebody else wrote them:", *(f"  {note}" for note in self.left)]
        return "\n".join(lines)

    def note_on(self, error: BaseException) -> None:
        """Let ``error``, which made us undo, carry what went wrong meanwhile."""
        if self.text:
            error.add_note(f"opake: {self.text}")
        if self.interrupt is not None:
            raise self.interrupt from error

    def tell(self, strict: bool) -> None:
        """Raise or warn, once, about everything."""
        if self.interrupt is not None:
            if self.text:
                self.interrupt.add_note(f"opake: {self.text}")
            raise self.interrupt
        if self.failed or (self.left and strict):
            raise RestoreError(self.text) from self.cause
        if self.left:
            warnings.warn(self.text, RestoreWarning, stacklevel=caller_depth())


@stacks.locked
def active() -> list[PatchSet]:
    """Return the sets that are applied right now; each has ``opened_at``, a ``file:line``."""
    shared.collect()
    return [live for live in _LIVE if live.applied]


def _frames() -> Iterator[tuple[int, Any]]:
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] != "opake":
            yield depth, frame
        frame = frame.f_back  # type: ignore[assignment]


def _caller() -> str:
    for _, frame in _frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "?"


def caller_depth() -> int:
    """Return the ``stacklevel`` at which a warning points to the first frame outside opake."""
    for depth, _ in _frames():
        return max(depth - 1, 1)
    return 2
