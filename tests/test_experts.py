"""Mixtures of experts under functorch inside a scope: stock's numbers, one example at a time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import traits
import zoo
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from oracle import (
    Result,
    Snapshot,
    assert_exact,
    errors,
    peak_memory,
    per_example,
    same_bits,
    stock_loop,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
from torch.nn import functional as F
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM
from transformers.integrations import moe
from zoo import VOCAB

import opake
from opake.compat.experts import eager, grouped_linear, grouped_outer, is_stacked

BAR = 1e-4
"""Largest error of a gradient in fp32: stock's own implementations differ by as much where the
gradients of a router cancel."""
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]

implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
# torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def make(impl: str = "eager", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A mixtral of two layers whose weights are large enough for tokens to part ways."""
    torch.manual_seed(0)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
    }
    config = MixtralConfig(**{**small, **fields}, experts_implementation=impl)
    return MixtralForCausalLM(config).to(dtype)


def batch(size: int = 4, length: int = 6, *, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def padded() -> dict[str, Tensor]:
    mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).long()
    made = batch()
    return {**made, "labels": made["labels"].where(mask == 1, -100), "attention_mask": mask}


def freeze_experts(model: Any) -> Any:
    for module in filter(is_stacked, model.modules()):
        module.requires_grad_(False)
    return model


def tie_experts(model: Any) -> Any:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    return model


def adapt(model: Any, **config: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **config))


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "plain": (make, batch, {}),
    "padding and a loss of the router": (make, padded, {"output_router_logits": True}),
    "a loss of the router": (make, batch, {"output_router_logits": True}),
    "every expert": (lambda impl, dt: make(impl, dt, num_experts_per_tok=4), batch, {}),
    "one expert": (lambda impl, dt: make(impl, dt, num_experts_per_tok=1), batch, {}),
    "experts that nobody chose": (
        lambda impl, dt: make(impl, dt, num_local_experts=16),
        lambda: batch(length=2),
        {},
    ),
    "all tokens to one expert": (
        lambda impl, dt: make(impl, dt, num_experts_per_tok=1),
        lambda: {name: x[:, :1].repeat(1, 6) for name, x in batch().items()},
        {},
    ),
    "one token": (make, lambda: {**batch(length=1), "shift_labels": batch()["labels"][:, :1]}, {}),
    "one example": (make, lambda: batch(size=1), {}),
    "a window": (lambda impl, dt: make(impl, dt, sliding_window=3), padded, {}),
    "tuples": (make, batch, {"return_dict": False}),
    "frozen experts": (lambda impl, dt: freeze_experts(make(impl, dt)), batch, {}),
    "tied experts": (lambda impl, dt: tie_experts(make(impl, dt)), batch, {}),
    "LoRA on attention": (
        lambda impl, dt: adapt(make(impl, dt), target_modules=["q_proj", "o_proj"]),
        padded,
        {},
    ),
    "LoRA on the experts": (
        lambda impl, dt: adapt(make(impl, dt), target_parameters=FUSED),
        padded,
        {},
    ),
    "LoRA on one parameter and a trained head": (
        lambda impl, dt: adapt(
            make(impl, dt), target_parameters=FUSED[1:], modules_to_save=["lm_head"]
        ),
        batch,
        {},
    ),
}


def two_adapters(impl: str, dtype: torch.dtype) -> Any:
    model = adapt(make(impl, dtype), target_parameters=FUSED)
    config = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, target_parameters=FUSED)
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    return model


CASES["two adapters on the experts"] = (two_adapters, batch, {})


def noise(model: Any, examples: dict[str, Tensor], expected: Result, **options: Any) -> float:
    """How far stock's own gradients in fp32 are from those in fp64."""
    exact = copy.deepcopy(model).double()
    getattr(exact, "base_model", exact).set_experts_implementation("eager")
    return errors(expected, stock_loop(exact, examples, **options))[1]


@implementations
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_loop(impl: str, case: str) -> None:
    build, data, options = CASES[case]
    model, examples = build(impl, torch.float32), data()
    expected = stock_loop(model, examples, **options)
    rounding = noise(model, examples, expected, **options)
    before = Snapshot(model)
    with opake.patched(model):
        found = per_example(model, examples, batched=False, **options)
    # Softmax over one key is constant: of the gradients of q and k only rounding is left.
    floor = 0.1 if case == "one token" else 1e-3
    assert_exact(found, expected, noise=max(rounding, BAR / 3), floor=floor)
    assert before.changes() == []


