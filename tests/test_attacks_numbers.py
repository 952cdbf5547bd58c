"""Unusual uses under a transform: hooks, shared modules, prompts, custom heads, empty batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from oracle import assert_exact, per_example, stock_loop
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from transformers import (
    BertForMultipleChoice,
    LlamaForSequenceClassification,
    LlamaPreTrainedModel,
)

import opake
from opake.errors import UnsupportedTransform

pytestmark = [
    # 5.24 has another name for it, which 5.17 does not know; PEFT uses the older names.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    # torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]

F64 = torch.float64
BATCH = zoo.batch(zoo.RIGHT)
CHECKPOINT = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
EMPTY = torch.empty(0, zoo.LENGTH, dtype=torch.long)


@pytest.mark.parametrize("where", ["mlp", "self_attn.o_proj"])
def test_a_hook_in_a_checkpointed_layer_is_refused_rather_than_fed_without_gradients(
    where: str,
) -> None:
    model = zoo.tiny("llama", "sdpa", F64)
    taken: list[Tensor] = []
    module = model.model.layers[0].get_submodule(where)
    handle = module.register_forward_hook(lambda m, i, o: taken.append(o))

    def loss_of(output: Any) -> Tensor:
        return output.loss + taken.pop().pow(2).mean()

    expected = stock_loop(model, BATCH, loss_of)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, BATCH, loss_of, batched=True), expected)
        model.gradient_checkpointing_enable(**CHECKPOINT)
        with pytest.raises(UnsupportedTransform, match="forward hook from test_attacks_numbers"):
            per_example(model, BATCH, loss_of, batched=True)
        handle.remove()
        per_example(model, BATCH, batched=True)


def _shares(model: Any) -> Any:
    for layer in model.model.layers:
        layer.post_attention_layernorm = layer.input_layernorm
    return model


def test_a_module_shared_in_a_checkpointed_layer_keeps_its_parameters() -> None:
    model = _shares(zoo.tiny("llama", "sdpa", F64))
    model.gradient_checkpointing_enable(**CHECKPOINT)
    before = dict(model.named_parameters(remove_duplicate=False))
    with opake.patched(model):
        vmap(lambda example: model(**example).loss)(dict(BATCH)).sum().backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert [n for n in before if after.get(n) is not before[n]] == []


@pytest.mark.parametrize("kind", ["layers", "norms"])
def test_functional_leaves_shared_modules_their_parameters(kind: str) -> None:
    model = zoo.tiny("llama", "sdpa", F64)
    if kind == "layers":
        model.model.layers[1] = model.model.layers[0]
    else:
        _shares(model)
    before = dict(model.named_parameters(remove_duplicate=False))
    fmodel, params = opake.functional.make_functional(model)
    with opake.patched(model):
        opake.functional.per_example_grads(
            lambda p, example: fmodel(p, **example).loss, params, dict(BATCH)
        )
    assert list(opake.functional.make_functional(model)[1]) == list(params)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert [n for n in before if after.get(n) is not before[n]] == []


def test_a_module_shared_in_a_checkpointed_layer_has_the_loops_gradients() -> None:
    """RuntimeError: One of the differentiated Tensors does not require grad."""
    model = _shares(zoo.tiny("llama", "sdpa", F64))
    expected = stock_loop(model, BATCH)
    model.gradient_checkpointing_enable(**CHECKPOINT)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, BATCH, batched=False), expected)


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2"])
def test_an_empty_batch_of_integer_scores_has_no_gradient(model_type: str) -> None:
    model = zoo.tiny(model_type, "sdpa", head="sequence", num_labels=1, pad_token_id=5)
    assert model(input_ids=zoo.tokens(), labels=torch.arange(4)).loss.isfinite()  # stock takes them
    with opake.patched(model):
        model(input_ids=EMPTY, labels=torch.empty(0, dtype=torch.long)).loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("labels", [True, False])
def test_an_empty_batch_has_no_gradient_by_the_router_loss(labels: bool) -> None:
    # With zoo's pad token (0), the embedding of the stand-in's tokens is zero, and hides it.
    model = zoo.tiny("mixtral", "sdpa", output_router_logits=True, pad_token_id=5)
    with opake.patched(model):
        output = model(input_ids=EMPTY, attention_mask=EMPTY, labels=EMPTY if labels else None)
        (output.loss if labels else output.aux_loss).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_live_scope_lets_forward_mode_through_a_gradient() -> None:
    x = torch.randn(5, dtype=F64)

    def second() -> Tensor:
        with torch.no_grad():
            return jvp(grad(lambda x: F.silu(x).sum()), (x,), (torch.ones_like(x),))[1]

    stock = second()
    with opake.patched(zoo.tiny("bert")):  # a bystander
        assert torch.equal(second(), stock)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_soft_prompts_without_a_batch_dimension(config: Any) -> None:
    """PeftModel concatenates prompts and masks before the model inside is called."""
    base = zoo.tiny("llama", "sdpa", F64)
    model = get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=2)).double()
    expected = stock_loop(model, BATCH)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, BATCH, batched=True), expected)
        assert_exact(per_example(model, BATCH, batched=False), expected)


class _Choices(BertForMultipleChoice):
    """A subclass by another name."""


def test_a_subclass_of_a_multiple_choice_head_without_a_batch_dimension() -> None:
    """plan/calls.py:_batchify asks the class's own name, not its bases."""
    torch.manual_seed(0)
    model = _Choices._from_config(zoo.tiny("bert").config, attn_implementation="sdpa").double()
    batch = {"input_ids": zoo.tokens(8).view(4, 2, -1), "labels": torch.tensor([0, 1, 1, 0])}
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)


