"""Every family in a scope, outside functorch: every ordinary use is bit-equal to stock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import traits
import zoo
from heads import special, specials
from oracle import Snapshot, same_bits
from torch import Tensor
from transformers import DynamicCache, StaticCache
from zoo import LENGTH, PAD, tokens, turns

import opake

MASKS = {name: zoo.MASKS[name] for name in ("none", "ones", "right", "left", "fully-masked")}


def windowed(model_type: str) -> dict[str, Any]:
    """What gives a family that can have one a window shorter than its prompts."""
    return traits.window(model_type, 3) or {}


def inputs(mask: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in zoo.batch(mask).items() if name != "labels"}


def everything(output: Any) -> dict[str, Any]:
    """Every field of an output, a cache as its keys and values."""
    return {name: contents(x) if hasattr(x, "update") else x for name, x in output.items()}


def contents(cache: Any) -> list[Any]:
    """Keys, values and states, and what a layer counts and remembers besides."""
    if hasattr(cache, "self_attention_cache"):
        return contents(cache.self_attention_cache) + contents(cache.cross_attention_cache)
    return [(type(layer), vars(layer)) for layer in cache.layers]


def assert_same_output(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert same_bits(everything(found), everything(expected))


def step(model: Any, call: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One ordinary forward and backward; the output, and every parameter's gradient."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(**call)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(model: Any, call: dict[str, Any]) -> None:
    stock, stock_grads = step(model, call)
    with opake.patched(model):
        found, grads = step(model, call)
        assert_same_output(found, stock)
        assert same_bits(grads, stock_grads)


def assert_same_outcome(model: Any, run: Callable[[], Any]) -> Any:
    """Assert that ``run`` has stock's result in a scope, and return that.

    Skips the test where stock raises, once the scope has raised the same.
    """

    def outcome() -> Any:
        try:
            return run()
        except Exception as error:
            return error

    stock = outcome()
    with opake.patched(model):
        found = outcome()
    if isinstance(stock, Exception):
        assert repr(found) == repr(stock)
        pytest.skip(f"stock {model.config.model_type} raises {stock!r:.120}")
    assert same_bits(found, stock), found if isinstance(found, Exception) else ""
    return stock


# --- training and inference


def step_cases() -> list[Any]:
    dtypes, cases = (torch.float32, torch.bfloat16, torch.float64), []
    for i, mask in enumerate(MASKS):
        for j, attn in enumerate(("sdpa", "eager")):
            dtype = dtypes[(i + j) % 3]
            cases.append(pytest.param(mask, attn, dtype, id=f"{mask}-{attn}-{str(dtype)[6:]}"))
    return cases


@zoo.families
@pytest.mark.case("ordinary use")
@pytest.mark.parametrize(("mask", "attn", "dtype"), step_cases())
def test_a_training_step_is_bit_equal(
    model_type: str, mask: str, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype, **windowed(model_type))
    assert_same_step(model, zoo.batch(MASKS[mask]))


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
@pytest.mark.parametrize("head", ["sequence", "token"])
def test_a_step_of_a_classifier_is_bit_equal(model_type: str, attn: str, head: str) -> None:
    model = zoo.tiny(model_type, attn, head=head, num_labels=3)
    labels = tokens() % 3 if head == "token" else torch.tensor([0, 2, 1, 2])
    assert_same_step(model, inputs(zoo.LEFT) | {"labels": labels})


@specials
@pytest.mark.case("ordinary use")
@zoo.attention
def test_a_step_of_what_one_family_has_alone_is_bit_equal(
    model_type: str, name: str, attn: str
) -> None:
    model, call, _ = special(model_type, name, attn, torch.float32)
    assert_same_step(model, call)


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
def test_dropout_draws_what_stock_draws(model_type: str, attn: str) -> None:
    fields = traits.dropouts(model_type, 0.3)
    if not fields:
        pytest.skip(f"stock {model_type} has no dropout")
    model = zoo.tiny(model_type, attn, **fields)
    assert_same_step(model, zoo.batch(zoo.RIGHT))
    torch.manual_seed(3)
    assert not same_bits(model(**zoo.batch(zoo.RIGHT)).loss, model(**zoo.batch(zoo.RIGHT)).loss)


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
def test_autocast_is_bit_equal(model_type: str, attn: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(zoo.tiny(model_type, attn), zoo.batch(zoo.LEFT))


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
@pytest.mark.parametrize("head", ["base", None], ids=["base model", "head"])
def test_outputs_have_stocks_fields_and_numbers(
    model_type: str, attn: str, head: str | None
) -> None:
    model = zoo.tiny(model_type, attn, head=head).eval()
    options: list[dict[str, Any]] = [
        {},
        {"use_cache": True},
        {"use_cache": False, "output_hidden_states": True},
    ]
    if attn == "eager":
        options.append({"output_hidden_states": True, "output_attentions": True})
    if traits.has(model_type, "output_router_logits"):
        options.append({"output_router_logits": True})
    call = inputs(zoo.LEFT)
    stock = [model(**call, **more) for more in options]
    with opake.patched(model):
        for more, expected in zip(options, stock, strict=True):
            assert_same_output(model(**call, **more), expected)


def four_dimensional(model: Any) -> Tensor:
    """A mask for every row and query, as each attention takes it."""
    allowed = torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed[1, :, :, 2] = False
    if model.config._attn_implementation == "sdpa":
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


IDS = tokens()
ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "packed positions": lambda _: {
        "input_ids": IDS,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 4),
        "use_cache": False,
    },
    "embeddings": lambda model: {"inputs_embeds": zoo.embeddings(4, zoo.width(model))},
    "4-D mask": lambda model: {"input_ids": IDS, "attention_mask": four_dimensional(model)},
    "one token": lambda _: {"input_ids": IDS[:, :1], "attention_mask": zoo.LEFT[:, :1]},
    "keeps logits": lambda _: {"input_ids": IDS, "logits_to_keep": torch.tensor([1, 4])},
}


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_are_bit_equal(model_type: str, attn: str, name: str) -> None:
    model = zoo.tiny(model_type, attn).eval()
    call = ARGUMENTS[name](model)
    assert_same_outcome(model, lambda: everything(model(**call)))


@zoo.families
@pytest.mark.case("ordinary use")
@zoo.attention
def test_a_tuple_is_stocks(model_type: str, attn: str) -> None:
    model = zoo.tiny(model_type, attn).eval()
    call = zoo.batch(zoo.LEFT) | {"return_dict": False}
    stock = model(**call)
    with opake.patched(model):
        found = model(**call)
    assert type(found) is tuple
    assert [type(x) for x in found] == [type(x) for x in stock]
    assert same_bits(found[:2], stock[:2])  # loss, logits; then a cache


# --- caches and generation


def generator(model_type: str, attn: str) -> Any:
    """A model that can generate; windows are shorter than its prompts."""
    fields = windowed(model_type)
    if traits.is_encoder(model_type):
        fields["is_decoder"] = True
    return zoo.tiny(model_type, attn, head="causal", **fields).eval()


@zoo.families
@pytest.mark.case("generate and caches")
@zoo.attention
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("mask", [None, zoo.LEFT], ids=["no mask", "left"])
def test_a_cache_is_filled_and_continued_as_in_stock(
    model_type: str, attn: str, kind: Any, mask: Tensor | None
) -> None:
    model, call = generator(model_type, attn), inputs(mask)
    name = zoo.cache_name(model)

    def run() -> list[Any]:
        options = {"max_cache_len": LENGTH + 2} if kind is StaticCache else {}
        cache = kind(config=model.config, **options)
        outputs = []
        for start, stop in [(0, 4), (4, LENGTH), (LENGTH, LENGTH + 1)]:
            ids = call["input_ids"][:, start:stop] if stop <= LENGTH else torch.full((4, 1), 5)
            chunk: dict[str, Any] = {"input_ids": ids, name: cache, "use_cache": True}
            if mask is not None:
                chunk["attention_mask"] = torch.cat([mask, zoo.ONES[:, :1]], dim=1)[:, :stop]
            with torch.no_grad():
                outputs.append(model(**chunk).logits)
        return [outputs, contents(cache)]

    assert_same_outcome(model, run)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 9},
    "chunked prefill": {"prefill_chunk_size": 2},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
}


def generate(model: Any, mask: Tensor | None, name: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    # A prompt without a mask gets one from generate, which takes the pad token for padding.
    options = {"max_new_tokens": 5, "do_sample": False, **GENERATION[name], **options}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = model.generate(**inputs(mask), **options)
    return {name: output[name] for name in ("sequences", "scores", "logits")}


@pytest.mark.case("generate and caches")
@turns(GENERATION)
def test_generation_gives_stocks_tokens_and_scores(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = generator(model_type, attn)
    masks = [zoo.LEFT] if name == "beam search" else [None, zoo.LEFT]
    with contextlib.suppress(Exception):  # judged below
        generate(model, None, name)  # transformers keeps a static cache on the model
    before = Snapshot(model)
    stock = assert_same_outcome(model, lambda: [generate(model, mask, name) for mask in masks])
    assert stock[0]["sequences"].shape[1] > LENGTH + 1
    assert before.changes() == []


@zoo.families
@pytest.mark.case("generate and caches")
@zoo.attention
def test_generation_differs_between_prompts_and_modes(model_type: str, attn: str) -> None:
    """The cases above can tell right from wrong only where tokens depend on the prompt."""
    model = generator(model_type, attn)
    scores = {
        name: generate(model, mask, kind)["scores"]
        for name, mask, kind in [
            ("greedy", zoo.LEFT, "greedy"),
            ("shown", zoo.ONES, "greedy"),
            ("sampled", zoo.LEFT, "sampling"),
        ]
    }
    assert not same_bits(scores["greedy"], scores["shown"])
    assert not same_bits(scores["greedy"], scores["sampled"])
    first = scores["greedy"][0]
    assert all(not torch.equal(first[0], row) for row in first[1:])


@zoo.families
@pytest.mark.case("generate and caches")
@zoo.attention
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(model_type: str, attn: str) -> None:
    model = generator(model_type, attn)
    whole = generate(model, zoo.LEFT, "greedy")["sequences"]

    def run() -> list[dict[str, Any]]:
        kind = "chunked prefill"
        return [generate(model, zoo.LEFT, kind, prefill_chunk_size=size) for size in (1, 3)]

    if not all(torch.equal(x["sequences"], whole) for x in assert_same_outcome(model, run)):
        pytest.skip(f"stock {model_type} itself gives other tokens, chunk by chunk")


def test_the_pad_token_of_these_prompts_is_padding() -> None:
    assert (inputs(zoo.LEFT)["input_ids"][zoo.LEFT == 0] == PAD).all()