# Stock's grouped GEMM takes no fp64.
@pytest.mark.parametrize("impl", ["eager", "batched_mm"])
@pytest.mark.parametrize("case", CASES)
def test_fp64_gradients_are_those_of_the_loop(impl: str, case: str) -> None:
    build, data, options = CASES[case]
    model, examples = build(impl, torch.float64), data()
    expected = stock_loop(model, examples, **options)
    with opake.patched(model):
        assert_exact(per_example(model, examples, batched=True, **options), expected)


def chosen(case: str) -> list[int]:
    """How many different experts each example of a case chose, in the first layer."""
    build, data, _ = CASES[case]
    model, counts = build("eager", torch.float32), []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda m, args: counts.append(len(args[1].unique())))
    for ids in data()["input_ids"].split(1):
        model(ids)
    return counts


def test_the_cases_are_what_they_say() -> None:
    assert chosen("every expert") == [4] * 4
    assert chosen("all tokens to one expert") == [1] * 4
    assert max(chosen("experts that nobody chose")) <= 4 < 16


@implementations
def test_bf16_rounds_as_stock_does(impl: str) -> None:
    model, exact = make(impl, torch.bfloat16), make("eager", torch.float64)
    exact.load_state_dict(model.state_dict())
    truth = stock_loop(exact, batch())
    expected = stock_loop(model, batch())
    with opake.patched(model):
        found = per_example(model, batch(), batched=False)
    ours, stocks = ([*errors(result, truth)] for result in (found, expected))
    # As far from the truth as stock, but for the luck of single roundings.
    assert all(a <= 2 * b + 2**-8 for a, b in zip(ours, stocks, strict=True))


@implementations
def test_autocast(impl: str) -> None:
    model = make(impl)
    exact = make("eager", torch.float64)
    truth = stock_loop(exact, batch())
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock_loop(model, batch())
        with opake.patched(model):
            found = per_example(model, batch(), batched=False)
    ours, stocks = ([*errors(result, truth)] for result in (found, expected))
    assert all(a <= 2 * b + 2**-8 for a, b in zip(ours, stocks, strict=True))


@implementations
def test_jitter_in_training_is_drawn_as_stock_draws_it(impl: str) -> None:
    model = make(impl, router_jitter_noise=0.2).train()
    expected = stock_loop(model, batch(), seed=5)
    calm = stock_loop(model.eval(), batch())
    model.train()
    torch.manual_seed(5)
    with opake.patched(model):
        found = per_example(model, batch(), batched=False, randomness="same")
    assert_exact(found, expected)
    assert errors(found, calm)[1] > 1e-3  # the noise did something


@implementations
def test_a_row_does_not_depend_on_its_neighbours(impl: str) -> None:
    model, one, other = make(impl), batch(), batch(seed=2)
    for name, x in other.items():
        x[1] = one[name][1]
    with opake.patched(model):
        first = per_example(model, one, batched=False)
        second = per_example(model, other, batched=False)
    if impl == "eager":  # one GEMM for all examples: where it splits, it rounds
        row = [
            type(r)(r.losses[1:2], {n: g[1:2] for n, g in r.grads.items()}) for r in (first, second)
        ]
        assert_exact(*row)
    else:
        assert same_bits(first.row(1), second.row(1))


@implementations
def test_outside_transforms_stock_runs(impl: str) -> None:
    for model in (make(impl), adapt(make(impl), target_parameters=FUSED)):
        examples = padded()
        stock = model(**examples, output_router_logits=True, use_cache=False)
        stock_grads = torch.autograd.grad(
            stock.loss, [p for p in model.parameters() if p.requires_grad]
        )
        with opake.patched(model):
            ours = model(**examples, output_router_logits=True, use_cache=False)
            grads = torch.autograd.grad(
                ours.loss, [p for p in model.parameters() if p.requires_grad]
            )
        assert same_bits(dict(ours), dict(stock))
        assert same_bits(grads, stock_grads)


def test_the_implementation_set_inside_the_scope_counts() -> None:
    model = make("batched_mm")
    expected = stock_loop(model, batch())
    with opake.patched(model):
        model.set_experts_implementation("eager")
        assert_exact(per_example(model, batch(), batched=False), expected)
    assert model.config._experts_implementation == "eager"


