"""Layer norm: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument
from opake.kernels._arguments import number, require_tensors
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._layer_norm import BACKWARD, FORWARD
from opake.kernels._layout import grouped
from opake.kernels._norm import SUM, plan, sum_partials
from opake.kernels._op import Op, register

# ---- reference


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """:func:`layer_norm` in plain PyTorch."""
    parts = [p for p in (weight, bias) if p is not None]
    if all(p.dim() == 1 and p.dtype == x.dtype for p in parts):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.layer_norm(x.to(wide), x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight.to(wide)
    if bias is not None:
        normed = normed + bias.to(wide)
    return normed.to(x.dtype)


# ---- launchers


def _views(batch: int, x: Tensor, heads: bool) -> Tensor:
    """(groups, rows, heads, H), with one head where the weight has none."""
    return grouped(x, batch, 2) if heads else grouped(x, batch).unsqueeze(2)


def _part(batch: int, part: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Weight or bias (groups, heads, H), with the first two strides."""
    if part is None:
        return None, 0, 0
    part = grouped(part, batch)
    return part, part.stride(0), part.stride(1)


def _fwd(
    batch: int, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return (y,)
    rows = _views(batch, x, _by_heads(batch, weight, bias))
    groups, count, heads, cols = rows.shape
    (w, *w_strides), (b, *b_strides) = _part(batch, weight), _part(batch, bias)
    how = plan(FORWARD, groups * heads, count, cols, x.device)
    integers = (count, cols, how.programs, heads, *rows.stride()[:3], *w_strides, *b_strides)
    grid = (groups * heads * how.programs, 1, 1)
    FORWARD(grid, (rows, w, b, y), integers, how.constants, how.warps, (eps,))
    return (y,)


def _by_heads(batch: int, *parts: Tensor | None) -> bool:
    return any(p is not None and p.dim() - batch == 2 for p in parts)


def _bwd(batch: int, eps: float, wanted: Any, grads: Any, tensors: Any, saved: Any) -> Gradients:
    x, weight, bias = tensors
    want_x, want_w, want_b = wanted
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_x else None
    if not x.numel():
        zeros = [
            torch.zeros_like(p) if want else None
            for p, want in zip(tensors[1:], wanted[1:], strict=True)
        ]
        return (dx, *zeros)
    by_heads = _by_heads(batch, weight, bias)
    rows, dy = _views(batch, x, by_heads), _views(batch, grads[0], by_heads)
    groups, count, heads, cols = rows.shape
    w, *w_strides = _part(batch, weight)
    how = plan(BACKWARD, groups * heads, count, cols, x.device)
    sums = want_w + want_b
    size = (sums, groups * heads, how.programs, cols)
    partial = torch.empty(size, dtype=torch.float32, device=x.device) if sums else None
    dw = partial[0] if partial is not None and want_w else None
    db = partial[-1] if partial is not None and want_b else None
    integers = (count, cols, how.programs, heads, *dy.stride()[:3], *rows.stride()[:3], *w_strides)
    grid = (groups * heads * how.programs, 1, 1)
    BACKWARD(grid, (dy, rows, w, dx, dw, db), integers, how.constants, how.warps, (eps,))
    if partial is None:
        return dx, None, None
    if weight is None or bias is None or weight.dtype == bias.dtype:
        found = _reduced(partial, (bias if weight is None else weight).dtype)
    else:
        found = _reduced(partial, torch.float32)
    dw = found[0].view(weight.shape).to(weight.dtype) if want_w else None
    db = found[-1].view(bias.shape).to(bias.dtype) if want_b else None
    return dx, dw, db


def _reduced(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """(sums, groups, H) in a dtype, from one number a program."""
    sums, groups, programs, cols = partial.shape
    if programs == 1 and dtype == torch.float32:
        return partial
    out = partial.new_empty((sums, groups, cols), dtype=dtype)
    return sum_partials(partial.flatten(0, 1), out)


# ---- autograd and functorch

_function = fused_function(
    "layer_norm", lambda eps, x, w, b: layer_norm_reference(x, w, b, eps), _fwd, _bwd, rows=(0,)
)


def _fused(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return _function(eps, x, weight, bias)


# ---- public


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba et al. 2016).

    Args:
        x: (..., H), fp32, bf16 or fp16 for the kernels; any other dtype runs the reference.
        weight: (H,), or (heads, H) for x of (..., heads, H) as in Cohere's models, or None.
        bias: as the weight.
        eps: added to the variance.

    Returns:
        (..., H) in the dtype of ``x``, computed in fp32 and rounded once.

    Raises:
        InvalidArgument: shapes do not match.
        InvalidType: what is no tensor or no number.
    """
    require_tensors(x=x)
    eps = number("eps", eps)
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None:
            require_tensors(**{name: part})
        if part is not None and not (
            part.dim() in (1, 2) and part.dim() <= x.dim() and part.shape == x.shape[-part.dim() :]
        ):
            raise InvalidArgument(
                f"x is (..., H), weight and bias (H,), or (heads, H) for x (..., heads, H); "
                f"got x {tuple(x.shape)} and {tuple(part.shape)}"
            )
    if weight is not None and bias is not None and weight.shape != bias.shape:
        shapes = tuple(weight.shape), tuple(bias.shape)
        raise InvalidArgument(f"weight and bias are of one shape; got {shapes[0]} and {shapes[1]}")
    if x.dim() == 0:
        raise InvalidArgument("x is (..., H); got a number without dimensions")
    result: Tensor = LAYER_NORM(x, weight, bias, eps)
    return result


# ---- registration


def _fits(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any) -> str:
    floats = all(t is None or t.is_floating_point() for t in (x, weight, bias))
    return "" if floats else "integers are promoted by the reference"


def _examples(draw: Draw) -> Call:
    shape = draw.shape(min_dims=1)
    x = draw.tensor(shape, draw.dtype())
    inner = shape[-2:] if len(shape) > 1 and not draw.integer(0, 3) else shape[-1:]
    weight, bias = (draw.tensor(inner, draw.dtype()) if draw.integer(0, 3) else None for _ in "wb")
    return Call((x, weight, bias, draw.choice([1e-5, 1e-6])))


def _shape(tokens: int, width: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        return Call((x, *(torch.randn(width, device=device, dtype=dtype) for _ in "wb")))

    # Forward reads one and writes one, backward reads two and writes one.
    elements = tokens * width
    return Shape(f"{tokens}x{width}", make, forward=2 * elements, backward=3 * elements)


LAYER_NORM = register(
    Op(
        name="layer_norm",
        function=layer_norm,
        reference=layer_norm_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(8192, 4096), _shape(4096, 896), _shape(1, 64)),
        launches=(FORWARD, BACKWARD, SUM),
        # benchmarks/results/kernels_h200.json: at 2**25 elements, the most that was timed, eager's
        # fused operator still ends first on an idle queue, though it keeps the GPU busy for longer.
        crossover={"sm_90": 1 << 27},
    )
)
