"""Corners of families, declared and deduced, each of which went wrong once."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from oracle import assert_exact, errors, per_example, same_bits, stock_loop, trainable
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import AutoConfig, LlamaForCausalLM, MusicgenForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.seed_oss import modeling_seed_oss
from transformers.models.seed_oss.configuration_seed_oss import SeedOssConfig
from transformers.models.seed_oss.modeling_seed_oss import SeedOssForCausalLM

import opake
from opake import families
from opake.compat import scatter
from opake.compat.tiny import tiny_config
from opake.errors import InvalidArgument, MissingTarget, UnsupportedModel
from opake.plan import generic


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of any model, and seed_oss is declared by nobody."""
    find, registered = families.find, dict[str, Any]()
    hidden = ("seed_oss",)
    monkeypatch.setattr(
        families,
        "find",
        lambda name: registered.get(name, None if name in hidden else find(name)),
    )
    monkeypatch.setattr(families, "_REGISTERED", registered)
    generic._VERDICTS.clear()
    yield
    assert opake.active() == []


def undeclared(cls: Any = SeedOssForCausalLM, config_class: Any = SeedOssConfig) -> Any:
    """A tiny model of a family that nobody declared."""
    small = tiny_config(AutoConfig.for_model("seed_oss"), vocab_size=zoo.VOCAB, pad_token_id=0)
    fields = {**small.to_dict(), "initializer_range": 0.3, "attention_dropout": 0.0}
    fields |= {"residual_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = config_class.from_dict(fields)
    return cls._from_config(config, attn_implementation="sdpa").double().train()


def assert_loop(model: Any, mask: Tensor | None = zoo.EVERY) -> None:
    batch = zoo.batch(mask)
    expected = stock_loop(model, batch)
    with opake.patched(model), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)


# ---- attention that compares names


