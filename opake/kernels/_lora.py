"""What the operators with low-rank adapters share: their arguments, checks and references."""

# ruff: noqa: N803, N806  (A and B are PEFT's names)

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._arguments import number, require_tensors
from opake.kernels._examples import Draw
from opake.kernels._guard import FLOATS, physical

__all__ = [
    "Adapted",
    "Options",
    "adapted",
    "check",
    "dims_of",
    "draw_adapted",
    "fits",
    "flat",
    "keeps",
    "layer",
    "project",
    "random_adapted",
    "runs",
    "unflat",
    "wants_of",
    "work",
]


class Adapted(NamedTuple):
    """A linear layer with adapters: ``x W^T + bias + sum of scale (x A^T) B^T``.

    Attributes:
        weight: (out, in).
        bias: (out,), or None.
        A: (rank, in) each.
        B: (out, rank) each.
        scales: as many.
    """

    weight: Any
    bias: Any
    A: tuple[Any, ...]
    B: tuple[Any, ...]
    scales: tuple[float, ...]


class Options(NamedTuple):
    """What is no tensor: every layer's scales, and the name of the activation, if there is one."""

    scales: tuple[tuple[float, ...], ...]
    activation: str = ""


# ---- arguments


def adapted(name: str, weight: Any, A: Any, B: Any, scale: Any, bias: Any = None) -> Adapted:
    """Return a layer of the caller's arguments, of which ``name`` tells in errors.

    Raises:
        InvalidArgument: shapes that do not fit, or not as many of one thing as of another.
        InvalidType: what should be a tensor or a number is none.
    """
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        require_tensors(
            **{f"{name}weight": weight, f"{name}bias": weight if bias is None else bias}
        )
    if isinstance(A, Tensor) and isinstance(B, Tensor) and isinstance(scale, float):
        return Adapted(weight, bias, (A,), (B,), (scale,))
    several = [isinstance(x, (tuple, list)) for x in (A, B)]
    if A is None and B is None:
        A = B = scale = ()
    elif several == [False, False]:
        A, B, scale = (A,), (B,), (scale,)
    elif several != [True, True] or not isinstance(scale, (tuple, list)):
        found = ", ".join(type(x).__name__ for x in (A, B, scale))
        raise InvalidType(
            f"{name}A, {name}B and {name}scale are all of one adapter or all sequences; "
            f"found {found}"
        )
    if not len(A) == len(B) == len(scale):
        raise InvalidArgument(
            f"{name}A, {name}B and {name}scale have one element for every adapter; "
            f"got {len(A)}, {len(B)} and {len(scale)}"
        )
    for a, b in zip(A, B, strict=True):
        require_tensors(**{f"{name}A": a, f"{name}B": b})
    scales = tuple([_scale(f"{name}scale", s) for s in scale])
    return Adapted(weight, bias, tuple(A), tuple(B), scales)


def _scale(name: str, x: Any) -> Any:
    """A number, also NumPy's, which compilers that trace this see as arrays without dimensions."""
    if torch.compiler.is_compiling() and isinstance(x, np.ndarray) and not x.ndim:
        return torch.as_tensor(x)
    return number(name, x)


def layer(name: str, given: Any) -> Adapted:
    """Return a layer of a tuple (weight, A, B, scale, bias), the bias optional, or of itself.

    Raises:
        InvalidType: it is no such tuple.
    """
    if isinstance(given, Adapted):
        return given
    if not isinstance(given, (tuple, list)) or len(given) not in (4, 5):
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise InvalidType(
            f"{name} is a tuple (weight, A, B, scale, bias); found {type(given).__name__}{size}"
        )
    return adapted(f"{name}'s ", *given)


