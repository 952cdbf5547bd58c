"""Mixture of experts: every token through the gated MLPs that a router chose for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._arguments import require_tensors
from opake.kernels._autograd import fused_function
from opake.kernels._bounds import check_indices
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._guard import physical, tracked
from opake.kernels._moe import PULL_BACK, ROWS, UP, WEIGHT, Options, backward, forward
from opake.kernels._moe_activations import ACTIVATIONS
from opake.kernels._moe_routing import COMBINE, KEYS, STARTS, TILES
from opake.kernels._op import Op, register

# ---- reference


def moe_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """:func:`moe` in plain PyTorch, with no shape that depends on the routing.

    Each slot gets a copy of its expert's weights where those are few, or no more than the weights
    themselves. Otherwise each expert sees all tokens, those that are not its own as zeros: E / K
    times the work, in the memory of one expert at a time.
    """
    tensors = (x, gate_up, down, topk_ids, topk_weights)
    return _plain(*tensors, activation=activation, dtype=x.dtype)


def _plain(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    skip: bool = False,
) -> Tensor:
    tokens = _matrix(x.to(gate_up.dtype))
    ids = _matrix(topk_ids).long()
    weights = _matrix(topk_weights)
    outside = None
    if skip or ids.device.type == "cuda":
        outside = (ids < 0) | (ids >= gate_up.shape[0])
        ids = ids.masked_fill(outside, 0)
        weights = weights.masked_fill(outside, 0)
    copies = ids.numel() * 3 * down[0].numel()
    few = ids.numel() <= gate_up.shape[0] or copies <= _FEW
    compute = _by_slot if few else _by_expert
    out = compute(tokens, gate_up, down, ids, weights, activation)
    if outside is not None and not skip:  # added, as the token's other slots have their gradients
        out = out + torch.zeros_like(out).masked_fill(outside.any(1, keepdim=True), math.nan)
    return out.to(dtype).view(x.shape)


_FEW = 1 << 22


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _by_slot(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, activation: str
) -> Tensor:
    pairs = (gate_up[ids] @ x[:, None, :, None]).squeeze(-1)
    h = _weighted(pairs, weights.unsqueeze(-1), activation)
    y = (down[ids] @ h.unsqueeze(-1)).squeeze(-1)
    return y.to(_wide(y)).sum(1)


def _by_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, activation: str
) -> Tensor:
    dtype = x.dtype
    x, weights = x.to(_wide(x)), weights.to(_wide(weights))  # where gradients are added up
    out = zeros = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        chosen = ids == e
        mine = chosen.any(1, keepdim=True)
        # Zeros all the way, so that what is not finite stays with the tokens that it belongs to.
        pairs = F.linear(torch.where(mine, x, zeros).to(dtype), gate_up[e])
        pairs = torch.where(mine, pairs, torch.zeros_like(pairs))
        weight = torch.where(chosen, weights, torch.zeros_like(weights)).sum(1, keepdim=True)
        y = F.linear(_weighted(pairs, weight, activation), down[e])
        out = out + torch.where(mine, y.to(out.dtype), zeros)
    return out


def _weighted(gate_up: Tensor, weights: Tensor, activation: str) -> Tensor:
    """Compute ``activation(gate) * up * weights``, rounded once."""
    gate, up = gate_up.to(_wide(gate_up)).tensor_split(2, -1)
    h = ACTIVATIONS[activation](gate) * up * weights.to(gate.dtype)
    return h.to(gate_up.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---- autograd and functorch

_function = fused_function(
    "moe",
    lambda options, *tensors: _plain(
        *tensors, activation=options.activation, dtype=options.dtype, skip=options.skip
    ),
    forward,
    backward,
    saved=1,
    rows=(0, 3, 4),
)


def _fused(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
    skip: bool = False,
) -> Any:
    """Run the kernels. With ``skip``, an id outside means nobody, as in a part of all experts."""
    dtype, device = gate_up.dtype, x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # what F.linear computes in
    smooth = (x, gate_up, down, topk_weights)
    keep = torch.is_grad_enabled() and any(map(tracked, smooth))
    matrices = (t.to(dtype) for t in (x, gate_up, down))
    options = Options(activation, x.dtype, keep, skip)
    return _function(options, *matrices, topk_ids, topk_weights)


# ---- public


def moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Send every token through K experts and add up what they say, weighted.

    ``out = sum_k weight_k * down[id_k] @ (activation(gate) * up)`` where
    ``gate, up = gate_up[id_k] @ x`` (Shazeer et al. 2017, "Outrageously Large Neural Networks",
    with gated experts). Any routing is right: experts without a token, all tokens at one
    expert, an expert that a token has twice. Nothing waits for the GPU to know the routing.

    Args:
        x: (..., H), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
            Computed in the dtype of the experts, or in autocast's.
        gate_up: (E, 2I, H), gate first.
        down: (E, H, I), of the same dtype.
        topk_ids: (..., K), int32 or int64.
        topk_weights: (..., K), of any floating dtype.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_pytorch_tanh"``.

    Returns:
        (..., H) in the dtype of ``x``. A weight that needs no gradient costs none. Under ``vmap``,
        the gradients of the experts come back for each example; what is not mapped is not copied.

    Raises:
        IndexError: on the CPU, an id outside of [0, E). On a GPU, its token's output is NaN, its
            slot has no gradient, and nothing is read outside.
        InvalidArgument: shapes that do not belong together, or an unknown activation.
        InvalidType: ids that are no indices, experts of two dtypes, or what is no tensor.
    """
    require_tensors(x=x, gate_up=gate_up, down=down, topk_ids=topk_ids, topk_weights=topk_weights)
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InvalidArgument(f"activation is one of {known}; found {activation!r}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"topk_ids are int32 or int64; found {topk_ids.dtype}")
    _check_floats(x=x, gate_up=gate_up, down=down, topk_weights=topk_weights)
    _check_shapes(x, gate_up, down, topk_ids, topk_weights)
    check_indices("topk_ids", topk_ids, gate_up.shape[0])
    result: Tensor = MOE(x, gate_up, down, topk_ids, topk_weights, activation=activation)
    return result


def _check_floats(**found: Tensor) -> None:
    for name, x in found.items():
        if not x.is_floating_point():
            raise InvalidType(f"{name} holds floating-point numbers; found {x.dtype}")
    gate_up, down = found["gate_up"].dtype, found["down"].dtype
    if gate_up != down:
        raise InvalidType(f"gate_up and down are of one dtype; found {gate_up} and {down}")


def _check_shapes(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> None:
    found = (tuple(gate_up.shape), tuple(down.shape))
    if gate_up.dim() != 3 or down.dim() != 3:
        raise InvalidArgument(f"gate_up is (E, 2I, H) and down (E, H, I); found {found}")
    experts, hidden, inner = down.shape
    if gate_up.shape != (experts, 2 * inner, hidden) or not experts:
        raise InvalidArgument(
            f"gate_up is (E, 2I, H) and down (E, H, I), E at least 1; found {found}"
        )
    if x.dim() < 1 or x.shape[-1] != hidden:
        raise InvalidArgument(f"x is (..., {hidden}) as the experts are; found {tuple(x.shape)}")
    if ids.dim() < 1 or ids.shape[:-1] != x.shape[:-1] or weights.shape != ids.shape:
        raise InvalidArgument(
            f"topk_ids and topk_weights are both (..., K) for x (..., H); found "
            f"{tuple(ids.shape)} and {tuple(weights.shape)} for {tuple(x.shape)}"
        )


# ---- registration


def _fits(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    **options: Any,
) -> str:
    if not (x.numel() and topk_ids.numel() and down.numel()):
        return "there is nothing to multiply"
    return ""


def _work(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    **options: Any,
) -> int:
    """Count the weights that all slots, of all mapped examples, are multiplied by: T K 3 I H.

    The reference, and transformers' ``batched_mm``, copy so many. Kernels read each weight once,
    and wait longer for their host.
    """
    examples = max(physical(t).numel() // t.numel() for t in (x, topk_ids))
    return examples * topk_ids.numel() * 3 * down.shape[1] * down.shape[2]


def _examples(draw: Draw) -> Call:
    experts, inner = draw.choice([2, 3, 1, 4]), draw.choice([3, 1, 8, 20])
    *rows, hidden = draw.shape(min_dims=1, max_dims=3, max_elements=8)
    if hidden < 64:
        hidden = draw.choice([5, 2, 8, 17, 40])
    top_k = draw.choice([2, 1, 3])
    dtype = draw.dtype()

    def tensor(scales: list[float], dtype: torch.dtype, *sizes: int) -> Tensor:
        # What overflows half precision on the way is no number to compare.
        scale = draw.choice(scales)
        generator = torch.Generator().manual_seed(draw.integer(0, 2**31 - 1))

        def normal(sizes: Any) -> Tensor:
            values: Tensor = torch.randn(tuple(sizes), generator=generator) * scale
            return values.to(draw.device, dtype)

        return draw._laid_out(sizes, normal, dtype)

    x = tensor([1.0, 0.3, 4.0], dtype, *rows, hidden)
    gate_up = tensor([1.0, 0.3], dtype, experts, 2 * inner, hidden)
    down = tensor([1.0, 0.3], dtype, experts, hidden, inner)
    ids = draw.indices([*rows, top_k], draw.choice([experts, 1]))
    weights = tensor([1.0, 0.3], draw.dtype(), *rows, top_k)
    activation = draw.choice(["silu", "gelu", "gelu_pytorch_tanh"])
    return Call((x, gate_up, down, ids, weights), {"activation": activation})


def _shape(experts: int, top_k: int, hidden: int, inner: int, tokens: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=dtype)

        ids = torch.rand(tokens, experts, device=device).topk(top_k, -1).indices
        weights = torch.rand(tokens, top_k, device=device).softmax(-1).to(dtype)
        gate_up = normal(experts, 2 * inner, hidden) * hidden**-0.5
        down = normal(experts, hidden, inner) * inner**-0.5
        return Call((normal(tokens, hidden), gate_up, down, ids, weights))

    # Every weight is read, in the backward pass written too; tokens come and go once.
    weights, rows = 3 * experts * inner * hidden, tokens * hidden
    label = f"E{experts} K{top_k} H{hidden} I{inner} T{tokens}"
    flops = 6 * tokens * top_k * hidden * inner
    return Shape(label, make, weights + 2 * rows, 2 * weights + 3 * rows, flops, 2 * flops)


MOE = register(
    Op(
        name="moe",
        function=moe,
        reference=moe_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(
            _shape(64, 8, 2048, 1024, 8192),
            _shape(8, 2, 4096, 14336, 2048),
            _shape(64, 8, 2048, 1024, 16),
            _shape(4, 2, 40, 24, 72),
        ),
        work=_work,
        launches=(KEYS, STARTS, TILES, UP, ROWS, PULL_BACK, WEIGHT, COMBINE),
    )
)
