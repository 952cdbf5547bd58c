"""Llama under functorch inside a scope: stock's numbers, one example at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import (
    GRADIENT_BAR,
    Result,
    Snapshot,
    assert_exact,
    error,
    errors,
    model_loss,
    peak_memory,
    per_example,
    same_bits,
    stock_loop,
    trainable,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import opake
from opake.compat.attention import SDPA, sdpa
from opake.errors import PackedSequences

VOCAB, LENGTH = 19, 6
PAD = 0
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)

# torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
forward_mode = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated",
    "ignore:Attempted to insert a get_attr Node",  # linearize builds a graph from its constants
)

attentions = pytest.mark.parametrize("attn", ["sdpa", "eager"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
forms = pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])


def make(
    attn: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    cls: Any = LlamaForCausalLM,
    **config: Any,
) -> Any:
    """A llama of two layers whose weights are large enough for attention to be uneven."""
    torch.manual_seed(0)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
    }
    return cls(LlamaConfig(**{**small, **config}, attn_implementation=attn)).to(dtype)


BYSTANDER = make()
"""A model that a scope is opened for, to look at others meanwhile."""


def tokens(size: int = 4, length: int = LENGTH, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (size, length), generator=generator)


def lengths_mask(real: list[int], side: str) -> Tensor:
    """A padding mask with ``real[i]`` real tokens in row i."""
    position = torch.arange(LENGTH).expand(len(real), -1)
    count = torch.tensor(real).unsqueeze(1)
    return (position < count if side == "right" else position >= LENGTH - count).long()


def padded(mask: Tensor, *, label_padding: bool = False) -> dict[str, Tensor]:
    ids = tokens(len(mask)).masked_fill(mask == 0, PAD)
    labels = ids if label_padding else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def unpadded(size: int = 4, length: int = LENGTH, **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens(size, length), "labels": tokens(size, length), **more}


RIGHT = lengths_mask([6, 3, 1, 5], "right")
LEFT = lengths_mask([6, 3, 1, 5], "left")
MIXED = torch.stack([RIGHT[0], RIGHT[1], LEFT[1], torch.zeros(LENGTH, dtype=torch.long)])
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0] * LENGTH])


def left_positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def embeds(size: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, LENGTH, 16, generator=generator).to(dtype)


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no mask": unpadded,
    "a mask that hides nothing": lambda: padded(torch.ones(4, LENGTH, dtype=torch.long)),
    "right padding": lambda: padded(RIGHT),
    # The first real token has a label, and is predicted from a position that sees nothing.
    "left padding": lambda: padded(LEFT),
    "left and right padding, and nothing else": lambda: padded(MIXED),
    "labels on padding": lambda: padded(MIXED, label_padding=True),
    "holes": lambda: padded(HOLES, label_padding=True),
    "boolean padding mask": lambda: padded(MIXED.bool()),
    "float padding mask": lambda: padded(MIXED.float()),
    "some labels ignored": lambda: unpadded() | {"labels": tokens().masked_fill(HOLES == 0, -100)},
    "one token": lambda: unpadded(4, 1, shift_labels=tokens(4, 1)),
    "one token and no label": lambda: unpadded(4, 1),
    "one token, masked": lambda: unpadded(
        4, 1, shift_labels=tokens(4, 1), attention_mask=torch.tensor([[1], [0], [1], [0]])
    ),
    "one example": lambda: unpadded(1),
    "one example, left padded": lambda: padded(LEFT[1:2]),
    "one example of one token": lambda: unpadded(1, 1, shift_labels=tokens(1, 1)),
    "positions": lambda: unpadded(position_ids=torch.arange(LENGTH).repeat(4, 1)),
    "positions with an offset": lambda: unpadded(
        position_ids=torch.arange(LENGTH) + torch.tensor([[0], [3], [7], [100]])
    ),
    "positions of left padding": lambda: padded(LEFT) | {"position_ids": left_positions(LEFT)},
    "positions of padding at both sides": lambda: (
        padded(MIXED, label_padding=True) | {"position_ids": left_positions(MIXED)}
    ),
    "positions of packed rows with a mask": lambda: (
        padded(RIGHT) | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 4)}
    ),
}


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("found", "expected", "floor", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([0.0, 0.0], [0.0, 0.0], 0, 0),
        ([1.0, 3.0], [0.0, 4.0], 0, 0.25),
        ([0.0, 1.0], [0.0, 0.0], 0, INF),
        ([0.0, 1.0], [0.0, 0.0], 0.5, 2),
        ([NAN, 1.0], [NAN, 2.0], 0, 0.5),
        ([NAN, INF], [NAN, INF], 0, 0),
        ([NAN, 1.0], [1.0, 1.0], 0, INF),
        ([1.0, 1.0], [NAN, 1.0], 0, INF),
        ([1.0, INF], [1.0, -INF], 0, INF),
        ([1.0, INF], [1.0, NAN], 0, INF),
        ([1.0], [1.0, 1.0], 0, INF),
    ],
)
def test_the_error_of_a_result_is_as_defined(
    found: list[float], expected: list[float], floor: float, value: float
) -> None:
    assert error(torch.tensor(found), torch.tensor(expected), floor) == value


def test_the_floor_of_a_gradient_is_a_thousandth_of_its_examples_largest() -> None:
    losses = torch.ones(2)
    expected = Result(losses, {"a": torch.tensor([[10.0], [1.0]]), "b": torch.zeros(2, 1)})
    found = Result(losses, {"a": expected.grads["a"], "b": torch.tensor([[0.001], [0.001]])})
    assert errors(found, expected) == pytest.approx((0, 1))  # 0.001 / (1e-3 * 1), second example


def test_the_reference_refuses_to_run_in_a_scope() -> None:
    model = make()
    with opake.patched(BYSTANDER), pytest.raises(AssertionError, match="stock"):
        stock_loop(model, unpadded())


def test_the_snapshot_sees_what_a_scope_does() -> None:
    model = make()
    before = Snapshot(model)
    with opake.patched(model):
        changes = before.changes()
    assert "LlamaForCausalLM.model" in changes
    assert "torch._functorch.eager_transforms" in changes
    assert "the attention registry" in changes
    assert before.changes() == []


def assert_loops(
    model: Any,
    batch: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    flags: dict[str, Any] | None = None,
    floor: float = 1e-3,
    **options: Any,
) -> None:
    """Assert that the patched model, given a batch dimension or none, has the loop's numbers."""
    expected = stock_loop(model, batch, loss_of, **options)
    with opake.patched(model, **(flags or {})), torch.no_grad():
        found = [
            per_example(model, batch, loss_of, batched=batched, **options)
            for batched in (True, False)
        ]
    noise = 0.0
    if model.dtype == torch.float32 and errors(found[0], expected)[1] > GRADIENT_BAR[model.dtype]:
        wide = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
        truth = stock_loop(copy.deepcopy(model).double(), wide, loss_of, **options)
        noise = errors(expected, truth)[1]
    for result in found:
        assert_exact(result, expected, floor=floor, noise=noise)


