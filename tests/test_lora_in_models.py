"""LoRA layers in models: which get an operator, what is left to PEFT, and that numbers stay."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from interpreter import interpreted, round_bfloat16
from oracle import Result, Snapshot, error, errors_by_row, per_example, same_bits, stock_loop
from peft import LoraConfig, get_peft_model
from test_checkpointing import enable, peft_names
from test_kernels_in_models import FUSED_BAR, make
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import opake
from opake.plan import lora_qkv

LORA = ("lora_w", "lora_qkv", "lora_mlp")
ALL = {"lora_w": 14, "lora_qkv": 2, "lora_mlp": 2}
ATTENTION = {"lora_w": 8, "lora_qkv": 2}
FAMILIES = {
    "llama": ALL,
    "qwen2": ALL,
    "qwen3": ALL,
    "gemma3_text": ALL,
    "cohere2": ALL,
    "phi3": {"lora_w": 8},
    "glm4": {"lora_w": 12, "lora_qkv": 2},
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "bert": {"lora_w": 13, "lora_qkv": 2},
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


def adapted(model_type: str = "llama", hidden_act: str = "", **fields: Any) -> Any:
    if model_type in ("mixtral", "qwen3_moe"):
        fields = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], **fields}
    model = make(model_type, hidden_act=hidden_act) if hidden_act else make(model_type)
    return adapt(model, **fields)


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
    said = {
        "no kernel for LoRA on Conv1D": adapted("gpt2"),
        "the model has no LoRA layer": make("llama"),
        "no kernel for lora.Embedding": adapted(target_modules=["embed_tokens"]),
        "no attention has adapters on query, key and value": adapted("phi3"),
        "LlamaAttention: k_proj, v_proj has no adapter": adapted(target_modules=["q_proj"]),
        "Phi3MLP: no kernel for gate and up in one projection": adapted("phi3"),
        "no gated MLP has adapters": adapted(target_modules=["q_proj"]),
        "LlamaMLP: up_proj has no adapter": adapted(target_modules=["gate_proj", "down_proj"]),
        "no kernel for ReLU": adapted(hidden_act="relu"),
        "_OtherMLP.forward is another formula": strange_class("mlp", _OtherMLP),
        "_OtherAttention does not project one input three times": strange_class(
            "self_attn", _OtherAttention
        ),
    }
    for reason, model in said.items():
        assert f"left to HF: {reason}" in [r.reason for r in opake.check(model)], reason


def strange_class(name: str, cls: type) -> Any:
    model = adapted()
    for layer in model.base_model.model.model.layers:
        getattr(layer, name).__class__ = cls
    return model


class _OtherMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _OtherAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            self.q_proj(hidden_states),
            self.k_proj(hidden_states),
            self.v_proj(hidden_states + 1),
        )


@interpreted
def test_flags_choose_the_operators() -> None:
    model, ids = adapted(), zoo.tokens()
    for flags, on in [
        ({"kernels": False}, {*LORA}),
        ({"kernels": ["lora_qkv"]}, {"lora_qkv"}),
        ({"peft": False}, set()),
        ({"mode": "infer"}, set()),
        ({"peft": False, "lora_mlp": True}, {"lora_mlp"}),
        ({"lora_w": False}, {"lora_qkv", "lora_mlp"}),
    ]:
        expected = model(ids).logits
        with opake.patched(model, **flags):
            found = model(ids).logits
            assert {n for n, x in fused(model).items() if x["ran"]} == on
        assert error(found.detach(), expected.detach()) <= FUSED_BAR


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
    truth = stock_loop(copy.deepcopy(model).double(), batch)
    for result in found:
        assert_near(result, expected, truth)


def assert_near(found: Result, stock: Result, truth: Result) -> None:
    """Assert that no example is further from the truth than the bar, or than stock's rounding."""
    for ours, theirs in zip(
        errors_by_row(found, truth, floor=0.1), errors_by_row(stock, truth, floor=0.1), strict=True
    ):
        assert (ours <= (3 * theirs).clamp(min=FUSED_BAR)).all(), (ours, theirs)


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
    """How many layers run PEFT's code, of 14, where there is a reason; 6 are q, k and v."""


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
        before = copy.deepcopy(opake.guard_stats(ours))
        torch.manual_seed(3)
        found = step(ours, **batch)
        after = opake.guard_stats(ours)
    change(stock)
    torch.manual_seed(3)
    expected = step(stock, **batch)
    layers, attentions, mlps = (new(before, after, concern) for concern in LORA)
    if why:
        assert layers == (0 if left == 14 else 2, {why: left})
        assert attentions == (0, {why: 2})
        assert mlps == ((0, {why: 2}) if left == 14 else (2, {}))
        assert new(before, after, "activation")[0] == (2 if left == 14 else 0)
    else:
        assert (layers, attentions, mlps) == ((2, {}), (2, {}), (2, {}))
    torch.manual_seed(3)
    assert_close(found, stock, expected, **batch)


