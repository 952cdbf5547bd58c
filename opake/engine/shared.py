"""Process-wide changes: those that several scopes hold together, and those of lost scopes.

A shared piece is applied with the first scope that asks for it and undone with the last. Where a
set was lost together with its modules, nobody can leave it any more: what it changed elsewhere is
undone the next time anybody asks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from opake.engine import stacks
from opake.engine.patch import Patch
from opake.errors import AlreadyPatched

logger = logging.getLogger("opake")


@dataclass(eq=False)
class _Piece:
    patch: Patch
    holders: list[SharedPatch] = field(default_factory=list)


_PIECES: dict[Hashable, _Piece] = {}
_WATCHED: list[tuple[weakref.ref[Any], Sequence[Patch]]] = []


class SharedPatch(Patch):
    """One scope's share in the process-wide ``patch`` known under ``key``."""

    process_wide = True

    def __init__(self, key: Hashable, patch: Patch) -> None:
        self.key = key
        self.patch = patch

    @property
    def how(self) -> str:  # type: ignore[override]
        return self.patch.how

    @property
    def target(self) -> str:
        return self.patch.target

    def check(self) -> None:
        collect()
        piece = _PIECES.get(self.key)
        if piece is None:
            self.patch.check()
        elif self in piece.holders:
            raise AlreadyPatched(f"{self!r} is applied already")

    @stacks.locked
    def apply(self) -> None:
        self.check()
        piece = _PIECES.setdefault(self.key, _Piece(self.patch))
        piece.holders.append(self)
        if len(piece.holders) == 1:
            piece.patch.apply()

    @stacks.locked
    def revert(self) -> str | None:
        piece = _PIECES.get(self.key)
        if piece is None:
            return None
        others = [holder for holder in piece.holders if holder is not self]
        if others:
            piece.holders = others
            return None
        try:
            note = piece.patch.revert()
        except Exception:
            del _PIECES[self.key]
            raise
        del _PIECES[self.key]
        return note

    def changes(self) -> list[tuple[str, Any, Any]]:
        piece = _PIECES.get(self.key)
        return piece.patch.changes() if piece is not None and self in piece.holders else []

    def __repr__(self) -> str:
        return f"SharedPatch({self.patch!r})"


def watch(holder: Any, patches: Sequence[Patch]) -> None:
    """Undo ``patches`` once ``holder`` is lost."""
    if patches:
        _WATCHED.append((weakref.ref(holder), patches))


def unwatch(holder: Any) -> None:
    """Forget ``holder``, which undid its patches itself."""
    _WATCHED[:] = [entry for entry in _WATCHED if entry[0]() is not holder]


@stacks.locked
def collect() -> None:
    """Undo what lost sets left behind."""
    for entry in [entry for entry in _WATCHED if entry[0]() is None]:
        for patch in reversed(entry[1]):
            try:
                note = patch.revert()
            except Exception as error:
                note = f"{patch!r}: {type(error).__name__}: {error}"
            if note:
                logger.warning("left by a set that was lost: %s", note)
        _WATCHED.remove(entry)
