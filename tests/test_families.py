"""Every family under functorch inside a scope: stock's numbers, one example at a time.

Here: what a model is given, and what it returns. What it is made of: ``test_families_heads.py``;
its masks: ``test_families_masks.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import traits
import zoo
from oracle import (
    Result,
    Snapshot,
    assert_exact,
    error,
    per_example,
    precise,
    same_bits,
    stock_loop,
    trainable,
)
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap
from zoo import LENGTH, PAD, VOCAB, assert_loops, grid, tokens

import opake

# --- padding


def one_token(model_type: str, size: int, mask: list[int] | None = None) -> dict[str, Tensor]:
    """Rows of a single token; a causal model gets what follows it as ``shift_labels``."""
    name = "labels" if traits.is_encoder(model_type) else "shift_labels"
    batch = {"input_ids": tokens(size, 1), "labels": tokens(size, 1), name: tokens(size, 1, seed=3)}
    return batch if mask is None else batch | {"attention_mask": torch.tensor(mask).unsqueeze(1)}


def pad_tokens_without_a_mask() -> dict[str, Tensor]:
    """Stock's gpt2 looks for them, to warn; it takes them for tokens all the same."""
    batch = zoo.batch()
    batch["input_ids"][1, 4:] = PAD
    return batch


def labels_everywhere(mask: Tensor) -> dict[str, Tensor]:
    batch = zoo.batch(mask)
    return batch | {"labels": batch["input_ids"]}


PADDING: dict[str, Callable[[str], dict[str, Tensor]]] = {
    "no mask": lambda _: pad_tokens_without_a_mask(),
    "a mask that hides nothing": lambda _: zoo.batch(zoo.ONES),
    "every padding, labels on it": lambda _: labels_everywhere(zoo.EVERY),
    "a boolean mask, labels ignored": lambda _: zoo.batch(zoo.EVERY.bool()),
    "a float mask": lambda _: zoo.batch(zoo.MIXED.float()),
    "one token": lambda model_type: one_token(model_type, 2),
    "one token, masked": lambda model_type: one_token(model_type, 3, [1, 0, 1]),
    "one example, left padded": lambda _: zoo.batch(zoo.LEFT[1:2]),
    "one example of one token": lambda model_type: one_token(model_type, 1),
}


@zoo.families
@pytest.mark.case("padding")
@grid(PADDING)
def test_gradients_are_the_loops(model_type: str, name: str, attn: str, dtype: torch.dtype) -> None:
    # Softmax over one key is constant, so the gradients of q and k are zero: what fp32 leaves of
    # them is rounding, three ulps of the largest gradient on one processor, nothing on another.
    floor = 0.1 if dtype == torch.float32 and name.startswith("one") else 1e-3
    assert_loops(zoo.tiny(model_type, attn, dtype), PADDING[name](model_type), floor=floor)


@zoo.families
@pytest.mark.case("padding")
def test_padding_hides_what_it_covers(model_type: str) -> None:
    """The cases above can tell right from wrong only where the mask makes a difference."""
    model = zoo.tiny(model_type, zoo.attentions(model_type)[0])
    ids = tokens(len(zoo.EVERY))
    masked = {"input_ids": ids, "labels": ids, "attention_mask": zoo.EVERY}
    shown = masked | {"attention_mask": torch.ones_like(zoo.EVERY)}
    a, b = (stock_loop(model, batch) for batch in (masked, shown))
    hidden = [i for i, row in enumerate(zoo.EVERY) if not row.all()]
    assert all(not same_bits(a.row(i), b.row(i)) for i in hidden)


# --- embeddings and positions


def positions_of_every_kind() -> Tensor:
    """Of padding, which count real tokens, and of packed sequences, which stock reads by a mask."""
    positions = zoo.left_positions(zoo.EVERY)
    positions[0] = torch.tensor([0, 1, 2, 0, 1, 2])
    return positions