def new(before: Any, after: Any, concern: str) -> tuple[int, dict[str, int]]:
    """What has been counted since: calls that ran, and those that fell back."""
    old, now = before[concern], after[concern]
    fell_back = Counter(now["fell_back"]) - Counter(old["fell_back"])
    return now["ran"] - old["ran"], {**fell_back}


# ---- what else may be in the way


def close(found: Any, expected: Any) -> bool:
    return error(found.detach(), expected.detach()) <= FUSED_BAR


@interpreted
def test_adapters_of_each_row_are_left_to_peft() -> None:
    model, ids = adapted().eval(), zoo.tokens(2)
    second(model, "default")
    asked = {"input_ids": ids, "adapter_names": ["b", "__base__"]}
    expected = model(**asked).logits
    with opake.patched(model):
        assert close(model(**asked).logits, expected)
        stats = fused(model)
    assert stats["lora_w"] == {"ran": 0, "fell_back": {"called with other arguments": 14}}
    assert stats["lora_qkv"] == {"ran": 0, "fell_back": {}}  # nobody asked it
    assert stats["lora_mlp"] == {"ran": 0, "fell_back": {HOOKED: 2}}


@interpreted
def test_hooks_on_layers_and_on_what_has_them_run() -> None:
    model, ids = adapted(), zoo.tokens()
    first, last = model.base_model.model.model.layers
    whole = [first.self_attn.o_proj, last.mlp]
    for module in (first.self_attn.k_proj, first.mlp.down_proj, *whole):
        hook(module)
    last.self_attn.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
    expected = model(ids).logits
    with opake.patched(model):
        assert close(model(ids).logits, expected)
        stats = fused(model)
    assert stats["lora_qkv"] == stats["lora_mlp"] == {"ran": 1, "fell_back": {HOOKED: 1}}
    assert stats["lora_w"] == {"ran": 8, "fell_back": {}}


@interpreted
def test_modules_that_somebody_puts_in_or_wraps_inside_the_scope() -> None:
    models = [
        adapted(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
        for _ in range(2)
    ]
    ids = zoo.tokens()

    def change(model: Any) -> None:
        first, last = model.base_model.model.model.layers
        first.self_attn.q_proj = first.self_attn.q_proj.base_layer
        first.mlp.up_proj = first.mlp.up_proj.base_layer
        last.self_attn.v_proj = copy.deepcopy(first.self_attn.v_proj)
        add_hook_to_module(last.self_attn.k_proj, Doubles())
        add_hook_to_module(last.mlp.gate_proj, Doubles())
        torch.manual_seed(4)
        model.add_adapter("b", LoraConfig(**options(target_modules=["o_proj"])))
        model.base_model.set_adapter(["default", "b"])

    change(models[1])
    expected = models[1](ids).logits
    with opake.patched(models[0]):
        change(models[0])
        assert close(models[0](ids).logits, expected)
        stats = fused(models[0])
        remove_hook_from_submodules(models[0])
    assert stats["lora_qkv"] == stats["lora_mlp"] == {"ran": 0, "fell_back": {HOOKED: 2}}


class Doubles(ModelHook):
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(2 * x for x in args), kwargs


@interpreted
def test_a_projection_of_another_tensor_or_one_more_is_peft_s() -> None:
    model, x = adapted(), torch.randn(1, 3, 32)
    attention = model.base_model.model.model.layers[0].self_attn

    def calls() -> list[Tensor]:
        found = [attention.k_proj(x)]
        found += [attention.q_proj(x), attention.q_proj(x), attention.k_proj(x + 0)]
        return [*found, attention.v_proj(x.add_(1))]

    stock = calls()
    x -= 1
    with opake.patched(model):
        found = lora_qkv._announce(calls, attention, (), {})
        stats = fused(model)
    assert all(map(close, found, stock))
    why = "a projection has another input, or one more"
    assert stats["lora_qkv"] == {"ran": 1, "fell_back": {why: 3}}
    assert stats["lora_w"]["ran"] == 3


@interpreted
def test_nothing_is_left_of_a_call_that_ended_or_raised() -> None:
    model, ids, seen = adapted(), zoo.tokens(), []
    attention = model.base_model.model.model.layers[0].self_attn
    watch = attention.register_forward_pre_hook(
        lambda module, args, given: seen.append(weakref.ref(given["hidden_states"])),
        with_kwargs=True,
    )
    expected = model(ids).logits.detach()
    with opake.patched(model):
        with torch.no_grad():
            model(ids)
        assert seen[-1]() is None
        fails = attention.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
        assert lora_qkv._CURRENT.group is None
        fails.remove()
        watch.remove()
        assert close(model(ids).logits, expected)
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda _: model(ids).logits, range(4)):
                assert close(found, expected)


