"""Llama under functorch inside a scope: stock's numbers, one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import (
    GRADIENT_BAR,
    Result,
    Snapshot,
    assert_exact,
    error,
    errors,
    model_loss,
    peak_memory,
    per_example,
    same_bits,
    stock_loop,
    trainable,
)
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo import CACHE, LENGTH, PAD, VOCAB, lengths_mask, tokens

import opake
from opake.compat.attention import SDPA, sdpa
from opake.errors import PackedSequences

# torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
forward_mode = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated",
    "ignore:Attempted to insert a get_attr Node",  # linearize builds a graph from its constants
)

attentions = pytest.mark.parametrize("attn", ["sdpa", "eager"])
forms = pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])


def make(
    attn: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    cls: Any = LlamaForCausalLM,
    **config: Any,
) -> Any:
    """A llama of two layers whose weights are large enough for attention to be uneven."""
    torch.manual_seed(0)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
    }
    return cls(LlamaConfig(**{**small, **config}, attn_implementation=attn)).to(dtype)


BYSTANDER = make()
"""A model that a scope is opened for, to look at others meanwhile."""


def padded(mask: Tensor, *, label_padding: bool = False) -> dict[str, Tensor]:
    ids = tokens(len(mask)).masked_fill(mask == 0, PAD)
    labels = ids if label_padding else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def unpadded(size: int = 4, length: int = LENGTH, **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens(size, length), "labels": tokens(size, length), **more}


RIGHT = lengths_mask([6, 3, 1, 5], "right")
LEFT = lengths_mask([6, 3, 1, 5], "left")
MIXED = torch.stack([RIGHT[0], RIGHT[1], LEFT[1], torch.zeros(LENGTH, dtype=torch.long)])


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("found", "expected", "floor", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([0.0, 0.0], [0.0, 0.0], 0, 0),
        ([1.0, 3.0], [0.0, 4.0], 0, 0.25),
        ([0.0, 1.0], [0.0, 0.0], 0, INF),
        ([0.0, 1.0], [0.0, 0.0], 0.5, 2),
        ([NAN, 1.0], [NAN, 2.0], 0, 0.5),
        ([NAN, INF], [NAN, INF], 0, 0),
        ([NAN, 1.0], [1.0, 1.0], 0, INF),
        ([1.0, 1.0], [NAN, 1.0], 0, INF),
        ([1.0, INF], [1.0, -INF], 0, INF),
        ([1.0, INF], [1.0, NAN], 0, INF),
        ([1.0], [1.0, 1.0], 0, INF),
    ],
)
def test_the_error_of_a_result_is_as_defined(
    found: list[float], expected: list[float], floor: float, value: float
) -> None:
    assert error(torch.tensor(found), torch.tensor(expected), floor) == value


def test_the_floor_of_a_gradient_is_a_thousandth_of_its_examples_largest() -> None:
    losses = torch.ones(2)
    expected = Result(losses, {"a": torch.tensor([[10.0], [1.0]]), "b": torch.zeros(2, 1)})
    found = Result(losses, {"a": expected.grads["a"], "b": torch.tensor([[0.001], [0.001]])})
    assert errors(found, expected) == pytest.approx((0, 1))  # 0.001 / (1e-3 * 1), second example


def test_the_reference_refuses_to_run_in_a_scope() -> None:
    model = make()
    with opake.patched(BYSTANDER), pytest.raises(AssertionError, match="stock"):
        stock_loop(model, unpadded())


def test_the_snapshot_sees_what_a_scope_does() -> None:
    model = make()
    before = Snapshot(model)
    with opake.patched(model):
        changes = before.changes()
    assert "LlamaForCausalLM.model" in changes
    assert "torch._functorch.eager_transforms" in changes
    assert "the attention registry" in changes
    assert before.changes() == []


def assert_loops(
    model: Any,
    batch: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    flags: dict[str, Any] | None = None,
    floor: float = 1e-3,
    **options: Any,
) -> None:
    """Assert that the patched model, given a batch dimension or none, has the loop's numbers."""
    expected = stock_loop(model, batch, loss_of, **options)
    with opake.patched(model, **(flags or {})), torch.no_grad():
        found = [
            per_example(model, batch, loss_of, batched=batched, **options)
            for batched in (True, False)
        ]
    noise = 0.0
    if model.dtype == torch.float32 and errors(found[0], expected)[1] > GRADIENT_BAR[model.dtype]:
        wide = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
        truth = stock_loop(copy.deepcopy(model).double(), wide, loss_of, **options)
        noise = errors(expected, truth)[1]
    for result in found:
        assert_exact(result, expected, floor=floor, noise=noise)