class Rescaling(ModelHook):
    """Rescales the tokens that the experts get, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_stacked(module):
            self.calls += 1
            args = (args[0] * 3, *args[1:])
        return args, kwargs


@implementations
@pytest.mark.parametrize("everywhere", [False, True])
def test_under_the_hooks_of_accelerate(everywhere: bool, impl: str) -> None:
    dtype = torch.float32 if impl == "grouped_mm" else torch.float64
    model, hook = make(impl, dtype, output_router_logits=True), Rescaling()
    plain = stock_loop(model, padded())
    for module in model.modules() if everywhere else [model]:
        add_hook_to_module(module, hook)
    expected = stock_loop(model, padded())
    assert hook.calls == 4 * 2 * everywhere
    hook.calls = 0
    assert (errors(expected, plain)[1] > 0.1) == everywhere
    before = Snapshot(model)
    with opake.patched(model):
        found = per_example(model, padded(), batched=False)
    assert_exact(found, expected, **({"noise": BAR / 3} if impl == "grouped_mm" else {}))
    assert hook.calls == 2 * everywhere  # one call for all examples
    assert before.changes() == []


class Layer:
    """A layer of the user's: rescales the tokens that the experts get, and counts the calls."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        modules = filter(is_stacked, model.modules())
        self.patches = opake.PatchSet([opake.ForwardPatch(m, self) for m in modules])

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return wrapped(args[0] * 3, *args[1:], **kwargs)


