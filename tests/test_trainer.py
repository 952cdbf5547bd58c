"""What trains and runs a model of every family: accelerate, the Trainer, generate, compile."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import traits
import zoo
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from leaks import Leaks
from oracle import (
    MOE_BAR,
    Result,
    Snapshot,
    assert_exact,
    errors,
    per_example,
    same_bits,
    stock_loop,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import opake

with_accelerate = pytest.mark.case("accelerate")
precisions = pytest.mark.parametrize("precision", ["no", "bf16"])
# transformers 5.24 has new names for gradient checkpointing, which 5.17 lacks.
renamed = pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_enable)?` is deprecated")

BATCH = zoo.batch(zoo.RIGHT)


@pytest.fixture(autouse=True)
def _nothing_is_live() -> Iterator[None]:
    yield
    assert opake.active() == []
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(precision: str) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, mixed_precision=precision)


def make(model_type: str, precision: str = "bf16") -> Any:
    """A model that has run; fp64 where nothing else rounds its gradients, which may cancel."""
    dtype = torch.float64 if precision == "no" else torch.float32
    model = zoo.tiny(model_type, None, dtype).eval()
    model(**BATCH)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**BATCH, use_cache=False).logits


def assert_loops(model: Any, expected: Result, exact: Result) -> None:
    """Assert that the patched model has the loop's numbers, up to how far bf16 moved those."""
    coarse = model.dtype == torch.float32 and zoo.is_coarse(model.config.model_type)
    for batched in (True, False):
        with torch.no_grad():
            found = per_example(model, BATCH, batched=batched)
        if same_bits(expected, exact):
            assert_exact(found, expected, noise=MOE_BAR / 3 if coarse else 0.0)
            continue
        assert all(grad.dtype == torch.float32 for grad in found.grads.values())
        loss, gradient = errors(expected, exact)
        assert gradient > 2**-9  # bf16 rounded something
        found_loss, found_gradient = errors(found, expected)
        assert found_loss <= loss
        assert found_gradient <= gradient


_OURS = str(Path(opake.__file__).parent)


def of_ours(model: nn.Module) -> list[Any]:
    """Everything of a scope that is reached from the attributes of any module."""
    found, seen = [], set()
    todo: list[Any] = []
    for module in model.modules():
        assert not [c for c in type(module).__mro__ if "_opake_stock" in vars(c)]
        found += [name for name in vars(module) if "opake" in name]
        todo += [value for value in vars(module).values() if callable(value)]
        assert not hasattr(getattr(module, "config", None), "_opake_view")
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | type):
            continue
        seen.add(id(item))
        function = getattr(item, "__func__", item)
        if getattr(getattr(function, "__code__", None), "co_filename", "").startswith(_OURS):
            found.append(function)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        kept = [getattr(function, name, None) for name in ("__wrapped__", "func")]
        attributes = list(getattr(function, "__dict__", {}).values())
        todo += [value for value in (*cells, *kept, *attributes) if callable(value)]
    return found


def kinds(model: nn.Module) -> list[Any]:
    """What the modules are and carry, to compare two models."""
    return [(type(module), sorted(vars(module))) for module in model.modules()]


# ---- accelerate


@zoo.families
@with_accelerate
@precisions
def test_prepared_before_a_scope(model_type: str, precision: str) -> None:
    exact = stock_loop(make(model_type, precision), BATCH)
    model = accelerator(precision).prepare(make(model_type, precision))
    before, stock, expected = Snapshot(model), logits(model), stock_loop(model, BATCH)
    for _ in range(2):
        with opake.patched(model):
            assert same_bits(logits(model), stock)
            assert_loops(model, expected, exact)
        assert before.changes() == []
    assert same_bits(stock_loop(model, BATCH), expected)


