"""Llama in a scope, outside functorch: every ordinary use is bit-equal to stock."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracle import Snapshot, same_bits
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    StaticCache,
)

import opake

VOCAB, LENGTH, PAD = 23, 7, 0
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)

attentions = pytest.mark.parametrize("attn", ["sdpa", "eager"])


def make(attn: str, cls: Any = LlamaForCausalLM, **config: Any) -> Any:
    """A llama of two layers whose weights are large enough for greedy tokens to vary."""
    torch.manual_seed(0)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.4,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return cls(LlamaConfig(**{**small, **config}, attn_implementation=attn)).eval()


def tokens(size: int = 3, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (size, length), generator=generator)


REAL = torch.tensor([[LENGTH], [4], [1]])
MASKS = {
    "none": None,
    "full": torch.ones(3, LENGTH, dtype=torch.long),
    "right": (torch.arange(LENGTH) < REAL).long(),
    "left": (torch.arange(LENGTH) >= LENGTH - REAL).long(),
    "with an empty row": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [0]])).long(),
}
masks = pytest.mark.parametrize("mask", MASKS)


def batch(mask: str) -> dict[str, Tensor]:
    ids, padding = tokens(), MASKS[mask]
    if padding is None:
        return {"input_ids": ids}
    return {"input_ids": ids.masked_fill(padding == 0, PAD), "attention_mask": padding}


def everything(output: Any) -> dict[str, Any]:
    """Every field of an output, a cache as its keys and values."""
    fields = dict(output)
    if fields.get(CACHE) is not None:
        fields[CACHE] = [(layer.keys, layer.values) for layer in fields[CACHE].layers]
    return fields


def assert_same_output(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert same_bits(everything(found), everything(expected))


def step(model: Any, call: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """One ordinary forward and backward; the output, and every parameter's gradient."""
    model.zero_grad()
    output = model(**call)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_step(model: Any, call: dict[str, Any]) -> None:
    stock, stock_grads = step(model, call)
    with opake.patched(model):
        found, grads = step(model, call)
        assert_same_output(found, stock)
        assert same_bits(grads, stock_grads)


# --- training and inference


@attentions
@masks
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"]
)
def test_a_training_step_is_bit_equal(attn: str, mask: str, dtype: torch.dtype) -> None:
    model, call = make(attn).to(dtype).train(), batch(mask)
    assert_same_step(model, call | {"labels": call["input_ids"]})


@attentions
@masks
@pytest.mark.parametrize("cls", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_a_step_of_a_classifier_is_bit_equal(attn: str, mask: str, cls: Any) -> None:
    model = make(attn, cls, num_labels=3)
    labels = torch.tensor([0, 2, 1])
    if cls is LlamaForTokenClassification:
        labels = tokens() % 3
    assert_same_step(model, batch(mask) | {"labels": labels})


@attentions
def test_dropout_draws_what_stock_draws(attn: str) -> None:
    model = make(attn, attention_dropout=0.4).train()
    call = batch("right") | {"labels": tokens()}
    torch.manual_seed(3)
    stock, stock_grads = step(model, call)
    with opake.patched(model):
        torch.manual_seed(3)
        found, grads = step(model, call)
        assert_same_output(found, stock)
        assert same_bits(grads, stock_grads)


@attentions
@pytest.mark.parametrize("mask", ["none", "left"])
def test_autocast_is_bit_equal(attn: str, mask: str) -> None:
    model, call = make(attn), batch(mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, call | {"labels": call["input_ids"]})


@attentions
@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": True},
        {"use_cache": False},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"output_hidden_states": True, "output_attentions": True, "use_cache": False},
    ],
    ids=str,
)
def test_outputs_have_stocks_fields_and_numbers(
    attn: str, cls: Any, options: dict[str, Any]
) -> None:
    if attn == "sdpa":
        options = {**options, "output_attentions": False}  # sdpa has none, and stock warns
    model, call = make(attn, cls), batch("left")
    stock = model(**call, **options)
    with opake.patched(model):
        assert_same_output(model(**call, **options), stock)


