"""What becomes of a model of every family in and around a scope: copies, configs, neighbours."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import traits
import zoo
from oracle import MOE_BAR, Result, Snapshot, assert_exact, per_example, same_bits, stock_loop
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import opake
from opake.families import find

copies = pytest.mark.case("copies and pickles")
shared_config = pytest.mark.case("shared config")
two_models = pytest.mark.case("two models")

BATCH = zoo.batch(zoo.MIXED)


def make(model_type: str, config: Any = None) -> Any:
    """A model that has run, in eval mode: a forward leaves things behind that are not ours.

    A config that is given is the model's own. fp64: gradients may cancel to rounding in fp32.
    """
    model = zoo.tiny(model_type, None, torch.float64)
    if config is not None:
        torch.manual_seed(0)
        model = type(model)(config).double()
    model.eval()(**BATCH)
    return model


def logits(model: Any, batch: dict[str, Tensor] = BATCH) -> Tensor:
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


def loop(model: Any, batch: dict[str, Tensor] = BATCH) -> Result:
    """The loop of :func:`stock_loop`, for a stock model beside another one's scope."""
    with mock.patch.object(opake, "active", list):
        return stock_loop(model, batch)


def assert_patched(model: Any, expected: Result) -> None:
    coarse = model.dtype == torch.float32 and zoo.is_coarse(model.config.model_type)
    with torch.no_grad():
        found = per_example(model, BATCH, batched=False)
    assert_exact(found, expected, noise=MOE_BAR / 3 if coarse else 0.0)


def assert_stock(*modules: Any) -> None:
    """Assert that there is nothing of a scope on any module."""
    for module in itertools.chain.from_iterable(module.modules() for module in modules):
        assert not [name for name in vars(module) if "opake" in name], module
        assert "forward" not in vars(module), module
        assert not [c for c in type(module).__mro__ if "_opake_stock" in vars(c)], module
        if "config" in vars(module):
            assert not hasattr(module.config, "_opake_view")


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def own_changes(before: Snapshot, model: nn.Module) -> list[str]:
    """The changes of a snapshot in the model itself, not in the process around it."""
    return [place for place in before.changes() if place.startswith(type(model).__qualname__)]


@pytest.fixture(autouse=True)
def _nothing_is_live() -> Iterator[None]:
    yield
    live = opake.active()
    for scope in live:
        scope.unpatch()
    assert live == []


# ---- two models of one config


@zoo.families
@shared_config
def test_a_model_that_shares_the_config_is_untouched(model_type: str) -> None:
    model = make(model_type)
    other = make(model_type, model.config)
    assert other.config is model.config
    both, before, stock = Snapshot(model, other), Snapshot(other), logits(other)
    loss = loop(other)
    seen: list[Any] = []
    with opake.patched(model):
        assert own_changes(before, other) == []
        assert same_bits(logits(other), stock)
        assert same_bits(loop(other), loss)
        with pytest.raises((RuntimeError, IndexError, ValueError)):  # as stock does
            per_example(other, BATCH, batched=False)
        thread = threading.Thread(target=lambda: seen.append(logits(other)))
        thread.start()
        thread.join()
        inside = make(model_type, model.config)
        assert_stock(other, inside)
        assert same_bits(logits(inside), stock)
        assert own_changes(before, other) == []
    assert same_bits(seen[0], stock)
    assert both.changes() == []
    assert_stock(inside)


@zoo.families
@shared_config
@pytest.mark.parametrize("shape", ["nested", "interleaved"])
def test_two_plans_over_one_config(model_type: str, shape: str) -> None:
    model = make(model_type)
    other = make(model_type, model.config)
    expected, before = stock_loop(model, BATCH), Snapshot(model, other)
    plans: list[dict[str, Any]] = [{}, {"kv_cache": False, "dropout": True, "performance": False}]
    for models in ([model, other], [other, model]):
        scopes = [opake.patched(one, **plan) for one, plan in zip(models, plans, strict=True)]
        for scope in scopes:
            scope.__enter__()
        leaving = [1, 0] if shape == "nested" else [0, 1]
        assert_patched(models[leaving[0]], expected)
        scopes[leaving[0]].__exit__(None, None, None)
        assert_stock(models[leaving[0]])
        assert_patched(models[leaving[1]], expected)
        scopes[leaving[1]].__exit__(None, None, None)
        assert before.changes() == []
    assert same_bits(stock_loop(other, BATCH), expected)


