"""Stacked experts under a functorch transform, and LoRA on them.

transformers' ``eager`` looks at which experts were chosen, and ``vmap`` allows no such look.
Here the look happens beneath the transform: the mapped dimension is folded into the tokens first,
so an expert is multiplied once for all examples, and only the (token, expert) pairs that were
chosen are computed. A masked loop over all experts computes E / K times as much and saves every
expert's activations; ``batched_mm`` gathers (tokens, K, 2I, H) of weights for every example.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opake._functorch import SYMBOLS as FUNCTORCH
from opake._functorch import apply, in_front
from opake.compat.autocast import autocast
from opake.compat.batchify import by_name
from opake.compat.transforms import transforms_active, unwrap
from opake.errors import ForeignWrite

SYMBOLS = (
    *FUNCTORCH,
    (
        "transformers.integrations.moe",
        "use_experts_implementation",
        ("is_concatenated", "is_transposed", "has_bias", "has_gate"),
    ),
    ("transformers.configuration_utils", "PreTrainedConfig._experts_implementation", ()),
)

ROUTER_LOSS = "load_balancing_loss_func"
"""The name that every family with this loss gives it."""

ROUTER_LOSS_PARAMETERS = ("gate_logits", "num_experts", "top_k", "attention_mask")

_EAGER = ("eager", None)
"""None is what a module built alone has; transformers runs eager for it too."""

_MARKS = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "config"}


def is_stacked(module: nn.Module) -> bool:
    """Tell whether transformers' ``use_experts_implementation`` decorated the module's class."""
    return vars(module).keys() >= _MARKS


def adapts_parameter(module: nn.Module) -> bool:
    """Tell whether PEFT adapts a bare parameter, such as a stack of experts, in this module."""
    # Asked of the class: on an instance, an attribute that is missing costs a microsecond.
    return hasattr(type(module), "_activate_lora") and "parameter_name" in vars(module)


@functools.cache
def forward(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a wrapper that runs experts set to ``eager`` so that ``vmap`` can map them.

    It stands in for what it wraps, which has to be the ``forward`` of the class. Every other
    implementation, and every call outside a functorch transform, goes through.

    Args:
        names: the positional parameters of the ``forward``: tokens, experts' numbers, weights.
    """

    def run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if transforms_active() and instance.config._experts_implementation in _EAGER:
            call = by_name(names, args, kwargs)
            if call is not None and len(call) == len(names):
                return eager(instance, *(call[name] for name in names))
        return wrapped(*args, **kwargs)

    run._opake_permanent = True  # type: ignore[attr-defined]
    return run


