"""The arguments and the kernels of the cross entropy, for (groups, rows, classes) of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._cross_entropy_rows import bend, load_labels, loss_of, online, slope_of
from opake.kernels._triton import find_group, jit, tl

__all__ = [
    "Options",
    "count",
    "cross_entropy_bwd_kernel",
    "cross_entropy_fwd_kernel",
    "cross_entropy_reduce_kernel",
    "flags",
    "numbers",
    "validate",
]


class Options(NamedTuple):
    """What is no tensor; see :func:`opake.kernels.cross_entropy`."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    num_items: float | None = None


def numbers(options: Options, classes: int) -> tuple[float, ...]:
    """What multiplies logits, what caps them, shares of the target and of every class, z loss."""
    scale = options.logit_scale / (options.softcap or 1.0)
    smoothing = options.label_smoothing
    return scale, options.softcap or 0.0, 1.0 - smoothing, smoothing / classes, options.z_loss


def flags(options: Options) -> tuple[bool, bool, bool, bool]:
    """What is asked for at all: scale, cap, smoothing, z loss."""
    defaults = Options()
    names = ("logit_scale", "softcap", "label_smoothing", "z_loss")
    a, b, c, d = (getattr(options, name) != getattr(defaults, name) for name in names)
    return a, b, c, d


