"""LoRA layers: a linear layer and its adapters in one operator.

What PEFT lets change between calls (adapters, their scale, merging, hooks) is read at every call.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import ForwardPatch
from opake.engine.reclass import stock_class
from opake.plan import fused
from opake.plan.fused import Found
from opake.plan.modules import built_class, is_of_file
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("lora_w")
HOOKED = "a LoRA layer, or a part of it, has hooks or another forward"
NO_ADAPTER = "there is no adapter"

Layer = tuple[Tensor, list[Tensor], list[Tensor], list[float], Tensor | None]
"""Weight, A, B, scale and bias, as the operators take them."""


# ---- which modules fit


def _lora_w(context: Context) -> Step | Skip:
    return fused.build(context, "lora_w", _examine, "the model has no LoRA layer")


def _examine(module: nn.Module) -> Found | str | None:
    if not is_adapted(module):
        return None
    why = unfit(module)
    return why or Found(None, [ForwardPatch(module, run_layer)], "lora.Linear.forward")


def is_adapted(module: Any) -> bool:
    """Tell whether PEFT has put LoRA adapters on a module."""
    peft = sys.modules.get("peft.tuners.lora.layer")  # whoever has a LoRA layer has imported it
    return peft is not None and isinstance(module, peft.LoraLayer)


def unfit(module: Any) -> str:
    """Say why a LoRA layer is none over a linear layer, or not PEFT's own."""
    cls, base = built_class(module), getattr(module, "base_layer", None)
    if not _is_linear(cls):
        return f"no kernel for lora.{cls.__name__}"
    if base is None or built_class(base) is not nn.Linear:
        return f"no kernel for LoRA on {type(base).__name__}"
    why = fused.unlike_file(module)
    return why and f"lora.Linear: {why}"


def unfit_parts(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Say why not all of these parts are LoRA layers that fit; None where none is one at all."""
    cls, parts = built_class(module), {name: module._modules[name] for name in names}
    if not any(is_adapted(part) for part in parts.values()):
        return None
    without = [name for name, part in parts.items() if not is_adapted(part)]
    if without:
        return f"{cls.__name__}: {', '.join(without)} has no adapter"
    whys = (unfit(part) for part in parts.values())
    return next(filter(None, whys), "")


def _is_linear(cls: Any) -> bool:
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and cls is peft.Linear


@functools.cache
def _is_genuine(cls: Any, forward: Any) -> bool:
    return _is_linear(cls) and is_of_file(forward, cls)


# ---- what a layer is at this call


def read(layer: Any, x: Any, width: int | None = None) -> Layer | str:
    """Return what a LoRA layer computes of ``x`` now, or why no operator does.

    ``width`` is that of what it is given in the place of ``x``.
    """
    if not isinstance(x, Tensor):
        return "the input is no tensor"
    if layer.disable_adapters or layer.merged:
        return "the adapters are disabled or merged"
    base = layer.base_layer
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    lower, upper = ([parts[n] for n in names] for parts in (layer.lora_A, layer.lora_B))
    if any(name in layer.lora_variant for name in names):
        return "an adapter is no plain LoRA"
    if not all(_is_bare(part, nn.Linear) for part in (base, *lower, *upper)):
        return HOOKED
    if not all(_drops_nothing(layer.lora_dropout[name]) for name in names):
        return "dropout is in effect"
    if any(part.bias is not None for part in (*lower, *upper)):
        return "an adapter has a bias"
    scale = [layer.scaling[name] for name in names]
    if not all(isinstance(s, (int, float)) for s in scale):
        return "a scale is no number"
    weight, bias = base.weight, base.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "the base layer is trained"
    a, b = ([part.weight for part in parts] for parts in (lower, upper))
    found = (weight, a, b, scale, bias)
    return (
        _misfit(found, x.shape[-1:] if width is None else (width,)) or _cast(layer, x, a) or found
    )


def _is_bare(module: Any, cls: type) -> bool:
    """Tell whether calling a module runs the formula of this class and nothing else, now."""
    return (
        stock_class(module) is cls and "forward" not in vars(module) and not fused.has_hooks(module)
    )


def _drops_nothing(dropout: Any) -> bool:
    if _is_bare(dropout, nn.Identity):
        return True
    return _is_bare(dropout, nn.Dropout) and not (dropout.training and dropout.p)


def _misfit(layer: Layer, width: tuple[int, ...]) -> str:
    """Say where shapes are such that stock raises."""
    weight, a, b, _, bias = layer
    shape = tuple(weight.shape)
    fits = len(shape) == 2 and tuple(width) == shape[1:]
    for lower, upper in zip(a, b, strict=True):
        rank = tuple(lower.shape[:1])
        fits = fits and (*rank, *shape[1:]) == tuple(lower.shape)
        fits = fits and (*shape[:1], *rank) == tuple(upper.shape)
    fits = fits and (bias is None or tuple(bias.shape) == shape[:1])
    return "" if fits else "shapes that do not fit each other"


def _cast(layer: Any, x: Tensor, a: list[Tensor]) -> str:
    """Say where PEFT does not cast to the adapters' dtype, or not to that alone."""
    if not layer.cast_input_dtype_enabled and any(y.dtype != x.dtype for y in a):
        return "the input is not cast to the adapters' dtype"
    if fused.autocasts(x) and any(y.dtype == torch.float16 for y in a):
        return "adapters in fp16 under autocast"  # PEFT goes by way of a narrower range
    return ""


def is_whole(layer: Any, *wrappers: Any) -> bool:
    """Tell whether calling a LoRA layer is PEFT's ``forward``, or these wrappers' of it, now."""
    return (
        is_adapted(layer)
        and _is_genuine(stock_class(layer), stock_class(layer).forward)  # type: ignore[attr-defined]
        and not fused.has_hooks(layer)
        and fused.is_ours(layer, *wrappers)
    )


# ---- in the place of stock's


def run_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run a LoRA layer in one operator."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)  # inductor fuses the stock code itself
    site: fused.Site = vars(instance)[_SLOT]
    if args and site.guard.few(_OP(), args[0], fused.widened(args[0], None)):
        return wrapped(*args, **kwargs)
    why: Any = fused.strange(wrapped, instance, args, kwargs)
    why = why or (HOOKED if fused.globally_hooked() else read(instance, args[0]))
    if isinstance(why, str):
        return site.guard.stock(why, wrapped, args, kwargs)
    return site.guard.run(_OP(), (args[0], *why), {}, wrapped, args)


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("lora_linear")


LORA_W = Concern(_lora_w)
