"""Tiny models of every family, with weights large enough for attention to be uneven."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle import (
    GRADIENT_BAR,
    MOE_BAR,
    Result,
    assert_exact,
    errors,
    errors_by_row,
    model_loss,
    per_example,
    stock_loop,
)
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
)

import opake
from opake import families as declared
from opake.compat._versions import CACHE_NAMES
from opake.compat.tiny import tiny_config

VOCAB, LENGTH, PAD = 19, 6, 0

_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    # Low caps, so that they bend what these weights give.
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    # Stock's own default is None, which its models cannot be built with.
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    # By default all layers are of one kind, which is not what makes the family.
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mellum": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    # A dense layer and one of experts; positions that reach where attention gets colder.
    "llama4_text": {"interleave_moe_layer_step": 2, "floor_scale": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
}
_WRAPPED = ("gemma3", "qwen3_5_moe")
"""Models with images, whose text part is another family."""

FIELDS = {name: _FIELDS.get(name, {}) for name in declared.shipped() if name not in _WRAPPED}
"""Every family, and what the tiny config of it has that :func:`tiny_config` does not give it."""

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)
"""What this transformers calls a key/value cache."""

# ---- what tests are parametrised by

families = pytest.mark.parametrize("model_type", FIELDS)
attention = pytest.mark.parametrize("attn", ["sdpa", "eager"])
forms = pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])

_COMBINATIONS = [
    ("sdpa", torch.float64),
    ("eager", torch.float32),
    ("sdpa", torch.float32),
    ("eager", torch.float64),
]


def _mark(names: str, rows: list[tuple[Any, ...]]) -> Any:
    ids = [
        "-".join(f"fp{torch.finfo(x).bits}" if isinstance(x, torch.dtype) else str(x) for x in row)
        for row in rows
    ]
    return pytest.mark.parametrize(tuple(names.split()), rows, ids=ids)


def grid(names: Iterable[Any]) -> Any:
    """Parametrise by ``name``, ``attn`` and ``dtype``: every name with either attention and dtype.

    The two pairs that do so alternate, so that all four combinations come up.
    """
    pairs = (_COMBINATIONS[:2], _COMBINATIONS[2:])
    rows = [(name, *pair) for i, name in enumerate(names) for pair in pairs[i % 2]]
    return _mark("name attn dtype", rows)


def turns(names: Iterable[Any]) -> Any:
    """Parametrise by ``model_type``, ``name``, ``attn`` and ``dtype``, the last two taking turns.

    For what has little to do with either: one run for every family and name.
    """
    chosen = list(names)
    return of_each(lambda model_type: chosen)


def of_each(names_of: Callable[[str], Iterable[str]]) -> Any:
    """Parametrise as :func:`turns`, by names that every family has of its own."""
    rows = []
    for i, model_type in enumerate(FIELDS):
        for j, name in enumerate(names_of(model_type)):
            attn, dtype = _COMBINATIONS[(i + j) % 4]
            rows.append((model_type, name, attn if sdpa(model_type) else "eager", dtype))
    return _mark("model_type name attn dtype", rows)


# ---- models


HEADS = {
    "base": AutoModel,
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}
"""The auto class of every head."""


WORDS = {
    "base": "nothing",
    "causal": "the next token",
    "masked": "masked tokens",
    "sequence": "classes of sequences",
    "token": "classes of tokens",
    "question": "spans that answer a question",
}
"""What every head is for."""


def lm_head(model_type: str) -> str:
    """The language-modelling head that a family is trained with."""
    return "masked" if model_type in ("bert", "roberta") else "causal"


def has_head(model_type: str, head: str) -> bool:
    """Tell whether transformers has that head for the family."""
    return type(AutoConfig.for_model(model_type)) in HEADS[head]._model_mapping


def tiny(
    model_type: str,
    attn: str | None = "sdpa",
    dtype: torch.dtype = torch.float32,
    *,
    head: str | None = None,
    config: Any = None,
    **fields: Any,
) -> Any:
    """The same model of two layers at every call. ``attn`` None: what stock would choose.

    Skips the test where stock has no such attention or head for the family.
    """
    if attn is not None and attn not in attentions(model_type):
        pytest.skip(f"stock {model_type} has no {attn.upper()}")
    head = head or lm_head(model_type)
    if not has_head(model_type, head):
        pytest.skip(f"stock {model_type} has no head for {WORDS[head]}")
    torch.manual_seed(0)
    options = {} if attn is None else {"attn_implementation": attn}
    config = config or tiny_fields(model_type, **fields)
    return HEADS[head].from_config(config, **options).to(dtype).train()


def tiny_fields(model_type: str, **fields: Any) -> Any:
    """The config of :func:`tiny`."""
    config = AutoConfig.for_model(model_type)
    shared: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD}
    shared |= {"initializer_range": 0.3, "init_std": 0.3, "bos_token_id": 1, "eos_token_id": 2}
    shared |= dict.fromkeys(probabilities(config), 0.0)
    if hasattr(config, "num_experts_per_tok") or hasattr(config, "moe_topk"):
        shared["experts_implementation"] = "batched_mm"  # stock's grouped_mm has no fp64 on a CPU
    return tiny_config(config, **{**shared, **FIELDS[model_type], **fields})


def probabilities(config: Any) -> list[str]:
    """The fields that say how much is dropped."""
    fields = config.to_dict().items()
    return [name for name, value in fields if "drop" in name and isinstance(value, float)]


def sdpa(model_type: str) -> bool:
    """Tell whether a family has SDPA."""
    cls = AutoModel._model_mapping[type(AutoConfig.for_model(model_type))]
    return bool(cls._supports_sdpa)


def is_coarse(model_type: str) -> bool:
    """Tell whether a family has experts or linear attention, for which the bar is another."""
    fields = AutoConfig.for_model(model_type).to_dict()
    masks = declared.find(model_type).masks
    experts = any(name in fields for name in ("num_experts_per_tok", "moe_topk"))
    return experts or "create_recurrent_attention_mask" in masks


def attentions(model_type: str) -> tuple[str, ...]:
    """The attention implementations that a family has and that work under a transform."""
    return ("sdpa", "eager") if sdpa(model_type) else ("eager",)


def cache_name(model: Any) -> str:
    """What the model calls a cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


