"""Attention masks of every family under functorch inside a scope: what stock would allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import traits
import zoo
from oracle import Snapshot, errors, per_example, stock_loop
from torch import Tensor
from torch.func import vmap
from zoo import LENGTH, assert_loops, last_hidden, tokens, turns

import opake
from opake import families
from opake.compat import masks
from opake.errors import PackedSequences

CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

# --- four dimensions


def four_d(kind: str, dtype: torch.dtype) -> Tensor:
    """A mask with holes for each of four examples, (4, 1, S, S); the last hides all."""
    allowed = zoo.HOLES.bool()[:, None, None, :].expand(-1, 1, LENGTH, -1)
    allowed = allowed & CAUSAL if "causal" in kind else allowed.clone()
    if "boolean" in kind:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@pytest.mark.case("4-D masks")
@turns(["boolean, causal", "float, causal", "boolean", "float"])
def test_a_mask_of_four_dimensions_is_read_as_stock_reads_it(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype)
    batch = zoo.batch() | {"attention_mask": four_d(name, dtype)}
    if traits.counts_positions(model):
        batch["position_ids"] = torch.arange(LENGTH).expand(4, -1)
    assert_loops(model, batch)


# --- windows and chunks

BATCHES: dict[str, tuple[int, Callable[[], dict[str, Tensor]]]] = {
    "no mask": (3, zoo.batch),
    "every padding": (3, lambda: zoo.batch(zoo.EVERY)),
    "positions of padding": (
        2,
        lambda: zoo.batch(zoo.LEFT) | {"position_ids": zoo.left_positions(zoo.LEFT)},
    ),
    "one token": (1, lambda: zoo.batch(zoo.EVERY)),
    "as many as the row has": (LENGTH, lambda: zoo.batch(zoo.EVERY)),
}


def windowed(model_type: str, attn: str, dtype: torch.dtype, size: int) -> Any:
    fields = traits.reach(model_type, size)
    if fields is None:
        pytest.skip(f"stock {model_type} has no sliding window")
    return zoo.tiny(model_type, attn, dtype, **fields)


@pytest.mark.case("sliding window")
@turns(BATCHES)
def test_windows_and_chunks_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    size, batch = BATCHES[name]
    model = windowed(model_type, attn, dtype, size)
    assert_loops(model, batch())
    if size < LENGTH:
        wide = stock_loop(windowed(model_type, attn, dtype, 64), batch())
        assert errors(stock_loop(model, batch()), wide)[1] > 1e-2  # the window hides something


# --- what a mask allows

QUERY, KEY = torch.arange(LENGTH).unsqueeze(1), torch.arange(LENGTH)
REACH = 3


def base(builder: str, padding: Tensor) -> Tensor:
    """What a builder allows in the rows of ``padding`` (B, S), padding apart: (B, S, S)."""
    shape = (len(padding), LENGTH, LENGTH)
    if "bidirectional" in builder:
        return torch.ones(shape, dtype=torch.bool)
    if "sliding" in builder:
        return (CAUSAL & (QUERY - REACH < KEY)).expand(shape)
    if "chunked" in builder:
        first = (padding.cumsum(1) == 0).sum(1).view(-1, 1, 1)  # chunks begin with the first token
        return CAUSAL & ((QUERY - first) // REACH == (KEY - first) // REACH)
    return CAUSAL.expand(shape)


def builders(model_type: str) -> list[str]:
    """The builders of a family's masks for attention."""
    return [name for name in families.find(model_type).masks if name != masks.RECURRENT]


def build(builder: str, model_type: str, attn: str, **call: Any) -> Tensor:
    """The mask (S, S) of one example, as the patched builder makes it."""
    config = zoo.tiny_fields(model_type, **(traits.reach(model_type, REACH) or {}))
    config._attn_implementation = attn
    cache = {} if "bidirectional" in builder else {zoo.CACHE: None}
    mask = masks.builder(families.find(model_type).module, builder)(
        config=config, inputs_embeds=torch.zeros(1, LENGTH, 2), **cache, **call
    )
    assert mask.shape == (1, 1, LENGTH, LENGTH)
    if mask.dtype != torch.bool:
        assert mask.dtype == torch.float32
        return mask[0, 0] == 0
    return mask[0, 0]


GROUPS = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 0], [3] * 6, [0, 1, 2, 3, 4, 5]])
HIDDEN = torch.tensor([1, 0, 5, 2])


@zoo.families
@pytest.mark.case("padding")
@zoo.attention
@pytest.mark.parametrize("functions", ["or", "and", "or, and", "constant"])
def test_a_builder_allows_what_its_functions_say_and_no_padding(
    model_type: str, attn: str, functions: str
) -> None:
    padding = torch.cat([zoo.HOLES, zoo.LEFT])
    size = len(padding)

    def found(builder: str) -> Tensor:
        def example(groups: Tensor, hidden: Tensor, row: Tensor) -> Tensor:
            call: dict[str, Any] = {"attention_mask": row.unsqueeze(0)}
            if "or" in functions.split(", "):
                call["or_mask_function"] = lambda b, h, q, k: groups[q] == groups[k]
            if "and" in functions:
                call["and_mask_function"] = lambda b, h, q, k: k != hidden
            if functions == "constant":
                call["or_mask_function"] = lambda b, h, q, k: k == q + 1
            return build(builder, model_type, attn, **call)

        return vmap(example)(GROUPS.repeat(2, 1), HIDDEN.repeat(2), padding)

    also = {
        "or": (GROUPS.unsqueeze(2) == GROUPS.unsqueeze(1)).repeat(2, 1, 1),
        "constant": (KEY == QUERY + 1).expand(size, -1, -1),
    }
    for builder in builders(model_type):
        allowed = base(builder, padding)
        allowed = allowed | also.get(functions.split(", ")[0], torch.tensor(False))
        if "and" in functions:
            allowed = allowed & (HIDDEN.repeat(2).view(size, 1, 1) != KEY)
        assert torch.equal(found(builder), allowed & padding.bool().unsqueeze(1)), builder


