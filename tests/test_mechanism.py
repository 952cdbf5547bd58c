"""The way a module is patched against everything that people do around and inside a scope.

Every row of the table in the design notes has its tests here. Runs on every supported pair of
torch and transformers, without a GPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import transformers.models.llama.modeling_llama as modeling
from torch import nn
from torch.func import functional_call, grad, vmap

from opake.engine import (
    AttributePatch,
    ForwardPatch,
    ItemPatch,
    Patch,
    PatchSet,
    RebindPatch,
    active,
    reclass,
)
from opake.errors import RestoreWarning
from opake.functional import with_batch_dim

IDS = torch.tensor([[1, 5, 9, 2, 7, 3, 8], [4, 4, 6, 1, 0, 2, 5]])
Make = Callable[..., Any]


def double(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) * 2


def quarter_logits(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    output = wrapped(*args, **kwargs)
    output.logits = output.logits / 4
    return output


def double_hidden(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    output = wrapped(*args, **kwargs)
    output.last_hidden_state = output.last_hidden_state * 2
    return output


def no_rotation(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
    return q, k


def no_mask(*args: Any, **kwargs: Any) -> Any:
    return None


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def instances(model: nn.Module, cls: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, cls)]


def norms(model: nn.Module) -> list[Any]:
    return instances(model, modeling.LlamaRMSNorm)


def norm_patches(model: nn.Module) -> list[Patch]:
    return [ForwardPatch(norm, double) for norm in norms(model)]


def layer_patches(model: nn.Module) -> list[Patch]:
    return [ForwardPatch(x, double) for x in instances(model, modeling.LlamaDecoderLayer)]


def head_patches(model: nn.Module) -> list[Patch]:
    return [ForwardPatch(model, quarter_logits)]


def base_patches(model: Any) -> list[Patch]:
    return [ForwardPatch(model.model, double_hidden)]


def rope_patches(model: Any) -> list[Patch]:
    rope = {"apply_rotary_pos_emb": no_rotation}
    return [RebindPatch(x, rope) for x in instances(model, modeling.LlamaAttention)]


def mask_patches(model: Any) -> list[Patch]:
    return [RebindPatch(model.model, {"create_causal_mask": no_mask})]


def loss_like_patches(model: Any) -> list[Patch]:
    return [AttributePatch(norm, "variance_epsilon", 0.5) for norm in norms(model)]


KINDS = [
    pytest.param(norm_patches, id="norms"),
    pytest.param(layer_patches, id="layers"),
    pytest.param(base_patches, id="base model"),
    pytest.param(head_patches, id="whole model"),
    pytest.param(rope_patches, id="rebound attention"),
    pytest.param(loss_like_patches, id="attributes"),
]


@pytest.fixture(autouse=True)
def _nothing_is_left(make_llama: Make) -> Iterator[None]:
    torch._dynamo.reset()
    make_llama()  # classes cache what they find out about themselves at the first instance
    stock = {name: id(value) for name, value in vars(modeling).items()}
    classes = {c: dict(vars(c)) for c in vars(modeling).values() if isinstance(c, type)}
    yield
    assert active() == []
    assert {name: id(value) for name, value in vars(modeling).items()} == stock
    for cls, content in classes.items():
        now = dict(vars(cls))
        now.pop("__slotnames__", None)  # copyreg's own cache, written by the first copy
        content.pop("__slotnames__", None)
        assert now == content


def assert_stock(model: nn.Module) -> None:
    for module in model.modules():
        assert reclass.KEY not in vars(module)
        assert "forward" not in vars(module)
        assert all("_opake_stock" not in vars(cls) for cls in type(module).__mro__)


# ---- torch.compile


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["stock", "patched"])
def test_compile_follows(make_llama: Make, kind: Any, first: str) -> None:
    model = make_llama()
    patches = PatchSet(kind(model))
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    stock = logits(model)
    seen = []
    for patched in [first == "patched", first == "stock"] * 3:
        if patched:
            patches.patch()
        expected = logits(model)
        torch.testing.assert_close(logits(compiled), expected)
        assert torch.equal(expected, stock) is not patched
        seen.append(counters["stats"]["unique_graphs"])
        patches.unpatch()
    assert seen == [1, 2, 2, 2, 2, 2]
    assert_stock(model)


def test_compile_follows_a_whole_graph_and_new_sets(make_llama: Make) -> None:
    model = make_llama()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    stock = logits(compiled)
    for _ in range(3):  # a scope is planned anew at each entry
        with PatchSet([*head_patches(model), *base_patches(model), *norm_patches(model)]):
            torch.testing.assert_close(logits(compiled), logits(model))
        torch.testing.assert_close(logits(compiled), stock)
    assert counters["stats"]["unique_graphs"] == 2


def test_model_compile_in_place_follows(make_llama: Make) -> None:
    model = make_llama()
    stock = logits(model)
    with PatchSet(norm_patches(model)):
        patched = logits(model)
        model.compile(backend="eager")
        torch.testing.assert_close(logits(model), patched)
    torch.testing.assert_close(logits(model), stock)


FACTOR = 2
TABLE = {"factor": 2}


class ReadsGlobals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR + TABLE["factor"] + scaled(x)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x


def scaled_by_ten(x: torch.Tensor) -> torch.Tensor:
    return x * 10


def test_compile_follows_globals_and_dict_entries() -> None:
    module = ReadsGlobals()
    compiled = torch.compile(module, backend="eager")
    here, x = sys.modules[__name__], torch.ones(3)
    sets = [
        PatchSet([AttributePatch(here, "FACTOR", 5)]),
        PatchSet([ItemPatch(TABLE, "factor", 7)]),
        PatchSet([AttributePatch(here, "scaled", scaled_by_ten)]),
    ]
    for _ in range(2):
        for patches, expected in zip(sets, [8, 10, 14], strict=True):
            assert compiled(x).tolist() == [5] * 3
            with patches:
                assert compiled(x).tolist() == module(x).tolist() == [expected] * 3
        assert compiled(x).tolist() == [5] * 3


# ---- rebinding


def test_rebind_goes_through_the_decorators_of_the_model(make_llama: Make) -> None:
    model, second = make_llama(), make_llama()
    stock = logits(model)
    inner, depth = modeling.LlamaModel.forward, 0
    while hasattr(inner, "__wrapped__"):
        inner, depth = inner.__wrapped__, depth + 1
    assert depth >= 2  # or there is nothing to go through
    with PatchSet(mask_patches(model)):
        padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2)
        with torch.no_grad():  # without its builder, the padding mask has no effect
            patched = model(input_ids=IDS, attention_mask=padding, use_cache=False).logits
            other = second(input_ids=IDS, attention_mask=padding, use_cache=False).logits
        assert torch.equal(patched, stock)
        assert not torch.equal(other, stock)
        with torch.no_grad():  # what the decorators do is still done
            output = model(input_ids=IDS, output_hidden_states=True, return_dict=False)
        assert isinstance(output, tuple)
        assert len(output[-1]) == 3
    assert torch.equal(logits(model), stock)


def test_rebind_leaves_a_second_model(make_llama: Make) -> None:
    model, second = make_llama(), make_llama()
    stock = logits(model)
    with PatchSet(rope_patches(model)):
        assert not torch.equal(logits(model), stock)
        assert torch.equal(logits(second), stock)
        assert torch.equal(logits(make_llama()), stock)


def test_rebind_sees_what_the_module_has_now(
    make_llama: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama()
    stock = logits(model)
    with PatchSet(rope_patches(model)):
        pass
    eager = modeling.ALL_ATTENTION_FUNCTIONS
    calls = []

    class Counting:
        def get_interface(self, *args: Any) -> Any:
            calls.append(args)
            return eager.get_interface(*args)

    monkeypatch.setattr(modeling, "ALL_ATTENTION_FUNCTIONS", Counting())
    with PatchSet(rope_patches(model)):
        assert not torch.equal(logits(model), stock)
    assert len(calls) == 2


# ---- functorch


def test_vmap_grad_follows(make_llama: Make) -> None:
    model = make_llama()
    params = dict(model.named_parameters())

    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        batch = {"input_ids": ids[None], "use_cache": False}
        return functional_call(model, params, (), batch).logits.float().square().mean()

    def run() -> torch.Tensor:
        with warnings.catch_warnings():
            # functorch names each operator that it runs example by example, stock or patched.
            warnings.filterwarnings("ignore", "There is a performance drop")
            return vmap(grad(loss), (None, 0))(params, IDS)["lm_head.weight"]

    stock = run()
    with PatchSet(norm_patches(model)):
        patched = run()
        doubled = [grad(loss)(params, ids)["lm_head.weight"] for ids in IDS]
    assert not torch.allclose(patched, stock)
    # fp32, and a batched product sums in another order
    torch.testing.assert_close(patched, torch.stack(doubled), rtol=1e-4, atol=1e-6)
    assert torch.equal(run(), stock)


# ---- gradient checkpointing


def enable_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


class Counter:
    """A wrapper that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return wrapped(*args, **kwargs)


