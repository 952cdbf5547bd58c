"""The generic family: what is deduced, how it is verified, and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import zoo
from leaks import Leaks
from oracle import GRADIENT_BAR, LOSS_BAR, Snapshot, errors, model_loss, per_example, stock_loop
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.arcee import modeling_arcee
from transformers.models.arcee.modeling_arcee import ArceeForCausalLM, ArceeModel

import opake
from opake import families
from opake.compat.tiny import tiny_config, tiny_fields
from opake.errors import UnsupportedAttention, UnsupportedModel
from opake.plan import generic, trial
from opake.plan.deduce import deduce

ISLAND_BAR = 1e-5
"""Routers and norms compute in fp32 in an fp64 model too, and what follows them rounds with them:
the bar of fp32."""

FIND = families.find
UNDECLARED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 4},
    "cohere2_moe": {},
    "deepseek_v32": {},
    "distilbert": {},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "electra": {},
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "jamba": {},
    "mamba": {},
    "minimax": {},
    "modernbert": {},
    "nanochat": {},
    "olmo": {},
    "openai-gpt": {},
    "roformer": {},
    "seed_oss": {},
    "vaultgemma": {},
}
"""Families that nobody declared, and what stock's defaults lack."""


@pytest.fixture(autouse=True)
def _nobody_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep these undeclared, whoever adds a file for one of them."""
    monkeypatch.setattr(families, "find", lambda name: None if name in UNDECLARED else FIND(name))


MASKED = ("distilbert", "electra", "modernbert", "roformer")


def tiny(name: str, attn: str | None = "sdpa", **fields: Any) -> Any:
    """The same tiny fp64 model at every call."""
    config = AutoConfig.for_model(name)
    shared: dict[str, Any] = {"vocab_size": zoo.VOCAB, "initializer_range": 0.3}
    shared |= {"pad_token_id": zoo.PAD, "bos_token_id": 1, "eos_token_id": 2}
    shared |= {"dtype": "float64", **dict.fromkeys(zoo.probabilities(config), 0.0)}
    config = tiny_config(config, **{**shared, **UNDECLARED.get(name, {}), **fields})
    auto: Any = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    torch.manual_seed(0)
    options = {} if attn is None else {"attn_implementation": attn}
    model = auto.from_config(config, **options).double().train()
    if has_experts(model):
        model.set_experts_implementation("batched_mm")  # stock's grouped_mm has no fp64 on a CPU
    return model


def has_experts(model: nn.Module) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Start with no verdicts; lists the models that are tried."""
    monkeypatch.setattr(generic, "_VERDICTS", weakref.WeakKeyDictionary())
    tried: list[Any] = []

    def loop(model: Any, stock: Callable[[Any], Any] = trial.loop) -> Any:
        tried.append(type(model).__name__)
        return stock(model)

    monkeypatch.setattr(trial, "loop", loop)
    return tried


# ---- what is deduced


@pytest.mark.parametrize("name", zoo.FIELDS)
def test_deduction_agrees_with_what_is_declared(name: str) -> None:
    model = zoo.tiny(name, None)
    declared, found = FIND(name), deduce(model)
    assert declared is not None
    present = {cls.__name__ for m in model.modules() for cls in type(m).__mro__}
    assert (found.module, found.base) == (declared.module, declared.base)
    assert set(found.masks) == set(declared.masks)
    assert found.masks_in == declared.masks_in
    assert set(found.attention) == present & set(declared.attention)
    assert set(found.own_sdpa) == present & set(declared.own_sdpa)
    assert found.cache is declared.cache


