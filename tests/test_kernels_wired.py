"""What fused kernels in a model must keep: outputs, counts, hooks, adapters, dtypes, tokens."""

from __future__ import annotations

import warnings
from inspect import getsource
from typing import Any

import pytest
import torch
import zoo
from interpreter import interpreted
from oracle import MOE_BAR, error, errors, per_example, same_bits, stock_loop
from peft import LoraConfig, get_peft_model
from test_kernels_in_models import FUSED_BAR, make, runs, used
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

import opake
from opake.plan import norms

_CASTS_LAST = "(self.weight * hidden_states).to(input_dtype)"  # not in transformers 5.17
ORDERS = {
    "llama": ("llama", 0.0),
    "olmo2": ("gemma", 0.0),
    "gpt_oss": ("gemma", 0.0),
    "deepseek_v4": ("gemma" if _CASTS_LAST in getsource(DeepseekV4RMSNorm) else "llama", 0.0),
    "gemma": ("gemma", 1.0),
    "gemma2": ("gemma", 1.0),
    "qwen3_next": ("gemma", 1.0),
    "qwen3_5_moe_text": ("gemma", 1.0),
    "helium": ("gemma", 0.0),
}
LAYOUTS = {
    "llama": "halves",
    "cohere": "pairs",
    "cohere2": "pairs",
    "glm": "pairs, angles in the first half",
    "glm4": "pairs, angles in the first half",
    "gpt_oss": "halves, half a table",
    "llama4_text": "pairs, complex",
}


@zoo.families
def test_generate_gives_stocks_tokens(model_type: str) -> None:
    if zoo.lm_head(model_type) != "causal":
        pytest.skip("it generates nothing")
    check_tokens(model_type)


@interpreted
def check_tokens(model_type: str) -> None:
    model, ids = make(model_type).eval(), zoo.tokens(2)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": zoo.PAD}
    expected = model.generate(ids, **options)
    with opake.patched(model):
        assert torch.equal(model.generate(ids, **options), expected)
        stats = opake.guard_stats(model)
    assert all(stats[c]["ran"] for c in used(model_type) if c != "cross_entropy")


@pytest.mark.parametrize("model_type", ORDERS)
@interpreted
def test_a_norm_is_known_by_its_order_and_offset(model_type: str) -> None:
    mode, offset = ORDERS[model_type]
    found = [norms.examine_rms(m) for m in make(model_type).modules()]
    formulas = {f.formula for f in found if isinstance(f, norms.Found) and f.formula.weighted}
    assert {(f.casting_mode, f.offset) for f in formulas} == {(mode, offset)}


@pytest.mark.parametrize("model_type", LAYOUTS)
@interpreted
def test_a_rotary_embedding_is_known_by_its_layout(model_type: str) -> None:
    row = next(r for r in opake.check(make(model_type)) if r.concern == "rope")
    assert row.target.endswith(f"({LAYOUTS[model_type]})")


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gemma", "cohere", "glm4", "phi3"])
@interpreted
def test_half_precision_is_as_near_as_stocks(model_type: str) -> None:
    model, batch = make(model_type), zoo.batch()
    truth = model(**batch).logits
    model = model.bfloat16()
    stock = model(**batch)
    with opake.patched(model):
        found = model(**batch)
        assert all(opake.guard_stats(model)[c]["ran"] for c in runs(model_type))
    assert found.logits.dtype == stock.logits.dtype
    assert found.loss.dtype == stock.loss.dtype

    def off(logits: Tensor) -> float:
        return (logits.float() - truth).square().mean().sqrt().item()

    assert off(found.logits) <= 1.3 * off(stock.logits)


