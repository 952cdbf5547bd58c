"""Whatever the family, the batch, its masks and the scope: the loop's numbers, and all put back."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import traits
import zoo
from heads import HEADS
from hypothesis import event, given
from hypothesis import strategies as st
from oracle import (
    Result,
    Snapshot,
    model_loss,
    precise,
    same_bits,
    stock_loop,
    trainable,
)
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from zoo import assert_alike

import opake

# Gradients that cancel to nothing, as those of queries and keys do in a model this small, keep the
# rounding of what they cancel from: in fp32 4 ulps of the example's largest gradient at most (of
# 2000 examples). A bar of 1e-5 of a tenth of it allows 8. fp64 keeps the usual floor.
FLOOR = {torch.float32: 0.1, torch.float64: 1e-3}
NESTINGS = ["plain", "twice", "inside another model", "around another model", "runtime", "kept"]
LM = "lm"


class Case(NamedTuple):
    """A model, what it is given, and the scope that it is given it in."""

    model_type: str
    attn: str
    head: str
    fields: dict[str, Any]
    dtype: torch.dtype
    batch: dict[str, Tensor]
    in_dims: dict[str, int]
    batched: bool
    chunk_size: int | None
    grad_mode: bool
    flags: dict[str, bool]
    nesting: str

    def model(self) -> Any:
        head, fields = None, {}
        if self.head != LM:
            head, fields, _ = HEADS[self.head]
        return zoo.tiny(
            self.model_type, self.attn, self.dtype, head=head, **{**fields, **self.fields}
        )

    def loss_of(self, output: Any) -> Tensor:
        if self.head != "base":
            return model_loss(output)
        # Uneven, or the last norm would make it the same for every input; and no cancellation.
        return (output[0] * uneven(output[0])).square().sum()

    def run(self, model: Any, batch: dict[str, Tensor] | None = None) -> Result:
        """Run ``vmap(grad)`` of the model, the examples along ``in_dims`` of the inputs."""
        batch = batch or self.batch
        turned = {name: x.movedim(0, self.in_dims[name]) for name, x in batch.items()}

        def loss(params: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
            if self.batched:
                example = {name: x.unsqueeze(0) for name, x in example.items()}
            return self.loss_of(functional_call(model, params, (), example))

        in_dims = (None, self.in_dims)
        rows = vmap(grad_and_value(loss), in_dims=in_dims, chunk_size=self.chunk_size)
        with precise(model):
            grads, losses = rows(trainable(model), turned)
        return Result(losses.detach(), {name: grad.detach() for name, grad in grads.items()})


def uneven(like: Tensor) -> Tensor:
    return torch.arange(1, like.numel() + 1, dtype=like.dtype).view_as(like).cos()


@st.composite
def fields_of(draw: st.DrawFn, model_type: str, head: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    config = traits.base_config(model_type)
    if head == LM:
        fields["tie_word_embeddings"] = draw(st.booleans())
    if not any(isinstance(x, list) for x in config.values()):  # none has an entry for every layer
        fields["num_hidden_layers"] = draw(st.integers(1, 2))
    if "num_key_value_heads" in config and "q_lora_rank" not in config:
        fields["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4]))
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap in config:
            fields[cap] = draw(st.sampled_from([None, 2.0]))
    reach = traits.reach(model_type, draw(st.sampled_from([1, 2, 3, 4, 5, 64])))
    # Stock's loss of a router knows no mask of four dimensions, and fails in granitemoe on 5.17.
    switches = [name for name in traits.switches(model_type) if name != "output_router_logits"]
    if switches and draw(st.booleans()):
        name = draw(st.sampled_from(switches))
        fields[name] = not config[name]
    elif reach and draw(st.booleans()):
        fields |= reach
    return fields


@functools.cache
def width(model_type: str) -> int:
    return zoo.width(zoo.tiny(model_type, None))


@functools.cache
def parameters(model_type: str) -> frozenset[str]:
    return frozenset(inspect.signature(zoo.tiny(model_type, None).forward).parameters)


def _rows(size: int, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=size, max_size=size)


def _bits(size: int, width: int) -> st.SearchStrategy[Tensor]:
    # Mostly ones: a row of few tokens is drawn often enough all the same.
    ones = _rows(size * width, st.integers(0, 3))
    return ones.map(lambda bits: torch.tensor(bits).bool().view(size, width))


@st.composite
def padding(draw: st.DrawFn, size: int, length: int, dtype: torch.dtype) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "right", "left", "any", "four dimensions"]))
    if kind == "none":
        return None
    if kind == "four dimensions":
        mask = draw(_bits(size, length * length)).view(size, 1, length, length)
        mask = mask & torch.ones(length, length, dtype=torch.bool).tril()
        if draw(st.booleans()):
            return mask
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if kind == "any":
        mask = draw(_bits(size, length))
    else:
        real = torch.tensor(draw(_rows(size, st.integers(0, length)))).unsqueeze(1)
        position = torch.arange(length).expand(size, -1)
        mask = position < real if kind == "right" else position >= length - real
    return mask.to(draw(st.sampled_from([torch.long, torch.bool])))


@st.composite
def batches(draw: st.DrawFn, model_type: str, head: str, dtype: torch.dtype) -> dict[str, Tensor]:
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    ids = torch.randint(zoo.VOCAB, (size, length), generator=generator)
    batch = {"input_ids": ids}
    if draw(st.booleans()):
        x = torch.randn(size, length, width(model_type), generator=generator)
        batch = {"inputs_embeds": x.to(dtype)}
    mask = draw(padding(size, length, dtype))
    if mask is not None:
        batch["attention_mask"] = mask
    # One family counts positions off the mask, which then has to have two dimensions.
    if draw(st.booleans()) or (mask is not None and mask.ndim == 4):
        offsets = torch.tensor(draw(_rows(size, st.integers(0, 50)))).unsqueeze(1)
        batch["position_ids"] = offsets + torch.arange(length)
        if mask is not None and mask.ndim == 2 and draw(st.booleans()):
            batch["position_ids"] = zoo.left_positions(mask)
    if "token_type_ids" in parameters(model_type) and draw(st.booleans()):
        batch["token_type_ids"] = ids % 2
    if head != LM:
        labels = HEADS[head].labels(torch.ones(size, length, dtype=torch.long))
        return batch | {n: x.to(dtype) if x.is_floating_point() else x for n, x in labels.items()}
    batch["labels"] = ids.masked_fill(~draw(_bits(size, length)), -100)
    if not traits.is_encoder(model_type) and draw(st.booleans()):
        batch["shift_labels"] = batch["labels"]
    return batch


def concerns(case: Case) -> list[str]:
    """The concerns that stock can do without for this call."""
    names = ["first_order", "sdpa", "eager_attention"]
    recurs = traits.recurs(case.model_type)
    if not recurs:
        names.append("kv_cache")  # with states, stock cannot build one
    if case.batched:
        names.append("batchify")
    mask, positions = case.batch.get("attention_mask"), case.batch.get("position_ids")
    if mask is None:
        # Elsewhere stock reads the values of the positions or, in gpt2, of the tokens.
        reads = positions is not None or case.model_type == "gpt2"
    else:
        # Elsewhere it looks for what the mask hides.
        skips = case.attn == "sdpa" or traits.is_encoder(case.model_type) or recurs
        reads = mask.ndim == 2 and skips
    return names if reads else [*names, "vmap_masking"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model_type = draw(st.sampled_from(sorted(zoo.FIELDS)))
    attn = draw(st.sampled_from(zoo.attentions(model_type)))
    heads = [name for name in HEADS if zoo.has_head(model_type, HEADS[name].head)]
    head = draw(st.just(LM) | st.sampled_from(heads))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    batch = draw(batches(model_type, head, dtype))
    fields = draw(fields_of(model_type, head))
    if "inputs_embeds" in batch:
        fields |= traits.without_hashing(model_type)
    case = Case(
        model_type=model_type,
        attn=attn,
        head=head,
        fields=fields,
        dtype=dtype,
        batch=batch,
        in_dims={name: draw(st.integers(-x.ndim, x.ndim - 1)) for name, x in batch.items()},
        batched=draw(st.booleans()),
        chunk_size=draw(st.none() | st.integers(1, 5)),
        grad_mode=draw(st.booleans()),
        flags={},
        nesting=draw(st.sampled_from(NESTINGS)),
    )
    off = draw(st.sets(st.sampled_from(concerns(case)), max_size=2))
    return case._replace(flags=dict.fromkeys(sorted(off), False))


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


OTHER = zoo.tiny("llama", num_hidden_layers=1)


@given(case=cases())
def test_gradients_are_the_loops_and_the_model_is_restored(case: Case) -> None:
    event(case.model_type)
    event(f"mask: {case.batch['attention_mask'].ndim if 'attention_mask' in case.batch else None}")
    model = case.model()
    expected = stock_loop(model, case.batch, case.loss_of)
    with (
        restored(model, OTHER),
        scope(model, OTHER, case.flags, case.nesting),
        torch.set_grad_enabled(case.grad_mode),
    ):
        found = case.run(model)
    floor = FLOOR[case.dtype]
    assert_alike([found], expected, model, case.batch, case.loss_of, floor=floor)


@given(case=cases(), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(case: Case, data: st.DataObject) -> None:
    model, size = case.model(), len(next(iter(case.batch.values())))
    model(**case.batch)  # stock writes down the problem type that it finds
    row = data.draw(st.integers(0, size - 1))
    others = dict(case.batch)
    for name, x in others.items():
        swapped = x.roll(1, 0) if x.ndim == 1 else x.flip(0, -1)
        if name == "inputs_embeds" and data.draw(st.booleans()):
            swapped = torch.full_like(x, torch.nan)
        if name == "attention_mask" and x.ndim == 2 and data.draw(st.booleans()):
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
        found, mixed = case.run(model), case.run(model, others)
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
