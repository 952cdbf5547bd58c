"""Hypothesis strategies for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from opake.errors import InvalidArgument

__all__ = ["STRIDES", "dtypes", "shapes", "shared_shapes", "tensors"]

STRIDES = ("contiguous", "permuted", "sliced", "strided", "offset", "expanded")
"""How a tensor may lie in memory: whole; with one dimension's steps put outermost; as the end of a
longer last dimension; as every second of some dimension; from an odd element on; repeating one
element of some dimension."""

_RARE = 0.25  # of the elements are special, where any is

Shape = tuple[int, ...]


@st.composite
def _shapes(
    draw: st.DrawFn, min_dims: int, max_dims: int, min_size: int, max_size: int, max_elements: int
) -> Shape:
    shape: list[int] = []
    room = max(max_elements, 1)
    for _ in range(draw(st.integers(min_dims, max_dims))):
        small = draw(st.integers(0, 3)) != 3
        most = max(min(9 if small else room, max_size, room), min_size)
        shape.append(draw(st.integers(min_size, most)))
        room //= max(shape[-1], 1)
    return tuple(shape)


def shapes(
    min_dims: int = 0,
    max_dims: int = 4,
    *,
    min_size: int = 0,
    max_size: int = 2048,
    max_elements: int = 2048,
) -> SearchStrategy[Shape]:
    """Shapes, with sizes of zero and one, mostly small.

    Args:
        min_dims: fewest dimensions.
        max_dims: most dimensions.
        min_size: smallest size of a dimension.
        max_size: largest size of a dimension.
        max_elements: most elements, unless ``min_size`` asks for more.
    """
    if not (0 <= min_dims <= max_dims and 0 <= min_size <= max_size):
        raise InvalidArgument(
            f"no shape has {min_dims} to {max_dims} dimensions of {min_size} to {max_size}"
        )
    return _shapes(min_dims, max_dims, min_size, max_size, max_elements)


def shared_shapes(*args: Any, **kwargs: Any) -> SearchStrategy[Shape]:
    """A shape that is the same wherever this strategy is used in one example.

    Takes what :func:`shapes` takes. Tensors whose shapes depend on each other have it mapped::

        shape = shared_shapes(min_dims=1)
        x, weight = tensors(shape), tensors(shape.map(lambda s: s[-1:]))
    """
    return st.shared(shapes(*args, **kwargs))


def dtypes(*choices: torch.dtype) -> SearchStrategy[torch.dtype]:
    """One of ``choices``, the first being the simplest; fp32, fp16 and bf16 if there are none."""
    return st.sampled_from(choices or (torch.float32, torch.float16, torch.bfloat16))


@st.composite
def _tensors(
    draw: st.DrawFn,
    shape: Shape | SearchStrategy[Shape],
    dtype: torch.dtype | SearchStrategy[torch.dtype],
    strides: Sequence[str],
    scales: Sequence[float],
    specials: Sequence[float],
    low: int,
    high: int,
    device: str | torch.device,
) -> Tensor:
    sizes = list(draw(shape) if isinstance(shape, SearchStrategy) else shape)
    kind = draw(dtype) if isinstance(dtype, SearchStrategy) else dtype
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    scale = draw(st.sampled_from(scales)) if kind.is_floating_point else 1.0
    layout = draw(st.sampled_from(strides))
    axis = draw(st.integers(0, len(sizes) - 1)) if sizes else 0
    special = draw(st.booleans())
    rare = draw(st.sampled_from(specials)) if special and specials else None

    def fill(*sizes: int) -> Tensor:
        if kind.is_floating_point or kind.is_complex:
            values: Tensor = torch.randn(sizes, generator=generator) * scale
        elif kind == torch.bool:
            values = torch.rand(sizes, generator=generator) < 0.5
        else:
            values = torch.randint(low, high, sizes, generator=generator)
        if rare is not None:
            values = torch.where(torch.rand(sizes, generator=generator) < _RARE, rare, values)
        return values.to(device, kind)

    if not sizes or layout == "contiguous":
        return fill(*sizes)
    if layout == "permuted":
        return fill(sizes[axis], *sizes[:axis], *sizes[axis + 1 :]).movedim(0, axis)
    if layout == "sliced":
        return fill(*sizes[:-1], 2 * sizes[-1])[..., sizes[-1] :]
    if layout == "offset":
        return fill(torch.Size(sizes).numel() + 1)[1:].view(sizes)
    one = [*sizes[:axis], 2 * sizes[axis] if layout == "strided" else 1, *sizes[axis + 1 :]]
    if layout == "strided":
        return fill(*one)[(slice(None),) * axis + (slice(None, None, 2),)]
    return fill(*one).expand(sizes)


def tensors(
    shape: Shape | SearchStrategy[Shape],
    dtype: torch.dtype | SearchStrategy[torch.dtype] = torch.float32,
    *,
    strides: Sequence[str] = STRIDES,
    scales: Sequence[float] = (1.0, 8.0, 0.01, 100.0),
    specials: Sequence[float] = (),
    low: int = 0,
    high: int = 10,
    device: str | torch.device = "cpu",
) -> SearchStrategy[Tensor]:
    """Tensors of normal numbers, or of whole numbers where ``dtype`` is an integer's.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        strides: the layouts, some of :data:`STRIDES`; the first is the simplest.
        scales: standard deviations.
        specials: numbers that some elements are, such as 0, infinity and NaN.
        low: smallest whole number.
        high: the first whole number that is too large.
        device: of the tensor.
    """
    if not strides or not set(strides) <= set(STRIDES):
        raise InvalidArgument(f"strides are some of {STRIDES}; got {tuple(strides)}")
    return _tensors(shape, dtype, strides, scales, specials, low, high, device)
