"""Attention: transformers' own dispatch, pointed at our key for the modules of one model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from opake import symbols
from opake.engine import AttributePatch, ForwardPatch, ItemPatch, Patch, stacks
from opake.engine.reclass import stock_class
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.families import Family
from opake.plan.modules import is_of_file, stock_method
from opake.plan.step import Concern, Context, Need, Skip, Step, compat, compat_needs

_NONE = Skip("the model has no attention")


def _sdpa(context: Context) -> Step | Skip:
    family = context.family
    if not _attends(family):
        return _NONE
    if context.implementation != "sdpa":
        return Skip("attention runs on eager")
    attention = compat("attention")
    own = context.modules(*family.own_sdpa)
    found = context.modules(*family.attention)
    modules = [module for module in found if _only_dispatches(module, family)]
    own += [module for module in found if module not in modules]
    patches: list[Patch] = [ForwardPatch(module, attention.own_sdpa) for module in own]
    names = dict.fromkeys(stock_class(module).__name__ for module in own)
    targets = [f"{name}.forward" for name in names]
    if modules:
        patches += _dispatched(modules, attention)
        targets += [f"{', '.join(family.attention)}.config"]
    how = "registry" if modules else "forward"
    return Step(patches, ", ".join(targets), how, len(modules) + len(own))


def _only_dispatches(module: nn.Module, family: Family) -> bool:
    """Tell whether a module does nothing with its implementation but look it up, and finds stock's.

    A class of somebody's may compare the name; then it must go on reading stock's, and so must all
    where somebody put another function under it.
    """
    if not compat("attention").is_stocks():
        return False
    classes = [symbols.resolve(family.module, name) for name in family.attention]
    forward = stock_method(module)
    return any(forward is cls.forward and is_of_file(forward, cls) for cls in classes)


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