# --- what the model is given


@attentions
@dtypes
@pytest.mark.parametrize("name", BATCHES)
def test_gradients_are_the_loops(attn: str, dtype: torch.dtype, name: str) -> None:
    # Softmax over one key is constant, so the gradients of q and k are zero: what fp32 leaves of
    # them is rounding, three ulps of the largest gradient on one processor, nothing on another.
    floor = 0.1 if dtype == torch.float32 and name.startswith("one token") else 1e-3
    assert_loops(make(attn, dtype), BATCHES[name](), floor=floor)


@attentions
@dtypes
@pytest.mark.parametrize("mask", [None, MIXED], ids=["no mask", "mask"])
def test_gradients_are_the_loops_from_embeddings(
    attn: str, dtype: torch.dtype, mask: Tensor | None
) -> None:
    batch = {"inputs_embeds": embeds(dtype=dtype), "labels": tokens()}
    if mask is not None:
        batch["attention_mask"] = mask
    assert_loops(make(attn, dtype), batch)


@attentions
@forms
def test_gradients_of_the_embeddings_are_the_loops(attn: str, batched: bool) -> None:
    model, inputs, labels = make(attn), embeds(), tokens()

    def loss(x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        call = {"inputs_embeds": x, "labels": labels, "attention_mask": mask}
        return model(**{n: v[None] for n, v in call.items()} if batched else call).loss

    expected = [
        torch.autograd.grad(
            model(inputs_embeds=x[None], labels=y[None], attention_mask=m[None]).loss, x
        )[0]
        for x, y, m in zip(inputs.clone().requires_grad_().unbind(), labels, MIXED, strict=True)
    ]
    with opake.patched(model), torch.no_grad():
        found = vmap(grad(loss))(inputs, labels, MIXED)
    none = Result(torch.zeros(4), {"inputs_embeds": torch.stack(expected)})
    assert_exact(Result(torch.zeros(4), {"inputs_embeds": found}), none)


def four_d(kind: str, dtype: torch.dtype) -> Tensor:
    """A causal mask with holes for each of four examples, (4, 1, S, S); the last hides all."""
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & HOLES.bool()[:, None, None, :]
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@pytest.mark.parametrize(
    ("attn", "kind"), [("sdpa", "bool"), ("sdpa", "float"), ("eager", "float"), ("eager", "bool")]
)
@dtypes
def test_a_mask_of_four_dimensions_is_read_as_stock_reads_it(
    attn: str, kind: str, dtype: torch.dtype
) -> None:
    assert_loops(make(attn, dtype), unpadded(attention_mask=four_d(kind, dtype)))


@attentions
@forms
@pytest.mark.parametrize("chunk_size", [1, 3, 4])
def test_chunks_of_the_batch_change_nothing(attn: str, batched: bool, chunk_size: int) -> None:
    model, batch = make(attn), padded(MIXED, label_padding=True)
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=batched, chunk_size=chunk_size)
    assert_exact(found, expected)


@attentions
@forms
def test_gradients_are_the_loops_with_gradients_enabled(attn: str, batched: bool) -> None:
    model, batch = make(attn), padded(MIXED, label_padding=True)
    expected = stock_loop(model, batch)
    with opake.patched(model):
        found = per_example(model, batch, batched=batched)
    assert_exact(found, expected)


@attentions
def test_num_items_in_batch_divides_as_in_stock(attn: str) -> None:
    assert_loops(make(attn), padded(RIGHT), num_items_in_batch=7)


