"""The cross entropy of a linear head: chunks, tiles, memory, whose gradients are formed early."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from opake import kernels
from opake.errors import InvalidArgument, InvalidType
from opake.kernels import _linear_cross_entropy as chunks
from opake.kernels import linear_cross_entropy
from opake.kernels.linear_cross_entropy import tiled_linear_cross_entropy
from opake.patches.kernels import opake_linear_cross_entropy_loss

TOKENS, WIDTH, CLASSES = 12, 5, 31
OP = kernels.find("linear_cross_entropy")


def inputs(*outer: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outer = outer or (TOKENS,)
    hidden = torch.randn(*outer, WIDTH, generator=generator)
    weight = torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, outer, generator=generator)
    labels.view(-1)[1::5] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def gradients(function: Callable[..., Tensor], *args: Tensor, factor: float = 1.0) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in args]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.full_like(out, factor))]


# ---- chunks and tiles


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@interpreted
def test_however_many_tokens_are_in_a_chunk(reduction: str) -> None:
    hidden, weight, labels = inputs(2, TOKENS // 2)
    bias = torch.linspace(-1, 1, CLASSES)
    options: dict[str, Any] = {"shift": True, "label_smoothing": 0.1, "reduction": reduction}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, **more: Any) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, **options, **more)

    def stock(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias)[:, :-1].flatten(0, 1)
        flat = labels[:, 1:].flatten()
        found = F.cross_entropy(logits, flat, label_smoothing=0.1, reduction=reduction)
        return found.view(2, -1) if reduction == "none" else found

    expected = gradients(stock, hidden.double(), weight.double(), bias.double(), factor=0.7)
    for budget in (None, 1, 4 * CLASSES * 5, 4 * CLASSES * 7):
        found = gradients(
            lambda *a, b=budget: loss(*a, memory_budget=b), hidden, weight, bias, factor=0.7
        )
        assert oracle.fused(OP)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "shift": True},
    {"label_smoothing": 0.2, "softcap": 3.0, "logit_scale": 0.5, "z_loss": 1e-2},
    {"class_weight": torch.linspace(0.1, 2, CLASSES), "label_smoothing": 0.2},
    {"class_weight": torch.linspace(0.1, 2, CLASSES), "reduction": "sum"},
    {"num_items": 7},
    {"num_items": torch.tensor(7)},
    {"ignore_index": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(x) or "defaults")
@pytest.mark.parametrize("tile", [None, 1, 8, 100])
def test_without_kernels(options: dict[str, Any], tile: int | None) -> None:
    """In chunks of tokens, or in tiles of the vocabulary, each mapped and not."""
    hidden, weight, labels = inputs(3, 4)
    if "ignore_index" in options:
        labels = labels.clamp_min(0)
    bias = torch.linspace(-1, 1, CLASSES)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        if tile is None:
            return linear_cross_entropy(hidden, weight, labels, bias, memory_budget=1, **options)
        return tiled_linear_cross_entropy(hidden, weight, labels, bias, tile=tile, **options)

    def stock(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        return OP.reference(hidden, weight, labels, bias, **options)

    wide = [hidden.double(), weight.double(), bias.double()]
    found = gradients(lambda h, w, b: loss(h, w, labels, b), hidden, weight, bias)
    assert kernels.last_backend(OP) == "reference"
    truth = gradients(lambda h, w, b: stock(h, w, labels, b), *wide)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-5)

    def total(function: Any) -> Any:
        return grad(lambda *a: function(*a).sum(), (0, 1, 3))

    each = vmap(total(loss), (0, None, 0, None))(hidden, weight, labels, bias)
    for k in range(3):
        alone = total(stock)(wide[0][k], wide[1], labels[k], wide[2])
        for a, b in zip(each, alone, strict=True):
            torch.testing.assert_close(a[k], b.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tile", [None, 8])
def test_fp64_is_computed_in_fp64(tile: int | None) -> None:
    hidden, weight, labels = inputs(dtype=torch.float64)
    options: dict[str, Any] = {
        "class_weight": torch.linspace(0.1, 2, CLASSES, dtype=torch.float64),
        "label_smoothing": 0.1,
    }

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        if tile is None:
            return linear_cross_entropy(hidden, weight, labels, memory_budget=1, **options)
        return tiled_linear_cross_entropy(hidden, weight, labels, tile=tile, **options)

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, labels, options["class_weight"], **smooth)

    smooth = {"label_smoothing": options["label_smoothing"]}
    expected = gradients(stock, hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):  # which does not cast it either
        cast = gradients(ours, hidden, weight)
    for found in (gradients(ours, hidden, weight), cast):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-12)


# ---- memory


def largest(function: Callable[[], Any]) -> int:
    """Bytes of the largest allocation on the CPU."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("kind", ["chunks", "tiles", "kernels"])