OFFSET = torch.arange(LENGTH) + torch.tensor([[0], [3], [7], [50]])
POSITIONS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "positions with an offset": lambda: zoo.batch() | {"position_ids": OFFSET},
    "positions of every padding": lambda: (
        zoo.batch(zoo.EVERY) | {"position_ids": positions_of_every_kind()}
    ),
}


@zoo.families
@pytest.mark.case("embeddings and positions")
@grid(POSITIONS)
def test_positions_are_read_as_in_stock(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    assert_loops(zoo.tiny(model_type, attn, dtype), POSITIONS[name]())


def from_embeddings(model: Any, mask: Tensor | None) -> dict[str, Tensor]:
    size = 4 if mask is None else len(mask)
    rows = zoo.embeddings(size, zoo.width(model), model.dtype)
    batch = {"inputs_embeds": rows, "labels": tokens(size)}
    return batch if mask is None else batch | {"attention_mask": mask}


@zoo.families
@pytest.mark.case("embeddings and positions")
@grid(["embeddings, no mask", "embeddings, every padding"])
def test_gradients_are_the_loops_from_embeddings(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype, **traits.without_hashing(model_type))
    assert_loops(model, from_embeddings(model, None if "no mask" in name else zoo.EVERY))


@zoo.families
@pytest.mark.case("embeddings and positions")
@grid(["mask"])
def test_gradients_of_the_embeddings_are_the_loops(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype, **traits.without_hashing(model_type))
    batch = from_embeddings(model, zoo.EVERY)
    inputs = batch.pop("inputs_embeds")

    def loss(x: Tensor, example: dict[str, Tensor], *, batched: bool) -> Tensor:
        call = {"inputs_embeds": x, **example}
        return model(**{n: v[None] for n, v in call.items()} if batched else call).loss

    rows = [{name: x[i] for name, x in batch.items()} for i in range(len(inputs))]
    leaves = list(inputs.clone().requires_grad_().unbind())
    with precise(model):
        grads = [
            torch.autograd.grad(loss(x, row, batched=True), x)[0]
            for x, row in zip(leaves, rows, strict=True)
        ]
    expected, none = torch.stack(grads), torch.zeros(len(inputs))
    for batched in (True, False):
        with opake.patched(model), torch.no_grad(), precise(model):
            found = vmap(grad(lambda x, row, b=batched: loss(x, row, batched=b)))(inputs, batch)
        assert_exact(Result(none, {"x": found}), Result(none, {"x": expected}))


# --- without a batch dimension


@zoo.families
@pytest.mark.case("without a batch dimension")
@zoo.forms
def test_chunks_and_the_grad_mode_change_nothing(model_type: str, batched: bool) -> None:
    # fp64: in fp32, gradients that cancel keep the rounding of either order.
    model = zoo.tiny(model_type, None, torch.float64)
    batch = labels_everywhere(zoo.EVERY)
    expected = stock_loop(model, batch)
    with opake.patched(model):
        assert_exact(per_example(model, batch, batched=batched), expected)
        with torch.no_grad():
            assert_exact(per_example(model, batch, batched=batched, chunk_size=3), expected)


@zoo.families
@pytest.mark.case("without a batch dimension")
@zoo.forms
def test_shared_inputs_are_the_same_as_mapped_ones(model_type: str, batched: bool) -> None:
    model, batch = zoo.tiny(model_type, None, torch.float64), zoo.batch()
    mask, positions = zoo.LEFT[1], zoo.left_positions(zoo.LEFT)[1]
    full = batch | {"attention_mask": mask.repeat(4, 1), "position_ids": positions.repeat(4, 1)}
    shared = {"attention_mask": mask, "position_ids": positions}
    shared = {name: x[None] if batched else x for name, x in shared.items()}
    expected = stock_loop(model, full)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, batched=batched, **shared), expected)


