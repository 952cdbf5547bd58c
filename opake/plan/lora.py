"""LoRA layers: a linear layer and its adapters in one operator.

What PEFT lets change between calls (adapters, their scale, merging, hooks) is read at every call.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from opake import kernels
from opake.engine import ForwardPatch
from opake.engine.reclass import stock_class
from opake.plan import fused
from opake.plan.fused import Found
from opake.plan.modules import built_class, is_of_file
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("lora_w")
_HOOKED = "a LoRA layer, or a part of it, has hooks or another forward"

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


def _is_linear(cls: Any) -> bool:
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and cls is peft.Linear


@functools.cache
def _is_genuine(cls: Any, forward: Any) -> bool:
    return _is_linear(cls) and is_of_file(forward, cls)


# ---- what a layer is at this call


def read(layer: Any, x: Any) -> Layer | str:
    """Return what a LoRA layer computes of ``x`` now, or why no operator does."""
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
        return _HOOKED
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
    return _misfit(x, weight, a, b, bias, layer) or (weight, a, b, scale, bias)


def _is_bare(module: Any, cls: type) -> bool:
    """Tell whether calling a module runs the formula of this class and nothing else, now."""
    return stock_class(module) is cls and "forward" not in vars(module) and not _hooked(module)


def _hooked(module: Any) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _drops_nothing(dropout: Any) -> bool:
    if _is_bare(dropout, nn.Identity):
        return True
    return _is_bare(dropout, nn.Dropout) and not (dropout.training and dropout.p)


def _misfit(
    x: Any, weight: Tensor, a: list[Tensor], b: list[Tensor], bias: Tensor | None, layer: Any
) -> str:
    """Say where shapes are such that stock raises, or dtypes such that it casts in another way."""
    shape, width = tuple(weight.shape), x.shape[-1:]
    fits = len(shape) == 2 and tuple(width) == shape[1:]
    for lower, upper in zip(a, b, strict=True):
        rank = tuple(lower.shape[:1])
        fits = fits and (*rank, *shape[1:]) == tuple(lower.shape)
        fits = fits and (*shape[:1], *rank) == tuple(upper.shape)
    if not fits or (bias is not None and tuple(bias.shape) != shape[:1]):
        return "shapes that do not fit each other"
    cast = {lower.dtype for lower in a} - {x.dtype}
    if cast and not layer.cast_input_dtype_enabled:
        return "the input is not cast to the adapters' dtype"
    if torch.float16 in cast and fused.autocasts(x):
        return "adapters in fp16 under autocast"  # PEFT goes by way of a narrower range
    return ""


def is_whole(layer: Any) -> bool:
    """Tell whether calling a LoRA layer is PEFT's ``forward``, or what is ours of it, now."""
    return (
        is_adapted(layer)
        and _is_genuine(stock_class(layer), stock_class(layer).forward)  # type: ignore[attr-defined]
        and not _hooked(layer)
        and fused.is_ours(layer, *WRAPPERS)
    )


# ---- in the place of stock's


def run_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run a LoRA layer in one operator."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)  # inductor fuses the stock code itself
    site: fused.Site = vars(instance)[_SLOT]
    why: Any = fused.strange(wrapped, instance, args, kwargs)
    if not why:
        why = read(instance, args[0]) if not globally_hooked() else _HOOKED
    if isinstance(why, str):
        return site.guard.stock(why, wrapped, args, kwargs)
    return site.guard.run(_OP(), (args[0], *why), {}, wrapped, args)


def globally_hooked() -> bool:
    """Tell whether somebody hooks every module there is."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


WRAPPERS: list[Any] = [run_layer]
"""What may lie over PEFT's ``forward`` and computes the same."""


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("lora_linear")


LORA_W = Concern(_lora_w)