def width(model: Any) -> int:
    """The size of a hidden state."""
    return model.get_input_embeddings().weight.shape[1]


# ---- what they are given


def tokens(size: int = 4, length: int = LENGTH, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (size, length), generator=generator)


def lengths_mask(real: list[int], side: str, length: int = LENGTH) -> Tensor:
    """A padding mask with ``real[i]`` real tokens in row i."""
    position = torch.arange(length).expand(len(real), -1)
    count = torch.tensor(real).unsqueeze(1)
    return (position < count if side == "right" else position >= length - count).long()


RIGHT = lengths_mask([6, 4, 1, 5], "right")
LEFT = lengths_mask([6, 4, 1, 5], "left")
MIXED = torch.cat([RIGHT[:2], LEFT[2:]])
FULLY_MASKED = lengths_mask([6, 0, 3, 6], "right")
ONES = torch.ones(4, LENGTH, dtype=torch.long)
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0] * LENGTH])
EVERY = torch.cat([RIGHT[1:3], LEFT[1:2], HOLES[[0, 3]]])
"""Right and left padding, a single token, holes, and nothing but padding."""
MASKS = {
    "none": None,
    "ones": ONES,
    "right": RIGHT,
    "left": LEFT,
    "mixed": MIXED,
    "fully-masked": FULLY_MASKED,
}


