"""Experts: every routing against a loop over tokens in fp64, and what they cost."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn import functional as F

from opake import kernels as K
from opake.errors import InvalidArgument, InvalidType
from opake.kernels import _moe, _moe_routing
from opake.kernels import moe as _found  # noqa: F401  (loads the file)
from opake.kernels._triton import Launch
from opake.patches.kernels import opake_moe

moe = K.moe
op = K.find("moe")
SMOOTH = (0, 1, 2, 4)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def made(
    ids: Tensor, experts: int, hidden: int = 20, inner: int = 12, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Arguments for a routing (tokens, K)."""
    g = torch.Generator().manual_seed(ids.numel())
    shapes = [(len(ids), hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), ids.shape]
    x, gate_up, down, weights = (torch.randn(s, generator=g).to(dtype) for s in shapes)
    return x, gate_up * hidden**-0.5, down * inner**-0.5, ids, weights


def loop(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, activation: str = "silu"
) -> Tensor:
    """What the operator is: token by token, expert by expert."""
    rows = []
    for token, experts, scales in zip(x, ids, weights, strict=True):
        row = torch.zeros_like(token)
        for e, scale in zip(experts.tolist(), scales, strict=True):
            gate, up = (gate_up[e] @ token).chunk(2)
            row = row + scale * (down[e] @ (ACTIVATIONS[activation](gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x * 1


def gradients(function: Any, args: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """The output and the gradients of a sum that weighs its numbers."""
    leaves = [x.detach().requires_grad_(i in SMOOTH) for i, x in enumerate(args)]
    out = function(*leaves, **options)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, [leaves[i] for i in SMOOTH], dout)]


def assert_as_the_loop(function: Any, args: Sequence[Tensor], **options: Any) -> None:
    found = gradients(function, args, **options)
    truth = gradients(loop, [x.double() if i != 3 else x for i, x in enumerate(args)], **options)
    floor = 1e-3 * max(x.abs().max().item() for x in truth)
    for a, b in zip(found, truth, strict=True):
        assert ((a - b).abs().max() / max(b.abs().max().item(), floor)) <= oracle.FP32_BAR


# ---- every routing

ROUTINGS = {
    "all to one": torch.full((40, 1), 2),
    "all to the last, twice": torch.full((20, 2), 4),
    "empty experts": torch.tensor([[1, 3], [3, 1], [1, 3]]),
    "duplicates": torch.tensor([[0, 0, 1], [1, 1, 1], [2, 4, 2]]),
    "one token": torch.tensor([[4, 0]]),
    "tiles that end where an expert does": torch.arange(5).repeat_interleave(16).view(-1, 2),
    "one slot more": torch.cat([torch.arange(5).repeat_interleave(16), torch.tensor([0])])[:, None],
    "sorted backwards": torch.arange(4, -1, -1).repeat_interleave(7)[:, None],
    "uneven": torch.tensor([0] * 33 + [1] * 1 + [3] * 18).view(-1, 2),
}


@pytest.mark.parametrize("name", ROUTINGS)
@interpreted
def test_every_routing(name: str) -> None:
    for dtype, activation in zip((torch.int64, torch.int32), ACTIVATIONS, strict=False):
        args = made(ROUTINGS[name].to(dtype), 5)
        with oracle.counted() as launches:
            assert_as_the_loop(moe, args, activation=activation)
        assert launches()


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_by_either_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = made(ROUTINGS[name], 5)
    for activation in ACTIVATIONS:
        assert_as_the_loop(op.reference, args, activation=activation)
    monkeypatch.setitem(op.reference.__globals__, "_FEW", 0)
    for activation in ACTIVATIONS:
        assert_as_the_loop(op.reference, args, activation=activation)


def test_references_give_the_same_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(4, (3, 9, 2), generator=torch.Generator().manual_seed(0))
    x, gate_up, down, _, weights = made(ids[0], 4)

    def one(x: Tensor, gate_up: Tensor, ids: Tensor) -> Tensor:
        return op.reference(x, gate_up, down, ids, weights).sin().sum()

    call = vmap(grad(one, (0, 1)), (None, None, 0))
    found = [call(x, gate_up, ids)]
    monkeypatch.setitem(op.reference.__globals__, "_FEW", 0)
    found.append(call(x, gate_up, ids))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few", [0, 1 << 22])
def test_what_is_not_finite_stays_where_it_is(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op.reference.__globals__, "_FEW", few)
    assert_isolated(op.reference)


@interpreted
def test_what_is_not_finite_stays_where_it_is_by_kernel() -> None:
    assert_isolated(moe)
    assert oracle.fused(op)


def assert_isolated(function: Any) -> None:
    """A token or an expert full of NaN spoils nothing that has no part in it."""
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0], [0, 1], [2, 1]])
    args = made(ids, 4)
    plain = gradients(function, args)
    x, gate_up, down = args[0].clone(), args[1].clone(), args[2].clone()
    x[0] = torch.nan
    out, dx, dgate_up, ddown, _ = gradients(function, (x, *args[1:]))
    assert torch.equal(out.isnan().any(1), torch.arange(6) == 0)
    assert torch.equal(dx.isnan().any(1), torch.arange(6) == 0)
    for g in (dgate_up, ddown):
        assert torch.equal(g.isnan().any(2).any(1), torch.tensor([True, True, False, False]))
    gate_up[2] = down[2] = torch.inf
    out, dx, dgate_up, ddown, dweights = gradients(function, (args[0], gate_up, down, *args[3:]))
    near = torch.tensor([True, False, False, True, True, False])
    for a, b in zip((out, dx, dweights), (plain[0], plain[1], plain[4]), strict=True):
        torch.testing.assert_close(a[near], b[near], rtol=1e-4, atol=1e-4)
    assert not dgate_up[3].any()
    assert not ddown[3].any()


