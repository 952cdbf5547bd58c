"""GEGLU: ``gelu(gate) * up``, with the normal distribution or Hendrycks' approximation of it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from opake.kernels import _gated as gated
from opake.kernels._elementwise import block
from opake.kernels._triton import Launch, jit, tl

# ---- reference


def geglu_exact_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` in plain PyTorch."""
    return F.gelu(gate) * up


def geglu_tanh_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same with the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


def geglu_exact_packed_reference(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of the halves, gate first, in plain PyTorch."""
    return geglu_exact_reference(*gated.halves(gate_up))


def geglu_tanh_packed_reference(gate_up: Tensor) -> Tensor:
    """The same with the tanh approximation."""
    return geglu_tanh_reference(*gated.halves(gate_up))


# ---- kernels


@jit
def _as_eager(cumulative):  # type: ignore[no-untyped-def]
    """0 where PyTorch, which subtracts from 1, has 0 in every dtype."""
    return tl.where(cumulative < 1.2e-16, 0.0, cumulative)


@jit
def _normal(x):  # type: ignore[no-untyped-def]
    """The normal distribution's cumulative and density, to 2e-7 of either, from one exponential.

    Left of 0 the cumulative is ``exp(-x²/2) t P(t)``, ``t = 1 / (1 + 0.28 |x|)``, where P is the
    polynomial of degree 8 with the least largest relative error (1.7e-7; Lawson's algorithm, in
    fp64). ``1 + erf`` would lose all digits there.
    """
    exponential = tl.exp2(x * x * -0.72134752)  # log2(e) / 2
    t = 1.0 / (1.0 + 0.28 * tl.abs(x))
    p = 0.024720714598722212 * t - 0.09359580181848742
    p = p * t + 0.09243200521267017
    p = p * t - 0.006452086248004708
    p = p * t + 0.07277620334745549
    p = p * t + 0.08363052728214053
    p = p * t + 0.10308469360824062
    p = p * t + 0.11169980140527375
    p = p * t + 0.11170385756721463
    left = _as_eager(exponential * (t * p))
    return tl.where(x > 0.0, 1.0 - left, left), exponential * 0.3989422804


@jit
def _hendrycks(x):  # type: ignore[no-untyped-def]
    """``(1 + tanh(y)) / 2 = sigmoid(2y)`` and its derivative, ``y = sqrt(2/pi) (x + 0.044715 x³)``.

    tanh would lose all digits left of 0.
    """
    square = x * x
    cumulative = _as_eager(tl.sigmoid(x * (1.5957691216 + 0.0713548163 * square)))
    slope = 1.5957691216 + 0.2140644488 * square
    return cumulative, cumulative * (1.0 - cumulative) * slope


@jit
def _geglu_exact_fwd_kernel(  # type: ignore[no-untyped-def]
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
    cumulative, _ = _normal(gate)
    out = gate * cumulative * up
    tl.store(out_ptr + row * out_stride + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _geglu_tanh_fwd_kernel(  # type: ignore[no-untyped-def]
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
    cumulative, _ = _hendrycks(gate)
    out = gate * cumulative * up
    tl.store(out_ptr + row * out_stride + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _store_gradients(  # type: ignore[no-untyped-def]
    grad, gate, cumulative, density, up_ptrs, dgate_ptr, dup_ptr, dgate_at, dup_at, mask
):
    """Write the gradients of ``gate * cumulative * up``, whose derivative is ``density``."""
    if dgate_ptr is not None:
        up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
        dgate = grad * up * (cumulative + gate * density)
        tl.store(dgate_ptr + dgate_at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if dup_ptr is not None:
        dup = grad * gate * cumulative
        tl.store(dup_ptr + dup_at, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@jit
def _geglu_exact_bwd_kernel(  # type: ignore[no-untyped-def]
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
    cumulative, density = _normal(gate)
    up_ptrs, dgate_at, dup_at = (
        up_ptr + row * up_stride + col,
        row * dgate_stride + col,
        row * dup_stride + col,
    )
    _store_gradients(
        grad, gate, cumulative, density, up_ptrs, dgate_ptr, dup_ptr, dgate_at, dup_at, mask
    )


@jit
def _geglu_tanh_bwd_kernel(  # type: ignore[no-untyped-def]
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
    cumulative, density = _hendrycks(gate)
    up_ptrs, dgate_at, dup_at = (
        up_ptr + row * up_stride + col,
        row * dgate_stride + col,
        row * dup_stride + col,
    )
    _store_gradients(
        grad, gate, cumulative, density, up_ptrs, dgate_ptr, dup_ptr, dgate_at, dup_at, mask
    )


# ---- launchers

EXACT = (
    Launch(_geglu_exact_fwd_kernel, gated.TILES, gated.SWEEP),
    Launch(_geglu_exact_bwd_kernel, gated.TILES, gated.SWEEP),
)
TANH = (
    Launch(_geglu_tanh_fwd_kernel, gated.TILES, gated.SWEEP),
    Launch(_geglu_tanh_bwd_kernel, gated.TILES, gated.SWEEP),
)

# ---- public


def geglu_exact(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``gate * Φ(gate) * up``, Φ the normal distribution (Shazeer 2020).

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
    result: Tensor = GEGLU_EXACT(gate, up)
    return result


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`geglu_exact` with Hendrycks' approximation of Φ (2016, "GELUs").

    It is ``(1 + tanh(sqrt(2/pi) (gate + 0.044715 gate³))) / 2``, Hugging Face's
    ``"gelu_pytorch_tanh"``.

    Args:
        gate: (..., I), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        up: (..., I); shapes that differ broadcast as in the reference.

    Returns:
        (..., I) in the dtype that torch promotes the two to.

    Raises:
        InvalidArgument: the shapes do not broadcast.
    """
    gated.check(gate, up)
    result: Tensor = GEGLU_TANH(gate, up)
    return result


def geglu_exact_packed(gate_up: Tensor) -> Tensor:
    """Compute :func:`geglu_exact` of two halves without copying them.

    Args:
        gate_up: (..., 2I), gate first.

    Returns:
        (..., I) in the same dtype. The gradient of both halves is one tensor, written once.

    Raises:
        InvalidArgument: the last dimension is odd, or there is none.
    """
    gated.halves(gate_up)  # an odd width is an error, on whichever path
    result: Tensor = GEGLU_EXACT_PACKED(gate_up)
    return result


def geglu_tanh_packed(gate_up: Tensor) -> Tensor:
    """Compute :func:`geglu_tanh` of two halves without copying them.

    Args:
        gate_up: (..., 2I), gate first.

    Returns:
        (..., I) in the same dtype. The gradient of both halves is one tensor, written once.

    Raises:
        InvalidArgument: the last dimension is odd, or there is none.
    """
    gated.halves(gate_up)  # an odd width is an error, on whichever path
    result: Tensor = GEGLU_TANH_PACKED(gate_up)
    return result


# ---- registration


# Host times in benchmarks/results/kernels_h200.json: of the two sizes that were timed, the smaller
# is a draw, and at the larger one eager keeps the GPU busy for longer. Packed, both are faster.
SPLIT, PACKED = {"sm_90": 117_440_512}, {"sm_90": 79_691_776}
GEGLU_EXACT = gated.register_split(geglu_exact, geglu_exact_reference, EXACT, SPLIT)
GEGLU_TANH = gated.register_split(geglu_tanh, geglu_tanh_reference, TANH, SPLIT)
GEGLU_EXACT_PACKED = gated.register_packed(
    geglu_exact_packed, geglu_exact_packed_reference, EXACT, PACKED
)
GEGLU_TANH_PACKED = gated.register_packed(
    geglu_tanh_packed, geglu_tanh_packed_reference, TANH, PACKED
)