class _Pairs(LlamaPreTrainedModel):
    """A reward model: two calls of a classifier with names of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scorer = LlamaForSequenceClassification(config)
        self.post_init()

    def forward(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        better, worse = (self.scorer(input_ids=ids).logits for ids in (chosen, rejected))
        return {"loss": -F.logsigmoid(better - worse).mean()}


def test_a_head_inside_a_users_model_without_a_batch_dimension() -> None:
    """plan/calls.py:_batchify wraps the outermost model and the base, not the head between."""
    torch.manual_seed(0)
    config = copy.deepcopy(zoo.tiny("llama").config)
    config.num_labels = 1
    model = _Pairs._from_config(config, attn_implementation="sdpa").double().train()
    batch = {"chosen": zoo.tokens(4, seed=1), "rejected": zoo.tokens(4, seed=2)}
    loss_of = lambda output: output["loss"]  # noqa: E731
    expected = stock_loop(model, batch, loss_of)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, loss_of, batched=True), expected)
        assert_exact(per_example(model, batch, loss_of, batched=False), expected)


def test_an_empty_batch_with_soft_prompts() -> None:
    """The stand-in's inputs_embeds are new zeros, without a way back to the prompts."""
    base = zoo.tiny("llama", "sdpa")
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with opake.patched(model):
        model(input_ids=EMPTY, attention_mask=EMPTY, labels=EMPTY).loss.backward()


def test_an_empty_batch_with_a_prefix() -> None:
    """The stand-in has one row, the cache none."""
    base = zoo.tiny("llama", "sdpa")
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with opake.patched(model):
        model(input_ids=EMPTY, attention_mask=EMPTY, labels=EMPTY).loss.backward()


@pytest.mark.parametrize("layers", [[1], [0, 2]])
def test_some_hidden_states_of_checkpointed_layers(layers: list[int]) -> None:
    model = zoo.tiny("llama", "sdpa", F64)

    def loss_of(output: Any) -> Tensor:
        kept = [x for x in output.hidden_states if x is not None]
        return output.loss + sum(x.double().pow(3).sum() for x in kept)

    expected = stock_loop(model, BATCH, loss_of, output_hidden_states=layers)
    model.gradient_checkpointing_enable(**CHECKPOINT)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, BATCH, loss_of, batched=True, output_hidden_states=layers)
    assert_exact(found, expected)
