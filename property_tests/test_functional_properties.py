"""Whatever the batch, chunks, parameters, masks, groups and broken rows: the loop's numbers."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from opake.functional import clipped_grad_sum, per_example_grads, with_batch_dim

# fp32 and fp64: a few hundred terms in another order. bfloat16 keeps 8 bits (half an ulp is 2e-3
# relative), and a gradient passes through a few roundings that vmap may order differently.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
CASES = settings(deadline=None, max_examples=60)
NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
GROUPS = [
    {"": 1.0},
    {"weight": 0.5, "bias": 2.0},
    {"^a": 0.3, "bias": math.inf, ".": 0.1},
    {"nothing": 1.0, ".": 0.7},
]


class Case(NamedTuple):
    params: dict[str, Tensor]
    batch: dict[str, Any]
    chunk_size: int | None
    mask: Tensor | None
    max_norm: Any

    def keep(self) -> Tensor:
        size = self.batch["index"].shape[0]
        return torch.ones(size, dtype=torch.bool) if self.mask is None else self.mask


def loss_fn(params: dict[str, Tensor], example: dict[str, Any]) -> Tensor:
    """Mixes all parameters, so that a broken input reaches the gradients of all."""
    total = example["scale"] * torch.stack([p.double().sum() for p in params.values()]).sum().sin()
    for p, x in zip(params.values(), example["inputs"], strict=True):
        total = total + (p.tanh() * x).sum() + (p.flatten()[:2].cos() * example["index"][:1]).sum()
    return total


@st.composite
def cases(draw: st.DrawFn, broken: bool = False) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = draw(st.integers(0, 6))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    dims = st.lists(st.integers(0, 3), max_size=3)
    params, inputs = {}, []
    for name in names:
        shape, dtype = draw(dims), draw(st.sampled_from(list(TOLERANCE)))
        params[name] = torch.randn(shape, generator=generator).to(dtype)
        x = torch.randn(size, *shape, generator=generator).to(dtype)
        if broken and draw(st.booleans()) and x.numel():
            row = draw(st.integers(0, size - 1))
            x[row].view(-1)[-1] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        inputs.append(x)
    scale = torch.randn(size, generator=generator).double()
    index = torch.randint(0, 5, (size, 2), generator=generator)
    mask = st.lists(st.booleans(), min_size=size, max_size=size)
    mask = mask.map(lambda keep: torch.tensor(keep, dtype=torch.bool))
    return Case(
        params=params,
        batch={"inputs": tuple(inputs), "scale": scale, "index": index},
        chunk_size=draw(st.none() | st.integers(1, 8)),
        mask=draw(st.none() | mask),
        max_norm=draw(st.floats(0.1, 10) | st.just(math.inf) | st.sampled_from(GROUPS)),
    )


def loop(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and losses of ordinary backward passes, one example at a time."""
    rows, losses = [], [torch.zeros(0, dtype=torch.float64)]
    for i in range(case.batch["index"].shape[0]):
        own = {name: p.clone().requires_grad_() for name, p in case.params.items()}
        loss = loss_fn(own, pytree.tree_map(lambda x, i=i: x[i], case.batch))
        rows.append(torch.autograd.grad(loss, list(own.values())))
        losses.append(loss.detach()[None])
    grads = {
        name: torch.stack([row[k] for row in rows]) if rows else p.new_zeros((0, *p.shape))
        for k, (name, p) in enumerate(case.params.items())
    }
    return grads, torch.cat(losses)


def group_of(name: str, max_norm: dict[str, float]) -> str:
    return next(pattern for pattern in max_norm if re.search(pattern, name))


def clipped_loop(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Clip and add the loop's gradients in fp64, without an example that is broken anywhere."""
    max_norm = case.max_norm if isinstance(case.max_norm, dict) else {"": case.max_norm}
    grads, losses = loop(case)
    size = losses.shape[0]
    members = {p: [n for n in grads if group_of(n, max_norm) == p] for p in max_norm}
    norms = {p: torch.zeros(size, dtype=torch.float64) for p in max_norm}
    for pattern, names in members.items():
        for name in names:
            rows = grads[name].double().unsqueeze(-1).flatten(1)
            norms[pattern] = norms[pattern].hypot(rows.norm(dim=1))
    good = torch.stack(list(norms.values())).isfinite().all(dim=0) & case.keep()
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in case.params.items()}
    for i in good.nonzero().flatten().tolist():
        for pattern, names in members.items():
            for name in names:
                norm = norms[pattern][i].item()
                sums[name] += grads[name][i].double() / max(1.0, norm / max_norm[pattern])
    norms = {p: torch.where(case.keep(), norm, 0) for p, norm in norms.items()}
    return sums, norms, torch.where(case.keep(), losses, 0)


