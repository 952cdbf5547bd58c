"""What people do to a model in a notebook or a training script, around and inside a scope."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import multiprocessing.reduction
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from oracle import Snapshot, assert_exact, per_example, same_bits, stock_loop
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch._functorch import eager_transforms
from torch.utils.data import DataLoader, Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import opake

Make = Callable[..., Any]
Batch = dict[str, torch.Tensor]

# transformers 5.24 has new names for gradient checkpointing, which 5.17 lacks.
renamed = pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_enable)?` is deprecated")


@pytest.fixture
def model(make_llama: Make) -> Iterator[Any]:
    made = make_llama()
    made(**batch())  # what a forward leaves behind is not ours
    yield made
    opake.unpatch(made)


def batch(rows: int = 3, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1 % rows, length - length // 3 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def with_lora(model: Any, **fields: Any) -> Any:
    torch.manual_seed(1)
    fields = {"r": 4, "target_modules": ["q_proj", "v_proj"], **fields}
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **fields)).eval()


def assert_parity(model: Any, expected: Any, inputs: Batch | None = None) -> None:
    for batched in (True, False):
        assert_exact(per_example(model, inputs or batch(), batched=batched), expected)


def assert_stock(*modules: nn.Module) -> None:
    """Assert that nothing of a scope is on any module."""
    for module in itertools.chain.from_iterable(module.modules() for module in modules):
        assert not hasattr(type(module), "_opake_stock"), module
        assert "_opake_slots" not in vars(module), module
        assert "forward" not in vars(module), module
        if isinstance(module, nn.Module) and "config" in vars(module):
            assert type(module.config) is LlamaConfig


# ---- entering and leaving


def test_user_sets_and_a_scope_leave_in_any_order(model: Any) -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    before, expected = Snapshot(model), model(**batch()).logits
    for order in itertools.permutations(range(3)):
        sets: list[Any] = [
            opake.PatchSet([opake.ForwardPatch(m, wrapper) for m in (model, model.model)]),
            opake.patched(model),
            opake.PatchSet([opake.ForwardPatch(model.model, wrapper)]),
        ]
        for one in sets:
            one.__enter__()
        for index in order:
            assert torch.equal(model(**batch()).logits, expected)
            sets[index].__exit__(None, None, None)
        assert not before.changes(), order


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_over_one_backbone(make_llama: Make, first: int) -> None:
    models = [make_llama(), make_llama()]
    models[1].model = models[0].model
    expected = [stock_loop(model, batch()) for model in models]
    before = Snapshot(*models)
    scopes = [opake.patched(model) for model in models]
    for scope in scopes:
        scope.__enter__()
    for index in (first, 1 - first):
        assert_parity(models[index], expected[index])
        scopes[index].__exit__(None, None, None)
    assert not before.changes()


def test_a_scope_on_the_base_and_one_on_the_head(model: Any) -> None:
    expected, before = stock_loop(model, batch()), Snapshot(model)
    with opake.patched(model.model):
        head = opake.patch(model)
    assert_parity(model, expected)
    head.unpatch()
    assert not before.changes()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, asyncio.CancelledError]
)
def test_whatever_the_body_raises(model: Any, error: type[BaseException]) -> None:
    before = Snapshot(model)
    with pytest.raises(error), opake.patched(model):
        raise error
    assert not before.changes()


def test_tasks_of_one_loop_share_a_scope(model: Any) -> None:
    expected, before = stock_loop(model, batch()), Snapshot(model)

    async def task(delay: int) -> None:
        with opake.patched(model):
            await asyncio.sleep(delay / 1000)
            assert_parity(model, expected)

    async def run() -> None:
        cancelled = asyncio.create_task(task(10**6))
        await asyncio.gather(*map(task, range(3)))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(run())
    assert not before.changes()


def test_a_decorated_function_that_calls_itself(model: Any) -> None:
    before = Snapshot(model)

    @opake.patched(model)
    def patched_at_depth(depth: int) -> bool:
        return patched_at_depth(depth - 1) if depth else bool(opake.active())

    assert patched_at_depth(3)
    assert not before.changes()


def test_scopes_and_the_runtime_share_first_order(model: Any) -> None:
    stock, before = eager_transforms.grad_and_value_impl, Snapshot(model)
    process, outer, inner = opake.runtime(), opake.patched(model), opake.patched(model)
    for scope in (process, outer, inner):
        scope.__enter__()
    process.__exit__(None, None, None)
    with opake.runtime(first_order=False):
        assert eager_transforms.grad_and_value_impl is not stock
    outer.__exit__(None, None, None)
    assert eager_transforms.grad_and_value_impl is not stock
    inner.__exit__(None, None, None)
    assert eager_transforms.grad_and_value_impl is stock
    assert not before.changes()


# ---- threads and processes


def test_threads_with_a_model_each_and_one_config(make_llama: Make) -> None:
    config = make_llama().config
    models = [make_llama(config) for _ in range(3)]
    expected = stock_loop(models[0], batch())
    for model in models:
        model(**batch())
    before, failures = Snapshot(*models), []

    def run(model: Any) -> None:
        try:
            for _ in range(4):
                with opake.patched(model):
                    assert_parity(model, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not before.changes()


def test_a_thread_that_runs_a_stock_model_beside(make_llama: Make) -> None:
    patched, beside = make_llama(config := LlamaConfig(**_SMALL)), make_llama(config)
    expected, done, wrong = beside(**batch()).logits, threading.Event(), []

    def run() -> None:
        while not done.is_set():
            if not torch.equal(beside(**batch()).logits, expected):
                wrong.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(30):
        with opake.patched(patched):
            patched(**batch())
    done.set()
    thread.join()
    assert not wrong


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="with a GPU, torch refuses a backward in a child forked after one in the parent",
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("patched_before", [True, False])
def test_a_forked_child_enters_and_leaves(model: Any, patched_before: bool) -> None:
    expected = stock_loop(model, batch())
    if patched_before:
        opake.patch(model)
    child = os.fork()
    if child == 0:
        try:
            with opake.patched(model):
                assert_parity(model, expected)
            opake.unpatch(model)
            assert_stock(model)
            assert_exact(stock_loop(model, batch()), expected)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_spawned_child_gets_is_stock(model: Any) -> None:
    with opake.patched(model):
        sent = multiprocessing.reduction.ForkingPickler.dumps(model)
    assert b"opake" not in bytes(sent)
    received = pickle.loads(sent)
    assert_stock(received)
    assert torch.equal(received(**batch()).loss, model(**batch()).loss)


class _Scores(Dataset[torch.Tensor]):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(**batch()).loss


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_loader_hold_the_model(model: Any) -> None:
    expected = model(**batch()).loss
    with opake.patched(model):
        losses = list(DataLoader(_Scores(model), num_workers=1))
    assert all(torch.equal(loss[0], expected) for loss in losses)


# ---- copies


def _torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert b"opake" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), _torch_save]
)
@pytest.mark.parametrize("part", ["", "model", "model.layers", "model.layers.0.self_attn"])
def test_copies_of_parts_are_stock(model: Any, duplicate: Any, part: str) -> None:
    with opake.patched(model):
        made = duplicate(model.get_submodule(part))
        assert_stock(made)
    assert_stock(made)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_peft_model_are_stock(model: Any, duplicate: Any) -> None:
    peft = with_lora(model)
    expected = peft(**batch()).loss
    with opake.patched(peft):
        made = duplicate(peft)
        assert torch.equal(made(**batch()).loss, expected)
    assert_stock(made)
    assert torch.equal(made(**batch()).loss, expected)


def test_a_checkpoint_written_and_read_inside(model: Any, tmp_path: Any) -> None:
    expected = stock_loop(model, batch())
    with opake.patched(model):
        model.save_pretrained(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config._attn_implementation == "sdpa"
        assert_exact(stock_result(loaded), expected)
    assert_stock(loaded)
    with opake.patched(loaded):
        assert_parity(loaded, expected)


def stock_result(model: Any) -> Any:
    """The loop of :func:`stock_loop`, for a stock model while another one's scope is open."""
    with mock.patch.object(opake, "active", list):
        return stock_loop(model, batch())


