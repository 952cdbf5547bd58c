"""Any sequence of draws, some of them empty: stock's batches, and nothing else moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.data import data_collator as stock

import opake

WORDS = {"[PAD]": 0, "[MASK]": 1, **{f"w{i}": i for i in range(2, 9)}}
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="[PAD]")),
    pad_token="[PAD]",
    mask_token="[MASK]",
)

ids = st.lists(st.integers(2, 8), min_size=1, max_size=5)
plain = ids.map(lambda x: {"input_ids": x})
labelled = ids.map(lambda x: {"input_ids": x, "labels": x})
classified = ids.map(lambda x: {"input_ids": x, "label": len(x) % 2})

COLLATORS = {
    "masked": (stock.DataCollatorForLanguageModeling, {"seed": 3}, plain),
    "causal": (stock.DataCollatorForLanguageModeling, {"mlm": False}, plain),
    "padding": (stock.DataCollatorWithPadding, {}, classified),
    "tokens": (stock.DataCollatorForTokenClassification, {}, labelled),
    "seq2seq": (stock.DataCollatorForSeq2Seq, {}, labelled),
}


@st.composite
def runs(draw: Any) -> tuple[Any, list[list[Any]]]:
    cls, options, examples = COLLATORS[draw(st.sampled_from(sorted(COLLATORS)))]
    kind = draw(st.sampled_from(["pt", "np"]))
    multiple = draw(st.sampled_from([None, 4]))
    draws = draw(st.lists(st.lists(examples, max_size=3), max_size=5))

    def make() -> Any:
        return cls(TOKENIZER, **options, return_tensors=kind, pad_to_multiple_of=multiple)

    return make, draws


@given(runs())
def test_a_sequence_of_draws(run: Any) -> None:
    make, draws = run
    torch.manual_seed(0)
    collate = make()
    expected = [collate(draw) if draw else None for draw in draws]
    torch.manual_seed(0)
    with opake.runtime():
        collate = make()
        found = [collate(draw) for draw in draws]
    last = None
    for batch, full in zip(found, expected, strict=True):
        if full is None:
            if last is None:
                length = collate.pad_to_multiple_of or 1
                assert {x.shape for x in batch.values()} == {(0, length)}
                assert {x.dtype for x in batch.values()} <= {torch.int64, np.dtype(np.int64)}
            else:
                assert list(batch) == list(last)
                for name, x in last.items():
                    assert (batch[name].shape, batch[name].dtype) == ((0, *x.shape[1:]), x.dtype)
            continue
        last = full
        assert type(batch) is type(full)
        assert list(batch) == list(full)
        for name, x in full.items():
            assert type(batch[name]) is type(x)
            assert np.array_equal(batch[name], x)
