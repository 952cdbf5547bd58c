"""Attacks on entering, leaving and what is left behind, each of which once succeeded."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from oracle import Snapshot, assert_exact, per_example, stock_loop
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama import modeling_llama

import opake
from opake._lock import LOCK

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    made(**batch())
    yield made
    torch._dynamo.reset()
    for live in opake.active():
        getattr(live, "drop", live.unpatch)()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_compile_with_the_default_plan(model: Any, when: str) -> None:
    torch._dynamo.reset()
    expected = model(**batch()).logits
    if when == "before":
        compiled = torch.compile(model, backend="eager")
        compiled(**batch())
    with opake.patched(model):
        if when == "inside":
            compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(**batch()).logits, expected)
    torch.testing.assert_close(compiled(**batch()).logits, expected)


@pytest.mark.parametrize("target", ["model", "runtime"])
def test_an_interrupt_on_any_line_of_entering(model: Any, target: str) -> None:
    make = (lambda: opake.patched(model)) if target == "model" else opake.runtime
    before = Snapshot(model)

    def run(stop: int) -> int:
        count = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.startswith(os.path.dirname(opake.__file__)):
                return None
            if event == "line":
                count += 1
                if count == stop:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        scope = make()
        sys.settrace(trace)
        try:
            scope.__enter__()
        except KeyboardInterrupt:
            return count
        finally:
            sys.settrace(None)
            # Tracing raises where CPython delivers no signal: before the release of the lock.
            while LOCK._is_owned():
                LOCK.release()
        scope.__exit__(None, None, None)
        return count

    run(-1)
    leaks, total = [], run(-1)
    for stop in range(max(total - 120, 1), total + 1):
        run(stop)
        if before.changes() or opake.active():
            leaks.append(stop)
            for live in opake.active():
                live.drop()
    assert not leaks


def test_a_log_handler_that_fails_while_entering(model: Any) -> None:
    class Full(logging.Handler):
        def emit(self, record: Any) -> None:
            raise OSError("no space left on device")

    before, logger, handler = Snapshot(model), logging.getLogger("opake"), Full()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(OSError, match="no space"), opake.patched(model):
            pass
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert not before.changes()
    assert not opake.active()


def test_a_cell_that_keeps_the_scope_and_is_run_again(model: Any) -> None:
    for _ in range(2):
        scope = opake.patched(model)
        scope.patch()
    scope.unpatch()
    assert not opake.active()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapper_that_nobody_else_holds(model: Any, wrap: Any) -> None:
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("DataParallel wants the model on the GPU, which this test does not use")
    expected = stock_loop(model, batch())
    with opake.patched(wrap(model)):
        assert_exact(per_example(model, batch(), batched=False), expected)


def test_a_model_built_from_the_config_of_an_attention_module(model: Any) -> None:
    with opake.patched(model):
        LlamaModel(model.model.layers[0].self_attn.config)
    assert model.config._attn_implementation == "sdpa"
    model(**batch())


def test_the_implementation_set_to_what_an_attention_module_says(model: Any) -> None:
    with opake.patched(model):
        found = model.model.layers[0].self_attn.config._attn_implementation
        with contextlib.suppress(ValueError):
            model.set_attn_implementation(found)
    model(**batch())


def test_a_model_built_by_type_of_model_inside(model: Any) -> None:
    with opake.patched(model):
        other = type(model)(model.config)
    assert type(other) is LlamaForCausalLM


def test_a_model_loaded_by_type_of_model_inside(model: Any, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    with opake.patched(model):
        other = type(model).from_pretrained(tmp_path)
    assert type(other) is LlamaForCausalLM


def test_a_class_registry_kept_by_init_subclass() -> None:
    registry: dict[str, type] = {}

    class Base(LlamaForCausalLM):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            registry[cls.__name__] = cls

    class Mine(Base):
        pass

    model = Mine(LlamaConfig(**SMALL))
    with opake.patched(model):
        pass
    assert registry["Mine"] is Mine


@pytest.mark.filterwarnings("ignore::opake.errors.RestoreWarning")
def test_a_hook_from_before_removed_inside(model: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    add_hook_to_module(model.model, ModelHook())
    with opake.patched(model):
        remove_hook_from_module(model.model)
    assert vars(model.model)["forward"].__func__ is LlamaModel.forward


def test_a_scope_after_hooks_were_removed(model: Any) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu_offload(model, execution_device="cpu")
    remove_hook_from_submodules(model)
    with opake.patched(model):
        per_example(model, batch(), batched=False)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_unwrapped_from_mixed_precision(model: Any, when: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if when == "inside":
        with opake.patched(model):  # RestoreWarning
            accelerator.prepare(model)
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    else:
        accelerator.prepare(model)
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with opake.patched(model):  # ForeignWrite
        per_example(model, batch(), batched=False)


def test_a_mock_of_a_module_global_around(model: Any) -> None:
    stock = modeling_llama.create_causal_mask
    with (
        mock.patch.object(modeling_llama, "create_causal_mask", side_effect=stock) as spy,
        opake.patched(model),
    ):
        model(**batch())
    assert spy.called


def test_a_mock_of_the_mask_builder_inside(model: Any) -> None:
    stock = modeling_llama.create_causal_mask
    with (
        opake.patched(model),
        mock.patch.object(modeling_llama, "create_causal_mask", side_effect=stock) as spy,
    ):
        model(**batch())
    assert spy.called


def test_a_subclass_that_passes_everything_on(model: Any) -> None:
    class Passing(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    passing = Passing(model.config).eval()
    ids = batch()["input_ids"]
    with opake.patched(passing):
        found = torch.vmap(lambda x: passing(x, labels=x).loss)(ids)
    expected = torch.stack([passing(x[None], labels=x[None]).loss for x in ids])
    torch.testing.assert_close(found, expected)


def test_the_process_ends_quietly_with_a_generator_left_open() -> None:
    code = f"""
import torch, opake
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(**{SMALL}))
def batches():
    with opake.patched(model):
        yield 1
it = batches(); next(it)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "could not restore" not in done.stderr, done.stderr[-400:]


def test_a_model_is_freed_at_once_after_a_scope() -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        model = LlamaForCausalLM(LlamaConfig(**SMALL))  # stock is freed without gc
        with opake.patched(model):
            pass
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
