"""Let a model that expects a batch dimension run where ``vmap`` has taken it away."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

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
    "inputs_embeds": 3,
}
"""Dimensions of each argument in a batched call."""

LEADING = ("input_ids", "inputs_embeds")
"""The arguments that tell whether a call is batched."""


@functools.cache
def batchify(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a wrapper for a ``forward`` whose positional parameters are ``names``.

    Under a functorch transform, a call without a batch dimension (``input_ids`` of shape (S,) or
    ``inputs_embeds`` of shape (S, H)) gets one of size 1 on every argument that lacks it, and its
    outputs lose it again. Every other call goes through as it is.
    """

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not transforms_active():
            return wrapped(*args, **kwargs)
        call = by_name(names, args, kwargs)
        if call is None:
            return wrapped(*args, **kwargs)
        if not _lacks_batch(call):
            return wrapped(*args, **kwargs)
        return _without_batch(wrapped(**{name: _batched(name, call[name]) for name in call}))

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


def _lacks_batch(call: Mapping[str, Any]) -> bool:
    leading = [(name, call[name]) for name in LEADING if call.get(name) is not None]
    return len(leading) == 1 and leading[0][1].ndim < NDIM[leading[0][0]]


def _batched(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.ndim < NDIM.get(name, 0):
            return value.unsqueeze(0)
        if name == "attention_mask" and value.ndim == 3:  # a 4-D mask without its batch
            return value.unsqueeze(0)
    return value


def _without_batch(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.squeeze(0) if output.ndim and output.shape[0] == 1 else output
    if isinstance(output, dict):  # transformers' ModelOutput is one, and takes its fields by name
        return type(output)(**{key: _without_batch(value) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_without_batch, output))
    if isinstance(output, tuple | list):
        return type(output)(map(_without_batch, output))
    return output