def below(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run what lies below: somebody else's layer, with experts of ours beneath it."""
    return wrapped(*args, **kwargs)


def out_of_reach(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run what lies below, or raise where stock's ``eager`` lies there and cannot be mapped."""
    if transforms_active() and instance.config._experts_implementation in _EAGER:
        raise ForeignWrite(
            f"{type(instance).__qualname__}.forward was wrapped before the scope was opened, in a "
            "way that hides the stock forward; open the scope first and wrap it inside, or call "
            'model.set_experts_implementation("batched_mm")'
        )
    return wrapped(*args, **kwargs)


def eager(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Send every token through its experts and add up what they say, as stock's ``eager`` does.

    Args:
        experts: a module that ``use_experts_implementation`` decorated.
        hidden_states: (T, H).
        top_k_index: (T, K), int64; ``experts.num_experts`` and above mean no expert.
        top_k_weights: (T, K).

    Returns:
        (T, H), in the dtype of ``hidden_states``.
    """
    tokens, k = top_k_index.shape
    # Stock adds the experts' contributions in ascending order, which shows in half precision.
    top_k_index, order = top_k_index.sort(dim=-1, stable=True)
    top_k_weights = top_k_weights.gather(-1, order)
    nobody = top_k_index >= experts.num_experts
    top_k_weights = top_k_weights.masked_fill(nobody, 0)
    ids = top_k_index.masked_fill(nobody, 0).reshape(-1)

    pairs = hidden_states.unsqueeze(1).expand(tokens, k, -1).reshape(tokens * k, -1)
    up = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", pairs, ids)
    pairs = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    pairs = _linear(experts, "down_proj", pairs, ids)
    if getattr(experts, "has_post_expert_norm", False):
        pairs = experts.post_expert_norm(pairs)
    pairs = pairs.view(tokens, k, -1) * top_k_weights.unsqueeze(-1)
    pairs = pairs.to(hidden_states.dtype)
    return functools.reduce(operator.add, pairs.unbind(1))


def _linear(experts: Any, name: str, x: Tensor, ids: Tensor) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias")[ids] if experts.has_bias else None
    if torch.is_autocast_enabled(x.device.type):
        x, weight = autocast(x), autocast(weight)
        bias = None if bias is None else autocast(bias)
    y = grouped_linear(x, weight if experts.is_transposed else weight.mT, ids)
    return y if bias is None else y + bias


def grouped_linear(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """``y[t] = x[t] @ weight[ids[t]]``: x (T, I), weight (E, I, O), ids (T,); y (T, O).

    Mapped, and differentiated any number of times, it is a grouped GEMM again: one matrix product
    for every chosen expert, whatever the number of examples, but for the gradients of shared
    weights, where it is one for every expert that an example chose. Reads ``ids`` on the host.
    """
    y: Tensor = apply(_GroupedLinear, x, weight, ids)
    return y


def grouped_outer(x: Tensor, z: Tensor, ids: Tensor, experts: int) -> Tensor:
    """``y[e] = x[ids == e].T @ z[ids == e]``: x (T, I), z (T, O), ids (T,); y (E, I, O)."""
    y: Tensor = apply(_GroupedOuter, x, z, ids, experts)
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        order, groups = _grouped(ids, len(weight))
        rows, y = x[order], x.new_empty(len(x), weight.shape[2])
        for e, group in groups:
            torch.mm(rows[group], weight[e], out=y[group])
        return torch.empty_like(y).index_copy_(0, order, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, ids = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            grouped_linear(grad, weight.mT, ids) if of_x else None,
            grouped_outer(x, grad, ids, len(weight)) if of_weight else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dweight: Tensor | None, _: Any) -> Any:
        x, weight, ids = ctx.saved_tensors
        by_x = None if dx is None else grouped_linear(dx, weight, ids)
        by_weight = None if dweight is None else grouped_linear(x, dweight, ids)
        return by_x if by_weight is None else by_weight if by_x is None else by_x + by_weight

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, ids: Tensor) -> Any:
        size, (of_x, of_weight, of_ids) = info.batch_size, in_dims
        x, ids = in_front(x, of_x, size), in_front(ids, of_ids, size)
        if of_weight is not None:
            weight = weight.movedim(of_weight, 0)
            ids = _apart(ids, weight.shape[1])
            weight = weight.flatten(0, 1)
        y = grouped_linear(x.flatten(0, 1), weight, ids.flatten())
        return y.view(size, x.shape[1], y.shape[1]), 0


class _GroupedOuter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, z: Tensor, ids: Tensor, experts: int) -> Tensor:
        order, groups = _grouped(ids, experts)
        x, z = x[order], z[order]
        y = x.new_zeros(experts, x.shape[1], z.shape[1])
        for e, group in groups:
            torch.mm(x[group].T, z[group], out=y[e])
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.experts = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, z, ids = ctx.saved_tensors
        of_x, of_z, *_ = ctx.needs_input_grad
        return (
            grouped_linear(z, grad.mT, ids) if of_x else None,
            grouped_linear(x, grad, ids) if of_z else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dz: Tensor | None, *_: Any) -> Any:
        x, z, ids = ctx.saved_tensors
        by_x = None if dx is None else grouped_outer(dx, z, ids, ctx.experts)
        by_z = None if dz is None else grouped_outer(x, dz, ids, ctx.experts)
        return by_x if by_z is None else by_z if by_x is None else by_x + by_z

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, z: Tensor, ids: Tensor, experts: int) -> Any:
        size = info.batch_size
        x, z, ids = (in_front(t, dim, size) for t, dim in zip((x, z, ids), in_dims, strict=False))
        ids = _apart(ids, experts)
        y = grouped_outer(x.flatten(0, 1), z.flatten(0, 1), ids.flatten(), size * experts)
        return y.view(size, experts, *y.shape[1:]), 0


def _grouped(ids: Tensor, experts: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """Return the order that sorts ``ids``, and where in it the chosen experts' tokens are."""
    sizes = torch.bincount(ids, minlength=experts).tolist()
    ends = itertools.accumulate(sizes)
    groups = [
        (e, slice(end - size, end))
        for e, (size, end) in enumerate(zip(sizes, ends, strict=True))
        if size
    ]
    return ids.argsort(stable=True), groups


def _apart(ids: Tensor, experts: int) -> Tensor:
    """Give every example, the rows of ``ids`` (B, T), experts of its own."""
    return ids + torch.arange(0, len(ids) * experts, experts, device=ids.device).unsqueeze(1)


def activate_lora(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """Put an adapted parameter in place without PEFT's parametrization, which writes in place.

    Under a functorch transform the parameter's place holds ``W + sum of the active deltas`` while
    the base layer runs, as ``torch.func.functional_call`` would put it there. Outside, and where
    no adapter is active, PEFT's own runs.
    """
    (active,) = [*args, *kwargs.values()]
    adapters = [name for name in active if name in instance.lora_A]
    held = instance.get_base_layer()._parameters.get(instance.parameter_name)
    if not transforms_active() or not adapters or held is None:
        return wrapped(*args, **kwargs)  # type: ignore[no-any-return]
    return _adapted(instance, adapters)


activate_lora._opake_permanent = True  # type: ignore[attr-defined]


@contextmanager
def _adapted(layer: Any, adapters: list[str]) -> Iterator[None]:
    parameters, name = layer.get_base_layer()._parameters, layer.parameter_name
    weight = parameters[name]
    parameters[name] = _with_deltas(layer, adapters, weight)
    try:
        yield
    finally:
        parameters[name] = weight


def _with_deltas(layer: Any, adapters: list[str], weight: Tensor) -> Tensor:
    """Compute what PEFT's parametrization would: (E, I, O) in, (E, I, O) of the same dtype out."""
    folds = hasattr(layer, "get_delta_factors") and layer.num_experts > 1 and weight.itemsize > 1
    if folds and len(adapters) == 1:
        lhs, rhs, scaling = layer.get_delta_factors(adapters[0])
        with torch.autocast(weight.device.type, enabled=False):  # the weight keeps its dtype
            return torch.baddbmm(weight, lhs, rhs, alpha=scaling)
    delta: Tensor = functools.reduce(operator.add, map(layer.get_delta_weight, adapters))
    # 8-bit floats cannot add: there PEFT leaves the delta wider.
    return (weight.to(delta.dtype) + delta).to(weight.dtype)


@functools.cache
def router_loss(modeling: str) -> Callable[..., Any]:
    """Return a replacement for the load-balancing loss that the module ``modeling`` defines.

    Under a functorch transform, where stock counts tokens in place, it computes the same out of
    place; elsewhere stock's runs.
    """
    module = importlib.import_module(modeling)

    def load_balancing_loss_func(
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        if not transforms_active() or not isinstance(gate_logits, tuple) or num_experts is None:
            stock = getattr(module, ROUTER_LOSS)
            return stock(gate_logits, num_experts, top_k, attention_mask)
        return _load_balance(gate_logits, num_experts, top_k, attention_mask)

    load_balancing_loss_func._opake_permanent = True  # type: ignore[attr-defined]
    return load_balancing_loss_func


def _load_balance(
    gate_logits: tuple[Tensor, ...], experts: int, top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Compute the loss of Switch Transformers, equations 4 to 6, over all layers: logits (T, E)."""
    device = gate_logits[0].device
    counted = torch.ones(len(gate_logits[0]), device=device)
    if attention_mask is not None:
        counted = attention_mask.reshape(-1).to(device, torch.float32)
    chosen = torch.zeros(experts, device=device)
    probability = torch.zeros(experts, device=device)
    for logits in gate_logits:
        weights = logits.to(device).softmax(-1)
        ids = weights.topk(top_k, dim=-1).indices
        hits = (ids.unsqueeze(-1) == torch.arange(experts, device=device)).sum(1)
        chosen = chosen + (hits * counted.unsqueeze(-1)).sum(0)
        probability = probability + (weights.float() * counted.unsqueeze(-1)).sum(0)
    rows = counted.sum() * len(gate_logits)
    return (chosen / rows * (probability / rows)).sum() * experts


@functools.cache
def can_use_grouped_mm(stock: Any) -> Any:
    """Return a ``_can_use_grouped_mm`` that asks no transformed tensor for its data pointer.

    Under a functorch transform stock is asked about the tensors beneath it.
    """

    @functools.wraps(stock)
    def _can_use_grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
        if not transforms_active() or torch.compiler.is_compiling():
            return bool(stock(input, weight, offs))
        return bool(stock(unwrap(input), unwrap(weight), unwrap(offs)))

    return _can_use_grouped_mm
