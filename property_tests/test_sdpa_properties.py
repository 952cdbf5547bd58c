"""Attention under vmap: any shapes, masks and mapped dimensions, against one example at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import GRADIENT_BAR, error, same_bits
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from opake.compat.folded_sdpa import folded_sdpa

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

BAR = GRADIENT_BAR[torch.float64]
small = st.integers(1, 3)


class Problem(NamedTuple):
    """Query, key, value and mask, N examples in front where they are mapped."""

    inputs: list[Tensor | None]
    mapped: list[bool]
    options: dict[str, Any]
    weight: Tensor

    def differentiable(self) -> tuple[int, ...]:
        return tuple(
            i for i, x in enumerate(self.inputs) if x is not None and x.is_floating_point()
        )

    def example(self, i: int) -> list[Any]:
        pairs = zip(self.inputs, self.mapped, strict=True)
        return [x[i] if x is not None and mapped else x for x, mapped in pairs]

    def loss(self, operator: Any) -> Any:
        def loss(*inputs: Any) -> Tensor:
            *inputs, weight = inputs
            return (operator(*inputs, **self.options) * weight).sum()

        return loss


def normal(draw: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mask(draw: Any, kind: str, *sizes: int) -> Tensor:
    """A mask that leaves any of its dimensions but the last to broadcasting, or leaves it out."""
    shape = [draw(st.sampled_from([1, n])) for n in sizes[:-1]] + [sizes[-1]]
    shape = shape[draw(st.integers(0, 2)) :]
    visible = normal(draw, *shape) > draw(st.sampled_from([-9.0, -0.5, 0.5, 9.0]))
    if kind == "bool":
        return visible
    scores = normal(draw, *shape)
    return scores if kind == "float" else scores.masked_fill(~visible, -math.inf)


@st.composite
def problems(draw: Any) -> Problem:
    size, batch, heads, queries, keys, dim, value_dim = (draw(small) for _ in range(7))
    groups = draw(st.sampled_from([1, 2]))
    shapes = [
        (batch, heads * groups, queries, dim),
        (batch, heads, keys, dim),
        (batch, heads, keys, value_dim),
    ]
    mapped = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    mapped[0] |= not any(mapped[:3])
    inputs: list[Tensor | None] = [
        normal(draw, *((size, *shape) if many else shape))
        for shape, many in zip(shapes, mapped[:3], strict=True)
    ]
    kind = draw(st.sampled_from(["none", "bool", "float", "-inf"]))
    options: dict[str, Any] = {
        "enable_gqa": groups > 1,
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    if kind == "none":
        mapped[3] = False
        options["is_causal"] = draw(st.booleans())
        inputs.append(None)
    elif mapped[3]:
        one = mask(draw, kind, batch, heads * groups, queries, keys)
        inputs.append(torch.stack([one.roll(i, -1) for i in range(size)]))
    else:
        inputs.append(mask(draw, kind, batch, heads * groups, queries, keys))
    weight = normal(draw, size, batch, heads * groups, queries, value_dim)
    return Problem(inputs, mapped, options, weight)


def loop(problem: Problem) -> list[Tensor]:
    wanted, rows = problem.differentiable(), []
    for i in range(len(problem.weight)):
        row = problem.example(i)
        for j in wanted:
            row[j] = row[j].clone().requires_grad_()
        value = problem.loss(F.scaled_dot_product_attention)(*row, problem.weight[i])
        rows.append(torch.autograd.grad(value, [row[j] for j in wanted]))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def assert_rows(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        for x, y in zip(a, b, strict=True):
            # Where softmax saturates, a gradient is the rounding of numbers of order one.
            assert error(x, y, 1e-3) <= BAR or (x - y).abs().max() <= 1e-14


@given(problems(), st.data())
def test_gradients_are_the_loops_wherever_the_mapped_dimension_is(
    problem: Problem, data: st.DataObject
) -> None:
    wanted = problem.differentiable()
    moved: list[Any] = []
    dims: list[int | None] = []
    for x, many in zip(problem.inputs, problem.mapped, strict=True):
        dim = data.draw(st.integers(-x.ndim, x.ndim - 1)) if x is not None and many else None
        dims.append(dim)
        moved.append(x if dim is None or x is None else x.movedim(0, dim))
    gradients = grad(problem.loss(folded_sdpa), wanted)
    chunk_size = data.draw(st.sampled_from([None, 1, 2]))
    found = vmap(gradients, (*dims, 0), chunk_size=chunk_size)(*moved, problem.weight)
    expected = loop(problem)
    assert_rows(found, expected)

    def total(*inputs: Any) -> Tensor:
        return vmap(problem.loss(folded_sdpa), (*dims, 0))(*inputs, problem.weight).sum()

    for i, a, b in zip(wanted, grad(total, wanted)(*moved), expected, strict=True):
        dim = dims[i]
        assert_rows(
            [a[None] if dim is None else a.movedim(dim, 0)],
            [b if problem.mapped[i] else b.sum(0)[None]],
        )


@given(problems())
def test_a_row_does_not_depend_on_its_neighbours(problem: Problem) -> None:
    dims = tuple(0 if many else None for many in problem.mapped)
    rows = vmap(grad(problem.loss(folded_sdpa), problem.differentiable()), (*dims, 0))
    found = rows(*problem.inputs, problem.weight)
    changed: list[Any] = []
    for x, many in zip(problem.inputs, problem.mapped, strict=True):
        changed.append(x)
        if x is not None and many:
            others = x[1:].roll(1, -1) if x.dtype == torch.bool else x[1:] * 1e3
            changed[-1] = torch.cat([x[:1], others])
    again = rows(*changed, problem.weight)
    assert same_bits([x[0] for x in again], [x[0] for x in found])
