"""Experts: eager ones that ``vmap`` can map, LoRA on a stack of them, and grouped GEMMs."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from opake import symbols
from opake.engine import AttributePatch, ForwardPatch, RebindPatch, stacks
from opake.engine.patch import SlotPatch
from opake.engine.reclass import stock_class
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.errors import MissingTarget, UnpatchableTarget
from opake.families import Family
from opake.plan.modules import positional, refuse_foreign_forward, stock_method
from opake.plan.step import Concern, Context, Need, ProcessConcern, Skip, Step, compat, compat_needs

_LORA = "_activate_lora"


def _moe(context: Context) -> Step | Skip:
    experts = compat("experts")
    modules = context.all_modules
    stacked: list[Any] = [module for module in modules if experts.is_stacked(module)]
    adapted = [module for module in modules if experts.adapts_parameter(module)]
    for module in stacked:
        refuse_foreign_forward(module)
    patches: list[SlotPatch] = [
        ForwardPatch(module, experts.forward(positional(module))) for module in stacked
    ]
    patches += [ForwardPatch(m, experts.activate_lora, slot=_LORA) for m in adapted]
    if not patches:
        names = dict.fromkeys(stock_class(module).__name__ for module in modules)
        left = [name for name in names if name.endswith("Experts")]
        what = f"{', '.join(left)}: left to HF" if left else "the model has no experts"
        return Skip(what)
    patches += _router_loss(context.inner, experts)
    slots = [patch.slot for patch in patches]
    names = dict.fromkeys(f"{stock_class(slot.owner).__name__}.{slot.key}" for slot in slots)
    used = dict.fromkeys(str(module.config._experts_implementation) for module in stacked)
    note = f"experts_implementation={', '.join(used)}" if used else "LoRA on bare parameters"
    return Step([*patches], ", ".join(names), "forward", len(patches), note)


def _router_loss(inner: nn.Module, experts: Any) -> list[SlotPatch]:
    forward = stock_method(inner)
    stock = getattr(importlib.import_module(forward.__module__), experts.ROUTER_LOSS, None)
    if stock is None or symbols.parameters(stock) != experts.ROUTER_LOSS_PARAMETERS:
        return []
    # Under accelerate's hook, the forward that computes the loss is the one the hook kept.
    slot = "_old_forward" if "_old_forward" in vars(inner) else "forward"
    patch = RebindPatch(
        inner, {experts.ROUTER_LOSS: experts.router_loss(forward.__module__)}, slot=slot
    )
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


MOE = Concern(_moe, _moe_needs)
VMAP_GROUPED_MM = ProcessConcern(_vmap_grouped_mm, _vmap_grouped_mm_needs)
