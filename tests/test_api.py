"""The scopes: flags, nesting, what explain() says, bad input, and the way back."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import transformers.models.llama.modeling_llama as modeling_llama
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import opake
from opake import errors, families, flags, symbols

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def config(**changes):
    fields = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**{**fields, **changes})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(config()).eval()


def namespaces(model):
    """Everything a scope could touch: (where, name) -> object, in order."""
    spaces = {f"module {name}": vars(module) for name, module in model.named_modules()}
    spaces |= {f"class of {name}": {"": type(m)} for name, m in model.named_modules()}
    spaces |= {
        f"vars {cls.__qualname__}": vars(cls)
        for cls in vars(modeling_llama).values()
        if isinstance(cls, type)
    }
    spaces |= {
        "modeling": vars(modeling_llama),
        "config": vars(model.config),
        "attention": ALL_ATTENTION_FUNCTIONS._global_mapping,
        "attention, local": ALL_ATTENTION_FUNCTIONS._local_mapping,
        "mask": ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        "functorch": vars(torch._functorch.eager_transforms),
        "functorch.apis": vars(torch._functorch.apis),
        "checkpoint": vars(torch.utils.checkpoint),
        "F": vars(nn.functional),
        "masking": vars(sys.modules["transformers.masking_utils"]),
        "modeling_utils": vars(sys.modules["transformers.modeling_utils"]),
        "sdpa": vars(sys.modules["transformers.integrations.sdpa_attention"]),
    }
    # What Python itself notes: the warnings a module has shown, the slots of a class once copied.
    skip = ("__warningregistry__", "__slotnames__")
    return {
        where: [(key, value) for key, value in space.items() if key not in skip]
        for where, space in spaces.items()
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for where in before:
        old, new = before[where], after[where]
        assert [key for key, _ in old] == [key for key, _ in new], where
        for (key, was), (_, now) in zip(old, new, strict=True):
            assert was is now, f"{where}: {key}"


def per_example(model, **batch):
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p, example):
        return functional_call(model, p, (), {**example, "labels": example["input_ids"]}).loss

    return vmap(grad(loss), (None, 0))(params, batch)


def run(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.zero_grad()
    per_example(model, input_ids=IDS, attention_mask=torch.ones_like(IDS))


# ---- the way back


def test_everything_is_identical_after_a_scope(model):
    run_stock = model(input_ids=IDS).logits
    before = namespaces(model)
    with opake.patched(model):
        run(model)
        assert "forward" in vars(model)
    assert_same(before, namespaces(model))
    assert torch.equal(model(input_ids=IDS).logits, run_stock)


def test_everything_is_identical_after_an_exception_in_the_body(model):
    before = namespaces(model)
    with pytest.raises(KeyboardInterrupt), opake.patched(model):
        raise KeyboardInterrupt
    assert_same(before, namespaces(model))


def test_an_interrupt_at_any_patch_while_entering_leaves_nothing(model):
    before = namespaces(model)
    count = len(opake.patched(model))
    for k in range(count):
        scope = opake.patched(model)
        scope._plan = lambda flags, k=k, plan=scope._plan: _interrupted(plan(flags), k)
        with pytest.raises(KeyboardInterrupt):
            scope.patch()
        assert_same(before, namespaces(model))
        assert opake.active() == []


def _interrupted(plan, k):
    class Interrupt(opake.Patch):
        def apply(self):
            raise KeyboardInterrupt

        def revert(self):
            return None

    plan.patches.insert(k, Interrupt())
    return plan


def test_a_closed_generator_restores(model):
    before = namespaces(model)

    def body():
        with opake.patched(model):
            yield

    generator = body()
    next(generator)
    assert opake.active()
    generator.close()
    assert_same(before, namespaces(model))


def test_scopes_of_two_models_leave_in_any_order(model):
    other = LlamaForCausalLM(model.config).eval()
    before, before_other = namespaces(model), namespaces(other)
    first, second = opake.patch(model), opake.patch(other)
    first.unpatch()
    assert "opake_sdpa" in ALL_ATTENTION_FUNCTIONS._global_mapping
    per_example(other, input_ids=IDS, attention_mask=torch.ones_like(IDS))
    second.unpatch()
    assert_same(before, namespaces(model))
    assert_same(before_other, namespaces(other))


def test_user_sets_layer_with_a_scope_and_leave_in_any_order(model):
    def double(wrapped, instance, args, kwargs):
        out = wrapped(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    stock = model(input_ids=IDS).logits
    before = namespaces(model)
    mine = opake.PatchSet([opake.ForwardPatch(model, double)])
    scope = opake.patched(model).patch()
    mine.patch()
    scope.unpatch()
    assert torch.equal(model(input_ids=IDS).logits, 2 * stock)
    scope.patch()
    mine.unpatch()
    assert torch.equal(model(input_ids=IDS).logits, stock)
    scope.unpatch()
    assert_same(before, namespaces(model))


def test_a_second_model_is_never_affected(model):
    second = LlamaForCausalLM(model.config).eval()  # shares the config object
    expected = second(input_ids=IDS).logits
    before = namespaces(second)
    seen = []
    with opake.patched(model):
        assert [w for w in before if w.startswith("module") and w not in namespaces(second)] == []
        inside = namespaces(second)
        for where in before:
            if where not in ("attention", "mask", "functorch"):  # process-wide, and listed as such
                assert_same({where: before[where]}, {where: inside[where]})
        assert torch.equal(second(input_ids=IDS).logits, expected)
        built = LlamaForCausalLM(model.config).eval()
        assert type(built) is LlamaForCausalLM
        assert all("_opake_slots" not in vars(m) for m in built.modules())
        thread = threading.Thread(target=lambda: seen.append(second(input_ids=IDS).logits))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], expected)
    assert second.config._attn_implementation == "sdpa"


def test_the_signature_repr_and_class_are_stocks_inside(model):
    stock = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    text, state = repr(model), list(model.state_dict())
    with opake.patched(model):
        for name, module in model.named_modules():
            assert inspect.signature(module.forward) == stock[name], name
        assert repr(model) == text
        assert list(model.state_dict()) == state
        assert isinstance(model, LlamaForCausalLM)
        assert str(type(model)) == str(LlamaForCausalLM)
        dir(model)


# ---- copies


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(_saved(model), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_made_inside_are_stock(model, duplicate):
    expected = model(input_ids=IDS).logits
    with opake.patched(model):
        made = duplicate(model)
        for module in made.modules():
            assert "_opake_slots" not in vars(module)
            assert "forward" not in vars(module)
        assert type(made) is LlamaForCausalLM
        attention = made.model.layers[0].self_attn
        assert type(attention.config) is LlamaConfig
        assert made.config is attention.config is made.model.config
        assert torch.equal(made(input_ids=IDS).logits, expected)
    assert torch.equal(made(input_ids=IDS).logits, expected)


def _saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_what_is_saved_inside_is_stock(model, tmp_path):
    model.save_pretrained(tmp_path / "stock")
    with opake.patched(model):
        model.save_pretrained(tmp_path / "inside")
        view = model.model.layers[0].self_attn.config
        assert view.to_dict() == model.config.to_dict()
    for name in ("config.json", "model.safetensors"):
        stock, inside = (tmp_path / where / name for where in ("stock", "inside"))
        assert stock.read_bytes() == inside.read_bytes()


# ---- the config view


def test_only_attention_reads_our_key(model):
    attention = model.model.layers[0].self_attn
    with opake.patched(model):
        view = attention.config
        assert view._attn_implementation == "opake_sdpa"
        assert isinstance(view, LlamaConfig)
        assert view == model.config
        assert model.config._attn_implementation == model.model.config._attn_implementation
        assert model.config._attn_implementation == "sdpa"
        assert type(model)(model.config).config._attn_implementation == "sdpa"
    assert view._attn_implementation == "sdpa"
    assert attention.config is model.config


def test_copies_of_the_view_are_the_original(model):
    with opake.patched(model):
        view = model.model.layers[0].self_attn.config
        for made in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert type(made) is LlamaConfig
            assert made == model.config
        pair = pickle.loads(pickle.dumps((view, model.config)))
        assert pair[0] is pair[1]


def test_what_a_user_sets_inside_wins_and_lasts(model):
    with opake.patched(model):
        attention = model.model.layers[0].self_attn
        model.set_attn_implementation("eager")
        assert attention.config._attn_implementation == "eager"
        model.config.use_cache = False
        assert attention.config.use_cache is False
        attention.config.hidden_act = "gelu"
        assert model.config.hidden_act == "gelu"
        per_example(model, input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    assert model.config.hidden_act == "gelu"


# ---- nesting


def test_an_equal_plan_is_counted_and_the_last_exit_restores(model):
    before = namespaces(model)
    outer, inner = opake.patched(model), opake.patched(model)
    assert outer.__enter__() is inner.__enter__()
    outer.__exit__(None, None, None)
    assert "forward" in vars(model)
    inner.__exit__(None, None, None)
    assert_same(before, namespaces(model))
    with outer, outer:
        pass
    assert_same(before, namespaces(model))


def test_patch_twice_returns_the_live_scope_uncounted(model):
    before = namespaces(model)
    first = opake.patch(model)
    assert opake.patch(model) is first
    first.unpatch()
    assert_same(before, namespaces(model))
    first.unpatch()  # a second time is a no-op
    assert_same(before, namespaces(model))


def test_a_block_inside_patch_does_not_end_it(model):
    scope = opake.patch(model)
    with opake.patched(model) as inside:
        assert inside is scope
    assert scope.applied
    scope.unpatch()
    assert not scope.applied


def test_unpatch_inside_a_block_leaves_the_block_its_scope(model):
    scope = opake.patch(model)
    with opake.patched(model):
        scope.unpatch()
        assert scope.applied
    assert not scope.applied


def test_unpatch_needs_no_handle_and_drops_everything(model):
    before = namespaces(model)
    opake.patch(model)
    with opake.patched(model):
        opake.unpatch(model)
        assert_same(before, namespaces(model))
    opake.unpatch(model)
    assert_same(before, namespaces(model))


def test_another_plan_is_an_error_that_names_the_live_one(model):
    with opake.patched(model), pytest.raises(errors.AlreadyPatched) as caught:
        opake.patched(model, kv_cache=False).patch()
    assert "opake.unpatch(model)" in str(caught.value)
    assert "test_api.py:" in str(caught.value)
    assert "kv_cache" in str(caught.value)
    with opake.patched(model, kv_cache=False):
        pass


def test_a_scope_is_found_from_the_model_inside_peft(model):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with opake.patched(wrapped) as scope, opake.patched(model) as again:
        assert again is scope
    compiled = torch.compile(model, backend="eager")
    with opake.patched(compiled) as scope, opake.patched(model) as again:
        assert again is scope


def test_a_scope_can_be_used_again_after_the_model_changed(model):
    scope = opake.patched(model)
    with scope:
        pass
    model.set_attn_implementation("eager")
    with scope:
        per_example(model, input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert {row.concern: row.status for row in scope.explain()}["sdpa"] == "skipped"


def test_the_decorator_form(model):
    @opake.patched(model)
    def inside():
        return "forward" in vars(model)

    assert inside()
    assert "forward" not in vars(model)


# ---- seeing


def test_explain_has_a_row_for_every_concern(model):
    rows = {row.concern: row for row in opake.patched(model).explain()}
    assert set(rows) == set(flags.CONCERNS)
    for row in rows.values():
        assert row.status in ("on", "off", "skipped")
        assert row.status != "skipped" or row.reason
    assert rows["sdpa"].status == "on"
    assert rows["sdpa"].count == 2
    assert "kernels need a CUDA device" in rows["lora_mlp"].reason
    assert rows["dropout"].status == "off"
    assert "process-wide" in rows["first_order"].reason
    text = str(opake.check(model))
    assert all(concern in text for concern in flags.CONCERNS)
    assert opake.check(model)._repr_html_().count("<tr>") == len(rows) + 1


def test_planning_changes_nothing(model):
    before = namespaces(model)
    repr(opake.patched(model))
    opake.check(model, kernels=True)
    assert len(opake.patched(model).diff()) == 0
    assert_same(before, namespaces(model))


def test_diff_lists_what_is_changed(model):
    with opake.patched(model) as scope:
        text = str(scope.diff())
    assert "LlamaForCausalLM" in text
    assert "grad_and_value_impl" in text
    assert "opake_sdpa" in text
    assert str(scope.diff()) == "no slot is changed"


def test_active_says_where_a_scope_was_opened_and_forgets_lost_models(model):
    opake.patch(model)
    (live,) = opake.active()
    line = inspect.currentframe().f_lineno - 2
    assert live.opened_at == f"{__file__}:{line}"
    del live
    gone = weakref.ref(model)
    # The fixture holds the model too; a second one can be lost.
    opake.unpatch(model)
    lost = LlamaForCausalLM(config())
    gone = weakref.ref(lost)
    opake.patch(lost)
    del lost
    gc.collect()
    assert gone() is None
    assert opake.active() == []
    assert "opake_sdpa" not in ALL_ATTENTION_FUNCTIONS._global_mapping


@pytest.mark.parametrize("flags", [{}, {"compat": False}, {"compat": False, "first_order": True}])
def test_a_scope_holds_a_wrapper_that_nobody_else_does_and_no_lost_model(flags):
    net = LlamaForCausalLM(config())
    with opake.patched(torch.compile(net, backend="eager"), **flags):
        pass
    before = namespaces(net)
    scope = opake.patch(net, **flags)
    scope.unpatch()
    assert_same(before, namespaces(net))
    opake.patch(net, **flags)
    gone = weakref.ref(net)
    del net, before, scope
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert opake.active() == []
    assert not opake.engine.shared._PIECES


def test_one_line_is_logged_a_scope_and_one_a_patch_for_debugging(model, caplog):
    with caplog.at_level(logging.DEBUG, logger="opake"), opake.patched(model) as scope:
        pass
    infos = [r for r in caplog.records if r.levelno == logging.INFO]
    debugs = [r for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(infos) == 1
    assert f"{len(scope)} patches" in infos[0].getMessage()
    assert len(debugs) == len(scope)


# ---- flags


def test_a_concern_beats_its_umbrella():
    resolved = flags.resolve(compat=False, batchify=True, kernels=True, rope=False)
    assert resolved["batchify"] is True
    assert resolved["sdpa"] is False
    assert resolved["rope"] is False
    assert resolved["rms_norm"] is True


def test_kernels_follow_performance_unless_set():
    assert flags.resolve(performance=False)["rope"] is False
    assert flags.resolve(performance=False, kernels=True)["rope"] is True
    assert flags.resolve(kernels=False)["kv_cache"] is True


def test_kernels_as_a_list_and_the_inference_mode():
    resolved = flags.resolve(kernels=["rope", "swiglu"])
    on = [c for c in flags.UMBRELLAS["kernels"] if resolved[c]]
    assert on == ["rope", "activation"]
    assert resolved["lora_w"] is False
    infer = flags.resolve(mode="infer")
    assert infer["cross_entropy"] is False
    assert infer["lora_qkv"] is False
    assert infer["rms_norm"] is True


def test_a_tile_width_is_a_value(model):
    assert flags.resolve(chunked_linear_cross_entropy=2048)["chunked_linear_cross_entropy"] == 2048
    for bad in (0, -1, 1.5, "2048"):
        with pytest.raises(errors.InvalidArgument):
            opake.patched(model, chunked_linear_cross_entropy=bad)


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"batchfy": True}, TypeError, "'batchify'"),
        ({"kernel": True}, TypeError, "'kernels'"),
        ({"kernels": ["swigl"]}, TypeError, "'swiglu'"),
        ({"kernels": "rope"}, ValueError, "list of names"),
        ({"compat": 1}, ValueError, "True or False"),
        ({"sdpa": None}, ValueError, "True or False"),
        ({"mode": "serve"}, ValueError, "train, infer"),
        ({"min_elements": -1}, ValueError, "min_elements"),
    ],
)
def test_bad_flags_name_what_to_do(model, keywords, error, says):
    before = namespaces(model)
    for call in (opake.patched, opake.check, opake.patch):
        with pytest.raises(error, match=says) as caught:
            call(model, **keywords)
        assert isinstance(caught.value, errors.OpakeError)
    assert_same(before, namespaces(model))


def test_each_concern_off_is_off(model):
    for concern in flags.CONCERNS:
        rows = {r.concern: r.status for r in opake.check(model, **{concern: False})}
        assert rows[concern] == "off"


# ---- bad models


def test_not_a_model():
    for bad in (None, 3, "llama", LlamaForCausalLM):
        with pytest.raises(errors.NotAModel, match=r"nn\.Module"):
            opake.patched(bad)


def test_a_plain_module_needs_compat_false():
    net = nn.Linear(2, 2)
    with pytest.raises(errors.NotAModel, match="compat=False"):
        opake.patched(net)
    with opake.patched(net, compat=False) as scope:
        assert all(row.status != "on" for row in scope.explain())


def test_an_unknown_model_type_lists_the_supported_ones_and_how_to_add_one():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(errors.UnsupportedModel) as caught:
        opake.patched(net)
    assert "encoder-decoder" in str(caught.value)
    assert "llama" in str(caught.value)
    assert "register_family" in str(caught.value)
    with pytest.warns(UserWarning, match="no model concern is patched") as caught:
        scope = opake.patched(net, compat=False)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="no model concern is patched"), scope:
        assert len(scope) == 0


def test_a_family_can_be_registered_from_outside(monkeypatch):
    monkeypatch.setattr(families, "_REGISTERED", {})
    net = LlamaForCausalLM(config())
    net.config.model_type = "my_llama"
    assert "family" in {row.concern for row in opake.check(net)}  # deduced
    opake.register_family("my_llama", families.find("llama"))
    assert "family" not in {row.concern for row in opake.check(net)}
    assert opake.check(net)[0].how != "deduced"
    with opake.patched(net):
        per_example(net, input_ids=IDS)
    with pytest.raises(errors.InvalidArgument, match="Family"):
        opake.register_family("my_llama", "llama")


def test_a_family_whose_module_is_not_there_says_so(monkeypatch):
    monkeypatch.setattr(families, "_REGISTERED", {})
    opake.register_family("llama", families.Family(module="no_such.modeling", base="Model"))
    with pytest.raises(errors.UnsupportedModel, match="No module named 'no_such'"):
        opake.check(LlamaForCausalLM(config()))


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_that_cannot_run_under_functorch_is_refused(model, name):
    model.config._attn_implementation_internal = name
    before = namespaces(model)
    with pytest.raises(errors.UnsupportedAttention, match='attn_implementation="sdpa"'):
        opake.patched(model)
    assert_same(before, namespaces(model))
    opake.patched(model, compat=False)


def test_several_models_in_one_module_are_refused(model):
    pair = nn.ModuleList([model, LlamaModel(config())])
    with pytest.raises(errors.NotAModel, match="several"):
        opake.patched(pair)


def test_a_foreign_forward_on_the_model_is_refused_by_name(model):
    def forward(*args, **kwargs):
        raise AssertionError

    model.forward = forward
    with pytest.raises(errors.ForeignWrite, match="test_a_foreign_forward"):
        opake.patched(model)
    del model.forward
    with opake.patched(model):
        pass


def test_a_subclass_that_builds_its_masks_elsewhere_is_refused(model):
    class Strange(LlamaModel):
        def forward(self, input_ids):
            return self.embed_tokens(input_ids)

    model.model.__class__ = Strange
    with pytest.raises(errors.MissingTarget, match="create_causal_mask"):
        opake.patched(model)


# ---- upstream


def test_every_mismatch_is_in_one_error_and_nothing_is_touched(model, monkeypatch):
    monkeypatch.setattr(symbols, "SUPPORTED", {"torch": ("99", None), "transformers": ("1", "2")})
    monkeypatch.delattr("torch._functorch.eager_transforms._autograd_grad")
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda a, b: None)
    monkeypatch.setattr(modeling_llama, "LlamaAttention", None)
    monkeypatch.delattr(modeling_llama, "LlamaAttention")
    before = namespaces(model)
    with pytest.raises(errors.UnsupportedTransformers) as caught:
        opake.patched(model)
    text = str(caught.value)
    for part in (
        "torch: expected >= 99",
        "transformers: expected >= 1, < 2",
        "_autograd_grad: expected to exist",
        "first_order=False",
        "sdpa_mask: expected parameters attention_mask, allow_is_causal_skip, found (a, b)",
        "LlamaAttention: expected to exist",
    ):
        assert part in text, text
    assert isinstance(caught.value, ImportError)
    assert_same(before, namespaces(model))


# ---- the process scope


def test_runtime_gives_first_order_and_takes_it_back():
    transforms = torch._functorch.eager_transforms
    stock = transforms.grad_and_value_impl
    with opake.runtime() as scope:
        assert transforms.grad_and_value_impl is not stock
        assert {r.concern: r.status for r in scope.explain()}["first_order"] == "on"
    assert transforms.grad_and_value_impl is stock
    with opake.runtime(first_order=False):
        assert transforms.grad_and_value_impl is stock


def test_false_never_disables_what_another_scope_asked_for(model):
    transforms = torch._functorch.eager_transforms
    stock = transforms.grad_and_value_impl
    with opake.patched(model):
        with opake.runtime(first_order=False):
            assert transforms.grad_and_value_impl is not stock
        assert transforms.grad_and_value_impl is not stock
    assert transforms.grad_and_value_impl is stock


def test_runtime_twice_with_unequal_plans_names_both():
    other = opake.runtime(first_order=False)
    with (
        opake.runtime(),
        opake.runtime(),
        pytest.raises(errors.AlreadyPatched, match="first_order"),
    ):
        other.patch()
    with pytest.raises(errors.UnknownFlag, match="first_order"):
        opake.runtime(firstorder=True)


def test_a_class_attribute_in_a_runtime_scope_resets_dynamo(monkeypatch):
    import torch._dynamo

    class Owner:
        x = 1

    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append(1))
    for reset, expected in ((True, 2), (False, 0)):
        calls.clear()
        scope = opake.runtime(reset_compile=reset, first_order=False)
        plan = scope._plan
        patch = opake.AttributePatch(Owner, "x", 2)
        scope._plan = lambda flags, plan=plan, patch=patch: _with(plan(flags), patch)
        with scope:
            assert Owner.x == 2
        assert Owner.x == 1
        assert len(calls) == expected


def _with(plan, patch):
    plan.patches.append(patch)
    return plan


# ---- the published names


def test_the_published_names_return_reversible_scopes(model):
    from opake import patches

    before = namespaces(model)
    assert not patches.is_runtime_patched()
    runtime = patches.apply_runtime_patches(vmap_checkpointing=False)
    assert patches.is_runtime_patched()
    scope = patches.apply_model_patches(model, fused_linear_cross_entropy=False, rope=False)
    assert {r.concern: r.status for r in scope.explain()}["rope"] == "off"
    scope.unpatch()
    for apply in (patches.apply_transformers_model_patches, patches.apply_peft_model_patches):
        apply(model).unpatch()
    runtime.unpatch()
    assert not patches.is_runtime_patched()
    assert_same(before, namespaces(model))


# ---- dropout


def test_dropout_is_zero_inside_and_the_same_float_after():
    rate = float("0.25")
    net = LlamaForCausalLM(config(attention_dropout=rate)).train()
    before = namespaces(net)
    with opake.patched(net, dropout=True) as scope:
        assert {m.self_attn.attention_dropout for m in net.model.layers} == {0.0}
        assert net.config.attention_dropout == rate
        assert torch.equal(net(input_ids=IDS).logits, net(input_ids=IDS).logits)
        assert copy.deepcopy(net).model.layers[0].self_attn.attention_dropout == rate
    assert {r.concern: r.count for r in scope.explain()}["dropout"] == 2
    assert_same(before, namespaces(net))


# ---- cost


def test_import_loads_neither_transformers_nor_triton_and_is_cheap():
    code = (
        "import time, torch, sys\n"
        "t = time.perf_counter(); import opake; import opake.errors; d = time.perf_counter() - t\n"
        "opake.patched; opake.PatchSet; opake.functional\n"
        "assert 'transformers' not in sys.modules, 'transformers'\n"
        "assert 'triton' not in sys.modules or 'triton' in before, 'triton'\n"
        "assert d < 0.1, d\n"
    ).replace("import time, torch, sys\n", "import time, torch, sys\nbefore = set(sys.modules)\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_planning_and_entering_are_cheap():
    net = LlamaForCausalLM(config(num_hidden_layers=30))
    opake.check(net)
    best = {"plan": 1.0, "enter": 1.0}
    for _ in range(5):  # the best of five, in CPU time: the machine has other work
        start = time.process_time()
        scope = opake.patched(net)
        planned = time.process_time()
        with scope:
            pass
        done = time.process_time()
        best["plan"] = min(best["plan"], planned - start)
        best["enter"] = min(best["enter"], done - planned)
    # Ten and five times what an idle machine takes, for one whose caches others empty meanwhile.
    assert best["plan"] < 0.030, best
    assert best["enter"] < 0.015, best
