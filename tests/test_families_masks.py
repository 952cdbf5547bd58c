"""Attention masks of every family under functorch inside a scope: what stock would allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from oracle import Snapshot, assert_exact, errors, per_example, stock_loop
from torch import Tensor
from torch.func import vmap
from transformers import AutoConfig
from zoo import LENGTH, assert_loops, grid, last_hidden, tokens, turns

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
    batch = zoo.batch() | {"attention_mask": four_d(name, dtype)}
    assert_loops(zoo.tiny(model_type, attn, dtype), batch)


# --- windows

WINDOWS = {
    "mistral": lambda window: {"sliding_window": window},
    "mixtral": lambda window: {"sliding_window": window},
    "gemma2": lambda window: {"sliding_window": window},
    "qwen2": lambda window: {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 1,
    },
}
BATCHES: dict[str, tuple[int, Callable[[], dict[str, Tensor]]]] = {
    "no mask": (3, zoo.batch),
    "every padding": (3, lambda: zoo.batch(zoo.EVERY)),
    "positions of padding": (
        2,
        lambda: zoo.batch(zoo.LEFT) | {"position_ids": zoo.left_positions(zoo.LEFT)},
    ),
    "a window of one": (1, lambda: zoo.batch(zoo.EVERY)),
    "a window as long as the row": (LENGTH, lambda: zoo.batch(zoo.EVERY)),
}


def windowed(model_type: str, attn: str, dtype: torch.dtype, window: int | None) -> Any:
    if model_type not in WINDOWS:
        pytest.skip(f"stock {model_type} has no sliding window")
    return zoo.tiny(model_type, attn, dtype, **WINDOWS[model_type](window))


@pytest.mark.case("sliding window")
@turns(BATCHES)
def test_windows_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    window, batch = BATCHES[name]
    model = windowed(model_type, attn, dtype, window)
    assert_loops(model, batch())
    if window < LENGTH:
        wide = stock_loop(windowed(model_type, attn, dtype, 64), batch())
        assert errors(stock_loop(model, batch()), wide)[1] > 1e-2  # the window hides something


# --- what a mask allows

QUERY, KEY = torch.arange(LENGTH).unsqueeze(1), torch.arange(LENGTH)


def base(builder: str, window: int) -> Tensor:
    if "bidirectional" in builder:
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return CAUSAL & (QUERY - window < KEY) if "sliding" in builder else CAUSAL


def build(builder: str, model_type: str, attn: str, **call: Any) -> Tensor:
    """The mask (S, S) of one example, as the patched builder makes it."""
    fields = WINDOWS.get(model_type, lambda _: {})(3)
    config = AutoConfig.for_model(model_type, attn_implementation=attn, **fields)
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
    padding = zoo.HOLES

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

        return vmap(example)(GROUPS, HIDDEN, padding)

    also = {
        "or": (GROUPS.unsqueeze(2) == GROUPS.unsqueeze(1)),
        "constant": (KEY == QUERY + 1).expand(4, -1, -1),
    }
    for builder in families.find(model_type).masks:
        allowed = base(builder, 3).expand(4, -1, -1)
        allowed = allowed | also.get(functions.split(", ")[0], torch.tensor(False))
        if "and" in functions:
            allowed = allowed & (HIDDEN.view(4, 1, 1) != KEY)
        assert torch.equal(found(builder), allowed & padding.bool().unsqueeze(1)), builder


@zoo.families
@pytest.mark.case("padding")
@zoo.attention
def test_a_builder_always_makes_the_mask_of_a_padded_batch(model_type: str, attn: str) -> None:
    for builder in families.find(model_type).masks:
        found = vmap(lambda row, b=builder: build(b, model_type, attn, attention_mask=row[None]))(
            zoo.ONES
        )
        assert torch.equal(found, base(builder, 3).expand(4, -1, -1))


@turns(["no mask", "every padding"])
def test_a_decoder_that_is_not_causal_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    fields = {"is_causal": False}
    if model_type == "bert":
        fields, causal = {}, {"is_decoder": True}
    else:
        causal = {"is_causal": True}
    model = zoo.tiny(model_type, attn, dtype, head="base", **fields)
    batch = zoo.batch(zoo.EVERY if name == "every padding" else None)
    del batch["labels"]
    assert_loops(model, batch, last_hidden, forms=(False,))
    expected = stock_loop(model, batch, last_hidden)
    other = zoo.tiny(model_type, attn, dtype, head="base", **causal)
    assert errors(expected, stock_loop(other, batch, last_hidden))[1] > 1e-2


# --- packing

PACKED = torch.tensor(
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
)


@zoo.families
@pytest.mark.case("packing refused")
@zoo.attention
@pytest.mark.parametrize("head", ["base", None], ids=["base model", "head"])
def test_packed_rows_are_refused(model_type: str, attn: str, head: str | None) -> None:
    if model_type == "bert":
        pytest.skip("stock bert reads no packing from positions, and attends across")
    model = zoo.tiny(model_type, attn, head=head)
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
    fields = {} if model_type != "bert" else {"is_decoder": True}
    model = zoo.tiny(model_type, None, torch.float64, head="causal", **fields)
    batch = zoo.batch() | {"position_ids": PACKED}
    with_mask = batch | {"attention_mask": zoo.RIGHT}
    cached = {name: x for name, x in batch.items() if name != "labels"}  # bert caches without

    def loss_of(output: Any) -> Tensor:
        return output.logits.square().sum()

    expected = stock_loop(model, with_mask), stock_loop(model, cached, loss_of, use_cache=True)
    ordinary = model(**batch, use_cache=False).logits
    with opake.patched(model):
        assert torch.equal(model(**batch, use_cache=False).logits, ordinary)
        with torch.no_grad():
            assert_exact(per_example(model, with_mask, batched=False), expected[0])
            found = per_example(model, cached, loss_of, batched=False, use_cache=True)
            assert_exact(found, expected[1])


@grid(["bert"])
def test_a_family_without_packing_takes_positions_that_restart(
    name: str, attn: str, dtype: torch.dtype
) -> None:
    assert_loops(zoo.tiny(name, attn, dtype), zoo.batch() | {"position_ids": PACKED})