@attentions
def test_logits_to_keep_keeps_the_last(attn: str) -> None:
    def loss_of(output: Any) -> Tensor:
        assert output.logits.shape[-2:] == (2, VOCAB)
        return output.logits.square().sum()

    batch = {"input_ids": tokens(), "attention_mask": LEFT}
    assert_loops(make(attn), batch, loss_of, logits_to_keep=2)


@forms
def test_shared_inputs_are_the_same_as_mapped_ones(batched: bool) -> None:
    model, batch = make(), unpadded(4)
    mask, positions = LEFT[1], left_positions(LEFT)[1]
    full = batch | {"attention_mask": mask.repeat(4, 1), "position_ids": positions.repeat(4, 1)}
    expected = stock_loop(model, full)
    shared = {"attention_mask": mask, "position_ids": positions}
    shared = {name: x[None] if batched else x for name, x in shared.items()}
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=batched, **shared)
    assert_exact(found, expected)


def test_positional_arguments_are_taken_like_named_ones() -> None:
    model = make()
    params, ids = trainable(model), tokens()

    def loss(params: Any, ids: Tensor, mask: Tensor) -> Tensor:
        return functional_call(model, params, (ids, mask), {"labels": ids}).loss

    expected = stock_loop(model, {"input_ids": ids, "attention_mask": MIXED, "labels": ids})
    with opake.patched(model), torch.no_grad():
        grads, losses = vmap(grad_and_value(loss), (None, 0, 0))(params, ids, MIXED)
    assert_exact(Result(losses, grads), expected)


# --- what the model is

CONFIGS: dict[str, dict[str, Any]] = {
    "tied embeddings": {"tie_word_embeddings": True},
    "one head for each query": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "a head_dim of its own": {"head_dim": 6},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "another activation": {"hidden_act": "gelu_pytorch_tanh"},
    "linear rope scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    },
    "llama3 rope scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4,
            "rope_theta": 1e4,
        }
    },
    "yarn rope scaling": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4,
            "rope_theta": 1e4,
        }
    },
    "bidirectional": {"is_causal": False},
}


@attentions
@dtypes
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_the_loops_gradients(attn: str, dtype: torch.dtype, name: str) -> None:
    model = make(attn, dtype, **CONFIGS[name])
    assert_loops(model, unpadded())
    assert_loops(model, padded(MIXED))


def last_hidden(output: Any) -> Tensor:
    # Uneven in every entry, and the same number with and without the batch dimension.
    hidden = output.last_hidden_state
    return (hidden * torch.arange(hidden.numel(), dtype=hidden.dtype).view_as(hidden).cos()).sum()


def head_cases() -> dict[str, tuple[Any, dict[str, Any], Tensor | None, Any]]:
    """Class, config, labels and loss of each head."""
    classes, floats = torch.tensor([0, 2, 1, 2]), torch.randn(4, 3)
    multi = "multi_label_classification"
    return {
        "base model": (LlamaModel, {}, None, last_hidden),
        "sequence classes": (LlamaForSequenceClassification, {}, classes, model_loss),
        "sequence regression": (
            LlamaForSequenceClassification,
            {"num_labels": 1},
            torch.randn(4),
            model_loss,
        ),
        "sequence labels": (
            LlamaForSequenceClassification,
            {"problem_type": multi},
            floats.sigmoid(),
            model_loss,
        ),
        "token classes": (
            LlamaForTokenClassification,
            {"classifier_dropout": 0.0},
            tokens() % 3,
            model_loss,
        ),
    }


@attentions
@dtypes
@pytest.mark.parametrize("name", head_cases())
@pytest.mark.parametrize("mask", [None, MIXED], ids=["no mask", "mask"])
def test_every_head_has_the_loops_gradients(
    attn: str, dtype: torch.dtype, name: str, mask: Tensor | None
) -> None:
    torch.manual_seed(3)
    cls, config, labels, loss_of = head_cases()[name]
    model = make(attn, dtype, cls, **{"num_labels": 3, **config})
    batch = {"input_ids": tokens()}
    if mask is not None:
        batch = {"input_ids": tokens().masked_fill(mask == 0, PAD), "attention_mask": mask}
    if labels is not None:
        batch["labels"] = labels.to(dtype) if labels.is_floating_point() else labels
    assert_loops(model, batch, loss_of)


def test_question_answering_has_the_loops_gradients() -> None:
    batch = {
        "input_ids": tokens(),
        "attention_mask": MIXED,
        "start_positions": torch.tensor([0, 1, 5, 2]),
        "end_positions": torch.tensor([3, 2, 5, 0]),
    }
    assert_loops(make(cls=LlamaForQuestionAnswering), batch)


LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_lora(attn: str, dtype: torch.dtype, **config: Any) -> Any:
    dropout = config.pop("lora_dropout", 0.0)
    base = make(attn, dtype, **config)
    lora = LoraConfig(
        r=2,
        lora_alpha=3,
        lora_dropout=dropout,
        target_modules=LORA_TARGETS,
        init_lora_weights=False,  # else B is zero, and with it the gradient of A
    )
    return get_peft_model(base, lora, autocast_adapter_dtype=False)


