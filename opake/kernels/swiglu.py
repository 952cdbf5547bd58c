"""SwiGLU: ``silu(gate) * up``, from two tensors or from one that holds both halves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument
from opake.kernels._autograd import Gradients, elementwise_function
from opake.kernels._elementwise import block, elementwise
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._op import Op, register
from opake.kernels._triton import Launch, Tile, jit, tl

# ---- reference


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in plain PyTorch."""
    return F.silu(gate) * up


def swiglu_packed_reference(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves, gate first, in plain PyTorch."""
    gate, up = _halves(gate_up)
    return F.silu(gate) * up


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        shape = tuple(gate_up.shape)
        raise InvalidArgument(
            f"gate_up holds gate and up side by side in its last dimension, which must be even; "
            f"got the shape {shape}"
        )
    gate, up = gate_up.tensor_split(2, -1)
    return gate, up


# ---- kernels


@jit
def _swiglu_fwd_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    cols,
    gate_stride,
    up_stride,
    out_stride,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    row, col, mask = block(rows, cols, block_rows, block_cols)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _swiglu_bwd_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    rows,
    cols,
    grad_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    row, col, mask = block(rows, cols, block_rows, block_cols)
    grad = tl.load(grad_ptr + row * grad_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
        dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dgate = dgate.to(dgate_ptr.dtype.element_ty)
        tl.store(dgate_ptr + row * dgate_stride + col, dgate, mask=mask)
    if dup_ptr is not None:
        dup = (grad * gate * sigmoid).to(dup_ptr.dtype.element_ty)
        tl.store(dup_ptr + row * dup_stride + col, dup, mask=mask)


# ---- launchers

_SWEEP = [Tile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (4, 8)]
# With 32-lane warps, one 16-byte load of bf16 for every thread and tensor.
FORWARD = Launch(_swiglu_fwd_kernel, {"": Tile(1024, 4)}, _SWEEP)
BACKWARD = Launch(_swiglu_bwd_kernel, {"": Tile(1024, 4)}, _SWEEP)


def _fwd(gate: Tensor, up: Tensor) -> Tensor:
    dtype = gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)
    (out,) = elementwise(FORWARD, (gate, up), (dtype,))
    assert out is not None
    return out


def _bwd(grad: Tensor, gate: Tensor, up: Tensor, want_gate: bool, want_up: bool) -> Gradients:
    dtypes = (gate.dtype if want_gate else None, up.dtype if want_up else None)
    return tuple(elementwise(BACKWARD, (grad, gate, up), dtypes))


def _packed_fwd(gate_up: Tensor) -> Tensor:
    return _fwd(*_halves(gate_up))


def _packed_bwd(grad: Tensor, gate_up: Tensor, wanted: bool) -> Gradients:
    if not wanted:
        return (None,)
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    elementwise(BACKWARD, (grad, *_halves(gate_up)), _halves(dgate_up))
    return (dgate_up,)


# ---- autograd and functorch

_fused = elementwise_function("swiglu", swiglu_reference, _fwd, _bwd)
_packed_fused = elementwise_function(
    "swiglu_packed", swiglu_packed_reference, _packed_fwd, _packed_bwd
)

# ---- public


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer").

    Args:
        gate: (..., I), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        up: (..., I); shapes that differ broadcast as in the reference.

    Returns:
        (..., I) in the dtype that torch promotes the two to. The kernels compute in fp32 and round
        once. Under ``torch.compile`` the reference is traced, for the compiler to fuse.
    """
    result: Tensor = SWIGLU(gate, up)
    return result


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of two halves without copying them; see :func:`swiglu`.

    Args:
        gate_up: (..., 2I), gate first.

    Returns:
        (..., I) in the same dtype. The gradient of both halves is one tensor, written once.

    Raises:
        InvalidArgument: the last dimension is odd, or there is none.
    """
    result: Tensor = SWIGLU_PACKED(gate_up)
    return result


# ---- registration


def _fits(gate: Any, up: Any) -> str:
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
    _halves(gate_up)  # an odd width is an error, on whichever path
    return "" if gate_up.is_floating_point() else "integers are promoted by the reference"


def _examples(draw: Draw) -> Call:
    shape = draw.shape()
    other = list(shape)
    if shape and not draw.integer(0, 7):
        other[draw.integer(0, len(shape) - 1)] = 1
    return Call((draw.tensor(shape, draw.dtype()), draw.tensor(other, draw.dtype())))


def _packed_examples(draw: Draw) -> Call:
    *outer, inner = draw.shape(min_dims=1)
    return Call((draw.tensor([*outer, 2 * inner], draw.dtype()),))


def _shape(tokens: int, width: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        return Call(tuple(torch.randn(tokens, width, device=device, dtype=dtype) for _ in "gu"))

    # Forward reads two and writes one, backward reads three and writes two.
    elements = tokens * width
    return Shape(f"{tokens}x{width}", make, forward=3 * elements, backward=5 * elements)


def _packed_shape(tokens: int, width: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        return Call((torch.randn(tokens, 2 * width, device=device, dtype=dtype),))

    elements = tokens * width
    return Shape(f"{tokens}x2x{width}", make, forward=3 * elements, backward=5 * elements)


# pays_from in benchmarks/results/kernels_h200.json. Below, the host of an H200 is what takes time,
# and an autograd function written in Python takes about 0.1 ms more of it than eager's operators.
SWIGLU = register(
    Op(
        name="swiglu",
        function=swiglu,
        reference=swiglu_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(8192, 14336), _shape(8192, 4864), _shape(1, 64)),
        launches=(FORWARD, BACKWARD),
        # On an idle queue, benchmarks/results/kernels_h200.json: there both take 0.43 ms, of which
        # eager keeps the GPU busy for all and ours for half; below, our Python shows.
        crossover={"sm_90": 58_720_256},
    )
)
SWIGLU_PACKED = register(
    Op(
        name="swiglu_packed",
        function=swiglu_packed,
        reference=swiglu_packed_reference,
        fused=_packed_fused,
        fits=_packed_fits,
        examples=_packed_examples,
        benchmarks=(_packed_shape(8192, 14336), _packed_shape(8192, 4864)),
        launches=(FORWARD, BACKWARD),
        crossover={"sm_90": 117_440_512},  # the same file: 0.57 ms, eager 1.38
    )
)
