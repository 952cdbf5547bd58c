"""The cross entropy and its gradient in one, where the incoming gradient is known beforehand."""

from __future__ import annotations

from torch import Tensor

from opake.kernels._cross_entropy import Options, flags, numbers
from opake.kernels._cross_entropy_launch import Inputs
from opake.kernels._cross_entropy_rows import bend, load_labels, loss_of, online, slope_of
from opake.kernels._triton import Launch, Tile, axes, find_group, jit, power_of_two, tl

__all__ = ["BOTH", "launch_both"]


@jit
def _cross_entropy_both_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    weight_ptr,
    grad_ptr,
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
    grad_group,
    grad_row,
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
    aligned: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
):
    """Loss of a token; then its gradient over its logits, which the cache still has."""
    group = find_group()
    if group >= groups:
        return
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    exists = row < rows
    labels_ptr += group * labels_group + row * labels_row
    label, ignored = load_labels(labels_ptr, exists, classes, ignore_index)
    used = label >= 0
    logits_ptr += group * logits_group + row * logits_row
    target, _ = bend(
        tl.load(logits_ptr + label, mask=used, other=0.0).to(tl.float32),
        scale,
        softcap,
        scaled,
        capped,
    )
    # Logits are summed above the target's, lest their mean cancels; but not above an infinite one.
    origin = tl.where(tl.abs(target) < float("inf"), target, 0.0)
    factor = tl.full((1,), 1.0, tl.float32) * hard
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
        1,
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
    grad = tl.load(grad_ptr + group * grad_group + row * grad_row, mask=used, other=0.0)
    if scaled or capped:
        grad *= logit_scale
    share = grad * hard  # in the order of the backward pass alone, to the last bit
    if weight_ptr is not None:
        share *= tl.load(weight_ptr + label, mask=used, other=0.0).to(tl.float32)
    total = tl.where(used, total, 1.0)
    for start in range(0, classes, lanes * width):
        col = start + tl.arange(0, lanes * width)[None, :]
        inside = col < classes
        x = tl.load(logits_ptr[:, None] + col, mask=used[:, None] & inside, other=0.0)
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
            share,
            scale,
            softcap,
            soft,
            z_loss,
            scaled,
            capped,
            smooth,
            squared,
        )
        dlogits = tl.where(used[:, None], dlogits, 0.0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr[:, None] + col, dlogits, mask=exists[:, None] & inside)


_SWEEP = [Tile(elements, warps) for elements in (8192, 16384, 32768) for warps in (16, 32)]
# So few rows at a time, one for every multiprocessor, that their logits stay in an H200's cache.
BOTH = Launch(
    _cross_entropy_both_kernel,
    {"": Tile(8192, 16), "sm_90": Tile(16384, 32)},
    _SWEEP,
    contract=False,
)


def launch_both(
    options: Options, inputs: Inputs, grad: Tensor, loss: Tensor, stats: Tensor
) -> None:
    """Write every row's loss, what a backward pass needs, and over the logits their gradient.

    Args:
        options: what is no tensor.
        inputs: their logits are written to.
        grad: (groups, rows), the incoming gradient of every loss.
        loss: (groups, rows), fp32, contiguous.
        stats: (groups, rows, 3), fp32, contiguous.
    """
    x = inputs.logits
    groups, rows, classes = x.shape
    tile = BOTH.tile(x.device, classes)
    aligned = not (x.data_ptr() | x.stride(0) | x.stride(1) | classes) & 15
    block = min(tile.elements, power_of_two(classes))
    width = min(16 // x.element_size() if aligned else 8, block)
    BOTH(
        axes(rows, groups),
        (*inputs, grad, loss, stats),
        (groups, rows, classes, *inputs.integers(), *grad.stride(), options.ignore_index),
        (*flags(options), aligned, block // width, width),
        max(1, min(tile.warps, block // 256)),
        (*numbers(options, classes), options.logit_scale),
    )
