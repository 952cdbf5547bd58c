"""Tiny models of every family, with weights large enough for attention to be uneven."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

VOCAB, LENGTH, PAD = 19, 6, 0

_DENSE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_BERT = {
    **{name: value for name, value in _DENSE.items() if name != "num_key_value_heads"},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}

FIELDS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen2": {**_DENSE, "tie_word_embeddings": True},
    "mistral": {**_DENSE, "sliding_window": 3},
    # Low caps, so that they bend what these weights give.
    "gemma2": {
        **_DENSE,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "sliding_window": 3,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt2": {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": _BERT,
}
"""The config of every family; windows are shorter than the rows of :func:`tokens`."""

HEADS = {
    "base": AutoModel,
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}
"""The auto class of every head."""


def lm_head(model_type: str) -> str:
    """The language-modelling head that a family is trained with."""
    return "masked" if model_type == "bert" else "causal"


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
    """The same model of two layers at every call. ``attn`` None: what stock would choose."""
    torch.manual_seed(0)
    shared = {"vocab_size": VOCAB, "initializer_range": 0.3, "pad_token_id": PAD}
    shared |= {"bos_token_id": 1, "eos_token_id": 2}
    config = config or AutoConfig.for_model(
        model_type, **{**shared, **FIELDS[model_type], **fields}
    )
    auto = HEADS[head or lm_head(model_type)]
    options = {} if attn is None else {"attn_implementation": attn}
    return auto.from_config(config, **options).to(dtype).train()


def attentions(model_type: str) -> tuple[str, ...]:
    """The attention implementations that a family has and that work under a transform."""
    cls = HEADS["base"]._model_mapping[type(AutoConfig.for_model(model_type))]
    return ("sdpa", "eager") if cls._supports_sdpa else ("eager",)


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
