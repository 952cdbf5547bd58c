"""The fused kernels in the modules of a model, each module looked at before it is touched."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from opake import kernels, symbols
from opake.engine import AttributePatch, ForwardPatch, Patch
from opake.engine.reclass import stock_class
from opake.plan.guard import Guard
from opake.plan.modules import foreign_forward, is_of_file, stock_method
from opake.plan.step import Concern, Context, Skip, Step

_GUARD = "_opake_activation"


def _activation(context: Context) -> Step | Skip:
    family = context.family
    if family.mlp is None and family.experts is None:
        return Skip("left to HF: the family names no gated MLP")
    able, reason = kernels.available()
    if not able:
        return Skip(reason)
    guard = Guard(context.flags.min_elements)
    patches: list[Patch] = []
    left: dict[str, None] = {}
    targets: dict[str, None] = {}
    for gated in _GATED:
        name = getattr(family, gated.field)
        try:
            cls = name and symbols.resolve(family.module, name)
        except LookupError as error:
            left[f"there is no {error}"] = None
            continue
        for module in context.modules(name) if name else ():
            why = _misfit(module, cls, gated)
            if why:
                left[why] = None
                continue
            patches.append(AttributePatch(module, _GUARD, guard, create=True))
            patches.append(ForwardPatch(module, gated.wrapper, slot=gated.method))
            targets[f"{name}.{gated.method}{gated.where(module)}"] = None
    note = f"left to HF: {'; '.join(left)}" if left else ""
    if not patches:
        return Skip(note or "left to HF: the model has no such module")
    context.guards["activation"] = guard
    return Step(patches, ", ".join(targets), "forward", len(patches) // 2, note)


def _gated_mlp(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``down(act(gate(x)) * up(x))`` with the middle fused."""
    if _is_stocks_turn(wrapped, instance, "forward", args, kwargs):
        return wrapped(*args, **kwargs)
    gate, up = instance.gate_proj(args[0]), instance.up_proj(args[0])

    def stock(gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = instance.act_fn(gate) * up
        return product

    guard: Guard = vars(instance)[_GUARD]
    return instance.down_proj(guard.call(_op("swiglu"), (gate, up), stock))


def _expert_gate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``act(gate) * up`` of the halves of what the experts projected."""
    if _is_stocks_turn(wrapped, instance, "_apply_gate", args, kwargs):
        return wrapped(*args, **kwargs)
    guard: Guard = vars(instance)[_GUARD]
    return guard.call(_op("swiglu_packed"), args, wrapped)


def _is_stocks_turn(wrapped: Any, instance: Any, method: str, args: Any, kwargs: Any) -> bool:
    """Tell whether what lies below must run: a compiler, a strange call, somebody's wrapper."""
    if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
        return True  # inductor fuses the stock code itself
    if getattr(wrapped, "func", None) is not stock_method(instance, method):
        reason = "another wrapper lies beneath"
    elif not _is_plain_silu(instance.act_fn):
        reason = "the activation has hooks, or is no SiLU any more"
    else:
        return False
    vars(instance)[_GUARD].fell_back[reason] += 1
    return True


def _is_plain_silu(act_fn: Any) -> bool:
    """Tell whether calling ``act_fn`` is SiLU and nothing else, now."""
    return (
        type(act_fn) in _silu_classes()
        and not (act_fn._forward_hooks or act_fn._forward_pre_hooks)
        and not (act_fn._backward_hooks or act_fn._backward_pre_hooks)
        and "forward" not in vars(act_fn)
        and not _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


@functools.cache
def _silu_classes() -> tuple[type, ...]:
    activations = importlib.import_module("transformers.activations")
    found = [torch.nn.SiLU, getattr(activations, "SiLUActivation", None)]
    return tuple(cls for cls in found if cls is not None)


def _op(name: str) -> kernels.Op:
    found = kernels.find(name)
    assert found is not None, name
    return found


# ---- which modules fit


@dataclass(frozen=True)
class _Gated:
    """A kind of module with a gated activation."""

    field: str
    """Of a family: what names the class."""
    method: str
    wrapper: Any
    formula: Callable[[Any], bool]
    """Tell whether the method computes what the wrapper does."""
    where: Callable[[Any], str] = lambda module: ""
    """Say when the method is not always called."""


def _misfit(module: Any, cls: type, gated: _Gated) -> str:
    """Say why the kernel does not go into this module, or nothing."""
    if stock_class(module) is not cls:
        return f"{stock_class(module).__name__} is not {cls.__name__} itself"
    if gated.method == "forward" and foreign_forward(module) is not None:
        return f"an instance forward from {foreign_forward(module)}"
    function = getattr(cls, gated.method, None)
    if not (function and is_of_file(function, cls)) or not gated.formula(function):
        return f"{cls.__name__}.{gated.method} is another formula"
    act_fn = type(getattr(module, "act_fn", None))
    return "" if act_fn in _silu_classes() else f"no kernel for {act_fn.__name__}"


@functools.cache
def _is_gated_mlp(forward: Any) -> bool:
    def expected(x: Tensor) -> Tensor:
        return functional.silu(x + 1) * (2 * x) - 3

    parts = {
        "gate_proj": lambda x: x + 1,
        "up_proj": lambda x: 2 * x,
        "down_proj": lambda x: x - 3,
        "act_fn": functional.silu,
    }
    return _computes(forward, parts, expected)


@functools.cache
def _is_expert_gate(apply_gate: Any) -> bool:
    def expected(x: Tensor) -> Tensor:
        return functional.silu(x[:, :3]) * x[:, 3:]

    return _computes(apply_gate, {"act_fn": functional.silu}, expected)


def _computes(
    method: Any, parts: dict[str, Callable[[Tensor], Tensor]], expected: Callable[[Tensor], Tensor]
) -> bool:
    """Run a method on an object that has these parts and nothing else."""
    x = torch.linspace(-2, 2, 12, device="cpu").view(2, 6)
    try:
        found = method(SimpleNamespace(**parts), x)
    except Exception:  # it wants more than the parts, whatever that is
        return False
    return isinstance(found, Tensor) and torch.equal(found, expected(x))


def _where_experts_gate(module: Any) -> str:
    used = getattr(module.config, "_experts_implementation", None)
    return " (eager ones gate by themselves)" if used == "eager" else ""


_GATED = (
    _Gated("mlp", "forward", _gated_mlp, _is_gated_mlp),
    _Gated("experts", "_apply_gate", _expert_gate, _is_expert_gate, _where_experts_gate),
)

ACTIVATION = Concern(_activation)
