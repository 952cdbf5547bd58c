"""Attention under functorch transforms, against stock's operator on one example at a time."""

from __future__ import annotations

import gc
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import zoo
from oracle import (
    GRADIENT_BAR,
    assert_exact,
    error,
    peak_memory,
    per_example,
    same_bits,
    stock_loop,
)
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.integrations import sdpa_attention

import opake
from opake.compat.attention import sdpa
from opake.compat.folded_sdpa import folded_sdpa
from opake.errors import UnsupportedAttention

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

# torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

N, B, HEADS, S, D = 3, 2, 4, 5, 8
stock = F.scaled_dot_product_attention


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def bools(*shape: int, seed: int = 3) -> Tensor:
    """A mask of which about two thirds is visible, and in which one row sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*shape, generator=generator) < 0.67
    mask[..., 1, :] = False
    return mask


def heads(batch: int = B, count: int = HEADS, length: int = S, dim: int = D) -> tuple[int, ...]:
    return batch, count, length, dim


class Case:
    """Shapes of one example, options of the operator, and a mask of one example or of N."""

    def __init__(
        self,
        query: tuple[int, ...] = heads(),
        key: tuple[int, ...] = heads(),
        value: tuple[int, ...] | None = None,
        mask: Callable[[], Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.shapes = (query, key, value or key)
        self.mask = mask
        self.options = options


GROUPED = heads(count=2)
CASES = {
    "plain": Case(),
    "causal": Case(is_causal=True),
    "causal, no batch to speak of": Case(heads(1), heads(1), is_causal=True),
    "scale": Case(scale=0.3, is_causal=True),
    "gqa": Case(heads(), GROUPED, is_causal=True, enable_gqa=True),
    "gqa with a mask": Case(heads(), GROUPED, mask=lambda: bools(B, 1, S, S), enable_gqa=True),
    "one query": Case(heads(length=1), heads()),
    "one query and a mask": Case(
        heads(length=1), heads(), mask=lambda: bools(B, 1, 2, S)[:, :, :1]
    ),
    "S = 1": Case(heads(length=1), heads(length=1), is_causal=True),
    "empty batch": Case(heads(0), heads(0), is_causal=True),
    "empty batch and a mask": Case(heads(0), heads(0), mask=lambda: bools(1, 1, S, S)),
    "odd head_dim": Case(heads(dim=7), heads(dim=7), is_causal=True),
    "head_dim of one": Case(heads(dim=1), heads(dim=1), is_causal=True),
    "value head_dim": Case(heads(), heads(), heads(dim=3), is_causal=True),
    "value head_dim and a mask": Case(heads(), heads(), heads(dim=3), lambda: bools(S, S)),
    "cross attention": Case(heads(), heads(length=9), mask=lambda: bools(B, 1, S, 9)),
    "(B, 1, S, S) mask": Case(mask=lambda: bools(B, 1, S, S)),
    "(1, 1, S, S) mask": Case(mask=lambda: bools(1, 1, S, S)),
    "(S, S) mask": Case(mask=lambda: bools(S, S)),
    "(1, S) mask": Case(mask=lambda: bools(2, S)[:1]),
    "(heads, S, S) mask": Case(mask=lambda: bools(HEADS, S, S)),
    "(B, heads, S, S) mask": Case(mask=lambda: bools(B, HEADS, S, S)),
    "(B, heads, 1, S) mask": Case(mask=lambda: bools(B, HEADS, 2, S)[:, :, :1]),
    "float mask": Case(mask=lambda: normal(B, 1, S, S, seed=5)),
    "float mask with rows of -inf": Case(
        mask=lambda: normal(B, 1, S, S, seed=5).masked_fill(~bools(B, 1, S, S), -math.inf)
    ),
    "float mask for all": Case(mask=lambda: normal(S, S, seed=5)),
    "keys for all rows": Case(heads(), heads(1), mask=lambda: bools(B, 1, S, S)),
}


def make(
    case: Case, batched: Sequence[bool], dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    """Query, key, value and mask; those that are ``batched`` have N examples in front."""
    inputs: list[Tensor | None] = []
    for i, (shape, many) in enumerate(zip(case.shapes, batched, strict=False)):
        inputs.append(normal(*((N,) if many else ()), *shape, seed=i, dtype=dtype))
    mask = None if case.mask is None else case.mask()
    if mask is not None and batched[3]:
        rolled = [mask.roll(i, -1) for i in range(N)]
        mask = torch.stack(rolled)
    return [*inputs, mask.to(dtype) if mask is not None and mask.is_floating_point() else mask]


def cotangent(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    query, _, value = case.shapes
    return normal(N, *query[:-1], value[-1], seed=9, dtype=dtype)


def weighted(operator: Any, case: Case) -> Callable[..., Tensor]:
    """A loss of one example that every output has a weight of its own in."""

    def loss(query: Tensor, key: Tensor, value: Tensor, mask: Any, weight: Tensor) -> Tensor:
        return (operator(query, key, value, mask, **case.options) * weight).sum()

    return loss


def argnums(inputs: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(inputs) if x is not None and x.is_floating_point())


def loop(
    case: Case, inputs: Sequence[Tensor | None], batched: Sequence[bool], weights: Tensor
) -> list[Tensor]:
    """Stock's gradients (N, ...), by an ordinary backward pass for each example."""
    wanted = argnums(inputs)
    rows = []
    for i in range(N):
        row = [x[i] if x is not None and b else x for x, b in zip(inputs, batched, strict=True)]
        row = [x.clone().requires_grad_() if j in wanted else x for j, x in enumerate(row)]
        value = weighted(stock, case)(*row, weights[i])
        leaves = [row[j] for j in wanted]
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        rows.append(
            [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
        )
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def dims(inputs: Sequence[Tensor | None], batched: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(0 if x is not None and b else None for x, b in zip(inputs, batched, strict=True))


def assert_rows(
    found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype = torch.float64
) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        for i in range(len(b) if b.numel() else 0):
            # Where a row sees nothing its gradients are rounding alone: floor of 1e-3.
            assert error(a[i], b[i], 1e-3) <= GRADIENT_BAR[dtype]


ALL = (True, True, True, True)
SUBSETS = {
    "all": ALL,
    "query": (True, False, False, False),
    "key": (False, True, False, False),
    "value": (False, False, True, False),
    "mask": (False, False, False, True),
    "query, key and value": (True, True, True, False),
    "query and mask": (True, False, False, True),
}


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_every_example_are_the_loops(name: str, subset: str) -> None:
    case, batched = CASES[name], SUBSETS[subset]
    if subset == "mask" and case.mask is None:
        batched = (False, True, True, False)
    inputs, weights = make(case, batched), cotangent(case)
    gradients = grad(weighted(folded_sdpa, case), argnums(inputs))
    rows = vmap(gradients, (*dims(inputs, batched), 0))
    assert_rows(rows(*inputs, weights), loop(case, inputs, batched, weights))


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "float mask", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_good_as_stocks(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs, weights = make(case, ALL, dtype), cotangent(case, dtype)
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    truth = loop(case, exact, ALL, weights.double())
    expected = loop(case, inputs, ALL, weights)
    gradients = grad(weighted(folded_sdpa, case), argnums(inputs))
    found = vmap(gradients, (*dims(inputs, ALL), 0))(*inputs, weights)
    for a, b, c in zip(found, expected, truth, strict=True):
        assert a.dtype == dtype
        # Both round: as far from the truth as stock, or within an ulp of it.
        bar = 2 * error(b, c) + torch.finfo(dtype).eps
        assert error(a, c) <= bar


# --- transforms


def setting(name: str = "causal") -> tuple[Case, list[Tensor | None], Tensor, list[Tensor]]:
    case = CASES[name]
    inputs, weights = make(case, ALL), cotangent(case)
    return case, inputs, weights, loop(case, inputs, ALL, weights)


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "(S, S) mask", "float mask"])
@pytest.mark.parametrize("dim", [1, 2, -1])
def test_the_mapped_dimension_can_be_anywhere(name: str, dim: int) -> None:
    case, inputs, weights, expected = setting(name)
    moved = [None if x is None else x.movedim(0, dim) for x in inputs]
    where = tuple(None if x is None else dim for x in inputs)
    rows = vmap(grad(weighted(folded_sdpa, case), argnums(inputs)), (*where, 0))
    assert_rows(rows(*moved, weights), expected)


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "float mask", "gqa"])
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_chunks(name: str, chunk_size: int) -> None:
    case, inputs, weights, expected = setting(name)
    where = dims(inputs, ALL)
    gradients = grad(weighted(folded_sdpa, case), argnums(inputs))
    rows = vmap(gradients, (*where, 0), chunk_size=chunk_size)
    assert_rows(rows(*inputs, weights), expected)


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "(S, S) mask", "float mask"])
def test_grad_of_vmap(name: str) -> None:
    case, inputs, weights, expected = setting(name)
    where = dims(inputs, ALL)

    def total(*inputs: Any) -> Tensor:
        return vmap(weighted(folded_sdpa, case), (*where, 0))(*inputs, weights).sum()

    assert_rows(grad(total, argnums(inputs))(*inputs), expected)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("name", ["(B, 1, S, S) mask", "float mask", "float mask for all"])