def count_training_step(model: Any, counter: Counter) -> int:
    counter.calls = 0
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return counter.calls


@pytest.mark.parametrize("cls", [modeling.LlamaDecoderLayer, modeling.LlamaMLP])
@pytest.mark.parametrize("enabled", ["before", "inside"])
def test_checkpointing_is_kept(make_llama: Make, cls: type, enabled: str) -> None:
    model, counter = make_llama().train(), Counter()
    patches = PatchSet([ForwardPatch(module, counter) for module in instances(model, cls)])
    with patches:
        assert count_training_step(model, counter) == 2
    if enabled == "before":
        enable_checkpointing(model)
    with patches:
        if enabled == "inside":
            enable_checkpointing(model)
        assert count_training_step(model, counter) == 4  # two layers, and the recompute
        # two patches on one layer do not checkpoint twice
        with PatchSet([ForwardPatch(module, Counter()) for module in instances(model, cls)]):
            assert count_training_step(model, counter) == 4
    with PatchSet([ForwardPatch(module, counter) for module in instances(model, nn.Embedding)]):
        assert count_training_step(model, counter) == 1


def test_checkpointed_gradients_are_those_of_the_loop(make_llama: Make) -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    model = make_llama().train()
    patches = PatchSet(layer_patches(model))
    with patches:
        plain = gradients(model)
    enable_checkpointing(model)
    with patches:
        checkpointed = gradients(model)
    for name, expected in plain.items():
        assert torch.equal(checkpointed[name], expected), name