@attentions
@dtypes
@pytest.mark.parametrize("scope", ["the PeftModel", "the inner model"])
def test_lora_has_the_loops_gradients(attn: str, dtype: torch.dtype, scope: str) -> None:
    model = make_lora(attn, dtype)
    names = trainable(model)
    assert len(names) == 2 * 2 * len(LORA_TARGETS)
    assert all("lora_" in name for name in names)
    batch = padded(MIXED, label_padding=True)
    expected = stock_loop(model, batch)
    target = model if scope == "the PeftModel" else model.get_base_model()
    with opake.patched(target), torch.no_grad():
        for batched in (True, False):
            assert_exact(per_example(model, batch, batched=batched), expected)


def test_lora_with_a_saved_head_has_the_loops_gradients() -> None:
    lora = LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    model = get_peft_model(make(), lora)
    assert any("modules_to_save" in name for name in trainable(model))
    assert_loops(model, padded(MIXED))


# --- what the model returns


def stock_row(model: Any, i: int, batch: dict[str, Tensor], **options: Any) -> Any:
    with torch.no_grad():
        return model(**{name: x[i : i + 1] for name, x in batch.items()}, **options)


@attentions
@pytest.mark.parametrize("length", [LENGTH, 1])
def test_every_output_loses_the_batch_dimension(attn: str, length: int) -> None:
    model, batch = make(attn), unpadded(4, length, shift_labels=tokens(4, length))
    options: dict[str, Any] = {"output_hidden_states": True, "use_cache": False}
    if attn == "eager":
        options["output_attentions"] = True
    stock = [stock_row(model, i, batch, **options) for i in range(4)]
    with opake.patched(model), torch.no_grad():
        found = vmap(lambda example: model(**example, **options))(batch)
    assert type(found) is type(stock[0])
    assert list(found) == list(stock[0])
    assert found.logits.shape == (4, length, VOCAB)
    assert [h.shape for h in found.hidden_states] == [(4, length, 16)] * 3
    if attn == "eager":
        assert [a.shape for a in found.attentions] == [(4, 4, length, length)] * 2
    for i, row in enumerate(stock):
        assert error(found.loss[i], row.loss) <= 1e-5
        for name in ("logits", "hidden_states", "attentions"):
            for a, b in zip(leaves(found.get(name)), leaves(row.get(name)), strict=True):
                assert error(a[i], b[0]) <= 1e-5, name


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value or ())


@attentions
def test_a_tuple_keeps_its_length_and_loses_the_batch_dimension(attn: str) -> None:
    model, batch = make(attn), padded(MIXED, label_padding=True)
    options: dict[str, Any] = {
        "return_dict": False,
        "use_cache": False,
        "output_hidden_states": True,
    }
    stock = [stock_row(model, i, batch, **options) for i in range(4)]
    with opake.patched(model), torch.no_grad():
        found = vmap(lambda example: model(**example, **options))(batch)
    assert type(found) is tuple
    loss, logits, hidden = found
    for i, (loss_i, logits_i, hidden_i) in enumerate(stock):
        assert error(loss[i], loss_i) <= 1e-5
        assert error(logits[i], logits_i[0]) <= 1e-5
        for a, b in zip(hidden, hidden_i, strict=True):
            assert error(a[i], b[0]) <= 1e-5


def test_a_batched_call_keeps_its_batch_dimension() -> None:
    model, ids = make(), tokens()
    with opake.patched(model), torch.no_grad():
        one = vmap(lambda x: model(input_ids=x[None], use_cache=False).logits)(ids)
        two = vmap(lambda x: model(input_ids=x, use_cache=False).logits)(tokens(6).view(3, 2, -1))
    assert one.shape == (4, 1, LENGTH, VOCAB)
    assert two.shape == (3, 2, LENGTH, VOCAB)


def test_outside_a_transform_a_call_without_a_batch_is_stocks() -> None:
    model, ids = make(), tokens()[0]
    stock = failure(lambda: model(input_ids=ids))
    with opake.patched(model):
        assert failure(lambda: model(input_ids=ids)) == stock


