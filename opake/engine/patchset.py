"""Ordered sets of patches that are applied and undone together."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from opake.engine import shared, stacks
from opake.engine.patch import Patch
from opake.engine.report import Change, Diff, Report, Row
from opake.errors import AlreadyPatched, OpakeError, RestoreError, RestoreWarning

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
                raise TypeError(f"a PatchSet is made of Patch objects, found {patch!r}")
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
        with stacks.LOCK:
            if self.applied:
                raise AlreadyPatched(
                    f"this set is applied already (opened at {self.opened_at}); unpatch it first, "
                    "or build a second set"
                )
            for patch in self.patches:
                patch.check()
            self._applied = []
            try:
                self._anchor()
                for patch in self.patches:
                    self._applied.append(patch)
                    logger.debug("apply %r", patch)
                    patch.apply()
                self.opened_at = _caller()
                _LIVE.add(self)
            except BaseException:
                self._undo()
                raise
            return self

    def unpatch(self) -> None:
        """Undo every change; a second call does nothing.

        Raises :class:`~opake.errors.RestoreError` after trying every slot, if one failed.
        """
        with stacks.LOCK:
            if not self.applied:
                return
            failed, left, interrupt = self._undo()
        if interrupt is not None:
            raise interrupt
        if failed:
            raise RestoreError(
                "could not restore:\n" + "\n".join(f"  {note}" for note in failed)
            ) from None
        if left:
            message = "left as somebody else wrote them:\n" + "\n".join(f"  {n}" for n in left)
            if self.strict:
                raise RestoreError(message)
            warnings.warn(message, RestoreWarning, stacklevel=_depth())

    def _undo(self) -> tuple[list[str], list[str], BaseException | None]:
        failed, left, interrupt = [], [], None
        pending = self._applied or []
        while pending:
            patch = pending[-1]
            try:
                note = patch.revert()
                if note:
                    left.append(note)
            except Exception as error:
                failed.append(f"{patch!r}: {type(error).__name__}: {error}")
            except BaseException as error:
                if interrupt is None:
                    interrupt = error
                    continue  # once more: the interrupt may have come before the write
                failed.append(f"{patch!r}: {type(error).__name__}: {error}")
            pending.pop()
        self._applied = None
        self._release()
        _LIVE.discard(self)
        return failed, left, interrupt

    # ---- lifetime: a set lives as long as what it patched

    def _anchor(self) -> None:
        modules = self._modules()
        for patch in self.patches:
            if hasattr(patch, "holder"):
                # Only what a module owns may hold the set: a global slot would keep models alive.
                patch.holder = self if isinstance(patch.slot.owner, nn.Module) else None
        if not modules:
            _ANCHORED.append(self)

    def _release(self) -> None:
        for patch in self.patches:
            if hasattr(patch, "holder"):
                patch.holder = None
        if self in _ANCHORED:
            _ANCHORED.remove(self)

    def _modules(self) -> list[nn.Module]:
        owners = (getattr(getattr(patch, "slot", None), "owner", None) for patch in self.patches)
        return [owner for owner in owners if isinstance(owner, nn.Module)]

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
        except OpakeError as restore:
            if error is None:
                raise
            # The exception of the body always gets out; what went wrong here rides along.
            error.add_note(f"opake: {restore}")
            logger.error("%s", restore)

    def __call__(self, function: F) -> F:
        """Decorate ``function``: every call runs inside the set."""
        kinds = (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        if isinstance(function, type) or any(kind(function) for kind in kinds):
            raise TypeError(
                f"{function!r} returns before its body has run, so the patches would be gone; "
                "use `with` inside it"
            )

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
        return Diff(Change(*change) for patch in self._applied or () for change in patch.changes())

    def __repr__(self) -> str:
        state = f"applied at {self.opened_at}" if self.applied else "not applied"
        return f"<{type(self).__qualname__}: {len(self)} patches, {state}>"


def active() -> list[PatchSet]:
    """Return the sets that are applied right now; each has ``opened_at``, a ``file:line``."""
    with stacks.LOCK:
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


def _depth() -> int:
    for depth, _ in _frames():
        return max(depth - 1, 1)
    return 2