# ---- FSDP2


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed", reason="torch is built without distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    from torch.distributed.device_mesh import DeviceMesh

    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


def shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_classes() -> dict[type, type]:
    return sys.modules["torch.distributed.fsdp._fully_shard._fully_shard"].cls_to_fsdp_cls


def count_forward(model: Any, counter: Counter) -> int:
    counter.calls = 0
    logits(model)
    return counter.calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fully_shard_inside(make_llama: Make, mesh: Any, checkpointing: bool) -> None:
    model, other, counter = make_llama(), make_llama(), Counter()
    layers = instances(model, modeling.LlamaDecoderLayer)
    patches = PatchSet([ForwardPatch(module, counter) for module in (*layers, model)])
    twin = PatchSet(
        [ForwardPatch(x, counter) for x in instances(other, modeling.LlamaDecoderLayer)]
    )
    if checkpointing:
        enable_checkpointing(model.train())
    with twin:
        with patches:
            shard(model, mesh)
            shard(other, mesh)
            assert count_forward(model, counter) == 3
            if checkpointing:
                assert count_training_step(model, counter) == 5
        assert count_forward(model, counter) == 0
        assert count_forward(other, counter) == 2  # its classes were made of the same ones
    assert count_forward(other, counter) == 0
    if checkpointing:
        mlp = PatchSet([ForwardPatch(x, counter) for x in instances(model, modeling.LlamaMLP)])
        with mlp:
            assert count_training_step(model, counter) == 4
    assert_stock(model)
    assert_stock(other)
    assert type(layers[0]) is sharded_classes()[modeling.LlamaDecoderLayer]
    assert type(layers[0]).__name__ == "FSDPLlamaDecoderLayer"
    assert not any("_opake_stock" in vars(cls) for cls in sharded_classes())
    assert count_forward(shard(make_llama(), mesh), counter) == 0


def test_fully_shard_first(make_llama: Make, mesh: Any) -> None:
    model, counter = shard(make_llama(), mesh), Counter()
    layers = instances(model, modeling.LlamaDecoderLayer)
    cls = type(layers[0])
    with PatchSet([ForwardPatch(layer, counter) for layer in layers]):
        assert count_forward(model, counter) == 2
        enable_checkpointing(model.train())
        assert count_training_step(model, counter) == 4
    assert count_forward(model, counter) == 0
    assert type(layers[0]) is cls
    assert_stock(model)


# ---- other models


