"""Run a batch of no examples, as a Poisson draw can be, where stock raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label that no loss counts."""

_POSITIONS = ("start_positions", "end_positions")
"""Labels that are ignored where they lie behind the sequence, and clamped to it below 0."""


def run(wrapped: Any, call: Mapping[str, Any]) -> Any:
    """Call ``wrapped`` on one stand-in example, and return its outputs without rows.

    The loss is that of an example with no label to count: stock's value, NaN for a mean and 0 for
    a sum over ``num_items_in_batch``, with gradients of zero.
    """
    labels = {name: x for name, x in call.items() if _is_real_label(name, x)}
    kept = {name: _one(name, x) for name, x in call.items() if name not in labels}
    output: Any = without_rows(wrapped(**kept))
    if not labels:
        return output
    # Real-valued labels have no value that is not counted: the mean of nothing instead.
    if isinstance(output, dict):
        return type(output)(loss=output["logits"].float().mean(), **output)
    return output[0].float().mean(), *output


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
    if hasattr(output, "batch_select_indices"):  # a cache
        output.batch_select_indices(torch.empty(0, dtype=torch.long))
    return output


def _is_real_label(name: str, value: Any) -> bool:
    return "label" in name and isinstance(value, Tensor) and value.is_floating_point()


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
