"""The attention that the patched modules dispatch to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention

from opake.compat.transforms import transforms_active

SDPA = "opake_sdpa"
"""The key under which :func:`sdpa` is registered with transformers."""

SYMBOLS = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS._global_mapping", ()),
    (
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
        ("module", "query", "key", "value", "attention_mask"),
    ),
)


def sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run transformers' SDPA attention; shapes (B, heads, S, head_dim), result (B, S, heads, D)."""
    if transforms_active() and torch.is_autocast_enabled(query.device.type):
        # Under functorch, autocast does not reach SDPA: rotary embedding left q and k in fp32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attention: tuple[Tensor, Tensor | None] = sdpa_attention.sdpa_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )
    return attention
