"""Experts of any number, size and choice, by whatever is mapped: what one example gives alone."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import LOSS_BAR, assert_exact, errors, per_example, stock_loop
from torch import Tensor
from torch.func import grad, vmap
from transformers import MixtralConfig, MixtralForCausalLM

import opake
from opake.compat.experts import grouped_linear, grouped_outer

sizes = st.integers(1, 4)
dims = st.sampled_from([None, 0, 1])


@st.composite
def grouped(draw: Any) -> tuple[list[Tensor], list[int | None], int]:
    """Operands of a grouped GEMM, any of them mapped, and how many experts there are."""
    tokens, inside, out, experts, size = draw(st.integers(0, 6)), *(draw(sizes) for _ in range(4))
    torch.manual_seed(draw(st.integers(0, 999)))
    in_dims = [draw(dims) for _ in range(3)]
    if in_dims == [None] * 3:
        in_dims[draw(st.integers(0, 2))] = 0
    shapes = [(tokens, inside), (experts, inside, out), (tokens,)]
    batched = [
        shape if dim is None else (*shape[:dim], size, *shape[dim:])
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in batched[:2])
    # Some experts are chosen often and some never.
    ids = torch.randint(0, experts, batched[2]) // draw(sizes)
    return [x, weight, ids], in_dims, size


def reference(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("ti,tio->to", x, weight[ids])


def outer_reference(x: Tensor, z: Tensor, ids: Tensor, experts: int) -> Tensor:
    return torch.stack([x[ids == e].T @ z[ids == e] for e in range(experts)])


@given(grouped())
def test_grouped_linear_maps(case: Any) -> None:
    operands, in_dims, size = case
    rows = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(operands, in_dims, strict=True)]
        for i in range(size)
    ]

    def weighted(x: Tensor, weight: Tensor, ids: Tensor) -> Any:
        y = grouped_linear(x, weight, ids)
        return y.sin().sum(), y

    of, y = vmap(grad(weighted, argnums=(0, 1), has_aux=True), tuple(in_dims))(*operands)
    for i, (x, weight, ids) in enumerate(rows):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        expected = reference(*leaves, ids)
        grads = torch.autograd.grad(expected.sin().sum(), leaves)
        # A handful of fp64 products.
        torch.testing.assert_close(y[i], expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close((of[0][i], of[1][i]), grads, rtol=0, atol=1e-12)


@given(grouped())
def test_grouped_outer_maps(case: Any) -> None:
    (x, _, ids), in_dims, size = case
    experts, dims = 5, [in_dims[0], in_dims[0], in_dims[2]]
    if dims == [None] * 3:
        dims[2], ids = 0, ids.expand(size, *ids.shape)
    rows = vmap(lambda x, z, ids: grouped_outer(x, z, ids, experts), tuple(dims))(x, x.cos(), ids)
    for i in range(size):
        a, b, c = (
            t if dim is None else t.select(dim, i)
            for t, dim in zip((x, x.cos(), ids), dims, strict=True)
        )
        torch.testing.assert_close(rows[i], outer_reference(a, b, c, experts), rtol=0, atol=1e-12)


@st.composite
def models(draw: Any) -> tuple[Any, dict[str, Tensor]]:
    experts = draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 999)))
    config = MixtralConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=draw(st.sampled_from([4, 12])),
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        output_router_logits=draw(st.booleans()),
        initializer_range=0.3,
        experts_implementation=draw(st.sampled_from(["eager", "batched_mm", "grouped_mm"])),
    )
    size, length = draw(sizes), draw(st.integers(2, 6))
    ids = torch.randint(1, 13, (size, length))
    batch = {"input_ids": ids, "labels": ids}
    if draw(st.booleans()):
        real = torch.randint(1, length + 1, (size, 1))
        mask = (torch.arange(length) < real).long()
        # A label to count in every row: without one the mean is NaN, everywhere.
        batch |= {
            "attention_mask": mask,
            "labels": ids.where((mask == 1) | (mask.cumsum(1) == 1), -100),
        }
    return MixtralForCausalLM(config), batch


@settings(max_examples=30)  # a model and a loop of stock in every one
@given(models(), st.booleans())
def test_a_mixtral_of_any_shape(case: Any, batched: bool) -> None:
    model, batch = case
    exact = model.config._experts_implementation != "grouped_mm"  # stock's takes no fp64
    if exact:
        model = model.double()
    expected = stock_loop(model, batch)
    with opake.patched(model):
        found = per_example(model, batch, batched=batched)
    if exact:
        assert_exact(found, expected)
        return
    loss, gradient = errors(found, expected)
    assert loss <= LOSS_BAR
    assert gradient <= 1e-4  # what stock's own implementations differ by in fp32