class Inheriting(ArceeModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Helped(ArceeModel):
    def forward(self, input_ids: Any) -> Any:
        return helper(input_ids)


def helper(x: Any) -> Any:
    return modeling_arcee.create_causal_mask(x)


class OddAttention(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def with_base(cls: type) -> Any:
    model = tiny("arcee")
    model.model.__class__ = cls
    return model


def without_dispatch(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn = OddAttention()
    return model


def with_local_base() -> Any:
    class Local(ArceeModel):
        forward = modeling_arcee.ArceeModel.forward

    Local.__module__ = modeling_arcee.__name__
    return with_base(Local)


def with_second_base() -> Any:
    model = tiny("arcee")
    model.extra = AutoModel.from_config(tiny("olmo").config)
    return model


def encoder_decoder() -> Any:
    model = tiny("arcee")
    model.config.is_encoder_decoder = True
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "through a function": (lambda: with_base(Helped), "through the function helper"),
    "several bases": (with_second_base, "several of its modules build masks: ArceeModel and Olmo"),
    "two functions": (lambda: with_base(Twice), "builds masks in two methods: forward and second"),
    "odd attention": (lambda: without_dispatch(tiny("arcee")), "attention neither looks up"),
    "a local class": (with_local_base, "cannot be found as Local in the module"),
    "an encoder-decoder": (encoder_decoder, "encoder-decoder"),
}


class Twice(ArceeModel):
    def forward(self, input_ids: Any) -> Any:
        return create_causal_mask(self.second(input_ids))

    def second(self, x: Any) -> Any:
        return create_causal_mask(x)


create_causal_mask = modeling_arcee.create_causal_mask


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_deduced_says_why(what: str) -> None:
    make, reason = REFUSED[what]
    with pytest.raises(UnsupportedModel, match=reason):
        deduce(make())


def test_a_model_may_build_its_masks_itself_or_have_none() -> None:
    found = deduce(tiny("openai-gpt", None))
    assert (found.base, found.attention, found.masks) == ("OpenAIGPTModel", ("Attention",), ())
    found = deduce(tiny("mamba", None))
    assert (found.base, found.attention, found.masks) == ("MambaModel", (), ())


def test_what_a_method_inherits_is_followed() -> None:
    found = deduce(with_base(Inheriting))
    assert (found.base, found.module) == ("ArceeModel", modeling_arcee.__name__)


# ---- the numbers


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": lambda: zoo.batch(None),
    "every padding": lambda: zoo.batch(zoo.EVERY),
    "a mask that hides nothing": lambda: zoo.batch(zoo.ONES),
}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_families_have_the_loops_gradients(name: str, attn: str) -> None:
    if families.find(name) is not None:
        pytest.skip(f"{name} is declared by now")
    model = tiny(name, None)
    if attn == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"stock {name} has no SDPA")
    model = tiny(name, attn)
    for case in CASES.values():
        batch = case()
        expected = stock_loop(model, batch)
        with opake.patched(model) as scope, torch.no_grad():
            found = [per_example(model, batch, batched=batched) for batched in (True, False)]
        islands = has_experts(model) or "fp32 islands" in scope.explain()[0].reason
        bar = ISLAND_BAR if islands else GRADIENT_BAR[torch.float64]
        for result in found:
            loss, gradient = errors(result, expected)
            assert loss <= LOSS_BAR
            assert gradient <= bar


# ---- a verdict


def test_explain_says_what_was_found_and_verified() -> None:
    model = tiny("arcee")
    with opake.patched(model) as scope:
        row = scope.explain()[0]
    assert (row.concern, row.target, row.how, row.count, row.status) == (
        "family",
        "ArceeModel",
        "deduced",
        1,
        "on",
    )
    assert "ArceeAttention" in row.reason
    assert "create_causal_mask in ArceeModel.forward" in row.reason
    assert "verified against the loop on 7 rows" in row.reason
    assert "in fp64" in row.reason
    assert row in opake.check(model).rows
    declared = zoo.tiny("llama")
    assert [r.concern for r in opake.check(declared)].count("family") == 0


def test_a_verdict_is_reached_once_for_a_class_and_config(trials: list[Any]) -> None:
    model = tiny("arcee")
    for _ in range(2):
        with opake.patched(model):
            pass
        opake.check(tiny("arcee"))
    # Of one shape once it is cut down.
    large = AutoConfig.for_model("arcee", hidden_size=64, num_hidden_layers=3, intermediate_size=96)
    small = tiny_config(large)
    assert tiny_fields(small) == tiny_fields(large)
    assert len(trials) == 1
    opake.check(tiny("arcee", "eager"))
    assert len(trials) == 2
    opake.check(tiny("arcee", mlp_bias=True))
    assert len(trials) == 3


def test_a_refusal_is_remembered_too(trials: list[Any]) -> None:
    model = tiny("bloom", None)
    texts = []
    for _ in range(2):
        with pytest.raises(UnsupportedModel) as caught:
            opake.patched(model)
        texts.append(str(caught.value))
    assert trials == ["BloomForCausalLM"]
    assert texts[0] == texts[1]


