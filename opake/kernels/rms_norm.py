"""Root-mean-square norm: ``x / sqrt(mean(x**2) + eps) * (weight + offset)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opake.errors import InvalidArgument
from opake.kernels._arguments import number, require_tensors
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._norm import SUM
from opake.kernels._op import Op, register
from opake.kernels._rms_norm import BACKWARD, FORWARD, Options, launch_backward, launch_forward

# ---- reference


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """:func:`rms_norm` in plain PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "gemma":
        return (normed if weight is None else normed * (weight.to(wide) + offset)).to(x.dtype)
    normed = normed.to(x.dtype)
    if weight is None:
        return normed
    return (weight + offset if offset else weight) * normed


# ---- launchers


def _fwd(batch: int, options: Options, x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
    return (launch_forward(batch, options, x, None, weight)[0],)


def _bwd(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    return launch_backward(batch, options, wanted, grads[0], None, *tensors)


# ---- autograd and functorch


def _plain(options: Options, x: Tensor, weight: Tensor | None) -> Tensor:
    mode = "gemma" if options.gemma else "llama"
    return rms_norm_reference(x, weight, options.eps, offset=options.offset, casting_mode=mode)


_function = fused_function("rms_norm", _plain, _fwd, _bwd, rows=(0,))


def _fused(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Any:
    return _function(Options(eps, offset, casting_mode == "gemma"), x, weight)


# ---- public


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """Compute ``x / sqrt(mean(x**2) + eps) * (weight + offset)`` (Zhang and Sennrich 2019).

    Args:
        x: (..., H), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        weight: (H,), or None for none.
        eps: added to the mean square, so that rows of zeros have a norm.
        offset: added to the weight, 1.0 in Gemma.
        casting_mode: ``"llama"`` norms in fp32, rounds to the dtype of ``x``, then multiplies in
            the dtype that torch promotes to; ``"gemma"`` does all in fp32 and rounds last.

    Returns:
        (..., H); in llama's order in the promoted dtype of both, else in that of ``x``.

    Raises:
        InvalidArgument: shapes do not match, or ``casting_mode`` is neither of the two.
        InvalidType: what is no tensor or no number.
    """
    eps, offset = number("eps", eps), number("offset", offset)
    check_norm(x, weight, casting_mode)
    result: Tensor = RMS_NORM(x, weight, eps, offset=offset, casting_mode=casting_mode)
    return result


def check_norm(x: Tensor, weight: Tensor | None, casting_mode: str) -> None:
    """Refuse arguments of an RMS norm that make no sense."""
    require_tensors(x=x)
    if weight is not None:
        require_tensors(weight=weight)
    if casting_mode not in ("llama", "gemma"):
        raise InvalidArgument(f'casting_mode is "llama" or "gemma"; got {casting_mode!r}')
    if x.dim() == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        shape = None if weight is None else tuple(weight.shape)
        raise InvalidArgument(
            f"x is (..., H) and weight (H,) or None; got the shapes {tuple(x.shape)} and {shape}"
        )


# ---- registration


def _fits(x: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> str:
    floats = x.is_floating_point() and (weight is None or weight.is_floating_point())
    return "" if floats else "integers are promoted by the reference"


def _examples(draw: Draw) -> Call:
    *outer, width = draw.shape(min_dims=1)
    x = draw.tensor([*outer, width], draw.dtype())
    weight = draw.tensor([width], draw.dtype()) if draw.integer(0, 5) else None
    options = {
        "offset": draw.choice([0.0, 1.0]),
        "casting_mode": draw.choice(["llama", "gemma"]),
    }
    return Call((x, weight, draw.choice([1e-6, 1e-5])), options)


def _shape(tokens: int, width: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        return Call((x, torch.randn(width, device=device, dtype=dtype)))

    # Forward reads one and writes one, backward reads two and writes one.
    elements = tokens * width
    return Shape(f"{tokens}x{width}", make, forward=2 * elements, backward=3 * elements)


RMS_NORM = register(
    Op(
        name="rms_norm",
        function=rms_norm,
        reference=rms_norm_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(8192, 4096), _shape(8192, 8192), _shape(4096, 896), _shape(1, 64)),
        launches=(FORWARD, BACKWARD, SUM),
        crossover={"sm_90": 0},  # of one row too, benchmarks/results/kernels_h200.json
    )
)
