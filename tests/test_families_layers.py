"""What the layers of some families have and others lack: sinks, no positions, sight ahead, states.

Windows and chunks: ``test_families_masks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import traits
import zoo
from oracle import GRADIENT_BAR, Result, errors, per_example, precise, same_bits, stock_loop
from torch import Tensor, nn
from torch.func import vmap
from transformers import DynamicCache
from zoo import PAD, assert_loops, tokens, turns

import opake

PADDING: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no mask": zoo.batch,
    "every padding": lambda: zoo.batch(zoo.EVERY),
}

# --- sinks


@turns(PADDING)
def test_sinks_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model, batch = zoo.tiny(model_type, attn, dtype), PADDING[name]()
    sinks = [p for n, p in model.named_parameters() if n.endswith("sinks")]
    if not sinks:
        pytest.skip(f"stock {model_type} has no attention sinks")
    # Alone, so that an error of theirs is not measured by larger gradients.
    model.requires_grad_(False)
    for sink in sinks:
        sink.requires_grad_().data.copy_(torch.linspace(-1, 2, len(sink)))
    assert_loops(model, batch)
    expected = stock_loop(model, batch)
    for sink in sinks:
        sink.data.fill_(-1e4)
    assert errors(stock_loop(model, batch), expected)[0] > 1e-2


# --- layers without positions


def spread(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions with gaps, which a rotary embedding sees; a mask, so that they are not packing."""
    positions = zoo.left_positions(batch["attention_mask"])
    return batch | {"position_ids": positions * 3}


@turns(["every padding"])
def test_layers_without_positions_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    fields = traits.without_positions(model_type)
    model, batch = zoo.tiny(model_type, attn, dtype, **fields), zoo.batch(zoo.EVERY)
    moved = stock_loop(model, spread(batch)).losses
    if not torch.allclose(moved, stock_loop(model, batch).losses, rtol=1e-4, equal_nan=True):
        pytest.skip(f"stock {model_type} has positions in every layer")
    assert_loops(model, spread(batch))


# --- sight ahead


@turns(PADDING)
def test_attention_in_both_directions_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    if not traits.has(model_type, "use_bidirectional_attention"):
        pytest.skip(f"stock {model_type} cannot be told to attend in both directions")
    batch = PADDING[name]()
    both, ahead = (
        zoo.tiny(model_type, attn, dtype, use_bidirectional_attention=x) for x in (True, False)
    )
    if errors(stock_loop(both, batch), stock_loop(ahead, batch))[1] < 1e-2:
        pytest.skip(f"stock {model_type} attends in one direction whatever its config says")
    assert_loops(both, batch)


# --- biases in place of positions


@turns(PADDING)
def test_biases_for_positions_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    if not traits.has(model_type, "alibi"):
        pytest.skip(f"stock {model_type} has no ALiBi")
    batch = PADDING[name]()
    for new_decoder, multi_query in ((True, True), (False, True), (False, False)):
        fields = {"new_decoder_architecture": new_decoder, "multi_query": multi_query}
        biased, turned = (
            zoo.tiny(model_type, attn, dtype, alibi=x, **fields) for x in (True, False)
        )
        assert errors(stock_loop(biased, batch), stock_loop(turned, batch))[1] > 1e-2
        assert_loops(biased, batch)
        assert_loops(turned, batch)


# --- caches


