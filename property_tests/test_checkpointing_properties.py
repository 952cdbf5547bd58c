"""Gradient checkpointing under functorch, whatever the model, the rows, and the order of calls."""

from __future__ import annotations

import copy
import functools
import sys
from contextlib import nullcontext
from typing import Any

import torch
import traits
import transformers.modeling_layers
import transformers.modeling_utils
import zoo
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interrupts import Interrupter
from oracle import (
    GRADIENT_BAR,
    Snapshot,
    assert_exact,
    errors,
    model_loss,
    per_example,
    same_bits,
    stock_loop,
)
from torch import nn

import opake

FUNCTION = "_gradient_checkpointing_func"
OPTIONS = st.sampled_from([{}, *({"use_reentrant": r} for r in (True, False, None))])


def enable(model: Any, every: int = 1, **options: Any) -> None:
    name = "activation_checkpointing_enable"
    call = getattr(model, name, None) or model.gradient_checkpointing_enable
    call(options or None, every_n_layers=every)


def disable(model: Any) -> None:
    name = "activation_checkpointing_disable"
    (getattr(model, name, None) or model.gradient_checkpointing_disable)()


def layers(model: nn.Module) -> list[nn.Module]:
    cls = transformers.modeling_layers.GradientCheckpointingLayer
    return [module for module in model.modules() if isinstance(module, cls)]


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor | None:
    """None, or a padding mask (B, S) whose rows have a real token at least."""
    size, length = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    rows = st.lists(st.integers(0, 1), min_size=length, max_size=length).filter(any)
    return draw(st.none() | st.lists(rows, min_size=size, max_size=size).map(torch.tensor))


@given(
    model_type=st.sampled_from(sorted(zoo.FIELDS)),
    depth=st.integers(1, 3),
    every=st.integers(1, 3),
    options=OPTIONS,
    mask=masks(),
    trained=st.integers(1, 2**30),
    form=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example("llama", 1, 1, {}, torch.tensor([[0, 0, 1], [0, 1, 1]]), 2, (False, False, False))
@settings(max_examples=25)
def test_gradients_are_the_loops(
    model_type: str,
    depth: int,
    every: int,
    options: dict[str, Any],
    mask: torch.Tensor | None,
    trained: int,
    form: tuple[bool, bool, bool],
) -> None:
    batched, inside, keep = form
    model = zoo.tiny(model_type, None, torch.float64, **traits.depth(model_type, depth))
    parameters = list(model.parameters())
    for i, parameter in enumerate(parameters):  # any subset of them, but not none
        parameter.requires_grad_(bool(trained >> (i % 30) & 1))
    parameters[-1].requires_grad_(True)
    batch = zoo.batch(mask, size=2, length=4)
    expected, stock = stock_loop(model, batch), copy.deepcopy(model)
    if not inside:
        enable(model, every, **options)
    mode = nullcontext() if keep else torch.no_grad()
    with opake.patched(model), mode:
        if inside:
            enable(model, every, **options)
        found = per_example(model, batch, batched=batched)
    noise: float | torch.Tensor = 0.0
    if errors(found, expected)[1] > GRADIENT_BAR[torch.float64]:
        # Of queries alone, over a single key, all gradients cancel to rounding.
        _, noise = zoo.rounding(stock, batch, model_loss, expected, floor=1e-3)
    assert_exact(found, expected, noise=noise)


@given(
    rates=st.tuples(*[st.sampled_from([0.0, 0.1, 0.5])] * 3),
    randomness=st.sampled_from(["different", "same"]),
    seed=st.integers(0, 2**31),
    every=st.integers(1, 2),
)
@settings(max_examples=20)
def test_the_recompute_draws_the_same_numbers(
    rates: tuple[float, float, float], randomness: str, seed: int, every: int
) -> None:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    model = zoo.tiny("gpt2", "eager", torch.float64, **dict(zip(names, rates, strict=True)))
    found = []
    for on in (False, True):
        if on:
            enable(model, every)
        torch.manual_seed(seed)
        with opake.patched(model), torch.no_grad():
            rows = per_example(model, zoo.batch(), batched=True, randomness=randomness)
        found.append((rows, torch.rand(2)))
    assert same_bits(found[1], found[0])


# ---- scopes and enabling in any order

CALLS = st.one_of(
    st.builds(lambda options, every: (enable, every, options), OPTIONS, st.integers(1, 2)),
    st.just((disable,)),
    st.sampled_from(["model", "process"]),
)


def places() -> list[tuple[str, Any]]:
    owners = [
        torch.utils.checkpoint,
        torch._functorch.eager_transforms,
        transformers.modeling_utils,
        transformers.modeling_layers,
        transformers.modeling_layers.GradientCheckpointingLayer,
        transformers.modeling_utils.PreTrainedModel,
    ]
    return [(f"{owner}.{name}", x) for owner in owners for name, x in vars(owner).items()]


def unchanged(before: list[tuple[str, Any]]) -> bool:
    now = places()
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)


def state(model: nn.Module) -> list[Any]:
    """What checkpointing writes into a model, in a form that compares."""
    rows: list[Any] = []
    for module in model.modules():
        function = vars(module).get(FUNCTION)
        if isinstance(function, functools.partial):
            function = (function.func, function.args, function.keywords)
        hooks = [hook.__code__ for hook in module._forward_hooks.values()]
        rows.append((type(module), list(vars(module)), function, hooks))
        rows.append(getattr(module, "gradient_checkpointing", None))
    return rows


def apply(model: Any, call: Any) -> None:
    function, *rest = call
    every, options = rest or (None, {})
    function(model, *([] if every is None else [every]), **options)


@given(calls=st.lists(CALLS, max_size=8))
def test_after_all_scopes_a_model_is_what_its_own_calls_made_it(calls: list[Any]) -> None:
    model, twin = zoo.tiny("llama"), zoo.tiny("llama")
    before = places()
    scopes = {"model": opake.patched(model), "process": opake.runtime(reset_compile=False)}
    try:
        for call in calls:
            if isinstance(call, str):
                scope = scopes[call]
                scope.unpatch() if scope.applied else scope.patch()
            else:
                apply(model, call)
    finally:
        for scope in scopes.values():
            scope.unpatch()
    for call in calls:
        if not isinstance(call, str):
            apply(twin, call)
    assert state(model) == state(twin)
    assert unchanged(before)


@given(line=st.integers(1, 1500), process=st.booleans(), options=OPTIONS)
@settings(max_examples=40)
def test_an_interrupt_while_entering_or_leaving_leaves_nothing(
    line: int, process: bool, options: dict[str, Any]
) -> None:
    model = zoo.tiny("llama")
    enable(model, **options)
    before, snapshot = places(), Snapshot(model)
    scope = opake.runtime(reset_compile=False) if process else opake.patched(model)
    trace = sys.gettrace()
    sys.settrace(Interrupter(line))
    try:
        with scope:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(trace)
        scope.unpatch()
    assert unchanged(before)
    assert not snapshot.changes()