@interpreted
def test_the_loss_of_labels_is_stocks_in_every_form() -> None:
    model, batch = make("llama").eval(), zoo.batch(zoo.RIGHT)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    forms: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 10},
        {"labels": labels, "num_items_in_batch": torch.tensor(10)},
        {"labels": labels, "shift_labels": shifted},
        {"labels": labels.masked_fill(labels == -100, 7), "ignore_index": 7},
        {"labels": labels, "return_dict": False},
        {"labels": labels[:, -3:], "logits_to_keep": 3},
        {"labels": torch.full_like(labels, -100)},
        {},
    ]
    for form in forms:
        stock = model(input_ids=ids, attention_mask=mask, **form)
        with opake.patched(model):
            found = model(input_ids=ids, attention_mask=mask, **form)
            ran = opake.guard_stats(model)["cross_entropy"]["ran"]
        assert ran == ("labels" in form), form
        assert type(found) is type(stock)
        assert len(found) == len(stock)
        a, b = (x if isinstance(x, tuple) else x.to_tuple() for x in (found, stock))
        for x, y in zip(a, b, strict=True):
            if isinstance(x, Tensor):
                assert error(x.detach(), y.detach()) <= FUSED_BAR, form


@interpreted
def test_two_micro_batches_are_one_batch() -> None:
    model = make("llama")
    ids = zoo.tokens(2)
    labels = ids.clone()
    labels[0, 4:] = -100
    whole = model(ids, labels=labels).loss
    with opake.patched(model):
        parts = [
            model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=8).loss
            for i in range(2)
        ]
    assert error(sum(parts).detach(), whole.detach()) <= FUSED_BAR


@interpreted
def test_labels_out_of_range_and_a_loss_of_somebodys() -> None:
    model, ids = make("llama"), zoo.tokens()
    with opake.patched(model), pytest.raises(IndexError):
        model(ids, labels=ids + zoo.VOCAB)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + 5
    row = next(r for r in opake.check(model) if r.concern == "cross_entropy")
    assert (row.status, "loss function of its own" in row.reason) == ("skipped", True)
    with opake.patched(model):
        assert model(ids, labels=ids).loss == 5


@interpreted
def test_eval_has_gradients_and_no_grad_has_none() -> None:
    model, batch = make("qwen3").eval(), zoo.batch(zoo.LEFT)
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=True)
        assert not model.train()(**batch).loss.requires_grad
    assert errors(found, expected)[1] <= FUSED_BAR


@interpreted
def test_hooks_on_norms_run_and_keep_add_and_norm_apart() -> None:
    model, ids = make("llama"), zoo.tokens()
    norm = model.model.layers[0].post_attention_layernorm
    seen: list[Tensor] = []
    handle = norm.register_forward_hook(lambda m, args, out: seen.append(args[0]) or 2 * out)
    expected = model(ids).logits
    with opake.patched(model):
        found = model(ids).logits
        stats = opake.guard_stats(model)
    handle.remove()
    assert len(seen) == 2
    assert error(seen[1].detach(), seen[0].detach()) <= FUSED_BAR
    assert error(found.detach(), expected.detach()) <= FUSED_BAR
    assert stats["fused_add_rms_norm"] == {
        "ran": 1,
        "fell_back": {"the norm has hooks, or another forward": 1},
    }
    assert stats["rms_norm"]["ran"] == 4


@interpreted
def test_patched_norms_look_like_stocks() -> None:
    model = make("llama")
    norm = model.model.norm
    before = (repr(model), set(vars(norm)), dir(type(norm)))
    with opake.patched(model):
        assert repr(model) == before[0]
        assert type(norm).__name__ == "LlamaRMSNorm"
    assert (repr(model), set(vars(norm)), dir(type(norm))) == before


