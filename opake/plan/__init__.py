"""Flags, a family and a model make a list of patches, or a skip with its reason.

The only package that sees engine, compat, kernels and families together. Planning changes nothing
of a model's; a model of no declared family is tried on a tiny copy of it, in a scope of its own.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opake import families, symbols
from opake.engine import Row
from opake.engine.patchset import caller_depth
from opake.errors import NotAModel, UnsupportedAttention, UnsupportedModel
from opake.families import Family
from opake.flags import CONCERNS, Flags, resolve
from opake.plan import (
    add_norm,
    attention,
    calls,
    checkpointing,
    collators,
    dropout,
    embeddings,
    experts,
    generic,
    grouped_moe,
    heads,
    kernels,
    lora,
    lora_mlp,
    lora_qkv,
    losses,
    norms,
    process,
    ropes,
)
from opake.plan.step import Concern, Context, Plan, ProcessConcern, Skip, Step
from opake.symbols import Symbol

__all__ = ["Plan", "find_model", "plan_model", "plan_runtime"]

MODEL: dict[str, Concern] = {
    "eager_attention": attention.EAGER,
    "sdpa": attention.SDPA,
    "batchify": calls.BATCHIFY,
    "vmap_masking": calls.MASKING,
    "moe": experts.MOE,
    "vmap_checkpointing": checkpointing.CHECKPOINTING,
    "vmap_grouped_mm": experts.GROUPED_MM,
    "kv_cache": calls.KV_CACHE,
    "fused_linear_cross_entropy": heads.FUSED_LINEAR_CROSS_ENTROPY,
    "chunked_linear_cross_entropy": heads.CHUNKED_LINEAR_CROSS_ENTROPY,
    "rope": ropes.ROPE,
    "rms_norm": norms.RMS_NORM,
    "layer_norm": norms.LAYER_NORM,
    "fused_add_rms_norm": add_norm.FUSED_ADD_RMS_NORM,
    "activation": kernels.ACTIVATION,
    "cross_entropy": losses.CROSS_ENTROPY,
    "embedding": embeddings.EMBEDDING,
    "grouped_moe": grouped_moe.GROUPED_MOE,
    "lora_w": lora.LORA_W,
    "lora_qkv": lora_qkv.LORA_QKV,
    "lora_mlp": lora_mlp.LORA_MLP,
    "dropout": dropout.DROPOUT,
}
"""The concerns that act on one model."""

PROCESS: dict[str, ProcessConcern] = {
    "first_order": process.FIRST_ORDER,
    "vmap_checkpointing": checkpointing.VMAP_CHECKPOINTING,
    "vmap_grouped_mm": experts.VMAP_GROUPED_MM,
    "empty_batches": collators.EMPTY_BATCHES,
}
"""The concerns that act on the process."""

_NO_FAMILY = Family("", "", ())
_RUNTIME_ONLY = Skip("acts on no model: use opake.runtime()")


def find_model(model: Any) -> Any:
    """Return the transformers model inside ``model`` (PEFT, compiled, sharded), or None."""
    if not isinstance(model, nn.Module):
        raise NotAModel(
            f"expected a transformers model or an nn.Module, found {type(model).__qualname__}"
        )
    utils = importlib.import_module("transformers.modeling_utils")
    if isinstance(model, utils.PreTrainedModel):
        return model
    found = [m for m in model.modules() if isinstance(m, utils.PreTrainedModel)]
    if not found:
        return None
    inside = {id(module) for module in found[0].modules()}
    strangers = [type(m).__qualname__ for m in found if id(m) not in inside]
    if strangers:
        raise NotAModel(
            f"{type(model).__qualname__} holds several models ({type(found[0]).__qualname__}, "
            f"{', '.join(strangers)}); open one scope for each"
        )
    return found[0]


def plan_model(model: nn.Module, flags: Flags) -> Plan:
    """Plan a model scope. Raises what entering it would raise."""
    inner = find_model(model)
    family, deduced = _family(model, inner, flags)
    plan = _plan_as(family, model, inner, flags)
    if family is not None and deduced:
        count = len(Context(model, inner, family, flags).modules(family.base))
        plan.rows.insert(0, Row("family", family.base, "deduced", count, "on", deduced))
    return plan


def _plan_as(family: Family | None, model: nn.Module, inner: Any, flags: Flags) -> Plan:
    symbols.verify(needed(family, flags))
    context = Context(model, inner, family or _NO_FAMILY, flags)
    if family is not None and flags.compat:
        _refuse_absent(context)
        _refuse_attention(context)
    stranger = "no transformers model" if inner is None else "unknown model_type"

    def build(name: str) -> Step | Skip:
        concern = MODEL.get(name)
        if concern is None:
            shared = PROCESS[name]
            return _RUNTIME_ONLY if shared.runtime_only else shared.build()
        if family is None and not concern.any_model:
            return Skip(stranger)
        return concern.build(context)

    plan = _collect(flags, build)
    plan.guards = context.guards
    return plan


def plan_runtime(flags: Flags) -> Plan:
    """Plan the process scope: the concerns that need no model."""
    symbols.verify(s for name in PROCESS if flags[name] for s in _process_symbols(name))

    def build(name: str) -> Step | Skip:
        if name in PROCESS:
            return PROCESS[name].build()
        return Skip("needs a model: use opake.patched(model)")

    return _collect(flags, build)


def _collect(flags: Flags, build: Callable[[str], Step | Skip]) -> Plan:
    plan = Plan()
    for concern in CONCERNS:
        if flags[concern] is False:
            plan.rows.append(Row(concern, "-", "-", 0, "off"))
            continue
        step = build(concern)
        if isinstance(step, Skip):
            plan.rows.append(Row(concern, "-", "-", 0, "skipped", step.reason))
        else:
            found = (step.patches, plan.patches) if step.beneath else (plan.patches, step.patches)
            plan.patches = [*found[0], *found[1]]
            plan.rows.append(Row(concern, step.target, step.how, step.count, "on", step.note))
    return plan


def _family(model: nn.Module, inner: Any, flags: Flags) -> tuple[Family | None, str]:
    """Return the family and, where it is not a declared one, what it was deduced from."""
    if inner is None:
        if flags.compat:
            raise NotAModel(
                f"no transformers model in {type(model).__qualname__}; pass compat=False if it "
                "is vmap-safe as it is"
            )
        return None, ""
    model_type = inner.config.model_type
    family = families.find(model_type)
    if family is not None:
        if families.is_registered(model_type) and flags.compat:
            _refuse_unfound(model_type, family)
        return family, ""
    reason = ""
    if flags.compat:
        # What a model of several modalities does around its text part is its own.
        try:
            text = families.find(inner.config.get_text_config().model_type)
        except ValueError:  # it has several
            text = None
        verdict = generic.judge(inner, _plan_all, text)
        if verdict.family is not None:
            return verdict.family, verdict.note
        reason = f", and none could be deduced ({verdict.note})"
    register = f"opake.register_family({model_type!r}, opake.Family(...))"
    message = f"model_type {model_type!r} belongs to no family{reason}; add one by {register}"
    known = f"supported are {', '.join(families.supported())}"
    if flags.compat:
        raise UnsupportedModel(f"{message}, or pass compat=False; {known}")
    message = f"{message}; {known}"
    warnings.warn(f"no model concern is patched: {message}", stacklevel=caller_depth())
    return None, ""


def _refuse_unfound(model_type: str, family: Family) -> None:
    """Raise where a declaration from outside names what its module has not got."""
    missing = []
    for name in family.names:
        try:
            symbols.resolve(family.module, name)
        except LookupError as error:
            cause = error.__cause__
            missing.append(str(cause) if isinstance(cause, ImportError) else name)
    if missing:
        raise UnsupportedModel(
            f"the Family registered for model_type {model_type!r} names what {family.module} has "
            f"not got: {', '.join(dict.fromkeys(missing))}; register one with the names of its file"
        )


def _plan_all(model: Any, family: Family) -> Plan:
    """Plan every concern that does not ask for a GPU, as :mod:`opake.plan.generic` tries it."""
    return _plan_as(family, model, model, resolve(kernels=False, peft=False))


def _refuse_absent(context: Context) -> None:
    family = context.family
    for names in ((family.base,), (*family.attention, *family.own_sdpa)):
        if names and not context.modules(*names):
            raise UnsupportedModel(
                f"the family of model_type {context.inner.config.model_type!r} names "
                f"{' and '.join(names)} in {family.module}, and "
                f"{type(context.inner).__name__} has no such module; register a Family with the "
                "names that its modeling file has"
            )


def _refuse_attention(context: Context) -> None:
    used, flags = context.implementation, context.flags
    if (flags["sdpa"] or flags["eager_attention"]) and used not in ("sdpa", "eager"):
        raise UnsupportedAttention(
            f"attn_implementation={used!r} cannot run under functorch; load the model with "
            'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )


@functools.cache
def needed(family: Family | None, flags: Flags) -> tuple[Symbol, ...]:
    """Return what the concerns that are on need from upstream."""
    return tuple(_symbols(family, flags))


def _symbols(family: Family | None, flags: Flags) -> Iterator[Symbol]:
    for name in CONCERNS:
        if not flags[name]:
            continue
        concern = MODEL.get(name)
        if concern is None:
            yield from _process_symbols(name)
        elif family is not None or concern.any_model:
            for module, dotted, parameters in concern.needs(family or _NO_FAMILY):
                yield Symbol(module, dotted, parameters, name)


def _process_symbols(name: str) -> Iterator[Symbol]:
    for module, dotted, parameters in PROCESS[name].needs() if name in PROCESS else ():
        yield Symbol(module, dotted, parameters, name)