class Reader(nn.Module):
    """Reads a row piece by piece, into a cache of its own; returns the logits of every piece."""

    def __init__(self, model: Any, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.sizes = sizes
        self.config, self.dtype = model.config, model.dtype

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        cache, name = DynamicCache(config=self.config), zoo.cache_name(self.model)
        end, logits = 0, []
        for size in self.sizes:
            start, end = end, end + size
            call: dict[str, Any] = {name: cache, "use_cache": True}
            if attention_mask is not None:
                call["attention_mask"] = attention_mask[..., :end]
            output = self.model(input_ids[..., start:end], **call)
            assert output[name] is cache
            logits.append(output.logits)
        return logits


def of_all_pieces(logits: list[Tensor]) -> Tensor:
    weights = (torch.arange(x.numel(), dtype=x.dtype).view_as(x).cos() for x in logits)
    return torch.stack([(x * w).sum() for x, w in zip(logits, weights, strict=True)]).sum()


PIECES = {"a prompt": (6,), "and a token": (4, 1, 1), "and tokens": (3, 2, 1)}
CACHED: dict[str, dict[str, Tensor]] = {
    "no mask": {"input_ids": zoo.tokens()},
    "left padding": {
        "input_ids": zoo.tokens(),
        "attention_mask": zoo.lengths_mask([6, 5, 2, 4], "left"),
    },
}
pieces = pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
cached = pytest.mark.parametrize("batch", CACHED.values(), ids=CACHED)


def reader(model_type: str, sizes: tuple[int, ...]) -> Reader:
    fields = {"is_decoder": True} if traits.is_encoder(model_type) else {}
    return Reader(zoo.tiny(model_type, None, torch.float64, head="causal", **fields), sizes)


@zoo.families
@pytest.mark.case("generate and caches")
@pieces
@cached
def test_a_cache_made_under_the_transform_is_filled_and_continued(
    model_type: str, sizes: tuple[int, ...], batch: dict[str, Tensor]
) -> None:
    model = reader(model_type, sizes)
    with torch.no_grad(), precise(model):
        rows = [model(**{name: x[i : i + 1] for name, x in batch.items()}) for i in range(4)]
        with opake.patched(model):
            found = vmap(lambda row: model(**row))(batch)
    nothing = {"": torch.zeros(4)}
    for piece, *stock in zip(found, *rows, strict=True):
        off, _ = errors(Result(piece, nothing), Result(torch.stack(stock).squeeze(1), nothing))
        assert off <= GRADIENT_BAR[torch.float64]


@zoo.families
@pytest.mark.case("generate and caches")
@pieces
@cached
def test_gradients_through_a_cache_are_the_loops(
    model_type: str, sizes: tuple[int, ...], batch: dict[str, Tensor]
) -> None:
    model = reader(model_type, sizes)
    try:
        stock_loop(model, batch, of_all_pieces)
    except RuntimeError as refused:
        if IN_PLACE not in str(refused):
            raise
        with opake.patched(model), pytest.raises(RuntimeError, match=IN_PLACE):
            per_example(model, batch, of_all_pieces, batched=False)
        pytest.skip(f"stock {model_type} writes over the states that its gradients need")
    assert_loops(model, batch, of_all_pieces)


IN_PLACE = "modified by an inplace operation"

# --- states


@turns(["left", "holes"])
def test_states_leave_padding_out(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    if not traits.recurs(model_type):
        pytest.skip(f"stock {model_type} has no recurrent layers")
    mask = zoo.LEFT if name == "left" else zoo.HOLES[:3]
    model, ids = zoo.tiny(model_type, attn, dtype), tokens(len(mask))
    targets = ids.masked_fill(mask == 0, -100)  # of its own place: none depends on padding
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids, "shift_labels": targets}
    assert_loops(model, batch)
    hidden = batch | {"input_ids": ids.masked_fill(mask == 0, PAD)}
    with opake.patched(model):
        found, other = (per_example(model, x, batched=False) for x in (batch, hidden))
    assert same_bits(found.losses, other.losses)


# --- attention that is causal by its masks alone


def without_causal_flag(model_type: str, attn: str, dtype: torch.dtype, **fields: Any) -> Any:
    model = zoo.tiny(model_type, attn, dtype, **fields)
    for module in model.modules():
        if "is_causal" in vars(module):
            module.is_causal = False
    return model


@zoo.grid(["a mask that hides nothing", "every padding", "no mask", "one token"])
@pytest.mark.parametrize("kind", ["gemma", "llama", "a short window", "a long window"])
def test_a_row_without_padding_sees_all_where_stock_drops_its_mask(
    kind: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    if kind == "gemma":
        if "use_bidirectional_attention" not in zoo.tiny_fields("gemma").to_dict():
            pytest.skip("stock gemma has no such switch in this version")
        model = zoo.tiny("gemma", attn, dtype, use_bidirectional_attention=True)
    elif kind == "llama":
        model = without_causal_flag("llama", attn, dtype)
    else:
        window = 3 if "short" in kind else 50
        model = without_causal_flag("mistral", attn, dtype, sliding_window=window)
    batch = {
        "a mask that hides nothing": lambda: zoo.batch(zoo.ONES),
        "every padding": lambda: zoo.batch(torch.cat([zoo.EVERY, zoo.ONES[:1]])),
        "no mask": zoo.batch,
        "one token": lambda: zoo.batch(zoo.ONES[:, :1]) | {"shift_labels": zoo.tokens(4, 1)},
    }[name]()
    zoo.assert_loops(model, batch)
