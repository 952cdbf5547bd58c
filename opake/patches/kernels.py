"""The operators under the names that others published."""

from __future__ import annotations

from torch import Tensor

from opake.kernels.cross_entropy import cross_entropy
from opake.kernels.fused_add_rms_norm import fused_add_rms_norm
from opake.kernels.geglu import geglu_exact, geglu_tanh
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
