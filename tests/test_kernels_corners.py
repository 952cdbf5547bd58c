"""Where kernels were once wrong, or did what plain PyTorch would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import interpreted
from kernel_oracle import fused
from torch import Tensor
from torch.func import grad, vmap

from opake import kernels as K
from opake.errors import InvalidType
from opake.kernels._triton import Launch, Tile
from opake.patches import kernels as published


def seeded(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


# ---- numbers


@interpreted
@pytest.mark.parametrize("rows", [1, 7, 13])
def test_rows_that_fill_up_a_block_add_nothing_where_eps_is_zero(rows: int) -> None:
    x, w = seeded(rows, 5), seeded(5)
    for name, args in {
        "rms_norm": (x, w, 0.0),
        "fused_add_rms_norm": (x, x.flip(0), w, 0.0),
        "layer_norm": (x, w, w, 0.0),
    }.items():
        op = K.find(name)
        leaves = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in args]
        found, expected = (f(*leaves) for f in (op.function, op.reference))
        wanted = [a for a in leaves if isinstance(a, Tensor)]
        pairs = []
        for out in (found, expected):
            out = out[0] if isinstance(out, tuple) else out
            pairs.append(torch.autograd.grad(out.square().sum(), wanted))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@interpreted
def test_labels_of_32_bits_and_an_ignored_one_of_64() -> None:
    x, labels = seeded(4, 6), torch.tensor([0, 1, 2, 3])
    expected = torch.nn.functional.cross_entropy(x, labels)
    for ignored in (2**31, 2**32, 2**40, -(2**40)):
        torch.testing.assert_close(K.cross_entropy(x, labels.int(), ignore_index=ignored), expected)


@interpreted
def test_gradients_that_no_kernel_computes_are_computed() -> None:
    x, labels = seeded(4, 6), torch.tensor([0, 1, -100, 3])
    items, weight = torch.tensor(5.0), seeded(6).abs()

    def loss(function: Any, items: Tensor, weight: Tensor) -> Tensor:
        return function(x, labels, num_items=items, class_weight=weight)

    reference = K.find("cross_entropy").reference
    found, expected = (
        grad(lambda a, b, f=f: loss(f, a, b), (0, 1))(items, weight)
        for f in (K.cross_entropy, reference)
    )
    torch.testing.assert_close(found, expected)
    found, expected = (
        grad(lambda w, f=f: vmap(lambda v: loss(f, items, v))(w).sum())(weight.expand(2, 6))
        for f in (K.cross_entropy, reference)
    )
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0.01


def test_numbers_reach_a_kernel_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles an int's value in, and the compiled kernel is kept for others."""
    seen: list[Any] = []
    launch = Launch(None, {"": Tile(64, 1)})
    monkeypatch.setattr(launch, "_interpret", lambda grid, args: seen.extend(args))
    launch((1, 1, 1), [torch.ones(1)], (3,), (), 1, (1, 2.5))
    assert [type(x) for x in seen[1:]] == [int, float, float]


# ---- what is the caller's


@interpreted
def test_results_may_be_written_to() -> None:
    x, labels = seeded(4, 6).requires_grad_(), torch.tensor([0, 1, -100, 3])
    for reduction in ("mean", "sum"):
        loss = K.cross_entropy(x, labels, reduction=reduction)
        assert fused(K.find("cross_entropy"))
        loss.detach().mul_(3.0)
        loss /= 4
        loss.backward()
    both = vmap(K.cross_entropy)(torch.stack((x, x)), torch.stack((labels, labels)))
    both *= 0.5
    q, table = seeded(2, 4, 5, 8).requires_grad_(), seeded(5, 4)
    for out in K.rope(q.transpose(1, 2).contiguous().transpose(1, 2), q[:, :2], table, table):
        out.mul_(2)
        out[0, 0] = 0


@interpreted
def test_the_sum_alone_can_be_differentiated_twice() -> None:
    x, w = seeded(3, 4).requires_grad_(), seeded(4)
    total = K.fused_add_rms_norm(x, x * 2, w)[1]
    (first,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 18 * x)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 18.0))


# ---- compiled


def test_rope_is_traced_with_sizes_that_are_not_known() -> None:
    table = seeded(6, 4)

    def rotate(q: Tensor) -> Tensor:
        return K.rope(q, q, table, table, position_ids=torch.arange(6))[0]

    q = seeded(2, 1, 6, 4)
    compiled = torch.compile(rotate, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), rotate(q))


# ---- bad input

X, W, LABELS = torch.ones(3, 4), torch.ones(4), torch.zeros(3, dtype=torch.long)
Q = torch.ones(1, 2, 3, 4)
BAD = [
    lambda: K.rms_norm(X, W, None),
    lambda: K.rms_norm(X, W, torch.tensor(1e-6)),
    lambda: K.rms_norm(X, W, offset="1"),
    lambda: K.rms_norm([1.0]),
    lambda: K.rms_norm(X, [1.0]),
    lambda: K.fused_add_rms_norm(X, None, W),
    lambda: K.layer_norm(X, (4,)),
    lambda: K.layer_norm(X, W, eps=None),
    lambda: K.swiglu(None, X),
    lambda: K.geglu_tanh(X, "up"),
    lambda: K.swiglu_packed([1, 2]),
    lambda: K.rope(Q, Q, X, X, rotary_dim=4.0),
    lambda: K.rope(Q, Q, X, X, interleaved="False"),
    lambda: K.cross_entropy(X, LABELS, ignore_index=None),
    lambda: K.cross_entropy(X, LABELS, num_items="3"),
    lambda: K.cross_entropy(X, LABELS, z_loss=None),
    lambda: K.cross_entropy(X, LABELS, logit_scale=torch.tensor(2.0)),
    lambda: K.cross_entropy([1.0], LABELS),
    lambda: K.embedding([1], X),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_is_no_tensor_or_no_number_is_refused(case: int) -> None:
    with pytest.raises(InvalidType, match="found"):
        BAD[case]()


@interpreted
def test_numbers_of_other_kinds_are_numbers() -> None:
    import numpy as np

    x, labels = seeded(4, 6), torch.tensor([0, 1, -100, 3])
    plain = K.cross_entropy(x, labels, logit_scale=0.5, z_loss=1, softcap=30.0)
    kinds = {"logit_scale": np.float32(0.5), "z_loss": np.int64(1), "softcap": np.float64(30.0)}
    assert torch.equal(K.cross_entropy(x, labels, ignore_index=np.int64(-100), **kinds), plain)


# ---- published names


def test_published_names_are_the_operators() -> None:
    x, w = seeded(3, 4), seeded(4)
    gemma = {"offset": 1.0, "casting_mode": "gemma"}
    found = published.opake_rms_norm(x, w, 1e-5, 1.0, "gemma")
    assert torch.equal(found, K.rms_norm(x, w, 1e-5, **gemma))
    found = published.opake_fused_add_rms_norm(x, x.flip(0), w, 1e-5, 1.0, "gemma")
    for a, b in zip(found, K.fused_add_rms_norm(x, x.flip(0), w, 1e-5, **gemma), strict=True):
        assert torch.equal(a, b)
    assert set(published.__all__) <= set(dir(published))