def close(found: Tensor, expected: Tensor, tolerance: float, floor: float = 1e-3) -> None:
    """Equal where not finite, else within ``tolerance`` of the largest finite entry or floor."""
    assert found.shape == expected.shape
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    scale = max([floor, *expected[finite].abs().tolist()])
    assert ((found - expected)[finite].abs() <= tolerance * scale).all(), (found, expected)


def tolerance(case: Case) -> float:
    """That of the narrowest parameter: norms, and with them all sums, depend on every one."""
    return max(TOLERANCE[p.dtype] for p in case.params.values())


@CASES
@given(case=cases())
def test_per_example_grads_equal_the_loop(case: Case) -> None:
    grads, losses = per_example_grads(loss_fn, case.params, case.batch, chunk_size=case.chunk_size)
    expected, expected_losses = loop(case)
    assert list(grads) == list(expected)
    for name, grad in grads.items():
        assert grad.dtype == case.params[name].dtype
        close(grad, expected[name], TOLERANCE[grad.dtype])
    close(losses, expected_losses, tolerance(case))


@CASES
@given(case=cases(broken=True))
def test_clipped_sums_equal_the_loop(case: Case) -> None:
    sums, norms, losses = clipped_grad_sum(
        loss_fn,
        case.params,
        case.batch,
        max_norm=case.max_norm,
        chunk_size=case.chunk_size,
        mask=case.mask,
    )
    expected, expected_norms, expected_losses = clipped_loop(case)
    for name, total in sums.items():
        assert total.dtype == case.params[name].dtype
        close(total, expected[name], tolerance(case), floor=1.0)
    found = norms if isinstance(case.max_norm, dict) else {"": norms}
    assert list(found) == list(expected_norms)
    for pattern, norm in found.items():
        assert norm.dtype in (torch.float32, torch.float64)
        close(norm, expected_norms[pattern], max(tolerance(case), 1e-6))
    close(losses, expected_losses, tolerance(case))


@CASES
@given(case=cases(broken=True), seed=st.integers(0, 2**20))
def test_a_dropped_slot_holds_anything(case: Case, seed: int) -> None:
    """Other contents of the masked slots change no bit of any result."""
    generator = torch.Generator().manual_seed(seed)

    def other(x: Tensor) -> Tensor:
        noise = torch.randint(-4, 5, x.shape, generator=generator).to(x.dtype)
        noise = noise / 0 if noise.is_floating_point() and seed % 2 else noise
        return torch.where(case.keep().view(-1, *[1] * (x.ndim - 1)), x, noise)

    results = [
        clipped_grad_sum(
            loss_fn,
            case.params,
            batch,
            max_norm=case.max_norm,
            chunk_size=case.chunk_size,
            mask=case.mask,
        )
        for batch in (case.batch, pytree.tree_map(other, case.batch))
    ]
    for a, b in zip(*map(pytree.tree_leaves, results), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@CASES
@given(case=cases(), nest=st.sampled_from(["list", "tuple", "dict"]))
def test_the_pytree_of_params_does_not_matter(case: Case, nest: str) -> None:
    values = list(case.params.values())
    nested: Any = {"list": values, "tuple": (values[0], tuple(values[1:]))}.get(
        nest, {"first": values[0], "rest": [{"x": value} for value in values[1:]]}
    )

    def nested_loss(params: Any, example: Any) -> Tensor:
        flat = dict(zip(case.params, pytree.tree_leaves(params), strict=True))
        return loss_fn(flat, example)

    options: Any = {"chunk_size": case.chunk_size}
    found = clipped_grad_sum(nested_loss, nested, case.batch, max_norm=1.0, **options)
    expected = clipped_grad_sum(loss_fn, case.params, case.batch, max_norm=1.0, **options)
    assert pytree.tree_structure(found[0]) == pytree.tree_structure(nested)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)


SHAPES = st.lists(st.integers(1, 2), max_size=3)
OUTPUTS = st.recursive(
    SHAPES.map(torch.zeros) | st.none() | st.just("text"),
    lambda x: (
        st.lists(x, max_size=3)
        | st.tuples(x, x)
        | st.dictionaries(st.sampled_from("xyz"), x, max_size=3)
    ),
    max_leaves=6,
)


@CASES
@given(output=OUTPUTS, ndim=st.integers(0, 3), threshold=st.integers(1, 3))
def test_with_batch_dim_squeezes_what_it_unsqueezed(output: Any, ndim: int, threshold: int) -> None:
    arrived: list[int] = []

    def fn(x: Tensor) -> Any:
        arrived.append(x.ndim)
        return output

    found = with_batch_dim(fn, batch_kwargs={"x": threshold}, min_ndim=1)(torch.zeros([1] * ndim))
    assert arrived == [ndim + (ndim < threshold)]
    if ndim >= threshold:
        assert found is output
        return
    assert pytree.tree_structure(found) == pytree.tree_structure(output)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(output), strict=True):
        if isinstance(b, Tensor):
            assert a.shape == (b.shape[1:] if b.shape[:1] == (1,) else b.shape)
        else:
            assert a is b
