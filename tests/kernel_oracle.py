"""Operators by the comparison of :mod:`opake.testing`: drawn, replayed, and seen to run kernels."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opake import kernels
from opake.kernels import Call, Draw, Op
from opake.testing import _parity as parity
from opake.testing._parity import FP32_BAR as FP32_BAR
from opake.testing._parity import Key as Key
from opake.testing._parity import Result as Result
from opake.testing._parity import all_same as all_same
from opake.testing._parity import assert_close as assert_close
from opake.testing._parity import by_vjp as by_vjp
from opake.testing._parity import compare as compare
from opake.testing._parity import differentiable as differentiable
from opake.testing._parity import judge as judge
from opake.testing._parity import leaves as leaves
from opake.testing._parity import mapped as mapped
from opake.testing._parity import replaced as replaced
from opake.testing._parity import run as run
from opake.testing._parity import subsets as subsets
from opake.testing._parity import tensors as tensors
from opake.testing._parity import wide as wide


def drawn(op: Op, seed: int, device: str = "cpu", *dtypes: torch.dtype) -> Call:
    """The example of ``op`` that a seed stands for."""
    rng = random.Random(seed)
    return op.examples(Draw(rng.randint, device, dtypes or (torch.float32,)))


def replayed(op: Op, numbers: Sequence[int], *dtypes: torch.dtype) -> Call:
    """The example of ``op`` that was drawn with these numbers."""
    found = iter(numbers)
    return op.examples(Draw(lambda low, high: next(found), "cpu", dtypes))


def fused(op: Op) -> bool:
    """Tell whether the last pass ran the kernels."""
    return kernels.last_backend(op) == "triton"


def assert_right(op: Op, call: Call, seed: int = 0) -> bool:
    """Assert outputs, gradients and that nothing was written; return whether the kernels ran."""
    parity.assert_right(op.function, op.reference, call, seed)
    return fused(op)


def assert_rows(op: Op, call: Call, keys: Sequence[Key], seed: int, size: int = 3) -> bool:
    """Assert ``vmap(grad)`` over these arguments against a loop; return whether kernels ran."""
    return parity.assert_rows(
        op.function, op.reference, call, keys, seed, size, ran=lambda: fused(op)
    )


def choices(call: Call, seed: int) -> list[tuple[Key, ...]]:
    """Some of the ways to map a call's tensors: each alone, all, and drawn ones between."""
    keys = list(tensors(call))
    between = [s for s in some_subsets(keys) if 1 < len(s) < len(keys)]
    some = random.Random(seed).sample(between, min(2, len(between)))
    return list(dict.fromkeys([*((key,) for key in keys), *some, tuple(keys)]))


def some_subsets(keys: Sequence[Key]) -> list[tuple[Key, ...]]:
    """Every choice of at least one of few keys; of many, one, all but one, all, and others."""
    if len(keys) <= _FEW:
        return list(subsets(keys))
    rng = random.Random(len(keys))
    others = [tuple(key for key in keys if rng.randint(0, 1)) for _ in range(_FEW)]
    all_but_one = [tuple(key for key in keys if key != left) for left in keys]
    return [*((key,) for key in keys), *filter(None, others), *all_but_one, tuple(keys)]


_FEW = 6


def bound(function: Callable[..., Any], call: Call) -> tuple[Any, list[Tensor], tuple[int, ...]]:
    """A function of the call's tensors alone, those tensors, and which of them have gradients."""
    keys = list(tensors(call))
    smooth = differentiable(call)

    def of_tensors(*values: Tensor) -> Any:
        here = replaced(call, dict(zip(keys, values, strict=True)))
        return function(*here.args, **here.kwargs)

    argnums = tuple(i for i, key in enumerate(keys) if key in smooth)
    return of_tensors, list(tensors(call).values()), argnums


def in_one_chunk(op: Op, call: Call) -> Call:
    """The call with all the memory it can use, where launches grow with what is lacking."""
    if "memory_budget" not in inspect.signature(op.function).parameters:
        return call
    return Call(call.args, {**call.kwargs, "memory_budget": 1 << 60})


def outputs(result: Any) -> list[Tensor]:
    """The output, or outputs, in a list."""
    return list(parity.as_tuple(result))


def small(name: str, dtype: torch.dtype = torch.float32, skip: int = 0) -> tuple[Op, Call]:
    """An operator and the first of its examples that its kernels run, with more than one number.

    Every tensor that has a gradient has some, and they are not large.
    """
    op = kernels.find(name)
    assert op is not None
    for seed in itertools.count(skip):
        assert seed < skip + 5000, f"the examples of {name} are never small"
        call = drawn(op, seed, "cpu", dtype)
        inputs = [tensors(call)[i] for i in differentiable(call)]
        # Second derivatives are quadratic in the size and cancel where numbers are large.
        if not all(1 < x.numel() <= 64 and x.abs().max() < 5 for x in inputs):
            continue
        if not all(1 <= x.numel() <= 64 for x in tensors(call).values()):
            continue
        if not kernels.should_run(op, *call.args, **call.kwargs)[0]:
            continue
        result, found = run(op.reference, call, differentiable(call))
        if all(x.isfinite().all() for x in result) and any(g.any() for g in found):
            return op, call
    raise AssertionError("unreachable")


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count kernel launches; yields a function that returns their number."""
    from opake.kernels._triton import Launch

    count = 0
    stock = Launch.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        stock(self, *args, **kwargs)

    Launch.__call__ = launch  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        Launch.__call__ = stock  # type: ignore[method-assign]


def assert_all_close(found: Any, expected: Any, **options: Any) -> None:
    """``torch.testing.assert_close`` of every tensor in two results of one structure."""
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, **options)