def test_a_second_model_is_untouched(make_llama: Make) -> None:
    model, before = make_llama(), make_llama()
    sharing = make_llama(config=model.config)
    stock = logits(model)
    keys = {id(m): (type(m), list(vars(m))) for x in (before, sharing) for m in x.modules()}
    seen: list[torch.Tensor] = []
    everything = [p for kind in KINDS for p in kind.values[0](model)]
    with PatchSet([*everything, *mask_patches(model)]):
        inside = make_llama(config=model.config)
        assert not torch.equal(logits(model), stock)
        thread = threading.Thread(target=lambda: seen.append(logits(before)))
        thread.start()
        thread.join()
        for other in (before, sharing, inside, make_llama()):
            assert torch.equal(logits(other), stock)
            assert_stock(other)
    assert torch.equal(seen[0], stock)
    assert torch.equal(logits(model), stock)
    assert {id(m): (type(m), list(vars(m))) for x in (before, sharing) for m in x.modules()} == keys
    assert_stock(model)


# ---- copies


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("kind", [*KINDS, pytest.param(mask_patches, id="rebound model")])
def test_copies_are_stock(make_llama: Make, make_copy: Any, kind: Any) -> None:
    model = make_llama()
    stock = logits(model)
    with PatchSet(kind(model)):
        made = make_copy(model)
        assert_stock(made)
        assert torch.equal(logits(made), stock)
        with torch.no_grad():
            made.lm_head.weight.zero_()  # a copy has weights of its own
        assert not logits(made).any()
        assert logits(model).any()
    assert torch.equal(logits(model), stock)
    assert [list(vars(m)) for m in made.modules()] == [list(vars(m)) for m in model.modules()]


