"""opake.functional against a plain loop of backward passes, one example at a time."""

from __future__ import annotations

import collections
import inspect
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from opake.errors import InvalidArgument, InvalidBatch, NotAModel
from opake.functional import make_functional, per_example_grads, with_batch_dim

# Sums of fewer than 1e4 products, ordered differently by vmap and by the loop.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)


def close(found: Any, expected: Any, tolerance: float) -> None:
    """Compare two pytrees leaf by leaf, relative to the largest entry of each leaf."""
    found, found_spec = pytree.tree_flatten(found)
    expected, expected_spec = pytree.tree_flatten(expected)
    assert found_spec == expected_spec
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        scale = b.abs().max().clamp(min=1e-3) if b.numel() else 1
        assert ((a.to(b.dtype) - b).abs() <= tolerance * scale).all(), (a, b)


def loop(loss_fn: Any, params: Any, batch: Any, seed: int | None = None) -> tuple[Any, Tensor]:
    """Gradients and losses by one ordinary backward pass per example, reseeded before each."""
    leaves, spec = pytree.tree_flatten(params)
    size = pytree.tree_leaves(batch)[0].shape[0]
    rows, losses = [], []
    for i in range(size):
        if seed is not None:
            torch.manual_seed(seed)
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        example = pytree.tree_map(lambda x, i=i: x[i], batch)
        loss = loss_fn(pytree.tree_unflatten(own, spec), example)
        rows.append(torch.autograd.grad(loss, own))
        losses.append(loss.detach())
    grads = [torch.stack(column) for column in zip(*rows, strict=True)]
    return pytree.tree_unflatten(grads, spec), torch.stack(losses)


