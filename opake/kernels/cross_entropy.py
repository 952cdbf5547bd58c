"""Cross entropy: one read of the logits forward, one read and one write backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.kernels._arguments import require_tensors
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._cross_entropy import Options, nothing_is_nan
from opake.kernels._cross_entropy_arguments import settled
from opake.kernels._cross_entropy_launch import (
    BACKWARD,
    FORWARD,
    REDUCE,
    group_inputs,
    launch_bwd,
    launch_fwd,
    launch_reduce,
)
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._op import Op, register

# ---- reference


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """:func:`cross_entropy` in plain PyTorch, which looks at no label's value."""
    valid = labels != ignore_index
    used = valid & (labels >= 0) & (labels < logits.shape[-1])
    # What an ignored token's logits are must not matter, even where they are NaN.
    x = logits.masked_fill(~used.unsqueeze(-1), 0.0)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    x = x * logit_scale if logit_scale != 1.0 else x
    x = softcap * torch.tanh(x / softcap) if softcap is not None else x
    log_p = F.log_softmax(x, -1)
    target = labels.masked_fill(~used, 0).long().unsqueeze(-1)
    loss = -log_p.gather(-1, target).squeeze(-1)
    count = valid.to(loss.dtype)
    if class_weight is not None:
        class_weight = class_weight.to(loss.dtype)
        count = class_weight.expand_as(x).gather(-1, target).squeeze(-1).masked_fill(~used, 0.0)
        loss = loss * count
    if label_smoothing:
        spread = log_p if class_weight is None else log_p * class_weight
        loss = (1 - label_smoothing) * loss - label_smoothing / x.shape[-1] * spread.sum(-1)
    if z_loss:
        loss = loss + z_loss * x.logsumexp(-1).square()
    loss = loss.masked_fill(~valid, 0.0).masked_fill(valid & ~used, math.nan)
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    if isinstance(num_items, Tensor):
        num_items = num_items.to(total.dtype)
    if num_items is not None:
        return total / num_items
    return total / (count.sum() if class_weight is None else nothing_is_nan(count.sum()))


# ---- launchers


def _fwd(
    batch: int,
    options: Options,
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
) -> tuple[Tensor | None, ...]:
    inputs = group_inputs(batch, logits, labels, class_weight)
    loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    stats = torch.empty((*labels.shape, 3), dtype=torch.float32, device=logits.device)
    if loss.numel():
        launch_fwd(options, inputs, loss, stats)
    if options.reduction == "none":
        return loss, stats, None
    out = torch.empty(labels.shape[:batch], dtype=torch.float32, device=logits.device)
    share = torch.empty_like(out)  # kept; the loss is the caller's, who may write to it
    if out.numel():
        launch_reduce(options, inputs, num_items, loss, out, share)
    return out, stats, share


def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    logits, labels, class_weight, _ = tensors
    (grad,), (stats, share) = grads, saved
    if not wanted[0]:
        return None, None, None, None
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if not dlogits.numel():
        return dlogits, None, None, None
    inputs = group_inputs(batch, logits, labels, class_weight)
    groups, rows, _ = inputs.logits.shape
    grad = grad.reshape(groups, rows if options.reduction == "none" else 1)
    grad = grad.expand(groups, rows)
    # Where gradients alone are mapped, what was kept comes expanded.
    share = None if share is None else share.contiguous()
    launch_bwd(options, inputs, grad, share, stats.contiguous(), dlogits)
    return dlogits, None, None, None


# ---- autograd and functorch


def _by_options(
    options: Options,
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    num_items: Tensor | None,
) -> Tensor:
    chosen = options._asdict()
    if num_items is not None:
        chosen["num_items"] = num_items
    return cross_entropy_reference(logits, labels, class_weight=class_weight, **chosen)


_function = fused_function("cross_entropy", _by_options, _fwd, _bwd, saved=2)


def _fused(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    **chosen: Any,
) -> Any:
    items = num_items if isinstance(num_items, Tensor) else None
    number = None if num_items is None or items is not None else float(num_items)
    options = Options(**chosen, num_items=number)
    return _function(options, logits, labels, class_weight, items)


