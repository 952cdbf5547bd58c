"""The heads that a tiny model can have, and what each is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from oracle import model_loss
from torch import Tensor
from transformers import (
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    GPT2DoubleHeadsModel,
)
from zoo import LENGTH, tokens


class HeadCase(NamedTuple):
    """A head, its config, and the labels of the rows of a mask (B, S)."""

    head: str
    fields: dict[str, Any]
    labels: Callable[[Tensor], dict[str, Tensor]]


def _real(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(4))


def _spans(mask: Tensor) -> dict[str, Tensor]:
    size, length = mask.shape
    starts = torch.arange(size) % length
    starts[-1] = length + 3  # behind the row: stock ignores it, and the mean of nothing is NaN
    return {"start_positions": starts, "end_positions": starts.flip(0).clamp(max=length - 1)}


HEADS: dict[str, HeadCase] = {
    "base": HeadCase("base", {}, lambda mask: {}),
    "classes": HeadCase(
        "sequence", {"num_labels": 3}, lambda mask: {"labels": torch.arange(len(mask)) % 3}
    ),
    "regression": HeadCase(
        "sequence", {"num_labels": 1}, lambda mask: {"labels": _real(len(mask))}
    ),
    "several labels": HeadCase(
        "sequence", {"num_labels": 3}, lambda mask: {"labels": _real(len(mask), 3)}
    ),
    "token classes": HeadCase(
        "token",
        {"num_labels": 3, "classifier_dropout": 0.0},
        lambda mask: {"labels": (tokens(*mask.shape) % 3).masked_fill(mask == 0, -100)},
    ),
    "spans": HeadCase("question", {}, _spans),
}


def head_batch(case: HeadCase, dtype: torch.dtype, mask: Tensor = zoo.EVERY) -> dict[str, Tensor]:
    """The rows of a mask with the labels of a head."""
    labels = {n: x.to(dtype) if x.is_floating_point() else x for n, x in case.labels(mask).items()}
    ids = tokens(*mask.shape).masked_fill(mask == 0, zoo.PAD)
    return {"input_ids": ids, "attention_mask": mask, **labels}


# ---- what one family or two have alone

Special = tuple[Any, dict[str, Tensor], Callable[[Any], Tensor]]
"""A model, what it is given, and its loss."""


def _of_class(cls: Any, model_type: str, attn: str, dtype: torch.dtype, **fields: Any) -> Any:
    # No auto class finds it.
    config = zoo.tiny(model_type, attn, head="base", **fields).config
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=attn).to(dtype).train()


def _sequences() -> dict[str, Tensor]:
    """Two examples of two padded sequences each: (2, 2, LENGTH)."""
    mask = zoo.EVERY[:4].view(2, 2, LENGTH)
    ids = tokens(4).view(2, 2, LENGTH).masked_fill(mask == 0, zoo.PAD)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}


def _encoded(width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a decoder with cross-attention is given: another length, and padding of its own."""
    size = len(zoo.EVERY)
    return zoo.batch(zoo.EVERY) | {
        "encoder_hidden_states": zoo.embeddings(size, width, dtype)[:, :4].contiguous(),
        "encoder_attention_mask": zoo.EVERY.flip(0)[:, :4],
    }


def _token_types(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    types = tokens(len(zoo.EVERY), seed=8)
    types = types % 2 if model_type == "bert" else types  # gpt2 embeds them as tokens
    batch = zoo.batch(zoo.EVERY) | {"token_type_ids": types}
    return zoo.tiny(model_type, attn, dtype), batch, model_loss


def _decoder(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    model = zoo.tiny(model_type, attn, dtype, head="causal", is_decoder=True)
    return model, zoo.batch(zoo.EVERY), model_loss


def _cross_attention(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    fields = {"is_decoder": True, "add_cross_attention": True}
    model = zoo.tiny(model_type, attn, dtype, head="causal", **fields)
    return model, _encoded(zoo.width(model), dtype), model_loss


def _next_sentence(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    batch = head_batch(HEADS["classes"], dtype)
    batch["labels"] = batch["labels"] % 2
    return _of_class(BertForNextSentencePrediction, model_type, attn, dtype), batch, model_loss


def _pre_training(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    batch = zoo.batch(zoo.EVERY) | {"next_sentence_label": torch.arange(len(zoo.EVERY)) % 2}
    return _of_class(BertForPreTraining, model_type, attn, dtype), batch, model_loss


def _multiple_choice(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    batch = _sequences() | {"labels": torch.tensor([0, 1])}
    return _of_class(BertForMultipleChoice, model_type, attn, dtype), batch, model_loss


def _double_heads(model_type: str, attn: str, dtype: torch.dtype) -> Special:
    batch = _sequences() | {"mc_labels": torch.tensor([0, 1])}
    batch["labels"] = batch["input_ids"]
    batch["mc_token_ids"] = torch.tensor([[5, 3], [0, 5]])
    fields = {"summary_first_dropout": 0.0}
    model = _of_class(GPT2DoubleHeadsModel, model_type, attn, dtype, **fields)
    return model, batch, lambda output: output.loss + 2 * output.mc_loss


_SPECIAL: dict[tuple[str, str], Callable[[str, str, torch.dtype], Special]] = {
    ("gpt2", "token types"): _token_types,
    ("gpt2", "cross-attention"): _cross_attention,
    ("gpt2", "double heads"): _double_heads,
    ("bert", "token types"): _token_types,
    ("bert", "decoder"): _decoder,
    ("bert", "cross-attention"): _cross_attention,
    ("roberta", "decoder"): _decoder,
    ("roberta", "cross-attention"): _cross_attention,
    ("bert", "next sentence"): _next_sentence,
    ("bert", "pre-training"): _pre_training,
    ("bert", "multiple choice"): _multiple_choice,
}

specials = pytest.mark.parametrize(("model_type", "name"), _SPECIAL)


def special(model_type: str, name: str, attn: str, dtype: torch.dtype) -> Special:
    """What only one family or two have."""
    return _SPECIAL[model_type, name](model_type, attn, dtype)