def test_a_refusal_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        opake.patched(tiny("bloom", None))  # its GELU is an autograd function of the old kind
    text = str(caught.value)
    for what in (
        "'bloom' belongs to no family",
        "BloomAttention",
        "a tiny copy raises: RuntimeError",
        "setup_context",
        "supported are ",
        "opake.register_family('bloom'",
        "compat=False",
    ):
        assert what in text


class Unbuildable(ArceeForCausalLM):
    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = Unbuildable(tiny("arcee").config, 3)
    with pytest.raises(UnsupportedModel, match="tiny copy of Unbuildable cannot be built: TypeErr"):
        opake.patched(model)


class Huge(ArceeForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = nn.Embedding(1_000_000, 4096)


def test_a_copy_that_is_not_tiny_is_never_allocated(trials: list[Any]) -> None:
    with torch.device("meta"):
        model = Huge(tiny("arcee").config)
    with pytest.raises(UnsupportedModel, match="has still 4096"):
        opake.patched(model)
    assert not trials


def test_a_builder_that_is_not_what_it_seems_is_refused(
    monkeypatch: pytest.MonkeyPatch, trials: list[Any]
) -> None:
    """Where there is no mask, ours keeps the positions from the builder: stock needs none."""
    stock = modeling_arcee.create_causal_mask

    def biased(config: Any, inputs_embeds: Any, attention_mask: Any, **kwargs: Any) -> Any:
        mask = stock(config, inputs_embeds, attention_mask, **kwargs)
        if mask is not None or kwargs.get("position_ids") is None:
            return mask
        distance = kwargs["position_ids"][:, None, None, :].to(inputs_embeds.dtype)
        past = torch.ones(distance.shape[-1], distance.shape[-1], dtype=torch.bool).tril()
        return (-0.5 * distance).expand(-1, 1, len(past), -1).masked_fill(~past, -1e9)

    monkeypatch.setattr(modeling_arcee, "create_causal_mask", biased)
    with pytest.raises(UnsupportedModel, match=r"disagrees with the loop: gradients off by \d"):
        opake.patched(tiny("arcee"))
    assert len(trials) == 1


def test_attention_that_reads_the_name_of_its_implementation_goes_on_reading_stocks() -> None:
    (row,) = [r for r in opake.check(tiny("deepseek_v32")) if r.concern == "sdpa"]
    assert row.target == "DeepseekV32Attention.forward"
    (row,) = [r for r in opake.check(tiny("arcee")) if r.concern == "sdpa"]
    assert row.target == "ArceeAttention.config"


# ---- nothing else changes


def test_nothing_is_left_behind(trials: list[Any]) -> None:
    model = tiny("arcee")
    with torch.no_grad():
        model(zoo.tokens())  # what transformers keeps after its first use
    before, random = Snapshot(model), torch.get_rng_state()
    declared = families.supported()
    with opake.patched(model):
        pass
    assert trials == ["ArceeForCausalLM"]
    assert not before.changes()
    assert torch.equal(torch.get_rng_state(), random)
    assert families.supported() == declared
    assert families.find("arcee") is None
    assert not opake.active()
    assert torch.get_default_dtype() == torch.float32


def test_the_libraries_are_as_before_and_the_copy_is_gone(
    trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Any]] = []

    def loop(model: Any, stock: Callable[[Any], Any] = trial.loop) -> Any:
        copies.append(weakref.ref(model))
        return stock(model)

    monkeypatch.setattr(trial, "loop", loop)
    model = tiny("arcee")
    opake.check(model)  # what transformers and torch keep after their first use
    generic._VERDICTS.clear()
    before = Leaks()
    opake.check(model)
    assert not before.changes()
    assert len(trials) == 2
    gc.collect()
    assert [copy() for copy in copies] == [None, None]


