"""Run a batch of no examples, as a Poisson draw can be, where stock raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label that no loss counts."""

_ROUTER = "output_router_logits"

_POSITIONS = ("start_positions", "end_positions")
"""Labels that are ignored where they lie behind the sequence, and clamped to it below 0."""


def run(wrapped: Any, config: Any, call: Mapping[str, Any]) -> Any:
    """Call ``wrapped`` on one stand-in example, and return its outputs without rows.

    The loss is that of an example with no label to count: stock's value, NaN for a mean and 0 for
    a sum over ``num_items_in_batch``, with gradients of zero. A router's auxiliary loss counts
    tokens without labels, so the stand-in has none.
    """
    labels = [name for name, x in call.items() if _always_counts(name, x)]
    kept = {name: _one(name, x) for name, x in call.items() if name not in labels}
    routed = kept.get(_ROUTER, getattr(config, _ROUTER, None))
    if routed:
        kept[_ROUTER] = False
    output: Any = without_rows(wrapped(**kept))
    if not isinstance(output, dict):
        return (output[0].float().mean(), *output) if labels else output
    nothing = next(x for x in output.values() if isinstance(x, Tensor) and x.ndim).float()
    added = {"loss": nothing.mean()} if labels else {}
    if routed:
        added["aux_loss"] = nothing.sum()
    return type(output)(**{**added, **output}) if added else output


def without_rows(output: Any) -> Any:
    """Cut every tensor of a nested output to no rows; scalars stay."""
    if isinstance(output, Tensor):
        return output[:0] if output.ndim else output
    if isinstance(output, dict):
        return type(output)(**{key: without_rows(value) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(without_rows, output))
    if isinstance(output, tuple | list):
        return type(output)(map(without_rows, output))
    if hasattr(output, "reorder_cache"):  # which every kind of layer has, unlike a selection
        output.reorder_cache(torch.empty(0, dtype=torch.long))
    return output


def _always_counts(name: str, value: Any) -> bool:
    """Tell whether these are labels of which no value is ignored: real ones, one for an example."""
    if "label" not in name or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.ndim == 1


def _one(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or value.shape[0]:
        return value
    shape = (1, *value.shape[1:])
    if "mask" in name:
        return value.new_ones(shape)
    if name in _POSITIONS:
        return value.new_full(shape, torch.iinfo(value.dtype).max)
    if "label" in name:
        return value.new_full(shape, IGNORED)
    return value.new_zeros(shape)