@interpreted
def test_no_tokens_no_slots_and_no_dimension_of_tokens() -> None:
    x, gate_up, down, ids, weights = made(torch.tensor([[1, 0]]), 2)
    for rows in ((0,), (3, 0)):
        found = gradients(
            moe,
            (x.expand(*rows, 20), gate_up, down, ids.expand(*rows, 2), weights.expand(*rows, 2)),
        )
        assert found[0].shape == (*rows, 20)
        assert not any(g.any() for g in found)
    out = moe(x, gate_up, down, ids[:, :0], weights[:, :0])
    assert torch.equal(out, torch.zeros_like(x))
    flat = moe(x[0], gate_up, down, ids[0], weights[0])
    assert oracle.fused(op)
    assert torch.equal(flat, moe(x, gate_up, down, ids, weights)[0])


# ---- ids that are outside, where nobody looks


@interpreted
def test_ids_outside_make_nan_and_no_gradient() -> None:
    ids = torch.tensor([[0, 1], [7, 1], [2, -1], [2, 2], [-(2**40), 2**40]])
    x, gate_up, down, _, weights = made(ids, 3)
    inside = (ids >= 0) & (ids < 3)
    call = (x, gate_up, down, ids, weights)
    out, dx, dgate_up, ddown, dweights = gradients(op.fused, call)
    assert torch.equal(out.isnan().all(1), ~inside.all(1))
    assert not out[inside.all(1)].isnan().any()
    assert not dweights[~inside].any()
    # The same as if those slots had no weight.
    args = (x, gate_up, down, ids.where(inside, torch.tensor(0)), weights * inside)
    found = gradients(op.fused, args)
    for a, b in zip((dx, dgate_up, ddown, dweights * inside), found[1:], strict=True):
        torch.testing.assert_close(a, b if b.shape != ids.shape else b * inside)


@interpreted
def test_ids_outside_that_are_skipped_add_nothing() -> None:
    ids = torch.tensor([[0, 3], [7, 1], [3, -1], [2, 2]])
    x, gate_up, down, _, weights = made(ids, 3)
    inside = (ids >= 0) & (ids < 3)
    args = (x, gate_up, down, ids.where(inside, torch.tensor(0)), weights * inside)
    expected = gradients(loop, [t.double() if i != 3 else t for i, t in enumerate(args)])
    expected[4] *= inside

    def skipping(*leaves: Tensor) -> Any:
        return op.fused(*leaves, skip=True)

    found = gradients(skipping, (x, gate_up, down, ids, weights))
    assert oracle.fused(op)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    slope = grad(lambda x: skipping(x, gate_up, down, ids, weights).sin().sum())
    rows = vmap(slope)(torch.stack([x, x / 2]))
    exact = grad(lambda x: loop(x, *(t.double() for t in args[1:3]), *args[3:]).sin().sum())
    torch.testing.assert_close(rows[0].double(), exact(x.double()), rtol=1e-4, atol=1e-4)
    curved = jacrev(slope)(x)  # by plain PyTorch
    torch.testing.assert_close(curved.double(), jacrev(exact)(x.double()), rtol=1e-4, atol=1e-4)


# ---- what it costs


