"""Linear layers with adapters: PEFT's numbers, what is not computed, and the published names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from interpreter import interpreted
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from opake import kernels as K
from opake.errors import InvalidArgument, InvalidType
from opake.kernels._lora import Adapted
from opake.kernels._lora_products import project
from opake.kernels.lora_mlp import NAMES
from opake.patches import kernels as published

lora_linear, lora_qkv, lora_mlp = K.lora_linear, K.lora_qkv, K.lora_mlp
OPS = {name: K.find(name) for name in ("lora_linear", "lora_qkv", "lora_mlp")}
ops = pytest.mark.parametrize("name", OPS)


def layer(
    inner: int, outer: int, rank: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    """A layer of random numbers with a bias: (weight, A, B, scale, bias)."""
    g = torch.Generator().manual_seed(seed + inner * outer)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(dtype)

    return normal(outer, inner), normal(rank, inner), normal(outer, rank), 0.5, normal(outer)


def made(name: str, rank: int = 4, dtype: torch.dtype = torch.float32) -> K.Call:
    """A call of an operator, of ten tokens."""
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    if name == "lora_linear":
        return K.Call((x, *layer(24, 20, rank, dtype)))
    sizes = ((24, 20), (24, 12), (24, 12)) if name == "lora_qkv" else ((24, 40), (24, 40), (40, 24))
    return K.Call((x, *(layer(*size, rank, dtype, seed) for seed, size in enumerate(sizes))))


# ---- PEFT


ADAPTERS = {"one": (4,), "several": (4, 17, 1)}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("small", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("which", ADAPTERS)
@interpreted
def test_numbers_of_peft(which: str, small: torch.dtype, autocast: bool) -> None:
    module, x = peft_layer(ADAPTERS[which], small)
    names = module.active_adapters
    parts = [module.lora_A[n].weight for n in names], [module.lora_B[n].weight for n in names]
    scales = [module.scaling[n] for n in names]
    base = module.base_layer
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stock = module(x)
        assert torch.equal(
            OPS["lora_linear"].reference(x, base.weight, *parts, scales, base.bias), stock
        )
        found = lora_linear(x, base.weight, *parts, scales, base.bias)
    assert oracle.fused(OPS["lora_linear"])
    call = K.Call((x, base.weight, *map(tuple, parts), tuple(scales), base.bias))
    given = torch.randn(stock.shape).to(stock.dtype)
    truth = oracle.run(
        OPS["lora_linear"].reference,
        oracle.wide(call),
        oracle.differentiable(call),
        [given.double()],
    )
    leaves = [*parts[0], *parts[1]]
    theirs = torch.autograd.grad(stock, leaves, given)
    ours = torch.autograd.grad(found, leaves, given)
    assert [x.dtype for x in (found, *ours)] == [x.dtype for x in (stock, *theirs)]
    assert error([found], truth.outputs) <= 1.05 * error([stock], truth.outputs)
    exact = truth.grads[2:-1]
    assert error(ours, exact) <= 1.05 * error(theirs, exact) + 1e-6  # sums of fp32


def error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The RMS error of all, each relative to what it is of."""
    rows = [((x - y) / y.square().mean().sqrt()) for x, y in zip(found, truth, strict=True)]
    return torch.cat([x.flatten() for x in rows]).square().mean().sqrt().item()


