"""Scoped and exactly reversible patches for Hugging Face models.

Importing this imports neither torch nor transformers: every name is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opake import errors as errors
    from opake import functional as functional
    from opake import kernels as kernels
    from opake import patches as patches
    from opake.api import check as check
    from opake.api import guard_stats as guard_stats
    from opake.api import patch as patch
    from opake.api import patched as patched
    from opake.api import runtime as runtime
    from opake.api import unpatch as unpatch
    from opake.engine import AttributePatch as AttributePatch
    from opake.engine import ForwardPatch as ForwardPatch
    from opake.engine import GlobalPatch as GlobalPatch
    from opake.engine import ItemPatch as ItemPatch
    from opake.engine import LossPatch as LossPatch
    from opake.engine import Patch as Patch
    from opake.engine import PatchSet as PatchSet
    from opake.engine import RebindPatch as RebindPatch
    from opake.engine import active as active
    from opake.families import Family as Family
    from opake.families import register_family as register_family

__version__ = "0.1.0"

_WHERE = {
    **dict.fromkeys(
        ("check", "guard_stats", "patch", "patched", "runtime", "unpatch"), "opake.api"
    ),
    **dict.fromkeys(
        (
            "AttributePatch",
            "ForwardPatch",
            "GlobalPatch",
            "ItemPatch",
            "LossPatch",
            "Patch",
            "PatchSet",
            "RebindPatch",
            "active",
        ),
        "opake.engine",
    ),
    **dict.fromkeys(("Family", "register_family"), "opake.families"),
}
_MODULES = ("errors", "functional", "kernels", "patches", "testing")

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _WHERE and name not in _MODULES:
        raise AttributeError(f"module 'opake' has no attribute {name!r}")
    from opake._lock import LOCK

    with LOCK:  # a fork waits, so no child is born in the middle of an import
        if name in _MODULES:
            return importlib.import_module(f"opake.{name}")
        value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
