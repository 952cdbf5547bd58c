"""Gradient checkpointing under functorch: stock's gradients, recomputed, in less memory."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import traits
import transformers
import transformers.modeling_layers
import transformers.modeling_utils
import zoo
from oracle import (
    GRADIENT_BAR,
    Result,
    Snapshot,
    assert_exact,
    error,
    errors,
    model_loss,
    peak_memory,
    per_example,
    same_bits,
    stock_loop,
    trainable,
)
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

import opake
from opake.compat.checkpoint import dispatch
from opake.errors import UnsupportedTransform
from opake.functional import make_functional, per_example_grads

FUNCTION = "_gradient_checkpointing_func"
REENTRANT = [{}, {"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": None}]
BATCH = zoo.batch(zoo.MIXED)
ROWS = zoo.batch()
WEIGHT = "model.layers.0.input_layernorm.weight"

# torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
# transformers 5.24 has new names for what peft calls by its old ones.
peft_names = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")


def enable(model: Any, every: int = 1, **options: Any) -> Any:
    """Enable checkpointing by the name that this transformers has for it."""
    name = "activation_checkpointing_enable"
    call = getattr(model, name, None) or model.gradient_checkpointing_enable
    call(options or None, every_n_layers=every)
    return model


def llama(**fields: Any) -> Any:
    return zoo.tiny("llama", dtype=torch.float64, **fields)


def checkpointed(model: nn.Module) -> list[nn.Module]:
    cls = transformers.modeling_layers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, cls)]


def run(model: Any, batch: dict[str, Tensor] = BATCH, *args: Any, **options: Any) -> Result:
    with opake.patched(model), torch.no_grad():
        return per_example(model, batch, *args, batched=False, **options)


class Calls:
    """Counts how often a module begins to run: torch stops a recompute as soon as it can."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_pre_hook(self._hook)

    def _hook(self, *args: Any) -> None:
        self.count += 1


# ---- the right gradients


@pytest.mark.parametrize("options", REENTRANT, ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
@pytest.mark.parametrize("keep", [False, True], ids=["no_grad", "grad"])
def test_gradients_are_stocks_and_each_layer_runs_twice(
    options: dict[str, Any], inside: bool, keep: bool
) -> None:
    model = llama()
    expected = stock_loop(model, BATCH)
    calls = [Calls(layer.self_attn) for layer in model.model.layers]
    if not inside:
        enable(model, **options)
    with opake.patched(model):
        if inside:
            enable(model, **options)
        with nullcontext() if keep else torch.no_grad():
            found = per_example(model, BATCH, batched=False)
    assert_exact(found, expected)
    assert [call.count for call in calls] == [2, 2]


@zoo.families
@pytest.mark.case("gradient checkpointing")
def test_every_family_has_the_gradients_of_stock_with_and_without(model_type: str) -> None:
    model = zoo.tiny(model_type, None, torch.float64)
    assert checkpointed(model)
    without = stock_loop(model, BATCH)
    enable(model)
    assert_exact(stock_loop(model, BATCH, use_cache=False), without)
    calls = Calls(checkpointed(model)[0])
    assert_exact(run(model), without)
    assert calls.count >= 1  # 5.24 keeps a layer's hooks out of the recompute, 5.17 does not


@pytest.mark.parametrize("every", [1, 2])
@zoo.forms
def test_every_nth_layer_is_recomputed_with_a_batch_dimension_or_none(
    every: int, batched: bool
) -> None:
    model = llama(num_hidden_layers=3)
    expected = stock_loop(model, BATCH)
    enable(model, every)
    calls = [Calls(layer.mlp) for layer in model.model.layers]
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, BATCH, batched=batched), expected)
    assert [call.count for call in calls] == ([2, 2, 2] if every == 1 else [2, 1, 2])


def test_in_eval_mode_nothing_is_recomputed_as_in_stock() -> None:
    model = enable(llama()).eval()
    calls = Calls(model.model.layers[0].mlp)
    run(model)
    assert calls.count == 1