# ---- what is done to the model inside


def test_changes_of_the_model_inside_last(model: Any) -> None:
    before = [type(module) for module in model.modules()]
    with opake.patched(model):
        model.to(torch.bfloat16)
        model.float()
        model.requires_grad_(False)
        model.requires_grad_(True)
        model.resize_token_embeddings(80, mean_resizing=False)
        model.set_attn_implementation("eager")
        model.train()
        model.eval()
        found = per_example(model, batch(), batched=False)
    assert model.config.vocab_size == 80
    assert model.config._attn_implementation == "eager"
    assert [type(module) for module in model.modules()] == before
    assert_stock(model)
    assert_exact(found, stock_loop(model, batch()))


@renamed
def test_checkpointing_enabled_inside_and_trained_with_after(make_llama: Make) -> None:
    def step(model: Any) -> list[Any]:
        model.zero_grad()
        model(**batch()).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model, stock = make_llama().train(), make_llama().train()
    stock.gradient_checkpointing_enable()
    expected = step(stock)
    with opake.patched(model):
        model.gradient_checkpointing_enable()
        assert same_bits(step(model), expected)
    assert same_bits(step(model), expected)


def test_parts_exchanged_inside(make_llama: Make) -> None:
    model, other = make_llama(), make_llama()
    backbone, expected = model.model, stock_loop(other, batch())
    with opake.patched(model):
        other.model = backbone
        model.model = make_llama().model
        model.model.layers[0].self_attn = copy.deepcopy(backbone.layers[0].self_attn)
        model.lm_head = nn.Linear(32, 64, bias=False)
    assert_stock(model, other, backbone)
    assert_exact(stock_loop(other, batch()), expected)


