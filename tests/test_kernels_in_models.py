"""The fused kernels inside models: which modules get them, and that the numbers stay stock's."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import pytest
import torch
import traits
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from interpreter import interpreted
from oracle import MOE_BAR, Snapshot, error, errors, per_example, same_bits, stock_loop
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import opake
from opake import families as families_

FUSED_BAR = 1e-5
"""What a kernel may differ by in fp32: it rounds once where stock rounds twice."""


def row(model: Any, **flags: Any) -> Any:
    return next(r for r in opake.check(model, **flags) if r.concern == "activation")


def make(model_type: str, **fields: Any) -> Any:
    return zoo.tiny(model_type, zoo.attentions(model_type)[0], **fields)


# --- where


@zoo.families
@interpreted
def test_every_module_that_fits_gets_the_kernel(model_type: str) -> None:
    model = make(model_type)
    found, gates = row(model), traits.gates(model)
    if gates:
        assert (found.status, found.count, found.reason) == ("on", gates, "")
        return
    assert (found.status, found.count) == ("skipped", 0)
    gated = [m for m in model.modules() if hasattr(m, "gate_proj") and hasattr(m, "act_fn")]
    other = {type(module.act_fn).__name__ for module in gated}
    reasons = ["the family names no gated MLP", *(f"no kernel for {name}" for name in other)]
    assert found.reason in [f"left to HF: {reason}" for reason in reasons]


@zoo.families
def test_without_a_gpu_the_rest_stays_on(model_type: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = make(model_type)
    found = row(model, kernels=True)
    assert found.status == "skipped"
    assert "CUDA" in found.reason or "the family names no gated MLP" in found.reason
    with opake.patched(model, kernels=True) as scope:
        assert {r.concern for r in scope.explain() if r.status == "on"} >= {"batchify", "kv_cache"}
        model(zoo.tokens())
        assert opake.guard_stats(model) == {}


@interpreted
def test_flags_choose_the_kernel() -> None:
    model = make("llama")
    assert row(model).status == "on"
    assert row(model, kernels=["swiglu"]).status == "on"
    assert row(model, mode="infer").status == "on"
    for flags in ({"activation": False}, {"kernels": False}, {"kernels": ["rope"]}):
        assert row(model, **flags).status == "off"
    assert row(model, kernels=False, activation=True).status == "on"


class _OtherMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@interpreted
def test_a_module_that_does_not_fit_is_left_to_stock() -> None:
    model = make("llama", num_hidden_layers=4)
    layers = model.model.layers
    layers[0].mlp.act_fn = nn.GELU()
    layers[1].mlp.__class__ = _OtherMLP
    layers[2].mlp.forward = lambda x: torch.zeros_like(x)
    found = row(model)
    assert (found.status, found.count) == ("on", 1)
    for reason in ("no kernel for GELU", "_OtherMLP is not LlamaMLP itself", "<lambda>"):
        assert reason in found.reason
    batch = zoo.batch(zoo.RIGHT)
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
        assert opake.guard_stats(model)["activation"]["ran"] > 0
    assert errors(found, expected)[1] <= FUSED_BAR


@interpreted
def test_a_family_that_names_another_formula_is_left_to_stock() -> None:
    family = families_.find("llama")
    for mlp, reason in [
        ("LlamaRMSNorm", "LlamaRMSNorm.forward is another formula"),
        ("NoSuchMLP", "there is no transformers.models.llama.modeling_llama:NoSuchMLP"),
    ]:
        opake.register_family("llama", dataclasses.replace(family, mlp=mlp))
        try:
            found = row(make("llama"))
        finally:
            families_._REGISTERED.clear()
        assert found.status == "skipped"
        assert reason in found.reason


@interpreted
def test_an_mlp_of_a_modeling_file_elsewhere_gets_the_kernel() -> None:
    model = make("llama")
    family = dataclasses.replace(families_.find("llama"), mlp=OutsideMLP.__name__)
    home = vars(sys.modules[family.module])
    home[OutsideMLP.__name__] = OutsideMLP  # as if that file had it
    opake.register_family("llama", family)
    try:
        for layer in model.model.layers:
            layer.mlp.__class__ = OutsideMLP
        assert (row(model).status, row(model).count) == ("on", 2)
    finally:
        families_._REGISTERED.clear()
        del home[OutsideMLP.__name__]


class OutsideMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@interpreted
def test_what_lies_beneath_the_kernel_still_runs() -> None:
    model, ids = make("llama"), zoo.tokens()
    seen = []

    class Counts(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append("hook")
            return tuple(2 * x for x in args), kwargs

    def layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append("layer")
        return wrapped(*args, **kwargs)

    first, second = (layer.mlp for layer in model.model.layers)
    add_hook_to_module(first, Counts())
    expected = model(ids).logits
    assert seen == ["hook"]
    seen.clear()
    with opake.PatchSet([opake.ForwardPatch(second, layer)]), opake.patched(model):
        found = model(ids).logits
        stats = opake.guard_stats(model)["activation"]
    assert seen == ["hook", "layer"]
    assert same_bits(found, expected)
    assert stats == {"ran": 0, "fell_back": {"another wrapper lies beneath": 2}}


# --- the same numbers


@zoo.families
@pytest.mark.case("fused swiglu")
def test_per_example_gradients_are_the_loops(model_type: str) -> None:
    if not traits.gates(make(model_type)):
        pytest.skip("none of its modules gates SiLU in the form that the kernel takes")
    check_gradients(model_type)


@interpreted
def check_gradients(model_type: str) -> None:
    model = make(model_type)
    for mask in (None, zoo.MIXED):
        batch = zoo.batch(mask)
        expected = stock_loop(model, batch)
        before = Snapshot(model)
        with opake.patched(model), torch.no_grad():
            found = per_example(model, batch, batched=False)
            stats = opake.guard_stats(model)
        assert before.changes() == []
        assert stats["activation"]["ran"] >= traits.gates(model)
        assert stats["activation"]["fell_back"] == {}
        zoo.assert_alike([found], expected, model, batch)


@zoo.families
def test_an_ordinary_step_is_stocks(model_type: str) -> None:
    if not traits.gates(make(model_type)):
        pytest.skip("none of its modules gates SiLU in the form that the kernel takes")
    check_step(model_type)


@interpreted
def check_step(model_type: str) -> None:
    model, batch = make(model_type), zoo.batch(zoo.RIGHT)

    def step() -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()} | {"": output.logits}

    stock = step()
    with opake.patched(model):
        found = step()
        assert opake.guard_stats(model)["activation"]["ran"] >= traits.gates(model)
    largest = max(g.abs().max().item() for g in stock.values())
    bar = MOE_BAR if zoo.is_coarse(model_type) else FUSED_BAR
    assert max(error(found[n], stock[n], 1e-3 * largest) for n in stock) <= bar
    assert same_bits(step(), stock)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@interpreted
def test_the_experts_path_fits_where_the_gate_is_a_method(implementation: str) -> None:
    model, batch = make("mixtral"), zoo.batch()
    model.set_experts_implementation(implementation)
    expected = model(**batch).logits
    with opake.patched(model):
        found = model(**batch).logits
        ran = opake.guard_stats(model)["activation"]["ran"]
    assert ran == (0 if implementation == "eager" else 2)
    assert error(found, expected) <= MOE_BAR


@interpreted
def test_what_the_kernel_cannot_compute_runs_stocks_code_and_is_counted() -> None:
    model, batch = make("llama", dtype=torch.float64), zoo.batch()
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
        stats = opake.guard_stats(model)["activation"]
    assert errors(found, expected)[1] <= 1e-12
    assert stats["ran"] == 0
    assert stats["fell_back"] == {"torch.float64 is computed by the reference": 2}


@interpreted
def test_min_elements_of_a_scope_decides() -> None:
    model = make("llama")
    with opake.patched(model, min_elements=10**9):
        model(zoo.tokens())
        stats = opake.guard_stats(model)["activation"]
    assert stats["ran"] == 0
    assert sum(stats["fell_back"].values()) == 2
    with opake.patched(model, min_elements=0):
        model(zoo.tokens())
        assert opake.guard_stats(model)["activation"] == {"ran": 2, "fell_back": {}}


@interpreted
def test_compiled_and_copied_models_carry_no_guard() -> None:
    model, ids = make("llama").eval(), zoo.tokens()
    expected = model(ids, use_cache=False).logits
    with opake.patched(model):
        clone = copy.deepcopy(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert error(compiled(ids, use_cache=False).logits, expected) <= FUSED_BAR
        assert opake.guard_stats(model)["activation"]["ran"] == 0
    assert not any(n.startswith("_opake") for m in clone.modules() for n in vars(m))
    assert same_bits(clone(ids, use_cache=False).logits, expected)


def test_a_model_that_was_never_patched_has_no_stats() -> None:
    assert opake.guard_stats(make("llama")) == {}