def peft_layer(ranks: tuple[int, ...], small: torch.dtype) -> tuple[Any, Tensor]:
    """A bf16 layer with adapters of those ranks, their weights in another dtype, and an input."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 48, dtype=torch.bfloat16)

    model = Model()
    for k, rank in enumerate(ranks):
        config = peft.LoraConfig(
            r=rank, lora_alpha=3 + k, target_modules=["inner"], init_lora_weights=False
        )
        if k:
            model.add_adapter(str(k), config)
        else:
            model = peft.get_peft_model(model, config, adapter_name="0")
    model.base_model.set_adapter([str(k) for k in range(len(ranks))])
    module = model.base_model.model.inner
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(small)
    return module, torch.randn(3, 5, 64).bfloat16()


@interpreted
def test_adapters_wider_than_the_base_are_rounded_once() -> None:
    """What the adapters add in fp32 is not rounded before it is added."""
    x, (weight, a, b, scale, _) = torch.randn(64, 24).half(), layer(24, 20, dtype=torch.float16)
    a, b = a.float(), b.float()
    found = lora_linear(x, weight, a, b, scale)
    added = (x.float() @ a.t() @ b.t()) * scale
    expected = (F.linear(x, weight).float() + added).half()
    assert (found != expected).float().mean() < 0.02  # sums of fp32 that lie between two numbers


@pytest.mark.parametrize("rank", [4, 17])
@pytest.mark.parametrize("scale", [64.0, 2.0**-14], ids=["large", "small"])
@ops
@interpreted
def test_scales_leave_fp16_where_those_of_peft_do(name: str, scale: float, rank: int) -> None:
    """``scale (x A^T)`` would be infinite, or next to nothing; ``scale ((x A^T) B^T)`` is not."""
    call = made(name, rank, torch.float16)
    large, small = (2.0**10, 2.0**-16) if scale > 1 else (2.0**-8, 2.0**8)
    with_a, with_b = (lambda y: y * large), (lambda y: y * small)
    call = K.Call(_changed(call.args, 1, with_a, with_b, scale))
    assert oracle.assert_right(OPS[name], call)


def _changed(args: tuple[Any, ...], first: int, *given: Any) -> tuple[Any, ...]:
    """Arguments with every A and B passed through functions, and another scale."""
    if isinstance(args[first], tuple):
        return (args[0], *(_changed(y, 0, *given) for y in args[first:]))
    with_a, with_b, scale = given
    a, b, _, *bias = args[first + 1 :]
    return (*args[: first + 1], with_a(a), with_b(b), scale, *bias)


@ops
@interpreted
def test_what_a_scale_of_zero_does_not_hide(name: str) -> None:
    """PEFT multiplies by it, and zero times infinity is no number."""

    def first(y: Tensor) -> Tensor:
        return y.index_fill(0, torch.tensor(0), float("inf"))

    for with_a, with_b in ((first, torch.clone), (torch.clone, first)):
        call = K.Call(_changed(made(name).args, 1, with_a, with_b, 0.0))
        outs = oracle.outputs(OPS[name].function(*call.args))
        assert oracle.fused(OPS[name])
        expected = oracle.outputs(OPS[name].reference(*call.args))
        for out, other in zip(outs, expected, strict=True):
            assert other.isnan().any()
            assert torch.equal(out.isnan(), other.isnan())


# ---- gradients


@pytest.mark.parametrize("count", [1, 2])
@ops
@interpreted
def test_gradients_are_dense(name: str, count: int) -> None:
    """Optimizers that go over lists of tensors are slow on others, and flatten them by views."""
    call = made(name)
    several = [lambda y: (y,) * count] * 2
    call = K.Call(_changed(call.args, 1, *several, (0.5, -2.0)[:count]))
    found = {k: x for k, x in oracle.tensors(call).items() if k != 0}

    def loss(values: list[Tensor], x: Tensor) -> Tensor:
        here = oracle.replaced(call, {0: x, **dict(zip(found, values, strict=True))})
        return sum(y.square().sum() for y in oracle.outputs(OPS[name].function(*here.args)))

    values = [x.clone().requires_grad_() for x in found.values()]
    grads = torch.autograd.grad(loss(values, call.args[0]), values)
    assert oracle.fused(OPS[name])
    each = vmap(grad(loss), (None, 0))(list(found.values()), torch.stack([call.args[0]] * 3))
    assert oracle.fused(OPS[name])
    assert all(g.is_contiguous() for g in (*grads, *each))


# ---- what is not computed


@contextmanager
def products() -> Iterator[list[tuple[int, ...]]]:
    """Note the shapes of the right factors of all matrix products."""
    found: list[tuple[int, ...]] = []

    def noting(stock: Callable[..., Tensor], right: int) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            found.append(tuple(args[right].shape))
            return stock(*args, **kwargs)

        return product

    names = {"mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
    stock = {name: getattr(torch, name) for name in names}
    with mock.patch.multiple(torch, **{n: noting(stock[n], right) for n, right in names.items()}):
        yield found


def per_example(name: str, trained: Callable[[Any], bool], size: int) -> list[tuple[int, ...]]:
    """The products of gradients of ``size`` examples, of the adapters for which ``trained`` is."""
    op, call = OPS[name], made(name)
    found = oracle.tensors(call)
    keys = [k for k in found if trained(k)]

    def loss(values: list[Tensor], x: Tensor) -> Tensor:
        here = oracle.replaced(call, {0: x, **dict(zip(keys, values, strict=True))})
        return sum(y.square().sum() for y in oracle.outputs(op.function(*here.args, **here.kwargs)))

    x = torch.stack([call.args[0]] * size)
    with products() as shapes, oracle.counted() as launches:
        vmap(grad(loss), (None, 0))([found[k] for k in keys], x)
        assert oracle.fused(op)
        return [*shapes, *[(launches(),)]]


def adapter(key: Any) -> bool:
    """Whether that is where an A or a B is."""
    return (key[1] in (1, 2)) if isinstance(key, tuple) else key in (2, 3)


@ops
@interpreted
def test_no_product_and_no_launch_more_for_more_examples(name: str) -> None:
    few, many = (per_example(name, adapter, size) for size in (2, 7))
    assert len(few) == len(many)
    assert few[-1] == many[-1]  # launches


@ops
@interpreted
def test_a_shared_weight_is_not_repeated_for_examples(name: str) -> None:
    call = made(name)
    weights = [x for k, x in oracle.tensors(call).items() if not isinstance(k, str)]
    large = {tuple(w.shape) for w in weights if w.dim() == 2 and min(w.shape) > 4}
    large |= {shape[::-1] for shape in large}
    shapes = per_example(name, adapter, 6)
    assert any(shape in large for shape in shapes)
    assert not any(shape[1:] in large for shape in shapes if len(shape) == 3)


@ops
@interpreted
def test_examples_that_share_adapters_are_more_rows(name: str) -> None:
    """Of all of them, mapped inside of what is differentiated, A and B have one gradient."""
    op, call = OPS[name], made(name)
    found = {k: y for k, y in oracle.tensors(call).items() if k != 0}

    def loss(values: list[Tensor], x: Tensor) -> Tensor:
        def one(x: Tensor) -> tuple[Tensor, ...]:
            here = oracle.replaced(call, {0: x, **dict(zip(found, values, strict=True))})
            return tuple(oracle.outputs(op.function(*here.args)))

        return sum(y.square().sum() for y in vmap(one)(x))

    def made_of(x: Tensor) -> list[tuple[int, ...]]:
        with products() as shapes:
            grad(loss)(list(found.values()), x)
        assert oracle.fused(op)
        return shapes

    x = torch.stack([call.args[0]] * 6)
    assert all(len(shape) == 2 for shape in made_of(x))
    assert len(made_of(x)) == len(made_of(x[:1]))


@ops
@interpreted
def test_what_is_frozen_is_not_computed(name: str) -> None:
    everything = len(per_example(name, lambda key: key != 0, 3))
    adapters = len(per_example(name, adapter, 3))
    only_b = len(per_example(name, lambda k: adapter(k) and _is_b(k), 3))
    layers = 1 if name == "lora_linear" else 3
    assert everything - adapters == layers  # one product for the gradient of each weight
    assert only_b < adapters


def _is_b(key: Any) -> bool:
    return bool(key[1] == 2) if isinstance(key, tuple) else key == 3


@ops
@interpreted
def test_the_gradient_of_an_input_is_computed_where_asked(name: str) -> None:
    op, call = OPS[name], made(name)
    counts = []
    for needed in (False, True):
        values = {k: x.clone() for k, x in oracle.tensors(call).items()}
        for k, x in values.items():
            x.requires_grad_(adapter(k) or (needed and k == 0))
        here = oracle.replaced(call, values)
        with products() as shapes:
            outs = oracle.outputs(op.function(*here.args, **here.kwargs))
            sum(y.sum() for y in outs).backward()
        counts.append(len(shapes))
    assert counts[0] < counts[1]


KEPT = {
    "input": lambda k: k == 0,
    "A": lambda k: adapter(k) and not _is_b(k),
    "A and B": adapter,
    "all": lambda k: k == 0 or adapter(k),
    "biases": lambda k: k in (5, (1, 4), (2, 4), (3, 4)),
}


@pytest.mark.parametrize("trained", KEPT)
@ops
@interpreted
def test_what_no_gradient_needs_is_not_kept(name: str, trained: str) -> None:
    op, call = OPS[name], made(name)
    found = {k: x.clone() for k, x in oracle.tensors(call).items()}
    for k in filter(KEPT[trained], found):
        found[k].requires_grad_()
    kept = []
    for function in (op.function, op.reference):
        values = {**found, 0: found[0] * 1}  # an activation, which lives no longer than its graph
        sizes = _kept(function, oracle.replaced(call, values), values)
        kept.append(sum(sizes))
    assert oracle.fused(op)
    assert kept[0] <= kept[1] + 8 * len(found)


def _kept(function: Callable[..., Any], call: K.Call, values: dict[Any, Tensor]) -> list[int]:
    """Bytes of what is kept for a backward pass beside parameters."""
    parameters = {x.untyped_storage().data_ptr() for k, x in values.items() if k != 0}
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outs = function(*call.args)
    assert outs is not None
    return list(sizes.values())


@ops
@interpreted
def test_the_gradient_of_an_input_has_derivatives(name: str) -> None:
    """Those of the other tensors, too, while the input alone had a gradient at first."""
    op, call = OPS[name], made(name)
    keys = [k for k in oracle.tensors(call) if k != 0]
    values = [oracle.tensors(call)[k] for k in keys]

    def loss(values: list[Tensor], x: Tensor, function: Any) -> Tensor:
        here = oracle.replaced(call, {0: x, **dict(zip(keys, values, strict=True))})
        return sum(y.square().sum() for y in oracle.outputs(function(*here.args)))

    def steep(values: list[Tensor], function: Any) -> Tensor:
        return grad(loss, 1)(values, call.args[0], function).square().sum()

    ours, theirs = (grad(steep)(values, f) for f in (op.function, op.reference))
    assert error(ours, theirs) <= 1e-5


# ---- arguments


@interpreted
def test_without_adapters_the_layer_is_linear() -> None:
    x, (weight, a, b, scale, bias) = torch.randn(3, 24), layer(24, 20)
    plain = F.linear(x, weight, bias)
    assert torch.equal(lora_linear(x, weight, None, None, 1.0, bias), plain)
    assert torch.equal(lora_linear(x, weight, (), (), (), bias), plain)
    q, k, v = lora_qkv(x, (weight, None, None, 1.0), (weight, a, b, scale), (weight, (), (), ()))
    oracle.assert_all_close((q, v), (F.linear(x, weight),) * 2)
    oracle.assert_all_close(k, F.linear(x, weight) + scale * x @ a.t() @ b.t())


@interpreted
def test_activations_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN

    x, *layers = made("lora_mlp").args
    gate, up, down = (lora_linear_of(y) for y in layers)
    for activation in NAMES:
        expected = down(ACT2FN[activation](gate(x)) * up(x))
        torch.testing.assert_close(lora_mlp(x, *layers, activation=activation), expected)
        assert oracle.fused(OPS["lora_mlp"])


def lora_linear_of(given: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    weight, a, b, scale, bias = given
    return lambda x: F.linear(x, weight, bias) + scale * (x @ a.t() @ b.t())


A, B, W = torch.ones(2, 8), torch.ones(6, 2), torch.ones(6, 8)
REFUSED = {
    "a tensor for a scale": ((W, A, B, torch.tensor(1.0)), InvalidType, "scale is a number"),
    "no scale": ((W, A, B, None), InvalidType, "scale is a number"),
    "one scale of two adapters": ((W, (A, A), (B, B), 1.0), InvalidType, "sequences"),
    "one B of two adapters": ((W, (A, A), B, (1.0, 1.0)), InvalidType, "sequences"),
    "A alone": ((W, A, None, 1.0), InvalidType, "B is a tensor"),
    "fewer scales": ((W, (A, A), (B, B), (1.0,)), InvalidArgument, "2, 2 and 1"),
    "A of another width": ((W, A[:, 1:], B, 1.0), InvalidArgument, "(2, 7)"),
    "A transposed": ((W, A.t(), B, 1.0), InvalidArgument, "(8, 2)"),
    "B of another width": ((W, A, B[1:], 1.0), InvalidArgument, "(5, 2)"),
    "B of another rank": ((W, A, B[:, 1:], 1.0), InvalidArgument, "(6, 1)"),
    "a bias of another width": ((W, A, B, 1.0, W[0]), InvalidArgument, "(8,)"),
    "a bias that is no tensor": ((W, A, B, 1.0, 0.0), InvalidType, "float"),
    "a weight of another width": ((W[:, 1:], A, B, 1.0), InvalidArgument, "(6, 7)"),
    "a weight of three dimensions": ((W[None], A, B, 1.0), InvalidArgument, "(1, 6, 8)"),
    "A of another dtype than B": ((W, A.double(), B, 1.0), InvalidType, "A torch.float64"),
    "a bias of another dtype": ((W, A, B, 1.0, W[:, 0].half()), InvalidType, "bias torch.float16"),
    "a weight of another dtype": ((W.half(), A, B, 1.0), InvalidType, "weight torch.float16"),
    "adapters of integers": ((W, A.long(), B.long(), 1.0), InvalidType, "A torch.int64"),
    "complex adapters": ((W, A * 1j, B * 1j, 1.0), InvalidType, "A torch.complex64"),
    "a weight that is none": ((None, A, B, 1.0), InvalidType, "NoneType"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    given, error, names = REFUSED[what]
    x, right = torch.ones(3, 8), (W, A, B, 1.0)
    with pytest.raises(error, match=re.escape(names)):
        lora_linear(x, *given)
    for call in ((given, right, right), (right, given, right), (right, right, given)):
        with pytest.raises(error, match=re.escape(names)):
            lora_qkv(x, *call)
    with pytest.raises(error, match=re.escape(names)):
        lora_mlp(x, right, given, (torch.ones(8, 6), None, None, 1.0))
    lora_linear(x, *right)  # the same with nothing wrong


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_tensors_are_multiplied(dtype: torch.dtype) -> None:
    x, *given = (y.to(dtype) if isinstance(y, Tensor) else y for y in (W, W, A, B, 1.0))
    with pytest.raises(InvalidType, match=str(dtype)):
        lora_linear(x, *given)


def test_autocast_makes_dtypes_one() -> None:
    x, both = torch.ones(3, 8), (A, B.half())
    with torch.autocast("cpu", torch.bfloat16):
        assert lora_linear(x.half(), W, *both, 1.0).dtype == torch.bfloat16
        down = (W.t(), B.t(), A.t().half(), 1.0)
        assert lora_mlp(x, (W, *both, 1.0), (W, *both, 1.0), down).dtype == torch.bfloat16
        with pytest.raises(InvalidType, match=r"x torch.float64"):
            lora_linear(x.double(), W, A, B, 1.0)


@pytest.mark.parametrize(
    "scale", [2, True, np.float32(0.5), np.float64(0.5), np.int64(2)], ids=repr
)
def test_scales_are_numbers_of_any_kind(scale: Any) -> None:
    x, expected = torch.randn(3, 8), float(scale)
    plain = lora_linear(x, W, A, B, expected)
    assert torch.equal(lora_linear(x, W, A, B, scale), plain)
    compiled = torch.compile(lora_linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, W, A, B, scale), plain)


@ops
def test_nested_inputs_are_computed_one_by_one(name: str) -> None:
    x, *given = made(name).args
    if name == "lora_linear":
        given[-1] = None
    parts = [x[0], x[1, :3]]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    outs = oracle.outputs(OPS[name].function(nested, *given))
    for k, part in enumerate(parts):
        expected = oracle.outputs(OPS[name].function(part, *given))
        oracle.assert_all_close([y.unbind()[k] for y in outs], expected)


def test_what_else_is_refused() -> None:
    x, right = torch.ones(3, 8), (W, A, B, 1.0)
    down = (W.t(), B.t(), A.t(), 1.0)
    lora_mlp(x, right, right, down)
    with pytest.raises(InvalidArgument, match="relu"):
        lora_mlp(x, right, right, down, activation="relu")
    with pytest.raises(InvalidArgument, match=r"\(5, 8\)"):
        lora_mlp(x, right, (W[1:], A, B[1:], 1.0), down)
    with pytest.raises(InvalidArgument, match=r"down's weight \(6, 8\)"):
        lora_mlp(x, right, right, right)
    for bad in (W, (W, A, B), (W, A, B, 1.0, None, None), None):
        with pytest.raises(InvalidType, match="q is a tuple"):
            lora_qkv(x, bad, right, right)
    with pytest.raises(InvalidType, match="x is a tensor"):
        lora_linear(None, *right)


# ---- published names


@interpreted
def test_published_names() -> None:
    def theirs(given: tuple[Any, ...]) -> tuple[Any, ...]:
        weight, a, b, scale, _ = given
        return weight, a.t().contiguous(), b.t().contiguous(), scale

    x, *given = made("lora_linear").args
    oracle.assert_all_close(
        published.opake_lora_w(x, *theirs(tuple(given))), lora_linear(x, *given[:4])
    )
    x, *layers = made("lora_qkv").args
    flat = [y for one in layers for y in theirs(one)]
    biases = [one[4] for one in layers]
    oracle.assert_all_close(published.opake_lora_qkv(x, *flat, *biases), lora_qkv(x, *layers))
    bare = [one[:4] for one in layers]
    oracle.assert_all_close(published.opake_lora_qkv(x, *flat), lora_qkv(x, *bare))
    x, *layers = made("lora_mlp").args
    flat, bare = [y for one in layers for y in theirs(one)], [one[:4] for one in layers]
    names = {
        published.ACTIVATION_SWIGLU: "silu",
        published.ACTIVATION_GEGLU_EXACT: "gelu",
        published.ACTIVATION_GEGLU_APPROX: "gelu_pytorch_tanh",
    }
    for theirs_, ours in names.items():
        found = published.opake_lora_mlp(x, *flat, activation=theirs_)
        oracle.assert_all_close(found, lora_mlp(x, *bare, activation=ours))
    default = published.opake_lora_mlp(x, *flat)
    oracle.assert_all_close(default, lora_mlp(x, *bare))
    with pytest.raises(InvalidArgument, match="relu"):
        published.opake_lora_mlp(x, *flat, activation="relu")


@pytest.mark.parametrize("bad", [[1.0], 1, "A"], ids=repr)
def test_published_names_refuse_what_is_no_tensor(bad: Any) -> None:
    x, mine = torch.ones(3, 8), (W, A.t(), B.t(), 1.0)
    for k in (1, 2):
        wrong = (*mine[:k], bad, *mine[k + 1 :])
        for function, layers in (
            (published.opake_lora_w, wrong),
            (published.opake_lora_qkv, (*mine, *wrong, *mine)),
            (published.opake_lora_mlp, (*mine, *mine, *wrong)),
        ):
            with pytest.raises(InvalidType, match=f"{'AB'[k - 1]} is a tensor"):
                function(x, *layers)
    with pytest.raises(InvalidArgument, match="activation is one of"):
        published.opake_lora_mlp(x, *mine, *mine, *mine, activation=[bad])


# ---- both ways of adding short products


@pytest.mark.parametrize("rank", [4, 17, 40, 70])
@pytest.mark.parametrize("ahead", [False, True], ids=["kernels add", "cuBLAS adds"])
@interpreted
def test_either_way_of_adding_short_products_is_right(rank: int, ahead: bool) -> None:
    for name in OPS:
        call = made(name, rank)
        with ExitStack() as stack:
            for module in ("_lora_products", "lora_mlp"):
                inside = sys.modules[f"opake.kernels.{module}"]
                stack.enter_context(mock.patch.object(inside, "ahead", return_value=ahead))
            assert oracle.assert_right(OPS[name], call)


def test_biases_are_rounded_with_the_product() -> None:
    x, (weight, _, _, _, bias) = torch.randn(1, 6, 24).bfloat16(), layer(24, 20)
    plain = Adapted(weight.bfloat16(), bias.bfloat16(), (), (), ())
    (found,), _ = project(0, x, [plain])
    assert torch.equal(found, F.linear(x, *plain[:2]))


@interpreted
def test_outputs_can_be_written_to() -> None:
    for name in OPS:
        call = made(name, 4)
        here = oracle.replaced(
            call, {k: x.requires_grad_() for k, x in oracle.tensors(call).items()}
        )
        outs = oracle.outputs(OPS[name].function(*here.args, **here.kwargs))
        assert oracle.fused(OPS[name])
        sum((out.mul_(2) + 1).sum() for out in outs).backward()