@attentions
@pytest.mark.parametrize("kind", ["packed positions", "embeddings", "4-D mask", "keeps logits"])
def test_other_arguments_are_bit_equal(attn: str, kind: str) -> None:
    model, ids = make(attn), tokens()
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(3, 1, -1, -1).clone()
    allowed[1, :, :, 2] = False
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)
    call: dict[str, Any] = {
        "packed positions": {"input_ids": ids, "position_ids": packed, "use_cache": False},
        "embeddings": {"inputs_embeds": model.model.embed_tokens(ids).detach()},
        "4-D mask": {"input_ids": ids, "attention_mask": allowed if attn == "sdpa" else additive},
        "keeps logits": {"input_ids": ids, "logits_to_keep": torch.tensor([1, 4])},
    }[kind]
    stock = model(**call)
    with opake.patched(model):
        assert_same_output(model(**call), stock)


@attentions
def test_a_tuple_is_stocks(attn: str) -> None:
    model, call = make(attn), batch("left") | {"labels": tokens(), "return_dict": False}
    stock = model(**call)
    with opake.patched(model):
        found = model(**call)
    assert type(found) is tuple
    assert len(found) == len(stock) == 3  # loss, logits, cache
    assert same_bits(found[:2], stock[:2])
    assert type(found[2]) is type(stock[2])


@attentions
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_is_filled_and_continued_as_in_stock(attn: str, mask: str, kind: Any) -> None:
    model, call = make(attn), batch(mask)

    def run() -> list[Any]:
        options = {"max_cache_len": LENGTH + 2} if kind is StaticCache else {}
        cache = kind(config=model.config, **options)
        outputs, padding = [], call.get("attention_mask")
        for start, stop in [(0, 4), (4, LENGTH), (LENGTH, LENGTH + 1)]:
            ids = call["input_ids"][:, start:stop] if stop <= LENGTH else torch.full((3, 1), 5)
            chunk: dict[str, Any] = {"input_ids": ids, CACHE: cache}
            if padding is not None:
                known = torch.cat([padding, torch.ones_like(padding[:, :1])], dim=1)
                chunk["attention_mask"] = known[:, :stop]
            with torch.no_grad():
                outputs.append(model(**chunk).logits)
        return [outputs, [(layer.keys, layer.values) for layer in cache.layers]]

    stock = run()
    with opake.patched(model):
        assert same_bits(run(), stock)


# --- generation

GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 9},
    "chunked prefill": {"prefill_chunk_size": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "static cache, sampling": {
        "cache_implementation": "static",
        "disable_compile": True,
        "do_sample": True,
    },
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
}


@attentions
@pytest.mark.parametrize("mask", ["none", "full", "left"])
@pytest.mark.parametrize("name", GENERATION)
def test_generation_gives_stocks_tokens_and_scores(attn: str, mask: str, name: str) -> None:
    model, call = make(attn), batch(mask)
    # A prompt without a mask gets one from generate, which takes the pad token for padding.
    options = {"max_new_tokens": 6, "do_sample": False, **GENERATION[name]}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}

    def run() -> Any:
        torch.manual_seed(7)
        output = model.generate(**call, **options)
        return {name: output[name] for name in ("sequences", "scores", "logits")}

    stock = run()
    before = Snapshot(model)  # transformers keeps the static cache of the first run on the model
    assert stock["sequences"].shape[1] > LENGTH + 1
    with opake.patched(model):
        assert same_bits(run(), stock)
    assert before.changes() == []
    assert same_bits(run(), stock)


@attentions
def test_generation_differs_between_prompts_and_modes(attn: str) -> None:
    """The cases above can tell right from wrong only where tokens depend on the prompt."""
    model = make(attn)
    greedy = model.generate(**batch("left"), max_new_tokens=6, do_sample=False)[:, LENGTH:]
    torch.manual_seed(7)
    sampled = model.generate(**batch("left"), max_new_tokens=6, do_sample=True)[:, LENGTH:]
    unmasked = model.generate(
        **batch("left") | {"attention_mask": MASKS["full"]}, max_new_tokens=6, do_sample=False
    )[:, LENGTH:]
    assert len({tuple(row.tolist()) for row in greedy}) == 3
    assert greedy.tolist() != sampled.tolist()
    assert greedy.tolist() != unmasked.tolist()


@attentions
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(attn: str) -> None:
    model, call = make(attn), batch("left")
    whole = model.generate(**call, max_new_tokens=6, do_sample=False)
    with opake.patched(model):
        for size in (1, 2, 3, 5):
            found = model.generate(
                **call, max_new_tokens=6, do_sample=False, prefill_chunk_size=size
            )
            assert found.tolist() == whole.tolist()
