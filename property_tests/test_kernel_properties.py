"""Every registered operator on drawn inputs: shapes, layouts, dtypes and mapped dimensions.

Examples are drawn here, as numbers, and computed where kernels are interpreted. A failure prints
the numbers: ``check_values(name, numbers, ...)`` runs it again. Examples that the kernels do not
run, such as those that broadcast, count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import kernel_oracle as oracle
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from interpreter import interpreted

from opake import kernels
from opake.kernels import Draw

NAMES = [op.name for op in kernels.ops()]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
names = pytest.mark.parametrize("name", NAMES)


@st.composite
def examples(draw: st.DrawFn, name: str) -> list[int]:
    """The numbers that an operator's example is made of."""
    numbers: list[int] = []

    def integer(low: int, high: int) -> int:
        numbers.append(draw(st.integers(low, high)))
        return numbers[-1]

    kernels.find(name).examples(Draw(integer, dtypes=DTYPES))
    return numbers


@interpreted
def check_values(name: str, numbers: Sequence[int], seed: int) -> bool:
    op = kernels.find(name)
    return oracle.assert_right(op, oracle.replayed(op, numbers, *DTYPES), seed)


@interpreted
def check_rows(name: str, numbers: Sequence[int], seed: int, size: int) -> bool:
    op = kernels.find(name)
    call = oracle.replayed(op, numbers, *DTYPES)
    choices = list(oracle.subsets(oracle.differentiable(call)))
    return oracle.assert_rows(op, call, choices[seed % len(choices)], seed, size)


@names
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_values_and_gradients(name: str, data: st.DataObject, seed: int) -> None:
    assume(check_values(name, data.draw(examples(name)), seed))


@names
@given(data=st.data(), seed=st.integers(0, 2**16), size=st.integers(1, 4))
def test_vmap_of_grad(name: str, data: st.DataObject, seed: int, size: int) -> None:
    assume(check_rows(name, data.draw(examples(name)), seed, size))