def check(x: Any, layers: Sequence[tuple[str, Adapted]], inner: int | None = None) -> None:
    """Refuse dtypes that linear layers do not multiply, and shapes that do not fit the input.

    That is (..., in) as ``x`` is, or with ``inner`` columns instead.

    Raises:
        InvalidArgument: names the shapes.
        InvalidType: x is no tensor, or names the dtypes.
    """
    require_tensors(x=x)
    cast = _autocast(x)
    for name, this in layers:
        _check_dtypes(name, x, this, cast)
        if any(t.is_nested for t in (x, this.weight, *this.A, *this.B)):
            continue  # they have no shape to look at
        weight = this.weight.shape
        if len(weight) != 2:
            raise InvalidArgument(f"{name}weight is (out, in); got the shape {tuple(weight)}")
        columns = x.shape[-1:] if inner is None else (inner,)
        if columns != weight[1:]:
            found = f"shape {tuple(x.shape)}" if inner is None else f"{inner} columns"
            raise InvalidArgument(f"{name}weight {tuple(weight)} does not fit an input of {found}")
        if this.bias is not None and this.bias.shape != weight[:1]:
            raise InvalidArgument(
                f"{name}bias is (out,) for the weight {tuple(weight)}; got {tuple(this.bias.shape)}"
            )
        for a, b in zip(this.A, this.B, strict=True):
            down, up = a.shape, b.shape
            if len(down) != 2 or down[1] != weight[1] or up != (weight[0], down[0]):
                raise InvalidArgument(
                    f"{name}A is (rank, in) and {name}B (out, rank) for the weight "
                    f"{tuple(weight)}; got {tuple(down)} and {tuple(up)}"
                )


def _check_dtypes(name: str, x: Tensor, layer: Adapted, cast: torch.dtype | None) -> None:
    """Refuse what ``project`` could not multiply: A and B may have a dtype of their own."""
    weight, bias, all_a, all_b, _ = layer
    simple = bias is None and x.dtype is weight.dtype and len(all_a) == 1
    if simple and all_a[0].dtype is all_b[0].dtype and {x.dtype, all_a[0].dtype} <= FLOATS:
        return  # most are such, and have no microseconds to wait
    base = {"x": x, f"{name}weight": weight}
    if bias is not None:
        base[f"{name}bias"] = bias
    pairs = [{f"{name}A": a, f"{name}B": b} for a, b in zip(all_a, all_b, strict=True)]
    for group in (base, *pairs):
        dtypes = {y.dtype for y in group.values()}
        if cast is not None and dtypes <= FLOATS:
            continue
        if len(dtypes) > 1 or not dtypes.pop().is_floating_point:
            found = ", ".join(f"{key} {y.dtype}" for key, y in group.items())
            raise InvalidType(f"{', '.join(group)} are of one floating dtype; found {found}")


def fits(x: Tensor, layers: Sequence[Adapted]) -> str:
    """Name what the kernels cannot compute, ``""`` if nothing."""
    base, small = {x.dtype}, set()
    for this in layers:
        base.add(this.weight.dtype)
        if this.bias is not None:
            base.add(this.bias.dtype)
        small.update([y.dtype for y in (*this.A, *this.B)])
    if not all(dtype.is_floating_point for dtype in (*base, *small)):
        return "integers are left to the reference"
    if (len(base) > 1 or len(small) > 1) and _autocast(x) is None:
        several = "input, weight and bias" if len(base) > 1 else "the adapters"
        return f"{several} are of several dtypes"
    return ""


def work(x: Tensor, *args: Any, **options: Any) -> int:
    """Count the numbers that the layers are given, of all mapped examples."""
    return max(x.numel(), physical(x).numel())


# ---- plain PyTorch


def project(x: Tensor, layer: Adapted) -> Tensor:
    """The layer in plain PyTorch, as PEFT computes it: adapters in their dtype, then the base's."""
    out: Tensor = F.linear(x, layer.weight, layer.bias)
    dtype = out.dtype
    for a, b, scale in zip(layer.A, layer.B, layer.scales, strict=True):
        out = out + F.linear(F.linear(x.to(a.dtype), a), b) * scale
    result: Tensor = out.to(dtype)
    return result


# ---- all tensors in a row, as an autograd function takes them


def flat(x: Tensor, layers: Sequence[Adapted]) -> list[Any]:
    """The input, then of each layer weight, bias, all A and all B, as autocast would have them."""
    found = [x]
    for this in layers:
        found += (this.weight, this.bias, *this.A, *this.B)
    dtype = _autocast(x)
    if dtype is not None:
        found = [y if y is None or y.dtype not in FLOATS else y.to(dtype) for y in found]
    return found