ORDERS = ["under the scope", "over the scope", "between two scopes", "left inside"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_of_the_users_stays(order: str) -> None:
    model = make(dtype=torch.float64)
    layer, scopes = Layer(model), [opake.patched(model), opake.patched(model.model)]
    before = Snapshot(model)
    plain = stock_loop(model, batch())
    hooks = [
        module.register_forward_pre_hook(lambda m, args: (args[0] * 3, *args[1:]))
        for module in filter(is_stacked, model.modules())
    ]
    expected = stock_loop(model, batch())
    for hook in hooks:
        hook.remove()
    assert errors(expected, plain)[1] > 0.1
    with ExitStack() as stack:
        if order == "over the scope":
            stack.enter_context(scopes[0])
        if order == "between two scopes":
            stack.enter_context(scopes[1])
        stack.enter_context(layer.patches)
        if order != "over the scope":
            stack.enter_context(scopes[0])
        assert_exact(per_example(model, batch(), batched=False), expected)
        assert layer.calls == 2
        if order == "left inside":
            stack.pop_all()
            layer.patches.__exit__(None, None, None)
            assert_exact(per_example(model, batch(), batched=False), plain)
            scopes[0].__exit__(None, None, None)
    assert before.changes() == []
    assert_exact(stock_loop(model, batch()), plain)


def test_a_layer_that_hides_the_stock_forward_is_named() -> None:
    model = make(dtype=torch.float64)
    layer = Layer(model)
    with layer.patches:
        for module in filter(is_stacked, model.modules()):
            add_hook_to_module(module, ModelHook())
        with opake.patched(model):
            with pytest.raises(opake.errors.ForeignWrite, match=r"MixtralExperts\.forward was wra"):
                per_example(model, batch(), batched=False)
            layer.calls = 0
            model.set_experts_implementation("batched_mm")
            per_example(model, batch(), batched=False)
            assert layer.calls == 2
            model.set_experts_implementation("eager")
            with opake.patched(model.model):
                pass
        for module in filter(is_stacked, model.modules()):
            remove_hook_from_module(module)


def test_two_scopes_and_a_hook_between_them() -> None:
    model, hook = make(dtype=torch.float64), Rescaling()
    plain = stock_loop(model, batch())
    for module in filter(is_stacked, model.modules()):  # accelerate leaves something behind
        remove_hook_from_module(add_hook_to_module(module, ModelHook()))
    before = Snapshot(model)
    with opake.patched(model):
        for module in filter(is_stacked, model.modules()):
            add_hook_to_module(module, hook)
        with opake.patched(model.model):
            found = per_example(model, batch(), batched=False)
            assert hook.calls == 2
        assert_exact(per_example(model, batch(), batched=False), found)
    assert_exact(found, stock_loop(model, batch()))
    for module in filter(is_stacked, model.modules()):
        remove_hook_from_module(module)
    assert before.changes() == []
    assert_exact(stock_loop(model, batch()), plain)


def test_autocast_leaves_fp64_alone() -> None:
    model = make(dtype=torch.float64)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(2, 3, 16).double(), torch.rand(2, 3, 2).double()
    ids = torch.tensor([[[0, 1], [1, 2], [3, 0]], [[3, 1], [1, 0], [2, 3]]])
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.stack([experts(*row) for row in zip(x, ids, weights, strict=True)])
        with opake.patched(model):
            found = vmap(experts)(x, ids, weights)
    assert found.dtype == expected.dtype == torch.float64
    # Sums of a few dozen fp64 products: 1e-12 is thousands of ulps.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_under_mixed_precision_of_accelerate() -> None:
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(make())
    expected = stock_loop(model, batch())
    truth = stock_loop(make(dtype=torch.float64), batch())
    with opake.patched(model):
        found = per_example(model, batch(), batched=False)
    ours, stocks = ([*errors(result, truth)] for result in (found, expected))
    assert all(a <= 2 * b + 2**-8 for a, b in zip(ours, stocks, strict=True))


def test_another_model_is_not_affected() -> None:
    model, other = make(), make()
    with opake.patched(model), pytest.raises(RuntimeError, match="data-dependent"):
        per_example(other, batch(), batched=True)


def test_disabled_and_merged_adapters() -> None:
    model = adapt(make(), target_parameters=FUSED, target_modules=["q_proj"])
    with model.disable_adapter():
        expected = [model(**batch()).logits.detach()]
    model.merge_adapter()
    expected.append(model(**batch()).logits.detach())
    model.unmerge_adapter()

    def logits() -> Tensor:
        return vmap(lambda ids: model(input_ids=ids).logits)(batch()["input_ids"]).detach()

    with opake.patched(model):
        with model.disable_adapter():
            found = [logits()]
        model.merge_adapter()
        found.append(logits())
        model.unmerge_adapter()
    torch.testing.assert_close(found, expected)


def test_an_exception_in_the_experts_leaves_the_adapted_weight_in_place() -> None:
    model = adapt(make(), target_parameters=FUSED)
    before = Snapshot(model)
    with opake.patched(model):
        experts = next(filter(is_stacked, model.modules()))
        handle = experts.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            per_example(model, batch(), batched=False)
        handle.remove()
        expected = per_example(model, batch(), batched=False)
    assert before.changes() == []
    assert_exact(expected, stock_loop(model, batch()))


def test_memory_is_that_of_the_chosen_experts() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    peaks = {}
    for impl in ("eager", "batched_mm"):
        model = freeze_experts(make(impl, **shape, num_local_experts=32, num_experts_per_tok=4))
        with opake.patched(model), torch.no_grad(), peak_memory() as peak:
            per_example(model, batch(length=64), batched=False)
        peaks[impl] = peak()
    # The weights that batched_mm gathers, per pair of a token and an expert: 3 * H * I floats.
    assert peaks["batched_mm"] > 4 * 64 * 4 * (2 * 64 * 64) * 4
    assert peaks["eager"] < peaks["batched_mm"] / 4


def test_explain(make_llama: Callable[..., Any]) -> None:
    def row(model: Any, concern: str) -> Any:
        return next(row for row in opake.check(model) if row.concern == concern)

    dense = row(make_llama(), "moe")
    assert (dense.status, dense.reason) == ("skipped", "the model has no experts")
    sparse = row(make("batched_mm"), "moe")
    target = "MixtralExperts.forward, MixtralForCausalLM.forward"
    assert (sparse.status, sparse.count, sparse.target) == ("on", 2 + 1, target)
    assert "batched_mm" in sparse.reason
    adapted = row(adapt(make(), target_parameters=FUSED), "moe")
    assert adapted.count == 2 + 4 + 1
    assert "ParamWrapper._activate_lora" in adapted.target
    assert row(make(), "vmap_grouped_mm").status == "on"
    dense = row(make_llama(), "vmap_grouped_mm")
    assert (dense.status, dense.reason) == ("skipped", "the model has no experts")
    stock = moe._can_use_grouped_mm
    with opake.patched(make_llama()):
        assert moe._can_use_grouped_mm is stock
    with opake.patched(make(), moe=False) as scope:
        assert next(r for r in scope.explain() if r.concern == "moe").status == "off"


# ---- every class of experts

STACKED = [name for name in zoo.FIELDS if traits.has_experts(name)] + ["nemotron_h"]
"""Biases, transposed and interleaved weights, gates of their own and, in one that is of no family
here, none at all."""


def experts_of(model_type: str) -> Any:
    config_class = type(AutoConfig.for_model(model_type))
    name = config_class.__module__.replace("configuration", "modeling")
    __import__(name)
    classes = [c for n, c in vars(sys.modules[name]).items() if n.endswith("Experts")]
    cls = next((c for c in classes if c.__module__ == name), None)
    assert cls is not None, f"{name} has no class of experts"
    torch.manual_seed(0)
    config = config_class()
    for field in vars(config):
        if field.endswith("intermediate_size") or field == "moe_latent_size":
            setattr(config, field, 6)
        if field in ("num_experts", "num_local_experts", "n_routed_experts"):
            setattr(config, field, 4)
    config.hidden_size = 8
    if hasattr(config, "moe_latent_size"):
        config.moe_latent_size = None
    config._experts_implementation = "eager"
    module = cls(config).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("model_type", STACKED)
def test_experts_of_every_layout(model_type: str) -> None:
    module = experts_of(model_type)
    if not is_stacked(module):
        pytest.skip(f"stock {model_type} runs all experts on every token, which vmap can map")
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(15)]).view(3, 5, 3)
    weights = torch.rand(3, 5, 3, dtype=torch.float64)
    held = dict(module.named_parameters())
    expected = []
    for row in zip(x, ids, weights, strict=True):
        leaves = [row[0].clone().requires_grad_(), row[2].clone().requires_grad_()]
        y = module(leaves[0], row[1], leaves[1])
        grads = torch.autograd.grad(y.square().sum(), [*leaves, *held.values()])
        expected.append([y.detach(), *grads])

    def loss(x: Tensor, weights: Tensor, held: dict[str, Tensor], ids: Tensor) -> Any:
        y = functional_call(module, held, (x, ids, weights))
        return y.square().sum(), y

    with opake.PatchSet([opake.ForwardPatch(module, _as_eager)]):
        rows = vmap(grad(loss, argnums=(0, 1, 2), has_aux=True), in_dims=(0, 0, None, 0))
        (of_x, of_weights, of_held), y = rows(
            x, weights, {name: p.detach() for name, p in held.items()}, ids
        )
    found = [y, of_x, of_weights, *of_held.values()]
    for a, b in zip(found, zip(*expected, strict=True), strict=True):
        b = torch.stack(b)
        # A handful of fp64 products: 1e-12 is thousands of ulps.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