def test_the_config_edited_inside_through_either_view(model: Any) -> None:
    config, attention = model.config, model.model.layers[0].self_attn
    with opake.patched(model):
        attention.config.first = 1
        model.config.second = 2
        del model.config.first
        model.config.update({"use_cache": False})
        assert attention.config == model.config == attention.config
        texts = [(c.to_dict(), c.to_json_string(), repr(c)) for c in (config, attention.config)]
        assert texts[0] == texts[1]
    assert attention.config is model.config is config
    assert (config.second, config.use_cache, hasattr(config, "first")) == (2, False, False)


def test_hooks_registered_inside_last(model: Any) -> None:
    calls: list[Any] = []
    with opake.patched(model):
        for module in (model, model.model, model.model.layers[0].self_attn):
            module.register_forward_hook(lambda module, args, output: calls.append(module))
        model(**batch())
    model(**batch())
    assert len(calls) == 6


def test_a_mock_on_a_patched_forward_inside(model: Any) -> None:
    before = Snapshot(model)
    with opake.patched(model):
        with mock.patch.object(model.model, "forward", wraps=model.model.forward) as spy:
            model(**batch())
        assert spy.called
    assert not before.changes()


def test_a_model_on_meta(make_llama: Make) -> None:
    with torch.device("meta"):
        model = make_llama()
    before = Snapshot(model)
    with opake.patched(model):
        assert model(batch()["input_ids"].to("meta")).logits.is_meta
    assert before._state[0][1][0] == "training"
    assert_stock(model)


# ---- PEFT


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["self_attn"], "target_modules": ["gate_proj"]},
        {"modules_to_save": ["embed_tokens"]},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"target_modules": "all-linear"},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [1, 2, 3]},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_adapters_put_on_inside_and_before(make_llama: Make, fields: dict[str, Any]) -> None:
    expected = stock_loop(with_lora(make_llama(), **fields), batch())
    model = make_llama()
    with opake.patched(model):
        peft = with_lora(model, **fields)
        assert_parity(peft, expected)
    assert_stock(peft)
    assert_exact(stock_loop(peft, batch()), expected)
    with opake.patched(peft):
        assert_parity(peft, expected)