@peft_names
@interpreted
def test_checkpointed_layers_have_the_loops_gradients() -> None:
    model, batch = adapted("qwen3"), zoo.batch(zoo.RIGHT)
    expected, stock = stock_loop(model, batch), step(model, **batch)
    truth = stock_loop(copy.deepcopy(model).double(), batch)
    enable(model.base_model.model, use_reentrant=False)
    with opake.patched(model):
        assert_close(step(model, **batch), model, stock, **batch)
        found = per_example(model, batch, batched=True)
        assert fused(model)["lora_qkv"]["ran"] == 8  # forward and again, in two kinds of steps
    assert_near(found, expected, truth)


@pytest.mark.parametrize("autocast", [True, False])
@interpreted
def test_half_precision_is_as_near_as_stocks(autocast: bool) -> None:
    round_bfloat16()
    model, batch = adapted(), zoo.batch()
    truth = step(copy.deepcopy(model).double(), **batch)
    if not autocast:  # adapters stay in fp32, as PEFT makes them for such a base
        for name, p in model.named_parameters():
            if "lora_" not in name:
                p.data = p.data.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        stock = step(model, **batch)
        with opake.patched(model):
            found = step(model, **batch)
            assert all(n["ran"] == 2 and not n["fell_back"] for n in fused(model).values())
    off = [0.0, 0.0]
    for name, expected in truth.items():
        assert found[name].dtype == stock[name].dtype
        for i, x in enumerate((found, stock)):
            size = expected.square().mean()
            off[i] += ((x[name].double() - expected).square().mean() / size).sqrt().item()
    assert off[0] <= 1.3 * off[1]


@interpreted
def test_compiled_without_a_break_and_copies_are_stock() -> None:
    model, ids = adapted().eval(), zoo.tokens()
    expected = model(ids, use_cache=False).logits
    with opake.patched(model):
        clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert close(compiled(ids, use_cache=False).logits, expected)
        assert all(n == {"ran": 0, "fell_back": {}} for n in fused(model).values())
    for clone in clones:
        assert not any(n.startswith("_opake") for m in clone.modules() for n in vars(m))
        assert same_bits(clone(ids, use_cache=False).logits, expected)


@interpreted
def test_weights_of_another_dtype_are_left_to_peft() -> None:
    model, x = adapted(), torch.randn(1, 3, 32)
    attention = model.base_model.model.model.layers[0].self_attn
    with opake.patched(model):
        attention.q_proj.base_layer.weight.data = attention.q_proj.weight.data.double()
        with pytest.raises(RuntimeError, match="dtype"):
            attention.q_proj(x)
        stats = fused(model)["lora_w"]
    assert stats == {"ran": 0, "fell_back": {"torch.float64 is computed by the reference": 1}}