def test_grad_of_vmap_adds_up_what_is_shared(name: str, subset: str) -> None:
    case, batched = CASES[name], SUBSETS[subset]
    inputs, weights = make(case, batched), cotangent(case)
    rows = loop(case, inputs, batched, weights)
    wanted = argnums(inputs)
    expected = [x if batched[i] else x.sum(0) for i, x in zip(wanted, rows, strict=True)]

    def total(*inputs: Any) -> Tensor:
        return vmap(weighted(folded_sdpa, case), (*dims(inputs, batched), 0))(
            *inputs, weights
        ).sum()

    found = grad(total, wanted)(*inputs)
    assert_rows([x[None] for x in found], [x[None] for x in expected])


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "(S, S) mask", "float mask"])
@pytest.mark.parametrize("where", ["both", "queries outside", "queries inside"])
def test_nested_vmap(name: str, where: str) -> None:
    case = CASES[name]
    inputs, weights = make(case, ALL), cotangent(case)
    wanted = argnums(inputs)
    gradients = grad(weighted(folded_sdpa, case), wanted)
    there = tuple(None if x is None else 0 for x in inputs[1:])
    if where == "both":  # the keys of example j + 1 with the queries of example i
        inner, outer = (0, *there, 0), (None, *there, None)
        many = [None if x is None else torch.stack([x, x.roll(1, 0)]) for x in inputs[1:]]
        found = vmap(vmap(gradients, inner), outer)(inputs[0], *many, weights)
        rows = [
            loop(case, [inputs[0], *(None if x is None else x[i] for x in many)], ALL, weights)
            for i in range(2)
        ]
        expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    else:
        none = (None,) * 3
        maps = [(0, *none, None), (None, *there, 0)]
        outer, inner = maps if where == "queries outside" else maps[::-1]
        found = vmap(vmap(gradients, inner), outer)(*inputs, weights)
        if where == "queries inside":
            found = [x.transpose(0, 1) for x in found]
        rows = [
            loop(case, [inputs[0][i], *inputs[1:]], (False, *ALL[1:]), weights) for i in range(N)
        ]
        expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    for a, b in zip(found, expected, strict=True):
        assert_rows(a.flatten(0, 1)[None], b.flatten(0, 1)[None])


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "float mask"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_jacrev(name: str, chunk_size: int | None) -> None:
    case, inputs, _, _ = setting(name)
    wanted = argnums(inputs)

    def reduced(operator: Any) -> Callable[..., Tensor]:
        return lambda *inputs: operator(*inputs, **case.options).sum((1, -1))  # (B, S)

    where = dims(inputs, ALL)
    found = vmap(jacrev(reduced(folded_sdpa), wanted, chunk_size=chunk_size), where)(*inputs)
    for i in range(N):
        row = [None if x is None else x[i] for x in inputs]
        leaves = [x.clone().requires_grad_() if j in wanted else x for j, x in enumerate(row)]
        output = reduced(stock)(*leaves)
        for b in range(B):
            for s in range(S):
                wanted_leaves = [leaves[j] for j in wanted]
                grads = torch.autograd.grad(output[b, s], wanted_leaves, retain_graph=True)
                for a, expected in zip(found, grads, strict=True):
                    assert error(a[i, b, s], expected, 1e-3) <= GRADIENT_BAR[torch.float64]