class Net(nn.Module):
    """An embedding tied to the head, a hidden layer, and dropout on demand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.hidden(self.embed(ids))), self.dropout)
        return self.head(x)


def make_net(
    dtype: torch.dtype, dropout: float = 0.0
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    fmodel, params = make_functional(Net(dropout).to(dtype))

    def loss_fn(params: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(fmodel(params, example["ids"]), example["labels"])

    ids = torch.randint(0, 11, (2, 7, 5))
    return loss_fn, params, {"ids": ids[0], "labels": ids[1]}


# --- with_batch_dim


def test_seed_example_works_under_vmap_grad() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    stock_signature = inspect.signature(model.forward)
    model.forward = with_batch_dim(
        model.forward,
        batch_kwargs={"input_ids": 2, "attention_mask": 2, "labels": 2, "inputs_embeds": 3},
        min_ndim=2,
    )
    assert inspect.signature(model.forward) == stock_signature
    fmodel, params = make_functional(model)
    ids = torch.randint(0, 17, (3, 6))

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return fmodel(params, input_ids=ids, labels=ids, use_cache=False).loss

    found = vmap(grad(loss_fn), in_dims=(None, 0))(params, ids)
    close(found, loop(loss_fn, params, ids)[0], TOLERANCE[torch.float32])
    batched = loop(lambda p, e: loss_fn(p, e.unsqueeze(0)), params, ids)[0]
    close(found, batched, TOLERANCE[torch.float32])
    output = model(ids[0], output_hidden_states=True, use_cache=False)
    assert isinstance(output, CausalLMOutputWithPast)
    assert output.logits.shape == output["logits"].shape == output.to_tuple()[0].shape == (6, 17)
    assert [h.shape for h in output.hidden_states] == [(6, 8)] * 3
    embeds = model.get_input_embeddings()(ids[0])
    close(model(inputs_embeds=embeds).logits, output.logits, TOLERANCE[torch.float32])


def shapes(a: Tensor, b: Any = None, *more: Any, key: Any = None, **rest: Any) -> Any:
    """The shape of every tensor that arrived."""
    arrived = {"a": a, "b": b, "key": key, **dict(enumerate(more)), **rest}
    return {name: tuple(x.shape) for name, x in arrived.items() if isinstance(x, Tensor)}


X = torch.zeros(3)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "expected"),
    [
        ({"batch_argnums": (0,)}, (X, X), {}, {"a": (1, 3), "b": (3,)}),
        ({"batch_argnums": [0, 1]}, (X,), {"b": X}, {"a": (1, 3), "b": (1, 3)}),
        ({"batch_argnums": (1,)}, (X, None), {}, {"a": (3,)}),
        ({"batch_argnums": (2,)}, (X, X, X, X), {}, {"a": (3,), "b": (3,), 0: (1, 3), 1: (3,)}),
        ({"batch_kwargs": ["b"]}, (X, X), {}, {"a": (3,), "b": (1, 3)}),
        ({"batch_kwargs": {"b": 9}}, (X, X[None]), {}, {"a": (3,), "b": (1, 1, 3)}),
        ({"batch_kwargs": ["key", "z"]}, (1,), {"key": X, "z": X}, {"key": (1, 3), "z": (1, 3)}),
        (
            {"batch_kwargs": {"a": 1, "b": 3}, "min_ndim": 2},
            (X, X[None]),
            {},
            {"a": (3,), "b": (1, 1, 3)},
        ),
        ({"batch_kwargs": ["b"], "min_ndim": 2}, (X, X[None]), {}, {"a": (3,), "b": (1, 3)}),
        (
            {"batch_argnums": (0, 1), "batch_kwargs": {"b": 1}, "min_ndim": 2},
            (X, X),
            {},
            {"a": (1, 3), "b": (3,)},
        ),
        ({"batch_argnums": (0,), "min_ndim": 3}, (X,), {}, {"a": (1, 3)}),
        ({"batch_argnums": (1,), "min_ndim": 1}, (X, torch.tensor(2)), {}, {"a": (3,), "b": (1,)}),
        ({"batch_argnums": (1,)}, (X, "text"), {}, {"a": (3,)}),
    ],
)
def test_arguments_are_unsqueezed(options: Any, args: Any, kwargs: Any, expected: Any) -> None:
    before = dict(kwargs)
    assert with_batch_dim(shapes, **options)(*args, **kwargs) == expected
    assert kwargs == before


Pair = collections.namedtuple("Pair", ["left", "right"])


class Items(list[Any]):
    pass


class Table(collections.UserDict[str, Any]):
    pass


def test_output_is_squeezed_through_containers() -> None:
    opaque = types.SimpleNamespace(x=torch.zeros(1, 2))
    output = {
        "pair": Pair(torch.zeros(1, 2), torch.tensor(3.0)),
        "items": Items([torch.zeros(2, 1), [torch.zeros(1), "text", None]]),
        "ordered": collections.OrderedDict(b=torch.zeros(1, 1), a=2),
        "table": Table(x=torch.zeros(1, 4)),
        "proxy": types.MappingProxyType({"x": torch.zeros(1, 4)}),
        "top": torch.topk(torch.zeros(1, 4), 2),
        "size": torch.Size([1, 2]),
        "opaque": opaque,
    }
    found = with_batch_dim(lambda x: output, (0,), min_ndim=2)(X)
    assert isinstance(found["pair"], Pair)
    assert (found["pair"].left.shape, found["pair"].right.shape) == ((2,), ())
    assert isinstance(found["items"], Items)
    assert found["items"][0].shape == (2, 1)
    assert found["items"][1][0].shape == ()
    assert found["items"][1][1:] == ["text", None]
    assert isinstance(found["ordered"], collections.OrderedDict)
    assert list(found["ordered"]) == ["b", "a"]
    assert found["ordered"]["b"].shape == (1,)
    assert isinstance(found["table"], Table)
    assert found["table"]["x"].shape == found["proxy"]["x"].shape == (4,)
    assert isinstance(found["proxy"], types.MappingProxyType)
    assert type(found["top"]) is type(output["top"])
    assert found["top"].values.shape == (2,)
    assert found["size"] is output["size"]
    assert found["opaque"] is opaque
    assert output["pair"].left.shape == (1, 2)  # not written to


def test_no_op_returns_the_very_output() -> None:
    output = {"x": torch.zeros(1, 3)}
    wrapped = with_batch_dim(lambda x: output, (0,), min_ndim=1)
    assert wrapped(X) is output
    assert with_batch_dim(lambda x: output, (0,))(X) is output


def test_wrapper_can_be_recognised() -> None:
    wrapped = with_batch_dim(shapes, (0,))
    assert wrapped._opake_with_batch_dim is True
    assert wrapped.__wrapped__ is shapes
    assert wrapped.__name__ == "shapes"
    assert inspect.signature(wrapped) == inspect.signature(shapes)
    module = nn.Linear(3, 2)
    call = with_batch_dim(module, (0,), min_ndim=2)
    assert call(torch.zeros(3)).shape == (2,)
    assert "_parameters" not in vars(call)
    assert with_batch_dim(torch.add, batch_kwargs=["other"])(X, other=X).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_argnums": (-1,)}, "has -1"),
        ({"batch_argnums": (1,)}, "0 to 0"),
        ({"batch_kwargs": "x"}, r"\['x'\]"),
        ({"min_ndim": 0}, "min_ndim must be a positive int"),
        ({"min_ndim": 2, "batch_kwargs": {"x": None}}, r"batch_kwargs\['x'\]"),
    ],
)
def test_with_batch_dim_errors(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        with_batch_dim(lambda x: x, **options)


# --- make_functional


def test_make_functional_takes_what_is_trainable() -> None:
    net = Net()
    net.hidden.bias.requires_grad_(False)
    fmodel, params = make_functional(net)
    assert list(params) == ["embed.weight", "hidden.weight"]
    assert not any(p.requires_grad for p in params.values())
    assert params["embed.weight"].data_ptr() == net.embed.weight.data_ptr()
    ids = torch.arange(5)
    assert torch.equal(fmodel(params, ids), net(ids))
    assert torch.equal(fmodel({}, ids=ids), net(ids))
    doubled = fmodel({"embed.weight": 2 * params["embed.weight"]}, ids)
    by_hand = F.linear(torch.tanh(net.hidden(2 * net.embed(ids))), 2 * net.embed.weight)
    assert torch.equal(doubled, by_hand)
    assert torch.equal(fmodel({"head.weight": 2 * params["embed.weight"]}, ids), doubled)
    assert all(a is b for a, b in zip(net.parameters(), Net.parameters(net), strict=True))


def test_make_functional_errors() -> None:
    with pytest.raises(NotAModel, match="found function") as caught:
        make_functional(loop)  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError)
    with pytest.raises(InvalidArgument, match="requires_grad_"):
        make_functional(Net().requires_grad_(False))


# --- per_example_grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 7, 50])
def test_per_example_grads_equal_the_loop(dtype: torch.dtype, chunk_size: int | None) -> None:
    loss_fn, params, batch = make_net(dtype)
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    grads, losses = per_example_grads(loss_fn, params, batch, chunk_size=chunk_size)
    close((grads, losses), loop(loss_fn, params, batch), TOLERANCE[dtype])
    assert not any(leaf.requires_grad for leaf in (*grads.values(), losses))


def nested_loss(params: Any, example: Any) -> Tensor:
    (x, index), scale = example
    return (params["w"][0] @ x + params["w"][1][index]).sum() * params["s"] * scale


def test_pytrees_of_params_and_batch() -> None:
    torch.manual_seed(0)
    params = {
        "w": [torch.randn(2, 3).double(), torch.randn(4).double()],
        "s": torch.tensor(0.5).double(),
    }
    batch = ((torch.randn(5, 3).double(), torch.randint(0, 4, (5, 1))), torch.rand(5).double())
    found = per_example_grads(nested_loss, params, batch, chunk_size=2)
    close(found, loop(nested_loss, params, batch), 1e-12)
    assert isinstance(found[0]["w"], list)


def test_results_own_their_memory() -> None:
    """Under vmap the gradients of a and b are one, that of d is expanded, the loss is s."""
    params = {name: torch.zeros(3) for name in "abcd"} | {"s": torch.tensor(2.0)}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return params["d"].sum() + ((params["a"] + params["b"]) * 2).sum() + params["c"] @ x

    batch, rows = torch.rand(4, 3), torch.arange(4.0)
    for chunk_size in (None, 3):
        grads, _ = per_example_grads(loss_fn, params, batch, chunk_size=chunk_size)
        for leaf in grads.values():
            leaf.mul_(rows.view(-1, *[1] * (leaf.ndim - 1)))
        for name, factor in {"a": 2.0, "b": 2.0, "c": batch, "d": 1.0}.items():
            assert torch.equal(grads[name], factor * rows[:, None].expand(4, 3))
        losses = per_example_grads(lambda p, x: p["s"], params, batch, chunk_size=chunk_size)[1]
        assert torch.equal(losses.mul_(rows), 2 * rows)
        assert params["s"] == 2


def test_same_randomness_equals_a_reseeded_loop() -> None:
    loss_fn, params, batch = make_net(torch.float64, dropout=0.5)
    expected = loop(loss_fn, params, batch, seed=3)
    for chunk_size in (None, 1, 3):
        torch.manual_seed(3)
        found = per_example_grads(loss_fn, params, batch, chunk_size=chunk_size, randomness="same")
        close(found, expected, 1e-12)


def test_different_and_refused_randomness() -> None:
    loss_fn, params, _ = make_net(torch.float64, dropout=0.5)
    ids = torch.arange(5).expand(6, 5)
    batch = {"ids": ids, "labels": ids}
    for chunk_size in (None, 2):
        losses = per_example_grads(loss_fn, params, batch, chunk_size=chunk_size)[1]
        assert len(losses.unique()) == 6
        with pytest.raises(RuntimeError, match="randomness"):
            per_example_grads(loss_fn, params, batch, chunk_size=chunk_size, randomness="error")


def never(params: Any, example: Any) -> Tensor:
    pytest.fail("loss_fn was called")


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_empty_batch(chunk_size: int | None) -> None:
    params = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "s": torch.tensor(1.0)}
    batch = {"x": torch.zeros(0, 3)}
    grads, losses = per_example_grads(never, params, batch, chunk_size=chunk_size)
    assert (grads["w"].shape, grads["w"].dtype) == ((0, 2, 3), torch.bfloat16)
    assert (grads["s"].shape, losses.shape, losses.dtype) == ((0,), (0,), torch.float32)


P = {"w": torch.zeros(3)}


@pytest.mark.parametrize(
    ("params", "batch", "options", "error", "message"),
    [
        (
            P,
            {"x": torch.zeros(2, 3), "y": [torch.zeros(3)]},
            {},
            InvalidBatch,
            r"batch\['x'\]: 2, batch\['y'\]\[0\]: 3",
        ),
        (P, {}, {}, InvalidBatch, "holds no tensor"),
        (P, {"x": None, "y": X}, {}, InvalidBatch, r"batch\['x'\] is a NoneType"),
        (P, [X, 3], {}, InvalidBatch, r"batch\[1\] is a int"),
        (P, torch.tensor(1.0), {}, InvalidBatch, "batch has no dimension"),
        ({}, X, {}, InvalidArgument, "params holds no tensor"),
        ({"w": 1.0}, X, {}, InvalidArgument, r"params\['w'\] is a float"),
        ({"w": torch.tensor(1)}, X, {}, InvalidArgument, r"is a torch.int64 tensor"),
        (nn.Linear(1, 1), X, {}, InvalidArgument, "params is a Linear"),
        (P, X, {"chunk_size": 0}, InvalidArgument, "positive int"),
        (P, X, {"chunk_size": True}, InvalidArgument, "positive int"),
        (P, X, {"chunk_size": 2.0}, InvalidArgument, "positive int"),
        (P, X, {"randomness": "some"}, InvalidArgument, "'different'"),
    ],
)
def test_bad_input_is_refused_before_the_loss_runs(
    params: Any, batch: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        per_example_grads(never, params, batch, **options)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, x: (p["w"] * x).sum()[None], r"found shape \(1,\).*squeeze\(0\)"),
        (lambda p, x: p["w"] * x, r"found shape \(3,\)"),
        (lambda p, x: {"loss": x.sum()}, "found dict.*output.loss"),
        (lambda p, x: (x > 0).sum(), "floating point loss, found torch.int64"),
    ],
)
def test_loss_that_is_no_scalar(loss_fn: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        per_example_grads(loss_fn, P, torch.zeros(2, 3))