def _as_eager(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return eager(instance, *args, **kwargs)


def test_nobody_is_asked_for_an_expert_that_does_not_exist() -> None:
    """Under expert parallelism a number past the last expert means one of another device."""
    module = make(dtype=torch.float64).model.layers[0].mlp.experts
    x, weights = torch.randn(2, 3, 16).double(), torch.rand(2, 3, 2).double()
    ids = torch.tensor([[[0, 4], [1, 2], [4, 4]], [[3, 1], [4, 0], [2, 4]]])
    nobody = ids == 4
    some = zip(x, ids.where(~nobody, 0), weights.where(~nobody, 0), strict=True)
    expected = torch.stack([module(*row) for row in some])
    found = vmap(lambda *row: eager(module, *row))(x, ids, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not found[0, 2].any()


# ---- the grouped GEMM itself


def reference(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("ti,tio->to", x, weight[ids])


def operands(*, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=requires_grad)
    weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=requires_grad)
    return x, weight, torch.tensor([2, 0, 2, 3, 0])


@forward_mode
def test_grouped_linear_can_be_differentiated_any_number_of_times() -> None:
    x, weight, ids = operands(requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return grouped_linear(x, weight, ids)

    torch.testing.assert_close(function(x, weight), reference(x, weight, ids))
    assert gradcheck(function, (x, weight), check_forward_ad=True)
    assert gradgradcheck(function, (x, weight))
    z = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, z: grouped_outer(x, z, ids, 4), (x, z), check_forward_ad=True)
    assert gradgradcheck(lambda x, z: grouped_outer(x, z, ids, 4), (x, z))


@forward_mode
def test_transforms_stack() -> None:
    x, weight, ids = operands()

    def scalar(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, weight: f(x, weight, ids).sin().sum()

    for transform in (
        lambda f: hessian(f, argnums=(0, 1)),
        lambda f: jacfwd(grad(f, argnums=1), argnums=0),
        lambda f: grad(lambda *a: grad(f, argnums=1)(*a).square().sum(), argnums=(0, 1)),
        lambda f: lambda x, w: jvp(f, (x, w), (w.sum(-1)[ids] * x, w.cos())),
        lambda f: lambda x, w: vmap(grad(f, argnums=(0, 1)), (None, 0))(x, torch.stack([w, 2 * w])),
        lambda f: (
            lambda x, w: vmap(vmap(f, (0, None)), (None, 0))(
                torch.stack([x, x.exp()]), torch.stack([w, 2 * w, -w])
            )
        ),
    ):
        found, expected = (transform(scalar(f))(x, weight) for f in (grouped_linear, reference))
        torch.testing.assert_close(found, expected)


def test_no_tokens() -> None:
    _, weight, ids = operands()
    x = torch.empty(0, 3, dtype=torch.float64)
    assert grouped_linear(x, weight, ids[:0]).shape == (0, 2)
    rows = vmap(grouped_linear, (0, None, 0))(x.expand(2, 0, 3), weight, ids[:0].expand(2, 0))
    assert rows.shape == (2, 0, 2)
    assert not grouped_outer(x, x, ids[:0], 4).any()


def test_one_matrix_product_for_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    mm = torch.mm

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[0]))
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counting)
    x, weight, ids = operands()
    vmap(grouped_linear, (0, None, 0))(x.expand(7, 5, 3), weight, ids.expand(7, 5))
    assert calls == [14, 14, 7]


