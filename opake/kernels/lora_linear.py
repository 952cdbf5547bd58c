"""A linear layer with low-rank adapters: ``x W^T + bias + sum of scale (x A^T) B^T``."""

# ruff: noqa: N803  (A and B are PEFT's names)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opake.kernels import _lora as lora
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._layout import as_output
from opake.kernels._lora import Options
from opake.kernels._lora_launch import ACCUMULATE
from opake.kernels._lora_products import by_rows, project, pull, read, without_autocast
from opake.kernels._op import Op, register

# ---- reference


def lora_linear_reference(
    x: Tensor, weight: Tensor, A: Any, B: Any, scale: Any, bias: Tensor | None = None
) -> Tensor:
    """:func:`lora_linear` in plain PyTorch."""
    return lora.project(x, lora.adapted("", weight, A, B, scale, bias))


def _reference(options: Options, *tensors: Any) -> Tensor:
    x, (layer,) = lora.unflat(options, tensors)
    return lora.project(x, layer)


# ---- both passes


@without_autocast
def _fwd(batch: int, options: Options, *tensors: Any) -> tuple[Tensor, ...]:
    x, layers = lora.unflat(options, tensors)
    (out,), left = project(batch, by_rows(x, batch), layers)
    outer = x.shape[:-1]
    return tuple([as_output(y, (*outer, y.shape[-1])) for y in (out, left)])


@without_autocast
def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    x, layers = lora.unflat(options, tensors)
    want_x, wants = lora.wants_of(options, wanted)
    grads = [by_rows(g, batch) for g in grads]
    rows, left = read(batch, options, wanted, x, saved[0])
    dx, others = pull(batch, want_x, wants, grads, rows, layers, left)
    return (None if dx is None else dx.view(x.shape), *others)


_function = fused_function(
    "lora_linear", _reference, _fwd, _bwd, saved=1, rows=(0,), keeps=lora.keeps
)


def _fused(
    x: Tensor, weight: Tensor, A: Any, B: Any, scale: Any, bias: Tensor | None = None
) -> Any:
    layer = lora.adapted("", weight, A, B, scale, bias)
    return _function(Options((layer.scales,)), *lora.flat(x, [layer]))


# ---- public


def lora_linear(
    x: Tensor,
    weight: Tensor,
    A: Tensor | Sequence[Tensor] | None,
    B: Tensor | Sequence[Tensor] | None,
    scale: float | Sequence[float],
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``x W^T + bias + scale (x A^T) B^T`` (Hu et al. 2021, "LoRA"), as PEFT does.

    Any of the tensors may be trained. Of what is frozen no gradient is computed, and gradients of
    A and B for each example need no copies of the weight.

    Args:
        x: (..., in).
        weight: (out, in), of the dtype of ``x``.
        A: (rank, in); several adapters, whose products are added up, as a sequence; None or an
            empty sequence for none, which leaves the linear layer.
        B: (out, rank), likewise. Adapters may have another dtype than the weight, and are computed
            in it.
        scale: a number, or as many as there are adapters.
        bias: (out,).

    Returns:
        (..., out) in the dtype of ``x``; under autocast in that of autocast, to which all tensors
        are cast.

    Raises:
        InvalidArgument: shapes that do not fit, or sequences of several lengths.
        InvalidType: a scale is no number, something else no tensor, or x and weight, or A and B,
            are not of one floating dtype.
    """
    lora.check(x, [("", lora.adapted("", weight, A, B, scale, bias))])
    result: Tensor = LORA_LINEAR(x, weight, A, B, scale, bias)
    return result


# ---- registration


def _fits(x: Tensor, weight: Tensor, A: Any, B: Any, scale: Any, bias: Tensor | None = None) -> str:
    layer = lora.adapted("", weight, A, B, scale, bias)
    return lora.fits(x, [layer]) if layer.A else "there is no adapter"


def _examples(draw: Draw) -> Call:
    *outer, inner = draw.shape(min_dims=1, max_elements=512)
    base = draw.dtype()
    small = draw.dtype() if draw.integer(0, 1) else base
    x = draw.tensor([*outer, inner], base, (1.0, 8.0, 0.1))
    out = draw.choice((3, 1, 8, 17, 40, 0))
    return Call((x, *lora.draw_adapted(draw, inner, out, base, small)))


def _shape(tokens: int, inner: int, outer: int, rank: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x = torch.randn(tokens, inner, device=device, dtype=dtype)
        return Call((x, *lora.random_adapted(inner, outer, rank, device, dtype)))

    elements = tokens * (inner + outer) + inner * outer
    flops = 2 * tokens * inner * outer  # of the base alone
    label = f"{tokens}x{inner}x{outer} r{rank}"
    return Shape(label, make, elements, elements, flops, flops, frozen=(1, 5))


LORA_LINEAR = register(
    Op(
        name="lora_linear",
        function=lora_linear,
        reference=lora_linear_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        work=lora.work,
        benchmarks=(_shape(8192, 4096, 4096, 16), _shape(4096, 896, 4864, 16)),
        launches=(ACCUMULATE,),
    )
)
