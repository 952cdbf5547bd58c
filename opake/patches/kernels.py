"""The operators under the names that others published."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument
from opake.kernels._arguments import require_tensors
from opake.kernels.cross_entropy import cross_entropy
from opake.kernels.fused_add_rms_norm import fused_add_rms_norm
from opake.kernels.geglu import geglu_exact, geglu_tanh
from opake.kernels.linear_cross_entropy import linear_cross_entropy
from opake.kernels.lora_linear import lora_linear
from opake.kernels.lora_mlp import lora_mlp
from opake.kernels.lora_qkv import lora_qkv
from opake.kernels.moe import MOE, moe
from opake.kernels.rms_norm import rms_norm
from opake.kernels.rope import rope
from opake.kernels.swiglu import swiglu

__all__ = [
    "ACTIVATION_GEGLU_APPROX",
    "ACTIVATION_GEGLU_EXACT",
    "ACTIVATION_SWIGLU",
    "opake_cross_entropy_loss",
    "opake_fused_add_rms_norm",
    "opake_geglu_approx",
    "opake_geglu_exact",
    "opake_linear_cross_entropy_loss",
    "opake_lora_mlp",
    "opake_lora_qkv",
    "opake_lora_w",
    "opake_moe",
    "opake_rms_norm",
    "opake_rope",
    "opake_rope_qk",
    "opake_slow_rope",
    "opake_swiglu",
]

ACTIVATION_SWIGLU = "swiglu"
ACTIVATION_GEGLU_EXACT = "geglu_exact"
ACTIVATION_GEGLU_APPROX = "geglu_approx"


def opake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`opake.kernels.swiglu`."""
    return swiglu(gate, up)


def opake_geglu_exact(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`opake.kernels.geglu_exact`."""
    return geglu_exact(gate, up)


def opake_geglu_approx(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`opake.kernels.geglu_tanh`."""
    return geglu_tanh(gate, up)


def opake_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """Compute :func:`opake.kernels.rms_norm`."""
    return rms_norm(x, weight, eps, offset=offset, casting_mode=casting_mode)


def opake_fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Compute :func:`opake.kernels.fused_add_rms_norm`: the norm, and the sum."""
    return fused_add_rms_norm(x, residual, weight, eps, offset=offset, casting_mode=casting_mode)


def opake_cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    logit_softcapping: float = 0,
    logit_scaling: float = 0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute :func:`opake.kernels.cross_entropy` of every token; zeros cap and scale nothing."""
    return cross_entropy(
        logits,
        labels,
        reduction="none",
        label_smoothing=label_smoothing,
        softcap=logit_softcapping or None,
        logit_scale=logit_scaling or 1.0,
    )


def opake_linear_cross_entropy_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    logit_softcapping: float = 0,
    label_smoothing: float = 0.0,
    use_token_scaling: bool = False,
    logit_scale: float = 1.0,
) -> Tensor:
    """Compute the mean :func:`opake.kernels.linear_cross_entropy` of the next tokens.

    Args:
        hidden_states: (..., S, H).
        weight: (V, H).
        labels: (..., S); they are shifted here.
        ignore_index: the label of tokens that have no loss.
        logit_softcapping: 0 caps nothing.
        label_smoothing: in [0, 1].
        use_token_scaling: weigh every token's loss by the probability that its label has, as a
            number without a gradient.
        logit_scale: multiplies the logits, before they are capped.
    """
    options: dict[str, Any] = {
        "shift": True,
        "ignore_index": ignore_index,
        "softcap": logit_softcapping or None,
        "label_smoothing": label_smoothing,
        "logit_scale": logit_scale,
    }
    if not use_token_scaling:
        return linear_cross_entropy(hidden_states, weight, labels, **options)
    losses = linear_cross_entropy(hidden_states, weight, labels, reduction="none", **options)
    with torch.no_grad():
        hard = losses
        if label_smoothing:
            options["label_smoothing"] = 0.0
            hard = linear_cross_entropy(hidden_states, weight, labels, reduction="none", **options)
        scale = hard.neg().exp()
    return (losses * scale).sum() / (labels[..., 1:] != ignore_index).sum()


def opake_lora_w(
    X: Tensor,  # noqa: N803  (the published names)
    W: Tensor,  # noqa: N803
    A: Tensor | None,  # noqa: N803
    B: Tensor | None,  # noqa: N803
    scaling: float,
) -> Tensor:
    """Compute :func:`opake.kernels.lora_linear`: ``X W^T + scaling X A B``.

    Args:
        X: (..., in).
        W: (out, in).
        A: (in, rank), the transpose of PEFT's.
        B: (rank, out), likewise.
        scaling: a number.
    """
    return lora_linear(X, *_adapted(W, A, B, scaling))