@zoo.families
@with_accelerate
@precisions
@pytest.mark.parametrize("unwrapped", ["after", "inside"])
def test_prepared_inside_a_scope(model_type: str, precision: str, unwrapped: str) -> None:
    exact = stock_loop(make(model_type, precision), BATCH)
    plain = logits(make(model_type, precision))
    prepare = accelerator(precision)
    twin = prepare.prepare(make(model_type, precision))
    expected, stock = stock_loop(twin, BATCH), logits(twin)
    unwrap = functools.partial(prepare.unwrap_model, keep_fp32_wrapper=False)

    model = make(model_type, precision)
    with opake.patched(model):
        assert prepare.prepare(model) is model
        assert same_bits(logits(model), stock)
        assert_loops(model, expected, exact)
        if unwrapped == "inside":
            assert unwrap(model) is model
            assert same_bits(logits(model), plain)
            assert_loops(model, exact, exact)
    assert of_ours(model) == []
    if unwrapped == "after":
        assert kinds(model) == kinds(twin)
        assert same_bits(stock_loop(model, BATCH), expected)
        with opake.patched(model):
            assert_loops(model, expected, exact)
        unwrap(model)
        unwrap(twin)
        assert model.forward.__func__ is twin.forward.__func__
    assert model.forward.__self__ is model
    assert of_ours(model) == []
    assert same_bits(stock_loop(model, BATCH), exact)


@zoo.families
@with_accelerate
def test_a_training_loop_of_accelerate(model_type: str) -> None:
    def train(model: Any, prepare: Accelerator, steps: int = 2) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(_Rows(), batch_size=2)
        model, optimizer, loader = prepare.prepare(model.train(), optimizer, loader)
        for batch in itertools.islice(loader, steps):
            with prepare.accumulate(model), prepare.autocast():
                prepare.backward(model(**batch).loss)
            prepare.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    stock, inside, around = (zoo.tiny(model_type, None) for _ in range(3))
    for _ in range(2):  # the second time, all are prepared already
        train(stock, accelerator("bf16"))
        with opake.patched(inside):
            train(inside, accelerator("bf16"))
        prepare = accelerator("bf16")
        with opake.patched(around):
            train(around, prepare, steps=1)
            train(around, prepare, steps=0)
        assert same_bits(list(inside.parameters()), list(stock.parameters()))
        assert of_ours(inside) == of_ours(around) == []
    assert kinds(inside) == kinds(stock)


@zoo.families
@with_accelerate
@pytest.mark.parametrize("when", ["before", "inside"])
def test_offloaded_weights(model_type: str, when: str) -> None:
    model, twin = make(model_type), make(model_type)
    stock = logits(model)
    cpu_offload(twin, execution_device="cpu")
    try:
        logits(twin)
    except NotImplementedError as error:
        pytest.skip(f"stock {model_type} cannot be offloaded: {error}")
    if when == "before":
        cpu_offload(model, execution_device="cpu")
    with opake.patched(model):
        if when == "inside":
            cpu_offload(model, execution_device="cpu")
        assert same_bits(logits(model), stock)
    assert same_bits(logits(model), stock)
    assert of_ours(model) == []
    assert kinds(model) == kinds(twin)
    for one in (model, twin):
        remove_hook_from_submodules(one)
    assert kinds(model) == kinds(twin)
    assert same_bits(logits(model), stock)


# ---- the Trainer


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int = 4) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[index] for name, x in BATCH.items()}


def with_dropout(model_type: str) -> Any:
    return zoo.tiny(model_type, None, **traits.dropouts(model_type, 0.1))


def train(model: Any, path: Path, **options: Any) -> list[dict[str, Any]]:
    """Train two steps, evaluate and save after each, load the best; returns what was logged."""
    arguments = TrainingArguments(
        output_dir=str(path),
        use_cpu=True,
        bf16=True,
        max_steps=2,
        learning_rate=0.3,  # the loss does not only fall
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        logging_steps=1,
        load_best_model_at_end=True,
        disable_tqdm=True,
        report_to=[],
        seed=3,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_Rows(), eval_dataset=_Rows(2))
    trainer.train()
    trainer.save_model(str(path / "saved"))
    trainer.predict(_Rows(1))
    return [
        {key: value for key, value in row.items() if "runtime" not in key and "_second" not in key}
        for row in trainer.state.log_history
    ]


CHECKPOINTED = ("llama", "gpt2", "bert", "mixtral", "qwen3_next", "falcon", "gemma2")
"""Families that the Trainer tells to checkpoint, one for every kind of model: it does so by a call
that does not depend on the family, and a run takes a second."""

RUNS = [
    *((model_type, {}) for model_type in zoo.FIELDS),
    *((model_type, {"gradient_checkpointing": True}) for model_type in CHECKPOINTED),
]


def places(changes: list[str]) -> list[str]:
    return [change.partition(" was ")[0].partition(" is ")[0] for change in changes]


