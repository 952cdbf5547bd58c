"""What the cross entropies refuse, and their options as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._arguments import integer, number, require_tensors
from opake.kernels._bounds import check_indices

__all__ = ["settled"]


def settled(
    shape: Sequence[int],
    labels: Tensor,
    device: torch.device,
    *,
    shift: bool = False,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Check labels and options against the logits' shape; return both as they are computed with.

    Raises:
        IndexError: a label on the CPU is outside.
        InvalidArgument: shapes or values that cannot be used.
        InvalidType: labels that are no indices, or what is no tensor or no number.
    """
    ignore_index = integer("ignore_index", ignore_index)
    _check_tensors(shape, labels, class_weight)
    smoothing = number("label_smoothing", label_smoothing)
    options: dict[str, Any] = {
        "class_weight": class_weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": smoothing,
        "softcap": None if softcap is None else number("softcap", softcap),
        "logit_scale": number("logit_scale", logit_scale),
        "z_loss": number("z_loss", z_loss),
        "num_items": _items(num_items, reduction, device),
    }
    if reduction not in ("mean", "sum", "none"):
        raise InvalidArgument(f"reduction is 'mean', 'sum' or 'none'; found {reduction!r}")
    if not 0.0 <= smoothing <= 1.0:
        raise InvalidArgument(f"label_smoothing is in [0, 1]; found {label_smoothing}")
    if softcap is not None and not options["softcap"] > 0:
        raise InvalidArgument(f"softcap is positive or None; found {softcap}")
    if labels.dtype == torch.int32 and not -(2**31) <= ignore_index < 2**31:
        labels = labels.long()
    compared = labels[..., 1:] if shift else labels
    check_indices("labels", compared, shape[-1], ignore_index)
    return labels, options


def _check_tensors(shape: Sequence[int], labels: Tensor, class_weight: Tensor | None) -> None:
    if not shape or not shape[-1]:
        raise InvalidArgument(f"logits are (..., V) with V > 0; found {tuple(shape)}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"labels are int32 or int64; found {labels.dtype}")
    if labels.shape != torch.Size(shape[:-1]):
        shapes = f"{tuple(shape)} and {tuple(labels.shape)}"
        raise InvalidArgument(f"logits are (..., V) and labels (...); found {shapes}")
    if class_weight is None:
        return
    require_tensors(class_weight=class_weight)
    if class_weight.is_complex():
        raise InvalidType(f"class_weight has real numbers; found {class_weight.dtype}")
    if class_weight.shape != torch.Size(shape[-1:]):
        raise InvalidArgument(
            f"class_weight has one number for each of {shape[-1]} classes; "
            f"found {tuple(class_weight.shape)}"
        )


def _items(
    num_items: float | Tensor | None, reduction: str, device: torch.device
) -> float | Tensor | None:
    if num_items is None:
        return None
    if not isinstance(num_items, Tensor):
        num_items = number("num_items", num_items)
    if reduction in ("sum", "none"):
        raise InvalidArgument(f"num_items is what a mean divides by; found {reduction!r}")
    if not isinstance(num_items, Tensor):
        return num_items
    if num_items.dim():
        raise InvalidArgument(f"num_items is one number; found {tuple(num_items.shape)}")
    if num_items.is_complex():
        raise InvalidType(f"num_items is a real number; found {num_items.dtype}")
    if num_items.device != device:
        return num_items.to(device, non_blocking=True)
    return num_items