def failure(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    return type(raised.value), str(raised.value)


def test_a_cache_is_built_only_where_it_is_asked_for() -> None:
    seen = []

    def loss_of(output: Any) -> Tensor:
        seen.append(output.get(CACHE) is not None)
        return output.loss

    assert_loops(make(), unpadded(), loss_of, use_cache=True)
    assert all(seen)
    del seen[:]
    assert_loops(make(), unpadded(), loss_of)
    assert seen == [True] * 4 + [False] * 2  # four calls of the loop, two under vmap


# --- rows do not see each other


def garbage(kind: str, dtype: torch.dtype, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Neighbours of the same shape."""
    other = {name: x.flip(1) for name, x in like.items()}
    if kind == "padding":
        other["attention_mask"] = torch.zeros_like(like["attention_mask"])
        other["labels"] = torch.full_like(like["labels"], -100)
    if kind == "nan":
        other["inputs_embeds"] = torch.full_like(like["inputs_embeds"], torch.nan)
    if kind == "inf":
        other["inputs_embeds"] = torch.full_like(like["inputs_embeds"], torch.inf)
    return other


@attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", ["others", "padding", "nan", "inf"])
def test_a_row_does_not_depend_on_its_neighbours(
    attn: str, dtype: torch.dtype, masked: bool, kind: str
) -> None:
    model = make(attn, dtype)
    mask = torch.stack([LEFT[1], RIGHT[1], LEFT[0], HOLES[0]])
    batch = {"inputs_embeds": embeds(dtype=dtype), "labels": tokens(), "attention_mask": mask}
    other = garbage(kind, dtype, batch)
    if not masked:
        del batch["attention_mask"], other["attention_mask"]
    with opake.patched(model), torch.no_grad():
        whole = per_example(model, batch, batched=False)
        assert all(x.isfinite().all() for x in whole.grads.values())
        for i in range(4):
            mixed = {name: x.clone() for name, x in other.items()}
            for name, x in batch.items():
                mixed[name][i] = x[i]
            found = per_example(model, mixed, batched=False)
            assert same_bits(found.row(i), whole.row(i))
            neighbour = (i + 1) % 4
            assert not same_bits(found.row(neighbour), whole.row(neighbour))


@attentions
@pytest.mark.parametrize("masked", [True, False])
def test_a_row_does_not_depend_on_its_place(attn: str, masked: bool) -> None:
    model, batch = make(attn), padded(MIXED, label_padding=True)
    if not masked:
        del batch["attention_mask"]
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
        turned = per_example(model, {n: x.roll(1, 0) for n, x in batch.items()}, batched=False)
    for i in range(4):
        assert same_bits(found.row(i), turned.row((i + 1) % 4))


# --- dropout


def drop_model(kind: str, attn: str, dtype: torch.dtype) -> Any:
    if kind == "lora":
        return make_lora(attn, dtype, attention_dropout=0.3, lora_dropout=0.4).train()
    return make(attn, dtype, attention_dropout=0.3).train()


@attentions
@dtypes
@pytest.mark.parametrize("kind", ["attention", "lora"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_same_dropout_is_a_loop_that_is_reseeded(
    attn: str, dtype: torch.dtype, kind: str, masked: bool
) -> None:
    model, batch = drop_model(kind, attn, dtype), padded(RIGHT)
    if not masked:
        del batch["attention_mask"]
    expected = stock_loop(model, batch, seed=5)
    assert errors(stock_loop(model, batch, seed=6), expected)[1] > 1e-2  # it drops something
    with opake.patched(model), torch.no_grad():
        for batched in (True, False):
            torch.manual_seed(5)
            assert_exact(per_example(model, batch, batched=batched, randomness="same"), expected)


@attentions
@pytest.mark.parametrize("kind", ["attention", "lora"])
def test_different_dropout_gives_every_row_its_own(attn: str, kind: str) -> None:
    model = drop_model(kind, attn, torch.float32)
    batch = {name: x[:1].repeat(4, 1) for name, x in padded(RIGHT).items()}
    with opake.patched(model), torch.no_grad():
        found = {
            randomness: per_example(model, batch, batched=False, randomness=randomness)
            for randomness in ("same", "different")
        }
    for i in range(4):
        for j in range(i):
            same, different = found["same"], found["different"]
            assert same_bits(same.row(i), same.row(j))
            assert not same_bits(different.row(i), different.row(j))


@attentions
def test_the_dropout_concern_takes_it_out_and_puts_it_back(attn: str) -> None:
    model = drop_model("lora", attn, torch.float32)
    before, batch = Snapshot(model), padded(MIXED)
    expected = stock_loop(copy.deepcopy(model).eval(), batch)
    with opake.patched(model, dropout=True), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)
    assert before.changes() == []


# --- autocast


@attentions
@forms
@pytest.mark.parametrize("name", ["no mask", "left and right padding, and nothing else"])
def test_autocast_gives_the_loops_numbers_under_autocast(
    attn: str, batched: bool, name: str
) -> None:
    model, batch = make(attn), BATCHES[name]()
    exact = stock_loop(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_loop(model, batch)
        with opake.patched(model), torch.no_grad():
            found = per_example(model, batch, batched=batched)
    assert all(grad.dtype == torch.float32 for grad in found.grads.values())
    assert found.losses.dtype == torch.float32
    loss, gradient = errors(expected, exact)
    assert gradient > 2**-9  # bf16 rounded something
    # Two roundings of one computation are no further apart than rounding moved stock itself.
    found_loss, found_gradient = errors(found, expected)
    assert found_loss <= loss
    assert found_gradient <= gradient


@forms
@pytest.mark.parametrize("name", ["no mask", "left and right padding, and nothing else"])
def test_autocast_without_gradients_reaches_attention(batched: bool, name: str) -> None:
    # Under vmap alone, autocast leaves out SDPA: rotary embedding has made q and k fp32, v is bf16.
    model, batch = make(), BATCHES[name]()

    def logits(example: dict[str, Tensor]) -> Tensor:
        call = {name: x[None] for name, x in example.items()} if batched else example
        return model(**call).logits.view(LENGTH, VOCAB)

    with torch.no_grad():
        exact = torch.cat([stock_row(model, i, batch).logits for i in range(4)])
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.cat([stock_row(model, i, batch).logits for i in range(4)])
            with opake.patched(model):
                found = vmap(logits)(batch)
    assert found.dtype == expected.dtype == torch.bfloat16
    for a, b, c in zip(found, expected, exact, strict=True):
        # No further from stock than rounding to bf16 moved stock.
        assert error(a, b) <= error(b, c)


# --- packing

PACKED = torch.tensor(
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
)


@attentions
@forms
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"use_cache": None}], ids=str)
@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaModel])
def test_packed_rows_are_refused(
    attn: str, batched: bool, options: dict[str, Any], cls: Any
) -> None:
    model = make(attn, cls=cls)
    batch = {"input_ids": tokens(), "position_ids": PACKED}
    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        with pytest.raises(PackedSequences, match="attention_mask"):
            per_example(model, batch, lambda output: output[0].sum(), batched=batched, **options)
        plain = batch | {"position_ids": PACKED[[0, 0, 3, 3]]}
        per_example(model, plain, lambda output: output[0].sum(), batched=batched, **options)
    assert before.changes() == []


@forward_mode
@forms
def test_packed_rows_under_nested_transforms_are_refused(batched: bool) -> None:
    model, ids = make(), tokens()
    calls = {"input_ids": ids, "position_ids": PACKED}

    def logits(scale: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        call = {"input_ids": ids, "position_ids": positions}
        if batched:
            call = {name: x[None] for name, x in call.items()}
        return (scale * model(**call).logits).sum()

    twice = vmap(vmap(grad(logits), (None, 0, 0)), (None, 1, 1))
    with opake.patched(model):
        with pytest.raises(PackedSequences):
            twice(torch.ones(()), *(x.view(2, 2, -1) for x in calls.values()))
        with pytest.raises(PackedSequences):
            jvp(lambda s: logits(s, ids[1], PACKED[1]), (torch.ones(()),), (torch.ones(()),))


@attentions
@forms
def test_restarting_positions_pass_where_stock_builds_no_packed_mask(
    attn: str, batched: bool
) -> None:
    model, batch = make(attn), unpadded(position_ids=PACKED)
    with_mask = batch | {"attention_mask": RIGHT}
    expected = stock_loop(model, with_mask), stock_loop(model, batch, use_cache=True)
    ordinary = model(**batch, use_cache=False).logits
    with opake.patched(model):
        assert torch.equal(model(**batch, use_cache=False).logits, ordinary)
        with torch.no_grad():
            assert_exact(per_example(model, with_mask, batched=batched), expected[0])
            assert_exact(per_example(model, batch, batched=batched, use_cache=True), expected[1])


@forms
def test_a_cache_that_is_given_lets_positions_restart(batched: bool) -> None:
    model, ids, prefix = make(), tokens(), tokens(4, 3, seed=9)

    def logits(ids: Tensor, prefix: Tensor) -> Tensor:
        cache = model(input_ids=prefix[None], use_cache=True)[CACHE]
        positions = torch.tensor([3, 4, 5, 3, 4, 5])
        call = {"input_ids": ids, "position_ids": positions}
        if batched:
            call = {name: x[None] for name, x in call.items()}
        return model(**call, **{CACHE: cache}).logits.view(LENGTH, VOCAB)

    with torch.no_grad():
        batched_was, batched = batched, True
        stock = torch.stack([logits(ids[i], prefix[i]) for i in range(4)])
        batched = batched_was
        with opake.patched(model):
            found = vmap(logits)(ids, prefix)
    for i in range(4):
        assert error(found[i], stock[i]) <= 1e-5


# --- first-order gradients


def net(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(3).sum() + (w.sin() @ w.T).logsumexp(0).sum()


def vector(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(2) + w.diagonal().exp()


W, X = torch.randn(4, 4, generator=torch.Generator().manual_seed(4)), torch.randn(3, 4)
V = torch.full((4, 4), 0.3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return net(self.weight, x)


SMALL = Small()
PARAMS = {"weight": W}


def call_small(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(SMALL, params, (x,))


def sum_grad(w: Tensor, x: Tensor) -> Tensor:
    return grad(net)(w, x).pow(2).sum()


COMPOSITIONS: dict[str, Callable[[], Any]] = {
    "grad": lambda: grad(net)(W, X[0]),
    "grad_and_value": lambda: grad_and_value(net)(W, X[0]),
    "grad of two arguments": lambda: grad(net, argnums=(0, 1))(W, X[0]),
    "grad of grad": lambda: grad(sum_grad)(W, X[0]),
    "grad of grad of grad": lambda: grad(lambda w: grad(sum_grad)(w, X[0]).pow(2).sum())(W),
    "vmap of grad": lambda: vmap(grad(net), (None, 0))(W, X),
    "vmap of vmap of grad": lambda: vmap(vmap(grad(net), (None, 0)), (0, None))(
        W.expand(2, 4, 4), X
    ),
    "grad of vmap": lambda: grad(lambda w: vmap(net, (None, 0))(w, X).sum())(W),
    "grad of vmap of grad": lambda: grad(lambda w: vmap(grad(net), (None, 0))(w, X).pow(2).sum())(
        W
    ),
    "vmap of grad of grad": lambda: vmap(grad(sum_grad), (None, 0))(W, X),
    "jacrev": lambda: jacrev(vector)(W, X[0]),
    "jacfwd": lambda: jacfwd(vector)(W, X[0]),
    "jacfwd of jacrev": lambda: jacfwd(jacrev(vector))(W, X[0]),
    "jacrev of jacfwd": lambda: jacrev(jacfwd(vector))(W, X[0]),
    "jacrev of grad": lambda: jacrev(grad(net))(W, X[0]),
    "jacfwd of grad": lambda: jacfwd(grad(net))(W, X[0]),
    "hessian": lambda: hessian(net)(W, X[0]),
    "vmap of hessian": lambda: vmap(hessian(net), (None, 0))(W, X),
    "hessian of grad": lambda: hessian(sum_grad)(W, X[0]),
    "vjp": lambda: vjp(lambda w: vector(w, X[0]), W)[1](torch.ones(4)),
    "vjp of grad": lambda: vjp(lambda w: grad(net)(w, X[0]), W)[1](V),
    "grad of vjp": lambda: grad(
        lambda w: vjp(lambda u: vector(u, X[0]), w)[1](torch.ones(4))[0].pow(2).sum()
    )(W),
    "jvp": lambda: jvp(lambda w: vector(w, X[0]), (W,), (V,)),
    "jvp of grad": lambda: jvp(lambda w: grad(net)(w, X[0]), (W,), (V,)),
    "vmap of jvp of grad": lambda: vmap(lambda x: jvp(lambda w: grad(net)(w, x), (W,), (V,)))(X),
    "jvp of vmap of grad": lambda: jvp(lambda w: vmap(grad(net), (None, 0))(w, X), (W,), (V,)),
    "grad of jvp": lambda: grad(lambda w: jvp(lambda u: net(u, X[0]), (w,), (V,))[1])(W),
    "jvp of jvp of grad": lambda: jvp(
        lambda u: jvp(lambda w: grad(net)(w, X[0]), (u,), (V,))[1], (W,), (V,)
    ),
    "linearize": lambda: linearize(lambda w: vector(w, X[0]), W)[1](V),
    "linearize of grad": lambda: linearize(lambda w: grad(net)(w, X[0]), W)[1](V),
    "functional_call, vmap of grad": lambda: vmap(grad(call_small), (None, 0))(PARAMS, X),
    "functional_call, hessian": lambda: hessian(call_small)(PARAMS, X[0]),
    "functional_call, grad of grad": lambda: grad(
        lambda p: grad(call_small)(p, X[0])["weight"].pow(2).sum()
    )(PARAMS),
    "functional_call, jacrev": lambda: jacrev(call_small)(PARAMS, X[0]),
    "an inner grad with gradients off": lambda: vmap(lambda x: torch.no_grad()(grad(net))(W, x))(X),
    "an outer backward": lambda: outer_backward(),
}


def outer_backward() -> Tensor:
    with torch.enable_grad():
        w = W.clone().requires_grad_()
        return torch.autograd.grad(vmap(grad(net), (None, 0))(w, X).pow(2).sum(), w)[0]


@forward_mode
@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_live_scope_changes_no_other_transform(name: str, mode: Any) -> None:
    compose = COMPOSITIONS[name]
    with mode():
        stock = compose()
        with opake.patched(BYSTANDER):
            assert same_bits(compose(), stock)


@forward_mode
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_live_scope_changes_no_other_model(mode: Any) -> None:
    model, ids = make("eager"), tokens()
    params = trainable(model)
    norm = {"model.norm.weight": params["model.norm.weight"]}

    def loss(params: Any, ids: Tensor) -> Tensor:
        call = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        return functional_call(model, params, (), call).loss

    def results() -> list[Any]:
        return [
            grad(lambda p: grad(loss)(p, ids[0])["model.norm.weight"].pow(2).sum())(norm),
            hessian(loss)(norm, ids[0]),
            jvp(lambda p: vmap(grad(loss), (None, 0))(p, ids), (norm,), (norm,)),
            # Under no_grad this is what the scope makes cheaper, by formulas that round alike
            # but not equally; the next test says how.
            [] if mode is torch.no_grad else vmap(grad(loss), (None, 0))(params, ids),
        ]

    with mode():
        stock = results()
        with opake.patched(BYSTANDER):
            assert same_bits(results(), stock)


def test_a_first_order_gradient_is_that_of_an_ordinary_backward() -> None:
    # silu and others have a second formula for a backward that is differentiated again. Without
    # a second order, the numbers are those of tensor.backward(), not of functorch's own.
    x = torch.linspace(-5, 5, 101).requires_grad_()
    expected = torch.autograd.grad(F.silu(x).sum(), x)[0]
    with torch.no_grad():
        assert not same_bits(grad(lambda x: F.silu(x).sum())(x), expected)
        with opake.patched(BYSTANDER):
            assert same_bits(grad(lambda x: F.silu(x).sum())(x), expected)


@forward_mode
def test_second_order_through_the_patched_model_is_stocks() -> None:
    model, ids, mask = make("eager"), tokens(), RIGHT

    def loss(norm: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        call = {"input_ids": ids, "labels": ids, "attention_mask": mask}
        call = {name: x[None] for name, x in call.items()}
        return functional_call(model, {"model.norm.weight": norm}, (), call).loss

    norm = trainable(model)["model.norm.weight"]
    stock = []
    for row, row_mask in zip(ids, mask, strict=True):
        leaf = norm.clone().requires_grad_()
        first = torch.autograd.grad(loss(leaf, row, row_mask), leaf, create_graph=True)[0]
        rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in first]
        stock.append(torch.stack(rows))
    for mode in (torch.no_grad, torch.enable_grad):
        with opake.patched(model), mode():
            found = vmap(jacrev(grad(loss)), (None, 0, 0))(norm, ids, mask)
            forward = vmap(hessian(loss), (None, 0, 0))(norm, ids, mask)
        for i in range(4):
            # Relative to the largest entry; a Hessian sums as many terms as a gradient.
            assert error(found[i], stock[i]) <= 1e-5
            assert error(forward[i], stock[i]) <= 1e-5


def test_first_order_graphs_keep_less_alive() -> None:
    model, batch = make(num_hidden_layers=4), unpadded()

    def peak() -> int:
        with torch.no_grad(), peak_memory() as read:
            per_example(model, batch, batched=True, use_cache=False)
        return read()

    stock = peak()
    with opake.patched(model, first_order=False):
        without = peak()
    with opake.patched(model):
        found = peak()
    assert peak() == stock
    assert without == stock
    # Gradients and one layer's backward instead of everything: 0.42 of stock was measured.
    assert found < 0.6 * stock


def test_gradients_enabled_keep_the_graph_of_the_backward() -> None:
    model, batch = make(), unpadded()
    norm = model.model.norm.weight

    def loss(weight: Tensor, example: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {"model.norm.weight": weight}, (), example).loss

    with opake.patched(model):
        grads = vmap(grad(loss), (None, 0))(norm, batch)
        assert grads.requires_grad
        assert torch.autograd.grad(grads.pow(2).sum(), norm)[0].abs().max() > 0


# --- concerns, one by one


def functorch_failure(model: Any, batch: dict[str, Tensor], *, batched: bool) -> tuple[type, str]:
    return failure(lambda: per_example(model, batch, batched=batched, use_cache=False))


@attentions
def test_without_batchify_a_call_without_a_batch_fails_as_in_stock(attn: str) -> None:
    model, batch = make(attn), unpadded()
    stock = functorch_failure(model, batch, batched=False)
    expected = stock_loop(model, batch)
    with opake.patched(model, batchify=False):
        assert functorch_failure(model, batch, batched=False) == stock
        assert_exact(per_example(model, batch, batched=True), expected)


@attentions
def test_packed_rows_are_refused_without_batchify_too(attn: str) -> None:
    model, batch = make(attn), unpadded(position_ids=PACKED)
    with opake.patched(model, batchify=False), pytest.raises(PackedSequences):
        per_example(model, batch, batched=True)


@attentions
def test_without_vmap_masking_packed_rows_are_not_looked_for(attn: str) -> None:
    model, batch = make(attn), unpadded(position_ids=PACKED)
    with opake.patched(model, batchify=False, vmap_masking=False):
        kind, message = functorch_failure(model, batch, batched=True)
    assert kind is RuntimeError
    assert "data-dependent" in message


def test_without_vmap_masking_a_padding_mask_fails_as_in_stock() -> None:
    model, batch = make(), padded(MIXED)
    stock = functorch_failure(model, batch, batched=True)
    assert "data-dependent" in stock[1]
    with opake.patched(model, vmap_masking=False):
        assert functorch_failure(model, batch, batched=True) == stock


def test_without_vmap_masking_eager_still_has_the_loops_gradients() -> None:
    assert_loops(make("eager"), padded(MIXED), flags={"vmap_masking": False})


def test_without_kv_cache_a_transform_builds_one_as_stock_does() -> None:
    seen = []

    def loss_of(output: Any) -> Tensor:
        seen.append(output.get(CACHE) is not None)
        return output.loss

    assert_loops(make(), unpadded(), loss_of, flags={"kv_cache": False})
    assert seen == [True] * 6


def test_attention_runs_through_a_key_of_its_own_and_the_config_is_untouched() -> None:
    model = make()
    layers = [layer.self_attn for layer in model.model.layers]
    with opake.patched(model):
        assert {layer.config._attn_implementation for layer in layers} == {SDPA}
        assert ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa
        assert model.config._attn_implementation == "sdpa"
        view = layers[0].config
    assert {layer.config._attn_implementation for layer in layers} == {"sdpa"}
    assert view._attn_implementation == "sdpa"
    assert SDPA not in ALL_ATTENTION_FUNCTIONS._global_mapping


def test_without_sdpa_attention_is_the_stock_one() -> None:
    model, batch = make(), padded(MIXED)
    config, keys = model.config, list(ALL_ATTENTION_FUNCTIONS._global_mapping)
    expected = stock_loop(model, batch)
    with opake.patched(model, sdpa=False), torch.no_grad():
        assert all(layer.self_attn.config is config for layer in model.model.layers)
        assert list(ALL_ATTENTION_FUNCTIONS._global_mapping) == keys
        assert_exact(per_example(model, batch, batched=False), expected)


def test_without_first_order_functorch_is_untouched() -> None:
    stock = eager_transforms.grad_and_value_impl
    model, batch = make(), padded(MIXED)
    expected = stock_loop(model, batch)
    with opake.patched(model, first_order=False), torch.no_grad():
        assert eager_transforms.grad_and_value_impl is stock
        assert_exact(per_example(model, batch, batched=False), expected)
    with opake.patched(model):
        assert eager_transforms.grad_and_value_impl is not stock
    assert eager_transforms.grad_and_value_impl is stock


def test_without_compat_transforms_fail_as_in_stock() -> None:
    model = make()
    calls = [(unpadded(), False), (padded(MIXED), True)]
    stock = [functorch_failure(model, batch, batched=batched) for batch, batched in calls]
    with opake.patched(model, compat=False):
        for (batch, batched), expected in zip(calls, stock, strict=True):
            assert functorch_failure(model, batch, batched=batched) == expected