@pytest.mark.parametrize("where", ["loop", "errors"])
def test_an_interrupt_leaves_nothing_and_no_verdict(
    where: str, trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("arcee")
    before, random = Snapshot(model), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(trial, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            opake.patched(model)
    assert not before.changes()
    assert torch.equal(torch.get_rng_state(), random)
    assert not opake.active()
    assert opake.check(model)[0].how == "deduced"


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_what_draws_random_numbers_in_training_is_verified_in_eval_mode() -> None:
    reason = opake.check(tiny("phimoe"))[0].reason  # noise on its router
    assert reason.endswith("in eval mode: in training it draws random numbers")
    assert "eval mode" not in opake.check(tiny("arcee", attention_dropout=0.1))[0].reason


def test_the_callers_modes_do_not_reach_it(trials: list[Any]) -> None:
    model = tiny("arcee")
    verdict = opake.check(model)[0].reason
    for context in (
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        torch.no_grad(),
    ):
        generic._VERDICTS.clear()
        with context:
            assert opake.check(model)[0].reason == verdict
    assert len(trials) == 5


def test_only_class_and_config_matter(trials: list[Any]) -> None:
    with torch.device("meta"):
        model = ArceeForCausalLM(tiny("arcee").config)
    assert opake.check(model)[0].concern == "family"
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert opake.check(model)[0].concern == "family"
    assert len(trials) == 1


def test_inside_peft() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(tiny("arcee"), lora).double()
    batch = zoo.batch(zoo.EVERY)
    expected = stock_loop(model, batch)
    with opake.patched(model) as scope, torch.no_grad():
        found = per_example(model, batch, batched=False)
    assert scope.explain()[0].how == "deduced"
    loss, gradient = errors(found, expected)
    assert loss <= LOSS_BAR
    assert gradient <= GRADIENT_BAR[torch.float64]


def test_two_threads_reach_one_verdict(trials: list[Any]) -> None:
    models = [tiny("arcee") for _ in range(4)]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda m=m: found.append(opake.check(m)[0])) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(trials) == 1


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "Model"])
def test_every_head_is_verified_with_its_own_loss(head: str, trials: list[Any]) -> None:
    name = "ArceeModel" if head == "Model" else f"ArceeFor{head}"
    model = getattr(transformers, name)(tiny("arcee").config).double()
    assert "7 rows" in opake.check(model)[0].reason
    assert trials == [name]


def test_without_compat_nothing_is_tried(trials: list[Any]) -> None:
    with pytest.warns(UserWarning, match="'arcee' belongs to no family") as caught:
        scope = opake.patched(tiny("arcee"), compat=False)
    assert caught[0].filename == __file__
    assert [row for row in scope.explain() if row.concern == "family"] == []
    assert not trials


def test_attention_that_cannot_run_is_named() -> None:
    model = tiny("arcee")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedAttention, match='attn_implementation="sdpa"'):
        opake.patched(model)


def test_a_declared_family_beats_a_deduced_one(
    monkeypatch: pytest.MonkeyPatch, trials: list[Any]
) -> None:
    monkeypatch.setattr(families, "_REGISTERED", {})
    monkeypatch.setattr(families, "find", FIND)
    model = tiny("arcee")
    opake.register_family("arcee", deduce(model))
    with opake.patched(model) as scope, torch.no_grad():
        per_example(model, zoo.batch(), model_loss, batched=False)
    assert scope.explain()[0].concern != "family"
    assert not trials


# ---- the tiny config


def test_layers_that_are_listed_by_their_index_keep_their_kind() -> None:
    config = AutoConfig.for_model("llama4_text", moe_layers=[1, 3, 5], num_hidden_layers=8)
    small = tiny_config(config)
    kinds = {
        (kind, bool(rope), index in config.moe_layers)
        for index, (kind, rope) in enumerate(
            zip(config.layer_types, config.no_rope_layers, strict=True)
        )
    }
    found = {
        (kind, bool(rope), index in small.moe_layers)
        for index, (kind, rope) in enumerate(
            zip(small.layer_types, small.no_rope_layers, strict=True)
        )
    }
    assert found == kinds
    assert small.num_hidden_layers == len(kinds)


@pytest.mark.parametrize("name", [*zoo.FIELDS, *UNDECLARED])
def test_a_tiny_config_is_tiny_and_cannot_be_cut_down_further(name: str) -> None:
    fields = zoo._FIELDS.get(name) or UNDECLARED.get(name, {})
    small = tiny_config(AutoConfig.for_model(name), **fields)
    with torch.device("meta"):
        model = AutoModel.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 150_000
    again = tiny_config(small)
    assert again.num_hidden_layers == small.num_hidden_layers
    assert again.hidden_size == small.hidden_size


def test_what_is_about_the_weights_is_left_out() -> None:
    config = AutoConfig.for_model("llama", quantization_config={"quant_method": "fp8"})
    config._name_or_path = "somebody/something"
    small = tiny_config(config).to_dict()
    assert "quantization_config" not in small
    assert small["_name_or_path"] == ""