@contextmanager
def watched() -> Iterator[list[tuple[str, list[int]]]]:
    """Note every kernel that is launched, and where what it reads or writes begins."""
    found: list[tuple[str, list[int]]] = []
    stock = Launch.__call__

    def launch(self: Any, grid: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        places = [0 if x is None else x.data_ptr() for x in tensors]
        found.append((self.kernel.__name__, places))
        stock(self, grid, tensors, *args, **kwargs)

    with mock.patch.object(Launch, "__call__", launch):
        yield found


@interpreted
def test_frozen_experts_skip_their_gradient() -> None:
    args = made(torch.tensor([[0, 1], [1, 2], [0, 2]]), 3)
    for wanted in oracle.subsets(SMOOTH):
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(args)]
        out = moe(*leaves)
        with watched() as found:
            out.sum().backward()
        names = [name for name, _ in found]
        assert names.count("moe_weight_kernel") == (1 in wanted) + (2 in wanted)
        assert names.count("moe_rows_kernel") == 1 + (0 in wanted)
        (places,) = (places for name, places in found if name == "moe_pull_back_kernel")
        dpairs, h, dscale = places[5:]
        assert bool(dpairs) == bool({0, 1} & set(wanted))
        assert bool(h) == (2 in wanted)
        assert bool(dscale) == (4 in wanted)


@interpreted
def test_without_gradients_nothing_is_kept() -> None:
    args = made(torch.tensor([[0, 1], [1, 2]]), 3)
    leaves = [x.detach().requires_grad_(i in SMOOTH) for i, x in enumerate(args)]
    for call, keeps in ((args, False), (leaves, True)):
        for enabled in (True, False):
            with watched() as found, torch.set_grad_enabled(enabled):
                moe(*call)
            (places,) = (places for name, places in found if name == "moe_up_kernel")
            assert bool(places[5]) == (keeps and enabled)


