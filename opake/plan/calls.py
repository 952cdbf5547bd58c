"""How a model is called: without a batch dimension, with a mask, without a cache."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from opake.engine import AttributePatch, ForwardPatch, Patch, RebindPatch
from opake.engine.rebind import rebind
from opake.engine.reclass import stock_class
from opake.families import Family
from opake.plan.modules import positional, refuse_foreign_forward, stock_method
from opake.plan.step import Concern, Context, Need, Skip, Step, compat, compat_needs

_WARNS = "warn_if_padding_and_no_attention_mask"


def _masking(context: Context) -> Step | Skip:
    masks, family = compat("masks"), context.family
    replacements = {name: masks.builder(family.module, name) for name in family.masks}
    patches: list[Patch] = []
    modules = context.modules(family.base)
    for module in modules:
        slot = _mask_slot(module, family)
        if slot not in vars(module):
            # Raises where the names are not read.
            rebind(stock_method(module, family.masks_in), replacements)
        patches.append(RebindPatch(module, replacements, slot=slot))
        patches.append(ForwardPatch(module, masks.padding_warning, slot=_WARNS))
    target = f"{family.base}.{family.masks_in}: {', '.join(family.masks)}"
    return Step(patches, target, "rebind", len(modules))


def _mask_slot(module: nn.Module, family: Family) -> str:
    # Under accelerate's hook, the forward that builds the masks is the one the hook kept.
    is_forward = family.masks_in == "forward"
    return "_old_forward" if is_forward and "_old_forward" in vars(module) else family.masks_in


def _masking_needs(family: Family) -> list[Need]:
    needs = [*_base_needs(family), *compat_needs("masks")]
    needs.append((family.module, f"{family.base}.{family.masks_in}", ()))
    needs.append((family.module, f"{family.base}.{_WARNS}", ("input_ids", "attention_mask")))
    for name in family.masks:
        needs.append((family.module, name, ()))
        needs.append(("transformers.masking_utils", name, ("inputs_embeds", "attention_mask")))
    return needs


def _kv_cache(context: Context) -> Step | Skip:
    wrapper = compat("kv_cache").without_cache
    modules = context.modules(context.family.base)
    patches: list[Patch] = [ForwardPatch(m, wrapper(positional(m))) for m in modules]
    return Step(patches, f"{context.family.base}.forward", "forward", len(patches))


def _batchify(context: Context) -> Step | Skip:
    batchify = compat("batchify")
    modules = _called(context)
    for module in modules:
        refuse_foreign_forward(module)
    patches: list[Patch] = []
    for module in modules:
        extra = batchify.choices(stock_class(module))
        patches.append(ForwardPatch(module, batchify.batchify(positional(module), extra)))
    names = dict.fromkeys(stock_class(module).__name__ for module in modules)
    return Step(patches, f"{', '.join(names)}.forward", "forward", len(patches))


def _called(context: Context) -> list[nn.Module]:
    """Return what takes a batch of sequences: every model inside, and PEFT's around it.

    PEFT's puts the embeddings of a prompt in front of the tokens', and needs the batch for that.
    """
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    models = [module for module in context.all_modules if isinstance(module, model_class)]
    outer = context.model
    wraps = outer is not context.inner and hasattr(outer, "peft_config")
    return [outer, *models] if wraps and "input_ids" in positional(outer) else models


def _base_needs(family: Family) -> list[Need]:
    forward = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache")
    return [
        (family.module, family.base, ()),
        (family.module, f"{family.base}.forward", (*forward, "cache|past_key_values")),
        *compat_needs("autocast", "transforms"),
    ]


def _dropout(context: Context) -> Step | Skip:
    patches: list[Patch] = []
    for module in context.model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            if _is_probability(name, value, is_dropout=is_dropout):
                patches.append(AttributePatch(module, name, 0.0))
    if not patches:
        return Skip("the model has no dropout")
    return Step(patches, "dropout probabilities", "attribute", len(patches))


def _is_probability(name: str, value: Any, *, is_dropout: bool) -> bool:
    return isinstance(value, float) and (name == "p" if is_dropout else "dropout" in name)


MASKING = Concern(_masking, _masking_needs)
KV_CACHE = Concern(_kv_cache, _base_needs)
BATCHIFY = Concern(_batchify, _base_needs)
DROPOUT = Concern(_dropout, any_model=True)
