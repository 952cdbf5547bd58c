"""Where the losses were once wrong: autocast, divisors of zero, labels outside, second passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from opake import kernels
from opake.errors import InvalidArgument, InvalidType
from opake.kernels import _linear_cross_entropy as chunks
from opake.kernels import cross_entropy, linear_cross_entropy
from opake.kernels.linear_cross_entropy import tiled_linear_cross_entropy

WIDTH, CLASSES = 16, 33
OP = kernels.find("linear_cross_entropy")


def by_logits(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(hidden @ weight.T, labels, **options)


KINDS: dict[str, Callable[..., Tensor]] = {
    "chunks": linear_cross_entropy,
    "tiles": functools.partial(tiled_linear_cross_entropy, tile=7),
    "logits": by_logits,
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def inputs(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(CLASSES, WIDTH, generator=generator) * 0.3
    return hidden, weight, torch.randint(CLASSES, (tokens,), generator=generator)


# ---- autocast


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["chunks", "whole", "tiles"])
def test_sums_stay_in_fp32_under_autocast(kind: str, inside: bool) -> None:
    hidden, weight, labels = inputs(2048)
    wide = [x.bfloat16().double().requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, labels), wide)

    def errors(loss: Callable[..., Tensor]) -> list[float]:
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(*leaves, labels)
            found = torch.autograd.grad(out, leaves) if inside else None
        found = found or torch.autograd.grad(out, leaves)
        assert out.dtype == torch.float32
        return [float((a - b).norm()) for a, b in zip(found, truth, strict=True)]

    def ours(*args: Tensor) -> Tensor:
        if kind == "tiles":
            return tiled_linear_cross_entropy(*args, tile=11)
        budget = 2 * CLASSES * 128 if kind == "chunks" else None
        return linear_cross_entropy(*args, memory_budget=budget, reduction="none").mean()

    eager = errors(lambda h, w, x: F.cross_entropy(F.linear(h, w).float(), x))
    for found, stock in zip(errors(ours), eager, strict=True):
        assert found <= 1.05 * stock


# ---- a second backward pass


def test_a_formed_gradient_that_was_kept_is_not_scaled_in_place() -> None:
    _second_pass()


@interpreted
def test_a_formed_gradient_that_was_kept_is_not_scaled_in_place_by_kernel() -> None:
    _second_pass()
    assert oracle.fused(OP)


def _second_pass() -> None:
    hidden, weight, labels = inputs(1)  # one token: its gradient has one factor for all of it
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels), leaves)
    stock, chunks._WIDE = chunks._WIDE, 4 * WIDTH - 1
    try:
        out = linear_cross_entropy(*leaves, labels)
        for factor in (2.0, 2.0, 1.0):
            found = torch.autograd.grad(out, leaves, torch.tensor(factor), retain_graph=True)
            for a, b in zip(found, truth, strict=True):
                torch.testing.assert_close(a, factor * b, atol=1e-5, rtol=1e-5)
    finally:
        chunks._WIDE = stock


# ---- labels outside


@every_kind
def test_a_label_outside_is_an_error_mapped_too(kind: str) -> None:
    hidden, weight, labels = inputs()
    for wrong in (CLASSES, -1):
        labels[2] = wrong
        with pytest.raises(IndexError, match=f"labels holds {wrong}"):
            KINDS[kind](hidden, weight, labels)
        with pytest.raises(IndexError, match=f"labels holds {wrong}"):
            vmap(KINDS[kind], (None, None, 0))(hidden, weight, labels.expand(2, -1))


@every_kind
def test_a_label_outside_makes_a_compiled_loss_nan(kind: str) -> None:
    hidden, weight, labels = inputs()
    labels[2], labels[3] = CLASSES, -1
    compiled = torch.compile(
        lambda *x: KINDS[kind](*x, reduction="none"), backend="aot_eager", fullgraph=True
    )
    leaf = hidden.requires_grad_()
    out = compiled(leaf, weight, labels)
    right = torch.arange(6) % 6 // 2 != 1
    assert out[2:4].isnan().all()
    expected = F.cross_entropy(hidden @ weight.T, labels.where(right, -100), reduction="none")
    torch.testing.assert_close(out[right], expected[right])
    (found,) = torch.autograd.grad(out[right].sum(), leaf)
    (truth,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(found, truth)


# ---- divisors


@every_kind
def test_divisors_of_zero(kind: str) -> None:
    _by_zero(kind)


@every_kind
@interpreted
def test_divisors_of_zero_by_kernel(kind: str) -> None:
    _by_zero(kind)


def _by_zero(kind: str) -> None:
    """The sum over zero is infinite if there is a loss, else NaN; with weights of zero, NaN."""
    hidden, weight, labels = inputs()
    labels[1] = -100
    none = torch.full_like(labels, -100)
    wide = hidden.double() @ weight.double().T
    for items in (0, 0.0, torch.tensor(0), torch.tensor(0.0)):
        for chosen in (labels, none):
            leaf, head = (x.detach().requires_grad_() for x in (hidden, weight))
            found = KINDS[kind](leaf, head, chosen, num_items=items)
            stock = F.cross_entropy(wide, chosen, reduction="sum") / 0.0
            torch.testing.assert_close(found, stock.float(), equal_nan=True)
            grads = torch.autograd.grad(found, (leaf, head))
            if chosen is none:
                assert not any(x.any() for x in grads)
            else:
                assert not any(x.isfinite().all() for x in grads)
                assert not grads[0][1].any()
        if isinstance(items, Tensor):
            each = vmap(lambda n, x: KINDS[kind](hidden, weight, x, num_items=n))
            both = each(torch.stack((items, items + 2)), torch.stack((none, labels)))
            stock = F.cross_entropy(wide, labels, reduction="sum").float() / 2
            torch.testing.assert_close(both[1], stock)
            assert both[0].isnan()
    unused = torch.ones(CLASSES).index_fill(0, labels.clamp_min(0), 0.0)
    for smoothing in (0.0, 0.1):
        options = {"class_weight": unused, "label_smoothing": smoothing}
        stock = F.cross_entropy(wide, labels, unused.double(), label_smoothing=smoothing)
        assert stock.isnan()
        assert KINDS[kind](hidden, weight, labels, **options).isnan()


@every_kind
def test_the_loss_has_no_dtype_from_its_divisor(kind: str) -> None:
    _divisors(kind)


@every_kind
@interpreted
def test_the_loss_has_no_dtype_from_its_divisor_by_kernel(kind: str) -> None:
    _divisors(kind)


def _divisors(kind: str) -> None:
    hidden, weight, labels = inputs()
    loss = KINDS[kind]
    stock = F.cross_entropy(hidden @ weight.T, labels, reduction="sum") / 3
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for trained in (False, dtype.is_floating_point):
            items = torch.tensor(3, dtype=dtype).requires_grad_(trained)
            leaf = hidden.detach().requires_grad_()
            out = loss(leaf, weight, labels, num_items=items)
            torch.testing.assert_close(out, stock)
            out.backward()
            assert leaf.grad.dtype == torch.float32
            assert (items.grad is not None) == trained
        two = torch.stack((items.detach(), items.detach()))
        both = vmap(lambda n: loss(hidden, weight, labels, num_items=n))(two)
        torch.testing.assert_close(both, torch.stack((stock, stock)))


# ---- arguments

BAD: list[tuple[str, Any, type[Exception]]] = [
    ("ignore_index", 1.5, InvalidType),
    ("ignore_index", -100.0, InvalidType),
    ("ignore_index", True, InvalidType),
    ("ignore_index", float("nan"), InvalidType),
    ("ignore_index", float("inf"), InvalidType),
    ("ignore_index", None, InvalidType),
    ("ignore_index", "1", InvalidType),
    ("ignore_index", torch.tensor(1), InvalidType),
    ("ignore_index", 2**63, InvalidArgument),
    ("ignore_index", -(2**70), InvalidArgument),
    ("num_items", torch.tensor(2 + 0j), InvalidType),
    ("num_items", 2 + 0j, InvalidType),
    ("class_weight", torch.ones(CLASSES) + 0j, InvalidType),
    ("class_weight", [1.0], InvalidType),
    ("softcap", 0.0, InvalidArgument),
    ("reduction", "max", InvalidArgument),
]


@every_kind
@pytest.mark.parametrize(("name", "value", "error"), BAD, ids=lambda x: str(x)[:20])
def test_what_is_refused(kind: str, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} .*found"):
        KINDS[kind](*inputs(), **{name: value})


@every_kind
def test_whole_numbers_are_taken(kind: str) -> None:
    import numpy as np

    hidden, weight, labels = inputs()
    labels[1] = 5
    stock = F.cross_entropy(hidden @ weight.T, labels, ignore_index=5)
    for five in (5, np.int64(5), np.int32(5)):
        for of in (labels, labels.int()):
            found = KINDS[kind](hidden, weight, of, ignore_index=five)
            torch.testing.assert_close(found, stock)
    none_ignored = F.cross_entropy(hidden @ weight.T, labels)
    for far in (2**63 - 1, -(2**63), 2**31):
        for of in (labels, labels.int()):
            found = KINDS[kind](hidden, weight, of, ignore_index=far)
            torch.testing.assert_close(found, none_ignored)


def test_tiles_are_refused_as_chunks_are() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(InvalidArgument, match=r"labels \(\.\.\., S\)"):
        tiled_linear_cross_entropy(hidden, weight, labels[:3], tile=4)
    with pytest.raises(InvalidType, match="hidden is a tensor"):
        tiled_linear_cross_entropy([1.0], weight, labels, tile=4)
    for tile, error in ((0, InvalidArgument), (-3, InvalidArgument), (2.0, InvalidType)):
        with pytest.raises(error, match="tile"):
            tiled_linear_cross_entropy(hidden, weight, labels, tile=tile)
