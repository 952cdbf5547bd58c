"""The cross entropy of a linear head, whose logits are never all there at once."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from opake.errors import InvalidArgument
from opake.kernels import _linear_cross_entropy_tiled as tiled
from opake.kernels._arguments import integer
from opake.kernels._autograd import fused_function, transformed
from opake.kernels._cross_entropy import Options as LossOptions
from opake.kernels._cross_entropy import count
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._guard import physical, tensors
from opake.kernels._linear_cross_entropy import (
    BOTH,
    SCALE,
    Formed,
    Options,
    backward,
    default_budget,
    formable,
    forward,
)
from opake.kernels._linear_cross_entropy_arguments import autocast, checked
from opake.kernels._op import Op, register
from opake.kernels.cross_entropy import cross_entropy_reference

# ---- reference


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    shift: bool = False,
    memory_budget: int | None = None,
    **options: Any,
) -> Tensor:
    """:func:`linear_cross_entropy` in plain PyTorch, with all logits at once."""
    if shift:
        labels = _shifted(labels, options.get("ignore_index", -100))
    loss = cross_entropy_reference(F.linear(hidden, weight, bias), labels, **options)
    return loss[..., :-1] if shift and options.get("reduction") == "none" else loss


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """The next token's labels; the last has none, which costs less than a copy of all others."""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


# ---- autograd and functorch
#
# What is fused is every token's share of the loss. Its sum is plain PyTorch's business: so examples
# that share a head are more tokens, whatever is mapped, and the head has one gradient.


def _shares(
    options: Options,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    share: Tensor,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    loss = options.loss._asdict()
    return cross_entropy_reference(logits, labels, class_weight=class_weight, **loss) * share


def _function(plain: bool) -> Any:
    return fused_function(
        "linear_cross_entropy",
        _shares,
        functools.partial(forward, plain=plain),
        functools.partial(backward, plain=plain),
        saved=2,
        rows=(0, 2, 5),
        backend="reference" if plain else "triton",
    )


def _loss(
    function: Any,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    shift: bool = False,
    memory_budget: int | None = None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    forms: bool = True,
    **chosen: Any,
) -> Tensor:
    loss = LossOptions(**chosen, reduction="none")
    if shift:
        labels = _shifted(labels, loss.ignore_index)
    dtype = autocast(hidden.device.type)
    if dtype is not None and hidden.dtype != torch.float64:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    share = torch.ones((), dtype=dtype, device=hidden.device)
    divisor = num_items.to(dtype) if isinstance(num_items, Tensor) else num_items
    if reduction == "mean" and num_items is None:
        divisor = count(labels, class_weight, loss.ignore_index, weight.shape[-2], dtype)
    # A divisor that is trained divides in the end.
    late = isinstance(divisor, Tensor) and divisor.requires_grad
    if divisor is not None and not late:
        share = share / divisor
    maybe_zero = isinstance(num_items, Tensor) or num_items == 0
    if maybe_zero and not late:  # an ignored token's loss stays zero
        share = share.where(labels != loss.ignore_index, 1.0)
    forms = forms and torch.is_grad_enabled() and formable(hidden.dtype)
    whole = forms and reduction != "none" and not transformed()
    asked = (
        forms and hidden.requires_grad,
        whole and weight.requires_grad,
        whole and bias is not None and bias.requires_grad,
    )
    budget = memory_budget or default_budget(hidden, weight)
    options = Options(loss, budget, asked, Formed())
    share = share.expand(labels.shape)
    found: Tensor = function(options, hidden, weight, labels, bias, class_weight, share)
    if reduction == "none":
        return found[..., :-1] if shift else found
    found = found.sum()
    if divisor is not None and late:
        return found / divisor
    return found.masked_fill((found == 0) & (divisor == 0), math.nan) if maybe_zero else found


_kernels, _chunks = _function(plain=False), _function(plain=True)
_tiles = fused_function(
    "linear_cross_entropy",
    _shares,
    tiled.forward,
    tiled.backward,
    saved=1,
    rows=(0, 2, 5),
    backend="reference",
)


def tiled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    tile: int,
    shift: bool = False,
    **options: Any,
) -> Tensor:
    """:func:`linear_cross_entropy` without kernels, ``tile`` columns of the vocabulary at a time.

    A product of matrices more than by chunks of tokens, in memory that does not depend on V.
    Compiled, all logits are computed at once.
    """
    if integer("tile", tile) < 1:
        raise InvalidArgument(f"tile is a number of columns; found {tile}")
    labels, options = checked(hidden, weight, labels, bias, None, shift=shift, **options)
    if torch.compiler.is_compiling():
        return linear_cross_entropy_reference(hidden, weight, labels, bias, shift=shift, **options)
    options |= {"memory_budget": tile, "forms": False}
    return _loss(_tiles, hidden, weight, labels, bias, shift=shift, **options)


