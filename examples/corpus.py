"""The corpus as fixed-length training examples."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

Tokenise = Callable[[list[str]], list[list[int]]]
Batch = dict[str, Tensor]

IGNORE_INDEX = -100


def read_entries(path: Path) -> list[str]:
    """Return the entries of a fortune file: texts between lines that hold a single ``%``.

    Lines that begin with ``%%`` are comments, and entries without text are dropped.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("%%"))
    entries = (entry.strip("\n") for entry in re.split(r"^%$", text, flags=re.MULTILINE))
    return [entry for entry in entries if entry.strip()]


def encode(texts: Sequence[str], tokenise: Tokenise, *, length: int, pad_id: int) -> Batch:
    """Return ``input_ids``, ``attention_mask`` and ``labels``, each (N, length) int64.

    Texts are cut at ``length`` tokens and padded on the right; padding has the label that the
    loss ignores. A text of one token has nothing to predict and is left out.
    """
    rows = [ids[:length] for ids in tokenise(list(texts)) if len(ids) > 1]
    input_ids = torch.full((len(rows), length), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def split(entries: Sequence[str], *, validation: float, seed: int) -> tuple[list[str], list[str]]:
    """Shuffle by ``seed`` alone and return (training, validation) entries.

    ``validation`` is the share held out, at least one entry.
    """
    shuffled = random.Random(seed).sample(entries, len(entries))
    held_out = max(1, round(validation * len(shuffled)))
    return shuffled[held_out:], shuffled[:held_out]


def take(batch: Batch, rows: Tensor) -> Batch:
    """Return the given rows of a batch, on the batch's device."""
    return {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}