@pytest.mark.parametrize("shared", ["neither", "gradient"])
def test_a_pullback_can_be_called_again_and_after_its_transform(shared: str) -> None:
    case, inputs, weights, expected = setting()
    if shared == "gradient":
        weights = weights[:1].expand_as(weights)  # also a gradient that is stride 0
        expected = loop(case, inputs, ALL, weights)
        weight, dim = weights[0], None
    else:
        weight, dim = weights, 0

    def rows(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Any:
        pullback = vjp(lambda *x: folded_sdpa(*x, **case.options), query, key, value)[1]
        first, second = pullback(weight), pullback(2 * weight)
        return first, second

    first, second = vmap(rows, (0, 0, 0, dim))(*inputs[:3], weight)
    assert_rows(first, expected)
    assert_rows(second, [2 * x for x in expected])

    mapped = vmap(lambda *x: folded_sdpa(*x, **case.options))
    pullback = vjp(mapped, *inputs[:3])[1]
    assert_rows(pullback(weights), expected)
    many = vmap(pullback)(torch.stack([weights, 2 * weights]))
    assert_rows([x[1] for x in many], [2 * x for x in expected])


def test_autograd_beneath_the_transform() -> None:
    case, inputs, weights, expected = setting("(B, 1, S, S) mask")
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    output = vmap(lambda *x: folded_sdpa(*x, **case.options))(*leaves, inputs[3])
    found = torch.autograd.grad(output, leaves, weights, retain_graph=True)
    assert_rows(found, expected)
    several = torch.stack([weights, 2 * weights])
    many = torch.autograd.grad(output, leaves, several, is_grads_batched=True)
    assert_rows([x[1] for x in many], [2 * x for x in expected])


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_strides_of_what_comes_in(kind: str) -> None:
    case = CASES["causal"]
    inputs, weights = make(case, ALL), cotangent(case)
    if kind == "expanded":
        weights = weights[:, :1, :1, :1, :1].expand_as(weights)
    elif kind == "transposed":
        weights = weights.transpose(2, 3).contiguous().transpose(2, 3)
        inputs[:3] = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs[:3]]
    else:
        wide = [torch.cat([x, x], -1) for x in (*inputs[:3], weights)]
        *inputs[:3], weights = (x[..., ::2] for x in wide)
    expected = loop(case, inputs, ALL, weights)
    # The weights are the gradient itself, strides and all.
    output, pullback = vjp(
        lambda *x: vmap(lambda *x: folded_sdpa(*x, **case.options))(*x), *inputs[:3]
    )
    assert output.shape == weights.shape
    assert_rows(pullback(weights), expected)


def stock_differentiates_in_inference_mode() -> bool:
    """Tell whether functorch does at all."""
    with torch.inference_mode():
        return bool((vmap(grad(lambda x: (x * x).sum()))(torch.ones(2, 3)) == 2).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode: Any) -> None:
    if mode is torch.inference_mode and not stock_differentiates_in_inference_mode():
        pytest.skip("functorch of this torch has no gradients in inference mode")
    case, inputs, weights, expected = setting()
    gradients = vmap(grad(weighted(folded_sdpa, case), (0, 1, 2)), (0, 0, 0, None, 0))
    with mode():
        found = gradients(*inputs, weights)
        assert_rows(found, expected)
        made_here = [x * 1 for x in inputs[:3]]
        assert_rows(gradients(*made_here, None, weights), expected)
        output = vmap(lambda *x: folded_sdpa(*x, **case.options))(*made_here)
    assert same_bits(
        output, stock(*(x.flatten(0, 1) for x in inputs[:3]), is_causal=True).view_as(output)
    )
    assert not any(x.requires_grad for x in (*found, output))


@pytest.mark.parametrize("subset", ["query", "key", "value", "query, value"])
@pytest.mark.parametrize("name", ["causal", "float mask"])
def test_inputs_from_inference_mode_that_nobody_differentiates_by(name: str, subset: str) -> None:
    case, inputs, weights, _ = setting(name)
    numbers = tuple(("query", "key", "value").index(n) for n in subset.split(", "))
    rows = loop(case, inputs, ALL, weights)
    with torch.inference_mode():
        given = [x if x is None or i in numbers else x * 1 for i, x in enumerate(inputs)]
    assert sum(x is not None and x.is_inference() for x in given) >= 1
    gradients = vmap(grad(weighted(folded_sdpa, case), numbers), (*dims(given, ALL), 0))
    expected = [rows[i] for i in numbers]
    assert_rows(gradients(*given, weights), expected)
    if stock_differentiates_in_inference_mode():
        with torch.inference_mode():
            assert_rows(gradients(*given, weights), expected)


