"""Attention: transformers' own dispatch, pointed at our key for the modules of one model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from opake.engine import AttributePatch, ItemPatch, Patch, stacks
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.families import Family
from opake.plan.step import Concern, Context, Need, Skip, Step, compat, compat_needs


def _sdpa(context: Context) -> Step | Skip:
    if context.inner.config._attn_implementation != "sdpa":
        return Skip("attention runs on eager")
    attention, masks, view = compat("attention"), compat("masks"), compat("config_view")
    keys = _register(attention.SDPA, attention.sdpa, masks.sdpa_mask)
    modules = context.modules(*context.family.attention)
    views: dict[int, Any] = {}
    patches: list[Patch] = []
    for module in modules:
        config = stacks.base(attribute_slot(module, "config"))
        if id(config) not in views:
            views[id(config)] = view.attention_view(config, attention.SDPA)
        patches.append(AttributePatch(module, "config", views[id(config)]))
    switches: list[Patch] = [_ViewSwitch(made, view.switch) for made in views.values()]
    target = f"{', '.join(context.family.attention)}.config"
    return Step([*keys, *switches, *patches], target, "registry", len(modules))


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
    classes = [(family.module, name, ()) for name in family.attention]
    return [*classes, *compat_needs("attention", "config_view", "masks")]


def _eager(context: Context) -> Step | Skip:
    if context.inner.config._attn_implementation != "eager":
        return Skip("attention runs on sdpa")
    count = len(context.modules(*context.family.attention))
    note = "works under functorch as it is"
    return Step([], "eager_attention_forward", "stock", count, note)


SDPA = Concern(_sdpa, _sdpa_needs)
EAGER = Concern(_eager, lambda family: [(family.module, name, ()) for name in family.attention])
