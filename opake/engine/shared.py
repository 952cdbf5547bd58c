"""Process-wide changes that several scopes hold together.

Each is applied with the first scope that asks for it and undone with the last, also where that
scope was lost with its model.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from opake.engine import stacks
from opake.engine.patch import Patch


@dataclass(eq=False)
class _Piece:
    patch: Patch
    holders: list[weakref.ref[Any]] = field(default_factory=list)


_PIECES: dict[Hashable, _Piece] = {}


class SharedPatch(Patch):
    """One scope's share in the process-wide ``patch`` known under ``key``."""

    def __init__(self, key: Hashable, patch: Patch) -> None:
        self.key = key
        self.patch = patch
        self._held = False

    @property
    def how(self) -> str:  # type: ignore[override]
        return self.patch.how

    @property
    def target(self) -> str:
        return self.patch.target

    def check(self) -> None:
        collect()
        if self.key not in _PIECES:
            self.patch.check()

    def apply(self) -> None:
        with stacks.LOCK:
            collect()
            piece = _PIECES.get(self.key)
            if piece is None:
                piece = _PIECES[self.key] = _Piece(self.patch)
            self._held = True
            first = not piece.holders
            piece.holders.append(weakref.ref(self))
            if first:
                piece.patch.apply()

    def revert(self) -> str | None:
        with stacks.LOCK:
            if not self._held:
                return None
            piece = _PIECES.get(self.key)
            if piece is not None:
                piece.holders = [ref for ref in piece.holders if ref() not in (None, self)]
            note = collect()
            self._held = False
            return note

    def changes(self) -> list[tuple[str, Any, Any]]:
        piece = _PIECES.get(self.key)
        return piece.patch.changes() if self._held and piece is not None else []

    def __repr__(self) -> str:
        return f"SharedPatch({self.patch!r})"


def collect() -> str | None:
    """Undo the pieces that no living scope holds."""
    notes = []
    with stacks.LOCK:
        for key, piece in list(_PIECES.items()):
            piece.holders = [ref for ref in piece.holders if ref() is not None]
            if not piece.holders:
                note = piece.patch.revert()
                del _PIECES[key]
                if note:
                    notes.append(note)
    return "; ".join(notes) or None
