"""Collators inside ``runtime()``: stock's batches, and one of no rows for an empty draw."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from transformers.data import data_collator as stock

import opake
from opake.compat import collator as ours
from opake.errors import InvalidBatch


def make_tokenizer(**options: Any) -> Any:
    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, 12)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
        **options,
    )


TOKENIZER = make_tokenizer()
PLAIN = [{"input_ids": [3, 4, 5]}, {"input_ids": [6]}]
LABELLED = [{"input_ids": [3, 4, 5], "labels": [7, 8, 9]}, {"input_ids": [6], "labels": [3]}]
FIXED = [{"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1], "labels": [7, 8, 9]}] * 2
CHOICES = [{"input_ids": [[3, 4], [5]], "label": 1}]

Make = Callable[..., Any]
TOKENS = {"input_ids", "attention_mask"}
LM = "DataCollatorForLanguageModeling"

CASES: dict[str, tuple[Make, list[Any], dict[str, tuple[int, ...]]]] = {
    "masked": (
        lambda **o: stock.DataCollatorForLanguageModeling(TOKENIZER, mlm_probability=0.5, **o),
        PLAIN,
        dict.fromkeys((*sorted(TOKENS), "labels"), (1,)),
    ),
    "causal": (
        lambda **o: stock.DataCollatorForLanguageModeling(TOKENIZER, mlm=False, **o),
        PLAIN,
        dict.fromkeys((*sorted(TOKENS), "labels"), (1,)),
    ),
    "padding": (
        lambda **o: stock.DataCollatorWithPadding(TOKENIZER, **o),
        [{**PLAIN[0], "label": 1}, {**PLAIN[1], "label": 0}],
        dict.fromkeys(TOKENS, (1,)),
    ),
    "tokens": (
        lambda **o: stock.DataCollatorForTokenClassification(TOKENIZER, **o),
        LABELLED,
        dict.fromkeys((*TOKENS, "labels"), (1,)),
    ),
    "seq2seq": (
        lambda **o: stock.DataCollatorForSeq2Seq(TOKENIZER, **o),
        LABELLED,
        dict.fromkeys((*TOKENS, "labels"), (1,)),
    ),
    "default": (
        lambda **o: stock.DefaultDataCollator(**o),
        FIXED,
        dict.fromkeys((*TOKENS, "labels"), (1,)),
    ),
}
"""A collator, what it is fed, and the shapes behind the batch dimension before it was fed."""

cases = pytest.mark.parametrize("case", CASES)
kinds = pytest.mark.parametrize("kind", ["pt", "np"])


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


def same(a: Any, b: Any) -> bool:
    return (
        type(a) is type(b)
        and list(a) == list(b)
        and all(type(a[k]) is type(b[k]) and a[k].dtype == b[k].dtype for k in a)
        and all(np.array_equal(a[k], b[k]) for k in a)
    )


def is_int64(x: Any) -> bool:
    return x.dtype in (torch.int64, np.int64)


@kinds
@cases
def test_the_first_batch_may_be_the_empty_one(case: str, kind: str) -> None:
    make, features, shapes = CASES[case]
    with opake.runtime():
        collate = make(return_tensors=kind)
        empty = collate([])
        full = collate(features)
    assert {name: x.shape for name, x in empty.items()} == {n: (0, *s) for n, s in shapes.items()}
    assert all(map(is_int64, empty.values()))
    assert type(empty) is type(full)
    assert {type(x) for x in empty.values()} == {torch.Tensor if kind == "pt" else np.ndarray}
    assert set(shapes) == set(full) or (case, set(full) - set(shapes)) == ("padding", {"labels"})


@kinds
@cases
def test_an_empty_batch_is_like_the_last_one(case: str, kind: str) -> None:
    make, features, _ = CASES[case]
    with opake.runtime():
        collate = make(return_tensors=kind)
        for examples in (features, features[:1]):
            full, empty = collate(examples), collate([])
            assert type(empty) is type(full)
            assert list(empty) == list(full)
            for name, x in full.items():
                assert (empty[name].shape, empty[name].dtype) == ((0, *x.shape[1:]), x.dtype)


@kinds
@cases
def test_other_batches_are_stocks(case: str, kind: str) -> None:
    make, features, _ = CASES[case]
    seed()
    collate = make(return_tensors=kind)
    expected = [collate(features) for _ in range(3)]
    seed()
    with opake.runtime():
        collate, found = make(return_tensors=kind), []
        for _ in range(3):
            collate([])  # draws no random number
            found.append(collate(features))
    assert all(map(same, found, expected))


@cases
def test_pad_to_multiple_of(case: str) -> None:
    make, features, _ = CASES[case]
    if case == "default":
        pytest.skip("does not pad")
    with opake.runtime():
        collate = make(pad_to_multiple_of=8)
        assert {x.shape for x in collate([]).values()} == {(0, 8)}
        assert collate(features)["input_ids"].shape == (2, 8)


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_the_free_function_whoever_holds_it(kind: str) -> None:
    held = stock.default_data_collator
    with opake.runtime():
        for collate in (held, stock.default_data_collator):
            assert collate([], kind)["input_ids"].shape in ((0, 1), (0, 3))
            assert same(collate(FIXED, kind), collate(FIXED, return_tensors=kind))
            assert collate([], kind)["labels"].shape == (0, 3)
    with opake.runtime():  # what was seen does not outlive the scope
        assert held([], kind)["labels"].shape == (0, 1)


def test_labels_of_the_last_batch_keep_their_shape_and_dtype() -> None:
    with opake.runtime():
        collate = stock.DefaultDataCollator()
        collate([{"x": torch.ones(2, 3), "label": 0.5}])
        empty = collate([])
        assert (empty["labels"].shape, empty["labels"].dtype) == ((0,), torch.float32)
        assert (empty["x"].shape, empty["x"].dtype) == ((0, 2, 3), torch.float32)
        unlabelled = stock.DataCollatorForSeq2Seq(TOKENIZER)
        unlabelled(PLAIN)
        assert unlabelled([])["labels"] is None


def test_collators_of_lists_and_of_other_shapes() -> None:
    with opake.runtime():
        collate = stock.DataCollatorForLanguageModeling(TOKENIZER, mlm=False)
        collate([[3, 4], [5]])
        assert list(collate([])) == ["input_ids", "labels"]
        choices = stock.DataCollatorForMultipleChoice(TOKENIZER)
        assert choices([])["input_ids"].shape == (0, 1, 1)
        choices(CHOICES)
        assert choices([])["input_ids"].shape == (0, 2, 2)
        assert choices([])["labels"].shape == (0,)
        permuted = stock.DataCollatorForPermutationLanguageModeling(TOKENIZER)
        assert permuted([])["perm_mask"].shape == (0, 1, 1)
        assert permuted([])["perm_mask"].dtype == torch.float32


def test_a_tokenizer_without_masks() -> None:
    tokenizer = make_tokenizer(model_input_names=["input_ids"])
    with opake.runtime():
        collate = stock.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        assert list(collate([])) == ["input_ids", "labels"]
        assert list(collate(PLAIN)) == ["input_ids", "labels"]


def test_every_way_to_call() -> None:
    with opake.runtime():
        masked = CASES["masked"][0]()
        assert isinstance(masked([], return_tensors="np")["labels"], np.ndarray)
        assert isinstance(masked.torch_call([])["labels"], torch.Tensor)
        assert isinstance(masked.numpy_call(examples=[])["labels"], np.ndarray)
        assert CASES["seq2seq"][0]()(features=[], return_tensors="np")["labels"].shape == (0, 1)
        assert masked(())["labels"].shape == (0, 1)
        with pytest.raises(ValueError, match="not recognized"):
            masked([], return_tensors="tf")
        with pytest.raises(TypeError):
            masked.torch_call([], [])


def test_a_subclass_and_what_each_instance_has_seen() -> None:
    class Longer(stock.DataCollatorForLanguageModeling):
        def torch_call(self, examples: Any) -> Any:
            return {**super().torch_call(examples), "more": 1}

    with opake.runtime():
        collate, other = (Longer(TOKENIZER, mlm=False) for _ in range(2))
        collate(PLAIN)
        empty = collate([])
        assert (empty["input_ids"].shape, empty["more"]) == ((0, 3), 1)
        assert other([])["input_ids"].shape == (0, 1)


def test_packing_refuses() -> None:
    collate = stock.DataCollatorWithFlattening()
    expected = collate(PLAIN)
    with opake.runtime():
        with pytest.raises(InvalidBatch, match="DataCollatorWithPadding"):
            collate([])
        assert same(collate(PLAIN), expected)


class Poisson:
    """Batches of indices, some of them empty."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([], [0, 1], [], [1])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_draws_nothing(workers: int) -> None:
    collate = stock.DataCollatorForLanguageModeling(TOKENIZER, mlm=False, pad_to_multiple_of=4)
    context = "fork" if workers else None

    def loader() -> DataLoader[Any]:
        return DataLoader(
            PLAIN,  # type: ignore[arg-type]
            batch_sampler=Poisson(),  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=workers,
            multiprocessing_context=context,
        )

    with pytest.raises(IndexError):
        list(loader())
    with opake.runtime():
        shapes = [batch["labels"].shape for batch in loader()]
    assert shapes == [(0, 4), (2, 4), (0, 4), (1, 4)]
    with pytest.raises(IndexError):
        list(loader())


