"""What a reversible change is. Knows classes, instances, modules and mappings, not transformers."""

from opake.engine.patch import (
    AttributePatch,
    ForwardPatch,
    GlobalPatch,
    ItemPatch,
    LossPatch,
    Patch,
    RebindPatch,
)
from opake.engine.patchset import PatchSet, active
from opake.engine.report import Report, Row
from opake.engine.slots import MISSING

__all__ = [
    "MISSING",
    "AttributePatch",
    "ForwardPatch",
    "GlobalPatch",
    "ItemPatch",
    "LossPatch",
    "Patch",
    "PatchSet",
    "RebindPatch",
    "Report",
    "Row",
    "active",
]
