"""``loss_only=True`` inside models: stock's loss and gradients, without stock's logits."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import zoo
from interpreter import interpreted
from oracle import (
    GRADIENT_BAR,
    LOSS_BAR,
    MOE_BAR,
    Snapshot,
    error,
    per_example,
    same_bits,
    stock_loop,
)
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from test_kernels_in_models import FUSED_BAR, make
from torch import Tensor, nn
from torch.nn import functional as F

import opake
from opake.plan.deferred import Deferred, Head

CONCERN = "fused_linear_cross_entropy"
fused_or_not = pytest.mark.parametrize("fused", [False, True])


def step(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """One ordinary pass each way: the output, and the gradients."""
    model.zero_grad()
    output = model(**batch, **options)
    output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output, grads


def assert_stocks(found: Any, expected: Any, bar: float = FUSED_BAR) -> None:
    """Compare the losses and gradients of two steps."""
    assert error(found[0].loss.detach(), expected[0].loss.detach()) <= LOSS_BAR
    assert found[1].keys() == expected[1].keys()
    largest = max(g.abs().max().item() for g in expected[1].values())
    for name, grad in expected[1].items():
        assert error(found[1][name], grad, 1e-3 * largest) <= bar, name


def row(model: Any, **flags: Any) -> Any:
    return next(r for r in opake.check(model, **flags) if r.concern == CONCERN)


def counts(model: Any, concern: str = CONCERN) -> Any:
    return opake.guard_stats(model)[concern]


def done(model: Any) -> int:
    """How many losses were computed without logits, by kernels or in plain PyTorch."""
    found = counts(model)
    return found["ran"] + sum(found["fell_back"].values())


# --- every family


@zoo.families
@fused_or_not
@interpreted
def test_a_loss_without_logits_is_stocks(model_type: str, fused: bool) -> None:
    model, batch = make(model_type), zoo.batch(zoo.RIGHT)
    expected = step(model, batch)
    exact = step(copy.deepcopy(model).double(), batch)[1]
    before = Snapshot(model)
    with opake.patched(model, kernels=[CONCERN], min_elements=None if fused else 10**9):
        found = step(model, batch, loss_only=True)
        assert done(model) == 1
        assert counts(model)["ran"] == fused
    assert before.changes() == []
    assert found[0].logits is None
    largest = max(g.abs().max().item() for g in expected[1].values())
    bar = MOE_BAR if zoo.is_coarse(model_type) else FUSED_BAR
    assert error(found[0].loss.detach(), expected[0].loss.detach()) <= LOSS_BAR
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        if error(found[1][name], grad, 1e-3 * largest) > bar:  # where stock is off by as much
            ours, theirs = (
                error(x[name].double(), exact[name], 1e-3 * largest)
                for x in (found[1], expected[1])
            )
            assert ours <= 2 * theirs, name


@zoo.families
@fused_or_not
@interpreted
def test_per_example_gradients_without_logits_are_the_loops(model_type: str, fused: bool) -> None:
    model, batch = make(model_type), zoo.batch(zoo.MIXED)
    expected = stock_loop(model, batch)
    with opake.patched(model, min_elements=None if fused else 10**9), torch.no_grad():
        found = per_example(model, batch, batched=False, loss_only=True)
        assert done(model) == 1
        assert counts(model)["ran"] == fused
    zoo.assert_alike([found], expected, model, batch)


# --- what a call returns


def test_plain_labels_keep_every_field() -> None:
    model, batch = make("llama").eval(), zoo.batch()
    expected = model(**batch, output_hidden_states=True)
    with opake.patched(model):
        found = model(**batch, output_hidden_states=True)
        again = model(**batch, output_hidden_states=True, loss_only=False)
        assert done(model) == 0
    for other in (found, again):
        assert [*other] == [*expected]
        assert same_bits([*other.values()][:2], [*expected.values()][:2])


def test_the_other_fields_stay() -> None:
    model, batch = make("llama").eval(), zoo.batch()
    expected = model(**batch, output_hidden_states=True)
    with opake.patched(model):
        found = model(**batch, output_hidden_states=True, loss_only=True)
    assert found.logits is None
    assert [*found] == [name for name in expected if name != "logits"]
    assert same_bits(found.hidden_states, expected.hidden_states)


def test_a_tuple_keeps_its_length() -> None:
    model, batch = make("llama").eval(), zoo.batch()
    expected = model(**batch, return_dict=False)
    with opake.patched(model):
        found = model(**batch, return_dict=False, loss_only=True)
    assert len(found) == len(expected)
    assert found[1] is None
    assert error(found[0].detach(), expected[0].detach()) <= LOSS_BAR


def test_without_labels_there_are_logits() -> None:
    model, ids = make("llama").eval(), zoo.tokens()
    expected = model(ids)
    with opake.patched(model):
        found = model(ids, loss_only=True)
        kept = model(ids, loss_only=True, logits_to_keep=2)
    assert same_bits(found.logits, expected.logits)
    assert error(kept.logits, expected.logits[:, -2:]) <= 1e-6


def test_stock_takes_the_argument_and_ignores_it() -> None:
    model, batch = make("llama").eval(), zoo.batch()
    assert same_bits(model(**batch, loss_only=True).logits, model(**batch).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 3},
        {"shift_labels": zoo.tokens(seed=5)},
    ],
)
@fused_or_not
@interpreted
def test_options_of_the_loss_are_stocks(options: Any, fused: bool) -> None:
    model, batch = make("llama"), zoo.batch()
    expected = step(model, batch, **options)
    with opake.patched(model, min_elements=None if fused else 10**9):
        assert_stocks(step(model, batch, loss_only=True, **options), expected)
        assert done(model) == 1


@pytest.mark.parametrize("given", [zoo.tokens(length=3), zoo.tokens().float()])
def test_bad_labels_are_stocks_business(given: Tensor) -> None:
    model, ids = make("llama"), zoo.tokens()
    with pytest.raises((ValueError, RuntimeError)) as stock:
        model(ids, labels=given)
    with opake.patched(model), pytest.raises(stock.type):
        model(ids, labels=given, loss_only=True)


def test_a_label_outside_raises() -> None:
    model, ids = make("llama"), zoo.tokens()
    with opake.patched(model), pytest.raises(IndexError):
        model(ids, labels=ids + model.config.vocab_size, loss_only=True)


def test_no_valid_token_gives_stocks_value() -> None:
    model, batch = make("llama"), zoo.batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    expected = step(model, batch)
    with opake.patched(model):
        found = step(model, batch, loss_only=True)
    assert found[0].loss.isnan()
    assert expected[0].loss.isnan()
    assert all(same_bits(found[1][n].isnan(), g.isnan()) for n, g in expected[1].items())


# --- other heads and losses


@pytest.mark.parametrize("by", ["hook", "pre-hook", "backward hook", "forward"])
def test_what_is_around_a_head_still_runs(by: str) -> None:
    model, batch, seen = make("llama"), zoo.batch(), []
    head = model.lm_head
    if by == "hook":
        head.register_forward_hook(lambda m, args, out: seen.append(1) or 2 * out)
    elif by == "pre-hook":
        head.register_forward_pre_hook(lambda m, args: seen.append(1) or (2 * args[0],))
    elif by == "backward hook":
        head.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(1))
    else:
        head.forward = lambda x: seen.append(1) or 2 * F.linear(x, head.weight)
    expected = step(model, batch)
    assert seen.pop() == 1
    with opake.patched(model):
        found = step(model, batch, loss_only=True)
    assert seen == [1]
    assert_stocks(found, expected)
    assert found[0].logits is not None


@fused_or_not
@interpreted
def test_tied_heads_get_both_gradients(fused: bool) -> None:
    model, batch = make("llama", tie_word_embeddings=True), zoo.batch()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected, loop = step(model, batch), stock_loop(model, batch)
    with opake.patched(model, min_elements=None if fused else 10**9):
        assert_stocks(step(model, batch, loss_only=True), expected)
        with torch.no_grad():
            found = per_example(model, batch, batched=False, loss_only=True)
    zoo.assert_alike([found], loop, model, batch)


def test_adapters_on_a_head_are_left_to_stock() -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model, batch = get_peft_model(make("llama"), config), zoo.batch()
    found = row(model)
    assert found.status == "skipped"
    assert "its head is peft's Linear" in found.reason
    expected = step(model, batch)
    with opake.patched(model):
        assert_stocks(step(model, batch, loss_only=True), expected)


def test_a_copied_head_that_is_trained_has_its_gradient() -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model, batch = get_peft_model(make("llama"), config), zoo.batch()
    expected, loop = step(model, batch), stock_loop(model, batch)
    assert any("lm_head" in name for name in expected[1])
    with opake.patched(model):
        assert_stocks(step(model, batch, loss_only=True), expected)
        assert done(model) == 1
        with torch.no_grad():
            found = per_example(model, batch, batched=False, loss_only=True)
        with model.disable_adapter():
            plain = model(**batch, loss_only=True).loss
    zoo.assert_alike([found], loop, model, batch)
    with model.disable_adapter():
        assert error(plain.detach(), model(**batch).loss.detach()) <= LOSS_BAR


def test_prompt_tuning() -> None:
    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, batch = get_peft_model(make("llama"), config), zoo.batch(zoo.RIGHT)
    expected = step(model, batch)
    with opake.patched(model):
        assert_stocks(step(model, batch, loss_only=True), expected)
        assert done(model) == 1


def _classic(logits: Any, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return nn.CrossEntropyLoss(label_smoothing=0.1)(shifted, labels[..., 1:].reshape(-1))


def _gathered(logits: Any, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    found = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None])
    return -found.mean()


def _masked(logits: Any, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    logits = logits.clone()
    logits[..., 3] = -5.0
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1)) + 0 * logits.sum()


def _thrice(logits: Any, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    flat = logits.float().view(-1, vocab_size)
    first = F.cross_entropy(flat, labels.view(-1), reduction="none")
    return first.mean() + 1e-3 * flat.logsumexp(-1).square().mean() + (2.0 * flat).tanh().mean()


@pytest.mark.parametrize(("loss", "without"), [(_classic, 1), (_gathered, 0), (_thrice, 1)])
def test_any_loss_of_logits_is_what_it_was(loss: Any, without: int) -> None:
    model, batch = make("llama"), zoo.batch()
    model.loss_function = loss
    expected = step(model, batch)
    with opake.patched(model):
        found = step(model, batch, loss_only=True)
        assert done(model) == without
    assert_stocks(found, expected)
    assert (found[0].logits is None) == (loss is _classic)


def test_logits_that_a_loss_changes_are_changed() -> None:
    model, batch = make("llama"), zoo.batch()
    model.loss_function = _masked
    expected = step(model, batch)
    with opake.patched(model):
        assert_stocks(step(model, batch, loss_only=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_stocks(dtype: torch.dtype) -> None:
    model, batch = make("llama"), zoo.batch()
    exact = step(model, batch)
    with torch.autocast("cpu", dtype):
        expected = step(model, batch)
        with opake.patched(model):
            found = step(model, batch, loss_only=True)
            assert done(model) == 1
    assert found[0].loss.dtype == expected[0].loss.dtype
    largest = max(g.abs().max().item() for g in exact[1].values())
    for name, grad in exact[1].items():
        ours, theirs = (error(x[1][name], grad, 1e-2 * largest) for x in (found, expected))
        assert ours <= 2 * theirs + GRADIENT_BAR[torch.float32], name


# --- the scope


@pytest.mark.parametrize("tile", [True, 5])
def test_tiles_of_the_vocabulary(tile: Any) -> None:
    model, batch = make("gemma2"), zoo.batch(zoo.RIGHT)
    expected, loop = step(model, batch), stock_loop(model, batch)
    with opake.patched(model, chunked_linear_cross_entropy=tile) as scope:
        rows = {r.concern: r for r in scope.explain()}
        assert rows[CONCERN].reason == "chunked_linear_cross_entropy takes its place"
        assert rows["chunked_linear_cross_entropy"].status == "on"
        assert_stocks(step(model, batch, loss_only=True), expected)
        assert sum(counts(model, "chunked_linear_cross_entropy")["fell_back"].values()) == 1
        with torch.no_grad():
            found = per_example(model, batch, batched=False, loss_only=True)
    zoo.assert_alike([found], loop, model, batch)


def test_flags() -> None:
    model = make("llama")
    assert row(model).status == "on"
    assert row(model, performance=False).status == "off"
    assert row(model, fused_linear_cross_entropy=False).status == "off"
    assert row(model, mode="infer").status == "off"
    assert row(model, kernels=["linear_cross_entropy"]).status == "on"
    assert row(model.model).reason == "left to HF: the model has no head"


def test_calls_of_several_threads_and_models_are_apart() -> None:
    models = [make("llama"), make("gemma2")]
    batch, found = zoo.batch(), {}
    expected = [step(model, batch) for model in models]

    def run(index: int) -> None:
        for _ in range(3):
            found[index] = step(models[index], batch, loss_only=True)

    with opake.patched(models[0]), opake.patched(models[1]):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(2):
        assert_stocks(found[i], expected[i])


def test_an_error_inside_leaves_nothing_behind() -> None:
    model, batch = make("llama"), zoo.batch()

    def broken(**kwargs: Any) -> Tensor:
        raise RuntimeError("mine")

    expected = step(model, batch)[0].logits
    with opake.patched(model):
        model.loss_function = broken
        with pytest.raises(RuntimeError, match="mine"):
            model(**batch, loss_only=True)
        found = model(batch["input_ids"]).logits
    del model._loss_function
    assert same_bits(found, expected)


def test_logits_are_never_whole() -> None:
    model, batch = make("llama", vocab_size=150_000), zoo.batch(size=8, length=64)
    logits = 4 * 8 * 64 * 150_000

    def largest(**options: Any) -> int:
        """The most that one operator allocates."""
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            step(model, batch, **options)
        return max(event.self_cpu_memory_usage for event in profile.events())

    with opake.patched(model):
        assert largest(loss_only=True) < logits / 3
    assert largest() >= logits


def test_a_compiled_model_takes_the_argument() -> None:
    model, batch = make("llama").eval(), zoo.batch()
    expected = model(**batch, use_cache=False).loss
    with opake.patched(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(**batch, use_cache=False, loss_only=True).loss
    assert error(found.detach(), expected.detach()) <= FUSED_BAR


# --- logits that are put off


def deferred() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("no loss was asked for")

    head = Head(hidden, 5, torch.float32, lambda: F.linear(hidden, weight), loss)
    return head.logits, F.linear(hidden, weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x / 3 * 2,
        lambda x: 2 * torch.tanh(x / 7.0) + x,
        lambda x: x.float().view(-1, 5)[1:, :],
        lambda x: x.view(6, 5)[0],
        lambda x: x[:, -1],
        lambda x: x[..., 1:, :].reshape(-1, 5).softmax(-1),
        lambda x: x[..., 2],
        lambda x: x.double().mul(2).div(3).tanh(),
        lambda x: torch.ones(5) * x - x,
        lambda x: torch.cat([x, x], 1),
        lambda x: x.argmax(-1),
        lambda x: (x > 0) & (x == x),
        lambda x: torch.stack(list(x)),
        lambda x: x * True,
        lambda x: x / 0,
        lambda x: torch.where(x > 0, x, -x),
        lambda x: F.log_softmax(x, -1).to(torch.float64),
        lambda x: x.transpose(1, 2) @ x,
        lambda x: torch.tensor([len(x), x.dim(), x.ndim, *x.shape, x.size(-1), x.numel()]),
    ],
)
def test_logits_that_are_put_off_are_the_logits(change: Any) -> None:
    put_off, logits = deferred()
    found, expected = change(put_off), change(logits)
    found = found.real if isinstance(found, Deferred) else found
    assert same_bits(found, expected)


def test_a_change_in_place_reaches_every_view() -> None:
    put_off, logits = deferred()
    for x in (put_off, logits):
        flat = x.view(-1, 5)
        x[0, 0] = 7.0
        x *= 2
        assert same_bits(flat[0] + 0, torch.full((5,), 14.0))
