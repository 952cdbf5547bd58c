"""Stacked experts in models by one kernel: stock's numbers, and whatever changes is stock's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from interpreter import interpreted
from oracle import Snapshot, assert_exact, errors, per_example, same_bits, stock_loop
from test_experts import BAR, CASES, adapt, batch, experts_of, freeze_experts, make, noise
from test_kernels_in_models import FUSED_BAR
from test_moe_kernel import watched
from torch import Tensor, nn
from torch.func import grad, vmap
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

import opake
from opake import kernels as K
from opake.compat.tiny import tiny_config
from opake.engine import AttributePatch, ForwardPatch, PatchSet
from opake.plan import fused, grouped_moe
from opake.plan.guard import Guard

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def stats(model: Any) -> Any:
    return opake.guard_stats(model)["grouped_moe"]


def row(model: Any, **flags: Any) -> Any:
    return next(r for r in opake.check(model, **flags) if r.concern == "grouped_moe")


# ---- every class of experts

FITTING = [
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2_moe",
    "mellum",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "solar_open",
]
DECLINED = {
    "deepseek_v4": "DeepseekV4Experts.forward is another formula",
    "gpt_oss": "GptOssExperts: its experts have biases",
    "nemotron_h": "NemotronHExperts: its experts have no gate",
    "llama4_text": "Llama4TextExperts.forward is another formula",
}


@pytest.mark.parametrize("model_type", FITTING)
@interpreted
def test_experts_that_fit_are_right_in_every_implementation(model_type: str) -> None:
    try:
        module = experts_of(model_type)
    except ValueError as error:
        pytest.skip(f"not in this transformers: {error}")
    exact = copy.deepcopy(module)
    expected = computed(exact, torch.float64)
    module = module.float()
    for implementation in IMPLEMENTATIONS:
        module.config._experts_implementation = implementation
        guard, patches = fitted(module)
        with PatchSet(patches):
            found = computed(module, torch.float32)
        assert (guard.ran, guard.fell_back) == (2, {})
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= FUSED_BAR * b.abs().max()


def fitted(module: Any) -> tuple[Guard, list[Any]]:
    found = grouped_moe._examine(module)
    assert isinstance(found, fused.Found), found
    guard = Guard(None)
    site = fused.Site(guard, found.formula)
    slot = fused.slot("grouped_moe")
    return guard, [AttributePatch(module, slot, site, create=True), *found.patches]


def computed(module: Any, dtype: torch.dtype) -> list[Tensor]:
    """An output with gradients, of tokens that have an expert twice, given in both ways."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(6, 3, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(4, (6, 3), generator=generator)
    out = module(x, ids, weights)
    again = module(x, top_k_weights=weights, top_k_index=ids)
    leaves = [x, weights, *module.parameters()]
    return [out.detach(), again.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("model_type", DECLINED)
@interpreted
def test_experts_that_do_not_fit_are_named(model_type: str) -> None:
    assert grouped_moe._examine(experts_of(model_type)) == DECLINED[model_type]


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@interpreted
def test_a_module_that_was_changed_does_not_fit() -> None:
    model = make("batched_mm")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first.act_fn = nn.ReLU()
    second.forward = lambda *args: torch.zeros_like(args[0])
    found = row(model, compat=False)
    assert found.status == "skipped"
    for reason in ("no kernel for ReLU", "<lambda>"):
        assert reason in found.reason
    assert row(make(hidden_act="gelu")).status == "on"
    assert row(make(), grouped_moe=False).status == "off"
    assert row(make(), kernels=["moe"]).status == "on"


# ---- the numbers of a model


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore what PEFT's own use of transformers warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_gradients_are_those_of_the_loop(case: str) -> None:
    build, data, options = CASES[case]
    impl = IMPLEMENTATIONS[[*CASES].index(case) % 3]
    with quiet():
        model, examples = build(impl, torch.float32), data()
    expected = stock_loop(model, examples, **options)
    rounding = noise(model, examples, expected, **options)
    before = Snapshot(model)
    with opake.patched(model, kernels=["moe"]):
        found = per_example(model, examples, batched=False, **options)
        assert stats(model) == {"ran": 2, "fell_back": {}}
    floor = 0.1 if case == "one token" else 1e-3
    assert_exact(found, expected, noise=max(rounding, BAR / 3), floor=floor)
    assert before.changes() == []


OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "minimax": {},
    "qwen2_moe": {},
}
"""Models of no declared family."""