@interpreted
def test_shared_experts_are_read_where_they_lie() -> None:
    """Under ``vmap(grad)``: not copied, and forward's tiles hold rows of several examples."""
    ids = torch.randint(3, (4, 5, 2), generator=torch.Generator().manual_seed(0))
    x, gate_up, down, _, weights = made(ids[0], 3)
    xs = torch.stack([x * (k + 1) for k in range(4)])

    def loss(gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        return moe(x, gate_up, down, ids, weights).square().sum()

    with watched() as found:
        grads = vmap(grad(loss, (0, 1)), (None, None, 0, 0))(gate_up, down, xs, ids)
    read = [(name, places[1]) for name, places in found if name in READ]
    rows = ("moe_rows_kernel", down.data_ptr())  # in the forward pass, and in the backward pass
    assert read == [("moe_up_kernel", gate_up.data_ptr()), rows, rows]
    for k in range(4):
        one = grad(loss, (0, 1))(gate_up, down, xs[k], ids[k])
        for g, expected in zip(grads, one, strict=True):
            torch.testing.assert_close(g[k], expected, rtol=1e-4, atol=1e-4)  # of sums up to 400


READ = ("moe_up_kernel", "moe_rows_kernel")


@interpreted
def test_tiles_hold_every_row_once() -> None:
    rng = torch.Generator().manual_seed(0)
    for experts, examples, shared in itertools.product((1, 3, 70), (1, 4), (True, False)):
        # The last is nobody.
        ids = torch.randint(-1, experts + 1, (examples, 60), generator=rng)
        routing = _moe_routing.route(ids.flatten(), experts, examples, 16, shared=shared)
        seen: list[int] = []
        for group, first, last in routing.tiles.tolist():
            rows = range(first, min(first + 16, last))
            for slot in routing.order[rows.start : rows.stop].tolist():
                assert ids.flatten()[slot] == group // examples
                assert shared or slot // 60 == group % examples
            seen += rows
        inside = int(((ids >= 0) & (ids < experts)).sum())
        assert seen == list(range(inside))
        assert routing.starts[-1] == inside


@interpreted
def test_experts_that_are_not_kept_by_mistake_are_computed() -> None:
    args = made(torch.tensor([[0, 1], [1, 2]]), 3)
    function = inspect.getclosurevars(op.fused).globals["_function"]
    options = _moe.Options("silu", torch.float32, False)
    found = gradients(lambda *a: function(options, *a), args)
    for a, b in zip(found, gradients(op.reference, args), strict=True):
        torch.testing.assert_close(a, b)


@interpreted
def test_gradients_of_what_is_mapped_further_inside_are_the_kernels() -> None:
    args = made(torch.tensor([[0, 1], [1, 2]]), 3)

    def loss(*leaves: Tensor) -> Tensor:
        return vmap(moe, (0, 0, 0, None, 0))(*leaves[:3], args[3], leaves[3]).sin().sum()

    two = [torch.stack([args[i], args[i] / 2]) for i in SMOOTH]
    found = grad(loss, (0, 1, 2, 3))(*two)
    assert oracle.fused(op)
    leaves = [x.clone().requires_grad_() for x in two]
    loss(*leaves).backward()
    assert oracle.fused(op)
    exact = [x.double().requires_grad_() for x in two]
    for k in range(2):
        x, gate_up, down, weights = (leaf[k] for leaf in exact)
        loop(x, gate_up, down, args[3], weights).sin().sum().backward()
    for g, leaf, truth in zip(found, leaves, exact, strict=True):
        for a in (g, leaf.grad):
            torch.testing.assert_close(a.double(), truth.grad, rtol=1e-4, atol=1e-4)


@interpreted
def test_several_threads_get_the_same_bits() -> None:
    args = made(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(gradients, moe, args) for _ in range(8)]
    expected = gradients(moe, args)
    assert oracle.fused(op)
    for call in calls:
        assert all(map(torch.equal, call.result(), expected))


# ---- dtypes


@interpreted
def test_autocast_computes_as_linear_does() -> None:
    args = made(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3)
    low = [x.bfloat16() if i in (0, 1, 2) else x for i, x in enumerate(args)]
    expected = gradients(moe, low)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(moe, args)
        assert oracle.fused(op)
    assert all(x.dtype == torch.float32 for x in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-2, atol=1e-2)
    assert (found[0] - gradients(moe, args)[0]).abs().max() > 1e-3


@interpreted
def test_tokens_of_another_dtype_are_computed_in_that_of_the_experts() -> None:
    args = list(made(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3))
    args[1], args[2] = args[1].bfloat16(), args[2].bfloat16()
    found, expected = gradients(moe, args), gradients(op.reference, args)
    assert oracle.fused(op)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert found[0].dtype == found[1].dtype == torch.float32


# ---- bad input

X, GATE_UP, DOWN = torch.ones(4, 6), torch.ones(3, 10, 6), torch.ones(3, 6, 5)
IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
ARGS = (X, GATE_UP, DOWN, IDS, WEIGHTS)
BAD: list[tuple[int, Any, type[Exception], str]] = [
    (0, torch.ones(4, 7), InvalidArgument, "(4, 7)"),
    (0, torch.ones(()), InvalidArgument, "()"),
    (0, torch.ones(5, 6), InvalidArgument, "(5, 6)"),
    (0, [1.0], InvalidType, "list"),
    (0, X.long(), InvalidType, "int64"),
    (1, torch.ones(3, 9, 6), InvalidArgument, "(3, 9, 6)"),
    (1, torch.ones(2, 10, 6), InvalidArgument, "(2, 10, 6)"),
    (1, torch.ones(10, 6), InvalidArgument, "(10, 6)"),
    (1, GATE_UP.half(), InvalidType, "float16"),
    (2, torch.ones(3, 6, 4), InvalidArgument, "(3, 6, 4)"),
    (2, torch.ones(6, 5), InvalidArgument, "(6, 5)"),
    (3, IDS.float(), InvalidType, "float32"),
    (3, IDS.short(), InvalidType, "int16"),
    (3, IDS[:3], InvalidArgument, "(3, 2)"),
    (3, IDS + 3, IndexError, "3"),
    (3, IDS - 1, IndexError, "-1"),
    (4, WEIGHTS[:, :1], InvalidArgument, "(4, 1)"),
    (4, IDS, InvalidType, "int64"),
    (4, None, InvalidType, "NoneType"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_is_refused(case: int) -> None:
    position, value, error, message = BAD[case]
    args = [value if i == position else x for i, x in enumerate(ARGS)]
    with pytest.raises(error, match=re.escape(message)):
        moe(*args)
    if isinstance(value, Tensor):
        dims = tuple(0 if i == position else None for i in range(5))
        args[position] = value.expand(2, *value.shape)
        with pytest.raises(error, match=re.escape(message)):
            vmap(moe, dims)(*args)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="relu6"):
        moe(*ARGS, activation="relu6")
    with pytest.raises(InvalidArgument, match="at least 1"):
        moe(X, GATE_UP[:0], DOWN[:0], IDS, WEIGHTS)


# ---- published name


def test_the_published_name() -> None:
    args = made(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3)
    names = ("x", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights")
    by_name = dict(zip(names, args, strict=True))
    for grouped in (True, False):
        torch.testing.assert_close(opake_moe(**by_name, grouped=grouped), moe(*args))
    assert torch.equal(opake_moe(*args), moe(*args))