@zoo.families
@shared_config
def test_what_a_user_writes_into_the_config_lasts(model_type: str) -> None:
    model = make(model_type)
    other = make(model_type, model.config)
    with opake.patched(model):
        model.config.use_cache = False
        attention(model).config.first = 1
        other.config.second = 2
        model.config.update({"third": 3})
        for config in (model.config, attention(model).config, attention(other).config):
            assert (config.use_cache, config.first) == (False, 1)
            assert (config.second, config.third) == (2, 3)
        del attention(model).config.third
    for module in (model, attention(model), attention(other)):
        assert module.config is model.config
    config = model.config
    assert (config.use_cache, config.first, config.second) == (False, 1, 2)
    assert not hasattr(config, "third")


@zoo.families
@shared_config
def test_an_implementation_set_inside_wins_and_lasts(model_type: str) -> None:
    for attn in zoo.attentions(model_type):
        chosen = next((a for a in zoo.attentions(model_type) if a != attn), attn)
        stock = zoo.tiny(model_type, attn, torch.float64).eval()
        sharing = type(stock)(stock.config)
        stock.set_attn_implementation(chosen)
        lasting = stock.config._attn_implementation  # falcon's cannot be set
        expected = stock_loop(stock, BATCH)
        model = zoo.tiny(model_type, attn, torch.float64).eval()
        other = type(model)(model.config)
        with opake.patched(model):
            model.set_attn_implementation(chosen)
            assert same_bits(logits(model), logits(stock))
            assert attention(model).config._attn_implementation == lasting
        assert model.config._attn_implementation == lasting
        assert other.config._attn_implementation == sharing.config._attn_implementation
        assert_stock(model, other)
        assert same_bits(stock_loop(model, BATCH), expected)
        with opake.patched(model):
            assert_patched(model, expected)


def attention(model: Any) -> Any:
    """The first module that attends; of a model that does not, its base."""
    family, modeling = find(model.config.model_type), vars(sys.modules[type(model).__module__])
    names = (*family.attention, *family.own_sdpa) or (family.base,)
    classes = tuple(modeling[name] for name in names)
    return next(module for module in model.modules() if isinstance(module, classes))


@zoo.families
@two_models
def test_models_of_one_class_leave_in_any_order(model_type: str) -> None:
    models = [make(model_type), make(model_type)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(0.8)
    expected, before = [stock_loop(model, BATCH) for model in models], Snapshot(*models)
    for entering, leaving in itertools.product([(0, 1), (1, 0)], repeat=2):
        scopes = {index: opake.patched(models[index]) for index in entering}
        for scope in scopes.values():
            scope.__enter__()
        for index in leaving:
            assert_patched(models[index], expected[index])
            scopes[index].__exit__(None, None, None)
            assert_stock(models[index])
        assert before.changes() == []
    with opake.patched(models[0]), opake.patched(models[1]), opake.patched(models[0]):
        assert_patched(models[0], expected[0])
    assert before.changes() == []


@zoo.families
@two_models
def test_a_model_of_the_next_family_beside(model_type: str) -> None:
    names = list(zoo.FIELDS)
    models = [make(model_type), make(names[names.index(model_type) - 1])]
    expected, before = [stock_loop(model, BATCH) for model in models], Snapshot(*models)
    scopes = [opake.patched(model).__enter__() for model in models]
    for index in (0, 1):
        assert_patched(models[index], expected[index])
        scopes[index].__exit__(None, None, None)
    assert before.changes() == []


@zoo.families
@two_models
def test_threads_with_a_model_each(model_type: str) -> None:
    models = [make(model_type), make(model_type)]
    beside = make(model_type)
    expected, stock, before = stock_loop(models[0], BATCH), logits(beside), Snapshot(*models)
    failures: list[BaseException] = []

    def run(model: Any) -> None:
        try:
            for _ in range(3):
                with opake.patched(model):
                    assert_patched(model, expected)
                    assert same_bits(logits(beside), stock)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert before.changes() == []


# ---- copies


def by_pickle(value: Any) -> Any:
    written = pickle.dumps(value)
    assert b"opake" not in written
    return pickle.loads(written)


def by_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert b"opake" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_state_dict(model: Any) -> Any:
    made = type(model)(model.config).double().eval()
    made.load_state_dict(by_torch_save(model.state_dict()))
    return made


@zoo.families
@copies
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save, by_state_dict])
def test_a_copy_made_inside_is_stock(model_type: str, duplicate: Callable[[Any], Any]) -> None:
    model = make(model_type)
    twin, stock, expected = make(model_type), logits(model), stock_loop(model, BATCH)
    with opake.patched(model):
        made = duplicate(model)
        assert_stock(made)
        assert kinds(made) == kinds(twin)
        assert same_bits(logits(made), stock)
        assert same_bits(loop(made), expected)
        next(made.parameters()).data += 1  # a copy has weights of its own
        assert same_bits(logits(model), stock)
        next(made.parameters()).data = next(twin.parameters()).data
    with opake.patched(made):
        assert_patched(made, expected)
    assert_stock(made, model)