@pytest.mark.parametrize("model_type", OTHERS)
@interpreted
def test_a_model_of_no_declared_family(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    fields: dict[str, Any] = {"vocab_size": zoo.VOCAB, "pad_token_id": zoo.PAD, "bos_token_id": 1}
    fields |= {"eos_token_id": 2, "initializer_range": 0.3, "experts_implementation": "batched_mm"}
    fields |= dict.fromkeys(zoo.probabilities(config), 0.0)
    config = tiny_config(config, **fields, **OTHERS[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
    examples, ids = zoo.batch(zoo.MIXED), zoo.tokens(2)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": zoo.PAD}
    expected, ordinary = stock_loop(model, examples), step(model, examples)
    tokens = model.eval().generate(ids, **options)
    before = Snapshot(model)
    with opake.patched(model, kernels=["moe"]):
        assert torch.equal(model.generate(ids, **options), tokens)
        found = per_example(model.train(), examples, batched=False)
        again = step(model, examples)
        counts = stats(model)
        model.eval()
    assert before.changes() == []
    assert counts["ran"] > 0
    assert counts["fell_back"] == {}
    assert errors(found, expected)[1] <= BAR
    for a, b in zip(again, ordinary, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "silu"])
@interpreted
def test_the_activation_is_the_configs(hidden_act: str) -> None:
    model, examples = make("batched_mm", hidden_act=hidden_act), batch()
    expected = stock_loop(model, examples)
    with opake.patched(model, kernels=["moe"]):
        found = per_example(model, examples, batched=True)
        assert stats(model)["ran"] == 2
    assert errors(found, expected)[1] <= BAR


def step(model: Any, examples: dict[str, Tensor]) -> list[Tensor]:
    """The logits and all gradients of an ordinary step."""
    with torch.enable_grad():
        out = model(**examples)
        leaves = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
        return [out.logits.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@interpreted
def test_an_ordinary_step_and_without_gradients(impl: str) -> None:
    model, examples = make(impl), batch()
    with torch.no_grad():
        expected = [model(**examples).logits, *step(model, examples)]
    with opake.patched(model, kernels=["moe"]):
        with torch.no_grad():
            found = [model(**examples).logits, *step(model, examples)]
        assert stats(model) == {"ran": 4, "fell_back": {}}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@interpreted
def test_frozen_experts_cost_no_gradient() -> None:
    model, examples = freeze_experts(make("batched_mm")), batch()
    for frozen in (True, False):
        with opake.patched(model, kernels=["moe"]), watched() as launches:
            per_example(model, examples, batched=False)
            model(**examples).loss.backward()
            assert stats(model)["ran"] == 4
        names = [name for name, _ in launches]
        assert names.count("moe_weight_kernel") == (0 if frozen else 8)
        for parameter in model.parameters():
            parameter.requires_grad_(True)


# ---- what changes after the scope was opened


def replaced_activation(model: Any) -> Any:
    model.model.layers[0].mlp.experts.act_fn = nn.ReLU()
    return nullcontext()


def hooked_activation(model: Any) -> Any:
    act_fn = model.model.layers[0].mlp.experts.act_fn
    act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    return nullcontext()


def replaced_gate(model: Any) -> Any:
    experts = model.model.layers[0].mlp.experts
    experts._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[1]
    return nullcontext()


def layered_gate(model: Any) -> Any:
    experts = model.model.layers[0].mlp.experts
    return PatchSet([ForwardPatch(experts, _twice, slot="_apply_gate")])


def another_function(model: Any) -> Any:
    stack = ExitStack()
    moe.ALL_EXPERTS_FUNCTIONS["batched_mm"] = _halved
    stack.callback(moe.ALL_EXPERTS_FUNCTIONS.__delitem__, "batched_mm")
    return stack


def another_implementation(model: Any) -> Any:
    moe.ALL_EXPERTS_FUNCTIONS["halved"] = _halved
    for layer in model.model.layers:
        layer.mlp.experts.config._experts_implementation = "halved"
    stack = ExitStack()
    stack.callback(moe.ALL_EXPERTS_FUNCTIONS.__delitem__, "halved")
    return stack


def doubles(model: Any) -> Any:
    model.double()
    return nullcontext()


def _twice(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return 2 * wrapped(*args, **kwargs)


def _halved(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    return 0.5 * moe.batched_mm_experts_forward(self, *args, **kwargs)


CHANGES: dict[str, tuple[Callable[[Any], AbstractContextManager[Any]], dict[str, int]]] = {
    "the activation is replaced": (
        replaced_activation,
        {"the activation has hooks, or is another one now": 1},
    ),
    "the activation is hooked": (
        hooked_activation,
        {"the activation has hooks, or is another one now": 1},
    ),
    "the gate is replaced": (replaced_gate, {"the gate was replaced": 1}),
    "a layer over the gate": (layered_gate, {"the gate was replaced": 1}),
    "batched_mm is another function": (
        another_function,
        {"experts_implementation='batched_mm'": 2},
    ),
    "another implementation": (another_implementation, {"experts_implementation='halved'": 2}),
    "another dtype": (doubles, {"torch.float64 is computed by the reference": 2}),
}


@pytest.mark.parametrize("name", CHANGES)
@interpreted
def test_what_changes_inside_the_scope_runs_stocks_code(name: str) -> None:
    change, reasons = CHANGES[name]
    stock, model, examples = make("batched_mm"), make("batched_mm"), batch()
    plain = stock(**examples).logits
    with change(stock):
        expected = step(stock, examples)
    assert not torch.equal(expected[0], plain.to(expected[0].dtype))
    with opake.patched(model, kernels=["moe"]), change(model):
        found = step(model, examples)
        assert stats(model) == {"ran": 2 - sum(reasons.values()), "fell_back": reasons}
        rows = per_example(model, examples, batched=False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    means = [g.mean(0) for g in rows.grads.values()]
    for a, b in zip(means, expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@interpreted
def test_autocast(impl: str) -> None:
    model, examples = make(impl), batch()
    truth = stock_loop(make("eager", torch.float64), examples)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_loop(model, examples)
        with opake.patched(model, kernels=["moe"]):
            found = per_example(model, examples, batched=False)
            counts = stats(model)
    ours, stocks = ([*errors(result, truth)] for result in (found, expected))
    assert all(a <= 2 * b + 2**-8 for a, b in zip(ours, stocks, strict=True))
    unreached = {"autocast does not reach grouped_mm": 2}
    out = impl == "grouped_mm"
    assert counts == {"ran": 0 if out else 2, "fell_back": unreached if out else {}}


@interpreted
def test_half_precision_is_as_near_as_stocks() -> None:
    truth = stock_loop(make("eager", torch.float64), batch())
    for impl in IMPLEMENTATIONS:
        exact, model = make("eager", torch.float64), make(impl, torch.bfloat16)
        exact.load_state_dict(model.state_dict())
        truth, expected = stock_loop(exact, batch()), stock_loop(model, batch())
        with opake.patched(model, kernels=["moe"]):
            found = per_example(model, batch(), batched=False)
            assert stats(model)["ran"] == 2
        ours, stocks = ([*errors(result, truth)] for result in (found, expected))
        assert all(a <= 2 * b + 2**-8 for a, b in zip(ours, stocks, strict=True))


# ---- numbers that name no expert


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@interpreted
def test_numbers_that_name_no_expert(impl: str) -> None:
    model = make(impl)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(3, 16), torch.rand(3, 2)
    ids = torch.tensor([[0, 4], [1, 2], [4, 4]])
    nobody = ids == 4
    expected = experts(x, ids.masked_fill(nobody, 0), weights.masked_fill(nobody, 0))
    with opake.patched(model, kernels=["moe"]):
        if impl != "eager" and not getattr(experts, "_is_expert_parallel", True):
            with pytest.raises(IndexError):
                experts(x, ids, weights)
        experts._is_expert_parallel = True  # the rest of them are elsewhere
        found = experts(x, ids, weights)
        assert stats(model) == {"ran": 1, "fell_back": {}}
        rows = vmap(lambda x: experts(x, ids, weights))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[0], expected, rtol=1e-4, atol=1e-4)


@interpreted
def test_experts_of_which_the_module_has_a_part_only() -> None:
    model = make("eager")
    experts = model.model.layers[0].mlp.experts
    experts.num_experts = 2  # of the four whose weights are there
    x, weights, ids = torch.randn(3, 16), torch.rand(3, 2), torch.tensor([[0, 1], [1, 0], [1, 1]])
    expected = experts(x, ids, weights)
    with opake.patched(model, kernels=["moe"]):
        assert same_bits(experts(x, ids, weights), expected)
        assert stats(model)["fell_back"] == {"tokens or weights of other shapes": 1}


# ---- whether it pays


@interpreted
def test_the_work_decides_not_the_size_of_the_weights() -> None:
    model, ids = make("batched_mm"), torch.tensor([[3, 5]])
    slots, weights = 2 * 2, 3 * 16 * 24
    for limit, runs in ((slots * weights, True), (slots * weights + 1, False)):
        with opake.patched(model, kernels=["moe"], min_elements=limit):
            model(ids)
            counts = stats(model)
        few = {f"fewer than {limit} elements: fusion does not pay": 2}
        assert counts == {"ran": 2 * runs, "fell_back": {} if runs else few}
    with opake.patched(model, kernels=["moe"], min_elements=3 * slots * weights):
        # Three examples at once are three times the work.
        rows = {name: torch.cat([ids] * 3) for name in ("input_ids", "labels")}
        per_example(model, rows, batched=False)
        assert stats(model) == {"ran": 2, "fell_back": {}}


def test_the_work_of_examples_that_share_their_tokens() -> None:
    x, gate_up, down = torch.randn(5, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 3)
    ids, weights = torch.zeros(2, 5, 2, dtype=torch.long), torch.ones(5, 2)
    seen: list[int] = []

    def loss(x: Tensor, ids: Tensor) -> Tensor:
        seen.append(K.find("moe").work(x, gate_up, down, ids, weights))
        return x.sum()

    vmap(grad(loss), (None, 0))(x, ids)
    vmap(grad(loss), (0, None))(torch.stack([x] * 3), ids[0])
    loss(x, ids[0])
    assert seen == [2 * 10 * 36, 3 * 10 * 36, 10 * 36]


# ---- what lies above and beneath


@pytest.mark.parametrize("order", ["beneath", "above"])
@interpreted
def test_a_layer_of_the_users_runs(order: str) -> None:
    model, examples = make("batched_mm"), batch()
    experts = [layer.mlp.experts for layer in model.model.layers]
    mine = PatchSet([ForwardPatch(module, _twice) for module in experts])
    with mine:
        expected = model(**examples).logits
    scope = opake.patched(model, kernels=["moe"])
    before = Snapshot(model)
    with ExitStack() as stack:
        for context in (mine, scope) if order == "beneath" else (scope, mine):
            stack.enter_context(context)
        found = model(**examples).logits
        counts = stats(model)
    assert before.changes() == []
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    beneath = {"another wrapper lies beneath": 2}
    # The scope puts what lets vmap map experts beneath what was there, and the kernel above it.
    assert counts["fell_back"] == (beneath if order == "beneath" else {})


@pytest.mark.parametrize("leaves", [0, 1])
@interpreted
def test_two_scopes_in_any_order(leaves: int) -> None:
    model, examples = make("eager"), batch()
    expected = stock_loop(model, examples)
    logits = model(**examples).logits
    before = Snapshot(model)
    scopes = [opake.patch(inner, kernels=["moe"]) for inner in (model, model.model)]
    found = per_example(model, examples, batched=False)
    assert errors(found, expected)[1] <= BAR
    for scope in (scopes[leaves], scopes[1 - leaves]):
        with watched() as launches:
            torch.testing.assert_close(model(**examples).logits, logits, rtol=1e-4, atol=1e-4)
        assert [name for name, _ in launches].count("moe_up_kernel") == 2
        scope.unpatch()
    assert before.changes() == []
    assert same_bits(model(**examples).logits, logits)


class _Halves(ModelHook):
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (0.5 * args[0], *args[1:]), kwargs


@pytest.mark.parametrize("order", ["before", "inside"])
@interpreted
def test_under_a_hook_of_accelerate(order: str) -> None:
    model, stock, examples = make("eager"), make("eager"), batch()
    for layer in stock.model.layers:
        add_hook_to_module(layer.mlp.experts, _Halves())
    expected = stock(**examples).logits
    with ExitStack() as stack:
        if order == "inside":
            stack.enter_context(opake.patched(model, kernels=["moe"]))
        for layer in model.model.layers:
            add_hook_to_module(layer.mlp.experts, _Halves())
        if order == "before":
            stack.enter_context(opake.patched(model, kernels=["moe"]))
        found = model(**examples).logits
        assert stats(model) == {"ran": 2, "fell_back": {}}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert same_bits(model(**examples).logits, expected)


@interpreted
def test_adapted_experts_that_are_disabled_or_merged() -> None:
    with quiet():
        model = adapt(make("batched_mm"), target_parameters=["mlp.experts.gate_up_proj"])
    examples = batch()

    def logits() -> list[Tensor]:
        found = [model(**examples).logits]
        with model.disable_adapter():
            found.append(model(**examples).logits)
        return found

    expected = logits()
    assert not torch.allclose(*expected)
    with opake.patched(model, kernels=["moe"]):
        found = logits()
        assert stats(model) == {"ran": 4, "fell_back": {}}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@interpreted
def test_compiled() -> None:
    model, ids = make("batched_mm").eval(), batch()["input_ids"]
    expected = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    with opake.patched(model, kernels=["moe"]):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(ids, use_cache=False).logits
        assert stats(model)["ran"] == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