def test_a_batched_call_keeps_its_batch_dimension() -> None:
    model, ids = make(), tokens()
    with opake.patched(model), torch.no_grad():
        one = vmap(lambda x: model(input_ids=x[None], use_cache=False).logits)(ids)
        two = vmap(lambda x: model(input_ids=x, use_cache=False).logits)(tokens(6).view(3, 2, -1))
    assert one.shape == (4, 1, LENGTH, VOCAB)
    assert two.shape == (3, 2, LENGTH, VOCAB)


def test_outside_a_transform_a_call_without_a_batch_is_stocks() -> None:
    model, ids = make(), tokens()[0]
    stock = failure(lambda: model(input_ids=ids))
    with opake.patched(model):
        assert failure(lambda: model(input_ids=ids)) == stock


def failure(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    return type(raised.value), str(raised.value)


@attentions
@pytest.mark.parametrize("masked", [True, False])
def test_a_row_does_not_depend_on_its_place(attn: str, masked: bool) -> None:
    model, batch = make(attn), padded(MIXED, label_padding=True)
    if not masked:
        del batch["attention_mask"]
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
        turned = per_example(model, {n: x.roll(1, 0) for n, x in batch.items()}, batched=False)
    for i in range(4):
        assert same_bits(found.row(i), turned.row((i + 1) % 4))


# --- calls and rows

PACKED = torch.tensor(
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
)


@forward_mode
@forms
def test_packed_rows_under_nested_transforms_are_refused(batched: bool) -> None:
    model, ids = make(), tokens()
    calls = {"input_ids": ids, "position_ids": PACKED}

    def logits(scale: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        call = {"input_ids": ids, "position_ids": positions}
        if batched:
            call = {name: x[None] for name, x in call.items()}
        return (scale * model(**call).logits).sum()

    twice = vmap(vmap(grad(logits), (None, 0, 0)), (None, 1, 1))
    with opake.patched(model):
        with pytest.raises(PackedSequences):
            twice(torch.ones(()), *(x.view(2, 2, -1) for x in calls.values()))
        with pytest.raises(PackedSequences):
            jvp(lambda s: logits(s, ids[1], PACKED[1]), (torch.ones(()),), (torch.ones(()),))


@forms
def test_a_cache_that_is_given_lets_positions_restart(batched: bool) -> None:
    model, ids, prefix = make(), tokens(), tokens(4, 3, seed=9)

    def logits(ids: Tensor, prefix: Tensor) -> Tensor:
        cache = model(input_ids=prefix[None], use_cache=True)[CACHE]
        positions = torch.tensor([3, 4, 5, 3, 4, 5])
        call = {"input_ids": ids, "position_ids": positions}
        if batched:
            call = {name: x[None] for name, x in call.items()}
        return model(**call, **{CACHE: cache}).logits.view(LENGTH, VOCAB)

    with torch.no_grad():
        batched_was, batched = batched, True
        stock = torch.stack([logits(ids[i], prefix[i]) for i in range(4)])
        batched = batched_was
        with opake.patched(model):
            found = vmap(logits)(ids, prefix)
    for i in range(4):
        assert error(found[i], stock[i]) <= 1e-5


# --- first-order gradients


def net(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(3).sum() + (w.sin() @ w.T).logsumexp(0).sum()


def vector(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(2) + w.diagonal().exp()


W, X = torch.randn(4, 4, generator=torch.Generator().manual_seed(4)), torch.randn(3, 4)
V = torch.full((4, 4), 0.3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return net(self.weight, x)


SMALL = Small()
PARAMS = {"weight": W}


def call_small(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(SMALL, params, (x,))


def sum_grad(w: Tensor, x: Tensor) -> Tensor:
    return grad(net)(w, x).pow(2).sum()


COMPOSITIONS: dict[str, Callable[[], Any]] = {
    "grad": lambda: grad(net)(W, X[0]),
    "grad_and_value": lambda: grad_and_value(net)(W, X[0]),
    "grad of two arguments": lambda: grad(net, argnums=(0, 1))(W, X[0]),
    "grad of grad": lambda: grad(sum_grad)(W, X[0]),
    "grad of grad of grad": lambda: grad(lambda w: grad(sum_grad)(w, X[0]).pow(2).sum())(W),
    "vmap of grad": lambda: vmap(grad(net), (None, 0))(W, X),
    "vmap of vmap of grad": lambda: vmap(vmap(grad(net), (None, 0)), (0, None))(
        W.expand(2, 4, 4), X
    ),
    "grad of vmap": lambda: grad(lambda w: vmap(net, (None, 0))(w, X).sum())(W),
    "grad of vmap of grad": lambda: grad(lambda w: vmap(grad(net), (None, 0))(w, X).pow(2).sum())(
        W
    ),
    "vmap of grad of grad": lambda: vmap(grad(sum_grad), (None, 0))(W, X),
    "jacrev": lambda: jacrev(vector)(W, X[0]),
    "jacfwd": lambda: jacfwd(vector)(W, X[0]),
    "jacfwd of jacrev": lambda: jacfwd(jacrev(vector))(W, X[0]),
    "jacrev of jacfwd": lambda: jacrev(jacfwd(vector))(W, X[0]),
    "jacrev of grad": lambda: jacrev(grad(net))(W, X[0]),
    "jacfwd of grad": lambda: jacfwd(grad(net))(W, X[0]),
    "hessian": lambda: hessian(net)(W, X[0]),
    "vmap of hessian": lambda: vmap(hessian(net), (None, 0))(W, X),
    "hessian of grad": lambda: hessian(sum_grad)(W, X[0]),
    "vjp": lambda: vjp(lambda w: vector(w, X[0]), W)[1](torch.ones(4)),
    "vjp of grad": lambda: vjp(lambda w: grad(net)(w, X[0]), W)[1](V),
    "grad of vjp": lambda: grad(
        lambda w: vjp(lambda u: vector(u, X[0]), w)[1](torch.ones(4))[0].pow(2).sum()
    )(W),
    "jvp": lambda: jvp(lambda w: vector(w, X[0]), (W,), (V,)),
    "jvp of grad": lambda: jvp(lambda w: grad(net)(w, X[0]), (W,), (V,)),
    "vmap of jvp of grad": lambda: vmap(lambda x: jvp(lambda w: grad(net)(w, x), (W,), (V,)))(X),
    "jvp of vmap of grad": lambda: jvp(lambda w: vmap(grad(net), (None, 0))(w, X), (W,), (V,)),
    "grad of jvp": lambda: grad(lambda w: jvp(lambda u: net(u, X[0]), (w,), (V,))[1])(W),
    "jvp of jvp of grad": lambda: jvp(
        lambda u: jvp(lambda w: grad(net)(w, X[0]), (u,), (V,))[1], (W,), (V,)
    ),
    "linearize": lambda: linearize(lambda w: vector(w, X[0]), W)[1](V),
    "linearize of grad": lambda: linearize(lambda w: grad(net)(w, X[0]), W)[1](V),
    "functional_call, vmap of grad": lambda: vmap(grad(call_small), (None, 0))(PARAMS, X),
    "functional_call, hessian": lambda: hessian(call_small)(PARAMS, X[0]),
    "functional_call, grad of grad": lambda: grad(
        lambda p: grad(call_small)(p, X[0])["weight"].pow(2).sum()
    )(PARAMS),
    "functional_call, jacrev": lambda: jacrev(call_small)(PARAMS, X[0]),
    "an inner grad with gradients off": lambda: vmap(lambda x: torch.no_grad()(grad(net))(W, x))(X),
    "an outer backward": lambda: outer_backward(),
}


def outer_backward() -> Tensor:
    with torch.enable_grad():
        w = W.clone().requires_grad_()
        return torch.autograd.grad(vmap(grad(net), (None, 0))(w, X).pow(2).sum(), w)[0]


@forward_mode
@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_live_scope_changes_no_other_transform(name: str, mode: Any) -> None:
    compose = COMPOSITIONS[name]
    with mode():
        stock = compose()
        with opake.patched(BYSTANDER):
            assert same_bits(compose(), stock)


@forward_mode
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_live_scope_changes_no_other_model(mode: Any) -> None:
    model, ids = make("eager"), tokens()
    params = trainable(model)
    norm = {"model.norm.weight": params["model.norm.weight"]}

    def loss(params: Any, ids: Tensor) -> Tensor:
        call = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        return functional_call(model, params, (), call).loss

    def results() -> list[Any]:
        return [
            grad(lambda p: grad(loss)(p, ids[0])["model.norm.weight"].pow(2).sum())(norm),
            hessian(loss)(norm, ids[0]),
            jvp(lambda p: vmap(grad(loss), (None, 0))(p, ids), (norm,), (norm,)),
            # Under no_grad this is what the scope makes cheaper, by formulas that round alike
            # but not equally; the next test says how.
            [] if mode is torch.no_grad else vmap(grad(loss), (None, 0))(params, ids),
        ]

    with mode():
        stock = results()
        with opake.patched(BYSTANDER):
            assert same_bits(results(), stock)


def test_a_first_order_gradient_is_that_of_an_ordinary_backward() -> None:
    # silu and others have a second formula for a backward that is differentiated again. Without
    # a second order, the numbers are those of tensor.backward(), not of functorch's own.
    x = torch.linspace(-5, 5, 101).requires_grad_()
    expected = torch.autograd.grad(F.silu(x).sum(), x)[0]
    with torch.no_grad():
        assert not same_bits(grad(lambda x: F.silu(x).sum())(x), expected)
        with opake.patched(BYSTANDER):
            assert same_bits(grad(lambda x: F.silu(x).sum())(x), expected)


@forward_mode
def test_second_order_through_the_patched_model_is_stocks() -> None:
    model, ids, mask = make("eager"), tokens(), RIGHT

    def loss(norm: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        call = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        call = {name: x[None] for name, x in call.items()}
        return functional_call(model, {"model.norm.weight": norm}, (), call).loss

    norm = trainable(model)["model.norm.weight"]
    stock = []
    for row, row_mask in zip(ids, mask, strict=True):
        leaf = norm.clone().requires_grad_()
        first = torch.autograd.grad(loss(leaf, row, row_mask), leaf, create_graph=True)[0]
        rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in first]
        stock.append(torch.stack(rows))
    for mode in (torch.no_grad, torch.enable_grad):
        with opake.patched(model), mode():
            found = vmap(jacrev(grad(loss)), (None, 0, 0))(norm, ids, mask)
            forward = vmap(hessian(loss), (None, 0, 0))(norm, ids, mask)
        for i in range(4):
            # Relative to the largest entry; a Hessian sums as many terms as a gradient.
            assert error(found[i], stock[i]) <= 1e-5
            assert error(forward[i], stock[i]) <= 1e-5


def test_first_order_graphs_keep_less_alive() -> None:
    model, batch = make(num_hidden_layers=4), unpadded()

    def peak() -> int:
        with torch.no_grad(), peak_memory() as read:
            per_example(model, batch, batched=True, use_cache=False)
        return read()

    stock = peak()
    # Folded attention keeps its inputs for a second order, which stock's fused one has not.
    with opake.patched(model, first_order=False, sdpa=False):
        without = peak()
    with opake.patched(model):
        found = peak()
    assert peak() == stock
    assert without == stock
    # Gradients and one layer's backward instead of everything: 0.42 of stock was measured.
    assert found < 0.6 * stock


def test_gradients_enabled_keep_the_graph_of_the_backward() -> None:
    model, batch = make(), unpadded()
    norm = model.model.norm.weight

    def loss(weight: Tensor, example: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {"model.norm.weight": weight}, (), example).loss

    with opake.patched(model):
        grads = vmap(grad(loss), (None, 0))(norm, batch)
        assert grads.requires_grad
        assert torch.autograd.grad(grads.pow(2).sum(), norm)[0].abs().max() > 0


# --- concerns, one by one


def functorch_failure(model: Any, batch: dict[str, Tensor], *, batched: bool) -> tuple[type, str]:
    return failure(lambda: per_example(model, batch, batched=batched, use_cache=False))


@attentions
def test_without_batchify_a_call_without_a_batch_fails_as_in_stock(attn: str) -> None:
    model, batch = make(attn), unpadded()
    stock = functorch_failure(model, batch, batched=False)
    expected = stock_loop(model, batch)
    with opake.patched(model, batchify=False):
        assert functorch_failure(model, batch, batched=False) == stock
        assert_exact(per_example(model, batch, batched=True), expected)


@attentions
def test_packed_rows_are_refused_without_batchify_too(attn: str) -> None:
    model, batch = make(attn), unpadded(position_ids=PACKED)
    with opake.patched(model, batchify=False), pytest.raises(PackedSequences):
        per_example(model, batch, batched=True)


@attentions
def test_without_vmap_masking_packed_rows_are_not_looked_for(attn: str) -> None:
    model, batch = make(attn), unpadded(position_ids=PACKED)
    with opake.patched(model, batchify=False, vmap_masking=False):
        kind, message = functorch_failure(model, batch, batched=True)
    assert kind is RuntimeError
    assert "data-dependent" in message


def test_without_vmap_masking_a_padding_mask_fails_as_in_stock() -> None:
    model, batch = make(), padded(MIXED)
    stock = functorch_failure(model, batch, batched=True)
    assert "data-dependent" in stock[1]
    with opake.patched(model, vmap_masking=False):
        assert functorch_failure(model, batch, batched=True) == stock


def test_without_vmap_masking_eager_still_has_the_loops_gradients() -> None:
    assert_loops(make("eager"), padded(MIXED), flags={"vmap_masking": False})


def test_without_kv_cache_a_transform_builds_one_as_stock_does() -> None:
    seen = []

    def loss_of(output: Any) -> Tensor:
        seen.append(output.get(CACHE) is not None)
        return output.loss

    assert_loops(make(), unpadded(), loss_of, flags={"kv_cache": False})
    assert seen == [True] * 6


def test_attention_runs_through_a_key_of_its_own_and_the_config_is_untouched() -> None:
    model = make()
    layers = [layer.self_attn for layer in model.model.layers]
    with opake.patched(model):
        assert {layer.config._attn_implementation for layer in layers} == {SDPA}
        assert ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa
        assert model.config._attn_implementation == "sdpa"
        view = layers[0].config
    assert {layer.config._attn_implementation for layer in layers} == {"sdpa"}
    assert view._attn_implementation == "sdpa"
    assert SDPA not in ALL_ATTENTION_FUNCTIONS._global_mapping


def test_without_sdpa_attention_is_the_stock_one() -> None:
    model, batch = make(), padded(MIXED)
    config, keys = model.config, list(ALL_ATTENTION_FUNCTIONS._global_mapping)
    expected = stock_loop(model, batch)
    with opake.patched(model, sdpa=False), torch.no_grad():
        assert all(layer.self_attn.config is config for layer in model.model.layers)
        assert list(ALL_ATTENTION_FUNCTIONS._global_mapping) == keys
        assert_exact(per_example(model, batch, batched=False), expected)


def test_without_first_order_functorch_is_untouched() -> None:
    stock = eager_transforms.grad_and_value_impl
    model, batch = make(), padded(MIXED)
    expected = stock_loop(model, batch)
    with opake.patched(model, first_order=False), torch.no_grad():
        assert eager_transforms.grad_and_value_impl is stock
        assert_exact(per_example(model, batch, batched=False), expected)
    with opake.patched(model):
        assert eager_transforms.grad_and_value_impl is not stock
    assert eager_transforms.grad_and_value_impl is stock


def test_without_compat_transforms_fail_as_in_stock() -> None:
    model = make()
    calls = [(unpadded(), False), (padded(MIXED), True)]
    stock = [functorch_failure(model, batch, batched=batched) for batch, batched in calls]
    with opake.patched(model, compat=False):
        for (batch, batched), expected in zip(calls, stock, strict=True):
            assert functorch_failure(model, batch, batched=batched) == expected
