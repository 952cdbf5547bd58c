"""Three linear layers of one input, with low-rank adapters: query, key and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opake.kernels import _lora as lora
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._layout import as_output
from opake.kernels._lora import Adapted, Options
from opake.kernels._lora_launch import ACCUMULATE
from opake.kernels._lora_products import by_rows, project, pull, read, without_autocast
from opake.kernels._op import Op, register

Layer = tuple[Any, ...]

# ---- reference


def lora_qkv_reference(x: Tensor, q: Layer, k: Layer, v: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`lora_qkv` in plain PyTorch."""
    first, second, third = (lora.project(x, layer) for layer in _layers(q, k, v))
    return first, second, third


def _layers(q: Layer, k: Layer, v: Layer) -> list[Adapted]:
    return [lora.layer(name, given) for name, given in (("q", q), ("k", k), ("v", v))]


def _reference(options: Options, *tensors: Any) -> tuple[Tensor, ...]:
    x, layers = lora.unflat(options, tensors)
    return tuple([lora.project(x, layer) for layer in layers])


# ---- both passes


@without_autocast
def _fwd(batch: int, options: Options, *tensors: Any) -> tuple[Tensor, ...]:
    x, layers = lora.unflat(options, tensors)
    found, left = project(batch, by_rows(x, batch), layers)
    return tuple([as_output(y, (*x.shape[:-1], y.shape[-1])) for y in (*found, left)])


@without_autocast
def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    x, layers = lora.unflat(options, tensors)
    want_x, wants = lora.wants_of(options, wanted)
    grads = [None if g is None else by_rows(g, batch) for g in grads]
    rows, left = read(batch, options, wanted, x, saved[0])
    dx, others = pull(batch, want_x, wants, grads, rows, layers, left)
    return (None if dx is None else dx.view(x.shape), *others)


_function = fused_function(
    "lora_qkv", _reference, _fwd, _bwd, outputs=3, saved=1, rows=(0,), keeps=lora.keeps
)


def _fused(x: Tensor, q: Layer, k: Layer, v: Layer) -> Any:
    layers = _layers(q, k, v)
    scales = tuple([layer.scales for layer in layers])
    return _function(Options(scales), *lora.flat(x, layers))


# ---- public


def lora_qkv(x: Tensor, q: Layer, k: Layer, v: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`lora_linear` of one input for query, key and value.

    The input is read once for all adapters, and its gradient is added up in place.

    Args:
        x: (..., in).
        q: a tuple (weight, A, B, scale, bias), as :func:`lora_linear` takes them; the bias may be
            None or left out.
        k: likewise; ``out`` may be another.
        v: likewise.

    Returns:
        Query, key and value, (..., out) each, in the dtype of ``x``, or of autocast.

    Raises:
        InvalidArgument: shapes that do not fit, or sequences of several lengths.
        InvalidType: no such tuple; a scale is no number, something else no tensor, or tensors are
            of several dtypes.
    """
    layers = _layers(q, k, v)
    lora.check(x, list(zip(("q's ", "k's ", "v's "), layers, strict=True)))
    result: tuple[Tensor, Tensor, Tensor] = LORA_QKV(x, *layers)
    return result


# ---- registration


def _fits(x: Tensor, q: Layer, k: Layer, v: Layer) -> str:
    layers = _layers(q, k, v)
    return lora.fits(x, layers) if any(y.A for y in layers) else "there is no adapter"


def _examples(draw: Draw) -> Call:
    *outer, inner = draw.shape(min_dims=1, max_dims=3, max_elements=256)
    base = draw.dtype()
    small = draw.dtype() if draw.integer(0, 1) else base
    x = draw.tensor([*outer, inner], base, (1.0, 8.0, 0.1))
    query, key = (draw.choice((3, 8, 1, 17, 0)) for _ in "qk")
    sizes = (query, key, key)
    return Call((x, *(lora.draw_adapted(draw, inner, n, base, small) for n in sizes)))


def _shape(tokens: int, inner: int, query: int, key: int, rank: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x = torch.randn(4, tokens // 4, inner, device=device, dtype=dtype)
        sizes = (query, key, key)
        return Call((x, *(lora.random_adapted(inner, n, rank, device, dtype) for n in sizes)))

    outer = query + 2 * key
    elements = tokens * (inner + outer) + inner * outer
    flops = 2 * tokens * inner * outer  # of the base alone
    frozen = tuple((i, k) for i in (1, 2, 3) for k in (0, 4))
    label = f"{tokens}x{inner}x{query}+2x{key} r{rank}"
    return Shape(label, make, elements, elements, flops, flops, frozen)


LORA_QKV = register(
    Op(
        name="lora_qkv",
        function=lora_qkv,
        reference=lora_qkv_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        work=lora.work,
        benchmarks=(_shape(8192, 4096, 4096, 1024, 16), _shape(4096, 896, 896, 128, 16)),
        launches=(ACCUMULATE,),
    )
)