def doubled(forward: Any) -> Any:
    def compares(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = forward(self, *args, **kwargs)
        return (output * 2 if self.config._attn_implementation == "sdpa" else output), weights

    return compares


class ComparesLlama(modeling_llama.LlamaAttention):
    forward = doubled(modeling_llama.LlamaAttention.forward)


class ComparesSeed(modeling_seed_oss.SeedOssAttention):
    forward = doubled(modeling_seed_oss.SeedOssAttention.forward)


def test_attention_of_ones_own_goes_on_reading_stocks_implementation() -> None:
    model = zoo.tiny("llama", "sdpa", torch.float64)
    model.model.layers[1].self_attn.__class__ = ComparesLlama
    ordinary = model(**zoo.batch()).loss
    with opake.patched(model) as scope:
        assert same_bits(model(**zoo.batch()).loss, ordinary)
        (row,) = [row for row in scope.explain() if row.concern == "sdpa"]
    assert row.target == "ComparesLlama.forward, LlamaAttention.config"
    assert_loop(model)


def test_attention_put_into_a_deduced_model_is_refused() -> None:
    model = undeclared()
    assert opake.check(model)[0].how == "deduced"
    model.model.layers[0].self_attn.__class__ = ComparesSeed
    with pytest.raises(UnsupportedModel, match=r"ComparesSeed was put in after it was built"):
        opake.check(model)


@pytest.mark.parametrize("declared", [True, False])
def test_a_forward_put_on_a_class_is_seen(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny("llama", "sdpa", torch.float64) if declared else undeclared()
    opake.check(model)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", doubled(attention.forward))
    assert_loop(model)


class Config1(SeedOssConfig):
    scaled = property(lambda self: False)


class Config2(SeedOssConfig):
    scaled = property(lambda self: True)


class Reads(modeling_seed_oss.SeedOssAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        twice = self.config.scaled and self.config._attn_implementation == "sdpa"
        return (output * 2 if twice else output), weights


class WithReads(SeedOssForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = Reads(config, layer.self_attn.layer_idx)
        self.post_init()


@pytest.mark.parametrize("order", [(Config1, Config2), (Config2, Config1)])
def test_configs_of_two_classes_are_two_configs(order: Any) -> None:
    for config_class in order:
        assert_loop(undeclared(WithReads, config_class))


@pytest.mark.parametrize("declared", [True, False])
def test_another_function_under_the_name_of_sdpa_is_kept(declared: bool) -> None:
    def halved(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(module, *args, **kwargs)
        return output / 2, weights

    model = zoo.tiny("llama", "sdpa", torch.float64) if declared else undeclared()
    opake.check(model)
    stock = stock_loop(model, zoo.batch(zoo.EVERY))
    ALL_ATTENTION_FUNCTIONS["sdpa"] = halved
    try:
        other = stock_loop(model, zoo.batch(zoo.EVERY))
        assert errors(other, stock)[1] > 1e-2
        assert_loop(model)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the local one; stock's is beneath it
    assert_loop(model)


# ---- what a trial depends on, and what depends on it


def test_a_trial_inside_a_transform_says_to_make_it_outside() -> None:
    model, batch = undeclared(), zoo.batch()

    def loss(params: Any, example: dict[str, Tensor]) -> Tensor:
        with opake.patched(model):
            return functional_call(model, params, (), example).loss

    with pytest.raises(UnsupportedModel, match=r"opake.check\(model\), once outside"):
        vmap(grad(loss), (None, 0))(trainable(model), batch)
    opake.check(model)
    found = vmap(grad(loss), (None, 0))(trainable(model), batch)
    assert_exact(stock_loop(model, batch)._replace(grads=found), stock_loop(model, batch))


def test_what_the_moment_forbids_is_not_remembered() -> None:
    model = undeclared()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UnsupportedModel):
        opake.check(model)
    assert opake.check(model)[0].how == "deduced"


def test_other_threads_draw_their_own_random_numbers() -> None:
    drawn: list[set[float]] = []
    for _ in range(2):
        generic._VERDICTS.clear()
        model, seen, stop = undeclared(), [], threading.Event()
        torch.manual_seed(len(drawn))

        def draw(seen: list[float] = seen, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                seen.append(torch.randn((), dtype=torch.float64).item())

        thread = threading.Thread(target=draw)
        thread.start()
        opake.check(model)
        stop.set()
        thread.join()
        assert len(seen) == len(set(seen)) > 10
        drawn.append(set(seen))
    assert not drawn[0] & drawn[1]


def test_a_trial_leaves_the_filters_of_warnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = SeedOssForCausalLM.__init__

    def init(self: Any, config: Any) -> None:
        seen.append(list(warnings.filters))
        make(self, config)

    model, before = undeclared(), list(warnings.filters)
    monkeypatch.setattr(SeedOssForCausalLM, "__init__", init)
    opake.check(model)
    assert seen
    assert all(filters == before for filters in seen)


@pytest.mark.parametrize("odd", [{0: "a", "b": 1}, {(1, 2): 3}])
def test_a_config_that_stock_cannot_write_down_is_refused(odd: Any) -> None:
    model = undeclared()
    model.config.odd = odd
    with pytest.raises(UnsupportedModel, match=r"a tiny copy of .* cannot be built: TypeError"):
        opake.check(model)


# ---- models


class Noise(nn.Module):
    """Draws for itself, as no layer that is left out does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) * x


@pytest.mark.parametrize("layerdrop", [0.0, 0.5])
def test_layerdrop_shares_no_draws_but_its_own(layerdrop: float) -> None:
    model = zoo.tiny("opt", None, torch.float64, layerdrop=layerdrop, num_hidden_layers=1)
    head = model.lm_head
    model.lm_head = nn.Sequential(head, Noise())
    batch = {name: x[:1].repeat(3, 1) for name, x in zoo.batch().items()}
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False, randomness="different")
    assert len(set(found.losses.tolist())) == 3


@pytest.mark.parametrize("model_type", ["opt"])
def test_dropout_takes_layerdrop_out_too(model_type: str) -> None:
    model, batch = zoo.tiny(model_type, None, torch.float64, layerdrop=0.5), zoo.batch()
    expected = stock_loop(copy.deepcopy(model).eval(), batch)
    with opake.patched(model, dropout=True), torch.no_grad():
        losses = {model(**batch).loss.item() for _ in range(10)}
        assert len(losses) == 1
        assert_exact(per_example(model, batch, batched=False), expected)


recurrent = pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "qwen3_next"])


@recurrent
def test_a_cache_keeps_nothing_of_ours(model_type: str) -> None:
    from transformers import DynamicCache

    model = zoo.tiny(model_type, None, torch.float64)
    cache = DynamicCache(config=model.config)
    attributes = [sorted(vars(layer)) for layer in DynamicCache(config=model.config).layers]
    returned = []
    call = {zoo.cache_name(model): cache, "use_cache": True}

    def run(ids: Tensor, **more: Any) -> Tensor:
        output = model(input_ids=ids[None], use_cache=True, **more)
        returned.append(output[zoo.cache_name(model)])
        return output.logits

    with opake.patched(model), torch.no_grad():
        vmap(lambda ids: model(input_ids=ids[None], **call).logits)(zoo.tokens())
        vmap(run)(zoo.tokens())
    for held in (cache, *returned):
        assert [sorted(vars(layer).keys() & {"lazy_initialization"}) for layer in held.layers] == [
            [] for _ in attributes
        ]


@recurrent
@pytest.mark.parametrize("length", [1, 3])
def test_a_cache_filled_outside_is_continued_by_every_example(model_type: str, length: int) -> None:
    model, name = zoo.tiny(model_type, None, torch.float64).eval(), None
    name = zoo.cache_name(model)
    with torch.no_grad():
        prefix = model(input_ids=zoo.tokens(1), use_cache=True)[name]

    def run(ids: Tensor) -> Tensor:
        return model(input_ids=ids[None], **{name: copy.deepcopy(prefix)}).logits

    rows = zoo.tokens(3, length, seed=5)
    with torch.no_grad():
        expected = torch.stack([run(ids) for ids in rows])
        with opake.patched(model):
            found = vmap(run)(rows)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_a_router_of_ones_own_scatters_for_all_examples() -> None:
    model = zoo.tiny("glm4_moe", None)
    (kind,) = {type(m) for m in model.modules() if scatter.scatters(type(m))}
    derived = type("Router", (kind,), {})
    assert scatter.scatters(derived)
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = derived
    with warnings.catch_warnings(), opake.patched(model), torch.no_grad():
        warnings.filterwarnings("error", message="There is a performance drop")
        per_example(model, zoo.batch(), batched=False)


class Scaled(modeling_llama.LlamaModel):
    """Calls the forward that it overrides, as those do that add noise to embeddings."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=self.embed_tokens(input_ids) * 2, **kwargs)


def test_a_base_that_calls_the_forward_it_overrides_is_told_what_to_do() -> None:
    model = zoo.tiny("llama")
    model.model.__class__ = Scaled
    with pytest.raises(MissingTarget, match=r"Scaled.forward does not call create_causal_mask"):
        opake.check(model)


# ---- declarations


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("module", None),
        ("base", ("LlamaModel",)),
        ("attention", ["LlamaAttention"]),
        ("masks", "create_causal_mask"),
        ("wrapped_by", "LlamaForCausalLM"),
        ("wrapped_by", {"LlamaForCausalLM": "create_causal_mask"}),
        ("mlp", 3),
    ],
)
def test_a_field_of_another_kind_is_refused_at_once(field: str, value: Any) -> None:
    llama = families.find("llama")
    with pytest.raises(InvalidArgument, match=rf"Family\.{field} is"):
        dataclasses.replace(llama, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("module", "transformers.models.lama", "No module named"),
        ("base", "LamaModel", "LamaModel"),
        ("attention", ("LlamaAttention", "LamaAttention"), ": LamaAttention;"),
        ("masks", ("create_casual_mask",), "create_casual_mask"),
        ("own_sdpa", ("LamaSdpa",), "LamaSdpa"),
        ("wrapped_by", {"Outer": ("create_causal_mask",)}, "Outer"),
    ],
)
def test_a_declaration_with_a_typo_is_named(field: str, value: Any, named: str) -> None:
    family = dataclasses.replace(families.find("llama"), **{field: value})
    opake.register_family("llama", family)
    model = zoo.tiny("llama")
    with pytest.raises(
        UnsupportedModel, match=r"the Family registered for model_type 'llama'"
    ) as e:
        opake.check(model)
    assert named in str(e.value)


def test_check_raises_what_entering_would() -> None:
    outer = {"LlamaForCausalLM": ("create_causal_mask",)}
    family = dataclasses.replace(families.find("llama"), wrapped_by=outer)
    opake.register_family("llama", family)
    model = LlamaForCausalLM(zoo.tiny_fields("llama"))
    with pytest.raises(MissingTarget, match=r"LlamaForCausalLM\.forward"):
        opake.check(model)


# ---- what a trial must not pass on


class Nothing(SeedOssForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.nan
        output.loss = None if output.loss is None else output.loss * torch.nan
        return output


def test_a_copy_that_says_nothing_proves_nothing() -> None:
    with pytest.raises(UnsupportedModel, match="no row has a finite loss"):
        opake.check(undeclared(Nothing))


@recurrent
def test_a_tuple_brings_a_cache_without_ours_too(model_type: str) -> None:
    from transformers.cache_utils import Cache

    model = zoo.tiny(model_type, None, torch.float64).eval()
    found: list[Any] = []

    def run(ids: Tensor) -> Tensor:
        output = model(input_ids=ids[None], use_cache=True, return_dict=False)
        found.extend(x for x in output if isinstance(x, Cache))
        return output[0]

    with opake.patched(model), torch.no_grad():
        vmap(run)(zoo.tokens())
    assert found
    assert not [layer for cache in found for layer in cache.layers if _LAZY in vars(layer)]


@recurrent
def test_a_call_that_fails_leaves_the_states_of_a_cache(model_type: str) -> None:
    model = zoo.tiny(model_type, None, torch.float64).eval()
    name = zoo.cache_name(model)
    with torch.no_grad():
        cache = model(input_ids=zoo.tokens(1), use_cache=True)[name]
    before = [dict(layer.conv_states) for layer in cache.layers if hasattr(layer, "conv_states")]

    def broken(module: Any, args: Any, output: Any) -> None:
        raise KeyError("mine")

    handle = model.get_input_embeddings().register_forward_hook(broken)
    with opake.patched(model), torch.no_grad(), pytest.raises(KeyError, match="mine"):
        vmap(lambda ids: model(input_ids=ids[None], **{name: cache}).logits)(zoo.tokens(3, 2))
    handle.remove()
    after = [layer.conv_states for layer in cache.layers if hasattr(layer, "conv_states")]
    for old, new in zip(before, after, strict=True):
        assert all(new[index] is state for index, state in old.items())


_LAZY = "lazy_initialization"


class Drops(type(zoo.tiny("opt").model.decoder)):  # type: ignore[misc]
    """Of another file than the code that asks whether to run a layer."""


def test_layerdrop_of_a_subclass_elsewhere_is_shared_too() -> None:
    model = zoo.tiny("opt", None, torch.float64, layerdrop=0.5)
    model.model.decoder.__class__ = Drops
    batch = zoo.batch()
    expected = stock_loop(model, batch, seed=2)
    with opake.patched(model), torch.no_grad():
        torch.manual_seed(2)
        found = per_example(model, batch, batched=False, randomness="different")
    assert_exact(found, expected)


def test_a_config_with_several_text_parts_is_refused_by_one_of_our_errors() -> None:
    with torch.device("meta"):
        try:
            config = tiny_config(AutoConfig.for_model("musicgen"))
            model = MusicgenForConditionalGeneration._from_config(config)
        except Exception as error:
            pytest.skip(f"stock's default musicgen cannot be built: {type(error).__name__}")
    with pytest.raises(ValueError, match="Multiple"):
        model.config.get_text_config()
    with pytest.raises(UnsupportedModel, match="register_family"):
        opake.check(model)
