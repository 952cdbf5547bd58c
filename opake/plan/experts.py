"""Experts: eager ones that ``vmap`` can map, LoRA on a stack of them, and grouped GEMMs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from opake import symbols
from opake.engine import AttributePatch, ForwardPatch, RebindPatch, stacks
from opake.engine.patch import SlotPatch
from opake.engine.reclass import is_stock, stock_class, table
from opake.engine.shared import SharedPatch
from opake.engine.slots import MISSING, attribute_slot
from opake.errors import MissingTarget, UnpatchableTarget
from opake.families import Family
from opake.plan.modules import (
    KEPT,
    own_slot,
    positional,
    refuse_foreign_forward,
    stock_method,
)
from opake.plan.step import Concern, Context, Need, ProcessConcern, Skip, Step, compat, compat_needs

_LORA = "_activate_lora"


def _moe(context: Context) -> Step | Skip:
    experts = compat("experts")
    modules = context.all_modules
    stacked: list[Any] = [module for module in modules if experts.is_stacked(module)]
    adapted = [module for module in modules if experts.adapts_parameter(module)]
    for module in stacked:
        refuse_foreign_forward(module)
    patches: list[SlotPatch] = [_ExpertsPatch(module, experts) for module in stacked]
    patches += [ForwardPatch(m, experts.activate_lora, slot=_LORA) for m in adapted]
    patches += _scattering(modules)
    if not patches:
        names = dict.fromkeys(stock_class(module).__name__ for module in modules)
        left = [name for name in names if name.endswith("Experts")]
        what = f"{', '.join(left)}: left to HF" if left else "the model has no experts"
        return Skip(what)
    patches += _router_loss(context.inner, experts)
    slots = [patch.slot for patch in patches]
    names = dict.fromkeys(
        f"{stock_class(slot.owner).__name__}.{'forward' if slot.key == KEPT else slot.key}"
        for slot in slots
    )
    used = dict.fromkeys(str(module.config._experts_implementation) for module in stacked)
    note = f"experts_implementation={', '.join(used)}" if used else "LoRA on bare parameters"
    return Step([*patches], ", ".join(names), "forward", len(patches), note)


def _scattering(modules: Iterable[nn.Module]) -> list[SlotPatch]:
    """Wrap routers that choose groups of experts, and other modules that scatter in place."""
    scatter = compat("scatter")
    found = [module for module in modules if scatter.scatters(stock_class(module))]
    for module in found:
        refuse_foreign_forward(module)
    return [ForwardPatch(module, scatter.out_of_place) for module in found]


class _ExpertsPatch(ForwardPatch):
    """Puts our experts right over the stock ``forward``, beneath every layer that is there.

    They stand in for stock's, so a layer or a hook below them would not run.
    """

    def __init__(self, module: nn.Module, experts: Any) -> None:
        self._experts = experts
        self._eager = experts.forward(positional(module))
        super().__init__(module, self._eager, slot=own_slot(module))

    def build(self, below: Any) -> Any:
        if below is MISSING or is_stock(self.slot.owner, below):
            self.wrapper = self._eager
        else:
            self.wrapper = self._experts.below if self._others() else self._experts.out_of_reach
        return super().build(below)

    def _others(self) -> bool:
        """Tell whether another scope put its experts here, which are beneath ours then."""
        layers = [layer for stack in table(self.slot.owner).values() for layer in stack.layers]
        owners = [getattr(layer.build, "__self__", None) for layer in layers]
        return any(isinstance(x, _ExpertsPatch) and x is not self for x in owners)

    @stacks.locked
    def apply(self) -> None:
        stack = stacks.find(self.slot)
        above = [] if stack is None else list(stack.layers)
        try:
            for layer in reversed(above):
                stacks.remove(self.slot, layer)
            super().apply()
        finally:
            stack = stacks.find(self.slot)
            held = [] if stack is None else list(stack.layers)  # an interrupt leaves some there
            for layer in above:
                if layer not in held:
                    stacks.push(self.slot, layer)


def maps(patch: Any) -> bool:
    """Tell whether a patch is one that runs stock's experts, and lets ``vmap`` map them."""
    if not isinstance(patch, _ExpertsPatch):
        return False
    return patch.wrapper is not compat("experts").out_of_reach


def _router_loss(inner: nn.Module, experts: Any) -> list[SlotPatch]:
    forward = stock_method(inner)
    stock = getattr(importlib.import_module(forward.__module__), experts.ROUTER_LOSS, None)
    if stock is None or symbols.parameters(stock) != experts.ROUTER_LOSS_PARAMETERS:
        return []
    replacements = {experts.ROUTER_LOSS: experts.router_loss(forward.__module__)}
    patch = RebindPatch(inner, replacements, slot=own_slot(inner))
    try:
        patch.check()
    except (MissingTarget, UnpatchableTarget):
        # No loss of a router here, or one out of sight: functorch raises where stock's cannot run.
        return []
    return [patch]


def _moe_needs(family: Family) -> list[Need]:
    return compat_needs("experts", "transforms")


def _vmap_grouped_mm() -> Step | Skip:
    moe = importlib.import_module("transformers.integrations.moe")
    stock = stacks.base(attribute_slot(moe, "_can_use_grouped_mm"))
    replacement = compat("experts").can_use_grouped_mm(stock)
    patch = AttributePatch(moe, "_can_use_grouped_mm", replacement)
    note = "process-wide; changes nothing outside functorch transforms"
    return Step([SharedPatch("vmap_grouped_mm", patch)], patch.target, "global", 1, note)


def _vmap_grouped_mm_needs() -> list[Need]:
    parameters = ("input", "weight", "offs")
    return [
        ("transformers.integrations.moe", "_can_use_grouped_mm", parameters),
        *compat_needs("experts", "transforms"),
    ]


def _grouped_mm(context: Context) -> Step | Skip:
    if not any(map(compat("experts").is_stacked, context.all_modules)):
        return Skip("the model has no experts")
    return _vmap_grouped_mm()


def _grouped_mm_needs(family: Family) -> list[Need]:
    return _vmap_grouped_mm_needs()


MOE = Concern(_moe, _moe_needs)
GROUPED_MM = Concern(_grouped_mm, _grouped_mm_needs, any_model=True)
VMAP_GROUPED_MM = ProcessConcern(_vmap_grouped_mm, _vmap_grouped_mm_needs)
