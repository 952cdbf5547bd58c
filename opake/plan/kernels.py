"""The fused kernels in the modules of a model, each module looked at before it is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opake import kernels, symbols
from opake.engine import AttributePatch, ForwardPatch, Patch
from opake.engine.reclass import stock_class
from opake.plan.guard import Guard
from opake.plan.modules import foreign_forward
from opake.plan.step import Concern, Context, Skip, Step

_SILU = ("SiLU", "SiLUActivation")
_GUARD = "_opake_activation"


def _activation(context: Context) -> Step | Skip:
    family = context.family
    if family.mlp is None and family.experts is None:
        return Skip("left to HF: its MLP has no gate")
    able, reason = kernels.available()
    if not able:
        return Skip(reason)
    guard = context.guard("activation")
    patches: list[Patch] = []
    left: dict[str, None] = {}
    targets: dict[str, None] = {}
    for name, method, wrapper, misfit in _GATED:
        for module in context.modules(*filter(None, (getattr(family, name),))):
            why = misfit(module, symbols.resolve(family.module, getattr(family, name)))
            if why:
                left[why] = None
                continue
            patches.append(AttributePatch(module, _GUARD, guard, create=True))
            patches.append(ForwardPatch(module, wrapper, slot=method))
            targets[f"{stock_class(module).__name__}.{method}"] = None
    note = f"left to HF: {'; '.join(left)}" if left else ""
    if not patches:
        return Skip(note or "left to HF: the model has no such module")
    return Step(patches, ", ".join(targets), "forward", len(patches) // 2, note)


def _gated_mlp(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``down(act(gate(x)) * up(x))`` with the middle fused."""
    if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
        return wrapped(*args, **kwargs)  # inductor fuses the stock code itself
    gate, up = instance.gate_proj(args[0]), instance.up_proj(args[0])

    def stock(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = instance.act_fn(gate) * up
        return product

    guard: Guard = vars(instance)[_GUARD]
    return instance.down_proj(guard.call(_op("swiglu"), (gate, up), stock))


def _expert_gate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``act(gate) * up`` of the halves of what the experts projected."""
    if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
        return wrapped(*args, **kwargs)
    guard: Guard = vars(instance)[_GUARD]
    return guard.call(_op("swiglu_packed"), args, wrapped)


def _op(name: str) -> kernels.Op:
    found = kernels.find(name)
    assert found is not None, name
    return found


def _mlp_misfit(module: nn.Module, cls: type) -> str:
    if stock_class(module) is not cls:
        return f"{stock_class(module).__name__} is not {cls.__name__} itself"
    if foreign_forward(module) is not None:
        return f"an instance forward from {foreign_forward(module)}"
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return "not gate_proj, up_proj, down_proj and act_fn"
    return _act_misfit(module)


def _experts_misfit(module: nn.Module, cls: type) -> str:
    gate = getattr(stock_class(module), "_apply_gate", None)
    if stock_class(module) is not cls:
        return f"{stock_class(module).__name__} is not {cls.__name__} itself"
    if gate is None or gate.__name__ != "_default_apply_gate":
        return "experts with a gate of their own"
    if not getattr(module, "is_concatenated", False):
        return "experts whose gate and up alternate"
    return _act_misfit(module)


def _act_misfit(module: nn.Module) -> str:
    name = type(module.act_fn).__name__
    return "" if name in _SILU else f"no kernel for {name}"


_GATED: tuple[tuple[str, str, Any, Callable[[nn.Module, type], str]], ...] = (
    ("mlp", "forward", _gated_mlp, _mlp_misfit),
    ("experts", "_apply_gate", _expert_gate, _experts_misfit),
)

ACTIVATION = Concern(_activation)
