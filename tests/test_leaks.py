"""After a scope, every module, class, function and registry of the libraries is what it was."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import peft
import pytest
import sampling
import torch
import torch.utils.checkpoint
import transformers
import zoo
from interrupts import Interrupter
from leaks import Leaks
from oracle import Snapshot, per_example
from torch._functorch import eager_transforms
from torch.nn.modules import module as torch_module
from transformers import masking_utils, modeling_utils
from transformers.models.llama import modeling_llama

import opake

nothing_left = pytest.mark.case("nothing left behind")
renamed = pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_enable)?` is deprecated")


def use(model: Any) -> None:
    """Train a step, generate, checkpoint; where the transforms work, per-example gradients too."""
    model(**zoo.batch(zoo.RIGHT)).loss.backward()
    for mask in (zoo.RIGHT, zoo.LEFT, None):
        # Stock cannot run most of these, but has loaded by then what it needs for them.
        with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):
            per_example(model, zoo.batch(mask), batched=True)
        if opake.active():
            with torch.no_grad():
                per_example(model, zoo.batch(mask), batched=False)
    if model.can_generate():
        ids, mask = zoo.batch(zoo.LEFT)["input_ids"], zoo.LEFT
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    checkpointing_enable(model)
    model(**zoo.batch(zoo.RIGHT), use_cache=False).loss.backward()


def checkpointing_enable(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


FEW = ("llama", "gpt2", "bert", "mixtral", "qwen3_next", "falcon", "gemma2")
"""Families whose scopes are open at once: one for every kind of model."""


@pytest.fixture(scope="module")
def leaks(request: pytest.FixtureRequest) -> Leaks:
    """The state after a use of the families in stock, which fills the libraries' own caches.

    Of those families that these tests are about: the more modules, the longer every look at them.
    """
    tested = {sampling.family_of(item) for item in request.session.items}
    for model_type in tested.intersection(zoo.FIELDS).union(FEW):
        for attn in zoo.attentions(model_type):
            use(zoo.tiny(model_type, attn))
    return Leaks()


@pytest.fixture(autouse=True)
def _nothing_is_left(leaks: Leaks) -> Iterator[None]:
    yield
    assert opake.active() == []
    assert leaks.changes() == []


# ---- what the snapshot sees


def with_cell() -> Callable[[], Any]:
    held = object()
    return lambda: held


@pytest.mark.parametrize(
    ("namespace", "key", "says"),
    [
        (modeling_llama, "apply_rotary_pos_emb", r"modeling_llama: 'apply_rotary_pos_emb' was"),
        (modeling_llama, "opake_new", r"modeling_llama: 'opake_new' is new"),
        (modeling_llama.LlamaAttention, "forward", r"LlamaAttention: 'forward' was"),
        (modeling_llama.LlamaAttention, "opake_new", r"LlamaAttention: 'opake_new' is new"),
        (modeling_utils.PreTrainedModel, "loss_function", r"PreTrainedModel: 'loss_function' was"),
        (modeling_llama.repeat_kv, "opake_new", r"repeat_kv: 'opake_new' is new"),
        (eager_transforms, "grad_and_value_impl", r"'grad_and_value_impl' was"),
        (torch.utils.checkpoint, "checkpoint", r"torch.utils.checkpoint: 'checkpoint' was"),
        (peft.tuners.lora.Linear, "forward", r"Linear: 'forward' was"),
        (accelerate.Accelerator, "prepare", r"Accelerator: 'prepare' was"),
    ],
    ids=lambda value: value if isinstance(value, str) and "'" not in value else "",
)
def test_it_sees_an_attribute(
    leaks: Leaks, monkeypatch: pytest.MonkeyPatch, namespace: Any, key: str, says: str
) -> None:
    monkeypatch.setattr(namespace, key, with_cell(), raising=False)
    assert_says(leaks, says)


@pytest.mark.parametrize(
    "registry",
    [
        modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping,
        modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping,
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
        torch_module._global_forward_hooks,
    ],
)
def test_it_sees_the_contents_of_a_registry(leaks: Leaks, registry: dict[Any, Any]) -> None:
    registry["opake"] = with_cell()
    assert_says(leaks, r"'opake' is new")
    del registry["opake"]
    if not registry:
        return
    key = next(iter(registry))
    value = registry.pop(key)
    assert_says(leaks, rf"{key!r} is gone")
    others = dict(registry)
    registry[key] = value
    if others:
        assert_says(leaks, "another order")
    registry.clear()
    registry.update({key: value, **others})


def test_it_sees_what_a_function_was_made_of(leaks: Leaks) -> None:
    wrapper = modeling_llama.LlamaModel.forward  # the outermost of the model's decorators
    cell = next(c for c in wrapper.__closure__ if callable(c.cell_contents))
    stock, cell.cell_contents = cell.cell_contents, print
    assert_says(leaks, r"LlamaModel.forward: '<\w+>' was .*, is <built-in function print>")
    cell.cell_contents = stock
    function = modeling_llama.rotate_half
    for name, value in {"__defaults__": (1,), "__code__": (lambda x: x).__code__}.items():
        stock = getattr(function, name)
        setattr(function, name, value)
        assert_says(leaks, f"rotate_half: {name!r} was")
        setattr(function, name, stock)


def test_it_sees_a_module_that_was_replaced(leaks: Leaks, monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(sys)("another")
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", other)
    assert "sys.modules: 'transformers.masking_utils' is another" in leaks.changes()


def test_it_lets_imports_appear_in_a_package(leaks: Leaks, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = transformers._class_to_module.items()
    names = [name for name, home in declared if home == "tokenization_utils_base"]
    name = next(name for name in names if name not in vars(transformers))
    getattr(transformers, name)  # as `from transformers import ...` does
    assert name in vars(transformers)
    assert leaks.changes() == []
    monkeypatch.setattr(transformers, name, object())
    assert_says(leaks, f"transformers: {name!r} is new")
    monkeypatch.undo()
    made = type(sys)("transformers.opake_new")
    monkeypatch.setitem(sys.modules, "transformers.opake_new", made)
    monkeypatch.setattr(transformers, "opake_new", made, raising=False)
    assert leaks.changes() == []
    monkeypatch.setattr(transformers, "opake_new", type(sys)("transformers.opake_new"))
    assert_says(leaks, "'opake_new' is new")


def assert_says(leaks: Leaks, expected: str) -> None:
    found = leaks.changes()
    assert any(re.search(expected, line) for line in found), found


# ---- scopes


@zoo.families
@nothing_left
def test_entering_and_leaving(leaks: Leaks, model_type: str) -> None:
    for attn in zoo.attentions(model_type):
        model = zoo.tiny(model_type, attn)
        model(**zoo.batch())
        before = Snapshot(model)
        with opake.patched(model):
            assert leaks.changes()
        assert leaks.changes() == []
        assert before.changes() == []


@zoo.families
@nothing_left
@renamed
def test_a_full_use(model_type: str) -> None:
    for attn in zoo.attentions(model_type):
        model = zoo.tiny(model_type, attn)
        with opake.patched(model):
            use(model)
        assert all("forward" not in vars(module) for module in model.modules())


@zoo.families
@nothing_left
def test_an_exception_in_the_body(model_type: str) -> None:
    model = zoo.tiny(model_type, None)
    model(**zoo.batch())
    before = Snapshot(model)

    def fail(*_: Any) -> None:
        raise LookupError("in the middle of a transform")

    # The deepest module with a forward of its own: everything above is on the stack.
    last = [module for module in model.modules() if not list(module.children())][-1]
    handle = last.register_forward_hook(fail)
    with pytest.raises(LookupError), opake.patched(model), torch.no_grad():
        per_example(model, zoo.batch(zoo.RIGHT), batched=False)
    handle.remove()
    assert before.changes() == []


class _Arm(opake.Patch):
    """Interrupts on the n-th line of the engine after it."""

    def __init__(self, line: int) -> None:
        self.line = line

    def apply(self) -> None:
        sys.settrace(Interrupter(self.line))

    def revert(self) -> None:
        return None


@zoo.families
@nothing_left
def test_an_interrupt_at_each_patch_while_entering(leaks: Leaks, model_type: str) -> None:
    model = zoo.tiny(model_type, None)
    model(**zoo.batch())
    before, tracer = Snapshot(model), sys.gettrace()
    phase = list(zoo.FIELDS).index(model_type)
    for k in range(len(opake.patched(model)) + 1):
        scope = opake.patched(model)
        planned = scope._plan

        def plan(flags: Any, k: int = k, planned: Any = planned) -> Any:
            found = planned(flags)
            found.patches.insert(k, _Arm(3 + 5 * k % 17))
            return found

        scope._plan = plan
        try:
            with pytest.raises(KeyboardInterrupt):
                scope.__enter__()
        finally:
            sys.settrace(tracer)
        assert opake.active() == []
        assert before.changes() == []
        if (k + phase) % 8 == 0:  # between them, the families look after every patch
            assert leaks.changes() == []


@pytest.mark.parametrize("flags", [{}, {"compat": False}, {"performance": False}], ids=str)
def test_the_process_scope(leaks: Leaks, flags: dict[str, bool]) -> None:
    with opake.runtime(**flags) as scope:
        assert bool(leaks.changes()) is (len(scope) > 0)
        stock_use = zoo.tiny("llama", None)
        stock_use(**zoo.batch(zoo.RIGHT)).loss.backward()
    assert leaks.changes() == []
    with pytest.raises(KeyboardInterrupt), opake.runtime(**flags):
        raise KeyboardInterrupt


def test_scopes_of_several_families_left_in_another_order(leaks: Leaks) -> None:
    models = [zoo.tiny(model_type, None) for model_type in FEW]
    for shift in (0, 3):
        scopes = [opake.patched(model) for model in models] + [opake.runtime()]
        for scope in scopes:
            scope.__enter__()
        assert leaks.changes()
        for scope in scopes[shift:] + scopes[:shift]:
            scope.__exit__(None, None, None)
        assert leaks.changes() == []