def test_logits_are_never_all_there(kind: str) -> None:
    (_memory_by_kernel if kind == "kernels" else _memory)(kind)


def _memory(kind: str) -> None:
    tokens, width, classes = 64, 8, 4096 if kind != "kernels" else 512
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(classes, width)
    labels = torch.randint(classes, (tokens,))
    logits = 4 * tokens * classes

    def loss() -> Tensor:
        if kind == "tiles":
            return tiled_linear_cross_entropy(hidden, weight, labels, tile=classes // 8)
        return linear_cross_entropy(hidden, weight, labels, memory_budget=logits // 8)

    assert largest(lambda: loss().backward()) <= max(logits // 8, 4 * weight.numel())
    assert largest(lambda: OP.reference(hidden, weight, labels).backward()) >= logits


_memory_by_kernel = interpreted(_memory)


@interpreted
def test_a_frozen_head_is_not_copied_for_each_example() -> None:
    examples, classes = 16, 512
    hidden, labels = torch.randn(examples, 4, 8), torch.randint(classes, (examples, 4))
    weight = torch.randn(classes, 8, requires_grad=True)  # whether it is trained or not

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, memory_budget=4 * classes * 8)

    run = vmap(grad(loss))
    assert largest(lambda: run(hidden, labels)) < 4 * weight.numel() * 2
    assert kernels.last_backend(OP) == "triton"
    per_head = vmap(grad(lambda w, h, x: linear_cross_entropy(h, w, x)), (None, 0, 0))
    assert per_head(weight.detach(), hidden, labels).shape == (examples, classes, 8)


# ---- what the forward pass forms


@interpreted
def test_gradients_that_were_given_away_stay_as_they_are() -> None:
    """Even where the forward pass' own are scaled in place, and even if asked for again."""
    hidden, weight, labels = inputs()
    stock = chunks._WIDE
    try:
        for chunks._WIDE in (0, stock):
            h, w = (x.detach().requires_grad_() for x in (hidden, weight))
            out = linear_cross_entropy(h, w, labels)
            assert oracle.fused(OP)
            first = torch.autograd.grad(out, (h, w), torch.tensor(3.0), retain_graph=True)
            kept = [x.clone() for x in first]
            for factor in (3.0, 1.0, -0.7):
                again = torch.autograd.grad(out, (h, w), torch.tensor(factor), retain_graph=True)
                assert oracle.all_same(first, kept)
                truth = gradients(
                    lambda h, w: F.cross_entropy(h @ w.T, labels), hidden, weight, factor=factor
                )
                for a, b in zip(again, truth[1:], strict=True):
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    finally:
        chunks._WIDE = stock


@pytest.mark.parametrize(("pieces", "factor"), [(1, 1.05), (chunks._FEW, 2.3), (16, 1.05)])
def test_the_gradient_of_a_large_head_in_bf16(pieces: int, factor: float) -> None:
    """Its error is eager's, but where a few chunks' sums are rounded one by one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 16, generator=generator).bfloat16()
    weight = (torch.randn(CLASSES, 16, generator=generator) / 4).bfloat16()
    labels = torch.randint(CLASSES, (1024,), generator=generator)
    budget = 2 * CLASSES * 1024 // pieces
    stock, chunks._WIDE = chunks._WIDE, 0  # every head is large
    try:
        ours = gradients(
            lambda w: linear_cross_entropy(hidden, w, labels, memory_budget=budget), weight
        )[1]
    finally:
        chunks._WIDE = stock
    eager = gradients(lambda w: OP.reference(hidden, w, labels), weight)[1]
    truth = gradients(lambda w: F.cross_entropy(hidden.double() @ w.T, labels), weight.double())[1]
    assert ours.dtype == torch.bfloat16
    assert (ours - truth).norm() <= factor * (eager - truth).norm()


WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1))
SMOOTH = [{"class_weight": WEIGHTS, "label_smoothing": x} for x in (0.1, 0.3)]


@pytest.mark.parametrize("options", [*OPTIONS, *SMOOTH], ids=lambda x: "+".join(x) or "defaults")
@interpreted
def test_what_is_computed_again_has_the_same_bits(options: dict[str, Any]) -> None:
    hidden, weight, labels = inputs()
    if "ignore_index" in options:
        labels = labels.clamp_min(0)
    leaves = [x.requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, CLASSES))]
    for token in range(TOKENS):
        chosen = labels.where(torch.arange(TOKENS) == token, options.get("ignore_index", -100))
        out = linear_cross_entropy(leaves[0], leaves[1], chosen, leaves[2], **options)
        factor = torch.full_like(out, 0.7)
        first, second = (torch.autograd.grad(out, leaves, factor, retain_graph=True) for _ in "ab")
        assert oracle.fused(OP)
        assert oracle.all_same(first, second)


@interpreted
def test_the_head_is_multiplied_no_more_often_than_needed() -> None:
    """Two products where it is frozen, three where it is trained, one without gradients."""
    hidden, weight, labels = inputs()
    stock, count = chunks.multiply, itertools.count()

    def counting(*args: Any, **kwargs: Any) -> None:
        next(count)
        stock(*args, **kwargs)

    chunks.multiply = counting
    try:
        for wanted, products in (((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3)):
            count = itertools.count()
            leaves = [
                x.detach().requires_grad_(i in wanted) for i, x in enumerate((hidden, weight))
            ]
            out = linear_cross_entropy(*leaves, labels)
            if wanted:
                out.backward()
            assert next(count) == products
    finally:
        chunks.multiply = stock


@interpreted
def test_a_tied_embedding_gets_both_gradients() -> None:
    _, weight, labels = inputs()
    ids = torch.arange(TOKENS) % CLASSES

    def ours(weight: Tensor) -> Tensor:
        return linear_cross_entropy(kernels.embedding(ids, weight), weight, labels)

    def stock(weight: Tensor) -> Tensor:
        return F.cross_entropy(F.embedding(ids, weight) @ weight.T, labels)

    found, expected = gradients(ours, weight), gradients(stock, weight.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-5)


@interpreted
def test_fp16_under_a_loss_scale() -> None:
    """Gradients that only the scale keeps from vanishing are not formed before it is known."""
    hidden, weight, labels = inputs(dtype=torch.float16)
    hidden, weight = hidden / 8, weight / 8
    scale, items = 2.0**16, 2.0**21

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, num_items=items)

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum") / items

    found = gradients(loss, hidden, weight, factor=scale)
    assert oracle.fused(OP)
    truth = gradients(stock, hidden.double(), weight.double(), factor=scale)
    for a, b in zip(found[1:], truth[1:], strict=True):
        assert (a.double() - b).abs().max() < 2e-3 * b.abs().max()


# ---- labels, shapes, names


def test_labels_outside() -> None:
    hidden, weight, labels = inputs(2, 6)
    labels[0, 0] = CLASSES
    with pytest.raises(IndexError, match=f"labels holds {CLASSES}"):
        linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight, labels, shift=True)  # the first is compared with nothing


BAD: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("weight is|hidden is", {"weight": torch.randn(CLASSES, WIDTH + 1)}, InvalidArgument),
    ("V > 0", {"weight": torch.randn(0, WIDTH)}, InvalidArgument),
    ("labels", {"labels": torch.zeros(3, dtype=torch.int64)}, InvalidArgument),
    ("int32 or int64", {"labels": torch.zeros(TOKENS)}, InvalidType),
    ("bias is", {"bias": torch.zeros(3)}, InvalidArgument),
    ("one floating-point dtype", {"bias": torch.zeros(CLASSES).double()}, InvalidType),
    ("torch.autocast", {"weight": torch.randn(CLASSES, WIDTH).bfloat16()}, InvalidType),
    ("memory_budget", {"memory_budget": 0}, InvalidArgument),
    ("memory_budget", {"memory_budget": 1.5}, InvalidArgument),
    ("reduction", {"reduction": "max"}, InvalidArgument),
    ("is a tensor", {"hidden": [1.0]}, InvalidType),
    ("softcap", {"softcap": -1.0}, InvalidArgument),
    ("class_weight", {"class_weight": torch.ones(2)}, InvalidArgument),
]


@pytest.mark.parametrize(("message", "changed", "error"), BAD)
def test_bad_input(message: str, changed: dict[str, Any], error: type[Exception]) -> None:
    hidden, weight, labels = inputs()
    call = {"hidden": hidden, "weight": weight, "labels": labels, **changed}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**call)


def test_the_published_name() -> None:
    hidden, weight, labels = inputs(2, 6)
    found = opake_linear_cross_entropy_loss(hidden, weight, labels, logit_softcapping=5.0)
    logits = 5 * torch.tanh(hidden @ weight.T / 5)[:, :-1].flatten(0, 1)
    flat = labels[:, 1:].flatten()
    torch.testing.assert_close(found, F.cross_entropy(logits, flat))
    scaled = opake_linear_cross_entropy_loss(
        hidden, weight, labels, use_token_scaling=True, label_smoothing=0.1
    )
    logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, flat, reduction="none", label_smoothing=0.1)
    chance = logits.softmax(-1).gather(1, flat.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(scaled, (each * chance).sum() / (flat != -100).sum())
