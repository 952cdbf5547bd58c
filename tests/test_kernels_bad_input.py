"""What operators refuse: alike by reference, by interpreted kernels, and under vmap, unlaunched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, vmap

from opake import kernels


class Bad(NamedTuple):
    """A call that is refused, the error, and what its message must name."""

    call: Callable[..., kernels.Call]
    error: type[Exception] = ValueError
    names: str = ""


def call(*args: Any, **kwargs: Any) -> Callable[[], kernels.Call]:
    """A call whose arguments are made anew: tuples stand for shapes of random numbers."""

    def made(x: Any) -> Any:
        if isinstance(x, tuple):
            return torch.randn(x)
        return x() if callable(x) else x

    return lambda: kernels.Call(
        tuple(made(x) for x in args), {key: made(x) for key, x in kwargs.items()}
    )


def whole(*sizes: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Callable[[], Tensor]:
    """Labels, ids or positions, all the same."""
    return lambda: torch.full(sizes, fill, dtype=dtype)


def norms(*first: Any) -> dict[str, Bad]:
    """What both RMS norms refuse beside their first arguments."""
    return {
        "weight of another width": Bad(call(*first, (7,)), names="(7,)"),
        "weight of two dimensions": Bad(call(*first, (3, 8)), names="(3, 8)"),
        "weight of one element": Bad(call(*first, (1,)), names="(1,)"),
        "unknown casting mode": Bad(call(*first, (8,), casting_mode="olmo2"), names="olmo2"),
        "no casting mode": Bad(call(*first, (8,), casting_mode=None), names="None"),
    }


def packed() -> dict[str, Bad]:
    return {
        "odd width": Bad(call((3, 7)), names="(3, 7)"),
        "no dimension": Bad(call(()), names="()"),
    }


LOGITS = ((4, 5, 9), whole(4, 5))
ROPE = ((2, 4, 3, 8), (2, 2, 3, 8), (3, 8), (3, 8))

TABLE: dict[str, dict[str, Bad]] = {
    "rms_norm": {
        **norms((3, 8)),
        "x without dimensions": Bad(call((), None), names="()"),
    },
    "fused_add_rms_norm": {
        **norms((3, 8), (3, 8)),
        "residual that broadcasts": Bad(call((3, 8), (1, 8), (8,)), names="(1, 8)"),
        "residual of another width": Bad(call((3, 8), (3, 7), (8,)), names="(3, 7)"),
        "both without dimensions": Bad(call((), (), None), names="()"),
    },
    "layer_norm": {
        "weight of another width": Bad(call((3, 8), (7,), (7,)), names="(7,)"),
        "bias of another width": Bad(call((3, 8), (8,), (7,)), names="(7,)"),
        "bias alone of another width": Bad(call((3, 8), None, (9,)), names="(9,)"),
        "weight of other heads": Bad(call((2, 3, 8), (2, 8), (2, 8)), names="(2, 8)"),
        "weight and bias of two shapes": Bad(call((2, 3, 8), (3, 8), (8,)), names="(3, 8)"),
        "x without dimensions": Bad(call(())),
    },
    "swiglu_packed": packed(),
    "geglu_exact_packed": packed(),
    "geglu_tanh_packed": packed(),
    "rope": {
        "q of three dimensions": Bad(call((4, 3, 8), *ROPE[1:]), names="(4, 3, 8)"),
        "k of other tokens": Bad(call(ROPE[0], (2, 2, 5, 8), *ROPE[2:]), names="(2, 2, 5, 8)"),
        "k of another width": Bad(call(ROPE[0], (2, 2, 3, 6), *ROPE[2:]), names="(2, 2, 3, 6)"),
        "k of other examples": Bad(call(ROPE[0], (1, 2, 3, 8), *ROPE[2:]), names="(1, 2, 3, 8)"),
        "heads elsewhere": Bad(call(*ROPE, unsqueeze_dim=2), names="unsqueeze_dim=2"),
        "no such dimension": Bad(call(*ROPE, unsqueeze_dim=0), names="0"),
        "tables of other tokens": Bad(call(*ROPE[:2], (5, 8), (5, 8)), names="(5, 8)"),
        "tables of other examples": Bad(call(*ROPE[:2], (3, 3, 8), (3, 3, 8)), names="(3, 3, 8)"),
        "tables of two shapes": Bad(call(*ROPE[:3], (3, 4)), names="(3, 4)"),
        "tables too wide": Bad(call(*ROPE[:2], (3, 10), (3, 10)), names="10"),
        "positions of other tokens": Bad(call(*ROPE, position_ids=whole(5)), names="(5,)"),
        "positions that are no integers": Bad(call(*ROPE, position_ids=(3,)), TypeError, "float32"),
        "position without a row": Bad(call(*ROPE, position_ids=whole(3, fill=3)), IndexError),
        "position below zero": Bad(call(*ROPE, position_ids=whole(2, 3, fill=-1)), IndexError),
    },
    "cross_entropy": {
        "fewer labels": Bad(call(LOGITS[0], whole(4)), names="(4,)"),
        "labels of other tokens": Bad(call(LOGITS[0], whole(4, 6)), names="(4, 6)"),
        "labels that broadcast": Bad(call(LOGITS[0], whole(4, 1)), names="(4, 1)"),
        "labels that are no integers": Bad(call(LOGITS[0], (4, 5)), TypeError, "float32"),
        "labels of int8": Bad(call(LOGITS[0], whole(4, 5, dtype=torch.int8)), TypeError, "int8"),
        "labels of bool": Bad(call(LOGITS[0], whole(4, 5, dtype=torch.bool)), TypeError, "bool"),
        "label above the classes": Bad(call(LOGITS[0], whole(4, 5, fill=9)), IndexError, "9"),
        "label below zero": Bad(call(LOGITS[0], whole(4, 5, fill=-1)), IndexError, "-1"),
        "weights of other classes": Bad(call(*LOGITS, class_weight=(8,)), names="(8,)"),
        "unknown reduction": Bad(call(*LOGITS, reduction="avg"), names="avg"),
        "no reduction": Bad(call(*LOGITS, reduction=None), names="None"),
        "smoothing above 1": Bad(call(*LOGITS, label_smoothing=1.5), names="1.5"),
        "smoothing below 0": Bad(call(*LOGITS, label_smoothing=-0.5), names="-0.5"),
        "softcap of zero": Bad(call(*LOGITS, softcap=0.0), names="0.0"),
        "several numbers of items": Bad(call(*LOGITS, num_items=(3,)), names="(3,)"),
        "items of a sum": Bad(call(*LOGITS, num_items=3, reduction="sum"), names="sum"),
        "no classes": Bad(call((4, 5, 0), whole(4, 5)), names="(4, 5, 0)"),
        "logits without dimensions": Bad(call((), whole()), names="()"),
    },
    "embedding": {
        "ids that are no integers": Bad(call((4,), (9, 3)), TypeError, "float32"),
        "ids of int8": Bad(call(whole(4, dtype=torch.int8), (9, 3)), TypeError, "int8"),
        "ids of bool": Bad(call(whole(4, dtype=torch.bool), (9, 3)), TypeError, "bool"),
        "weight of one dimension": Bad(call(whole(4), (9,)), names="(9,)"),
        "weight of three dimensions": Bad(call(whole(4), (9, 3, 2)), names="(9, 3, 2)"),
        "id above the rows": Bad(call(whole(4, fill=9), (9, 3)), IndexError),
        "id below zero": Bad(call(whole(4, fill=-1), (9, 3)), IndexError),
        "padding above the rows": Bad(call(whole(4), (9, 3), padding_idx=9), names="9"),
        "padding far below zero": Bad(call(whole(4), (9, 3), padding_idx=-10), names="-10"),
    },
}
CASES = [(op.name, what) for op in kernels.ops() if op.name in TABLE for what in TABLE[op.name]]
cases = pytest.mark.parametrize(("name", "what"), CASES, ids=[": ".join(case) for case in CASES])


@cases
def test_bad_input_is_refused_by_the_reference(name: str, what: str) -> None:
    assert_refused(name, what)
    assert_refused(name, what, mapped=True)


@cases
@interpreted
def test_bad_input_is_refused_before_a_launch(name: str, what: str) -> None:
    with oracle.counted() as launches:
        assert_refused(name, what)
        assert_refused(name, what, mapped=True)
    assert launches() == 0


def assert_refused(name: str, what: str, *, mapped: bool = False) -> None:
    """Assert that the error says what it found; under ``vmap(grad)`` where ``mapped``."""
    op, bad = kernels.find(name), TABLE[name][what]
    function, values, argnums = oracle.bound(op.function, bad.call())

    def total(*values: Tensor) -> Tensor:
        return sum(x.sum() for x in oracle.outputs(function(*values)))

    asked = vmap(grad(total, argnums)) if mapped else function
    given = [x.expand(2, *x.shape) for x in values] if mapped else values
    with pytest.raises(bad.error, match=re.escape(bad.names) or None):
        asked(*given)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_what_is_refused_has_one_thing_wrong(name: str) -> None:
    """Drawn examples, which are right, are not refused: by the same function and its checks."""
    op = kernels.find(name)
    for seed in range(8):
        args, kwargs = oracle.drawn(op, seed)
        op.function(*args, **kwargs)


def test_the_table_names_operators() -> None:
    assert set(TABLE) <= {op.name for op in kernels.ops()}
