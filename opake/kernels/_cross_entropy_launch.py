"""Launching the kernels of the cross entropy."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from opake.kernels._cross_entropy import (
    Options,
    cross_entropy_bwd_kernel,
    cross_entropy_fwd_kernel,
    cross_entropy_reduce_kernel,
    flags,
    numbers,
)
from opake.kernels._layout import grouped
from opake.kernels._triton import Launch, Tile, axes, power_of_two

__all__ = [
    "BACKWARD",
    "FORWARD",
    "REDUCE",
    "Inputs",
    "group_inputs",
    "launch_bwd",
    "launch_fwd",
    "launch_reduce",
]

_SWEEP = [Tile(elements, warps) for elements in (2048, 4096, 8192, 16384) for warps in (4, 8, 16)]
# Two 16-byte loads of bf16 for every thread: what keeps an H200's memory busy at full occupancy.
FORWARD = Launch(cross_entropy_fwd_kernel, {"": Tile(8192, 16)}, _SWEEP, contract=False)
# Rounded as in the forward pass, a logit that is alone in its row has the probability of one.
BACKWARD = Launch(cross_entropy_bwd_kernel, {"": Tile(4096, 8)}, _SWEEP, contract=False)
REDUCE = Launch(cross_entropy_reduce_kernel, {"": Tile(1024, 8)})

_SHORT = 1024  # elements: two or three 16-byte loads for each thread of four warps


def _height(x: Tensor, tile: Tile, cols: int) -> int:
    """Rows of a program: few, where they are short, since warps meet for the sum of each."""
    room = tile.elements if x.device.type == "cpu" else _SHORT
    return max(1, min(room // cols, power_of_two(x.shape[1])))


def _warps(tile: Tile, elements: int) -> int:
    return max(1, min(tile.warps, elements // 256))


class Inputs(NamedTuple):
    """The inputs as the kernels take them: groups of rows."""

    logits: Tensor
    labels: Tensor
    weight: Tensor | None

    def integers(self) -> tuple[int, ...]:
        strides = (*self.logits.stride()[:2], *self.labels.stride())
        return (*strides, 0 if self.weight is None else self.weight.stride(0))


def group_inputs(batch: int, logits: Tensor, labels: Tensor, weight: Tensor | None) -> Inputs:
    """See the inputs, ``batch`` leading dimensions mapped, as the kernels take them."""
    x = grouped(logits, batch)
    ids = labels.reshape(x.shape[:2])
    return Inputs(x, ids, None if weight is None else grouped(weight, batch))


def launch_fwd(options: Options, inputs: Inputs, loss: Tensor, stats: Tensor) -> None:
    """Write the loss of every row (fp32), and what the backward pass needs (rows, 3)."""
    x = inputs.logits
    groups, rows, classes = x.shape
    tile = FORWARD.tile(x.device, x.numel())
    # What lets Triton see that 16-byte loads are allowed, which the mask must not split either.
    aligned = not (x.data_ptr() | x.stride(0) | x.stride(1) | classes) & 15
    cols = min(tile.elements, power_of_two(classes))
    width = min(16 // x.element_size() if aligned else 8, cols)
    height = _height(x, tile, cols)
    integers = (groups, rows, classes, *inputs.integers(), options.ignore_index)
    constants = (*flags(options), aligned, height, cols // width, width)
    FORWARD(
        axes(-(-rows // height), groups),
        (*inputs, loss, stats),
        integers,
        constants,
        _warps(tile, height * cols),
        numbers(options, classes),
    )


def launch_reduce(
    options: Options,
    inputs: Inputs,
    num_items: Tensor | None,
    loss: Tensor,
    out: Tensor,
    share: Tensor,
) -> None:
    groups, rows, classes = inputs.logits.shape
    items = None if num_items is None else num_items.reshape(groups)
    mean = options.reduction == "mean"
    counted = mean and items is None and options.num_items is None
    divisor = options.num_items if mean and options.num_items is not None else 1.0
    tile = REDUCE.tile(out.device, rows)
    block = min(tile.elements, max(64, power_of_two(rows)))
    strides = inputs.integers()[2:]
    REDUCE(
        (groups, 1, 1),
        (loss, *inputs[1:], items, out, share),
        (rows, classes, *strides, 0 if items is None else items.stride(0), options.ignore_index),
        (counted, block),
        _warps(tile, 4 * block),
        (divisor,),
    )


def launch_bwd(
    options: Options,
    inputs: Inputs,
    grad: Tensor,
    share: Tensor | None,
    stats: Tensor,
    dlogits: Tensor,
) -> None:
    """Write the gradient of the logits, contiguous; it may lie where the logits do.

    Args:
        options: what is no tensor.
        inputs: those of the forward pass.
        grad: (groups, rows), of every row's loss, before it is multiplied by its group's share.
        share: (groups,), or None for one.
        stats: what the forward pass found.
        dlogits: (groups, rows, classes), contiguous.
    """
    logits = inputs.logits
    groups, rows, classes = logits.shape
    tile = BACKWARD.tile(logits.device, logits.numel())
    cols = min(tile.elements, power_of_two(classes))
    height = _height(logits, tile, cols)
    BACKWARD(
        axes(-(-rows // height) * -(-classes // cols), groups),
        (grad, share, *inputs, stats, dlogits),
        (groups, rows, classes, *grad.stride(), *inputs.integers(), options.ignore_index),
        (*flags(options), height, cols),
        _warps(tile, height * cols),
        (*numbers(options, classes), options.logit_scale),
    )
