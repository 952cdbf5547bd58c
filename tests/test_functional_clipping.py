"""clipped_grad_sum against a loop that clips one ordinary gradient at a time."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from opake.errors import InvalidArgument, InvalidBatch
from opake.functional import clipped_grad_sum, per_example_grads

Params = dict[str, Tensor]
Loss = Callable[[Params, Any], Tensor]

# Sums of fewer than 1e4 products, ordered differently by vmap and by the loop.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def clipped_loop(
    loss_fn: Loss, params: Params, batch: Tensor, max_norm: dict[str, float], seed: int = 0
) -> tuple[Params, dict[str, Tensor], Tensor]:
    """Clip and add the gradients of one example after the other, reseeding before each."""
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    norms: dict[str, list[Tensor]] = {pattern: [] for pattern in max_norm}
    losses = []
    groups = {n: next(p for p in max_norm if re.search(p, n)) for n in params}
    for example in batch:
        torch.manual_seed(seed)
        own = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        loss = loss_fn(own, example)
        grads = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
        for pattern in max_norm:
            members = [g.flatten() for n, g in grads.items() if groups[n] == pattern]
            norms[pattern].append(torch.cat(members).norm())
        for name, g in grads.items():
            norm = norms[groups[name]][-1].item()
            sums[name] += g / max(1.0, norm / max_norm[groups[name]])
        losses.append(loss.detach())
    return sums, {p: torch.stack(column) for p, column in norms.items()}, torch.stack(losses)


def close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare two pytrees leaf by leaf, relative to the largest entry of each leaf."""
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert a.shape == b.shape
        assert ((a - b).abs() <= tolerance * b.abs().max().clamp(min=1e-3)).all(), (a, b)


NET = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 9))


def net_loss(params: Params, ids: Tensor) -> Tensor:
    logits = functional_call(NET, params, (ids,))
    return F.cross_entropy(logits[:-1], ids[1:])


def net(dtype: torch.dtype) -> tuple[Params, Tensor]:
    torch.manual_seed(0)
    shapes = {name: p.shape for name, p in NET.named_parameters()}
    params = {n: torch.randn(s, dtype=dtype, requires_grad=True) for n, s in shapes.items()}
    return params, torch.randint(0, 9, (6, 5))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 6, 50])
@pytest.mark.parametrize("max_norm", [0.5, 2.4, math.inf])
def test_sum_equals_the_loop(dtype: torch.dtype, chunk_size: int | None, max_norm: float) -> None:
    params, batch = net(dtype)
    sums, norms, losses = clipped_grad_sum(
        net_loss, params, batch, max_norm=max_norm, chunk_size=chunk_size
    )
    expected, expected_norms, expected_losses = clipped_loop(
        net_loss, params, batch, {"": max_norm}
    )
    assert max_norm != 2.4 or 0 < (norms > 2.4).sum() < 6
    assert list(sums) == list(params)
    close((sums, norms, losses), (expected, expected_norms[""], expected_losses), TOLERANCE[dtype])
    assert norms.dtype == losses.dtype == dtype
    assert not any(t.requires_grad for t in (*sums.values(), norms, losses))


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_groups_are_clipped_on_their_own(chunk_size: int | None) -> None:
    params, batch = net(torch.float64)
    max_norm = {r"\.bias$": 0.1, "^0": 0.3, ".": 0.2, "never": 1.0}
    found = clipped_grad_sum(net_loss, params, batch, max_norm=max_norm, chunk_size=chunk_size)
    assert found[1].keys() == max_norm.keys()
    assert torch.equal(found[1].pop("never"), torch.zeros(6, dtype=torch.float64))
    del max_norm["never"]
    close(found, clipped_loop(net_loss, params, batch, max_norm), 1e-12)


def test_nested_params() -> None:
    params, batch = net(torch.float64)
    nested = [params["0.weight"], {"rest": tuple(params.values())[1:]}]

    def loss_fn(tree: Any, ids: Tensor) -> Tensor:
        values = [tree[0], *tree[1]["rest"]]
        return net_loss(dict(zip(params, values, strict=True)), ids)

    sums, norms, losses = clipped_grad_sum(loss_fn, nested, batch, max_norm=0.5, chunk_size=4)
    flat = clipped_grad_sum(net_loss, params, batch, max_norm=0.5, chunk_size=4)
    assert pytree.tree_structure(sums) == pytree.tree_structure(nested)
    close((sums, norms, losses), (list(flat[0].values()), *flat[1:]), 0)


def poisoned(params: Params, row: Tensor) -> Tensor:
    """The gradient is row[:3] for a, and row[3:] for b and c, which share it."""
    return params["a"] @ row[:3] + (params["b"] + params["c"]) @ row[3:]


