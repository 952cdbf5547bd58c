"""A gated MLP whose three linear layers have low-rank adapters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument
from opake.kernels import _lora as lora
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._layout import as_output
from opake.kernels._lora import Adapted, Options
from opake.kernels._lora_launch import (
    ACCUMULATE,
    GATED_BACKWARD,
    GATED_FORWARD,
    LONGEST,
    LowRank,
    gated,
    pull_gated,
    short,
)
from opake.kernels._lora_products import (
    add_low_rank,
    ahead,
    by_rows,
    of_lower,
    product,
    project,
    pull,
    raised,
    stacked,
    unadapted,
    upper,
    without_autocast,
)
from opake.kernels._moe_activations import ACTIVATIONS
from opake.kernels._op import Op, register

Layer = tuple[Any, ...]

NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
"""Activations by Hugging Face's names: SiLU, GELU, and Hendrycks' approximation of it."""

# ---- reference


def lora_mlp_reference(
    x: Tensor, gate: Layer, up: Layer, down: Layer, *, activation: str = "silu"
) -> Tensor:
    """:func:`lora_mlp` in plain PyTorch."""
    return _mlp(_activation(activation), x, _layers(gate, up, down))


def _layers(gate: Layer, up: Layer, down: Layer) -> list[Adapted]:
    return [lora.layer(name, y) for name, y in (("gate", gate), ("up", up), ("down", down))]


def _activation(name: str) -> str:
    if not isinstance(name, str) or name not in NAMES:
        raise InvalidArgument(f"activation is one of {', '.join(NAMES)}; got {name!r}")
    return NAMES[name]


def _mlp(activation: str, x: Tensor, layers: list[Adapted]) -> Tensor:
    gate, up, down = layers
    hidden = ACTIVATIONS[activation](lora.project(x, gate)) * lora.project(x, up)
    return lora.project(hidden, down)


def _reference(options: Options, *tensors: Any) -> Tensor:
    return _mlp(options.activation, *lora.unflat(options, tensors))


# ---- both passes


def _within(layers: list[Adapted]) -> bool:
    """Whether the kernels add the adapters of gate and up, each time anew."""
    longest = max(last - first for first, last in lora.dims_of(layers))
    return longest <= LONGEST and all(len(lora.runs(layer)) < 2 for layer in layers)


def _added(
    batch: int, layers: list[Adapted], left: Tensor
) -> tuple[LowRank | None, LowRank | None]:
    """What is to be added to gate and up."""
    if not _within(layers):
        return None, None
    gate, up = (
        LowRank(left[..., first:last], upper(batch, layer), lora.runs(layer)[0][0])
        if last > first
        else None
        for layer, (first, last) in zip(layers, lora.dims_of(layers), strict=True)
    )
    return gate, up


@without_autocast
def _fwd(batch: int, options: Options, *tensors: Any) -> tuple[Tensor, ...]:
    x, (*both, down) = lora.unflat(options, tensors)
    rows = by_rows(x, batch)
    (gate, up), left = project(batch, rows, both, low_rank=not _within(both))
    hidden = gated(options.activation, gate, up, _added(batch, both, left))
    (out,), last = project(batch, hidden, [down])
    return tuple([as_output(y, (*x.shape[:-1], y.shape[-1])) for y in (out, gate, up, left, last)])


@without_autocast
def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    x, (*both, down) = lora.unflat(options, tensors)
    want_x, (*wants, want) = lora.wants_of(options, wanted)
    flags = _keeps(options, wanted)[-len(saved) :]
    gate, up, left, last = (by_rows(y, batch, z) for y, z in zip(saved, flags, strict=True))
    grad = by_rows(grads[0], batch)
    plus = _added(batch, both, left)
    inner = _inner(want_x, wants)
    pulled = raised(batch, [grad], [down], last) if inner or any(want.A) else None
    more, first = None, False
    if pulled is not None and pulled.shape[-1]:
        long = pulled.shape[-1] > LONGEST
        first = long and ahead(pulled, grad.dtype)
        if not long:
            more = LowRank(pulled, None if first else stacked(batch, [down]))
    # The kernel that has all of it at hand adds up A's gradient, or one pass more is needed.
    sums = inner and any(want.A) and more is not None and short((more, *plus))
    hidden = None
    if want.weight or (any(want.A) and not sums):
        hidden = gated(options.activation, gate, up, plus)
    rest = want._replace(A=(False,) * len(want.A)) if sums else want
    _, of_down = pull(batch, False, [rest], [grad], hidden, [down], last, pulled)
    if not inner:
        return (None, *(None for layer in both for _ in range(2 + 2 * len(layer.A))), *of_down)
    # Over what was hidden, of which nobody needs more: three such tensors are half of all memory.
    if pulled is not None and first:
        dhidden = product(pulled, stacked(batch, [down]), out=hidden)
        unadapted(batch, [grad], [down], dhidden, add=True)
    else:
        dhidden = unadapted(batch, [grad], [down], hidden)
        if pulled is not None and pulled.shape[-1] and more is None:
            add_low_rank(dhidden, pulled, stacked(batch, [down]))
    dgate, dup, da = pull_gated(options.activation, dhidden, gate, up, (more, *plus), sums)
    if sums:
        of_down[2 : 2 + len(want.A)] = of_lower(down, want, da)
    dx, others = pull(batch, want_x, wants, (dgate, dup), by_rows(x, batch), both, left)
    return (None if dx is None else dx.view(x.shape), *others, *of_down)


def _inner(want_x: bool, wants: list[Adapted]) -> bool:
    """Whether a gradient is wanted that comes through what was hidden."""
    return want_x or any(y for this in wants for y in (*this[:2], *this.A, *this.B))


@functools.lru_cache(1024)
def _keeps(options: Options, wanted: tuple[bool, ...]) -> list[bool]:
    want_x, (*wants, want) = lora.wants_of(options, wanted)
    hidden = _inner(want_x, wants) or want.weight or any(want.A)
    return [*(True for _ in wanted), hidden, hidden, hidden, any(want.B)]


_function = fused_function("lora_mlp", _reference, _fwd, _bwd, saved=4, rows=(0,), keeps=_keeps)


def _fused(x: Tensor, gate: Layer, up: Layer, down: Layer, *, activation: str = "silu") -> Any:
    layers = _layers(gate, up, down)
    scales = tuple([layer.scales for layer in layers])
    return _function(Options(scales, _activation(activation)), *lora.flat(x, layers))


# ---- public


def lora_mlp(x: Tensor, gate: Layer, up: Layer, down: Layer, *, activation: str = "silu") -> Tensor:
    """Compute ``down(activation(gate(x)) * up(x))`` of layers with adapters.

    What comes before the last layer is not kept, but computed again; see :func:`lora_linear` for
    the layers, and :func:`swiglu` for what is between them.

    Args:
        x: (..., H).
        gate: a tuple (weight, A, B, scale, bias), as :func:`lora_linear` takes them, with a weight
            (I, H); the bias may be None or left out.
        up: likewise, with a weight of the same shape.
        down: likewise, with a weight (out, I).
        activation: by Hugging Face's names: ``"silu"`` or ``"swish"``; ``"gelu"``;
            ``"gelu_pytorch_tanh"``, ``"gelu_new"`` and other names of the same.

    Returns:
        (..., out) in the dtype of ``x``, or of autocast. Between the layers, the kernels compute in
        fp32 and round once.

    Raises:
        InvalidArgument: shapes that do not fit, sequences of several lengths, or another
            activation.
        InvalidType: no such tuple; a scale is no number, something else no tensor, or tensors are
            of several dtypes.
    """
    _activation(activation)
    layers = _layers(gate, up, down)
    lora.check(x, list(zip(("gate's ", "up's "), layers[:2], strict=True)))
    if not any(layer.weight.is_nested for layer in layers):
        shapes = [tuple(layer.weight.shape) for layer in layers]
        if shapes[0] != shapes[1]:
            raise InvalidArgument(
                f"gate's weight and up's are of one shape; got {shapes[0]} and {shapes[1]}"
            )
        lora.check(x, [("down's ", layers[2])], shapes[0][0])
    result: Tensor = LORA_MLP(x, *layers, activation=activation)
    return result


# ---- registration


def _fits(x: Tensor, gate: Layer, up: Layer, down: Layer, *, activation: str = "silu") -> str:
    return lora.fits(x, _layers(gate, up, down))


def _examples(draw: Draw) -> Call:
    *outer, inner = draw.shape(min_dims=1, max_dims=3, max_elements=256)
    base = draw.dtype()
    small = draw.dtype() if draw.integer(0, 1) else base
    x = draw.tensor([*outer, inner], base, (1.0, 8.0, 0.1))
    hidden, out = draw.choice((3, 8, 1, 17, 70, 0)), draw.choice((3, 8, 1, 17, 0))
    sizes = ((inner, hidden), (inner, hidden), (hidden, out))
    layers = (lora.draw_adapted(draw, a, b, base, small) for a, b in sizes)
    return Call((x, *layers), {"activation": draw.choice(tuple(NAMES))})


def _shape(tokens: int, inner: int, hidden: int, rank: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x = torch.randn(4, tokens // 4, inner, device=device, dtype=dtype)
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        return Call((x, *(lora.random_adapted(a, b, rank, device, dtype) for a, b in sizes)))

    elements = tokens * (2 * inner + 3 * hidden) + 3 * inner * hidden
    flops = 6 * tokens * inner * hidden  # of the base alone
    frozen = tuple((i, k) for i in (1, 2, 3) for k in (0, 4))
    label = f"{tokens}x{inner}x{hidden} r{rank}"
    return Shape(label, make, elements, elements, flops, flops, frozen)


LORA_MLP = register(
    Op(
        name="lora_mlp",
        function=lora_mlp,
        reference=lora_mlp_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        work=lora.work,
        benchmarks=(_shape(8192, 4096, 14336, 16), _shape(4096, 896, 4864, 16)),
        launches=(ACCUMULATE, GATED_FORWARD, GATED_BACKWARD),
    )
)
