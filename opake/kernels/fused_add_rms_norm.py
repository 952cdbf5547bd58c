"""Residual addition and root-mean-square norm in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument
from opake.kernels._arguments import number, require_tensors
from opake.kernels._autograd import Core, Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._norm import SUM
from opake.kernels._op import Op, register
from opake.kernels._rms_norm import BACKWARD, FORWARD, Options, launch_backward, launch_forward
from opake.kernels.rms_norm import check_norm, rms_norm_reference

# ---- reference


def fused_add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """:func:`fused_add_rms_norm` in plain PyTorch."""
    total = x + residual
    return (
        rms_norm_reference(total, weight, eps, offset=offset, casting_mode=casting_mode),
        total,
    )


# ---- launchers


def _fwd(
    batch: int, options: Options, x: Tensor, residual: Tensor, weight: Tensor | None
) -> tuple[Any, ...]:
    return launch_forward(batch, options, x, residual, weight)


def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    (dnormed, dtotal), (total, weight) = grads, tensors
    if dnormed is None:
        zeros = torch.zeros_like(weight) if wanted[1] else None
        # A copy, as autograd takes what it is given itself for nobody's result.
        return dtotal.clone() if wanted[0] else None, zeros
    return launch_backward(batch, options, wanted, dnormed, dtotal, total, weight)


# ---- autograd and functorch


def _mode(options: Options) -> dict[str, Any]:
    return {"offset": options.offset, "casting_mode": "gemma" if options.gemma else "llama"}


def _plain(options: Options, x: Tensor, residual: Tensor, weight: Tensor | None) -> Any:
    return fused_add_rms_norm_reference(x, residual, weight, options.eps, **_mode(options))


def _of_total(options: Options, total: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return rms_norm_reference(total, weight, options.eps, **_mode(options)), total.clone()


def _gradients(wanted: Any, found: Gradients, dtypes: Any) -> Gradients:
    total, weight = found
    x, residual = (
        total.to(dtype) if want and total is not None else None
        for want, dtype in zip(wanted[:2], dtypes, strict=False)
    )
    return x, residual, weight


_function = fused_function(
    "fused_add_rms_norm",
    _plain,
    _fwd,
    _bwd,
    outputs=2,
    rows=(0, 1),
    # Both inputs have the sum's gradient, and neither is kept for it.
    core=Core(
        tensors=lambda inputs, outputs: (outputs[1], inputs[2]),
        reference=_of_total,
        wanted=lambda wanted: (wanted[0] or wanted[1], wanted[2]),
        gradients=_gradients,
    ),
)


def _fused(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Any:
    return _function(Options(eps, offset, casting_mode == "gemma"), x, residual, weight)


# ---- public


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Compute ``(rms_norm(x + residual), x + residual)``; see :func:`opake.kernels.rms_norm`.

    Args:
        x: (..., H), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        residual: of the same shape; its dtype may differ.
        weight: (H,), or None for none.
        eps: added to the mean square.
        offset: added to the weight, 1.0 in Gemma.
        casting_mode: ``"llama"`` or ``"gemma"``, as in :func:`~opake.kernels.rms_norm`.

    Returns:
        The norm and the sum, both (..., H); the sum in the dtype that torch promotes the two to,
        and normed as rounded to it. Either may be used alone.

    Raises:
        InvalidArgument: shapes do not match, or ``casting_mode`` is neither of the two.
        InvalidType: what is no tensor or no number.
    """
    require_tensors(x=x, residual=residual)
    eps, offset = number("eps", eps), number("offset", offset)
    if x.shape != residual.shape:
        raise InvalidArgument(
            f"x and residual are of one shape; got {tuple(x.shape)} and {tuple(residual.shape)}"
        )
    check_norm(x, weight, casting_mode)
    result: tuple[Tensor, Tensor] = FUSED_ADD_RMS_NORM(
        x, residual, weight, eps, offset=offset, casting_mode=casting_mode
    )
    return result


# ---- registration


def _fits(x: Tensor, residual: Tensor, weight: Tensor | None, *args: Any, **kwargs: Any) -> str:
    floats = all(t is None or t.is_floating_point() for t in (x, residual, weight))
    return "" if floats else "integers are promoted by the reference"


def _examples(draw: Draw) -> Call:
    *outer, width = draw.shape(min_dims=1)
    x, residual = (draw.tensor([*outer, width], draw.dtype()) for _ in "xr")
    weight = draw.tensor([width], draw.dtype()) if draw.integer(0, 5) else None
    options = {
        "offset": draw.choice([0.0, 1.0]),
        "casting_mode": draw.choice(["llama", "gemma"]),
    }
    return Call((x, residual, weight, draw.choice([1e-6, 1e-5])), options)


def _shape(tokens: int, width: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x, residual = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in "xr")
        return Call((x, residual, torch.randn(width, device=device, dtype=dtype)))

    # Forward reads two and writes two, backward reads three and writes one.
    elements = tokens * width
    return Shape(f"{tokens}x{width}", make, forward=4 * elements, backward=4 * elements)


FUSED_ADD_RMS_NORM = register(
    Op(
        name="fused_add_rms_norm",
        function=fused_add_rms_norm,
        reference=fused_add_rms_norm_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(8192, 4096), _shape(8192, 8192), _shape(4096, 896), _shape(1, 64)),
        launches=(FORWARD, BACKWARD, SUM),
        crossover={"sm_90": 0},  # of one row too, benchmarks/results/kernels_h200.json
    )
)
