"""Operators that functorch has no rule for, or draws apart: one call for all examples."""

from __future__ import annotations

import warnings

import pytest
import torch
import zoo
from oracle import assert_exact, per_example, same_bits, stock_loop
from torch import Tensor, nn
from torch.func import vmap

import opake
from opake.compat import scatter


@zoo.families
@pytest.mark.case("one call for all examples")
@zoo.attention
def test_no_operator_runs_example_by_example(model_type: str, attn: str) -> None:
    """functorch warns where it has no batching rule for one."""
    model = zoo.tiny(model_type, attn)
    with opake.patched(model), torch.no_grad():
        for mask in (None, zoo.EVERY):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="There is a performance drop")
                per_example(model, zoo.batch(mask), batched=False)


class Scatters(nn.Module):
    """Chooses as a router does."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.topk(2, dim=-1).indices
        by_value = torch.zeros_like(x).scatter_(-1, chosen, 3.0)
        by_source = torch.full_like(x, -1.0).scatter_(dim=-1, index=chosen, src=x * 2)
        return by_value + 5 * by_source


def test_a_scatter_in_place_is_what_it_is_outside() -> None:
    module, x = Scatters(), torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert scatter.scatters(Scatters)
    assert not scatter.scatters(nn.Linear)

    def run(x: Tensor) -> Tensor:
        return scatter.out_of_place(module.forward, module, (x,), {})

    assert same_bits(vmap(run)(x), torch.stack([module(row) for row in x]))
    assert same_bits(vmap(vmap(run))(x), module(x))
    assert same_bits(run(x), module(x))


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("batched", [True, False])
def test_layerdrop_leaves_out_what_stock_leaves_out_of_a_batch(
    randomness: str, batched: bool
) -> None:
    model, batch = zoo.tiny("opt", None, torch.float64, layerdrop=0.5), zoo.batch(zoo.EVERY)
    # Of two layers: none, the first, the second, both.
    expected = {seed: stock_loop(model, batch, seed=seed) for seed in range(8)}
    kinds = {str(result.losses.tolist()) for result in expected.values()}
    assert len(kinds) == 4
    for seed, result in expected.items():
        with opake.patched(model), torch.no_grad():
            torch.manual_seed(seed)
            found = per_example(model, batch, batched=batched, randomness=randomness)
        assert_exact(found, result)


def test_no_layerdrop_needs_no_randomness() -> None:
    model, batch = zoo.tiny("opt", None, torch.float64), zoo.batch()
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)
