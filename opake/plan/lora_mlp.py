"""Gated MLPs whose projections are LoRA layers, in one operator."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from opake import kernels
from opake.engine import ForwardPatch
from opake.plan import fused, lora
from opake.plan import kernels as gated
from opake.plan.fused import Found
from opake.plan.modules import built_class
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("lora_mlp")
_ACTIVATIONS = {"swiglu": "silu", "geglu_exact": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


def _lora_mlp(context: Context) -> Step | Skip:
    classes = gated.declared(context)
    if isinstance(classes, Skip):
        return classes
    examine = functools.partial(_examine, classes)
    return fused.build(context, "lora_mlp", examine, "no gated MLP has adapters")


def _examine(classes: tuple[type, ...], module: nn.Module) -> Found | str | None:
    if not any(map(lora.is_adapted, module._modules.values())):
        return None
    found = gated.examine(classes, module)
    if not isinstance(found, Found):
        return found
    parts, name = found.formula.parts, built_class(module).__name__
    if parts.gate == parts.up:
        return f"{name}: no kernel for gate and up in one projection"
    why = lora.unfit_parts(module, (parts.gate, parts.up, parts.down))
    return why or Found(found.formula, [ForwardPatch(module, _run)], f"{name}.forward")


def _run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run the whole of ``down(act(gate(x)) * up(x))``; what lies beneath runs its parts."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)[_SLOT]
    formula: gated.Formula = site.formula
    if args and site.guard.few(_OP(), args[0], fused.widened(args[0], None)):
        return wrapped(*args, **kwargs)
    found = _read(instance, formula, args, kwargs)
    if isinstance(found, str):
        return site.guard.stock(found, wrapped, args, kwargs)
    options = {"activation": _ACTIVATIONS[formula.op]}
    return site.guard.run(_OP(), (args[0], *found), options, wrapped, args)


def _read(instance: Any, formula: gated.Formula, args: Any, kwargs: Any) -> list[lora.Layer] | str:
    """Return the three layers as they are now, or why they cannot be one."""
    if len(args) != 1 or kwargs:
        return "called with other arguments"
    if not fused.is_ours(instance, _run, gated.split):
        return "another wrapper lies beneath"
    act = formula.parts.act
    if act is not None and not gated.is_plain(getattr(instance, act), formula):
        return "the activation has hooks, or is another one now"
    modules, found = instance._modules, list[lora.Layer]()
    for name in (formula.parts.gate, formula.parts.up, formula.parts.down):
        layer = modules[name]
        if fused.globally_hooked() or not lora.is_whole(layer, lora.run_layer):
            return lora.HOOKED
        width = found[0][0].shape[0] if name == formula.parts.down else None
        this = lora.read(layer, args[0], width)
        if isinstance(this, str):
            return this
        found.append(this)
    if found[0][0].shape != found[1][0].shape:
        return "shapes that do not fit each other"
    return found if any(layer[1] for layer in found) else lora.NO_ADAPTER


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("lora_mlp")


LORA_MLP = Concern(_lora_mlp)