def _fused(*args: Any, **kwargs: Any) -> Tensor:
    return _loss(_kernels, *args, **kwargs)


def _portable(*args: Any, **kwargs: Any) -> Tensor:
    """Without kernels, in chunks all the same where only memory is what keeps them from running."""
    found = list(tensors((*args, *kwargs.values())))
    ordinary = all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_nested for x in found)
    ordinary &= torch.is_inference_mode_enabled() or not any(x.is_inference() for x in found)
    unseen = forward_ad._current_level < 0 and not torch._C._is_tracing()
    if ordinary and unseen and all(x.numel() for x in found[:2]):
        return _loss(_chunks, *args, **kwargs)
    return linear_cross_entropy_reference(*args, **kwargs)


# ---- public


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    shift: bool = False,
    memory_budget: int | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Compute :func:`cross_entropy` of ``hidden @ weight.T + bias`` without the logits' memory.

    Logits are there for a chunk of tokens at a time, and become their own gradient there. Where
    that of the loss will be one number, those of ``hidden``, ``weight`` and ``bias`` are formed in
    the forward pass (as by Hsu et al. 2024, "Liger Kernel"); a second backward pass computes them
    again. What is frozen costs nothing.

    Args:
        hidden: (..., S, H).
        weight: (V, H), of the dtype of ``hidden``, in which logits are rounded, as by a linear
            layer. Its gradient is added up over chunks in fp32, but in that dtype if it has more
            than 32M numbers and there are few chunks: up to 8, which about double its error.
        labels: (..., S), int32 or int64.
        bias: (V,).
        shift: compare every token's logits with the next one's label.
        memory_budget: bytes of logits at a time; at least one token's are computed. By default in
            proportion to ``hidden`` and ``weight``, up to 1/256 of the GPU's memory.
        class_weight: as for :func:`cross_entropy`, like all that follow.
        ignore_index: the label of tokens that have no loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: in [0, 1].
        softcap: positive; None caps nothing.
        logit_scale: multiplies the logits, before they are capped.
        z_loss: the coefficient.
        num_items: what the mean divides by instead of the number of tokens with a loss.

    Returns:
        fp32 for half precision, else the dtype of ``hidden``: (..., S), with ``shift``
        (..., S - 1), for ``"none"``, else a number.

    Raises:
        IndexError: on the CPU, a label outside of [0, V) that is not ``ignore_index``. On a GPU,
            that token's loss is NaN and its gradient zero.
        InvalidArgument: shapes or values that cannot be used.
        InvalidType: labels that are no indices, what is no tensor or no number, or tensors of
            several dtypes.

    Under ``vmap`` the examples' tokens are computed together if they share the head, of which no
    copies are made; the gradients of a head that is trained come back for each example. Where no
    kernel can run, plain PyTorch computes the same chunks. Compiled, a label outside of [0, V)
    makes its token's loss NaN on the CPU too.
    """
    labels, options = checked(
        hidden,
        weight,
        labels,
        bias,
        memory_budget,
        shift=shift,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        num_items=num_items,
    )
    result: Tensor = LINEAR_CROSS_ENTROPY(
        hidden, weight, labels, bias, shift=shift, memory_budget=memory_budget, **options
    )
    return result


# ---- registration


def _fits(hidden: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> str:
    return "" if hidden.numel() and weight.numel() else "there is nothing to multiply"


def _work(hidden: Tensor, weight: Tensor, *args: Any, **options: Any) -> int:
    """Count the logits of all mapped examples."""
    numbers = max(hidden.numel(), physical(hidden).numel())
    return numbers // max(hidden.shape[-1], 1) * weight.shape[0]


def _examples(draw: Draw) -> Call:
    *outer, width = draw.shape(min_dims=1, max_elements=64)
    outer = [min(size, 4) for size in outer]
    shift = bool(outer) and outer[-1] > 0 and draw.choice([False, True])
    classes = draw.choice([3, 1, 8, 33, 70, 300])
    dtype = draw.dtype()
    hidden = draw.tensor([*outer, max(width, 1)], dtype)
    # Logits of a few units, as in models; a hundred times that leave nothing but their maximum.
    weight = draw.tensor([classes, max(width, 1)], dtype) / (8 * max(width, 1) ** 0.5)
    bias = draw.tensor([classes], dtype) if draw.choice([False, True]) else None
    ignore_index = draw.choice([-100, -1, 0, classes - 1])
    labels = draw.indices(outer, classes)
    if draw.choice([False, True]) and labels.numel() > 1:
        labels = labels.clone(memory_format=torch.contiguous_format)
        labels.view(-1)[:: draw.integer(2, 4)] = ignore_index
    kwargs: dict[str, Any] = {
        "shift": shift,
        "memory_budget": draw.choice([None, 1, 4 * classes * 3]),
        "ignore_index": ignore_index,
        "reduction": draw.choice(["mean", "sum", "none"]),
        "label_smoothing": draw.choice([0.0, 0.1]),
        "softcap": draw.choice([None, 100.0]),
        "logit_scale": draw.choice([1.0, 0.125, -1.0]),
        "z_loss": draw.choice([0.0, 1e-3]),
    }
    if draw.choice([False, True]):
        kwargs["class_weight"] = draw.tensor([classes], torch.float32).abs()
    if kwargs["reduction"] == "mean":
        count = draw.choice([None, 7, "tensor"])
        kwargs["num_items"] = torch.tensor(5, device=draw.device) if count == "tensor" else count
    return Call((hidden, weight, labels, bias), kwargs)


def _shape(tokens: int, width: int, classes: int, *, trained: bool) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        hidden = torch.randn(tokens, width, device=device, dtype=dtype)
        weight = torch.randn(classes, width, device=device, dtype=dtype) * width**-0.5
        return Call((hidden, weight, torch.randint(classes, (tokens,), device=device)))

    elements = (tokens + classes) * width
    product = 2 * tokens * width * classes
    return Shape(
        f"{tokens}x{width}x{classes} {'trained' if trained else 'frozen'}",
        make,
        forward=elements,
        backward=elements,
        forward_flops=product,
        backward_flops=(1 + trained) * product,
        frozen=() if trained else (1,),
    )


LINEAR_CROSS_ENTROPY = register(
    Op(
        name="linear_cross_entropy",
        function=linear_cross_entropy,
        reference=linear_cross_entropy_reference,
        fused=_fused,
        portable=_portable,
        fits=_fits,
        examples=_examples,
        work=_work,
        benchmarks=(
            _shape(8192, 4096, 128256, trained=False),
            _shape(8192, 4096, 128256, trained=True),
            _shape(8192, 896, 151936, trained=False),
            _shape(8192, 896, 151936, trained=True),
            _shape(64, 64, 1000, trained=True),
        ),
        launches=(BOTH, SCALE),
    )
)
