"""What gated activations, ``activation(gate) * up``, share apart from the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument
from opake.kernels._arguments import number, require_tensors
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._elementwise import elementwise
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._op import Op, register
from opake.kernels._triton import Launch, Tile

__all__ = ["SWEEP", "TILES", "check", "halves", "register_packed", "register_split"]

SWEEP = [Tile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (4, 8)]
TILES = {"": Tile(1024, 4)}
"""With 32-lane warps, one 16-byte load of bf16 for every thread and tensor."""


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up, views of the halves of the last dimension.

    Raises:
        InvalidArgument: the last dimension is odd, or there is none.
        InvalidType: it is no tensor.
    """
    require_tensors(gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        found = tuple(gate_up.shape)
        raise InvalidArgument(
            f"gate_up holds gate and up side by side in its last dimension, which must be even; "
            f"got the shape {found}"
        )
    gate, up = gate_up.tensor_split(2, -1)
    return gate, up


def check(gate: Any, up: Any) -> None:
    """Refuse tensors that do not broadcast, and what is neither tensor nor number."""
    for name, x in (("gate", gate), ("up", up)):
        if not isinstance(x, Tensor):
            number(name, x)
    both = [x for x in (gate, up) if isinstance(x, Tensor) and not x.is_nested]
    if len(both) == 2:  # nested tensors have no shape to look at
        pairs = zip(reversed(gate.shape), reversed(up.shape), strict=False)
        if any(a != b and a != 1 and b != 1 for a, b in pairs):
            raise InvalidArgument(
                f"gate and up are of one shape, or broadcast; got the shapes {tuple(gate.shape)} "
                f"and {tuple(up.shape)}"
            )


# ---- autograd and functorch


def _split_function(
    name: str, reference: Callable[..., Tensor], forward: Launch, backward: Launch
) -> Callable[..., Any]:
    """Return the differentiable function of gate and up."""

    def fwd(batch: int, options: None, gate: Tensor, up: Tensor) -> tuple[Any, ...]:
        return _forward(forward, gate, up)

    def bwd(
        batch: int, options: None, wanted: Any, grads: Any, tensors: Any, saved: Any
    ) -> Gradients:
        dtypes = [x.dtype if want else None for x, want in zip(tensors, wanted, strict=True)]
        return tuple(elementwise(backward, (*grads, *tensors), dtypes))

    function = fused_function(name, lambda _, *both: reference(*both), fwd, bwd, rows=(0, 1))
    return lambda gate, up: function(None, gate, up)


def _packed_function(
    name: str, reference: Callable[..., Tensor], forward: Launch, backward: Launch
) -> Callable[..., Any]:
    """Return the differentiable function of one tensor that holds both, gate first."""

    def fwd(batch: int, options: None, gate_up: Tensor) -> tuple[Any, ...]:
        return _forward(forward, *halves(gate_up))

    def bwd(
        batch: int, options: None, wanted: Any, grads: Any, tensors: Any, saved: Any
    ) -> Gradients:
        if not wanted[0]:
            return (None,)
        (gate_up,) = tensors
        dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        elementwise(backward, (*grads, *halves(gate_up)), halves(dgate_up))
        return (dgate_up,)

    function = fused_function(name, lambda _, x: reference(x), fwd, bwd, rows=(0,))
    return lambda gate_up: function(None, gate_up)


def _forward(launch: Launch, gate: Tensor, up: Tensor) -> tuple[Any, ...]:
    dtype = gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)
    return tuple(elementwise(launch, (gate, up), (dtype,)))


# ---- registration


def _fits(gate: Any, up: Any) -> str:
    """Name what the kernels cannot compute, ``""`` if nothing."""
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor)):
        return "numbers are promoted by the reference"
    if gate.shape != up.shape:
        return "gate and up broadcast"
    if not (gate.is_floating_point() and up.is_floating_point()):
        return "integers are promoted by the reference"
    if gate.dim() == 0 and gate.dtype != up.dtype:
        return "numbers without dimensions are promoted by the reference"
    return ""


def _packed_fits(gate_up: Tensor) -> str:
    """Name what the kernels cannot compute, ``""`` if nothing."""
    return "" if gate_up.is_floating_point() else "integers are promoted by the reference"


def _examples(draw: Draw) -> Call:
    """Draw gate and up, some of which broadcast."""
    sizes = draw.shape()
    other = list(sizes)
    if sizes and not draw.integer(0, 7):
        other[draw.integer(0, len(sizes) - 1)] = 1
    return Call((draw.tensor(sizes, draw.dtype()), draw.tensor(other, draw.dtype())))


def _packed_examples(draw: Draw) -> Call:
    """Draw a tensor of both."""
    *outer, inner = draw.shape(min_dims=1)
    return Call((draw.tensor([*outer, 2 * inner], draw.dtype()),))


def _shape(tokens: int, width: int) -> Shape:
    """A benchmark of two tensors."""

    def make(device: str, dtype: torch.dtype) -> Call:
        return Call(tuple(torch.randn(tokens, width, device=device, dtype=dtype) for _ in "gu"))

    # Forward reads two and writes one, backward reads three and writes two.
    elements = tokens * width
    return Shape(f"{tokens}x{width}", make, forward=3 * elements, backward=5 * elements)


def _packed_shape(tokens: int, width: int) -> Shape:
    """A benchmark of one tensor."""

    def make(device: str, dtype: torch.dtype) -> Call:
        return Call((torch.randn(tokens, 2 * width, device=device, dtype=dtype),))

    elements = tokens * width
    return Shape(f"{tokens}x2x{width}", make, forward=3 * elements, backward=5 * elements)


def register_split(
    function: Any, reference: Any, launches: tuple[Launch, Launch], crossover: dict[str, int]
) -> Op:
    """Register an activation of two tensors."""
    name = function.__name__
    return register(
        Op(
            name=name,
            function=function,
            reference=reference,
            fused=_split_function(name, reference, *launches),
            fits=_fits,
            examples=_examples,
            benchmarks=(_shape(8192, 14336), _shape(8192, 4864), _shape(1, 64)),
            launches=launches,
            crossover=crossover,
        )
    )


def register_packed(
    function: Any, reference: Any, launches: tuple[Launch, Launch], crossover: dict[str, int]
) -> Op:
    """Register an activation of one tensor that holds both."""
    name = function.__name__
    return register(
        Op(
            name=name,
            function=function,
            reference=reference,
            fused=_packed_function(name, reference, *launches),
            fits=_packed_fits,
            examples=_packed_examples,
            benchmarks=(_packed_shape(8192, 14336), _packed_shape(8192, 4864)),
            launches=launches,
            crossover=crossover,
        )
    )
