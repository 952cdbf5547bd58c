"""SwiGLU: ``silu(gate) * up``, from two tensors or from one that holds both halves."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from opake.kernels import _gated as gated
from opake.kernels._elementwise import block
from opake.kernels._triton import Launch, jit, tl

# ---- reference


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in plain PyTorch."""
    return F.silu(gate) * up


def swiglu_packed_reference(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves, gate first, in plain PyTorch."""
    gate, up = gated.halves(gate_up)
    return F.silu(gate) * up


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

FORWARD = Launch(_swiglu_fwd_kernel, gated.TILES, gated.SWEEP)
BACKWARD = Launch(_swiglu_bwd_kernel, gated.TILES, gated.SWEEP)

# ---- public


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` (Shazeer 2020, "GLU Variants Improve Transformer").

    Args:
        gate: (..., I), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        up: (..., I); shapes that differ broadcast as in the reference.

    Returns:
        (..., I) in the dtype that torch promotes the two to. The kernels compute in fp32 and round
        once. Under ``torch.compile`` the reference is traced, for the compiler to fuse.

    Raises:
        InvalidArgument: the shapes do not broadcast.
    """
    gated.check(gate, up)
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
    gated.halves(gate_up)  # an odd width is an error, on whichever path
    result: Tensor = SWIGLU_PACKED(gate_up)
    return result


# ---- registration


# Host times ("crossover") in benchmarks/results/kernels_h200.json. Here both take 0.43 ms, of which
# eager keeps the GPU busy for all and ours for half; below, our Python shows.
SWIGLU = gated.register_split(swiglu, swiglu_reference, (FORWARD, BACKWARD), {"sm_90": 58_720_256})
SWIGLU_PACKED = gated.register_packed(
    swiglu_packed,
    swiglu_packed_reference,
    (FORWARD, BACKWARD),
    {"sm_90": 117_440_512},  # 0.57 ms, eager 1.38
)