def test_adapters_switched_disabled_merged_and_unloaded_inside(model: Any) -> None:
    off = model(**batch()).loss
    peft = with_lora(model)
    torch.manual_seed(2)
    peft.add_adapter("b", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    expected = {}
    for name in ("b", "default"):
        peft.set_adapter(name)
        expected[name] = stock_loop(peft, batch())
    with opake.patched(peft):
        for name in ("b", "default"):
            peft.set_adapter(name)
            assert_parity(peft, expected[name])
        with peft.disable_adapter():
            assert torch.equal(peft(**batch()).loss, off)
    assert_stock(peft)
    with opake.patched(peft):
        merged = peft.merge_and_unload()
    assert merged is model
    assert_stock(merged)


def test_adapters_saved_and_loaded_inside(make_llama: Make, tmp_path: Any) -> None:
    peft, base = with_lora(make_llama()), make_llama()
    expected = stock_loop(peft, batch())
    with opake.patched(peft):
        peft.save_pretrained(tmp_path)
    with opake.patched(base):
        loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
        assert_parity(loaded, expected)
    assert_stock(loaded)


def test_functional_takes_a_peft_model(model: Any) -> None:
    peft = with_lora(model)
    expected = stock_loop(peft, batch())
    fmodel, params = opake.functional.make_functional(peft)
    with opake.patched(peft):
        grads, losses = opake.functional.per_example_grads(
            lambda params, example: fmodel(params, **example).loss, params, batch(), chunk_size=2
        )
    assert_exact(type(expected)(losses, grads), expected)


# ---- accelerate and the Trainer


def test_offloaded_inside(model: Any) -> None:
    expected = model(**batch()).logits
    with opake.patched(model):
        cpu_offload(model, execution_device="cpu")
        assert torch.equal(model(**batch()).logits, expected)
    assert torch.equal(model(**batch()).logits, expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(**batch()).logits, expected)
    for module in model.modules():
        if "forward" in vars(module):
            assert vars(module)["forward"].__func__ is type(module).forward


class _Rows(Dataset[Batch]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        return {name: x[index] for name, x in batch(8).items()}


@renamed
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_trainer_trains_as_in_stock(
    make_llama: Make, tmp_path: Any, options: dict[str, Any]
) -> None:
    def train(model: Any) -> None:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
            **options,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=_Rows())
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))

    stock, model = make_llama(), make_llama()
    train(stock)
    with opake.patched(model):
        train(model)
    assert same_bits(list(model.parameters()), list(stock.parameters()))
    for one in (stock, model):
        train(one)
    assert same_bits(list(model.parameters()), list(stock.parameters()))
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


# ---- numbers


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.bool, torch.uint8, torch.float32], ids=str
)
def test_a_padding_mask_of_any_dtype(model: Any, dtype: torch.dtype) -> None:
    inputs = {**batch(), "attention_mask": batch()["attention_mask"].to(dtype)}
    expected = stock_loop(model, inputs)
    with opake.patched(model):
        assert_parity(model, expected, inputs)


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 1), (3, 2), (2, 33)], ids=str)
@pytest.mark.parametrize("kind", ["right", "left", "none", "positions"])
def test_every_shape(model: Any, shape: tuple[int, int], kind: str) -> None:
    inputs = batch(*shape)
    if kind == "left":
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    if kind == "none":
        del inputs["attention_mask"]
    if kind == "positions":
        inputs["position_ids"] = (torch.arange(shape[1]) + 3).repeat(shape[0], 1)
    expected = stock_loop(model, inputs)
    with opake.patched(model):
        assert_parity(model, expected, inputs)


@pytest.mark.parametrize(
    ("pad", "labels"),
    [
        (0, torch.tensor([0, 1, 2])),
        (None, torch.tensor([0, 1, 2])),
        (0, torch.tensor([[0.0, 1, 0], [1, 1, 0], [0, 0, 0]])),
        (0, torch.tensor([0.5, -1.0, 2.0])),
    ],
    ids=["classes", "no-pad-token", "several-labels", "regression"],
)
def test_a_classifier_with_and_without_a_pad_token(
    make_llama: Make, pad: int | None, labels: torch.Tensor
) -> None:
    one = labels.ndim == 1 and labels.is_floating_point()
    config = LlamaConfig(**_SMALL, pad_token_id=pad, num_labels=1 if one else 3)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    inputs = {**batch(), "labels": labels}
    expected = stock_loop(model, inputs)
    with opake.patched(model):
        assert_parity(model, expected, inputs)


def test_a_subclass_with_a_loss_of_its_own() -> None:
    class Weighted(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            logits, targets = output.logits[..., :-1, :], labels[..., 1:]
            output.loss = 2 * nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
            return output

    torch.manual_seed(0)
    model = Weighted(LlamaConfig(**_SMALL)).eval()
    expected, before = stock_loop(model, batch()), Snapshot(model)
    with opake.patched(model):
        assert_parity(model, expected)
        assert type(pickle.loads(pickle.dumps(model.model))) is type(model.model).__mro__[1]
    assert type(model) is Weighted
    assert not before.changes()
