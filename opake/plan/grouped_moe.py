"""Stacked experts: which of them compute what the kernel does, found by trying, and the kernel."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opake import kernels
from opake.engine import ForwardPatch, reclass
from opake.kernels._bounds import check_indices
from opake.plan import experts, fused
from opake.plan.fused import Found
from opake.plan.kernels import (
    Formula,
    Parts,
    _is_expert_gate,
    _kind,
    _op_of,
    expert_gate,
    is_plain,
)
from opake.plan.modules import (
    built_class,
    is_of_file,
    own_slot,
    positional,
    stock_method,
)
from opake.plan.step import Concern, Context, Skip, Step, compat

_SLOT = fused.slot("grouped_moe")
_ACTIVATIONS = {"swiglu": "silu", "geglu_exact": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_FUNCTIONS: dict[Any, str] = {functional.silu: "swiglu", functional.gelu: "geglu_exact"}
_STOCK = (None, "eager", "batched_mm", "grouped_mm")
"""The implementations of transformers' that compute alike. None runs ``eager``."""


class _Call(NamedTuple):
    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor


# ---- in the place of stock's


def _run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run all experts in one kernel, whichever implementation stock would choose."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)[_SLOT]
    why = _replaced(wrapped, instance, site.formula)
    call = None if why else _call(instance, args, kwargs)
    if call is None:
        return site.guard.stock(why or "called with other arguments", wrapped, args, kwargs)
    why = _unlike(instance, call)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    # Stock's eager gives what is no expert of its own to nobody; all do where others have the rest.
    skip = _used(instance) in (None, "eager") or getattr(instance, "_is_expert_parallel", True)
    if not skip:
        check_indices("top_k_index", call.ids, instance.num_experts)
    options = {"activation": _ACTIVATIONS[site.formula.op], "skip": skip}
    stock = functools.partial(wrapped, *args, **kwargs)
    return site.guard.run(_OP(), call, options, stock, ())


def _call(instance: Any, args: Any, kwargs: Any) -> _Call | None:
    """The arguments, with the weights that the module has now; None where stock takes others."""
    names = positional(instance)
    call = compat("batchify").by_name(names, args, kwargs)
    if call is None or len(names) != 3 or call.keys() != {*names}:
        return None
    x, ids, weights = (call[name] for name in names)
    gate_up, down = (getattr(instance, name, None) for name in ("gate_up_proj", "down_proj"))
    found: tuple[Any, ...] = (x, gate_up, down, ids, weights)
    return _Call(*found) if all(isinstance(t, Tensor) for t in found) else None


def _used(instance: Any) -> Any:
    return instance.config._experts_implementation


def _replaced(wrapped: Any, instance: Any, formula: Formula) -> str:
    """Say what is not as it was when the module was looked at."""
    used = _used(instance)
    if used not in _STOCK or not _is_upstream(used):
        return f"experts_implementation={used!r}"
    if not _over_stock(wrapped, instance):
        return "another wrapper lies beneath"
    if not _activates(instance.act_fn, formula):
        return "the activation has hooks, or is another one now"
    if used not in (None, "eager") and not fused.is_ours(
        instance, expert_gate, method="_apply_gate"
    ):
        return "the gate was replaced"
    return ""


def _activates(act_fn: Any, formula: Formula) -> bool:
    """Tell whether ``act_fn`` is what it was when it was looked at."""
    if formula.act_fn is None:
        return _FUNCTIONS.get(act_fn) == formula.op
    return is_plain(act_fn, formula)


def _is_upstream(implementation: Any) -> bool:
    """Tell whether that name still stands for transformers' own function."""
    if implementation in (None, "eager"):
        return True
    moe = importlib.import_module("transformers.integrations.moe")
    function = moe.ALL_EXPERTS_FUNCTIONS.get(implementation)
    return getattr(function, "__module__", None) == moe.__name__


def _over_stock(wrapped: Any, instance: Any) -> bool:
    """Tell whether nothing lies beneath but the stock ``forward`` and what lets ``vmap`` map it."""
    inner = getattr(wrapped, "func", None)
    if inner is stock_method(instance):
        return True
    for stack in reclass.table(instance).values():
        for layer in stack.layers:
            if not experts.maps(getattr(layer.build, "__self__", None)):
                break
            if reclass.unwrap(getattr(layer.value, "__func__", None)) is inner:
                return True
    return False