def test_copy_copy_is_stock(make_llama: Make) -> None:
    model = make_llama()
    layer, x = model.model.layers[0].mlp, torch.ones(1, 32)
    stock = layer(x)
    with PatchSet([ForwardPatch(layer, double)]):
        made = copy.copy(layer)
        assert torch.equal(layer(x), stock * 2)
        assert torch.equal(made(x), stock)
    assert_stock(made)
    assert made.gate_proj is layer.gate_proj


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_copies_load_where_opake_is_not_installed(
    make_llama: Make, tmp_path: Any, how: str
) -> None:
    model, file = make_llama(), tmp_path / "model"
    patches = PatchSet([p for kind in KINDS for p in kind.values[0](model)] + mask_patches(model))
    with patches:
        if how == "pickle":
            file.write_bytes(pickle.dumps(model))
        else:
            torch.save(model, file)
    torch.save(logits(model), tmp_path / "logits")
    script = f"""
import pickle, sys
sys.modules["opake"] = None  # importing it raises
import torch
load = lambda f: torch.load(f, weights_only=False)
model = pickle.load(open({str(file)!r}, "rb")) if {how == "pickle"} else load({str(file)!r})
with torch.no_grad():
    found = model(input_ids=torch.tensor({IDS.tolist()}), use_cache=False).logits
assert torch.allclose(found, load({str(tmp_path / "logits")!r}), atol=1e-6), "not stock"
assert not [m for m in model.modules() if "forward" in vars(m)]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_save_pretrained_writes_what_stock_writes(make_llama: Make, tmp_path: Any) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path / "stock")
    with PatchSet([*norm_patches(model), *head_patches(model)]):
        model.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "stock").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(loaded), logits(model))


def test_data_parallel_replicas_run_on_themselves(make_llama: Make) -> None:
    norm = make_llama().model.norm
    with PatchSet([ForwardPatch(norm, double)]):
        replica = norm._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
        replica.weight = torch.zeros(32)
        assert not replica(torch.ones(1, 32)).any()
        assert norm(torch.ones(1, 32)).any()


# ---- what the model looks like


def test_the_model_looks_as_before(make_llama: Make) -> None:
    model, second = make_llama(), make_llama()
    parts = [model, *model.modules()]
    signatures = [inspect.signature(m.forward) for m in parts]
    kinds = (norm_patches, layer_patches, base_patches, head_patches, rope_patches, mask_patches)
    with PatchSet([patch for kind in kinds for patch in kind(model)]):
        assert list(model.state_dict()) == list(second.state_dict())
        assert repr(model) == repr(second)
        assert [n for n, _ in model.named_modules()] == [n for n, _ in second.named_modules()]
        assert isinstance(model, transformers.LlamaForCausalLM)
        assert [inspect.signature(m.forward) for m in parts] == signatures
        for mine, theirs in zip(model.modules(), second.modules(), strict=True):
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                expected = getattr(type(theirs), attribute)
                assert getattr(type(mine), attribute) == expected
            assert isinstance(mine, type(theirs))
            assert mine.forward.__name__ == theirs.forward.__name__
            assert set(dir(theirs)) <= set(dir(mine))
        assert inspect.getsource(type(model)) == inspect.getsource(type(second))
    assert [inspect.signature(m.forward) for m in parts] == signatures


def test_generate_works_inside(make_llama: Make) -> None:
    model = make_llama()
    tokens = functools.partial(
        model.generate, IDS, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    expected = tokens()
    identity = Counter()
    patches = [ForwardPatch(m, identity) for m in (model, model.model, *norms(model))]
    with PatchSet(patches):
        assert torch.equal(tokens(), expected)
    assert identity.calls > 0


def test_moving_and_freezing_inside_lasts(make_llama: Make) -> None:
    model = make_llama()
    with PatchSet([*norm_patches(model), *layer_patches(model)]):
        model.to(torch.float64).requires_grad_(False).train()
        assert logits(model).dtype == torch.float64
    assert logits(model).dtype == torch.float64
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())


# ---- an instance forward that is there already, and wrappers of other libraries


def test_an_instance_forward_stays_in_the_chain(make_llama: Make) -> None:
    model = make_llama()
    stock = logits(model)
    kept = {}
    for norm in norms(model):  # as Liger and kernelize do
        kept[norm] = norm.forward = types.MethodType(modeling.LlamaRMSNorm.forward, norm)
    with PatchSet(norm_patches(model)):
        assert not torch.equal(logits(model), stock)
    assert torch.equal(logits(model), stock)
    for norm, forward in kept.items():
        assert vars(norm)["forward"] is forward
        assert type(norm) is modeling.LlamaRMSNorm


def hooks() -> Any:
    return pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


class AddOne:
    """What an accelerate hook does in these tests, made into one when accelerate is there."""

    def __new__(cls) -> Any:
        class Hook(hooks().ModelHook):  # type: ignore[misc]
            def post_forward(self, module: Any, output: Any) -> Any:
                return output + 1

        return Hook()


def test_a_hook_from_before_stays_in_the_chain() -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    hooks().add_hook_to_module(module, AddOne())
    hooked = vars(module)["forward"]
    with PatchSet([ForwardPatch(module, double)]):
        torch.testing.assert_close(module(x), (stock + 1) * 2)
        assert [*inspect.signature(module.forward).parameters] == ["input"]
    assert vars(module)["forward"] is hooked
    assert torch.equal(module(x), stock + 1)
    hooks().remove_hook_from_module(module)
    assert torch.equal(module(x), stock)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_applied_inside_is_put_on_stock(layers: int, before: bool) -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    if before:
        module.forward = with_batch_dim(module.forward, batch_kwargs=["input"], min_ndim=1)
    sets = [PatchSet([ForwardPatch(module, double)]).patch() for _ in range(layers)]
    hooks().add_hook_to_module(module, AddOne())
    torch.testing.assert_close(module(x), stock * 2**layers + 1)
    for n, patches in enumerate(sets, 1):
        patches.unpatch()
        torch.testing.assert_close(module(x), stock * 2 ** (layers - n) + 1)
    assert type(module) is nn.Linear
    hooks().remove_hook_from_module(module)
    assert torch.equal(module(x), stock)
    assert not reaches_ours(module)


def test_a_hook_applied_and_removed_inside() -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    with PatchSet([ForwardPatch(module, double)]):
        hooks().add_hook_to_module(module, AddOne())
        hooks().remove_hook_from_module(module)
        assert torch.equal(module(x), stock * 2)
    assert "forward" not in vars(module)
    assert torch.equal(module(x), stock)


def test_copies_of_a_module_hooked_inside_are_stock() -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    with PatchSet([ForwardPatch(module, double)]):
        hooks().add_hook_to_module(module, AddOne())
        made = copy.deepcopy(module)
        assert torch.equal(made(x), stock + 1)
    assert made._old_forward.__self__ is made
    assert type(made) is nn.Linear


def reaches_ours(module: nn.Module) -> list[Any]:
    """Return the wrappers, and what the engine made of them, that a module's forward leads to."""
    found, seen = [], set()
    todo = [v for k, v in vars(module).items() if "forward" in k and "hook" not in k]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | type):
            continue
        seen.add(id(item))
        file = getattr(getattr(item, "__code__", None), "co_filename", "")
        if item in (double, quarter_logits) or file.endswith(("rebind.py", "reclass.py")):
            found.append(item)
        cells = getattr(item, "__closure__", None) or ()
        todo += [c.cell_contents for c in cells if callable(c.cell_contents)]
        todo += [getattr(item, name, None) for name in ("__func__", "__wrapped__", "func")]
        if hasattr(item, "__dict__"):
            todo += [v for v in vars(item).values() if callable(v)]
    return found


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("first_out", ["whole", "base"])
@pytest.mark.parametrize("before", [False, True])
def test_mixed_precision_prepared_inside(
    make_llama: Make, accelerator: Any, before: bool, first_out: str
) -> None:
    model, twin = make_llama(), make_llama()
    stock = logits(model)
    if before:
        for each in (model, twin):
            each.forward = with_batch_dim(each.forward, batch_kwargs=["input_ids"], min_ndim=2)
    expected = logits(accelerator.prepare(twin))
    sets = {
        "whole": PatchSet([ForwardPatch(model, quarter_logits)]).patch(),
        "base": PatchSet([ForwardPatch(model.model, double_hidden)]).patch(),
    }
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert logits(model).dtype == torch.float32
    assert not torch.equal(logits(model), expected)
    sets.pop(first_out).unpatch()
    assert not torch.equal(logits(model), expected)
    sets.popitem()[1].unpatch()
    assert torch.equal(logits(model), expected)
    assert not reaches_ours(model)
    assert type(model) is transformers.LlamaForCausalLM
    if before:
        return  # accelerate binds what it unwraps, and breaks a forward that takes no self
    # both walk down what prepare kept, and end where they end without us
    for each in (model, twin):
        assert accelerator.unwrap_model(each, keep_fp32_wrapper=False) is each
    assert "_original_forward" not in vars(model)
    assert model.forward.__func__ is twin.forward.__func__
    assert torch.equal(logits(model), stock)


