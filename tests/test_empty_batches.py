"""A batch of no examples runs in a scope, where stock raises in nearly all families."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import traits
import zoo
from torch.func import functional_call, grad
from torch.utils._pytree import tree_leaves
from transformers import BertForMultipleChoice, LlamaForCausalLM

import opake
from opake.compat._versions import CACHE_NAMES


def empty(**more: Any) -> dict[str, Any]:
    ids = torch.empty(0, zoo.LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, **more}


def assert_zero_gradients(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) > 4
    assert all((g == 0).all() for g in grads)


@zoo.families
@pytest.mark.case("empty batches")
@pytest.mark.parametrize("mask", [True, False])
def test_an_empty_batch_has_no_rows_and_zero_gradients(model_type: str, mask: bool) -> None:
    call = empty(use_cache=False)
    if mask:
        call["attention_mask"] = call["input_ids"]
    for attn in zoo.attentions(model_type):
        model = zoo.tiny(model_type, attn)
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            assert model(**call).logits.shape == (0, zoo.LENGTH, zoo.VOCAB)  # as falcon's has
        with opake.patched(model):
            output = model(**call, output_hidden_states=True)
            assert output.logits.shape == (0, zoo.LENGTH, zoo.VOCAB)
            assert all(x.shape[:2] == (0, zoo.LENGTH) for x in output.hidden_states)
            assert output.loss.isnan()  # the mean over no label, as stock's
            assert_zero_gradients(model, output.loss)
            with torch.no_grad():
                assert model(**call).logits.shape == (0, zoo.LENGTH, zoo.VOCAB)


def test_an_empty_batch_of_positions_that_come_from_the_mask() -> None:
    for attn in zoo.attentions("falcon"):
        model = zoo.tiny("falcon", attn, alibi=True)
        for call in (empty(), empty(attention_mask=empty()["input_ids"])):
            with opake.patched(model):
                output = model(**call)
            assert output.logits.shape == (0, zoo.LENGTH, zoo.VOCAB)
            assert_zero_gradients(model, output.loss)


@zoo.families
@pytest.mark.case("empty batches")
def test_an_empty_batch_adds_nothing_to_a_sum_over_many(model_type: str) -> None:
    if traits.is_encoder(model_type):
        pytest.skip("its loss takes no num_items_in_batch")
    model = zoo.tiny(model_type, zoo.attentions(model_type)[0])
    with opake.patched(model):
        assert model(**empty(), num_items_in_batch=10).loss == 0


@zoo.families
@pytest.mark.case("empty batches")
@pytest.mark.parametrize("head", ["base", "sequence", "token", "question"])
def test_every_head_takes_an_empty_batch(model_type: str, head: str) -> None:
    if not zoo.has_head(model_type, head):
        pytest.skip("no such head in transformers")
    model = zoo.tiny(model_type, zoo.attentions(model_type)[0], head=head)
    call = empty()
    del call["labels"]
    labels: dict[str, dict[str, torch.Tensor]] = {
        "base": {},
        "sequence": {"labels": torch.empty(0, dtype=torch.long)},
        "token": {"labels": torch.empty(0, zoo.LENGTH, dtype=torch.long)},
        "question": {
            "start_positions": torch.empty(0, dtype=torch.long),
            "end_positions": torch.empty(0, dtype=torch.long),
        },
    }
    with opake.patched(model):
        output = model(**call, **labels[head])
        if head == "base":
            assert output.last_hidden_state.shape == (0, zoo.LENGTH, zoo.width(model))
        else:
            assert output.loss.isnan()
            assert_zero_gradients(model, output.loss)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
@pytest.mark.parametrize("return_dict", [True, False])
def test_real_valued_labels_have_the_mean_of_nothing(problem: str, return_dict: bool) -> None:
    model = zoo.tiny("llama", head="sequence", num_labels=3, problem_type=problem)
    call = empty(labels=torch.empty(0, 3), return_dict=return_dict)
    with opake.patched(model):
        output = model(**call)
        assert output[0].isnan()
        assert output[1].shape == (0, 3)
        assert_zero_gradients(model, output[0])


def test_several_sequences_an_example() -> None:
    model = BertForMultipleChoice(zoo.tiny_fields("bert"))
    ids = torch.empty(0, 3, zoo.LENGTH, dtype=torch.long)
    with opake.patched(model):
        output = model(ids, labels=torch.empty(0, dtype=torch.long))
    assert output.logits.shape == (0, 3)
    assert output.loss.isnan()


@pytest.mark.parametrize("kind", ["embeddings", "positional", "tuple", "positions"])
def test_every_way_to_call(kind: str) -> None:
    model = zoo.tiny("llama")
    ids = empty()["input_ids"]
    with opake.patched(model):
        output = {
            "embeddings": lambda: model(
                inputs_embeds=torch.empty(0, zoo.LENGTH, zoo.width(model)), labels=ids
            ),
            "positional": lambda: model(ids, ids),
            "tuple": lambda: model(ids, labels=ids, return_dict=False),
            "positions": lambda: model(ids, position_ids=torch.arange(zoo.LENGTH)[None]),
        }[kind]()
    logits = output[1] if kind == "tuple" else output.logits
    assert logits.shape == (0, zoo.LENGTH, zoo.VOCAB)


@zoo.families
@pytest.mark.case("empty batches")
def test_a_cache_that_comes_back_has_no_rows(model_type: str) -> None:
    fields = {"is_decoder": True} if traits.is_encoder(model_type) else {}
    model = zoo.tiny(model_type, None, head="causal", **fields)
    with torch.no_grad():
        stock = model(zoo.tokens(1), use_cache=True)[zoo.cache_name(model)]
    stock.reorder_cache(torch.empty(0, dtype=torch.long))
    if any(rows_of(stock)):  # deepseek_v4's before 5.24
        pytest.skip(f"stock's cache of {model_type} does not reorder all that it holds")
    with opake.patched(model), torch.no_grad():
        cache = model(empty()["input_ids"], use_cache=True)[zoo.cache_name(model)]
    found = rows_of(cache)
    assert len(found) == len(rows_of(stock)) > 1
    assert not any(found)


def rows_of(cache: Any) -> list[int]:
    """The size of the first dimension of everything that a cache holds."""
    layers = getattr(cache, "self_attention_cache", cache).layers
    held = [x for layer in layers for x in tree_leaves(vars(layer)) if isinstance(x, torch.Tensor)]
    return [x.shape[0] for x in held if x.ndim]


@pytest.mark.parametrize("where", ["call", "config"])
def test_a_routers_auxiliary_loss_adds_nothing(where: str) -> None:
    fields = {"output_router_logits": True} if where == "config" else {}
    model = zoo.tiny("mixtral", router_aux_loss_coef=1.0, **fields)
    call = empty(num_items_in_batch=4, **({"output_router_logits": True} if not fields else {}))
    with opake.patched(model):
        output = model(**call)
    assert output.loss == 0
    assert_zero_gradients(model, output.loss)


def test_an_empty_batch_with_a_cache_of_its_own_is_left_to_stock() -> None:
    model = zoo.tiny("llama").eval()
    with opake.patched(model), torch.no_grad():
        output = model(empty()["input_ids"], use_cache=True)
        name = next(name for name in CACHE_NAMES if output.get(name) is not None)
        with pytest.raises(RuntimeError, match="shape"):
            model(empty()["input_ids"], **{name: output[name]})


def test_an_empty_batch_under_a_transform_has_zero_gradients() -> None:
    model: LlamaForCausalLM = zoo.tiny("llama")
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return functional_call(model, params, (ids,), {"labels": ids}).loss

    with opake.patched(model):
        grads = grad(loss)(params, empty()["input_ids"])
    assert all((g == 0).all() for g in grads.values())


def test_an_empty_sequence_is_left_to_stock() -> None:
    model = zoo.tiny("llama")
    ids = torch.empty(2, 0, dtype=torch.long)

    def run() -> str:
        try:
            return str(model(ids, use_cache=False).logits.shape)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    stock = run()
    with opake.patched(model):
        assert run() == stock