def snapshot() -> dict[str, Any]:
    places = {name: dict(vars(c)) for name, c in vars(stock).items() if inspect.isclass(c)}
    return {"module": dict(vars(stock)), **places}


def identical(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(
        list(a[n]) == list(b[n])
        and all(x is y for x, y in zip(a[n].values(), b[n].values(), strict=True))
        for n in a
    )


def test_everything_is_put_back() -> None:
    collate = CASES["masked"][0]()
    pickle.dumps(collate)  # caches the names of slots on the class
    before = snapshot()
    fields = dict(vars(collate))
    with opake.runtime():
        assert not identical(snapshot(), before)
        collate(PLAIN)
        assert ours._SEEN
        assert dict(vars(collate)) == fields
        assert type(collate) is stock.DataCollatorForLanguageModeling
        assert copy.deepcopy(collate)([])["input_ids"].shape == (0, 1)
        assert type(pickle.loads(pickle.dumps(collate))) is type(collate)
        signature = inspect.signature(type(collate).torch_call)
    assert identical(snapshot(), before)
    assert not ours._SEEN
    assert signature == inspect.signature(type(collate).torch_call)

    def fail() -> None:
        collate(PLAIN)
        assert ours._SEEN
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), opake.runtime():
        fail()
    assert identical(snapshot(), before)
    assert not ours._SEEN
    with pytest.raises(IndexError):
        collate([])


