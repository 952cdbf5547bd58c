"""How a model is called: without a batch dimension, with a mask, without a cache."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from opake import symbols
from opake.engine import ForwardPatch, Patch, RebindPatch
from opake.engine.rebind import rebind
from opake.engine.reclass import stock_class
from opake.errors import MissingTarget
from opake.families import Family
from opake.plan.modules import own_slot, positional, refuse_foreign_forward, stock_method
from opake.plan.step import Concern, Context, Need, Skip, Step, compat, compat_needs

_LAYERDROP = "layerdrop"
_WARNS = "warn_if_padding_and_no_attention_mask"


def _masking(context: Context) -> Step | Skip:
    masks, family = compat("masks"), context.family
    recurrent = compat("recurrent").with_writable_cache
    sees_all = _sees_all(context)
    replacements = _builders(family.module, family.masks, sees_all)
    patches: list[Patch] = []
    modules = context.modules(family.base)
    for module in modules:
        if replacements:
            slot = own_slot(module, family.masks_in)
            if slot not in vars(module):
                _reach(module, family.masks_in, replacements)
            patches.append(RebindPatch(module, replacements, slot=slot))
        patches.append(ForwardPatch(module, masks.padding_warning, slot=_WARNS))
        if masks.RECURRENT in family.masks:
            patches.append(ForwardPatch(module, recurrent(positional(module))))
    outer = _wrapping(context, sees_all)
    patches += outer
    if not family.masks:
        return Step(patches, f"{family.base}.{_WARNS}", "forward", len(patches))
    target = f"{family.base}.{family.masks_in}: {', '.join(family.masks)}"
    return Step(patches, target, "rebind", len(modules) + len(outer))


def _reach(module: nn.Module, method: str, replacements: dict[str, Any]) -> None:
    """Raise where the method of the module's class does not read the names itself."""
    try:
        rebind(stock_method(module, method), replacements)
    except MissingTarget as error:
        raise MissingTarget(
            f"{stock_class(module).__name__}.{method} does not call {', '.join(replacements)} "
            "itself; where it calls the method that it overrides, which does, the builders are out "
            "of reach: call them in it, or register a Family that names what calls them"
        ) from error


def _sees_all(context: Context) -> bool:
    """Tell whether attention is causal by its masks alone: a row that stock gives none sees all."""
    if context.implementation != "sdpa":
        return False
    modules = context.modules(*context.family.attention, *context.family.own_sdpa)
    return bool(modules) and not any(getattr(module, "is_causal", True) for module in modules)


def _builders(modeling: str, names: Iterable[str], sees_all: bool) -> dict[str, Any]:
    masks = compat("masks")
    made = {name: masks.builder(modeling, name, sees_all) for name in names}
    if masks.RECURRENT in made:
        made["DynamicCache"] = compat("recurrent").dynamic_cache
    return made


def _wrapping(context: Context, sees_all: bool) -> list[Patch]:
    """Rebind the models around the base that build its masks for it."""
    family, patches = context.family, list[Patch]()
    masking = importlib.import_module("transformers.masking_utils")
    builders = _builders(family.module, (*family.masks, compat("masks").PREPARE), sees_all)
    for name, functions in family.wrapped_by.items():
        replacements: dict[str, Any] = {}
        for function in functions:
            own = symbols.resolve(family.module, function)
            if hasattr(masking, function):
                replacements |= _builders(family.module, [function], sees_all)
            else:
                replacements[function] = rebind(own, builders)
        for module in context.modules(name):
            slot = own_slot(module, "forward")
            if slot not in vars(module):
                _reach(module, slot, replacements)
            patches.append(RebindPatch(module, replacements, slot=slot))
    return patches


def _masking_needs(family: Family) -> list[Need]:
    needs = [*_base_needs(family), *compat_needs("masks")]
    needs.append((family.module, f"{family.base}.{family.masks_in}", ()))
    needs.append((family.module, f"{family.base}.{_WARNS}", ("input_ids", "attention_mask")))
    for name in family.masks:
        needs.append((family.module, name, ()))
        needs.append(("transformers.masking_utils", name, ("inputs_embeds", "attention_mask")))
        if name == compat("masks").RECURRENT:
            needs += compat_needs("recurrent")
    for outer, functions in family.wrapped_by.items():
        needs += [(family.module, name, ()) for name in (outer, *functions)]
    return needs


def _kv_cache(context: Context) -> Step | Skip:
    if not context.family.cache:
        return Skip("the model has no cache")
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
    dropping = [
        module for module in context.modules(context.family.base) if _LAYERDROP in vars(module)
    ]
    patches += [ForwardPatch(module, compat("layerdrop").shared_draws) for module in dropping]
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
    caches = ("use_cache", "|".join(compat("_versions").CACHE_NAMES)) if family.cache else ()
    forward = ("input_ids", "attention_mask", "inputs_embeds", *caches)
    return [
        (family.module, family.base, ()),
        (family.module, f"{family.base}.forward", forward),
        *compat_needs("autocast", "transforms"),
    ]


def _batchify_needs(family: Family) -> list[Need]:
    return [*_base_needs(family), *compat_needs("layerdrop")]


MASKING = Concern(_masking, _masking_needs)
KV_CACHE = Concern(_kv_cache, _base_needs)
BATCHIFY = Concern(_batchify, _batchify_needs)
