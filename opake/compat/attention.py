"""The attention that the patched modules dispatch to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils
from transformers.integrations import sdpa_attention

from opake.compat import folded_sdpa
from opake.compat.autocast import autocast
from opake.compat.transforms import in_mode, transforms_active

SDPA = "opake_sdpa"
"""The key under which :func:`sdpa` is registered with transformers."""

SYMBOLS = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS._global_mapping", ()),
    (
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
        ("module", "query", "key", "value", "attention_mask"),
    ),
    *folded_sdpa.SYMBOLS,
)


def is_stocks() -> bool:
    """Tell whether transformers' own function is registered under ``sdpa``."""
    registered = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    return registered is sdpa_attention.sdpa_attention_forward


class _Folded(TorchFunctionMode):
    """Runs torch's SDPA as :func:`~opake.compat.folded_sdpa.folded_sdpa`, in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._nn.scaled_dot_product_attention:
            func = folded_sdpa.folded_sdpa
        return func(*args, **(kwargs or {}))


own_sdpa = in_mode(lambda module: _Folded())
"""Runs a module that calls torch's SDPA itself, once for all examples under a transform."""


def sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run transformers' SDPA attention; shapes (B, heads, S, head_dim), result (B, S, heads, D).

    Under a functorch transform, torch's operator runs once for all examples; a graph that dynamo
    traces has stock's, which its compiler takes apart itself.
    """
    inputs: tuple[Tensor | None, ...] = (query, key, value, attention_mask)
    redirect: Any = nullcontext()
    if transforms_active():
        if torch.compiler.is_compiling():
            # Under functorch, autocast does not reach SDPA: rotary embedding left q and k in fp32.
            inputs = tuple(None if x is None else autocast(x) for x in inputs)
        else:
            redirect = _Folded()
    with redirect:
        attention: tuple[Tensor, Tensor | None] = sdpa_attention.sdpa_attention_forward(
            module, *inputs, **kwargs
        )
    return attention
