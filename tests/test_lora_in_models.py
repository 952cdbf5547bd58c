"""LoRA layers in models: which get an operator, what is left to PEFT, and that numbers stay."""

from __future__ import annotations

import copy
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from interpreter import interpreted
from oracle import Snapshot, error, per_example, same_bits, stock_loop
from peft import LoraConfig, get_peft_model
from test_kernels_in_models import FUSED_BAR, make
from torch import Tensor, nn

import opake

LORA = ("lora_w",)
FAMILIES = {
    "llama": {"lora_w": 14},
    "qwen2": {"lora_w": 14},
    "qwen3": {"lora_w": 14},
    "gemma3_text": {"lora_w": 14},
    "phi3": {"lora_w": 8},
    "mixtral": {"lora_w": 8},
    "qwen3_moe": {"lora_w": 8},
    "bert": {"lora_w": 13},
    "gpt2": {},
}
"""How many modules get the operators, with adapters on every linear layer."""

families = pytest.mark.parametrize("model_type", FAMILIES)


def adapt(model: Any, **fields: Any) -> Any:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        return get_peft_model(model, LoraConfig(**options(**fields)))


def options(**fields: Any) -> dict[str, Any]:
    return {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", **fields} | {
        "init_lora_weights": False  # else B is zero, and with it the gradient of A
    }


def adapted(model_type: str = "llama", **fields: Any) -> Any:
    if model_type in ("mixtral", "qwen3_moe"):
        fields = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], **fields}
    return adapt(make(model_type), **fields)


def counts(model: Any) -> dict[str, int]:
    return {r.concern: r.count for r in opake.check(model) if r.concern in LORA and r.count}


def fused(model: Any) -> dict[str, Any]:
    return {name: n for name, n in opake.guard_stats(model).items() if name in LORA}


# ---- where


@families
@interpreted
def test_every_layer_over_a_linear_one_gets_an_operator(model_type: str) -> None:
    assert counts(adapted(model_type)) == FAMILIES[model_type]


@interpreted
def test_what_is_left_to_peft_is_said() -> None:
    rows = {r.concern: r for r in opake.check(adapted("gpt2"))}
    assert rows["lora_w"].reason == "left to HF: no kernel for LoRA on Conv1D"
    rows = {r.concern: r for r in opake.check(make("llama"))}
    assert rows["lora_w"].reason == "left to HF: the model has no LoRA layer"
    rows = {r.concern: r for r in opake.check(adapted(target_modules=["embed_tokens", "q_proj"]))}
    assert (rows["lora_w"].count, rows["lora_w"].reason) == (
        2,
        "left to HF: no kernel for lora.Embedding",
    )


# ---- the same numbers


@families
@interpreted
def test_per_example_gradients_are_the_loops(model_type: str) -> None:
    model, batch = adapted(model_type), zoo.batch(zoo.MIXED)
    expected = stock_loop(model, batch)
    assert all("lora_" in name for name in expected.grads)
    before = Snapshot(model)
    with opake.patched(model), torch.no_grad():
        found = [per_example(model, batch, batched=b) for b in (True, False)]
        stats = fused(model)
    assert before.changes() == []
    assert {*stats} == {*FAMILIES[model_type]}
    assert all(n["ran"] and not n["fell_back"] for n in stats.values())
    zoo.assert_alike(found, expected, model, batch)


def step(model: Any, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(**inputs)
    if output.loss.requires_grad:
        output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return grads | {"logits": output.logits.detach(), "loss": output.loss.detach()}


def assert_close(
    found: dict[str, Tensor], model: Any, stock: dict[str, Tensor], **inputs: Any
) -> None:
    """Against fp64, where stock itself is off by as much as the bar."""
    assert {*found} == {*stock}
    exact = step(copy.deepcopy(model).double(), **inputs)
    largest = max(g.abs().max().item() for g in stock.values())
    for n, expected in stock.items():
        assert found[n].dtype == expected.dtype, n
        if error(found[n], expected, 1e-3 * largest) > FUSED_BAR:
            ours, theirs = (error(x[n].double(), exact[n], 1e-3 * largest) for x in (found, stock))
            assert ours <= 3 * theirs, n


@families
@interpreted
def test_an_ordinary_step_is_stocks(model_type: str) -> None:
    model, batch = adapted(model_type), zoo.batch(zoo.RIGHT)
    stock = step(model, **batch)
    with opake.patched(model):
        found = step(model, **batch)
        assert {n for n, x in fused(model).items() if x["ran"]} == {*FAMILIES[model_type]}
    assert_close(found, model, stock, **batch)
    assert same_bits(step(model, **batch), stock)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "bert"])
@interpreted
def test_generate_gives_stocks_tokens(model_type: str) -> None:
    model, ids = adapted(model_type).eval(), zoo.tokens(2)
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": zoo.PAD}
    expected = model.generate(input_ids=ids, **asked)
    with opake.patched(model):
        assert torch.equal(model.generate(input_ids=ids, **asked), expected)
        assert all(n["ran"] and not n["fell_back"] for n in fused(model).values())