def test_mixed_precision_prepared_before(make_llama: Make, accelerator: Any) -> None:
    model = accelerator.prepare(make_llama())
    kept = {name: value for name, value in vars(model).items() if "forward" in name}
    stock = logits(model)
    with PatchSet([ForwardPatch(model, quarter_logits), *norm_patches(model)]):
        assert not torch.equal(logits(model), stock)
    assert torch.equal(logits(model), stock)
    assert {n: v for n, v in vars(model).items() if "forward" in n} == kept


def test_with_batch_dim_put_on_inside(make_llama: Make) -> None:
    module, x = nn.Linear(3, 3), torch.ones(3)
    stock = module(x)
    with PatchSet([ForwardPatch(module, double)]):
        module.forward = with_batch_dim(module.forward, batch_kwargs=["input"], min_ndim=2)
        torch.testing.assert_close(module(x), stock * 2)
    torch.testing.assert_close(module(x), stock)
    assert module.forward.__wrapped__ == types.MethodType(nn.Linear.forward, module)
    assert not reaches_ours(module)


def test_an_unknown_wrapper_put_on_inside_is_kept() -> None:
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    patches = PatchSet([ForwardPatch(module, double)]).patch()
    ours = module.forward
    module.forward = lambda value: ours(value) + 1
    theirs = module.forward
    with pytest.warns(RestoreWarning, match=r"Linear.*forward"):
        patches.unpatch()
    assert module.forward is theirs
    assert type(module) is nn.Linear
    assert torch.equal(module(x), stock * 2 + 1)  # they hold what they took


# ---- torch's own class changes