@zoo.families
@pytest.mark.case("padding")
@zoo.attention
def test_a_builder_always_makes_the_mask_of_a_padded_batch(model_type: str, attn: str) -> None:
    for builder in builders(model_type):
        found = vmap(lambda row, b=builder: build(b, model_type, attn, attention_mask=row[None]))(
            zoo.ONES
        )
        assert torch.equal(found, base(builder, zoo.ONES))


@zoo.families
@pytest.mark.case("padding")
def test_the_mask_of_recurrent_layers_is_that_of_the_tokens_at_hand(model_type: str) -> None:
    family = families.find(model_type)
    if masks.RECURRENT not in family.masks:
        pytest.skip(f"stock {model_type} has no recurrent layers")
    builder = masks.builder(family.module, masks.RECURRENT)

    def made(mask: Tensor, length: int) -> Tensor | None:
        return builder(zoo.tiny_fields(model_type), torch.zeros(1, length, 2), mask, None)

    for padding in (zoo.HOLES, zoo.ONES):
        for length in (LENGTH, 2):  # two of them follow a cache
            found = vmap(lambda row, n=length: made(row[None], n))(padding)
            assert torch.equal(found, padding[:, None, -length:])
    seen = []
    vmap(lambda row: (seen.append(made(row[None], 1)), row)[1])(zoo.HOLES)
    vmap(lambda row: (seen.append(made(row.expand(1, 1, 6, -1), 6)), row)[1])(zoo.HOLES)
    # As in stock: a single token is real, and four dimensions say nothing of padding.
    assert seen == [None, None]


@turns(["no mask", "every padding"])
def test_a_decoder_that_is_not_causal_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    causal, other = {"is_causal": True}, {"is_causal": False}
    if traits.is_encoder(model_type):
        causal, other = {"is_decoder": True}, {}
    batch = zoo.batch(zoo.EVERY if name == "every padding" else None)
    del batch["labels"]
    ahead, model = (zoo.tiny(model_type, attn, dtype, head="base", **x) for x in (causal, other))
    expected = stock_loop(model, batch, last_hidden)
    if errors(expected, stock_loop(ahead, batch, last_hidden))[1] < 1e-2:
        pytest.skip(f"stock {model_type} reads in one direction whatever its config says")
    assert_loops(model, batch, last_hidden, forms=(False,))


# --- packing

PACKED = torch.tensor(
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
)


def reads_packing(model: Any) -> bool:
    """Tell whether stock separates the sequences of a row whose positions restart."""
    batch = {"input_ids": tokens(), "position_ids": PACKED, "use_cache": False}
    with torch.no_grad():
        alone, masked = model(**batch)[0], model(**batch, attention_mask=zoo.ONES)[0]
    return not torch.allclose(alone, masked)


@zoo.families
@pytest.mark.case("packing refused")
@zoo.attention
@pytest.mark.parametrize("head", ["base", None], ids=["base model", "head"])
def test_packed_rows_are_refused(model_type: str, attn: str, head: str | None) -> None:
    model = zoo.tiny(model_type, attn, head=head)
    if not reads_packing(model):
        pytest.skip(f"stock {model_type} reads no packing from positions, and attends across")
    batch = {"input_ids": tokens(), "position_ids": PACKED}

    def run(batch: dict[str, Tensor], *, batched: bool, **options: Any) -> None:
        per_example(model, batch, lambda output: output[0].sum(), batched=batched, **options)

    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        for batched, options in ((True, {}), (False, {"use_cache": None})):
            with pytest.raises(PackedSequences, match="attention_mask"):
                run(batch, batched=batched, **options)
            run(batch | {"position_ids": PACKED[[0, 0, 3, 3]]}, batched=batched, **options)
    assert before.changes() == []


@zoo.families
@pytest.mark.case("packing refused")
def test_restarting_positions_pass_where_stock_builds_no_packed_mask(model_type: str) -> None:
    fields = {"is_decoder": True} if traits.is_encoder(model_type) else {}
    model = zoo.tiny(model_type, None, torch.float64, head="causal", **fields)
    batch = zoo.batch() | {"position_ids": PACKED}
    cached = {name: x for name, x in batch.items() if name != "labels"}  # bert caches without
    ordinary = model(**batch, use_cache=False).logits
    with opake.patched(model):
        assert torch.equal(model(**batch, use_cache=False).logits, ordinary)
    assert_loops(model, batch | {"attention_mask": zoo.RIGHT})
    assert_loops(model, cached, lambda output: output.logits.square().sum(), use_cache=True)


@turns(["base", None])
def test_a_family_without_packing_takes_positions_that_restart(
    model_type: str, name: str | None, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype, head=name)
    if reads_packing(model):
        pytest.skip(f"stock {model_type} reads positions that restart as packing")
    batch = {"input_ids": tokens(), "position_ids": PACKED}
    assert_loops(model, batch, lambda output: output[0].square().sum())