def count(
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    classes: int,
    dtype: torch.dtype,
) -> Tensor:
    """How many labels there are, by weight in ``dtype``: what a mean divides by."""
    valid = labels != ignore_index
    if class_weight is None:
        return valid.sum()
    used = valid & (labels >= 0) & (labels < classes)
    each = class_weight.to(dtype).expand(*labels.shape, -1)
    chosen = each.gather(-1, labels.masked_fill(~used, 0).long().unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(~used, 0.0).sum()


def validate(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    num_items: float | Tensor | None,
) -> None:
    """Refuse what :func:`opake.kernels.cross_entropy` says it does."""
    if not logits.dim() or not logits.shape[-1]:
        raise InvalidArgument(f"logits are (..., V) with V > 0; found {tuple(logits.shape)}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"labels are int32 or int64; found {labels.dtype}")
    if labels.shape != logits.shape[:-1]:
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise InvalidArgument(f"logits are (..., V) and labels (...); found {shapes}")
    if class_weight is not None and class_weight.shape != logits.shape[-1:]:
        raise InvalidArgument(
            f"class_weight has one number for each of {logits.shape[-1]} classes; "
            f"found {tuple(class_weight.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise InvalidArgument(f"reduction is 'mean', 'sum' or 'none'; found {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidArgument(f"label_smoothing is in [0, 1]; found {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise InvalidArgument(f"softcap is positive or None; found {softcap}")
    if num_items is None:
        return
    if reduction != "mean":
        raise InvalidArgument(f"num_items is what a mean divides by; found {reduction!r}")
    if isinstance(num_items, Tensor) and num_items.dim():
        raise InvalidArgument(f"num_items is one number; found {tuple(num_items.shape)}")


@jit
def cross_entropy_fwd_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    weight_ptr,
    loss_ptr,
    stats_ptr,
    groups,
    rows,
    classes,
    logits_group,
    logits_row,
    labels_group,
    labels_row,
    weight_group,
    ignore_index,
    scale,
    softcap,
    hard,
    soft,
    z_loss,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    smooth: tl.constexpr,
    squared: tl.constexpr,
    aligned: tl.constexpr,
    block_rows: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
):
    """Loss of every token, and for the backward pass: maximum, sum, and sum of weights."""
    group = find_group()
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    exists = row < tl.where(group < groups, rows, 0)
    labels_ptr += group * labels_group + row * labels_row
    label, ignored = load_labels(labels_ptr, exists, classes, ignore_index)
    used = label >= 0
    logits_ptr += group * logits_group + row * logits_row
    target = tl.load(logits_ptr + label, mask=used, other=0.0).to(tl.float32)
    target, _ = bend(target, scale, softcap, scaled, capped)
    # Logits are summed above the target's, lest their mean cancels; but not above an infinite one.
    origin = tl.where(tl.abs(target) < float("inf"), target, 0.0)
    factor = tl.full((block_rows,), 1.0, tl.float32) * hard
    if weight_ptr is not None:
        weight_ptr += group * weight_group
        factor *= tl.load(weight_ptr + label, mask=used, other=0.0).to(tl.float32)
    above, total, spread, weights = online(
        logits_ptr,
        weight_ptr,
        label,
        origin,
        classes,
        scale,
        softcap,
        scaled,
        capped,
        smooth,
        aligned,
        block_rows,
        lanes,
        width,
    )
    if smooth and weight_ptr is None:
        weights += classes
    loss = loss_of(
        above, total, spread, weights, target, origin, factor, soft, z_loss, smooth, squared
    )
    loss = tl.where(used, loss, tl.where(ignored, 0.0, float("nan")))
    at = group * rows + row
    tl.store(loss_ptr + at, loss, mask=exists)
    tl.store(stats_ptr + at * 3, above, mask=exists)
    tl.store(stats_ptr + at * 3 + 1, total, mask=exists)
    if smooth:
        tl.store(stats_ptr + at * 3 + 2, weights, mask=exists)


@jit
def cross_entropy_reduce_kernel(  # type: ignore[no-untyped-def]
    loss_ptr,
    labels_ptr,
    weight_ptr,
    items_ptr,
    out_ptr,
    share_ptr,
    rows,
    classes,
    labels_group,
    labels_row,
    weight_group,
    items_group,
    ignore_index,
    divisor,
    counted: tl.constexpr,
    block: tl.constexpr,
):
    """Sum a group's losses and divide, by ``divisor`` if it is neither counted nor in memory; a
    token's share in the result is one over that."""
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros((block,), tl.float32)
    count = tl.zeros((block,), tl.float32)
    for start in range(0, rows, block):
        row = start + tl.arange(0, block).to(tl.int64)
        exists = row < rows
        total += tl.load(loss_ptr + group * rows + row, mask=exists, other=0.0)
        if counted:
            at = labels_ptr + group * labels_group + row * labels_row
            label, ignored = load_labels(at, exists, classes, ignore_index)
            if weight_ptr is not None:
                at = weight_ptr + group * weight_group + label
                count += tl.load(at, mask=label >= 0, other=0.0).to(tl.float32)
            else:
                count += tl.where(ignored, 0.0, 1.0)
    if counted:
        divisor = tl.sum(count, 0)
    if items_ptr is not None:
        divisor = tl.load(items_ptr + group * items_group).to(tl.float32)
    tl.store(out_ptr + group, tl.sum(total, 0) / divisor)
    tl.store(share_ptr + group, 1.0 / divisor)


@jit
def cross_entropy_bwd_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    share_ptr,
    logits_ptr,
    labels_ptr,
    weight_ptr,
    stats_ptr,
    dlogits_ptr,
    groups,
    rows,
    classes,
    grad_group,
    grad_row,
    logits_group,
    logits_row,
    labels_group,
    labels_row,
    weight_group,
    ignore_index,
    scale,
    softcap,
    hard,
    soft,
    z_loss,
    logit_scale,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    smooth: tl.constexpr,
    squared: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Write every gradient once; where there is no loss, zeros without reading logits."""
    group = find_group()
    blocks = tl.cdiv(classes, block_cols)
    row = (tl.program_id(0) // blocks).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = (tl.program_id(0) % blocks) * block_cols + tl.arange(0, block_cols)[None, :]
    exists = row < tl.where(group < groups, rows, 0)
    labels_ptr += group * labels_group + row * labels_row
    label, _ = load_labels(labels_ptr, exists, classes, ignore_index)
    used = label >= 0
    at = group * rows + row
    above = tl.load(stats_ptr + at * 3, mask=used, other=0.0)
    total = tl.load(stats_ptr + at * 3 + 1, mask=used, other=1.0)
    grad = tl.load(grad_ptr + group * grad_group + row * grad_row, mask=used, other=0.0)
    if share_ptr is not None:
        grad *= tl.load(share_ptr + group, mask=group < groups, other=0.0)
    if scaled or capped:
        grad *= logit_scale
    target = grad * hard
    if weight_ptr is not None:
        weight_ptr += group * weight_group
        target *= tl.load(weight_ptr + label, mask=used, other=0.0).to(tl.float32)

    inside = col < classes
    logits_ptr += group * logits_group + row * logits_row
    x = tl.load(logits_ptr[:, None] + col, mask=used[:, None] & inside, other=0.0)
    weights = label.to(tl.float32)
    if smooth:
        weights = tl.load(stats_ptr + at * 3 + 2, mask=used, other=0.0)
    dlogits = slope_of(
        x.to(tl.float32),
        weight_ptr,
        col,
        classes,
        label,
        above,
        total,
        weights,
        grad,
        target,
        scale,
        softcap,
        soft,
        z_loss,
        scaled,
        capped,
        smooth,
        squared,
    )
    dlogits = tl.where(used[:, None], dlogits, 0.0).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + at[:, None] * classes + col, dlogits, mask=exists[:, None] & inside)