def test_a_collator_that_dies_is_forgotten() -> None:
    with opake.runtime():
        collate = CASES["causal"][0]()
        collate(PLAIN)
        assert len(ours._SEEN) == 1
        del collate
        gc.collect()
        assert not ours._SEEN


def test_threads_share_a_collator() -> None:
    shapes: list[Any] = []

    def draw(collate: Any) -> None:
        for _ in range(50):
            collate(PLAIN)
            shapes.append(collate([])["input_ids"].shape)

    with opake.runtime():
        collate = CASES["causal"][0]()
        threads = [threading.Thread(target=draw, args=[collate]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert shapes == [(0, 3)] * 200


def test_explain(make_llama: Callable[..., Any]) -> None:
    def row(report: Any) -> Any:
        return next(row for row in report if row.concern == "empty_batches")

    assert row(opake.runtime().explain()).status == "on"
    assert "transformers.data.data_collator" in row(opake.runtime().explain()).target
    assert row(opake.runtime(empty_batches=False).explain()).status == "off"
    skipped = row(opake.check(make_llama()))
    assert (skipped.status, skipped.reason) == ("skipped", "acts on no model: use opake.runtime()")
    with opake.runtime(empty_batches=False), pytest.raises(IndexError):
        CASES["causal"][0]()([])