def opake_lora_qkv(
    X: Tensor,  # noqa: N803
    Wq: Tensor,  # noqa: N803
    Aq: Tensor | None,  # noqa: N803
    Bq: Tensor | None,  # noqa: N803
    Sq: float,  # noqa: N803
    Wk: Tensor,  # noqa: N803
    Ak: Tensor | None,  # noqa: N803
    Bk: Tensor | None,  # noqa: N803
    Sk: float,  # noqa: N803
    Wv: Tensor,  # noqa: N803
    Av: Tensor | None,  # noqa: N803
    Bv: Tensor | None,  # noqa: N803
    Sv: float,  # noqa: N803
    bq: Tensor | None = None,
    bk: Tensor | None = None,
    bv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`opake.kernels.lora_qkv`; layouts as in :func:`opake_lora_w`."""
    return lora_qkv(
        X,
        (*_adapted(Wq, Aq, Bq, Sq), bq),
        (*_adapted(Wk, Ak, Bk, Sk), bk),
        (*_adapted(Wv, Av, Bv, Sv), bv),
    )


def opake_lora_mlp(
    X: Tensor,  # noqa: N803
    Wg: Tensor,  # noqa: N803
    Ag: Tensor | None,  # noqa: N803
    Bg: Tensor | None,  # noqa: N803
    Sg: float,  # noqa: N803
    Wu: Tensor,  # noqa: N803
    Au: Tensor | None,  # noqa: N803
    Bu: Tensor | None,  # noqa: N803
    Su: float,  # noqa: N803
    Wd: Tensor,  # noqa: N803
    Ad: Tensor | None,  # noqa: N803
    Bd: Tensor | None,  # noqa: N803
    Sd: float,  # noqa: N803
    activation: str = ACTIVATION_SWIGLU,
) -> Tensor:
    """Compute :func:`opake.kernels.lora_mlp`; layouts as in :func:`opake_lora_w`.

    ``activation`` is one of the constants of this module.

    Raises:
        InvalidArgument: it is another.
    """
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise InvalidArgument(f"activation is one of {known}; got {activation!r}")
    return lora_mlp(
        X,
        _adapted(Wg, Ag, Bg, Sg),
        _adapted(Wu, Au, Bu, Su),
        _adapted(Wd, Ad, Bd, Sd),
        activation=_ACTIVATIONS[activation],
    )


_ACTIVATIONS = {
    ACTIVATION_SWIGLU: "silu",
    ACTIVATION_GEGLU_EXACT: "gelu",
    ACTIVATION_GEGLU_APPROX: "gelu_pytorch_tanh",
}


def _adapted(
    weight: Tensor, down: Tensor | None, up: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """A layer with PEFT's layout of the adapters; what has no layout is refused there."""
    for name, x in (("A", down), ("B", up)):
        if x is not None:
            require_tensors(**{name: x})
    transposed = [x if x is None or x.dim() < 2 else x.transpose(-1, -2) for x in (down, up)]
    return weight, transposed[0], transposed[1], scale


def opake_moe(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    grouped: bool = True,
) -> Tensor:
    """Compute :func:`opake.kernels.moe`; with ``grouped=False``, in plain PyTorch."""
    function = moe if grouped else MOE.reference
    out: Tensor = function(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
    return out


def opake_rope(Q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803  (the published name)
    """Rotate all columns of ``Q``, not in place; see :func:`opake.kernels.rope`.

    Args:
        Q: (B, S, heads, D).
        cos: D or D/2 wide, with S rows or more, of which the first S are used.
        sin: as ``cos``.
    """
    tables = (_table(x, Q.shape[1]) for x in (cos, sin))
    none = Q.detach()[:, :, :0]
    return rope(Q, none, *tables, unsqueeze_dim=2, rotary_dim=Q.shape[-1])[0]


def opake_rope_qk(
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    cos: Tensor,
    sin: Tensor,
    rope_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate all columns of ``Q`` and ``K``, not in place; see :func:`opake.kernels.rope`.

    Args:
        Q: (B, heads, S, D).
        K: (B, key heads, S, D).
        cos: D or D/2 wide; without ``rope_indices`` the first S rows are used.
        sin: as ``cos``.
        rope_indices: the tables' row for every token, B * S of them, or S for all examples.
    """
    examples, _, tokens, columns = Q.shape
    if rope_indices is not None:
        shared = rope_indices.numel() == tokens
        rope_indices = rope_indices.reshape(1 if shared else examples, tokens)
    rows = tokens if rope_indices is None else None
    tables = (_table(x, rows) for x in (cos, sin))
    return rope(Q, K, *tables, position_ids=rope_indices, rotary_dim=columns)


def opake_slow_rope(
    Q: Tensor,  # noqa: N803
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Rotate all columns of ``Q``, (B, heads, S, D), as :func:`opake_rope_qk` does."""
    return opake_rope_qk(Q, Q.detach()[:, :0], cos, sin, position_ids)[0]


def _table(x: Tensor, rows: int | None) -> Tensor:
    """Drop a dimension of heads, and rows that no token uses."""
    if x.dim() == 4:  # (B, 1, S, W) or (B, S, 1, W)
        x = x.squeeze(1) if x.shape[1] == 1 else x.squeeze(2)
    elif x.dim() == 3 and x.shape[1] == 1 != x.shape[0]:  # (S, 1, W)
        x = x.squeeze(1)
    return x if rows is None else x[..., :rows, :]