@zoo.families
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_the_recompute_drops_what_the_forward_dropped(model_type: str, randomness: str) -> None:
    fields = traits.dropouts(model_type, 0.3)
    if not fields:
        pytest.skip(f"stock {model_type} has no dropout")
    if traits.has(model_type, "layerdrop"):
        fields["layerdrop"] = 0.3
    model = zoo.tiny(model_type, None, torch.float64, **fields)
    results = []
    for on in (False, True):
        if on:
            enable(model)
        torch.manual_seed(5)
        found = run(model, randomness=randomness)
        results.append((found, torch.rand(3)))  # and the generator goes on as without
    assert not same_bits(results[0][0].losses, run(model, randomness=randomness).losses)
    assert same_bits(results[1], results[0])


def test_with_preserve_rng_state_false_the_recompute_draws_anew() -> None:
    model = llama(attention_dropout=0.3)
    torch.manual_seed(5)
    expected = run(model, randomness="different")
    enable(model, preserve_rng_state=False)
    torch.manual_seed(5)
    found = run(model, randomness="different")
    assert same_bits(found.losses, expected.losses)
    assert not same_bits(found.grads, expected.grads)


def with_fp32_norms(model: nn.Module) -> nn.Module:
    """A model in bf16, but for its layer norms: under autocast those meet two dtypes."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("within", [False, True], ids=["around all", "around the forward"])
def test_the_recompute_runs_under_the_autocast_of_the_forward(
    within: bool, half: bool, model_type: str
) -> None:
    model = zoo.tiny(model_type)
    if half:
        with_fp32_norms(model)
    inner, outer = (torch.bfloat16, None) if within else (None, torch.bfloat16)

    def loss(params: Any, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", inner) if inner else nullcontext():
            return functional_call(model, params, (), {"input_ids": ids, "labels": ids}).loss

    results = []
    for on in (False, True):
        if on:
            enable(model)
        cast = torch.autocast("cpu", outer) if outer else nullcontext()
        with opake.patched(model), torch.no_grad(), cast:
            results.append(vmap(grad(loss), (None, 0))(trainable(model), ROWS["input_ids"]))
    assert same_bits(results[1], results[0])


@pytest.mark.parametrize("by", ["weights", "embeddings"])
def test_autocast_keeps_nothing_that_lacks_a_graph(by: str) -> None:
    model = enable(zoo.tiny("llama"))
    ids = ROWS["input_ids"]
    inputs = model.get_input_embeddings()(ids).detach()
    weights = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]

    def plain() -> tuple[Tensor, ...]:
        for layer in checkpointed(model):
            layer.gradient_checkpointing = False
        loss = model(input_ids=ids, labels=ids).loss
        return torch.autograd.grad(loss, weights)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return model(inputs_embeds=x, labels=labels).loss

    with opake.patched(model), torch.autocast("cpu", torch.bfloat16):
        if by == "weights":
            torch.autograd.grad(vmap(loss)(inputs, ids).sum(), weights)
        else:
            vmap(grad(loss))(inputs, ids)
        found = plain()
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(list(found), list(plain()))


# ---- of the right parameters


def tie_inside(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_proj.weight = first.v_proj.weight
    second.q_proj.weight = first.q_proj.weight
    model.model.layers[1].mlp = model.model.layers[0].mlp


@pytest.mark.parametrize("tie", [tie_inside, lambda model: None], ids=["layers", "head"])
def test_tied_parameters(tie: Callable[[Any], None]) -> None:
    model = llama(tie_word_embeddings=tie is not tie_inside)
    tie(model)
    expected = stock_loop(model, BATCH)
    assert len(expected.grads) < len(list(model.named_parameters(remove_duplicate=False)))
    assert_exact(run(enable(model)), expected)


def test_the_recompute_sees_what_functional_call_put_in_the_modules() -> None:
    model, other = llama(), llama()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    expected = stock_loop(other, BATCH)
    enable(model)
    params = dict(other.named_parameters())
    frozen = {name: params.pop(name).detach() for name in list(params) if "mlp" in name}
    example = {name: x[0] for name, x in BATCH.items()}

    def loss(p: Any) -> Tensor:
        return functional_call(model, {**frozen, **p}, (), example).loss

    with opake.patched(model):
        found = grad(loss)(params)
    wanted = {name: g[:1] for name, g in expected.grads.items() if name in params}
    rows = Result(expected.losses[:1], {name: g.detach()[None] for name, g in found.items()})
    assert_exact(rows, Result(expected.losses[:1], wanted))


def test_parameters_that_differ_between_examples() -> None:
    """As LoRA factors of several tenants do: the mapped dimension is that of the parameters."""
    models = [enable(llama()) for _ in range(2)]
    with torch.no_grad():
        for p in models[1].parameters():
            p.add_(0.1)
    ids = ROWS["input_ids"][:1]
    rows = [stock_loop(m, {"input_ids": ids, "labels": ids}, use_cache=False) for m in models]
    stacked = {n: torch.stack([dict(m.named_parameters())[n] for m in models]) for n in rows[0][1]}

    def loss(params: Any) -> Tensor:
        return functional_call(models[0], params, (), {"input_ids": ids, "labels": ids}).loss

    with opake.patched(models[0]), torch.no_grad():
        grads, losses = vmap(grad_and_value(loss))(stacked)
    expected = {n: torch.cat([row.grads[n] for row in rows]) for n in stacked}
    assert_exact(Result(losses, grads), Result(torch.cat([row.losses for row in rows]), expected))


ADAPTERS = LoraConfig(
    r=2, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False
)


def lora_last(model: Any, options: dict[str, Any]) -> Any:
    return get_peft_model(enable(model, **options), ADAPTERS)


def lora_first(model: Any, options: dict[str, Any]) -> Any:
    peft = get_peft_model(model, ADAPTERS)
    enable(peft.base_model.model, **options)
    return peft


def kbit(model: Any, options: dict[str, Any]) -> Any:
    prepared = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)
    return get_peft_model(prepared, ADAPTERS)


def own_hook(model: Any, options: dict[str, Any]) -> Any:
    def make_inputs_require_grad(module: Any, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_(True)

    peft = lora_first(model, options)
    peft.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
    return peft


@peft_names
@pytest.mark.parametrize("options", REENTRANT[:3], ids=str)
@pytest.mark.parametrize("wrap", [lora_last, lora_first, kbit, own_hook])
def test_lora(wrap: Any, options: dict[str, Any]) -> None:
    model = wrap(llama(), options).double().train()
    found = run(model)
    for layer in checkpointed(model):
        layer.gradient_checkpointing = False  # torch.autograd.grad refuses reentrant checkpoints
    expected = stock_loop(model, BATCH)
    assert all("lora_" in name for name in found.grads)
    assert_exact(found, expected)


@zoo.families
@pytest.mark.case("gradient checkpointing")
def test_what_hooks_collect_inside_a_layer_keeps_its_gradient(model_type: str) -> None:
    """Router logits, attentions and hidden states reach the loss by transformers' hooks."""

    def loss_of(output: Any) -> Tensor:
        names = ("hidden_states", "attentions", "router_logits")
        parts = [part for name in names for part in output.get(name) or () if part is not None]
        assert len(parts) > 2
        return output.loss + sum(part.double().pow(3).mean() for part in parts)

    options = {"output_hidden_states": True, "output_attentions": traits.attends(model_type)}
    if traits.has(model_type, "output_router_logits"):
        options["output_router_logits"] = True
    model = zoo.tiny(model_type, "eager", torch.float64)
    try:
        expected = stock_loop(model, ROWS, loss_of, **options)
    except AttributeError as error:
        pytest.skip(f"stock {model_type} raises {error!r}")
    results = []
    for on in (False, True):
        if on:
            enable(model)
        with opake.patched(model), torch.no_grad():
            # With a batch dimension: without one, the loss's means would be of other shapes.
            results.append(per_example(model, ROWS, loss_of, batched=True, **options))
    assert_exact(results[1], results[0])
    # Linear attention and hyper-connections round by more, with checkpoints or without.
    assert_exact(results[1], expected, noise=errors(results[0], expected)[1])