@zoo.families
@pytest.mark.case("without a batch dimension")
def test_arguments_are_taken_by_position_and_from_any_dimension(model_type: str) -> None:
    model, batch = zoo.tiny(model_type, None, torch.float64), zoo.batch(zoo.EVERY)
    names = list(inspect.signature(model.forward).parameters)
    taken = names[: names.index("attention_mask") + 1]  # of gpt2 a cache, too

    def loss(params: Any, example: dict[str, Tensor]) -> Tensor:
        args = tuple(example.get(name) for name in taken)
        rest = {name: x for name, x in example.items() if name not in taken}
        return functional_call(model, params, args, rest).loss

    expected = stock_loop(model, batch)
    turned = {name: x.T for name, x in batch.items()}
    with opake.patched(model), torch.no_grad(), precise(model):
        for given, dim in ((batch, 0), (turned, 1)):
            grads, losses = vmap(grad_and_value(loss), (None, dim))(trainable(model), given)
            assert_exact(Result(losses, grads), expected)


# --- outputs


def rows_of(model: Any, batch: dict[str, Tensor], **options: Any) -> list[Any]:
    """What stock returns for every row."""
    with torch.no_grad():
        return [
            model(**{name: x[i : i + 1] for name, x in batch.items()}, **options)
            for i in range(len(next(iter(batch.values()))))
        ]


def assert_outputs(found: Any, rows: list[Any], *, batched: bool = False) -> None:
    """Assert that ``found`` holds the rows' numbers, without their batch dimension."""
    assert type(found) is type(rows[0])
    assert len(found) == len(rows[0])
    if isinstance(found, dict):
        # vmap puts the fields into the order of their class, which some models' do not follow.
        assert set(found) == set(rows[0])
        rows = [tuple(row[name] for name in found) for row in rows]
        found = tuple(found.values())
    for field, *stock in zip(found, *rows, strict=True):
        if isinstance(field, tuple):
            assert_outputs(field, stock, batched=batched)
            continue
        for i, row in enumerate(stock):
            expected = row[0] if row.ndim > field[i].ndim else row
            assert row.ndim == 0 or batched or row.shape[0] != 1 or expected is not row
            assert error(field[i], expected, 1e-3 * row.abs().max().item()) <= 1e-5


@zoo.families
@pytest.mark.case("outputs")
@zoo.attention
@pytest.mark.parametrize("return_dict", [True, False], ids=["dict", "tuple"])
def test_every_output_loses_the_batch_dimension(
    model_type: str, attn: str, return_dict: bool
) -> None:
    model, batch = zoo.tiny(model_type, attn), labels_everywhere(zoo.EVERY)
    options: dict[str, Any] = {"output_hidden_states": True, "use_cache": False}
    options["return_dict"] = return_dict
    if attn == "eager":
        options["output_attentions"] = True
    rows = rows_of(model, batch, **options)
    with opake.patched(model), torch.no_grad():
        found = vmap(lambda example: model(**example, **options))(batch)
        kept = vmap(lambda example: model(**{n: x[None] for n, x in example.items()}, **options))(
            batch
        )
    assert_outputs(found, rows)
    assert_outputs(kept, rows, batched=True)
    size, logits = len(zoo.EVERY), found[1]
    assert logits.shape == (size, LENGTH, VOCAB)
    assert kept[1].shape == (size, 1, LENGTH, VOCAB)


@zoo.families
@pytest.mark.case("outputs")
@zoo.attention
def test_outputs_of_one_token_lose_one_dimension(model_type: str, attn: str) -> None:
    model = zoo.tiny(model_type, attn, head="base")
    batch = {"input_ids": tokens(3, 1)}
    options = {"output_hidden_states": True, "output_attentions": attn == "eager"}
    if not traits.is_encoder(model_type):
        options["use_cache"] = False
    rows = rows_of(model, batch, **options)
    with opake.patched(model), torch.no_grad():
        found = vmap(lambda example: model(**example, **options))(batch)
    assert_outputs(found, rows)
    assert found[0].shape == (3, 1, zoo.width(model))