def test_functorchs_ban_on_saved_tensor_hooks_stays() -> None:
    query, nothing = normal(N, *heads()), torch.ones((), dtype=torch.float64)

    def loss(query: Tensor, key: Tensor) -> Tensor:
        for tried in (key, key[..., :3]):
            try:
                output = folded_sdpa(query, tried, tried)
            except RuntimeError:
                assert tried is not key  # a head_dim that does not fit
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                torch.autograd.graph.save_on_cpu().__enter__()
        return output.sum() * nothing

    vmap(grad(loss))(query, query)


# --- one fused call


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def attention(self) -> list[str]:
        return [name for name in self.names if "dot_product" in name]


def batched_pass(case: Case, inputs: Sequence[Tensor | None], weights: Tensor) -> list[Tensor]:
    """Stock's ordinary forward and backward pass of the folded batch."""
    folded = [None if x is None else x.flatten(0, 1) for x in inputs]
    leaves = [x.detach().requires_grad_() for x in folded[:3]]
    with torch.enable_grad():
        output = stock(*leaves, folded[3], **case.options)
    return list(torch.autograd.grad(output, leaves, weights.flatten(0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "gqa", "S = 1"])
@pytest.mark.parametrize("nested", [False, True])
def test_one_fused_call_each_way_that_is_the_folded_batchs(
    name: str, dtype: torch.dtype, nested: bool
) -> None:
    case = CASES[name]
    inputs, weights = make(case, ALL, dtype), cotangent(case, dtype)
    with Calls() as plain:
        expected = batched_pass(case, inputs, weights)
    gradients = vmap(grad(weighted(folded_sdpa, case), (0, 1, 2)), (*dims(inputs, ALL), 0))
    if nested:
        gradients = vmap(gradients, (*dims(inputs, ALL), 0))
        inputs, weights = [None if x is None else x[None] for x in inputs], weights[None]
    with torch.no_grad(), Calls() as calls:
        found = gradients(*inputs, weights)
    assert len(calls.attention()) == 2
    assert calls.attention() == plain.attention()
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a.reshape(b.shape), b)


def test_nothing_of_the_callers_is_written() -> None:
    case, inputs, weights, _ = setting("float mask")
    before = [x.clone() for x in (*inputs, weights)]
    versions = [x._version for x in (*inputs, weights)]
    vmap(grad(weighted(folded_sdpa, case), (0, 1, 2, 3)))(*inputs, weights)
    assert same_bits([*inputs, weights], before)
    assert [x._version for x in (*inputs, weights)] == versions
    assert [x.shape for x in (*inputs, weights)] == [x.shape for x in before]
    assert not any(x.requires_grad for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "float mask"])
def test_a_row_does_not_depend_on_its_neighbours(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs, weights = make(case, ALL, dtype), cotangent(case, dtype)
    rows = vmap(grad(weighted(folded_sdpa, case), (0, 1, 2)), (*dims(inputs, ALL), 0))
    found = rows(*inputs, weights)
    for x in (*inputs[:3], weights):
        x[1:] *= 1e4
    assert same_bits([x[0] for x in rows(*inputs, weights)], [x[0] for x in found])


# --- memory


def layers(operator: Any, mask: Tensor | None) -> Callable[..., Tensor]:
    """A loss through layers of attention that have keys and values of their own."""

    def loss(query: Tensor, *rows: Tensor) -> Tensor:
        for key, value in zip(rows[::2], rows[1::2], strict=True):
            query = operator(query * 1.5, key * 1.5, value * 1.5, mask, is_causal=mask is None)
        return (query * query).sum()

    return loss


def assert_no_more_memory(inputs: Sequence[Tensor], mask: Tensor | None) -> None:
    """Compare with an ordinary forward and backward pass of the folded batch."""
    depth = len(inputs) // 2

    def plain() -> None:
        leaves = [x.flatten(0, 1).detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            value = layers(stock, mask)(*leaves)
        torch.autograd.grad(value, leaves)

    def ours() -> None:
        vmap(grad(layers(folded_sdpa, mask), tuple(range(1 + 2 * depth))))(*inputs)

    peaks = []
    for run in (plain, ours):
        with opake.runtime(), peak_memory() as read, torch.no_grad():
            for x in inputs if mask is None else (*inputs, mask):
                x.detach()  # count what goes in on both sides
            run()
        peaks.append(read())
    assert peaks[1] <= peaks[0] + 8 * N  # the losses, and the gradients of the losses


def test_peak_memory_is_that_of_a_batched_pass() -> None:
    shape, depth = (1, 2, 64, 8), 6
    inputs = [normal(N, *shape, seed=i, dtype=torch.float32) for i in range(1 + 2 * depth)]
    assert_no_more_memory(inputs, None)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1, 128, 128)])
def test_a_mask_for_all_examples_is_not_repeated(shape: tuple[int, ...]) -> None:
    inputs = [normal(N, 2, 1, 128, 2, seed=i, dtype=torch.float32) for i in range(3)]
    assert_no_more_memory(inputs, bools(*shape))
    assert_no_more_memory(inputs, normal(*shape, dtype=torch.float32))


