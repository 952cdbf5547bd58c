"""Whatever the llama, the batch, its masks and the scope: the loop's numbers, and all put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from oracle import Snapshot, assert_exact, model_loss, per_example, same_bits, stock_loop
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import opake

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
# Gradients that cancel to nothing, as those of queries and keys do in a model this small, keep the
# rounding of what they cancel from: in fp32 4 ulps of the example's largest gradient at most (of
# 2000 examples). A bar of 1e-5 of a tenth of it allows 8. fp64 keeps the usual floor.
FLOOR = {torch.float32: 0.1, torch.float64: 1e-3}
NESTINGS = ["plain", "twice", "inside another model", "around another model", "runtime", "kept"]


class Case(NamedTuple):
    """A model, what it is given, and the scope that it is given it in."""

    config: dict[str, Any]
    base: bool
    dtype: torch.dtype
    seed: int
    batch: dict[str, Tensor]
    batched: bool
    chunk_size: int | None
    grad_mode: bool
    flags: dict[str, bool]
    nesting: str

    def model(self) -> Any:
        torch.manual_seed(self.seed)
        return (LlamaModel if self.base else LlamaForCausalLM)(
            # A config of its own: transformers writes the given nested ones.
            LlamaConfig(**self.config, intermediate_size=10, initializer_range=0.3)
        ).to(self.dtype)

    def loss_of(self, output: Any) -> Tensor:
        if not self.base:
            return model_loss(output)
        hidden = output.last_hidden_state
        # Uneven, or the last norm would make it the same for every input; and no cancellation.
        weights = torch.arange(1, hidden.numel() + 1).view_as(hidden).cos()
        return (hidden * weights).square().sum()


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    config = {
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "hidden_size": heads * draw(st.integers(-(-8 // heads), 16 // heads)),
        "vocab_size": draw(st.integers(2, 9)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "attn_implementation": draw(st.sampled_from(["sdpa", "eager"])),
        "pad_token_id": draw(st.sampled_from([None, 0])),
    }
    if draw(st.booleans()):
        config["rope_parameters"] = dict(LINEAR)
    return config


@st.composite
def padding(draw: st.DrawFn, size: int, length: int) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "right", "left", "any", "four dimensions"]))
    if kind == "none":
        return None
    if kind == "four dimensions":
        bits = draw(_bits(size, length * length)).view(size, 1, length, length)
        return bits & torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "any":
        mask = draw(_bits(size, length))
    else:
        real = torch.tensor(draw(_rows(size, st.integers(0, length)))).unsqueeze(1)
        position = torch.arange(length).expand(size, -1)
        mask = position < real if kind == "right" else position >= length - real
    return mask.to(draw(st.sampled_from([torch.long, torch.bool])))


def _rows(size: int, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=size, max_size=size)


def _bits(size: int, width: int) -> st.SearchStrategy[Tensor]:
    # Mostly ones: a row of few tokens is drawn often enough all the same.
    ones = _rows(size * width, st.integers(0, 3))
    return ones.map(lambda bits: torch.tensor(bits).bool().view(size, width))


@st.composite
def batches(
    draw: st.DrawFn, config: dict[str, Any], dtype: torch.dtype, base: bool
) -> dict[str, Tensor]:
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    ids = torch.randint(config["vocab_size"], (size, length), generator=generator)
    batch = {"input_ids": ids}
    if draw(st.booleans()):
        x = torch.randn(size, length, config["hidden_size"], generator=generator)
        batch = {"inputs_embeds": x.to(dtype)}
    mask = draw(padding(size, length))
    if mask is not None and mask.ndim == 4 and config["attn_implementation"] == "eager":
        # Stock's eager adds its mask, and a boolean one would not hide anything.
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if mask is not None:
        batch["attention_mask"] = mask
    if draw(st.booleans()):
        offsets = torch.tensor(draw(_rows(size, st.integers(0, 50)))).unsqueeze(1)
        batch["position_ids"] = offsets + torch.arange(length)
        if mask is not None and mask.ndim == 2 and draw(st.booleans()):
            batch["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if not base:
        labels = ids.masked_fill(~draw(_bits(size, length)), -100)
        batch["labels"] = labels
        if draw(st.booleans()):
            batch["shift_labels"] = labels
    return batch


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config, base = draw(configs()), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    batch = draw(batches(config, dtype, base))
    batched = draw(st.booleans())
    concerns = ["kv_cache", "first_order", "sdpa", "eager_attention"]
    if batched:
        concerns.append("batchify")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    padded_sdpa = mask is not None and mask.ndim == 2 and config["attn_implementation"] == "sdpa"
    if not padded_sdpa and (positions is None or mask is not None):
        concerns.append("vmap_masking")  # elsewhere stock reads values of the mask or positions
    off = draw(st.sets(st.sampled_from(concerns), max_size=2))
    return Case(
        config=config,
        base=base,
        dtype=dtype,
        seed=draw(st.integers(0, 2**20)),
        batch=batch,
        batched=batched,
        chunk_size=draw(st.none() | st.integers(1, 5)),
        grad_mode=draw(st.booleans()),
        flags=dict.fromkeys(sorted(off), False),
        nesting=draw(st.sampled_from(NESTINGS)),
    )


@contextlib.contextmanager
def scope(model: Any, other: Any, flags: dict[str, bool], nesting: str) -> Iterator[None]:
    """Open a scope of ``model``, alone or crossing another one."""
    ours, theirs = opake.patched(model, **flags), opake.patched(other)
    outer: Any = {"inside another model": theirs, "runtime": opake.runtime()}.get(nesting)
    with outer or contextlib.nullcontext():
        if nesting == "kept":
            opake.patch(model, **flags)
            yield
            opake.unpatch(model)
        else:
            with ours:
                if nesting == "twice":
                    with opake.patched(model, **flags):
                        pass
                elif nesting == "around another model":
                    with theirs:
                        pass
                yield


@contextlib.contextmanager
def restored(*models: Any) -> Iterator[None]:
    """Check that everything is put back, and put it back for the next example if it is not."""
    before = Snapshot(*models)
    try:
        yield
        assert before.changes() == []
        assert opake.active() == []
    finally:
        for model in models:
            opake.unpatch(model)


OTHER = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )
)  # fmt: skip


@given(case=cases())
def test_gradients_are_the_loops_and_the_model_is_restored(case: Case) -> None:
    event(f"mask: {case.batch['attention_mask'].ndim if 'attention_mask' in case.batch else None}")
    model = case.model()
    expected = stock_loop(model, case.batch, case.loss_of)
    with (
        restored(model, OTHER),
        scope(model, OTHER, case.flags, case.nesting),
        torch.set_grad_enabled(case.grad_mode),
    ):
        found = per_example(
            model, case.batch, case.loss_of, batched=case.batched, chunk_size=case.chunk_size
        )
    assert_exact(found, expected, floor=FLOOR[case.dtype])


@given(case=cases(), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(case: Case, data: st.DataObject) -> None:
    model, size = case.model(), len(next(iter(case.batch.values())))
    row = data.draw(st.integers(0, size - 1))
    others = dict(case.batch)
    for name, x in others.items():
        swapped = x.flip(0, -1)
        if name == "inputs_embeds" and data.draw(st.booleans()):
            swapped = torch.full_like(x, torch.nan)
        if name == "attention_mask" and data.draw(st.booleans()):
            swapped = torch.zeros_like(x)
        if name == "position_ids":
            swapped = x.roll(1, 0)
        others[name] = swapped.clone()
        others[name][row] = x[row]
    with (
        restored(model),
        opake.patched(model, **case.flags),
        torch.set_grad_enabled(case.grad_mode),
    ):
        found, mixed = (
            per_example(model, batch, case.loss_of, batched=case.batched)
            for batch in (case.batch, others)
        )
    assert same_bits(found.row(row), mixed.row(row))


@given(case=cases())
def test_an_ordinary_call_is_bit_equal_to_stock(case: Case) -> None:
    model = case.model()

    def step() -> list[Any]:
        output = model(**case.batch)
        loss = case.loss_of(output)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        fields = {name: x for name, x in output.items() if isinstance(x, Tensor)}
        return [list(output), fields, loss, list(grads)]

    stock = step()
    with restored(model, OTHER), scope(model, OTHER, case.flags, case.nesting):
        found = step()
    assert found[0] == stock[0]
    assert same_bits(found[1:], stock[1:])