@zoo.families
@pytest.mark.case("outputs")
def test_logits_to_keep_keeps_the_last(model_type: str) -> None:
    if traits.is_encoder(model_type):
        pytest.skip("stock's masked-LM head keeps all logits")

    def loss_of(output: Any) -> Tensor:
        assert output.logits.shape[-2:] == (2, VOCAB)
        return output.logits.square().sum()

    batch = {name: x for name, x in zoo.batch(zoo.LEFT).items() if name != "labels"}
    # fp64: with a single real token the gradients of q and k cancel, as above.
    assert_loops(zoo.tiny(model_type, None, torch.float64), batch, loss_of, logits_to_keep=2)


@zoo.families
@pytest.mark.case("outputs")
def test_num_items_in_batch_divides_as_in_stock(model_type: str) -> None:
    if traits.is_encoder(model_type):
        pytest.skip("stock's masked-LM loss has a divisor of its own")
    model, batch = zoo.tiny(model_type, None), zoo.batch(zoo.RIGHT)
    assert_loops(model, batch, num_items_in_batch=7)
    assert_loops(model, batch, num_items_in_batch=torch.tensor(7))


@zoo.families
@pytest.mark.case("outputs")
def test_a_cache_is_built_only_where_it_is_asked_for(model_type: str) -> None:
    fields = {"is_decoder": True} if traits.is_encoder(model_type) else {}
    model = zoo.tiny(model_type, None, torch.float64, head="causal", **fields)
    model.eval()  # some models build none in training unless they are asked to
    batch = {name: x for name, x in zoo.batch(zoo.MIXED).items() if name != "labels"}
    seen = []

    def loss_of(output: Any) -> Tensor:
        seen.append(output.get(zoo.cache_name(model)) is not None)
        return output.logits.square().sum()

    assert_loops(model, batch, loss_of, use_cache=True)
    assert_loops(model, batch, loss_of)
    # Four calls of the loop and two under vmap; none is built in those where nobody asks for one.
    assert seen == [True] * 6 + [True] * 4 + [False] * 2


@zoo.families
@pytest.mark.case("outputs")
def test_a_scope_leaves_nothing_behind(model_type: str) -> None:
    for attn in zoo.attentions(model_type):
        model = zoo.tiny(model_type, attn)
        stock_loop(model, zoo.batch())  # transformers hooks its outputs at the first call
        before = Snapshot(model)
        with opake.patched(model), torch.no_grad():
            changes = before.changes()
            per_example(model, zoo.batch(zoo.EVERY), batched=False)
        assert changes
        assert before.changes() == []


# --- experts


@zoo.families
@pytest.mark.parametrize("length", [LENGTH, 1])
def test_router_logits_keep_their_tokens(model_type: str, length: int) -> None:
    model, batch = with_router(model_type), {"input_ids": tokens(3, length)}
    options = {"output_router_logits": True, "use_cache": False}
    rows = rows_of(model, batch, **options)
    with opake.patched(model), torch.no_grad():
        found = vmap(lambda example: model(**example, **options))(batch)
    assert len(found.router_logits) == len(rows[0].router_logits) > 0
    for x, *stock in zip(found.router_logits, *(row.router_logits for row in rows), strict=True):
        assert x.shape[:2] == (3, length)
        assert error(x, torch.stack(stock)) <= 1e-5


@zoo.families
def test_the_loss_of_the_router_has_the_loops_gradients(model_type: str) -> None:
    model, batch = with_router(model_type, torch.float64), zoo.batch(zoo.EVERY[:4])
    without = stock_loop(model, batch)
    if torch.equal(stock_loop(model, batch, output_router_logits=True).losses, without.losses):
        pytest.skip(f"stock {model_type} has no loss of its router")
    assert_loops(model, batch, output_router_logits=True)


def with_router(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with a router that gives its logits."""
    if not traits.has_experts(model_type):
        pytest.skip(f"stock {model_type} has no experts")
    model = zoo.tiny(model_type, None, dtype)
    if not model(tokens(1), output_router_logits=True).get("router_logits"):
        pytest.skip(f"stock {model_type} returns no router logits")
    return model