# ---- may the grouped GEMM of torch be used?


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers see a torch whose grouped GEMM wants aligned memory on the CPU."""
    monkeypatch.setattr(moe, "is_torch_less_or_equal", lambda v, **_: v == "2.10.0")


def grouped(impl: str = "grouped_mm") -> Any:
    return per_example(make(impl), batch(), batched=True)


@pytest.mark.usefixtures("old_torch")
def test_no_data_pointer_is_asked_for_under_a_transform() -> None:
    with pytest.raises(RuntimeError, match="data"):
        grouped()
    stock = moe._can_use_grouped_mm
    model = make("grouped_mm")
    expected = stock_loop(model, batch())
    with opake.patched(model):
        assert moe._can_use_grouped_mm is not stock
        assert_exact(per_example(model, batch(), batched=False), expected)
        with opake.runtime():
            pass
        assert moe._can_use_grouped_mm is not stock  # counted: the model still needs it
    assert moe._can_use_grouped_mm is stock
    with opake.runtime(), opake.patched(model, vmap_grouped_mm=False):
        assert_exact(per_example(model, batch(), batched=False), expected)
    assert moe._can_use_grouped_mm is stock


@pytest.mark.usefixtures("old_torch")
def test_outside_transforms_the_answer_is_stocks() -> None:
    x, weight = torch.zeros(65), torch.zeros(2, 8, 8)
    aligned, shifted = x[:64].view(8, 8), x[1:].view(8, 8)
    offs = torch.tensor([4, 8], dtype=torch.int32)
    expected = [moe._can_use_grouped_mm(a, weight, offs) for a in (aligned, shifted)]
    assert expected == [True, False]
    with opake.runtime():
        assert [moe._can_use_grouped_mm(a, weight, offs) for a in (aligned, shifted)] == expected


def test_while_compiling_the_answer_is_stocks() -> None:
    """Inductor takes no grouped GEMM of fp32, so stock says no to it."""

    def asks(x: Tensor) -> Tensor:
        return x + 1 if moe._can_use_grouped_mm(x, x, x) else x - 1

    x = torch.zeros(2, 2)
    with opake.runtime():
        torch._dynamo.reset()
        assert torch.compile(vmap(asks), backend="eager")(x).eq(-1).all()
        assert vmap(asks)(x).eq(1).all()


def test_compiled() -> None:
    model, ids = make("grouped_mm", num_hidden_layers=1), batch()["input_ids"]
    expected = [model(row).logits.detach() for row in ids.split(1)]
    with opake.patched(model), torch.no_grad():  # dynamo warns when it looks at a graph's tensors
        torch._dynamo.reset()
        compiled = torch.compile(vmap(lambda ids: model(input_ids=ids).logits), backend="aot_eager")
        found = compiled(ids)
    # Products in another order: as far apart as stock's own implementations.
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=BAR)


def test_without_a_grouped_gemm_the_answer_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []

    def asks(x: Tensor) -> Tensor:
        answers.append(moe._can_use_grouped_mm(x, x, x))
        return x

    with opake.runtime():
        vmap(asks)(torch.ones(2, 2))
        monkeypatch.delattr(F, "grouped_mm", raising=False)
        monkeypatch.delattr(torch, "_grouped_mm", raising=False)
        vmap(asks)(torch.ones(2, 2))
    assert answers == [True, False]