def _autocast(x: Tensor) -> torch.dtype | None:
    """What autocast casts to there, None if nothing is cast."""
    kind = x.device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def unflat(options: Options, tensors: Sequence[Any]) -> tuple[Any, list[Adapted]]:
    """What :func:`flat` put in a row: tensors, their gradients, or which of them are wanted."""
    x, layers, at = tensors[0], [], 1
    for scales in options.scales:
        n = len(scales)
        weight, bias = tensors[at : at + 2]
        a, b = (tuple(tensors[at + 2 + k : at + 2 + k + n]) for k in (0, n))
        layers.append(Adapted(weight, bias, a, b, scales))
        at += 2 + 2 * n
    return x, layers


@functools.lru_cache(1024)
def wants_of(options: Options, wanted: tuple[bool, ...]) -> tuple[bool, list[Adapted]]:
    """:func:`unflat` of what is wanted, which is the same for step after step."""
    return unflat(options, wanted)


@functools.lru_cache(1024)
def keeps(options: Options, wanted: tuple[bool, ...]) -> list[bool]:
    """Of which tensors, and of the ``x A^T``, gradients of linear layers need more than the shape.

    Those of B need A and the input when they are differentiated again.
    """
    want_x, wants = wants_of(options, wanted)
    some_b = any(want for this in wants for want in this.B)
    small = [want for this in wants for want in (this.weight, *this.A)]
    found = [some_b or any(small)]
    for this in wants:
        found += (want_x, True, *(True for _ in (*this.A, *this.B)))
    return [*found, some_b]


def dims_of(layers: Sequence[Adapted]) -> list[tuple[int, int]]:
    """Where each layer's ranks begin and end among all of them."""
    ends = [0]
    for this in layers:
        ends.append(ends[-1] + sum(b.shape[-1] for b in this.B))
    return list(pairwise(ends))


def runs(layer: Adapted) -> list[tuple[float, int, int]]:
    """The layer's scales, and from where to where its ranks have each; none twice in a row."""
    found: list[tuple[float, int, int]] = []
    last = 0
    for scale, b in zip(layer.scales, layer.B, strict=True):
        first, last = last, last + b.shape[-1]
        if found and found[-1][0] == scale:
            found[-1] = (scale, found[-1][1], last)
        elif last > first:
            found.append((scale, first, last))
    return found


# ---- examples and benchmarks


def draw_adapted(
    draw: Draw, inner: int, outer: int, base: torch.dtype, small: torch.dtype
) -> tuple[Any, ...]:
    """Draw (weight, A, B, scale, bias): frozen or not, with no adapter, one, or several."""
    wide = _scales(inner)
    weight = draw.tensor([outer, inner], base, wide)
    bias = draw.tensor([outer], base, (1.0, 0.1)) if draw.integer(0, 1) else None
    count = draw.choice((1, 1, 1, 2, 0))
    ranks = [draw.choice((2, 1, 3, 16, 17, 70, 0)) for _ in range(count)]
    a = [draw.tensor([rank, inner], small, wide) for rank in ranks]
    b = [draw.tensor([outer, rank], small, _scales(rank)) for rank in ranks]
    scales = [draw.choice((2.0, 1.0, 0.3, -1.5)) for _ in range(count)]
    if count == 1 and draw.integer(0, 3):
        return weight, a[0], b[0], scales[0], bias
    if count == 0 and draw.integer(0, 1):
        return weight, None, None, 1.0, bias
    return weight, tuple(a), tuple(b), tuple(scales), bias


def _scales(terms: int) -> tuple[float, float]:
    """Factors that keep sums of so many products about as large as their other factors."""
    return max(terms, 1) ** -0.5, 0.3 * max(terms, 1) ** -0.5


def random_adapted(
    inner: int, outer: int, rank: int, device: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    """A layer of that size, for benchmarks."""

    def normal(rows: int, cols: int) -> Tensor:
        values: Tensor = torch.randn(rows, cols, device=device, dtype=dtype)
        return values * (1.0 / math.sqrt(cols))

    return normal(outer, inner), normal(rank, inner), normal(outer, rank), 2.0, None