def _unlike(instance: Any, call: _Call) -> str:
    """Say what about the arguments is not what the kernel takes."""
    x, gate_up, down, ids, weights = call
    shapes = (tuple(gate_up.shape), tuple(down.shape), tuple(weights.shape))
    if down.dim() != 3 or x.dim() != 2 or ids.dim() != 2:
        return "tokens or weights of other shapes"
    count, hidden, inner = down.shape
    expected = ((count, 2 * inner, hidden), (count, hidden, inner), tuple(ids.shape))
    if shapes != expected or x.shape != (len(ids), hidden) or count != instance.num_experts:
        return "tokens or weights of other shapes"
    if ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
        return "experts' numbers or weights of another dtype"
    if fused.autocasts(x):
        chosen = torch.get_autocast_dtype(x.device.type)
        if _used(instance) == "grouped_mm" and chosen != gate_up.dtype:
            return "autocast does not reach grouped_mm"
    elif not x.dtype == gate_up.dtype == down.dtype:
        return "tokens and experts of several dtypes"
    return ""


# ---- which modules fit


def _grouped_moe(context: Context) -> Step | Skip:
    return fused.build(context, "grouped_moe", _examine, "the model has no experts")


def _examine(module: nn.Module) -> Found | str | None:
    cls: Any = built_class(module)
    if not compat("experts").is_stacked(module):
        called = cls.__name__.endswith("Experts") and not cls.__module__.startswith("torch.")
        return f"{cls.__name__}.forward is another formula" if called else None
    why = _layout(module)
    if why:
        return f"{cls.__name__}: {why}"
    plain = fused.plain(module)
    if not is_of_file(cls.forward, cls) or not _is_moe(cls, cls.forward, cls._apply_gate, plain):
        return f"{cls.__name__}.forward is another formula"
    why = fused.unlike_file(module)
    if why:
        return f"{cls.__name__}: {why}"
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        op, kind = _op_of(act_fn), _kind(act_fn)
    else:
        op, kind = _FUNCTIONS.get(act_fn), None
    if op is None:
        return f"no kernel for {type(act_fn).__name__}"
    formula = Formula(Parts("", "", "", "act_fn"), op, kind)
    patch = ForwardPatch(module, _run, slot=own_slot(module))
    return Found(formula, [patch], f"{cls.__name__}.forward")


def _layout(module: Any) -> str:
    if not module.has_gate:
        return "its experts have no gate"
    if module.has_bias:
        return "its experts have biases"
    if module.is_transposed or not module.is_concatenated:
        return "its weights are transposed, or gate and up interleaved"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts end in a norm"
    return ""


@functools.cache
def _is_moe(cls: Any, forward: Any, gate: Any, plain: Any) -> bool:
    """Run a module of the class that has other weights, and compare with what the kernel is."""
    if not _is_expert_gate(gate, plain):
        return False
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    vars(made).update({**dict(plain), "num_experts": 3, "_is_expert_parallel": False})
    made.gate_up_proj, made.down_proj = (
        fused.draw(3, *shape).double() for shape in ((8, 6), (6, 4))
    )
    made.act_fn = functional.silu
    ids = torch.tensor([[0, 2], [1, 1], [2, 0], [2, 2], [0, 1]], device="cpu")
    # Large enough for what clamps to show.
    x, weights = 40 * fused.draw(5, 6).double(), fused.draw(5, 2, seed=1).double()
    expected = _OP().reference(x, made.gate_up_proj, made.down_proj, ids, weights)
    for implementation in ("eager", "batched_mm"):
        made.config = SimpleNamespace(_experts_implementation=implementation)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                found = forward(made, x, ids, weights)
        except Exception:  # it wants more than that
            return False
        if not isinstance(found, Tensor) or not torch.allclose(found, expected, rtol=1e-9):
            return False
    return True


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("moe")


GROUPED_MOE = Concern(_grouped_moe)
