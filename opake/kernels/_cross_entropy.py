"""The arguments and the kernels of the cross entropy, for (groups, rows, classes) of logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opake.kernels._cross_entropy_rows import bend, load_labels, loss_of, online, slope_of
from opake.kernels._triton import find_group, jit, tl

__all__ = [
    "Options",
    "count",
    "cross_entropy_bwd_kernel",
    "cross_entropy_fwd_kernel",
    "cross_entropy_reduce_kernel",
    "flags",
    "nothing_is_nan",
    "numbers",
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
    return nothing_is_nan(chosen.masked_fill(~used, 0.0).sum())


def nothing_is_nan(total: Tensor) -> Tensor:
    """A sum of weights to divide by: over none, PyTorch's mean is NaN, smoothed or not."""
    return total.masked_fill(total == 0, math.nan)


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
        divisor = tl.where(divisor == 0.0, float("nan"), divisor)
    if items_ptr is not None:
        divisor = tl.load(items_ptr + group * items_group).to(tl.float32)
    tl.store(out_ptr + group, tl.sum(total, 0) / divisor)
    # Not the number 1.0: of two numbers, interpreted, Python would refuse to divide by zero.
    tl.store(share_ptr + group, tl.full((), 1.0, tl.float32) / divisor)


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
