"""Every family under functorch inside a scope: rows, dropout and autocast."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import traits
import zoo
from oracle import Result, Snapshot, assert_exact, error, errors, per_example, same_bits, stock_loop
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.func import vmap
from zoo import LENGTH, PAD, VOCAB, tokens, turns

import opake

# --- rows do not see each other

ROWS = torch.stack([zoo.LEFT[1], zoo.RIGHT[1], zoo.ONES[0], zoo.HOLES[0]])


def garbage(kind: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Neighbours of the same shape."""
    other = {name: x.flip(1) for name, x in like.items()}
    if kind == "padding" and "attention_mask" in like:
        other["attention_mask"] = torch.zeros_like(like["attention_mask"])
        other["labels"] = torch.full_like(like["labels"], -100)
    if kind in ("nan", "inf"):
        other["inputs_embeds"] = torch.full_like(like["inputs_embeds"], float(kind))
    return other


def examples(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Four examples, and the neighbours that they can have: of tokens, none is NaN or inf."""
    labels = {"labels": tokens()}
    embedded = {"inputs_embeds": zoo.embeddings(4, zoo.width(model), dtype), **labels}
    try:
        model(**embedded)
    except AttributeError:  # it routes by the tokens themselves
        return {"input_ids": tokens(seed=2), **labels}, ("others", "padding")
    return embedded, ("others", "padding", "nan", "inf")


@zoo.families
@pytest.mark.case("row independence")
@pytest.mark.parametrize(
    ("masked", "attn", "dtype"),
    [
        (True, "sdpa", torch.float32),
        (True, "eager", torch.bfloat16),
        (False, "sdpa", torch.bfloat16),
        (False, "eager", torch.float32),
    ],
    ids=["mask-sdpa-fp32", "mask-eager-bf16", "no mask-sdpa-bf16", "no mask-eager-fp32"],
)
def test_a_row_does_not_depend_on_its_neighbours(
    model_type: str, masked: bool, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype)
    batch, neighbours = examples(model, dtype)
    if masked:
        batch["attention_mask"] = ROWS
    with opake.patched(model), torch.no_grad():
        whole = per_example(model, batch, batched=False)
        assert all(x.isfinite().all() for x in whole.grads.values())
        for kept, kind in enumerate(neighbours):
            mixed = garbage(kind, batch)
            for name, x in batch.items():
                mixed[name][kept] = x[kept]
            found = per_example(model, mixed, batched=False)
            assert same_bits(found.row(kept), whole.row(kept)), kind
            neighbour = (kept + 1) % 4
            assert not same_bits(found.row(neighbour), whole.row(neighbour)), kind


# --- dropout


def dropping(model_type: str, attn: str, dtype: torch.dtype, kind: str) -> Any:
    """A model that drops of its own, or in adapters besides."""
    fields = traits.dropouts(model_type, 0.3)
    if not fields and kind != "lora":
        pytest.skip(f"stock {model_type} drops nothing")
    model = zoo.tiny(model_type, attn, dtype, **fields)
    if kind == "lora":
        lora = LoraConfig(
            r=2,
            lora_dropout=0.4,
            target_modules=traits.projections(model),
            fan_in_fan_out=traits.is_transposed(model),
            init_lora_weights=False,
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()


@pytest.mark.case("dropout")
@turns(["masked", "unmasked", "lora"])
def test_the_same_dropout_is_a_loop_that_is_reseeded(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model, batch = dropping(model_type, attn, dtype, name), zoo.batch(zoo.RIGHT[1:3])
    if name == "unmasked":
        del batch["attention_mask"]
    expected = stock_loop(model, batch, seed=5)
    assert errors(stock_loop(model, batch, seed=6), expected)[1] > 1e-2  # it drops something
    found = []
    with opake.patched(model), torch.no_grad():
        for batched in (True, False):
            torch.manual_seed(5)
            found.append(per_example(model, batch, batched=batched, randomness="same"))
    zoo.assert_alike(found, expected, model, batch, seed=5)


@pytest.mark.case("dropout")
@turns(["masked", "lora"])
def test_different_dropout_gives_every_row_its_own(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = dropping(model_type, attn, dtype, name)
    batch = {name: x[:1].repeat(3, 1) for name, x in zoo.batch(zoo.RIGHT).items()}
    with opake.patched(model), torch.no_grad():
        same, different = (
            per_example(model, batch, batched=False, randomness=randomness)
            for randomness in ("same", "different")
        )
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert_exact(only(same, i), only(same, j))
        assert errors(only(different, i), only(different, j))[1] > 1e-2


def only(result: Result, i: int) -> Result:
    """The result of a batch that holds example ``i`` alone."""
    rows = {name: grad[i : i + 1] for name, grad in result.grads.items()}
    return Result(result.losses[i : i + 1], rows)


@pytest.mark.case("dropout")
@turns(["masked", "lora"])
def test_the_dropout_concern_takes_it_out_and_puts_it_back(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = dropping(model_type, attn, torch.float64, name)
    batch = zoo.batch(zoo.MIXED)
    expected = stock_loop(copy.deepcopy(model).eval(), batch)
    before = Snapshot(model)
    with opake.patched(model, dropout=True), torch.no_grad():
        found = per_example(model, batch, batched=False)
    zoo.assert_alike([found], expected, copy.deepcopy(model).eval(), batch)
    assert before.changes() == []


def test_a_config_that_is_read_for_dropout_is_the_users_in_everything_else() -> None:
    model = zoo.tiny("falcon", hidden_dropout=0.3)
    layer, config = model.transformer.h[0], model.config
    with opake.patched(model, dropout=True):
        kept = layer.config
        assert (kept.hidden_dropout, config.hidden_dropout) == (0.0, 0.3)
        kept.hidden_dropout = 0.4
        kept.eos_token_id = 5
        assert (config.hidden_dropout, config.eos_token_id) == (0.4, 5)
        assert isinstance(kept, type(config))
        assert kept == config
        for copied in (copy.deepcopy(layer).config, pickle.loads(pickle.dumps(kept))):
            assert type(copied) is type(config)
            assert copied.hidden_dropout == 0.4
    assert kept.hidden_dropout == 0.4
    assert layer.config is config


# --- autocast


@zoo.families
@pytest.mark.case("autocast")
@pytest.mark.parametrize(
    ("attn", "mask"),
    [("sdpa", None), ("sdpa", zoo.EVERY), ("eager", zoo.EVERY)],
    ids=["sdpa-no mask", "sdpa-every padding", "eager-every padding"],
)
def test_autocast_gives_the_loops_numbers_under_autocast(
    model_type: str, attn: str, mask: Tensor | None
) -> None:
    model, batch = zoo.tiny(model_type, attn), zoo.batch(mask)
    exact = stock_loop(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_loop(model, batch)
        with opake.patched(model), torch.no_grad():
            found = [per_example(model, batch, batched=batched) for batched in (True, False)]
    loss, gradient = errors(expected, exact)
    assert gradient > 2**-9  # bf16 rounded something
    for result in found:
        assert all(grad.dtype == torch.float32 for grad in result.grads.values())
        assert result.losses.dtype == torch.float32
        # Two roundings of one computation are no further apart than rounding moved stock itself.
        found_loss, found_gradient = errors(result, expected)
        assert found_loss <= loss
        assert found_gradient <= gradient


@zoo.families
@pytest.mark.case("autocast")
@zoo.attention
def test_autocast_without_gradients_reaches_attention(model_type: str, attn: str) -> None:
    # Under vmap alone, autocast leaves out SDPA: rotary embedding has made q and k fp32, v is bf16.
    model, mask = zoo.tiny(model_type, attn), zoo.EVERY
    batch = {"input_ids": tokens(len(mask)).masked_fill(mask == 0, PAD), "attention_mask": mask}

    def stock() -> list[Tensor]:
        rows = range(len(mask))
        return [model(**{n: x[i : i + 1] for n, x in batch.items()}).logits[0] for i in rows]

    with torch.no_grad():
        exact: list[Tensor] = stock()
        with torch.autocast("cpu", torch.bfloat16):
            expected = stock()
            with opake.patched(model):
                found = vmap(lambda example: model(**example).logits)(batch)
    assert found.shape == (len(mask), LENGTH, VOCAB)
    assert error(torch.stack(expected), torch.stack(exact)) > 2**-9  # bf16 rounded something
    # Under vmap alone, autocast leaves the bias of a head fp32, and with it what is added to it.
    has_bias = model.get_output_embeddings().bias is not None
    assert found.dtype == (torch.float32 if has_bias else expected[0].dtype)
    for a, b, c in zip(found, expected, exact, strict=True):
        # No further from stock than rounding to bf16 moved stock, twice over: the biases that stay
        # fp32 move it the other way.
        assert error(a, b) <= 2 * error(b, c)