class Watch(TorchDispatchMode):
    """Refers to the storages that torch's operator returns, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if "dot_product" in func.overloadpacket.__name__:
            self.outputs += [weakref.ref(x.untyped_storage()) for x in output]
        return output


def test_nothing_outlives_the_last_reference() -> None:
    case, inputs, weights, _ = setting()
    gc.collect()
    gc.disable()  # no cycle may be left for it
    try:
        with Watch() as watch:
            output, pullback = vjp(vmap(lambda *x: folded_sdpa(*x, **case.options)), *inputs[:3])
            pullback(weights)
        assert any(ref() is not None for ref in watch.outputs)
        del output, pullback
        assert [ref() for ref in watch.outputs if ref() is not None] == []
    finally:
        gc.enable()


# --- second order and forward mode

Rows = tuple[Tensor, ...]
Loss = Callable[[Rows], Tensor]


def dot(a: Rows, b: Rows) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def by_autograd(loss: Loss, x: Rows, u: Rows) -> Rows:
    leaves = tuple(t.clone().requires_grad_() for t in x)
    return torch.autograd.grad(dot(vmap(grad(loss))(leaves), u), leaves)


def by_jacobian(of: Callable[[Loss], Any]) -> Callable[[Loss, Rows, Rows], Rows]:
    def product(loss: Loss, x: Rows, u: Rows) -> Rows:
        blocks = vmap(of(loss))(x)
        rows = []
        for a, row in zip(x, blocks, strict=True):
            columns = [
                torch.einsum("nab,nb->na", block.reshape(N, a[0].numel(), -1), b.reshape(N, -1))
                for block, b in zip(row, u, strict=True)
            ]
            rows.append(torch.stack(columns).sum(0).view_as(a))
        return tuple(rows)

    return product


PRODUCTS: dict[str, Callable[[Loss, Rows, Rows], Rows]] = {
    "vmap of grad of grad": lambda loss, x, u: vmap(
        lambda x, u: grad(lambda x: dot(grad(loss)(x), u))(x)
    )(x, u),
    "grad of vmap of grad": lambda loss, x, u: grad(lambda x: dot(vmap(grad(loss))(x), u))(x),
    "vmap of jvp of grad": lambda loss, x, u: vmap(lambda x, u: jvp(grad(loss), (x,), (u,))[1])(
        x, u
    ),
    "jvp of vmap of grad": lambda loss, x, u: jvp(vmap(grad(loss)), (x,), (u,))[1],
    "vmap of grad of jvp": lambda loss, x, u: vmap(
        lambda x, u: grad(lambda x: jvp(loss, (x,), (u,))[1])(x)
    )(x, u),
    "vjp of vmap of grad": lambda loss, x, u: vjp(vmap(grad(loss)), x)[1](u)[0],
    "autograd through vmap of grad": by_autograd,
    "hessian": by_jacobian(hessian),
    "jacrev of grad": by_jacobian(lambda loss: jacrev(grad(loss))),
    "jacfwd of grad": by_jacobian(lambda loss: jacfwd(grad(loss))),
}
"""Ways to multiply the Hessian of each example with a direction."""


def small(name: str) -> tuple[Callable[[Any], Loss], Rows]:
    """A loss of one example for an operator, and what it is a function of, for N examples."""
    case = CASES[name]
    shapes = [(1, count, 3, 2) for _, count, _, _ in case.shapes]
    mask = None if case.mask is None else case.mask()[:1, :, :3, :3]
    inputs = [normal(N, *shape, seed=i) for i, shape in enumerate(shapes)]
    weight = normal(*shapes[0], seed=9)
    if mask is not None and mask.is_floating_point():
        inputs.append(torch.stack([mask * (i + 1) for i in range(N)]))

    def loss_by(operator: Any) -> Loss:
        def loss(x: Rows) -> Tensor:
            query, key, value, *rest = x
            given = rest[0] if rest else mask
            return (operator(query, key, value, given, **case.options) * weight).sum()

        return loss

    return loss_by, tuple(inputs)


def plain_products(loss_by: Callable[[Any], Loss], x: Rows, u: Rows) -> Rows:
    """The Hessian of each example times a direction, by autograd through stock's plain math."""
    rows = []
    for i in range(N):
        leaves = tuple(t[i].clone().requires_grad_() for t in x)
        with sdpa_kernel(SDPBackend.MATH):
            value = loss_by(stock)(leaves)
        first = torch.autograd.grad(value, leaves, create_graph=True)
        rows.append(torch.autograd.grad(dot(first, tuple(t[i] for t in u)), leaves))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


@forward_mode
@pytest.mark.parametrize("order", PRODUCTS)
@pytest.mark.parametrize(
    "name", ["causal", "(B, 1, S, S) mask", "gqa", "float mask", "float mask with rows of -inf"]
)
def test_second_order_is_that_of_plain_math(name: str, order: str) -> None:
    loss_by, x = small(name)
    u = tuple(normal(*t.shape, seed=20 + i) for i, t in enumerate(x))
    assert_rows(PRODUCTS[order](loss_by(folded_sdpa), x, u), plain_products(loss_by, x, u))


def test_third_order_is_that_of_plain_math() -> None:
    loss_by, x = small("causal")

    def third(operator: Any) -> Callable[[Rows], Rows]:
        def second(x: Rows) -> Tensor:
            return dot(grad(loss_by(operator))(x), tuple(t.sin() for t in x))

        return grad(lambda x: dot(grad(second)(x), tuple(t.cos() for t in x)))

    with sdpa_kernel(SDPBackend.MATH):
        rows = [third(stock)(tuple(t[i] for t in x)) for i in range(N)]
    expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    assert_rows(vmap(third(folded_sdpa))(x), expected)


@forward_mode
@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "gqa", "float mask"])
def test_forward_mode_is_that_of_plain_math(name: str) -> None:
    loss_by, x = small(name)
    u = tuple(normal(*t.shape, seed=20 + i) for i, t in enumerate(x))
    slopes = []
    for i in range(N):
        leaves = tuple(t[i].clone().requires_grad_() for t in x)
        grads = torch.autograd.grad(loss_by(stock)(leaves), leaves)
        slopes.append(dot(grads, tuple(t[i] for t in u)))
    expected, loss = torch.stack(slopes), loss_by(folded_sdpa)
    for found in (
        vmap(lambda x, u: jvp(loss, (x,), (u,))[1])(x, u),
        jvp(vmap(loss), (x,), (u,))[1],
        vmap(lambda x, u: dot(jacfwd(loss)(x), u))(x, u),
    ):
        assert error(found, expected) <= GRADIENT_BAR[torch.float64]