POISON_PARAMS = {name: torch.zeros(3) for name in "abc"}


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_row_that_is_not_finite_adds_nothing(bad: float, chunk_size: int | None) -> None:
    batch = torch.rand(5, 6)
    batch[1, 4] = bad
    options: Any = {"chunk_size": chunk_size}
    good = batch[[0, 2, 3, 4]]
    sums, norms, losses = clipped_grad_sum(poisoned, POISON_PARAMS, batch, max_norm=0.5, **options)
    assert not norms[1].isfinite()
    assert norms.isfinite().sum() == losses[[0, 2, 3, 4]].isfinite().sum() == 4
    close(sums, clipped_loop(poisoned, POISON_PARAMS, good, {"": 0.5})[0], 1e-6)
    limits = {"a": 0.2, "b|c": 0.3}
    sums, groups, _ = clipped_grad_sum(poisoned, POISON_PARAMS, batch, max_norm=limits, **options)
    assert groups["a"].isfinite().all()
    assert not groups["b|c"][1].isfinite()
    close(sums, clipped_loop(poisoned, POISON_PARAMS, good, limits)[0], 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_masked_slots_leave_no_trace(chunk_size: int | None) -> None:
    batch = torch.rand(5, 6)
    mask = torch.tensor([True, False, True, True, False])
    expected = clipped_loop(poisoned, POISON_PARAMS, batch[mask], {"": 0.5})
    batch[1], batch[4] = math.nan, 1e6
    before = batch.clone(), mask.clone()
    sums, norms, losses = clipped_grad_sum(
        poisoned, POISON_PARAMS, batch, max_norm=0.5, mask=mask, chunk_size=chunk_size
    )
    close((sums, norms[mask], losses[mask]), (expected[0], expected[1][""], expected[2]), 1e-6)
    assert (norms[~mask] == 0).all()
    assert (losses[~mask] == 0).all()
    assert torch.equal(batch.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(mask, before[1])
    nothing = clipped_grad_sum(
        poisoned, POISON_PARAMS, batch, max_norm={".": 1.0}, mask=torch.zeros_like(mask)
    )
    assert all((leaf == 0).all() for leaf in pytree.tree_leaves(nothing))


def test_expanded_and_shared_gradients() -> None:
    """The gradients of b and c are one expanded tensor; scaling it in place would do it twice."""

    def loss_fn(params: Params, row: Tensor) -> Tensor:
        return (params["a"] + params["b"] + params["c"]).sum() + 0 * row.sum()

    sums, norms, _ = clipped_grad_sum(loss_fn, POISON_PARAMS, torch.rand(4, 2), max_norm=1.5)
    close(norms, torch.full((4,), 3.0), 1e-6)
    close(sums, {name: torch.full((3,), 2.0) for name in "abc"}, 1e-6)


def test_zero_gradient_is_left_alone() -> None:
    sums, norms, _ = clipped_grad_sum(poisoned, POISON_PARAMS, torch.zeros(2, 6), max_norm=1e-300)
    assert (norms == 0).all()
    assert all((total == 0).all() for total in sums.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_added_up_in_fp32(dtype: torch.dtype) -> None:
    params = {"w": torch.zeros(3, dtype=dtype), "s": torch.tensor(0.0, dtype=torch.float64)}
    batch = torch.ones(600, 3, dtype=dtype)

    def loss_fn(params: Params, row: Tensor) -> Tensor:
        return params["w"] @ row + params["s"].to(dtype)

    sums, norms, _ = clipped_grad_sum(loss_fn, params, batch, max_norm=1.0, chunk_size=1)
    # Adding 0.5 at a time stalls at 128 in bfloat16.
    assert (sums["w"] == 300).all()
    assert sums["w"].dtype == dtype
    assert abs(sums["s"].item() - 300) < 1e-10
    assert norms.dtype == torch.float64
    only_low = clipped_grad_sum(lambda p, x: p["w"] @ x, {"w": params["w"]}, batch, max_norm=1.0)
    assert only_low[1].dtype == torch.float32


def test_norm_of_long_rows() -> None:
    for shape in ((3_000_001,), (1500, 2001), (3_000_001, 1)):
        scale = torch.rand(shape)
        norms = clipped_grad_sum(
            lambda p, x, scale=scale: (p * scale).sum() * x,
            torch.zeros(shape),
            torch.ones(1),
            max_norm=1.0,
        )[1]
        expected = scale.double().norm()
        assert (norms - expected).abs() <= 1e-5 * expected  # 7e-5 in one fp32 reduction


def test_each_chunk_draws_the_same_under_same() -> None:
    params, batch = net(torch.float64)

    def loss_fn(params: Params, ids: Tensor) -> Tensor:
        dropped = params | {"0.weight": F.dropout(params["0.weight"], 0.5)}
        return net_loss(dropped, ids)

    expected = clipped_loop(loss_fn, params, batch, {"": 0.5}, seed=3)
    for chunk_size in (None, 1, 4):
        torch.manual_seed(3)
        sums, norms, losses = clipped_grad_sum(
            loss_fn, params, batch, max_norm=0.5, chunk_size=chunk_size, randomness="same"
        )
        close((sums, norms, losses), (expected[0], expected[1][""], expected[2]), 1e-12)
    different = clipped_grad_sum(loss_fn, params, batch[:1].expand(6, -1), max_norm=1, chunk_size=2)
    assert len(different[2].unique()) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_each_chunk_draws_the_same_on_the_gpu() -> None:
    batch = torch.ones(6, 64, device="cuda")
    params = torch.ones(64, device="cuda")
    for helper in (per_example_grads, lambda *a, **k: clipped_grad_sum(*a, max_norm=1.0, **k)[1:]):
        losses = helper(
            lambda p, x: (F.dropout(p, 0.5) * torch.arange(64, device="cuda")) @ x,
            params,
            batch,
            chunk_size=4,
            randomness="same",
        )[1]
        assert len(losses.unique()) == 1


def test_no_data_dependent_synchronisation() -> None:
    """Everything is computed on tensors without data, from which nothing can be read."""
    params, batch = net(torch.float32)
    params = {name: p.to("meta") for name, p in params.items()}
    mask = torch.ones(6, dtype=torch.bool, device="meta")
    sums, norms, losses = clipped_grad_sum(
        lambda p, x: (p["1.weight"] @ p["0.weight"][0]).sum() * x.sum(),
        params,
        batch.to("meta", torch.float32),
        max_norm={"1": 1.0, ".": 2.0},
        chunk_size=4,
        mask=mask,
    )
    assert {n: s.shape for n, s in sums.items()} == {n: p.shape for n, p in params.items()}
    assert norms["1"].shape == losses.shape == (6,)


def test_differentiates_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grad mode at entry says that no second-order graph is wanted."""
    modes = []
    stock = eager_transforms.grad_and_value_impl

    def recorded(*args: Any) -> Any:
        modes.append(torch.is_grad_enabled())
        return stock(*args)

    monkeypatch.setattr(eager_transforms, "grad_and_value_impl", recorded)
    params, batch = net(torch.float32)
    clipped_grad_sum(net_loss, params, batch, max_norm=1.0, chunk_size=4)
    per_example_grads(net_loss, params, batch)
    assert modes == [False] * 3
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("max_norm", [1.0, {"w": 1.0, ".": 2.0}])
def test_empty_batch(max_norm: Any) -> None:
    params = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "s": torch.tensor(1.0)}
    for chunk_size, mask in itertools.product((None, 2), (None, torch.ones(0, dtype=torch.bool))):
        sums, norms, losses = clipped_grad_sum(
            never, params, torch.zeros(0, 3), max_norm=max_norm, chunk_size=chunk_size, mask=mask
        )
        assert torch.equal(sums["w"], torch.zeros(2, 3, dtype=torch.bfloat16))
        assert torch.equal(sums["s"], torch.tensor(0.0))
        for empty in (losses, *(norms.values() if isinstance(norms, dict) else [norms])):
            assert (empty.shape, empty.dtype) == ((0,), torch.float32)


def never(params: Any, example: Any) -> Tensor:
    pytest.fail("loss_fn was called")


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"max_norm": m}, "max_norm must be a positive") for m in (0, -1.0, math.nan, True, "1")),
        ({"max_norm": torch.tensor(1.0)}, "Python number"),
        ({"max_norm": {"w": 0.0, "v": 1.0}}, r"max_norm\['w'\] must be a positive"),
        ({"max_norm": {"(": 1.0}}, "no regular expression"),
        ({"max_norm": {1: 1.0}}, "it is a int"),
        ({"max_norm": {"w": 1.0}}, "matches 'v'; add one"),
        ({"max_norm": {}}, "matches 'w', 'v'"),
        ({"max_norm": 1.0, "mask": torch.ones(3, dtype=torch.bool)}, r"found torch.bool of shape"),
        ({"max_norm": 1.0, "mask": torch.ones(2)}, r"shape \(2,\).*found torch.float32"),
        ({"max_norm": 1.0, "mask": [True, True]}, "found \\[True, True\\]"),
        ({"max_norm": 1.0, "chunk_size": 0}, "chunk_size must be a positive int"),
        ({"max_norm": 1.0, "randomness": None}, "randomness must be"),
    ],
)
def test_bad_options_are_refused_before_the_loss_runs(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"clipped_grad_sum: .*{message}"):
        clipped_grad_sum(never, {"w": torch.zeros(3), "v": torch.zeros(3)}, X, **options)


def test_other_bad_input() -> None:
    for nested in ([torch.zeros(3)], {"w": [torch.zeros(3)]}, {1: torch.zeros(3)}):
        with pytest.raises(InvalidArgument, match="flat dict"):
            clipped_grad_sum(never, nested, X, max_norm={".": 1.0})
    with pytest.raises(InvalidBatch, match="disagree"):
        clipped_grad_sum(never, torch.zeros(3), (X, torch.zeros(3)), max_norm=1.0)
    with pytest.raises(InvalidArgument, match=r"clipped_grad_sum: .*found shape \(1,\)"):
        clipped_grad_sum(lambda p, x: (p @ x)[None], torch.zeros(3), X, max_norm=1.0)
