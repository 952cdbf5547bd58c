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


LOSS = "fused_linear_cross_entropy"
KERNELS = (
    "rope",
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "activation",
    "cross_entropy",
    "embedding",
    "grouped_moe",
)
_LAYER_NORMS = {
    "bert",
    "roberta",
    "cohere",
    "cohere2",
    "falcon",
    "gpt2",
    "gpt_neox",
    "nemotron",
    "opt",
    "persimmon",
    "phi",
    "stablelm",
    "starcoder2",
}
_NORMED_SUMS = {
    "deepseek_v4",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm4",
    "lfm2",
    "mamba2",
    "olmo2",
    "olmo3",
}
_UNGATED = {
    "arcee",
    "bert",
    "deepseek_v4",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "mamba2",
    "nemotron",
    "opt",
    "persimmon",
    "phi",
    "roberta",
    "starcoder2",
}
_EXPERTS = {
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "mellum",
    "mixtral",
    "olmoe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
}
_GATES_ONLY_EXPERTS = {"granitemoe", "mellum", "mixtral", "olmoe", "qwen3_moe"}
STOCK = {
    "rope": {"bert", "roberta", "gpt2", "opt", "mamba2", "deepseek_v4"},
    "rms_norm": _LAYER_NORMS,
    "layer_norm": {*zoo.FIELDS} - _LAYER_NORMS,
    "fused_add_rms_norm": _LAYER_NORMS | _NORMED_SUMS,
    "activation": _UNGATED,
    "cross_entropy": {"bert", "roberta"},
    "embedding": set(),
    "grouped_moe": {*zoo.FIELDS} - _EXPERTS,
}
"""The families in which a kernel fits no module."""


def runs(model_type: str) -> list[str]:
    return [concern for concern in KERNELS if model_type not in STOCK[concern]]


def used(model_type: str) -> list[str]:
    """What runs in a step: not what the experts' kernel has in itself."""
    inside = ("activation",) if model_type in _GATES_ONLY_EXPERTS else ()
    return [concern for concern in runs(model_type) if concern not in inside]


@zoo.families
@interpreted
def test_every_module_that_fits_gets_the_kernel(model_type: str) -> None:
    model = make(model_type)
    rows = {r.concern: r for r in opake.check(model)}
    for concern in KERNELS:
        found = rows[concern]
        if concern in runs(model_type):
            assert found.status == "on", found
            assert found.count > 0
        else:
            assert (found.status, found.count) == ("skipped", 0)
            assert found.reason.startswith("left to HF: ")
    assert rows["activation"].count >= traits.gates(model)


@zoo.families
def test_without_a_gpu_the_rest_stays_on(model_type: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = make(model_type)
    found = row(model, kernels=True)
    assert found.status == "skipped"
    assert "CUDA" in found.reason
    with opake.patched(model, kernels=True) as scope:
        assert {r.concern for r in scope.explain() if r.status == "on"} >= {"batchify", "kv_cache"}
        model(zoo.tokens())
        assert set(opake.guard_stats(model)) <= {LOSS}


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
    layers[0].mlp.act_fn = nn.ReLU()
    layers[1].mlp.__class__ = _OtherMLP
    layers[2].mlp.forward = lambda x: torch.zeros_like(x)
    found = row(model)
    assert (found.status, found.count) == ("on", 1)
    for reason in ("no kernel for ReLU", "_OtherMLP.forward is another formula", "<lambda>"):
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
    kernels = opake.patched(model, kernels=["swiglu"])
    with opake.PatchSet([opake.ForwardPatch(second, layer)]), kernels:
        found = model(ids).logits
        stats = opake.guard_stats(model)["activation"]
    assert seen == ["hook", "layer"]
    assert same_bits(found, expected)
    assert stats == {"ran": 0, "fell_back": {"another wrapper lies beneath": 2}}


# --- the same numbers


@zoo.families
@pytest.mark.case("fused kernels")
@interpreted
def test_per_example_gradients_are_the_loops(model_type: str) -> None:
    model = make(model_type)
    batch = zoo.batch(zoo.MIXED)
    expected = stock_loop(model, batch)
    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
        stats = opake.guard_stats(model)
    assert before.changes() == []
    assert stats.pop(LOSS) == {"ran": 0, "fell_back": {}}  # nobody asked for the loss alone
    assert [*stats] == runs(model_type)
    for concern, counts in stats.items():
        assert (counts["ran"] > 0) == (concern in used(model_type)), concern
        assert counts["fell_back"] == {}, concern
    zoo.assert_alike([found], expected, model, batch)


@zoo.families
@interpreted
def test_an_ordinary_step_is_stocks(model_type: str) -> None:
    model, batch = make(model_type), zoo.batch(zoo.RIGHT)

    def step(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return found | {"": output.logits.detach()}

    stock = step(model)
    exact = step(copy.deepcopy(model).double())
    with opake.patched(model):
        found = step(model)
        assert all(opake.guard_stats(model)[c]["ran"] for c in used(model_type))
    largest = max(g.abs().max().item() for g in stock.values())
    bar = MOE_BAR if zoo.is_coarse(model_type) else FUSED_BAR
    for n, expected in stock.items():
        if error(found[n], expected, 1e-3 * largest) > bar:  # where stock itself is off by as much
            ours, theirs = (error(x[n].double(), exact[n], 1e-3 * largest) for x in (found, stock))
            assert ours <= 2 * theirs, n
    assert same_bits(step(model), stock)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@interpreted
def test_the_experts_path_fits_where_the_gate_is_a_method(implementation: str) -> None:
    model, batch = make("mixtral"), zoo.batch()
    model.set_experts_implementation(implementation)
    expected = model(**batch).logits
    with opake.patched(model, grouped_moe=False):
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