# ---- public


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Compute the cross entropy of ``softcap * tanh(logit_scale * logits / softcap)``.

    As ``torch.nn.functional.cross_entropy`` with the classes last, plus ``z_loss * lse**2`` for
    every token that is not ignored, lse being the log of the sum of exponentials (Chowdhery et al.
    2022, "PaLM").

    Args:
        logits: (..., V), any V.
        labels: (...), int32 or int64.
        class_weight: (V,); the mean divides by the sum of the labels' weights. Its gradient goes
            through plain PyTorch.
        ignore_index: the label of tokens that have no loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: in [0, 1].
        softcap: positive; None caps nothing.
        logit_scale: multiplies the logits, before they are capped.
        z_loss: the coefficient.
        num_items: what the mean divides by instead of the number of tokens with a loss: a number,
            or a tensor without dimensions on any device, which is not waited for.

    Returns:
        fp32 for half precision, else the dtype of the logits: (...) for ``"none"``, else a number.
        The mean over no token is NaN, with gradients of zero.

    Raises:
        IndexError: on the CPU, a label outside of [0, V) that is not ``ignore_index``. On a GPU,
            that token's loss is NaN and its gradient zero.
        InvalidArgument: shapes or values that cannot be used.
        InvalidType: labels that are no indices, or what is no tensor or no number.

    Compiled, a label outside of [0, V) makes its token's loss NaN on the CPU too.
    """
    require_tensors(logits=logits, labels=labels)
    labels, options = settled(
        logits.shape,
        labels,
        logits.device,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        num_items=num_items,
    )
    result: Tensor = CROSS_ENTROPY(logits, labels, **options)
    return result


# ---- registration


def _fits(logits: Tensor, labels: Tensor, **kwargs: Any) -> str:
    return "" if logits.is_floating_point() else "logits are no floating-point numbers"


def _examples(draw: Draw) -> Call:
    *outer, classes = draw.shape(min_dims=1, max_elements=1024)
    classes = max(classes, 1)
    if draw.integer(0, 3):
        outer = [min(size, 4) for size in outer]
    logits = draw.tensor([*outer, classes], draw.dtype())
    ignore_index = draw.choice([-100, -1, 0, classes - 1])
    labels = draw.indices(outer, classes)
    kind = draw.choice(["some", "none", "all"])
    if kind == "all":
        labels = torch.full_like(labels, ignore_index)
    elif kind == "some" and labels.numel() > 1:
        labels = labels.clone(memory_format=torch.contiguous_format)
        labels.view(-1)[:: draw.integer(2, 4)] = ignore_index
    kwargs: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": draw.choice(["mean", "sum", "none"]),
        "label_smoothing": draw.choice([0.0, 0.1, 0.5]),
        # Lower, and what is drawn saturates tanh until fp64 has no slope to compare with.
        "softcap": draw.choice([None, 100.0]),
        "logit_scale": draw.choice([1.0, 0.125, -1.0]),
        "z_loss": draw.choice([0.0, 1e-3]),
    }
    if draw.choice([False, True]):
        kwargs["class_weight"] = draw.tensor([classes], torch.float32).abs()
    if kwargs["reduction"] == "mean":
        count = draw.choice([None, 7, "tensor"])
        kwargs["num_items"] = torch.tensor(5, device=draw.device) if count == "tensor" else count
    return Call((logits, labels), kwargs)


def _shape(tokens: int, classes: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        logits = torch.randn(tokens, classes, device=device, dtype=dtype)
        return Call((logits, torch.randint(classes, (tokens,), device=device)))

    elements = tokens * classes
    return Shape(f"{tokens}x{classes}", make, forward=elements, backward=2 * elements)


CROSS_ENTROPY = register(
    Op(
        name="cross_entropy",
        function=cross_entropy,
        reference=cross_entropy_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(8192, 128256), _shape(4096, 151936), _shape(64, 1000)),
        launches=(FORWARD, REDUCE, BACKWARD),
    )
)
