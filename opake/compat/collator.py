"""Data collators that answer an empty list, as a Poisson draw can be, with a batch of no rows.

Nothing is collated for it and no random number is drawn, so the batches that follow are stock's.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding

from opake.compat.batchify import by_name
from opake.errors import InvalidBatch

MODULE = "transformers.data.data_collator"

SYMBOLS = (
    (MODULE, "DataCollatorForLanguageModeling.torch_call", ("examples",)),
    (MODULE, "DataCollatorForLanguageModeling.numpy_call", ("examples",)),
    (MODULE, "torch_default_data_collator", ("features",)),
    (MODULE, "numpy_default_data_collator", ("features",)),
)

METHODS = ("__call__", "torch_call", "numpy_call")
"""Where a collator's class may do its work; one that passes it on has none of its own."""

FUNCTIONS = ("torch_default_data_collator", "numpy_default_data_collator")
"""What ``default_data_collator`` looks up at every call, whoever holds on to it."""

PACKING = "DataCollatorWithFlattening"
"""The collator that makes one row of all examples, and has none to make of no example."""

_S = "S"
_TOKENS = {"input_ids": (_S,), "attention_mask": (_S,)}
_LABELLED = {**_TOKENS, "labels": (_S,)}

LAYOUTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "DefaultDataCollator": _LABELLED,
    "DataCollatorWithPadding": _TOKENS,
    "DataCollatorForTokenClassification": _LABELLED,
    "DataCollatorForMultipleChoice": {
        "input_ids": (1, _S),
        "attention_mask": (1, _S),
        "labels": (),
    },
    "DataCollatorForSeq2Seq": _LABELLED,
    "DataCollatorForLanguageModeling": _LABELLED,
    "DataCollatorForPermutationLanguageModeling": {
        "input_ids": (_S,),
        "perm_mask": (_S, _S),
        "target_mapping": (_S, _S),
        "labels": (_S,),
    },
    "DataCollatorForSOP": {**_LABELLED, "sentence_order_label": ()},
}
"""Keys of a batch, and their shapes behind the batch dimension, before any batch was seen."""

_ENCODED = (
    "DataCollatorWithPadding",
    "DataCollatorForTokenClassification",
    "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling",
)
_REAL = ("perm_mask", "target_mapping")

_SEEN: dict[tuple[int, str], tuple[weakref.ref[Any], Any]] = {}
"""By collator and kind of tensors: the collator, and its last batch, cut to no rows.

Read and written by single dict operations: threads share it, and a child may be forked any time.
"""


def forget() -> None:
    """Forget every batch that was seen."""
    _SEEN.clear()


@functools.cache
def method(stock: Callable[..., Any], layout: str) -> Callable[..., Any]:
    """Return a replacement for a method of the collator class that ``LAYOUTS`` calls ``layout``.

    An empty list becomes a batch of no rows: the keys, dtypes and other dimensions of the last
    batch of this collator. Before the first it has those of ``LAYOUTS``, in int64, with
    ``pad_to_multiple_of`` or 1 tokens. Whatever is not empty goes through stock.
    """
    names = tuple(inspect.signature(stock).parameters)

    @functools.wraps(stock)
    def collate(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = by_name(names, (self, *args), kwargs) or {}
        kind = _kind(stock, self, call)
        if _is_empty(call.get(names[1])) and kind is not None:
            return _empty(self, layout, kind)
        batch = stock(self, *args, **kwargs)
        _remember(self, kind, batch)
        return batch

    return collate


@functools.cache
def function(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for ``torch_default_data_collator`` or ``numpy_default_data_collator``."""
    kind = "np" if stock.__name__.startswith("numpy") else "pt"

    @functools.wraps(stock)
    def collate(features: Any) -> Any:
        if _is_empty(features):
            return _empty(stock, "DefaultDataCollator", kind)
        batch = stock(features)
        _remember(stock, kind, batch)
        return batch

    return collate


@functools.cache
def refuse(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``DataCollatorWithFlattening.__call__`` that refuses no example."""

    @functools.wraps(stock)
    def collate(self: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_empty(features):
            raise InvalidBatch(
                f"{MODULE.replace('.', '/')}.py:{PACKING} packs all examples of a batch into one "
                "row, and got none; use DataCollatorWithPadding, which can make a batch of no rows"
            )
        return stock(self, features, *args, **kwargs)

    return collate


def _is_empty(features: Any) -> bool:
    return isinstance(features, list | tuple) and not features


def _kind(stock: Callable[..., Any], collator: Any, call: Mapping[str, Any]) -> str | None:
    """Return "pt" or "np", or None for what stock refuses."""
    if stock.__name__ != "__call__":
        return "np" if stock.__name__.startswith("numpy") else "pt"
    asked = call.get("return_tensors")
    kind = collator.return_tensors if asked is None else asked
    return kind if kind in ("pt", "np") else None


def _remember(owner: Any, kind: str | None, batch: Any) -> None:
    if kind is None or not isinstance(batch, Mapping):
        return
    key = id(owner), kind
    rows = {name: _no_rows(value) for name, value in batch.items()}
    _SEEN[key] = weakref.ref(owner, lambda _: _SEEN.pop(key, None)), (type(batch), rows)


def _empty(owner: Any, layout: str, kind: str) -> Any:
    seen, last = _SEEN.get((id(owner), kind), (None, None))
    if seen is None or last is None or seen() is not owner:
        last = _first(owner, layout, kind)
    make, rows = last
    return make({name: _no_rows(value) for name, value in rows.items()})


def _first(owner: Any, layout: str, kind: str) -> tuple[Any, dict[str, Any]]:
    """Return what a batch of a collator that has seen none is made of, and by which class."""
    length = getattr(owner, "pad_to_multiple_of", None) or 1
    tokenizer = getattr(owner, "tokenizer", None)
    masked = "attention_mask" in getattr(tokenizer, "model_input_names", ("attention_mask",))
    rows: dict[str, Any] = {}
    for name, trailing in LAYOUTS[layout].items():
        if name == "attention_mask" and not masked:
            continue
        shape = (0, *(length if size is _S else size for size in trailing))
        rows[name] = torch.empty(shape, dtype=torch.float32 if name in _REAL else torch.int64)
        rows[name] = rows[name].numpy() if kind == "np" else rows[name]
    return BatchEncoding if layout in _ENCODED else dict, rows


def _no_rows(value: Any) -> Any:
    """Return an empty copy of a batch's value; what has no rows stays."""
    if isinstance(value, Tensor) and value.ndim:
        return value.new_empty((0, *value.shape[1:]))
    if isinstance(value, np.ndarray) and value.ndim:
        return np.empty((0, *value.shape[1:]), value.dtype)
    return [] if isinstance(value, list) else value