# ---- what PEFT lets change between calls


class Case(NamedTuple):
    """What is done to a model in the scope, and why the operators then do not run."""

    why: str
    change: Callable[[Any], Any]
    fields: dict[str, Any] = {}  # noqa: RUF012  (read only)
    left: int = 14
    """How many layers run PEFT's code, of 14, where there is a reason."""


def layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "lora_A")]


def each(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def of_all(model: Any) -> None:
        for layer in layers(model):
            change(layer)

    return of_all


def nothing(model: Any) -> None:
    """The fields say it all."""


def merge_and_unmerge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def delete(model: Any) -> None:
    second(model, "b")
    model.delete_adapter("default")


def double(layer: Any) -> None:
    base = layer.base_layer
    base.forward = types.MethodType(lambda base, x: 2 * nn.functional.linear(x, base.weight), base)


def second(model: Any, *active: str) -> None:
    torch.manual_seed(2)
    if "b" not in model.peft_config:
        model.add_adapter("b", LoraConfig(**options(r=3, lora_alpha=1)))
    model.base_model.set_adapter(list(active))


def trained(name: str) -> Callable[[Any], Any]:
    return each(lambda layer: getattr(layer.base_layer, name).requires_grad_())


def hook(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda module, args, out: 1.5 * out)


def wrap(layer: Any) -> None:
    layer.lora_A["default"] = nn.Sequential(layer.lora_A["default"])
    layer.lora_A["default"].weight = layer.lora_A["default"][0].weight


HOOKED = "a LoRA layer, or a part of it, has hooks or another forward"
OFF = "the adapters are disabled or merged"
VARIANT = "an adapter is no plain LoRA"
TRAINED = "the base layer is trained"
CASES = {
    "merged": Case(OFF, lambda model: model.merge_adapter()),
    "merged and unmerged": Case("", merge_and_unmerge),
    "disabled": Case(OFF, lambda model: model.base_model.disable_adapter_layers()),
    "another adapter": Case("", lambda model: second(model, "b")),
    "two adapters": Case("", lambda model: second(model, "default", "b")),
    "one twice": Case("", each(lambda layer: setattr(layer, "_active_adapter", ["default"] * 2))),
    "no adapter": Case("there is no adapter", each(lambda layer: layer.set_adapter([]))),
    "deleted": Case("", delete),
    "another scale": Case("", each(lambda layer: layer.scale_layer(-1.5))),
    "rslora": Case("", nothing, {"use_rslora": True}),
    "dropout": Case("dropout is in effect", nothing, {"lora_dropout": 0.4}),
    "dropout in eval": Case("", lambda model: model.eval(), {"lora_dropout": 0.4}),
    "dropout of nothing": Case(
        "",
        each(lambda layer: setattr(layer.lora_dropout["default"], "p", 0.0)),
        {"lora_dropout": 0.4},
    ),
    "dora": Case(VARIANT, nothing, {"use_dora": True}),
    "a bias of the adapter's": Case("an adapter has a bias", nothing, {"lora_bias": True}),
    "a trained weight": Case(TRAINED, trained("weight")),
    "trained biases": Case(TRAINED, nothing, {"bias": "lora_only"}, left=6),
    "a hook on A": Case(HOOKED, each(lambda layer: hook(layer.lora_A["default"]))),
    "a hook on B": Case(HOOKED, each(lambda layer: hook(layer.lora_B["default"]))),
    "a hook on the base": Case(HOOKED, each(lambda layer: hook(layer.base_layer))),
    "a forward of the base's": Case(HOOKED, each(double)),
    "something else for A": Case(HOOKED, each(wrap)),
    "no casts": Case("", each(lambda layer: setattr(layer, "cast_input_dtype_enabled", False))),
}


@pytest.mark.parametrize("name", CASES)
@interpreted
def test_what_changes_between_calls_is_read_at_every_call(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's about biases, merging and deleting
        check_case(*CASES[name])


def check_case(why: str, change: Callable[[Any], Any], fields: dict[str, Any], left: int) -> None:
    """Change two models alike, one of them in the middle of a scope."""
    ours, stock = (adapted("qwen2", **fields) for _ in range(2))
    batch = zoo.batch(zoo.RIGHT)
    with opake.patched(ours):
        torch.manual_seed(3)
        step(ours, **batch)
        change(ours)
        before = copy.deepcopy(fused(ours))
        torch.manual_seed(3)
        found = step(ours, **batch)
        after = fused(ours)
    change(stock)
    torch.manual_seed(3)
    expected = step(stock, **batch)
    assert new(before, after, "lora_w") == (14 - left if why else 14, {why: left} if why else {})
    torch.manual_seed(3)
    assert_close(found, stock, expected, **batch)


def new(before: Any, after: Any, concern: str) -> tuple[int, dict[str, int]]:
    """What has been counted since: calls that ran, and those that fell back."""
    old, now = before[concern], after[concern]
    fell_back = Counter(now["fell_back"]) - Counter(old["fell_back"])
    return now["ran"] - old["ran"], {**fell_back}