@pytest.mark.case("Trainer")
@renamed
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize(
    ("model_type", "options"),
    RUNS,
    ids=[f"{'checkpointing' if options else 'plain'}-{name}" for name, options in RUNS],
)
def test_the_trainer_trains_as_in_stock(
    model_type: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    stock, model = with_dropout(model_type), with_dropout(model_type)
    train(with_dropout(model_type), tmp_path / "first", **options)
    leaks = Leaks()
    logged = train(stock, tmp_path / "stock", **options)
    left = places(leaks.changes())  # a Trainer leaves things of its own
    with opake.patched(model):
        assert train(model, tmp_path / "inside", **options) == logged
        assert same_bits(list(model.parameters()), list(stock.parameters()))
    assert places(leaks.changes()) == left
    assert of_ours(model) == []
    assert kinds(model) == kinds(stock)
    assert any("eval_loss" in row for row in logged)
    saved = [sorted(file.name for file in (tmp_path / n / "saved").iterdir()) for n in _PATHS]
    assert saved[0] == saved[1]
    weights = [(tmp_path / name / "saved" / "model.safetensors").read_bytes() for name in _PATHS]
    assert weights[0] == weights[1]
    with opake.patched(model), torch.no_grad():  # in the wrappers that the Trainer left on it
        found = per_example(model, BATCH, batched=False, randomness="different")
    assert all(grad.dtype == torch.float32 for grad in found.grads.values())


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize("model_type", ["gemma2", "bert"])
def test_trained_in_a_scope_and_on_without(model_type: str, tmp_path: Path) -> None:
    stock, model = with_dropout(model_type), with_dropout(model_type)
    for scope in (opake.patched(model), contextlib.nullcontext()):
        train(stock, tmp_path / "stock")
        with scope:
            train(model, tmp_path / "inside")
        assert same_bits(list(model.parameters()), list(stock.parameters()))


_PATHS = ("stock", "inside")


# ---- what else runs on a model


@zoo.families
@pytest.mark.case("two models")
def test_generation_inside_beside_and_after(model_type: str) -> None:
    model, beside = make(model_type, "no"), make(model_type, "no")
    if not model.can_generate():
        pytest.skip(f"stock {model_type} does not generate")
    prompt = {name: zoo.batch(zoo.LEFT)[name] for name in ("input_ids", "attention_mask")}

    def generate(one: Any) -> Any:
        return one.generate(
            **prompt,
            max_new_tokens=4,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )

    expected = generate(beside)
    model.generate(**prompt, max_new_tokens=1)
    before = Snapshot(model)
    with opake.patched(model):
        for one in (model, beside):
            found = generate(one)
            assert same_bits(found.sequences, expected.sequences)
            assert same_bits(found.scores, expected.scores)
    assert same_bits(generate(model).scores, expected.scores)
    assert before.changes() == []


@pytest.mark.parametrize(("model_type", "when"), [("bert", "before"), ("gemma2", "inside")])
def test_a_compiled_model_follows_the_scope(model_type: str, when: str) -> None:
    torch._dynamo.reset()
    model = make(model_type, "no")
    expected, stock = logits(model), stock_loop(model, BATCH)
    compiled = torch.compile(model, backend="eager") if when == "before" else None
    if compiled is not None:
        torch.testing.assert_close(logits(compiled), expected, equal_nan=True)
    with opake.patched(model):
        if when == "inside":
            compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(logits(compiled), expected, equal_nan=True)
        assert_loops(model, stock, stock)
    torch.testing.assert_close(logits(compiled), expected, equal_nan=True)
    assert of_ours(model) == []
    torch._dynamo.reset()


class _Losses(Dataset[Tensor]):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        # A worker inherits the scope, and leaves and enters one of its own.
        with opake.patched(self.model):
            found = per_example(self.model, BATCH, batched=False)
        opake.unpatch(self.model)
        assert of_ours(self.model) == []
        return found.losses


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="with a GPU, a backward pass starts autograd's threads, and no fork can follow it",
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("model_type", ["mixtral", "bert"])
def test_workers_of_a_loader_inherit_the_scope(model_type: str) -> None:
    model = make(model_type, "no")
    expected, before = stock_loop(model, BATCH), Snapshot(model)
    with opake.patched(model), torch.no_grad():
        for losses in DataLoader(_Losses(model), num_workers=1):
            torch.testing.assert_close(losses[0], expected.losses, equal_nan=True)
        assert_loops(model, expected, expected)
    assert before.changes() == []
