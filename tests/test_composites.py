"""Models with images around a text family: what they do with text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from oracle import Snapshot, assert_exact, errors, per_example, same_bits, stock_loop
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3ForSequenceClassification

import opake
from opake.compat.tiny import tiny_config
from opake.errors import PackedSequences, UnsupportedModel

wrapped = pytest.mark.parametrize("kind", ["gemma3", "qwen3_5_moe"])


def tiny(kind: str, attn: str = "sdpa", dtype: torch.dtype = torch.float64, cls: Any = None) -> Any:
    """A tiny model with images, and a loss of text that attention matters for."""
    config = tiny_config(AutoConfig.for_model(kind), image_token_id=zoo.VOCAB - 1)
    text = config.text_config
    text.vocab_size, text.initializer_range, text.pad_token_id = zoo.VOCAB, 0.3, zoo.PAD
    config.pad_token_id, config.num_labels = zoo.PAD, 3
    options = {"attn_implementation": attn}
    if hasattr(text, "num_experts_per_tok"):
        options["experts_implementation"] = "batched_mm"
    torch.manual_seed(0)
    make = AutoModelForImageTextToText.from_config if cls is None else cls._from_config
    return make(config, **options).to(dtype).train()


def text(mask: Tensor | None) -> dict[str, Tensor]:
    """Rows without the token that stands for an image."""
    batch = zoo.batch(mask)
    return {name: x.where(x != zoo.VOCAB - 1, 1) for name, x in batch.items()}


CASES: dict[str, Any] = {
    "no mask": lambda: text(None),
    "a mask that hides nothing": lambda: text(zoo.ONES),
    "every padding": lambda: text(zoo.EVERY),
    "positions": lambda: text(None) | {"position_ids": torch.arange(zoo.LENGTH).repeat(4, 1) + 2},
}


@wrapped
@zoo.grid(CASES)
def test_text_has_the_loops_gradients(kind: str, name: str, attn: str, dtype: torch.dtype) -> None:
    zoo.assert_loops(tiny(kind, attn, dtype), CASES[name]())


TYPES = torch.tensor([[0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6, [1, 1, 0, 0, 0, 1], [0, 1, 0, 1, 0, 1]])


@zoo.grid(["every padding", "no mask"])
def test_tokens_of_images_attend_both_ways(name: str, attn: str, dtype: torch.dtype) -> None:
    """``token_type_ids`` mark them, and Gemma 3 builds other masks for it."""
    model = tiny("gemma3", attn, dtype)
    batch = text(zoo.EVERY if name == "every padding" else None)
    batch["token_type_ids"] = TYPES[: len(batch["input_ids"])]
    zoo.assert_loops(model, batch)
    causal = batch | {"token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    assert errors(stock_loop(model, batch), stock_loop(model, causal))[1] > 1e-2


@zoo.attention
def test_a_classifier_of_text_has_the_loops_gradients(attn: str) -> None:
    model = tiny("gemma3", attn, cls=Gemma3ForSequenceClassification)
    batch = text(zoo.EVERY) | {"labels": torch.arange(len(zoo.EVERY)) % 3}
    zoo.assert_loops(model, batch)


@wrapped
def test_packed_rows_are_refused(kind: str) -> None:
    model = tiny(kind)
    batch = text(None) | {"position_ids": torch.tensor([0, 1, 2, 0, 1, 2]).repeat(4, 1)}
    types = torch.zeros_like(batch["input_ids"])
    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        for more in [{}, {"token_type_ids": types}] if kind == "gemma3" else [{}]:
            with pytest.raises(PackedSequences, match="attention_mask"):
                per_example(model, batch | more, batched=False)
    assert before.changes() == []


@wrapped
@zoo.attention
def test_ordinary_use_is_bit_equal(kind: str, attn: str) -> None:
    model = tiny(kind, attn, torch.float32).eval()
    batch = text(zoo.LEFT)
    prompt = {name: x for name, x in batch.items() if name != "labels"}

    def run() -> list[Any]:
        output = model(**batch)
        gradients = torch.autograd.grad(output.loss, model.get_input_embeddings().weight)
        tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        return [output.logits, gradients, tokens]

    stock = run()
    with opake.patched(model):
        assert same_bits(run(), stock)


def test_the_vision_part_is_left_alone() -> None:
    model = tiny("gemma3")
    before = {name: vars(m).get("config") for name, m in model.named_modules() if "vision" in name}
    assert any(name.endswith("self_attn") for name in before)
    with opake.patched(model):
        for name, config in before.items():
            assert vars(model.get_submodule(name)).get("config") is config, name


@wrapped
def test_the_implementation_of_the_text_part_decides(kind: str) -> None:
    model = tiny(kind)
    parts = {"text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(parts)
    expected = stock_loop(model, text(zoo.EVERY))
    with opake.patched(model) as scope, torch.no_grad():
        rows = {row.concern: row for row in scope.explain()}
        assert_exact(per_example(model, text(zoo.EVERY), batched=False), expected)
    assert (rows["eager_attention"].status, rows["sdpa"].status) == ("on", "skipped")


# --- of no family of their own

UNDECLARED = ["llava", "mistral3", "aya_vision", "lfm2_vl"]


@pytest.mark.parametrize("kind", UNDECLARED)
def test_a_model_around_a_known_text_part_is_tried_first(kind: str) -> None:
    model = tiny(kind)
    expected = stock_loop(model, text(zoo.EVERY))
    with opake.patched(model) as scope, torch.no_grad():
        row = next(iter(scope.explain()))
        assert_exact(per_example(model, text(zoo.EVERY), batched=False), expected)
    assert row.concern == "family"
    assert "verified against the loop" in row.reason


def test_one_that_looks_at_values_around_it_is_refused() -> None:
    """Its text part is Gemma, but it finds its own masks by indexing with a boolean one."""
    with pytest.raises(UnsupportedModel, match=r"a tiny copy raises: RuntimeError.*register"):
        opake.check(tiny("paligemma"))


def test_positions_in_sections_are_cut_down_with_the_heads() -> None:
    config = AutoConfig.for_model("qwen2_vl")
    rope = {**config.text_config.rope_parameters, "mrope_section": [16, 24, 24]}
    config.text_config.rope_parameters = rope
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(tiny_config(config))
    row = next(iter(opake.check(model)))
    assert "verified against the loop" in row.reason


@zoo.attention
def test_a_bidirectional_text_part_with_images_marked(attn: str) -> None:
    config = tiny("gemma3", attn).config
    if "use_bidirectional_attention" not in config.text_config.to_dict():
        pytest.skip("stock gemma3 has no such switch in this version")
    config.text_config.use_bidirectional_attention = True
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation=attn).double().train()
    for mask in (zoo.EVERY, zoo.ONES):
        batch = text(mask)
        zoo.assert_loops(model, batch | {"token_type_ids": TYPES[: len(mask)]})
        zoo.assert_loops(model, batch)


@wrapped
def test_a_hook_of_accelerates_around_the_outer_model(kind: str) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny(kind)
    batch = text(zoo.EVERY)
    expected = stock_loop(model, batch)
    for module in (model, model.model, model.model.language_model):
        add_hook_to_module(module, ModelHook())
    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)
    assert before.changes() == []
