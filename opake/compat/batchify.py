"""Let a model that expects a batch dimension run where ``vmap`` has taken it away."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from opake.compat import autocast, empty
from opake.compat._versions import has_cache
from opake.compat.transforms import transforms_active

NDIM = {
    "input_ids": 2,
    "attention_mask": 2,
    "labels": 2,
    "position_ids": 2,
    "shift_labels": 2,
    "token_type_ids": 2,
    "start_positions": 1,
    "end_positions": 1,
    "next_sentence_label": 1,
    "inputs_embeds": 3,
    "encoder_hidden_states": 3,
    "encoder_attention_mask": 2,
    "mc_token_ids": 2,
    "mc_labels": 1,
}
"""Dimensions of each argument in a batched call."""

_PER_TOKEN = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "inputs_embeds",
)
"""The arguments that have one dimension more where an example has several sequences."""

PER_TOKEN_FIELDS = ("router_logits",)
"""The output fields that have no batch dimension in stock: one row for every token of the batch."""

LEADING = ("input_ids", "inputs_embeds")
"""The arguments that tell whether a call is batched."""


def choices(head: type) -> bool:
    """Tell whether a head of that class takes several sequences for every example."""
    names = ("ForMultipleChoice", "DoubleHeadsModel")
    return any(cls.__name__.endswith(names) for cls in head.__mro__)


@functools.cache
def batchify(names: tuple[str, ...], choices: bool = False) -> Callable[..., Any]:
    """Return a wrapper for a ``forward`` whose positional parameters are ``names``.

    Under a functorch transform, a call without a batch dimension (``input_ids`` of shape (S,) or
    ``inputs_embeds`` of shape (S, H)) gets one of size 1 on every argument that lacks it, and its
    outputs lose it again. A batch of no examples, on which stock raises, runs as one example whose
    labels are ignored, and its outputs have no rows, unless it brings a cache. Every other call
    goes through as it is.

    Args:
        names: the positional parameters of the ``forward``.
        choices: an example has several sequences: ``input_ids`` of shape (C, S).
    """
    ndim = {name: n + choices if name in _PER_TOKEN else n for name, n in NDIM.items()}

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        call = by_name(names, args, kwargs)
        leading = None if call is None else _leading(call)
        if call is None or leading is None:
            return wrapped(*args, **kwargs)
        if autocast.mixes_layer_norms(instance):
            wrapped = functools.partial(autocast.with_wide_layer_norms, wrapped)
        name, value = leading
        if transforms_active() and value.ndim < ndim[name]:
            batched = {name: _batched(name, call[name], ndim) for name in call}
            return _without_batch(wrapped(**batched))
        if value.ndim >= ndim[name] and not value.shape[0] and not has_cache(call):
            return empty.run(wrapped, getattr(instance, "config", None), call)
        return wrapped(*args, **kwargs)

    forward._opake_permanent = True  # type: ignore[attr-defined]
    return forward


def by_name(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return every argument under its name, or None for a call that stock refuses."""
    given = names[: len(args)]
    if len(args) > len(names) or any(name in kwargs for name in given):
        return None
    return {**dict(zip(given, args, strict=True)), **kwargs}


def _leading(call: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    leading = [(name, call[name]) for name in LEADING if call.get(name) is not None]
    return leading[0] if len(leading) == 1 and isinstance(leading[0][1], Tensor) else None


def _batched(name: str, value: Any, ndim: Mapping[str, int]) -> Any:
    if isinstance(value, Tensor):
        if value.ndim < ndim.get(name, 0):
            return value.unsqueeze(0)
        # A 4-D mask without its batch; with several sequences, three dimensions are a padding mask.
        if name.endswith("attention_mask") and value.ndim == 3 and ndim[name] == 2:
            return value.unsqueeze(0)
    return value


def _without_batch(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.squeeze(0) if output.ndim and output.shape[0] == 1 else output
    if isinstance(output, dict):  # transformers' ModelOutput is one, and takes its fields by name
        fields = {k: x if k in PER_TOKEN_FIELDS else _without_batch(x) for k, x in output.items()}
        return type(output)(**fields)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_without_batch, output))
    if isinstance(output, tuple | list):
        return type(output)(map(_without_batch, output))
    return output