@zoo.families
@copies
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, by_pickle, by_torch_save])
def test_copies_of_parts_and_configs_are_stock(
    model_type: str, duplicate: Callable[[Any], Any]
) -> None:
    model = make(model_type)
    with opake.patched(model):
        parts = [model.base_model, attention(model)]
        made = [duplicate(part) for part in parts]
        if duplicate is not copy.copy:  # which shares the children
            assert_stock(*made)
        configs = [duplicate(part.config) for part in (model, *parts)]
        for config in configs:
            assert type(config) is type(model.config)
            assert config.to_dict() == model.config.to_dict()
            assert config._attn_implementation == model.config._attn_implementation
    assert_stock(*made)
    if duplicate is not copy.copy:
        ids = {"input_ids": BATCH["input_ids"], "attention_mask": BATCH["attention_mask"]}
        assert same_bits(made[0](**ids)[0], model.base_model(**ids)[0])


@zoo.families
@copies
def test_a_checkpoint_written_and_read_inside(model_type: str, tmp_path: Path) -> None:
    model = make(model_type)
    model.save_pretrained(tmp_path / "stock")

    def load(name: str) -> Any:
        # fp32: read back, experts run on grouped_mm, which knows no fp64 on a CPU.
        return type(model).from_pretrained(tmp_path / name, dtype=torch.float32).eval()

    stock = load("stock")
    expected = stock_loop(stock, BATCH)
    with opake.patched(model):
        model.save_pretrained(tmp_path / "inside")
        loaded = load("inside")
        assert_stock(loaded)
        assert vars(loaded.config).keys() == vars(stock.config).keys()
        assert loaded.config._attn_implementation == model.config._attn_implementation
        assert same_bits(logits(loaded), logits(stock))
        assert same_bits(loop(loaded), expected)
    files = sorted(file.name for file in (tmp_path / "stock").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "inside").iterdir())
    for file in files:
        one, other = (tmp_path / name / file for name in ("stock", "inside"))
        assert one.read_bytes() == other.read_bytes(), file
    assert_stock(loaded)
    with opake.patched(loaded):
        assert_patched(loaded, expected)


@zoo.families
@copies
def test_the_model_looks_as_before(model_type: str) -> None:
    model, twin = make(model_type), make(model_type)
    signatures = [inspect.signature(module.forward) for module in twin.modules()]
    with opake.patched(model):
        assert repr(model) == repr(twin)
        assert list(model.state_dict()) == list(twin.state_dict())
        assert [inspect.signature(module.forward) for module in model.modules()] == signatures
        for mine, theirs in zip(model.modules(), twin.modules(), strict=True):
            assert isinstance(mine, type(theirs))
            for name in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(type(mine), name) == getattr(type(theirs), name)
            if hasattr(theirs, "config"):
                assert repr(mine.config) == repr(theirs.config)
        assert model.num_parameters() == twin.num_parameters()
        assert model.device == twin.device


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    lora = LoraConfig(
        r=2,
        init_lora_weights=False,
        target_modules=traits.projections(model),
        fan_in_fan_out=traits.is_transposed(model),
    )
    return get_peft_model(model, lora).double().eval()


@zoo.families
def test_adapters_put_on_inside_and_merged_inside(model_type: str) -> None:
    stock = with_lora(make(model_type))
    expected, twin = stock_loop(stock, BATCH), make(model_type)
    merged = stock.merge_and_unload()
    after, model = logits(merged), make(model_type)
    with opake.patched(model):
        adapted = with_lora(model)
        assert_patched(adapted, expected)
        copied = copy.deepcopy(adapted)
        assert_stock(copied)
        assert same_bits(loop(copied), expected)
    assert_stock(adapted)
    assert same_bits(stock_loop(adapted, BATCH), expected)
    with opake.patched(adapted):
        assert_patched(adapted, expected)
        with adapted.disable_adapter():
            assert same_bits(logits(adapted), logits(twin))
        made = adapted.merge_and_unload()
        assert same_bits(logits(made), after)
    assert made is model
    assert_stock(made)
    assert same_bits(logits(made), after)
    assert kinds(made) == kinds(twin)
    assert same_bits(list(made.parameters()), list(merged.parameters()))