@forward_mode
def test_forward_mode_through_a_pullback_made_before() -> None:
    loss_by, x = small("(B, 1, S, S) mask")
    pullback = vjp(vmap(loss_by(folded_sdpa)), x)[1]
    (found,), (tangent,) = jvp(
        pullback, (torch.ones(N).double(),), (torch.full((N,), 2.0).double(),)
    )
    assert_rows(found, vmap(grad(loss_by(folded_sdpa)))(x))
    assert_rows(tangent, [2 * t for t in found])


# --- dropout

P = 0.4


def dropped(seed: int, operator: Any, query: Tensor, key: Tensor, **options: Any) -> Tensor:
    """Attention probabilities after dropout, (..., S, S): the values are the unit vectors."""
    torch.manual_seed(seed)
    eye = torch.eye(S, dtype=query.dtype).expand(B, HEADS, S, S)
    return operator(query, key, eye, dropout_p=P, **options)


def test_different_dropout_is_drawn_for_every_example() -> None:
    query, key = normal(1, *heads()).repeat(N, 1, 1, 1, 1), normal(*heads(), seed=1)
    probabilities = (query @ key.mT / math.sqrt(D)).softmax(-1)

    def found(seed: int, *where: int | None) -> Tensor:
        rows = query if where[0] == 0 else query[0]
        with Calls() as calls:
            out = dropped(
                seed,
                lambda *x, **options: vmap(
                    lambda *x: folded_sdpa(*x, **options), (*where, None), randomness="different"
                )(*x),
                rows,
                key,
            )
        assert calls.names.count("bmm") == 2  # with dropout, torch's on the CPU is plain math
        return out

    kept = found(1, 0, None) / probabilities
    torch.testing.assert_close(kept, (kept > 0.5).double() / (1 - P))
    assert 0.25 < (kept < 0.5).double().mean() < 0.55  # 600 draws: seven standard deviations
    for i in range(N):
        for j in range(i):
            assert not same_bits(kept[i], kept[j])
    assert same_bits(found(1, 0, None) / probabilities, kept)
    assert not same_bits(found(2, 0, None) / probabilities, kept)


def test_the_gradient_is_of_what_was_drawn() -> None:
    query, key = normal(N, *heads()), normal(N, *heads(), seed=1)
    weight = normal(N, B, HEADS, S, S, seed=2)

    def value(operator: Any) -> Callable[..., Tensor]:
        return lambda *x: (dropped(1, operator, *x[:2]) * x[2]).sum()

    rows = vmap(lambda *x: folded_sdpa(*x[:2], x[2], dropout_p=P), randomness="different")

    def ours(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        eye = torch.eye(S, dtype=query.dtype).expand(B, HEADS, S, S)
        return (folded_sdpa(query, key, eye, dropout_p=P) * weight).sum()

    torch.manual_seed(1)
    found = vmap(grad(ours, (0, 1)), randomness="different")(query, key, weight)
    drawn = dropped(1, lambda q, k, v, dropout_p: rows(q, k, v.expand(N, *v.shape)), query, key)
    leaves = [x.clone().requires_grad_() for x in (query, key)]
    probabilities = (leaves[0] @ leaves[1].mT / math.sqrt(D)).softmax(-1)
    kept = (drawn != 0).double() / (1 - P)
    assert_rows([drawn], [(probabilities * kept).detach()])
    assert_rows(found, torch.autograd.grad((probabilities * kept * weight).sum(), leaves))


@pytest.mark.parametrize("name", ["causal", "(B, 1, S, S) mask", "gqa"])
def test_the_same_dropout_is_that_of_a_loop_that_is_reseeded(name: str) -> None:
    case = CASES[name]
    case = Case(*case.shapes, case.mask, **case.options, dropout_p=P)
    inputs, weights = make(case, ALL), cotangent(case)
    expected = []
    for i in range(N):
        torch.manual_seed(3)
        row = [None if x is None else x[i : i + 1] for x in inputs]
        expected.append(loop_of_one(case, row, weights[i : i + 1]))
    torch.manual_seed(3)
    gradients = grad(weighted(folded_sdpa, case), (0, 1, 2))
    rows = vmap(gradients, (*dims(inputs, ALL), 0), randomness="same")
    found = rows(*inputs, weights)
    assert_rows(found, [torch.cat(column) for column in zip(*expected, strict=True)])


def test_without_vmap_dropout_is_stocks() -> None:
    case = Case(is_causal=True, dropout_p=P)
    row, weight = [x[0] for x in make(case, ALL)[:3]], cotangent(case)[0]
    torch.manual_seed(3)
    found = grad(weighted(folded_sdpa, case), (0, 1, 2))(*row, None, weight)
    torch.manual_seed(3)
    expected = loop_of_one(case, [*(x[None] for x in row), None], weight[None])
    assert_rows([x[None] for x in found], expected)


def test_random_numbers_are_refused_by_default() -> None:
    inputs = make(CASES["plain"], ALL)[:3]
    for where in ((0, 0, 0), (0, None, None)):
        rows = [x if d == 0 else x[0] for x, d in zip(inputs, where, strict=True)]
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda *x: folded_sdpa(*x, dropout_p=P), where)(*rows)


