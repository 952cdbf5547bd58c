"""Other implementations under the names and arguments of our operators; none is imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
Functions = dict[str, list[Callable[..., Any]]]  # where there are several, one of them is right
IGNORED = -100


def _plain(**options: Any) -> None:
    """Refuse options that a peer has no word for."""
    for name, value in options.items():
        if isinstance(value, Tensor) or value not in (None, 0.0, 1.0, False, -100, "mean"):
            raise NotImplementedError(f"no {name}")


def _halves(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gate_up: function(*gate_up.chunk(2, -1))


def torch_functions() -> Functions:
    """PyTorch's own fused operators; where it has none, its shortest spelling."""

    def rms_norm(x: Tensor, weight: Any = None, eps: float = 1e-6, **options: Any) -> Tensor:
        options.pop("casting_mode", None)
        _plain(**options)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def fused_add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **options: Any
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps, **options), total

    def layer_norm(x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        return lambda gate, up: activation(gate) * up

    return _gated_functions(
        swiglu=gated(F.silu),
        geglu_exact=gated(F.gelu),
        geglu_tanh=gated(lambda x: F.gelu(x, approximate="tanh")),
    ) | {
        "rms_norm": [rms_norm],
        "fused_add_rms_norm": [fused_add_rms_norm],
        "layer_norm": [layer_norm],
        "cross_entropy": [_torch_cross_entropy],
        "embedding": [lambda ids, weight, padding_idx=None: F.embedding(ids, weight, padding_idx)],
        "moe": [_grouped_mm_moe],
    }


def _grouped_mm_moe(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    """Sort tokens by expert, multiply by torch's grouped products, add up in place."""
    if options.get("activation", "silu") != "silu":
        raise NotImplementedError(f"no {options}")
    top_k, experts = ids.shape[-1], gate_up.shape[0]
    slots, order = torch.sort(ids.reshape(-1), stable=True)
    everyone = torch.arange(experts, device=ids.device, dtype=slots.dtype)
    ends = torch.searchsorted(slots, everyone, right=True).to(torch.int32)
    tokens = x[order // top_k]
    gate, up = torch._grouped_mm(tokens, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    found = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    found = found * weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return found[place].view(*ids.shape, -1).sum(-2)


def _torch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    _plain(logit_scale=logit_scale - 1.0, **options)
    return F.cross_entropy(
        logits,
        labels.long(),
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _gated_functions(**functions: Callable[..., Any]) -> Functions:
    """Gated activations, from two tensors and from one that holds both halves."""
    packed = {f"{name}_packed": [_halves(function)] for name, function in functions.items()}
    return {name: [function] for name, function in functions.items()} | packed


def liger_functions() -> Functions:
    """The functional interface of liger-kernel."""
    from liger_kernel.ops import LigerEmbeddingFunction, LigerFusedMoEFunction
    from liger_kernel.transformers import functional as liger

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        options.pop("unsqueeze_dim", None)
        _plain(**options)
        cos, sin = (x if x.dim() == 3 else x[None] for x in (cos, sin))
        return liger.liger_rope(q, k, cos, sin)

    gated = _gated_functions(swiglu=liger.liger_swiglu, geglu_tanh=liger.liger_geglu)
    losses = _liger_losses(liger, LigerEmbeddingFunction)
    linear = {"linear_cross_entropy": [_liger_linear_cross_entropy(liger)]}
    linear["moe"] = [_liger_moe(LigerFusedMoEFunction)]
    return gated | _liger_norms(liger) | losses | linear | {"rope": [rope]}


def _liger_linear_cross_entropy(liger: Any) -> Callable[..., Any]:
    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any = None, **options: Any
    ) -> Tensor:
        _plain(**options)
        return liger.liger_fused_linear_cross_entropy(hidden, weight, labels, bias)

    return linear_cross_entropy


def _liger_moe(function: Any) -> Callable[..., Any]:
    def moe(
        x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, w: Tensor, **options: Any
    ) -> Any:
        _plain(**{k: v for k, v in options.items() if v != "silu"})
        return function.apply(x, gate_up, down, ids, w)

    return moe


def cce_functions() -> Functions:
    """cut-cross-entropy."""
    from cut_cross_entropy import linear_cross_entropy as cce

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any = None, **options: Any
    ) -> Tensor:
        _plain(bias=bias, **options)
        return cce(hidden, weight, labels)

    return {"linear_cross_entropy": [linear_cross_entropy]}


def _liger_norms(liger: Any) -> Functions:
    def norm(
        x: Tensor,
        weight: Tensor,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
    ) -> Tensor:
        return liger.liger_rms_norm(x, weight, eps, offset, casting_mode)

    def add_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
    ) -> Any:
        return liger.liger_fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        return liger.liger_layer_norm(x, weight, bias, eps)

    return {
        "rms_norm": [norm],
        "fused_add_rms_norm": [add_norm],
        "layer_norm": [layer_norm],
    }


def _liger_losses(liger: Any, embed: Any) -> Functions:
    def cross_entropy(
        logits: Tensor,
        labels: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        **options: Any,
    ) -> Tensor:
        _plain(logit_scale=logit_scale - 1.0, **options)
        return liger.liger_cross_entropy(
            logits,
            labels,
            class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            lse_square_scale=z_loss,
        )

    def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        _plain(padding_idx=padding_idx)
        return embed.apply(weight, ids)

    return {"cross_entropy": [cross_entropy], "embedding": [embedding]}


def seed_functions() -> Functions:
    """The published opake-patches."""
    import opake

    if (ROOT / "opake") in [Path(p).resolve() for p in opake.__path__]:
        raise ImportError("opake is this repository, not opake-patches: PYTHONPATH must leave it")
    from opake.patches import kernels as seed

    return (
        _gated_functions(
            swiglu=seed.opake_swiglu,
            geglu_exact=seed.opake_geglu_exact,
            geglu_tanh=seed.opake_geglu_approx,
        )
        | {
            "rms_norm": [seed.opake_rms_norm],
            "fused_add_rms_norm": [seed.opake_fused_add_rms_norm],
            "rope": _seed_ropes(seed),
            "cross_entropy": [_seed_cross_entropy(seed)],
            "linear_cross_entropy": [_seed_linear_cross_entropy(seed)],
            "moe": [_seed_moe(seed)],
        }
        | _seed_lora(seed)
    )


def _seed_linear_cross_entropy(seed: Any) -> Callable[..., Any]:
    """It shifts inside: one token more, whose label is the last."""

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any = None, **options: Any
    ) -> Tensor:
        _plain(bias=bias, **options)
        hidden, labels = F.pad(hidden, (0, 0, 0, 1)), F.pad(labels, (1, 0))
        return seed.opake_linear_cross_entropy_loss(hidden[None], weight, labels[None])

    return linear_cross_entropy


def _seed_moe(seed: Any) -> Callable[..., Any]:
    def moe(
        x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, w: Tensor, **options: Any
    ) -> Any:
        _plain(**{k: v for k, v in options.items() if v != "silu"})
        return seed.opake_moe(x, gate_up, down, ids, w)

    return moe


def _seed_lora(seed: Any) -> Functions:
    def plain(adapted: Any) -> tuple[Any, ...]:
        weight, a, b, scale, *bias = adapted
        _plain(bias=bias[0] if bias else None)
        return weight, a.t(), b.t(), scale

    def linear(x: Tensor, *adapted: Any) -> Tensor:
        return seed.opake_lora_w(x, *plain(adapted))

    def qkv(x: Tensor, q: Any, k: Any, v: Any) -> Any:
        return seed.opake_lora_qkv(x, *plain(q), *plain(k), *plain(v))

    def mlp(x: Tensor, gate: Any, up: Any, down: Any, **options: Any) -> Any:
        _plain(**{k: v for k, v in options.items() if v != "silu"})
        return seed.opake_lora_mlp(x, *plain(gate), *plain(up), *plain(down))

    return {"lora_linear": [linear], "lora_qkv": [qkv], "lora_mlp": [mlp]}


def _seed_ropes(seed: Any) -> list[Callable[..., Any]]:
    """One for each table that it may take, which is not documented."""

    def rope(shape: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
            options.pop("unsqueeze_dim", None)
            _plain(**options)
            return seed.opake_rope_qk(q, k, shape(cos), shape(sin))

        return rope

    def width(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def half(x: Tensor) -> Tensor:
        return width(x)[:, : x.shape[-1] // 2].contiguous()

    return [rope(lambda x: x), rope(width), rope(half)]


def _seed_cross_entropy(seed: Any) -> Callable[..., Any]:
    def cross_entropy(
        logits: Tensor,
        labels: Tensor,
        *,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        **options: Any,
    ) -> Tensor:
        _plain(ignore_index=ignore_index - IGNORED, **options)
        scale = 0 if logit_scale == 1.0 else logit_scale
        loss = seed.opake_cross_entropy_loss(logits, labels, softcap or 0, scale, label_smoothing)
        if reduction == "none":
            return loss
        total = loss.sum()
        return total / (labels != IGNORED).sum() if reduction == "mean" else total

    return cross_entropy
