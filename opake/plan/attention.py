"""Attention: transformers' own dispatch, pointed at our key for the modules of one model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from opake.engine import AttributePatch, ForwardPatch, ItemPatch, Patch, stacks
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.families import Family
from opake.plan.step import Concern, Context, Need, Skip, Step, compat, compat_needs

_NONE = Skip("the model has no attention")


def _sdpa(context: Context) -> Step | Skip:
    family = context.family
    if not _attends(family):
        return _NONE
    if context.implementation != "sdpa":
        return Skip("attention runs on eager")
    modules, own = context.modules(*family.attention), context.modules(*family.own_sdpa)
    attention = compat("attention")
    patches: list[Patch] = [ForwardPatch(module, attention.own_sdpa) for module in own]
    targets = [f"{name}.forward" for name in family.own_sdpa]
    if modules:
        patches += _dispatched(modules, attention)
        targets += [f"{', '.join(family.attention)}.config"]
    how = "registry" if modules else "forward"
    return Step(patches, ", ".join(targets), how, len(modules) + len(own))


def _attends(family: Family) -> bool:
    return bool(family.attention or family.own_sdpa)


def _dispatched(modules: Sequence[nn.Module], attention: Any) -> list[Patch]:
    """Let the modules find our key in their config."""
    masks, view = compat("masks"), compat("config_view")
    keys = _register(attention.SDPA, attention.sdpa, masks.sdpa_mask)
    views: dict[int, Any] = {}
    patches: list[Patch] = []
    for module in modules:
        config = stacks.base(attribute_slot(module, "config"))
        if id(config) not in views:
            views[id(config)] = view.attention_view(config, attention.SDPA)
        patches.append(AttributePatch(module, "config", views[id(config)]))
    switches: list[Patch] = [_ViewSwitch(made, view.switch) for made in views.values()]
    return [*keys, *switches, *patches]


def _register(key: str, attention: Any, mask: Any) -> list[Patch]:
    utils = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    mappings = {
        "attention": (utils.ALL_ATTENTION_FUNCTIONS._global_mapping, attention),
        "mask": (masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, mask),
    }
    return [
        SharedPatch((kind, key), ItemPatch(mapping, key, value, create=True))
        for kind, (mapping, value) in mappings.items()
    ]


class _ViewSwitch(Patch):
    """Lets a config view answer with our key while the scope lasts."""

    how = "view"

    def __init__(self, view: Any, switch: Callable[[Any, bool], None]) -> None:
        self.view = view
        self.switch = switch  # held: nothing can be imported while the interpreter exits

    def apply(self) -> None:
        self.switch(self.view, True)

    def revert(self) -> None:
        self.switch(self.view, False)


def _sdpa_needs(family: Family) -> list[Need]:
    return [*_eager_needs(family), *compat_needs("attention", "config_view", "masks")]


def _eager(context: Context) -> Step | Skip:
    if not _attends(context.family):
        return _NONE
    if context.implementation != "eager":
        return Skip("attention runs on sdpa")
    names = (*context.family.attention, *context.family.own_sdpa)
    note = "works under functorch as it is"
    return Step([], "eager_attention_forward", "stock", len(context.modules(*names)), note)


def _eager_needs(family: Family) -> list[Need]:
    return [(family.module, name, ()) for name in (*family.attention, *family.own_sdpa)]


SDPA = Concern(_sdpa, _sdpa_needs)
EAGER = Concern(_eager, _eager_needs)