class Plus(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1


def test_parametrize_inside() -> None:
    from torch.nn.utils import parametrize

    module, x = nn.Linear(3, 3, bias=False), torch.ones(2, 3)
    stock, raised = module(x), module(x) + 3
    for remove_inside in (True, False):
        with PatchSet([ForwardPatch(module, double)]):
            parametrize.register_parametrization(module, "weight", Plus())
            torch.testing.assert_close(module(x), raised * 2)
            if remove_inside:
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
                torch.testing.assert_close(module(x), stock * 2)
        if not remove_inside:
            assert type(module).__name__ == "ParametrizedLinear"
            torch.testing.assert_close(module(x), raised)
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        assert type(module) is nn.Linear
        assert_stock(module)
        torch.testing.assert_close(module(x), stock)


def test_parametrize_before() -> None:
    from torch.nn.utils import parametrize

    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    stock = module(x)
    parametrize.register_parametrization(module, "weight", Plus())
    raised, cls = module(x), type(module)
    with PatchSet([ForwardPatch(module, double)]):
        torch.testing.assert_close(module(x), raised * 2)
    assert type(module) is cls
    with PatchSet([ForwardPatch(module, double)]):
        parametrize.register_parametrization(module, "bias", Plus())
        torch.testing.assert_close(module(x), (raised + 1) * 2)
        # torch deletes the property of before from the class that the module has now
        with pytest.raises(AttributeError):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        torch.testing.assert_close(module(x), (raised + 1) * 2)
    torch.testing.assert_close(module(x), raised + 1)
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    parametrize.remove_parametrizations(module, "bias", leave_parametrized=False)
    assert type(module) is nn.Linear
    torch.testing.assert_close(module(x), stock)


def test_a_class_that_the_user_makes_of_ours(make_llama: Make) -> None:
    layer = make_llama().model.layers[0]
    x = torch.ones(1, 2, 32)
    position = torch.ones(1, 2, 8), torch.zeros(1, 2, 8)
    with torch.no_grad():
        stock = layer(x, position_embeddings=position)
        with PatchSet([ForwardPatch(layer, double)]):

            class Mine(type(layer)):  # type: ignore[misc]
                def extra_repr(self) -> str:
                    return f"mine {super().extra_repr()}"

            layer.__class__ = Mine
            assert torch.equal(layer(x, position_embeddings=position), stock * 2)
        assert type(layer) is Mine
        assert Mine.__bases__ == (modeling.LlamaDecoderLayer,)
        assert torch.equal(layer(x, position_embeddings=position), stock)
    assert "mine" in repr(layer)
    assert_stock(layer)


def test_what_is_written_on_the_class_inside_is_meant_for_the_class() -> None:
    class Layer(nn.Linear):
        pass

    layer, other = Layer(2, 2), Layer(2, 2)
    with PatchSet([ForwardPatch(layer, double)]):
        type(layer).label = "label"  # type: ignore[attr-defined]
        late = PatchSet([AttributePatch(type(layer), "in_features", 5, create=True)]).patch()
        assert vars(Layer)["in_features"] == 5
    late.unpatch()
    assert vars(Layer)["label"] == "label"
    assert other.label == "label"
    assert "in_features" not in vars(Layer)
    with PatchSet([ForwardPatch(layer, double)]):
        assert "label" not in vars(type(layer))


def test_a_lazy_module_that_becomes_another_class_inside() -> None:
    module = nn.LazyLinear(3)
    with PatchSet([ForwardPatch(module, double)]):
        inside = module(torch.ones(2, 4))
    assert type(module) is nn.Linear
    torch.testing.assert_close(module(torch.ones(2, 4)) * 2, inside)
    assert_stock(module)


# ---- lifetime


def test_a_lost_handle_does_not_keep_the_model(make_llama: Make) -> None:
    model = make_llama()
    PatchSet([*norm_patches(model), *layer_patches(model), *mask_patches(model)]).patch()
    assert len(active()) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert active() == []


def test_an_unpatched_model_is_collected(make_llama: Make) -> None:
    model = make_llama()
    patches = PatchSet([*norm_patches(model), *layer_patches(model), *rope_patches(model)])
    with patches:
        logits(model)
    gone = weakref.ref(model)
    del model, patches
    gc.collect()
    assert gone() is None


def test_derived_classes_do_not_pile_up(make_llama: Make) -> None:
    def derived() -> set[int]:
        gc.collect()
        classes = (modeling.LlamaRMSNorm, modeling.LlamaDecoderLayer, modeling.LlamaAttention)
        return {id(sub) for cls in classes for sub in cls.__subclasses__()}

    def scope() -> None:
        model = make_llama()
        for _ in range(3):
            local = [ForwardPatch(x, Counter()) for x in model.model.layers]
            every = [*norm_patches(model), *layer_patches(model), *rope_patches(model), *local]
            with PatchSet(every):
                logits(model)

    scope()
    once = derived()
    scope()
    assert derived() == once