# ---- less memory


@peft_names
@pytest.mark.parametrize("keep", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("adapt", [False, True], ids=["full", "lora"])
def test_peak_memory_falls(adapt: bool, keep: bool) -> None:
    model = zoo.tiny("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    if adapt:
        model = get_peft_model(model, ADAPTERS)
    batch = zoo.batch(length=64)
    peaks = []
    for on in (False, True):
        if on:
            enable(model)
        mode = nullcontext() if keep else torch.no_grad()
        with opake.patched(model), mode, peak_memory() as peak:
            per_example(model, batch, batched=False)
        peaks.append(peak())
    # The gradients themselves, of every example, do not shrink: 1.3 MB where all are trained.
    assert peaks[1] < (0.5 if adapt or keep else 0.8) * peaks[0], peaks


def test_parameters_that_nobody_differentiates_by_cost_nothing() -> None:
    peaks = []
    for frozen in (True, False):
        model = enable(zoo.tiny("llama", hidden_size=64, intermediate_size=128))
        params = {WEIGHT: dict(model.named_parameters())[WEIGHT].detach()}
        model.requires_grad_(not frozen)

        def loss(p: Any, ids: Tensor, model: Any = model) -> Tensor:
            return functional_call(model, p, (), {"input_ids": ids, "labels": ids}).loss

        with opake.patched(model), torch.no_grad(), peak_memory() as peak:
            vmap(grad(loss), (None, 0))(params, zoo.tokens(4, 16))
        peaks.append(peak())
    # Gradients of all weights of a layer, of every example, would be half a megabyte.
    assert peaks[1] < 1.05 * peaks[0], peaks


# ---- other transforms


def total(result: Result) -> Result:
    """The sum over the examples, as a result of one."""
    grads = {name: g.sum(0, keepdim=True) for name, g in result.grads.items()}
    return Result(result.losses[:1], grads)


def transforms(loss: Any, p: Any, ids: Tensor) -> dict[str, Callable[[], Any]]:
    def rows(p: Any, ids: Tensor) -> Tensor:
        return vmap(loss, (None, 0))(p, ids)

    return {
        "vmap(grad)": lambda: vmap(grad(loss), (None, 0))(p, ids),
        "chunks": lambda: vmap(grad(loss), (None, 0), chunk_size=3)(p, ids),
        "vmap(jacrev)": lambda: vmap(jacrev(loss), (None, 0))(p, ids),
        "jacrev(vmap)": lambda: jacrev(rows)(p, ids),
        "grad(vmap)": lambda: grad(lambda q: rows(q, ids).sum())(p),
        "vjp(vmap)": lambda: vjp(lambda q: rows(q, ids), p)[1](torch.ones(len(ids)))[0],
        "vmap(vmap(grad))": lambda: {
            name: g.flatten(0, 1)
            for name, g in vmap(vmap(grad(loss), (None, 0)), (None, 0))(
                p, ids.unflatten(0, (2, 2))
            ).items()
        },
    }


# Falcon multiplies by a view of its weights.
@pytest.mark.parametrize("kind", ["llama", "falcon"])
@pytest.mark.parametrize("name", transforms(None, {}, ROWS["input_ids"]))
def test_first_order_transforms_have_the_loops_gradients(name: str, kind: str) -> None:
    model = zoo.tiny(kind, None, torch.float64)
    expected = stock_loop(model, ROWS)
    enable(model)

    def loss(p: Any, ids: Tensor) -> Tensor:
        return functional_call(model, p, (), {"input_ids": ids, "labels": ids}).loss

    with opake.patched(model):
        found = transforms(loss, trainable(model), ROWS["input_ids"])[name]()
    summed = name in ("grad(vmap)", "vjp(vmap)")
    expected = total(expected) if summed else expected
    grads = {n: g.detach()[None] if summed else g.detach() for n, g in found.items()}
    assert_exact(Result(expected.losses, grads), expected)


def test_autograd_beneath_the_transforms() -> None:
    model = llama()
    expected = stock_loop(model, ROWS)
    enable(model)
    params, ids = dict(model.named_parameters()), ROWS["input_ids"]

    def loss(p: Any, ids: Tensor) -> Tensor:
        return functional_call(model, p, (), {"input_ids": ids, "labels": ids}).loss

    def grads(loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        return {name: g[None] for name, g in zip(params, found, strict=True)}

    with opake.patched(model):
        mapped = vmap(loss, (None, 0))(params, ids).sum()
        own = vmap(lambda x: model(input_ids=x, labels=x).loss)(ids).sum()
        rows, losses = vmap(grad_and_value(loss), (None, 0))(params, ids)
        totals = [grads(x) for x in (mapped, own, losses.sum(), mapped)]
        with pytest.raises(UnsupportedTransform, match="cannot be differentiated again"):
            sum(g.pow(2).sum() for g in rows.values()).backward()
    assert_exact(Result(losses.detach(), {n: g.detach() for n, g in rows.items()}), expected)
    for found in totals:
        assert_exact(Result(expected.losses[:1], found), total(expected))


HIGHER: dict[str, Callable[[Any, Tensor], Any]] = {
    "hessian": lambda loss, x: hessian(loss)(x),
    "jacrev(grad)": lambda loss, x: jacrev(grad(loss))(x),
    "grad(grad)": lambda loss, x: grad(lambda y: grad(loss)(y).sum())(x),
    "vmap(grad(grad))": lambda loss, x: vmap(grad(lambda y: grad(loss)(y).sum()))(x[None]),
    "jvp": lambda loss, x: jvp(loss, (x,), (x,)),
    "jvp(grad)": lambda loss, x: jvp(grad(loss), (x,), (x,)),
    "grad(jvp)": lambda loss, x: grad(lambda y: jvp(loss, (y,), (x,))[1])(x),
    "jacfwd": lambda loss, x: jacfwd(loss)(x),
    "dual numbers": lambda loss, x: dual_grad(loss, x),
}


def dual_grad(loss: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return grad(loss)(forward_ad.make_dual(x, x))


@forward_mode
@pytest.mark.parametrize("name", HIGHER)
def test_higher_order_and_forward_mode_raise(name: str) -> None:
    model = enable(llama())
    ids = ROWS["input_ids"][0]

    def loss(weight: Tensor) -> Tensor:
        return functional_call(model, {WEIGHT: weight}, (), {"input_ids": ids, "labels": ids}).loss

    with opake.patched(model), pytest.raises(UnsupportedTransform, match="_disable"):
        HIGHER[name](loss, dict(model.named_parameters())[WEIGHT].detach())


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around the transform"])
def test_compiling_raises(around: bool) -> None:
    model = enable(llama())
    compiled: Any = functools.partial(torch.compile, backend="eager")

    def loss(ids: Tensor, params: Any) -> Tensor:
        inner = model if around else compiled(model)
        return functional_call(inner, params, (), {"input_ids": ids, "labels": ids}).loss

    params = trainable(model)
    if not around:
        params = {f"_orig_mod.{name}": p for name, p in params.items()}
    call: Any = vmap(grad(loss, argnums=1), (0, None))
    torch.compiler.reset()
    with opake.patched(model), pytest.raises(UnsupportedTransform, match="cannot be compiled"):
        (compiled(call) if around else call)(ROWS["input_ids"], params)
    torch.compiler.reset()


def test_selective_checkpointing_raises() -> None:
    contexts = lambda: (nullcontext(), nullcontext())  # noqa: E731
    model = enable(llama(), use_reentrant=False, context_fn=contexts)
    with pytest.raises(UnsupportedTransform, match="context_fn"):
        run(model)


class Joined(nn.Module):
    """Joins what a module returns with a tensor that it is not given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.inner(x), self.held[0])


LOST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda y, held: y * held,
    "product with a view": lambda y, held: y * held.view(1),
    "product with what is given": lambda y, held: held * y.new_ones(()) + y,
    "in place": lambda y, held: y.add_(held),
    "list": lambda y, held: torch.stack([y, held.expand_as(y)]).sum(0),
    "keyword": lambda y, held: torch.add(y, other=held),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "detached": lambda y, held: y * held.detach(),
    "dtype": lambda y, held: y.to(held.dtype),
    "zeros": lambda y, held: y + torch.zeros_like(held),
    "comparison": lambda y, held: torch.where(held > 0, y, -y),
    "a graph of its own": lambda y, held: y + with_a_graph(held),
}


def with_a_graph(held: Tensor) -> Tensor:
    with torch.enable_grad():
        return (held * 2).detach()


@pytest.mark.parametrize("how", [*LOST, *KEPT, "product of a detached"])
def test_a_tensor_that_a_layer_is_not_given_raises_where_it_needs_a_gradient(how: str) -> None:
    followed = how in LOST
    model = enable(llama())
    layer = model.model.layers[0]
    layer.mlp = Joined(layer.mlp)
    object.__setattr__(layer.mlp, "join", {**LOST, **KEPT}.get(how, LOST["product"]))
    scale = torch.tensor(2.0, dtype=torch.float64)
    ids = ROWS["input_ids"]

    def loss(scale: Tensor, ids: Tensor) -> Tensor:
        held = scale.detach() if how == "product of a detached" else scale
        object.__setattr__(layer.mlp, "held", [held])
        return model(input_ids=ids, labels=ids).loss + scale

    with opake.patched(model):
        rows = vmap(grad(loss), (None, 0))
        if followed:
            with pytest.raises(UnsupportedTransform, match="LlamaDecoderLayer reads a tensor"):
                rows(scale, ids)
        else:
            assert torch.equal(rows(scale, ids), torch.ones(4, dtype=torch.float64))


# ---- everything else as before


def places() -> dict[str, list[tuple[str, Any]]]:
    owners = {
        "torch.utils.checkpoint": torch.utils.checkpoint,
        "torch.autograd.graph": torch.autograd.graph,
        "eager_transforms": torch._functorch.eager_transforms,
        "modeling_utils": transformers.modeling_utils,
        "modeling_layers": transformers.modeling_layers,
        "layers": transformers.modeling_layers.GradientCheckpointingLayer,
        "models": transformers.modeling_utils.PreTrainedModel,
        "Tensor": torch.Tensor,
    }
    return {name: list(vars(owner).items()) for name, owner in owners.items()}


def same_places(found: Any, expected: Any) -> bool:
    return all(
        len(found[name]) == len(rows)
        and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(found[name], rows, strict=True))
        for name, rows in expected.items()
    )


def test_a_model_scope_writes_to_its_model_alone() -> None:
    model, other = enable(llama()), enable(llama())
    before, snapshot, bystander = places(), Snapshot(model), Snapshot(other)
    with opake.patched(model, first_order=False, vmap_grouped_mm=False):
        assert same_places(places(), before)
        assert not [c for c in bystander.changes() if "registry" not in c]
        with pytest.raises(RuntimeError):
            vmap(grad(lambda s, x: other(x[None], labels=x[None]).loss * s), (None, 0))(
                torch.ones(()), ROWS["input_ids"]
            )
    assert not snapshot.changes()
    assert same_places(places(), before)


@pytest.mark.parametrize("scope", [lambda m: opake.patched(m), lambda m: opake.runtime()])
def test_everything_is_put_back_after_an_exception(scope: Any) -> None:
    model = enable(llama(), use_reentrant=True)
    before, snapshot = places(), Snapshot(model)
    with pytest.raises(ZeroDivisionError), scope(model):
        enable(enable(llama()), use_reentrant=ROWS["input_ids"].shape[0] // 0)
    assert same_places(places(), before)
    assert not snapshot.changes()


def test_what_is_enabled_inside_a_scope_lasts() -> None:
    model, stock = llama(), enable(llama())
    with opake.patched(model):
        enable(model, use_reentrant=False, preserve_rng_state=True)
        assert vars(model.model.layers[0])[FUNCTION].func is dispatch
    layers = checkpointed(model)
    assert all(layer.gradient_checkpointing for layer in layers)
    for layer in layers:
        function, wanted = vars(layer)[FUNCTION], vars(stock.model.layers[0])[FUNCTION]
        assert function.func is wanted.func
        assert function.keywords == {"use_reentrant": False, "preserve_rng_state": True}
    assert list(vars(layers[0])) == list(vars(stock.model.layers[0]))
    assert_exact(stock_loop(model, ROWS, use_cache=False), stock_loop(stock, ROWS, use_cache=False))


def test_what_is_disabled_inside_a_scope_stays_so() -> None:
    model = enable(llama())
    calls = Calls(model.model.layers[0].mlp)
    disable = getattr(model, "activation_checkpointing_disable", None)
    with opake.patched(model), torch.no_grad():
        (disable or model.gradient_checkpointing_disable)()
        per_example(model, ROWS, batched=False)
        assert calls.count == 1
    assert not any(layer.gradient_checkpointing for layer in checkpointed(model))
    assert vars(model.model.layers[0])[FUNCTION] is torch.utils.checkpoint.checkpoint


@pytest.mark.parametrize("options", REENTRANT[:3], ids=str)
def test_ordinary_training_inside_a_scope_is_stocks(options: dict[str, Any]) -> None:
    model = enable(llama(attention_dropout=0.2), **options)
    calls = Calls(model.model.layers[0].mlp)

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model_loss(model(**BATCH, use_cache=False)).backward()
        return [p.grad for p in model.parameters()]

    expected = step()
    with opake.patched(model):
        assert same_bits(step(), expected)
    with opake.runtime():
        assert same_bits(step(), expected)
    assert calls.count == 6


def test_a_checkpoint_function_of_somebody_else_stays() -> None:
    model = enable(llama())
    seen = []

    def theirs(function: Any, *args: Any) -> Any:
        seen.append(1)
        return function(*args)

    for layer in checkpointed(model):
        setattr(layer, FUNCTION, theirs)
    expected = stock_loop(model, ROWS, use_cache=False)
    seen.clear()
    assert_exact(run(model, ROWS), expected)
    assert len(seen) == 2


def test_copies_taken_inside_a_scope_are_stock() -> None:
    model = enable(llama())
    for_pickle = llama()
    with opake.patched(model), opake.patched(for_pickle):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(for_pickle))]
    for made in copies:
        assert all(type(m).__module__.partition(".")[0] != "opake" for m in made.modules())
        assert all("_opake_slots" not in vars(module) for module in made.modules())
    assert vars(copies[0].model.layers[0])[FUNCTION].func is torch.utils.checkpoint.checkpoint


def test_switched_off_stock_raises() -> None:
    model = enable(llama())
    with opake.patched(model, vmap_checkpointing=False), pytest.raises(RuntimeError) as error:
        per_example(model, ROWS, batched=False)
    assert not isinstance(error.value, opake.errors.OpakeError)


# ---- the process


def fitting() -> Any:
    """A model that stock runs under ``vmap(grad)``, given a batch dimension and no mask."""
    return zoo.tiny("llama", "eager", torch.float64)


@pytest.mark.parametrize("options", REENTRANT[:3], ids=str)
@pytest.mark.parametrize("built", [True, False], ids=["built inside", "built before"])
def test_the_runtime_scope_serves_models_without_a_scope(
    options: dict[str, Any], built: bool
) -> None:
    expected = stock_loop(fitting(), ROWS)
    before, model = places(), None if built else fitting()
    with opake.runtime():
        model = enable(model or fitting(), **options)
        calls = Calls(model.model.layers[0].mlp)
        with torch.no_grad():
            found = per_example(model, ROWS, batched=True, use_cache=False)
    assert_exact(found, expected)
    assert calls.count == 2
    assert same_places(places(), before)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert all(getattr(hook, "__module__", "").partition(".")[0] != "opake" for hook in hooks)
    assert vars(model.model.layers[0])[FUNCTION].func is torch.utils.checkpoint.checkpoint
    # And it is stock again: its checkpoint does not work under a transform.
    with pytest.raises(RuntimeError):
        per_example(model, ROWS, batched=True, use_cache=False)


def test_both_scopes_at_once_in_any_order() -> None:
    model = enable(llama())
    expected = stock_loop(model, ROWS, use_cache=False)
    before, snapshot = places(), Snapshot(model)
    process, own = opake.runtime(), opake.patched(model)
    for first, second in ((process, own), (own, process)):
        first.patch()
        second.patch()
        with torch.no_grad():
            assert_exact(per_example(model, ROWS, batched=False), expected)
        first.unpatch()
        second.unpatch()
        assert same_places(places(), before)
        assert not snapshot.changes()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(i)`` in as many threads, which take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("by", ["embeddings", "weights"])
def test_threads_share_a_model(by: str) -> None:
    model = llama()
    ids = ROWS["input_ids"]
    inputs = model.get_input_embeddings()(ids).detach()
    weights = [p for name, p in model.named_parameters() if "layers" in name]

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return model(inputs_embeds=x, labels=labels).loss

    def stock(leaves: Callable[[Tensor], list[Tensor]]) -> list[list[Tensor]]:
        rows = [x[None].clone().requires_grad_() for x in inputs]
        return [
            list(torch.autograd.grad(loss(x, y[None]), leaves(x)))
            for x, y in zip(rows, ids, strict=True)
        ]

    if by == "embeddings":
        expected = [torch.cat([row[0] for row in stock(lambda x: [x])])]
    else:
        expected = [torch.stack(xs).sum(0) for xs in zip(*stock(lambda x: weights), strict=True)]
    found: list[list[Tensor]] = []

    def work(_: int) -> None:
        for _ in range(4):
            if by == "embeddings":
                found.append([vmap(grad(loss))(inputs, ids).detach()])
            else:  # autograd's own, beneath the transform
                total = vmap(loss)(inputs, ids).sum()
                found.append(list(torch.autograd.grad(total, weights)))

    enable(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with opake.patched(model):
        in_threads(3, work)
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(now) == list(state)
    assert all(now[name] is x for name, x in state.items())
    assert len(found) == 12
    for grads in found:
        assert all(
            error(a, b) < GRADIENT_BAR[torch.float64] for a, b in zip(grads, expected, strict=True)
        )


def test_threads_of_two_models_with_and_without_a_transform() -> None:
    model = enable(llama(), use_reentrant=False)
    expected = stock_loop(model, ROWS, use_cache=False)
    found: dict[str, list[Any]] = {"rows": [], "plain": []}
    fmodel, params = make_functional(model)

    def rows() -> None:
        for _ in range(3):
            grads, losses = per_example_grads(lambda p, x: fmodel(p, **x).loss, params, ROWS)
            found["rows"].append(Result(losses, grads))

    def plain() -> None:
        # Not of that model: functional_call puts its tensors into the modules themselves.
        found["plain"].extend(stock_of(other) for _ in range(3))

    def stock_of(net: Any) -> Tensor:
        loss = net(**ROWS, use_cache=False).loss
        return torch.autograd.grad(loss, net.model.norm.weight)[0]

    other = enable(llama(), use_reentrant=False)
    alone = stock_of(other)
    with opake.patched(model):
        threads = [threading.Thread(target=rows), threading.Thread(target=plain)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found["rows"]) == len(found["plain"]) == 3
    for result in found["rows"]:
        assert_exact(result, expected)
    assert all(torch.equal(weight, alone) for weight in found["plain"])


def test_explain_tells_where_it_acts() -> None:
    row = next(r for r in opake.check(llama()) if r.concern == "vmap_checkpointing")
    assert (row.status, row.count) == ("on", 2)
    assert row.target == f"LlamaDecoderLayer.{FUNCTION}"
    row = next(r for r in opake.runtime().explain() if r.concern == "vmap_checkpointing")
    assert row.status == "on"
    assert "process-wide" in row.reason