def batch(mask: Tensor | None = None, *, size: int = 4, length: int = LENGTH) -> dict[str, Tensor]:
    """Language-modelling rows: padding where the mask has it, its labels ignored."""
    if mask is None:
        ids = tokens(size, length)
        return {"input_ids": ids, "labels": ids.clone()}
    ids = tokens(len(mask), mask.shape[1]).masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, -100)
    labels[mask.sum(1) == 0] = 1  # a fully masked row has a loss too
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def embeddings(size: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random ``inputs_embeds`` (size, LENGTH, width)."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size, LENGTH, width, generator=generator).to(dtype)


def left_positions(mask: Tensor) -> Tensor:
    """Positions that count real tokens."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


# ---- what is asserted of them


def last_hidden(output: Any) -> Tensor:
    """A loss of a base model: uneven in every entry, alike with and without a batch dimension."""
    hidden = output[0]
    return (hidden * torch.arange(hidden.numel(), dtype=hidden.dtype).view_as(hidden).cos()).sum()


def assert_loops(
    model: Any,
    batch: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    floor: float = 1e-3,
    forms: tuple[bool, ...] = (True, False),
    **options: Any,
) -> None:
    """Assert that the patched model has the loop's numbers, given a batch dimension and none."""
    expected = stock_loop(model, batch, loss_of, **options)
    with opake.patched(model), torch.no_grad():
        found = [
            per_example(model, batch, loss_of, batched=batched, **options) for batched in forms
        ]
    assert_alike(found, expected, model, batch, loss_of, floor=floor, **options)


def assert_alike(
    found: list[Result],
    expected: Result,
    model: Any,
    batch: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    floor: float = 1e-3,
    **options: Any,
) -> None:
    """Assert that results are those of the loop, given what the loop was run with."""
    if hasattr(model, "peft_config") and model.dtype == torch.float32:
        # Where a key's adapter moves all scores alike its gradient cancels to an ulp or two of the
        # largest, which is a thousand times the bar at the usual floor.
        floor = max(floor, 0.1)
    coarse = model.dtype == torch.float32 and is_coarse(model.config.model_type)
    least = MOE_BAR / 3 if coarse else 0.0
    loss_noise: float | Tensor = least
    noise: float | Tensor = least
    if max(errors(found[0], expected, floor=floor)) > GRADIENT_BAR[model.dtype]:
        loss, gradient = rounding(model, batch, loss_of, expected, floor=floor, **options)
        loss_noise, noise = loss.clamp(min=least), gradient.clamp(min=least)
        # A row whose gradients are zero but for rounding says nothing; not all may be such.
        assert (gradient < 1e-2).any(), "stock's rounding leaves no row to judge"
    for result in found:
        assert_exact(result, expected, floor=floor, noise=noise, loss_noise=loss_noise)


def rounding(
    model: Any,
    batch: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor],
    expected: Result,
    *,
    floor: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """How far rounding alone has moved the losses and gradients of stock, for each example.

    In fp32, how far they are from those in fp64; and where that shows that they cancel, half an
    ulp of the largest gradient at least, by which every term is rounded. A loss is a difference of
    scores about as large as the largest loss, and keeps their rounding. In fp64, how far they go
    when every parameter moves by one ulp, which is the least that any order of computing them
    amounts to.
    """
    other = copy.deepcopy(model)
    if model.dtype == torch.float32:
        other = other.double()
        batch = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
    else:
        with torch.no_grad():
            for p in other.parameters():
                p.copy_(p.nextafter(torch.where(torch.rand_like(p) < 0.5, -torch.inf, torch.inf)))
    truth = stock_loop(other, batch, loss_of, **options)
    loss, gradient = errors_by_row(expected, truth, floor=floor)
    eps = torch.finfo(model.dtype).eps
    cancels = gradient > GRADIENT_BAR[model.dtype]
    gradient = gradient.maximum(cancels * eps / 2 / floor)
    if model.dtype == torch.float32:
        sizes = expected.losses.double().abs()
        largest = sizes.where(sizes.isfinite(), 0).max()
        cancelled = (eps * largest / sizes).clamp(max=MOE_BAR / 3).nan_to_num(0)
        loss = loss.maximum(cancelled)
    return loss, gradient