def test_what_is_not_mapped_is_dropped_as_the_randomness_says() -> None:
    query = normal(N, *heads())

    def row(query: Tensor, weight: Tensor) -> Tensor:
        return folded_sdpa(query, query, query, bools(S, S), dropout_p=P) * weight

    ones = torch.ones(2, dtype=query.dtype)
    for inner in ("same", "different"):
        rows = vmap(row, (None, 0), randomness=inner)
        found = rows(query[0], ones)
        assert same_bits(found[0], found[1]) == (inner == "same")
        for outer in ("same", "different"):
            twice = query[:1].repeat(2, 1, 1, 1, 1)
            found = vmap(rows, (0, None), randomness=outer)(twice, ones)
            assert same_bits(found[:, 0], found[:, 1]) == (inner == "same")
            assert same_bits(found[0], found[1]) == (outer == "same")


def test_a_second_derivative_through_dropout_is_refused() -> None:
    inputs = make(CASES["plain"], ALL)[:3]
    loss = weighted(folded_sdpa, Case(dropout_p=P))
    first = lambda *x: grad(loss)(*x, None, 1.0).pow(2).sum()  # noqa: E731
    with pytest.raises(UnsupportedAttention, match="dropout"):
        vmap(grad(first), randomness="different")(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    total = vmap(first, randomness="different")(*leaves).sum()
    with pytest.raises(UnsupportedAttention, match="dropout"):
        total.backward()


def on_the_cpu(block: Any, *inputs: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(*inputs)


KEEPERS: dict[str, Callable[..., Tensor]] = {
    "checkpoint": lambda *x: checkpoint(*x, use_reentrant=False),
    "reentrant checkpoint": lambda *x: checkpoint(*x, use_reentrant=True),
    "save on the CPU": on_the_cpu,
}


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_what_keeps_or_recomputes_saved_tensors(keeper: str, dropout_p: float) -> None:
    case = Case(is_causal=True, dropout_p=dropout_p)
    inputs, weights = make(case, ALL)[:3], cotangent(case)
    block = vmap(lambda *x: folded_sdpa(*x, **case.options), randomness="different")
    found = []
    for keep in (lambda block, *x: block(*x), KEEPERS[keeper]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(7)
        keep(block, *leaves).backward(weights)
        found.append([x.grad for x in leaves])
    assert same_bits(found[0], found[1])


def test_a_checkpoint_keeps_no_more_than_its_inputs() -> None:
    shape = (N, 1, 2, 64, 8)
    leaves = [normal(*shape, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    block = vmap(lambda *x: folded_sdpa(*(2 * x for x in x), is_causal=True))
    with Watch() as watch:
        output = checkpoint(block, *leaves, use_reentrant=False)
    kept = [ref for ref in watch.outputs if ref() is not None]
    assert [ref() for ref in kept] == [output.untyped_storage()]
    with Calls() as calls:
        output.sum().backward()
    assert len(calls.attention()) == 2  # once more forward, and once backward


def loop_of_one(case: Case, row: Sequence[Tensor | None], weight: Tensor) -> list[Tensor]:
    leaves = [x[0].clone().requires_grad_() for x in row[:3]]
    mask = None if row[3] is None else row[3][0]
    grads = torch.autograd.grad(weighted(stock, case)(*leaves, mask, weight[0]), leaves)
    return [x[None] for x in grads]


# --- what transformers does around the operator


class Attention(torch.nn.Module):
    """The attributes of an attention module that transformers' function reads."""

    def __init__(self, groups: int = 1, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = is_causal


def float_mask(*shape: int) -> Tensor:
    return normal(*shape, seed=5).masked_fill(~bools(*shape), torch.finfo(torch.float64).min)


CONTRACTS: dict[str, tuple[Attention, Case]] = {
    "causal by the module": (Attention(), Case(heads(1), heads(1))),
    "not causal by the module": (Attention(is_causal=False), Case(heads(1), heads(1))),
    "causal by the call": (Attention(is_causal=False), Case(heads(1), heads(1), is_causal=True)),
    "not causal by the call": (Attention(), Case(heads(1), heads(1), is_causal=False)),
    "no groups": (torch.nn.Module(), Case(heads(1), heads(1))),
    "groups": (Attention(2), Case(heads(1), heads(1, 2))),
    "groups and a mask": (
        Attention(2),
        Case(heads(1), heads(1, 2), mask=lambda: bools(1, 1, S, S)),
    ),
    "groups and a float mask": (
        Attention(2),
        Case(heads(1), heads(1, 2), mask=lambda: float_mask(1, 1, S, S)),
    ),
    "groups and a wide head": (Attention(2), Case(heads(1, dim=260), heads(1, 2, dim=260))),
    "groups and one query": (
        Attention(2),
        Case(heads(1, length=1), heads(1, 2), mask=lambda: bools(1, HEADS, 2, S)[:, :, :1]),
    ),
    "one query": (Attention(), Case(heads(1, length=1), heads(1))),
    "room for more keys": (Attention(), Case(heads(1), heads(1, length=9))),
    "scaling": (Attention(), Case(heads(1), heads(1), scaling=0.2)),
    "what it ignores": (Attention(), Case(heads(1), heads(1), sliding_window=3, use_cache=False)),
    "position bias": (
        Attention(),
        Case(heads(1), heads(1), position_bias=normal(1, HEADS, S, S, seed=6)),
    ),
}


@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("with_batch", [True, False], ids=["B 1", "B 2"])
def test_what_transformers_does_around_the_call_stays(name: str, with_batch: bool) -> None:
    module, case = CONTRACTS[name]
    if not with_batch:
        case = Case(*((2, *shape[1:]) for shape in case.shapes), case.mask, **case.options)
    inputs = make(case, ALL)
    query, _, value = case.shapes
    weights = normal(N, query[0], query[2], query[1], value[3], seed=9)
    bias = "position_bias" in case.options

    def loss(attention: Any) -> Callable[..., Tensor]:
        def scalar(query: Tensor, key: Tensor, value: Tensor, mask: Any, weight: Tensor) -> Tensor:
            output, nothing = attention(module, query, key, value, mask, **case.options)
            assert nothing is None
            assert output.is_contiguous()
            return (output * weight).sum()

        return scalar

    with Calls() as calls:
        rows = vmap(grad(loss(sdpa), (0, 1, 2)), (*dims(inputs, ALL), 0))
        found = rows(*inputs, weights)
    assert len(calls.attention()) == 2 or bias or name == "groups and a wide head"
    expected = []
    for i in range(N):
        row = [None if x is None else x[i] for x in inputs]
        leaves = [x.clone().requires_grad_() for x in row[:3]]
        value = loss(sdpa_attention.sdpa_attention_forward)(*leaves, row[3], weights[i])
        expected.append(torch.autograd.grad(value, leaves))
    assert_rows(found, [torch.stack(column) for column in zip(*expected, strict=True)])


def test_a_learned_position_bias_has_a_gradient_for_every_example() -> None:
    inputs = make(Case(heads(1), heads(1)), ALL)[:3]
    bias = normal(1, HEADS, S, S, seed=6)

    def loss(attention: Any, bias: Tensor, *inputs: Tensor) -> Tensor:
        return attention(Attention(), *inputs, None, position_bias=bias)[0].pow(2).sum()

    found = vmap(grad(lambda *x: loss(sdpa, *x)), (None, 0, 0, 0))(bias, *inputs)
    for i in range(N):
        leaf = bias.clone().requires_grad_()
        value = loss(sdpa_attention.sdpa_attention_forward, leaf, *(x[i] for x in inputs))
        assert error(found[i], torch.autograd.grad(value, leaf)[0]) <= GRADIENT_BAR[torch.float64]


def test_what_stock_refuses_is_refused() -> None:
    query = normal(*heads(1))
    messages = []
    for call in (
        lambda: sdpa_attention.sdpa_attention_forward(Attention(), *3 * [query], None, softcap=2.0),
        lambda: vmap(lambda x: sdpa(Attention(), x, x, x, None, softcap=2.0)[0])(query[None]),
    ):
        try:
            call()
            messages.append("")
        except ValueError as refused:
            messages.append(str(refused))
    assert messages[0] == messages[1]


def test_outside_transforms_transformers_own_function_runs(monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(
        sdpa_attention, "sdpa_attention_forward", lambda *x, **options: seen.append((x, options))
    )
    sdpa("module", *(torch.ones(1, 1, 1, 1) for _ in range(3)), None, dropout=0.1)  # type: ignore[arg-type]
    assert seen[0][0][0] == "module"
    assert seen[0][1] == {"dropout": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_reaches_the_operator(dtype: torch.dtype) -> None:
    shape = heads(1)
    query, key = (normal(N, *shape, seed=i, dtype=torch.float32) for i in range(2))
    value = normal(N, *shape, seed=2, dtype=dtype)
    masks = [None, bools(N, 1, 1, S, S), normal(N, 1, 1, S, S, seed=5, dtype=torch.float32)]
    for mask in masks:

        def loss(attention: Any, *inputs: Any) -> Tensor:
            output = attention(Attention(), *inputs)[0]
            assert output.dtype == torch.bfloat16
            return output.float().pow(2).sum()

        with torch.autocast("cpu", torch.bfloat16):
            rows = vmap(
                grad(lambda *x: loss(sdpa, *x), (0, 1, 2)), (0, 0, 0, None if mask is None else 0)
            )
            found = rows(query, key, value, mask)
            for i in range(N):
                leaves = [x[i].clone().requires_grad_() for x in (query, key, value)]
                given = None if mask is None else mask[i]
                scalar = loss(sdpa_attention.sdpa_attention_forward, *leaves, given)
                expected = torch.autograd.grad(scalar, leaves)
                assert same_bits([x[i] for x in found], list(expected))


@pytest.mark.parametrize("masked", [False, True])
def test_autocast_leaves_doubles_alone(masked: bool) -> None:
    model = zoo.tiny("llama", dtype=torch.float64)
    batch = zoo.batch(zoo.MIXED) if masked else zoo.batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_loop(model, batch)
        with opake.patched(model):
            found = per_example(model, batch, batched=False)
    assert_exact(found, expected)


def test_a_compiled_graph_is_whole() -> None:
    case = Case(heads(1), heads(1))
    inputs = make(case, ALL)[:3]

    def loss(*inputs: Tensor) -> Tensor:
        return sdpa(Attention(), *inputs, None)[0].pow(2).sum()

    rows = vmap(grad(loss, (0, 1, 2)))
    expected = rows(*inputs)
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a graph has stock's loop over examples
        assert_rows(torch.compile(rows, backend="eager", fullgraph=True)(*inputs), expected)


def test_threads_do_not_see_each_other() -> None:
    case, inputs, weights, expected = setting()
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        gradients = grad(weighted(folded_sdpa, case), (0, 1, 2))
        for _ in range(10):
            results[i] = vmap(gradients, (0, 0, 0, None, 0))(*inputs, (i + 1) * weights)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        assert_rows(results[i], [(i + 1) * x for x in expected])


def test_threads_share_a_pullback() -> None:
    # Large enough for a thread to spend its time in the operator's backward.
    case = Case(heads(length=64), heads(length=64), is_causal=True)
    inputs, weights = make(case, ALL), cotangent(case)
    expected = loop(case, inputs, ALL, weights)
    _, pullback = vjp(lambda *x: vmap(lambda *x: folded_sdpa(*x, **case.options))(*x), *inputs[:3])
    results: dict[int, list[Any]] = {i: [] for i in range(4)}
    interval = sys.getswitchinterval()

    def work(i: int) -> None:
        for _ in range(50):
            results[i].append(pullback((i + 1) * weights))

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in results]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for i, found in results.items():
        assert len(found) == 50
        for rows in found:
            assert_rows(rows, [(i + 1) * x for x in expected])
