"""Every registered operator on drawn inputs: shapes, layouts, dtypes, transforms.

Examples are drawn here, as numbers, and computed where kernels run: interpreted, in a process of
their own, or on a GPU if there is one. A failure prints the numbers: ``check(name, numbers, ...)``
runs it again, and ``python -m opake fuzz`` would print a program. Examples that the kernels do not
run, such as those that broadcast, count for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from interpreter import interpreted

from opake import kernels
from opake.testing._ops import example_of, right
from opake.testing._transforms import TRANSFORMS, Example

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "thorough"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAPPED = tuple(transform for transform in TRANSFORMS if "vmap" in transform)
UNMAPPED = tuple(transform for transform in TRANSFORMS if "vmap" not in transform)

names = pytest.mark.parametrize("name", [op.name for op in kernels.ops()])
# Interpreted programs take a millisecond each: these of an operator take about three seconds.
enough = settings(
    max_examples=1000 if THOROUGH else 25,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
slow = pytest.mark.timeout(3000 if THOROUGH else 300)


def where_kernels_run(function: Callable[..., Any]) -> Callable[..., Any]:
    return interpreted(function) if DEVICE == "cpu" else function


def example(name: str, integer: Callable[[int, int], int], transforms: Sequence[str]) -> Example:
    op = kernels.find(name)
    return example_of(op, integer, DEVICE, DTYPES, large=DEVICE != "cpu", transforms=transforms)


@st.composite
def numbers(draw: st.DrawFn, name: str, transforms: Sequence[str]) -> list[int]:
    """The numbers that an operator's example is made of."""
    found: list[int] = []

    def integer(low: int, high: int) -> int:
        found.append(draw(st.integers(low, high)))
        return found[-1]

    example(name, integer, transforms)
    return found


@where_kernels_run
def check(name: str, numbers: Sequence[int], transforms: Sequence[str]) -> bool:
    found = iter(numbers)
    return right(kernels.find(name), example(name, lambda low, high: next(found), transforms))


@names
@enough
@slow
@given(data=st.data())
def test_autograd(name: str, data: st.DataObject) -> None:
    assume(check(name, data.draw(numbers(name, UNMAPPED)), UNMAPPED))


@names
@enough
@slow
@given(data=st.data())
def test_mapped(name: str, data: st.DataObject) -> None:
    assume(check(name, data.draw(numbers(name, MAPPED)), MAPPED))
