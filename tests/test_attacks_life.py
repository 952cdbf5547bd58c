"""Unusual uses around a scope: activations with hooks, names of kernels, copies, bad options."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from interpreter import interpreted
from oracle import Snapshot
from torch import nn

import opake
from opake import kernels as K

IDS = zoo.tokens()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def residue(model: nn.Module) -> list[Any]:
    """What opake left in the modules of a model that is in no scope."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [(name, key) for key in vars(module) if "opake" in key]
        found += [(name, c) for c in type(module).__mro__ if "_opake_stock" in vars(c)]
        hooks = module._forward_hooks.values()
        found += [(name, h) for h in hooks if str(getattr(h, "__module__", "")).startswith("opake")]
    return found


def _act(model: Any) -> Any:
    return _mlp(model).act_fn


def _mlp(model: Any) -> Any:
    mlp = model.model.layers[0].mlp
    return getattr(mlp, "experts", mlp)


def _zero(module: Any, args: Any, output: Any) -> Any:
    return output * 0


class SiLU(nn.Module):  # a name is no formula
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def _hooked(model: Any) -> None:
    _act(model).register_forward_hook(_zero)


def _pre_hooked(model: Any) -> None:
    _act(model).register_forward_pre_hook(lambda module, args: (args[0] * 0,))


def _replaced(model: Any) -> None:
    _mlp(model).act_fn = nn.ReLU()


def _namesake(model: Any) -> None:
    _mlp(model).act_fn = SiLU()


def _instance_forward(model: Any) -> None:
    _act(model).forward = lambda x: x * 0


CHANGES: dict[str, Callable[[Any], None]] = {
    "hook": _hooked,
    "pre_hook": _pre_hooked,
    "replaced": _replaced,
    "namesake": _namesake,
    "instance_forward": _instance_forward,
}


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("change", CHANGES)
@interpreted
def test_the_activation_module_is_asked(model_type: str, when: str, change: str) -> None:
    if change == "replaced" and when == "before":
        return  # seen while planning
    model = zoo.tiny(model_type)
    stock = copy.deepcopy(model)
    CHANGES[change](stock)
    if when == "before":
        CHANGES[change](model)
    with opake.patched(model):
        if when == "inside":
            CHANGES[change](model)
        found = logits(model)
    torch.testing.assert_close(found, logits(stock), rtol=1e-4, atol=1e-4)


@interpreted
def test_an_experts_gate_of_the_instance_is_asked() -> None:
    model = zoo.tiny("mixtral")

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.zeros(gate_up.shape[0], gate_up.shape[1] // 2)

    _mlp(model)._apply_gate = gate
    expected = logits(model)
    with opake.patched(model):
        torch.testing.assert_close(logits(model), expected)


@interpreted
def test_global_module_hooks_are_run() -> None:
    model = zoo.tiny("llama")

    def hook(module: Any, args: Any, output: Any) -> Any:
        return output * 0 if type(module).__name__ == "SiLUActivation" else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        expected = logits(model)
        with opake.patched(model):
            found = logits(model)
    finally:
        handle.remove()
    torch.testing.assert_close(found, expected)


@interpreted
def test_an_mlp_forward_that_somebody_put_on_the_class_is_run() -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))

    model, stock = zoo.tiny("llama"), modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = forward
    try:
        expected = logits(model)
        with opake.patched(model):
            found = logits(model)
    finally:
        modeling_llama.LlamaMLP.forward = stock
    torch.testing.assert_close(found, expected)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


_HIJACK = """
from opake import kernels as K
op = lambda name: K.Op(name=name, function=abs, reference=abs, fused=abs, examples=None)
try:
    K.register(op({name!r}))
except K._op.InvalidArgument:
    print("refused")
else:
    print("accepted", K.{name})
"""


@pytest.mark.parametrize("name", ["swiglu", "swiglu_packed", "config", "ops", "register", "Op"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _HIJACK.format(name=name)], capture_output=True, text=True
    )
    assert run.stdout.strip() == "refused", run.stdout + run.stderr[-300:]


@interpreted
def test_what_the_reference_takes_works_with_kernels_too() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(K.swiglu(x, 2.0), K.find("swiglu").reference(x, 2.0))


@interpreted
def test_nested_tensors_run_the_reference() -> None:
    warnings.simplefilter("ignore")  # a prototype, says torch
    x = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
    found, expected = K.swiglu(x, x), K.find("swiglu").reference(x, x)
    for a, b in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)


@interpreted
def test_an_inference_tensor_and_a_parameter() -> None:
    with torch.inference_mode():
        gate = torch.randn(3)
    up = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(K.find("swiglu").reference(gate, up).sum(), up)
    (found,) = torch.autograd.grad(K.swiglu(gate, up).sum(), up)
    torch.testing.assert_close(found, expected)


def test_available_takes_an_index_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert K.available(0)[0] is False


@pytest.mark.parametrize("applied", [True, False])
def test_a_module_that_keeps_its_scope_can_be_copied(applied: bool) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = zoo.tiny("llama")
            self.scope = opake.patched(self.model)

    wrapper = Wrapper()
    if applied:
        wrapper.scope.patch()
    try:
        copied = copy.deepcopy(wrapper)
        assert residue(copied.model) == []
    finally:
        wrapper.scope.unpatch()
        gc.collect()


def test_a_family_that_fits_nothing_in_the_model_is_refused() -> None:
    from opake import families

    model = zoo.tiny("qwen3")
    opake.register_family(
        "qwen3",
        opake.Family(
            module="transformers.models.llama.modeling_llama",
            base="LlamaModel",
            attention=("LlamaAttention",),
            mlp="LlamaMLP",
        ),
    )
    try:
        with pytest.raises(opake.errors.OpakeError):
            opake.check(model)
    finally:
        families._REGISTERED.pop("qwen3")


def test_strict_and_reset_compile_are_checked_like_every_flag() -> None:
    model = zoo.tiny("llama")
    with pytest.raises(opake.errors.InvalidArgument):
        opake.patched(model, strict="no")
    with pytest.raises(opake.errors.InvalidArgument):
        opake.runtime(reset_compile="no")


@pytest.mark.parametrize("value", ["1024", 1.5, float("nan"), True])
def test_config_refuses_what_patched_refuses(value: Any) -> None:
    with pytest.raises(opake.errors.InvalidArgument), K.config(min_elements=value):
        pass


def test_an_interrupt_in_unpatch_is_no_half_way() -> None:
    model = zoo.tiny("llama")
    before = Snapshot(model)
    for n in range(1, 60):
        scope = opake.patch(model)
        left = n

        def tracer(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith("patchset.py"):
                return None
            at_while = frame.f_lineno == frame.f_code.co_firstlineno + 2  # signals come here
            if frame.f_code.co_name == "_undo" and event == "line" and at_while:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return tracer

        sys.settrace(tracer)
        try:
            scope.unpatch()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        done, whole = not scope.applied, len(scope._applied or ()) == len(scope)
        opake.unpatch(model)
        assert done or whole, f"{n} patches in"
        assert before.changes() == []


@interpreted
def test_guard_stats_is_empty_where_no_kernel_is_on() -> None:
    model = zoo.tiny("gemma2", None)
    with opake.patched(model, kernels=False) as scope:
        row = next(row for row in scope.explain() if row.concern == "activation")
        assert row.status == "off"
        assert opake.guard_stats(model) == {}


def test_what_the_docs_say_of_kernels() -> None:
    assert "not in this release" not in opake.patched.__doc__