@interpreted
def test_trained_copies_of_modules_and_switched_adapters() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm", "lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        peft = get_peft_model(make("llama"), config)
    peft.add_adapter("b", LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "modules_to_save" in name or "lora_B" in name:
                p.add_(0.1)
    batch = zoo.batch()

    def losses() -> list[Tensor]:
        found = [peft(**batch).loss]
        with peft.disable_adapter():
            found.append(peft(**batch).loss)
        peft.set_adapter("b")
        found.append(peft(**batch).loss)
        peft.set_adapter("default")
        peft.zero_grad()
        found.append(peft(**batch).loss)
        found[-1].backward()
        return [x.detach() for x in found]

    stock = losses()
    grads = {n: p.grad.clone() for n, p in peft.named_parameters() if p.grad is not None}
    with opake.patched(peft):
        found = losses()
    assert any("modules_to_save.default" in name for name in grads)
    largest = max(g.abs().max().item() for g in grads.values())
    for name, p in peft.named_parameters():
        if name in grads:
            assert error(p.grad, grads[name], 1e-3 * largest) <= FUSED_BAR
    assert error(torch.stack(found), torch.stack(stock)) <= FUSED_BAR


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@interpreted
def test_weights_are_read_at_call_time() -> None:
    model, ids = make("llama"), zoo.tokens()
    with opake.patched(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        found = model(ids).logits
    assert error(found.detach(), model(ids).logits.detach()) <= FUSED_BAR
    parametrize.register_parametrization(model.model.norm, "weight", _Doubled())
    expected = model(ids).logits
    with opake.patched(model):
        assert error(model(ids).logits.detach(), expected.detach()) <= FUSED_BAR


@interpreted
def test_what_a_kernel_does_not_take_runs_stocks_code_and_is_counted() -> None:
    model, ids = make("gpt2"), zoo.tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(ids).logits
        with opake.patched(model):
            found = model(ids).logits
            stats = opake.guard_stats(model)["layer_norm"]
    assert same_bits(found, expected)
    assert stats == {"ran": 0, "fell_back": {"autocast chooses the dtype of a layer norm": 5}}


@interpreted
def test_a_quantised_weight_runs_stocks_code() -> None:
    model, ids = make("llama"), zoo.tokens()
    for name, module in model.named_modules():
        if "norm" in name:
            weight = (3 * module.weight.detach()).to(torch.int8)
            module.weight = nn.Parameter(weight, requires_grad=False)
    expected = model(ids).logits
    with opake.patched(model):
        found = model(ids).logits
        stats = opake.guard_stats(model)
    assert error(found.detach(), expected.detach()) <= FUSED_BAR
    for concern in ("rms_norm", "fused_add_rms_norm"):
        reasons = {"torch.int8 is computed by the reference"}
        assert (stats[concern]["ran"], {*stats[concern]["fell_back"]}) == (0, reasons)


@interpreted
def test_sharded_models_run_the_kernels_and_distributed_weights_stocks_code() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        check_sharded(mesh, layers)
        check_sharded(mesh, lambda model: [m for m in model.modules() if not [*m.children()]])
        check_sharded(mesh, lambda model: [m for x in model.model.layers for m in x.children()])
        check_distributed(mesh, make("llama"))
    finally:
        distributed.destroy_process_group()


def layers(model: Any) -> Any:
    return model.model.layers


def check_sharded(mesh: Any, parts: Any) -> None:
    model, batch = make("llama"), zoo.batch()
    stock = model(**batch)
    counts = {r.concern: r.count for r in opake.check(model)}
    for part in parts(model):
        if [*part.parameters()]:
            fully_shard(part, mesh=mesh)
    assert {r.concern: r.count for r in opake.check(model)} == counts
    with opake.patched(model):
        found = model(**batch)
        found.loss.backward()
        stats = opake.guard_stats(model)
    assert error(found.logits.detach(), stock.logits.detach()) <= FUSED_BAR
    hooked = {"the norm has hooks, or another forward": 2}  # FSDP's, which gather its weight
    for concern in runs("llama"):
        if concern == "fused_add_rms_norm" and stats[concern]["ran"] == 0:
            assert stats[concern]["fell_back"] == hooked
            assert parts is not layers
        else:
            assert stats[concern]["ran"] > 0
            assert stats[concern]["fell_back"] == {}


def check_distributed(mesh: Any, model: Any) -> None:
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh))
    x = distribute_tensor(torch.randn(1, 3, norm.weight.shape[0]), mesh)
    expected = norm(x)
    with opake.patched(model):
        assert torch.equal(norm(x).to_local(), expected.to_local())
        stats = opake.guard_stats(model)["rms_norm"]
    assert stats == {"ran": 0, "fell_back": {"an input is a DTensor": 1}}


@interpreted
def test_every_kernel_in_one_compiled_model() -> None:
    model, ids = make("llama").eval(), zoo.tokens()
    expected = model(ids, labels=ids, use_cache=False)
    torch._dynamo.reset()
    for _ in range(2):
        with opake.patched(model):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            found = compiled(ids, labels=ids, use_cache=False)
    assert error(found.logits.detach(), expected.logits.detach()) <= MOE_BAR
    assert error(found.loss.detach(), expected.loss.detach()) <= FUSED_BAR
