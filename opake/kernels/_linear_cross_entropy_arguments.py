"""What the cross entropy of a linear head refuses, and what autocast makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._arguments import require_tensors
from opake.kernels._cross_entropy_arguments import settled

__all__ = ["autocast", "checked"]


def autocast(device: str) -> torch.dtype | None:
    """What a linear layer computes in there under autocast; but fp64 stays what it is."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def checked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    memory_budget: int | None,
    *,
    shift: bool,
    **options: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """Labels and options, as they are computed with."""
    require_tensors(hidden=hidden, weight=weight, labels=labels)
    _check(hidden, weight, labels, bias, shift, memory_budget)
    shape = (*hidden.shape[:-1], weight.shape[0])
    return settled(shape, labels, hidden.device, shift=shift, **options)


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    shift: bool,
    memory_budget: int | None,
) -> None:
    found = f"found {tuple(hidden.shape)} and {tuple(weight.shape)}"
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise InvalidArgument(f"hidden is (..., S, H) and weight (V, H); {found}")
    if not weight.shape[0]:
        raise InvalidArgument(f"weight has a row for each of V > 0 classes; {found}")
    if labels.shape != hidden.shape[:-1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(labels.shape)}"
        raise InvalidArgument(f"hidden is (..., S, H) and labels (..., S); found {shapes}")
    if shift and (hidden.dim() < 2 or not hidden.shape[-2]):
        raise InvalidArgument(f"shift needs a token, hidden (..., S, H); {found}")
    if bias is not None:
        require_tensors(bias=bias)
        if bias.shape != weight.shape[:1]:
            raise InvalidArgument(f"bias is ({weight.shape[0]},); found {tuple(bias.shape)}")
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    cast = autocast(hidden.device.type) is not None and torch.float64 not in dtypes
    if (len(dtypes) > 1 and not cast) or not all(x.is_floating_point for x in dtypes):
        names = ", ".join(sorted(map(str, dtypes)))
        raise InvalidType(
            f"hidden, weight and bias have one floating-point dtype; found {names}: cast the head, "
            "or use torch.autocast"
        )
    whole = isinstance(memory_budget, int) and not isinstance(memory_budget, bool)
    if memory_budget is not None and not (whole and memory_budget > 0):
        raise InvalidArgument(f"memory_budget is a number of bytes; found {memory_budget!r}")
