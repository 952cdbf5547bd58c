"""Every registered operator: its kernels against fp64, under autograd and every transform.

Kernels are interpreted, in another process, so that a machine without a GPU tests them.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
import torch.utils.checkpoint
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from opake import kernels
from opake.errors import InvalidArgument
from opake.kernels import Call
from opake.kernels._elementwise import block, elementwise
from opake.kernels._triton import Launch, Tile, jit, tl

OPS = [op.name for op in kernels.ops()]
ops = pytest.mark.parametrize("name", OPS)
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
SEEDS = range(8)


def small(name: str, dtype: torch.dtype = torch.float32, skip: int = 0) -> tuple[Any, Any]:
    """An operator and the first of its examples that its kernels run, with more than one number."""
    op = kernels.find(name)
    for seed in itertools.count(skip):
        call = oracle.drawn(op, seed, "cpu", dtype)
        inputs = [call.args[i] for i in oracle.differentiable(call)]
        # Second derivatives are quadratic in the size and cancel where numbers are large.
        good = all(1 < x.numel() < 40 and x.abs().max() < 5 for x in inputs)
        if good and kernels.should_run(op, *call.args)[0]:
            return op, call
    raise AssertionError("unreachable")


# ---- numbers


@ops
@dtypes
@interpreted
def test_numbers_against_fp64(name: str, dtype: torch.dtype) -> None:
    op = kernels.find(name)
    ran = 0
    for seed in SEEDS:
        ran += oracle.assert_right(op, oracle.drawn(op, seed, "cpu", dtype), seed)
    assert ran > len(SEEDS) // 2


@ops
@interpreted
def test_mixed_dtypes_promote_as_in_torch(name: str) -> None:
    op = kernels.find(name)
    ran = 0
    for seed in SEEDS:
        ran += oracle.assert_right(op, oracle.drawn(op, seed, "cpu", *FLOATS.values()), seed)
    assert ran > len(SEEDS) // 2


@ops
@interpreted
def test_gradcheck_in_fp64(name: str) -> None:
    op, call = small(name)
    args = [x.double().requires_grad_() for x in call.args]
    assert torch.autograd.gradcheck(op.function, args)
    assert torch.autograd.gradgradcheck(op.function, args)
    assert not oracle.fused(op)


@jit
def _copy_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    x_stride,
    out_stride,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    row, col, mask = block(rows, cols, block_rows, block_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * out_stride + col, x.to(out_ptr.dtype.element_ty), mask=mask)


COPY = Launch(_copy_kernel, {"": Tile(1024, 4)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@interpreted
def test_the_interpreter_rounds_as_torch(dtype: torch.dtype) -> None:
    """Without this, no number of half precision in this file would mean anything."""
    x = torch.cat([torch.randn(999) * 2.0**k for k in range(-140, 128, 7)])
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.999999, 255.75, 65519.0, 65520.0, torch.inf, -0.0]
    x = torch.cat([x, torch.tensor(ties)])
    (half,) = elementwise(COPY, (x,), (dtype,))
    assert torch.equal(half, x.to(dtype))
    (back,) = elementwise(COPY, (half,), (torch.float32,))
    assert torch.equal(back, half.float())


@ops
@interpreted
def test_infinities_and_nan_as_in_eager(name: str) -> None:
    op, call = small(name)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 90.0, -90.0])
    for k in range(len(special)):
        args = tuple(
            special.roll(k * (i + 1))
            .repeat(x.numel() // len(special) + 1)[: x.numel()]
            .view(x.shape)
            for i, x in enumerate(call.args)
        )
        found, eager = (
            oracle.leaves(oracle.run(f, Call(args), oracle.differentiable(call)))
            for f in (op.function, op.reference)
        )
        assert oracle.fused(op)
        for a, b in zip(found, eager, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


# ---- autograd


@ops
@interpreted
def test_gradients_exactly_where_asked(name: str) -> None:
    op, call = small(name)
    everywhere = oracle.differentiable(call)
    _, full = oracle.run(op.function, call, everywhere)
    for wanted in oracle.subsets(everywhere):
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(call.args)]
        op.function(*leaves).sum().backward()
        assert oracle.fused(op)
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == (i in wanted)
            assert leaf.grad is None or torch.equal(leaf.grad, full[everywhere.index(i)])
    assert op.function(*call.args).grad_fn is None
    with torch.no_grad():
        assert not op.function(*[x.detach().requires_grad_() for x in call.args]).requires_grad
    with torch.inference_mode():
        assert torch.equal(op.function(*[x.clone() for x in call.args]), op.function(*call.args))
        assert oracle.fused(op)


@ops
@interpreted
def test_a_second_backward_is_right(name: str) -> None:
    op, call = small(name)
    leaves = [x.detach().requires_grad_() for x in call.args]
    out = op.function(*leaves)
    _, once = oracle.run(op.function, call, oracle.differentiable(call), torch.ones_like(out))
    for factor in (1.0, 2.0, -0.5):
        for _ in range(2):
            found = torch.autograd.grad(out, leaves, torch.ones_like(out) * factor, True)
            for a, b in zip(found, once, strict=True):
                assert torch.equal(a, b * factor)  # powers of two


@ops
@interpreted
def test_writing_to_an_input_before_backward_is_noticed(name: str) -> None:
    op, call = small(name)
    leaves = [x.detach().requires_grad_() for x in call.args]
    inner = [x * 1 for x in leaves]
    out = op.function(*inner)
    inner[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@ops
@interpreted
def test_autocast_casts_no_more_than_in_eager(name: str) -> None:
    op, call = small(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = oracle.run(op.function, call, oracle.differentiable(call))
        assert oracle.fused(op)
        eager = oracle.run(op.reference, call, oracle.differentiable(call))
    truth = oracle.run(op.reference, oracle.wide(call), oracle.differentiable(call))
    oracle.compare(found, truth, eager)


@ops
@interpreted
def test_saved_tensors_go_through_hooks(name: str) -> None:
    op, call = small(name)
    _, plain = oracle.run(op.function, call, oracle.differentiable(call))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        _, hooked = oracle.run(op.function, call, oracle.differentiable(call))
    assert oracle.all_same(hooked, plain)
    leaves = [x.detach().requires_grad_() for x in call.args]
    torch.utils.checkpoint.checkpoint(op.function, *leaves, use_reentrant=False).sum().backward()
    assert oracle.all_same([x.grad for x in leaves], plain)


# ---- functorch


@ops
@dtypes
@interpreted
def test_vmap_of_grad_against_a_loop(name: str, dtype: torch.dtype) -> None:
    op = kernels.find(name)
    ran = 0
    for seed in SEEDS:
        call = oracle.drawn(op, seed, "cpu", dtype)
        for positions in oracle.subsets(oracle.differentiable(call)):
            ran += oracle.assert_rows(op, call, positions, seed)
    assert ran > len(SEEDS) // 2


def total(op: Any) -> Any:
    """A scalar whose second derivatives do not vanish."""
    return lambda *args: op(*args).sin().sum()


TRANSFORMS = {
    "grad": lambda f, n: grad(total(f), n),
    "grad_of_vmap": lambda f, n: grad(lambda *a: vmap(total(f))(*a).sum(), n),
    "vmap_of_vmap_of_grad": lambda f, n: vmap(vmap(grad(total(f), n))),
    "vmap_in_chunks": lambda f, n: vmap(grad(total(f), n), chunk_size=1),
    "vmap_to_the_last": lambda f, n: vmap(grad(total(f), n), out_dims=-1),
    "vmap_of_one": lambda f, n: (
        lambda *a: vmap(grad(total(f), n), (0, *(None,) * (len(a) - 1)))(
            a[0], *(x[0] for x in a[1:])
        )
    ),
    "jacrev": lambda f, n: jacrev(f, n),
    "vmap_of_jacrev": lambda f, n: vmap(jacrev(f, n)),
    "vjp": lambda f, n: lambda *a: vjp(f, *a)[1](f(*a)),
    "grad_of_grad": lambda f, n: grad(
        lambda *a: sum(g.cos().sum() for g in grad(total(f), n)(*a)), n
    ),
    "grad_of_vmap_of_grad": lambda f, n: grad(
        lambda *a: sum(g.cos().sum() for g in vmap(grad(total(f), n))(*a)), n
    ),
    "jacrev_of_jacrev": lambda f, n: jacrev(jacrev(total(f), n), n),
    "vmap_of_hessian": lambda f, n: vmap(hessian(total(f), n)),
    "jacfwd": lambda f, n: jacfwd(f, n),
    "jvp": lambda f, n: lambda *a: jvp(f, a, tuple(x.cos() for x in a)),
    "jvp_of_vjp": lambda f, n: lambda *a: jvp(vjp(f, *a)[1], (f(*a),), (f(*a).cos(),)),
}
FORWARD_MODE = {"vmap_of_hessian", "jacfwd", "jvp"}


@ops
@pytest.mark.parametrize("transform", TRANSFORMS)
@interpreted
def test_transforms_against_those_of_plain_pytorch_in_fp64(name: str, transform: str) -> None:
    op, call = small(name)
    seeds = itertools.count(1)
    while call.args[0].dim() < 2 or call.args[0].shape[0] < 2:
        op, call = small(name, skip=next(seeds))
    call = Call(tuple(x.contiguous() for x in call.args))  # jvp itself refuses expanded tensors
    positions = tuple(oracle.differentiable(call))
    if transform.startswith("vmap_of_vmap"):
        call = oracle.mapped(call, positions, [0] * len(positions), 2)
    with oracle.counted() as launches:
        found = TRANSFORMS[transform](op.function, positions)(*call.args)
    assert bool(launches()) == (transform not in FORWARD_MODE)
    expected = TRANSFORMS[transform](op.reference, positions)(*oracle.wide(call).args)
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    floor = 1e-3 * max(b.abs().max().item() for _, b in pairs)
    for a, b in pairs:
        oracle.assert_close(a, b, a, floor, transform)


@ops
@interpreted
def test_launches_do_not_grow_with_the_examples(name: str) -> None:
    op, call = small(name)
    positions = tuple(oracle.differentiable(call))
    found = []
    for size in (1, 2, 5):
        batch = oracle.mapped(call, positions, [0] * len(positions), size)
        with oracle.counted() as launches:
            vmap(grad(total(op.function), positions))(*batch.args)
        found.append(launches())
    assert found[0] == found[1] == found[2] > 0


# ---- where no kernel may run


@ops
@interpreted
def test_who_records_operators_misses_none(name: str) -> None:
    op, call = small(name)
    positions = tuple(oracle.differentiable(call))
    gradients = grad(total(op.function), positions)
    traced = make_fx(gradients)(*call.args)
    other = [x * -0.5 for x in call.args]
    for a, b in zip(traced(*other), gradients(*other), strict=True):
        torch.testing.assert_close(a, b)
    fake = make_fx(gradients, tracing_mode="fake")(*call.args)
    for a, b in zip(fake(*other), gradients(*other), strict=True):
        torch.testing.assert_close(a, b)


@ops
@interpreted
def test_compiled_without_a_graph_break(name: str) -> None:
    op, call = small(name)
    positions = tuple(oracle.differentiable(call))
    for function in (op.function, vmap(grad(total(op.function), positions))):
        with warnings.catch_warnings():  # torch 2.11 uses what it deprecates at first
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()
        with oracle.counted() as launches:
            found = torch.compile(function, backend="eager", fullgraph=True)(*call.args)
        assert launches() == 0
        expected = function(*call.args)
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            torch.testing.assert_close(a, b)


class Tagged(Tensor):
    """A subclass whose results are of the subclass."""


@ops
@interpreted
def test_what_kernels_cannot_read_is_left_to_the_reference(name: str) -> None:
    op, call = small(name)
    expected = op.reference(*call.args)
    meta = op.function(*[x.to("meta") for x in call.args])
    assert not oracle.fused(op)
    assert meta.is_meta
    assert meta.shape == expected.shape
    tagged = op.function(*[x.as_subclass(Tagged) for x in call.args])
    assert not oracle.fused(op)
    assert type(tagged) is Tagged
    if len(call.args) > 1:
        with pytest.raises(RuntimeError, match="device"):
            op.function(call.args[0], *[x.to("meta") for x in call.args[1:]])
    # torch keeps a minus sign beside the memory of such views.
    minus = [torch._neg_view(x) for x in call.args]
    leaves = [x.detach().requires_grad_() for x in minus]
    torch.testing.assert_close(op.function(*leaves), op.reference(*minus))
    assert not oracle.fused(op)
    found = torch.autograd.grad(op.function(*leaves).sum(), leaves)
    for a, b in zip(found, torch.autograd.grad(op.reference(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@ops
@interpreted
def test_inference_tensors_are_left_to_the_reference(name: str) -> None:
    """Autograd saves none, and the reference does not save every input for every gradient."""
    op, call = small(name)
    why = (False, "an input is an inference tensor")
    for made in range(len(call.args)):
        args = [x.detach().requires_grad_() for x in call.args]
        with torch.inference_mode():
            args[made] = call.args[made].clone()
            op.function(*args)
            assert oracle.fused(op)
        assert kernels.should_run(op, *args) == why
        leaves = [x for x in args if x.requires_grad]
        try:
            expected = op.reference(*args)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:40]):
                op.function(*args)
            continue
        found = op.function(*args)
        assert torch.equal(found, expected)
        if leaves:
            grads = [torch.autograd.grad(out.sum(), leaves) for out in (found, expected)]
            assert oracle.all_same(*grads)

    def asks(x: Tensor) -> Tensor:
        assert kernels.should_run(op, *args[:-1], x) == why
        return x

    vmap(asks)(args[-1].expand(2, *args[-1].shape))  # the last was made in inference mode


@ops
@interpreted
def test_jit_trace_records_the_reference(name: str) -> None:
    op, call = small(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has deprecated it
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # a width was looked at
        traced = torch.jit.trace(lambda *args: op.function(*args), call.args)
    other = [x * -0.5 for x in call.args]
    torch.testing.assert_close(traced(*other), op.reference(*other))


@ops
@interpreted
def test_the_backend_is_what_computed_the_last_pass(name: str) -> None:
    op, call = small(name)
    leaves = [x.detach().requires_grad_() for x in call.args]
    out = op.function(*leaves)
    assert oracle.fused(op)
    assert not kernels.should_run(op, *call.args, min_elements=10**9)[0]
    assert oracle.fused(op)  # to ask is not to run
    minus = torch._neg_view(torch.ones_like(out))
    torch.autograd.grad(out, leaves, minus, retain_graph=True)
    assert kernels.last_backend(op) == "reference"
    assert kernels.should_run(op, *call.args)[0]
    assert kernels.last_backend(op) == "reference"
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert kernels.last_backend(op) == "triton"


@ops
@interpreted
def test_other_dtypes_are_computed_by_the_reference(name: str) -> None:
    op, call = small(name)
    for dtype in (torch.float64, torch.int32, torch.complex64):
        args = [x.to(dtype) for x in call.args]
        try:
            expected = op.reference(*args)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                op.function(*args)
        else:
            torch.testing.assert_close(op.function(*args), expected)
            assert not oracle.fused(op)


@ops
def test_the_cpu_runs_the_reference(name: str) -> None:
    op = kernels.find(name)
    call = oracle.drawn(op, 1)
    if kernels.available("cpu")[0]:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted in this process too")
    assert torch.equal(op.function(*call.args), op.reference(*call.args))
    run, reason = kernels.should_run(name, *call.args)
    assert not run
    assert "TRITON_INTERPRET" in reason
    assert kernels.last_backend(name) == "reference"


# ---- the registry and the guard


def test_names_of_operators_are_functions_of_the_package() -> None:
    import importlib

    for op in kernels.ops():
        assert getattr(kernels, op.name) is op.function
        assert op.name in dir(kernels)
        assert op.benchmarks
    importlib.import_module(f"opake.kernels.{OPS[0]}")
    assert getattr(kernels, OPS[0]) is kernels.find(OPS[0]).function
    with pytest.raises(AttributeError, match="no operator 'no_such'"):
        kernels.no_such  # noqa: B018
    for ask in (kernels.last_backend, kernels.should_run):
        with pytest.raises(InvalidArgument, match=OPS[0]):
            ask("no_such")


def test_an_operator_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    from opake.kernels import _op

    monkeypatch.setattr(_op, "_registry", dict(_op._registry))

    def double(x: Tensor) -> Tensor:
        return op(x)

    op = kernels.Op("double", double, lambda x: x + x, lambda x: 2 * x, lambda draw: Call(()))
    kernels.register(op)
    assert kernels.double(torch.ones(2)).tolist() == [2, 2]
    assert kernels.last_backend("double") == "reference"
    for name in ("double", "_private", "no name"):
        with pytest.raises(InvalidArgument, match=name):
            kernels.register(kernels.Op(name, double, double, double, lambda draw: Call(())))


@ops
@interpreted
def test_the_guard_counts_all_mapped_examples(name: str) -> None:
    op, call = small(name)
    positions = tuple(oracle.differentiable(call))
    most = max(x.numel() for x in call.args)
    with kernels.config(min_elements=2 * most):
        assert kernels.should_run(op, *call.args) == (
            False,
            f"fewer than {2 * most} elements: fusion does not pay",
        )
        assert kernels.should_run(op, *call.args, min_elements=most)[0]
        with kernels.config(min_elements=0):
            assert kernels.should_run(op, *call.args)[0]
        assert not kernels.should_run(op, *call.args)[0]
        batch = oracle.mapped(call, positions, [0] * len(positions), 2)
        vmap(op.function)(*batch.args)
        assert oracle.fused(op)
    assert kernels.should_run(op, *call.args)[0]
    with pytest.raises(InvalidArgument, match="min_elements"), kernels.config(min_elements=-1):
        pass


def test_blocks_of_two_threads_end_in_any_order() -> None:
    from opake.kernels import _guard

    first, second = kernels.config(min_elements=1), kernels.config(min_elements=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _guard._layers == [[2]]
    second.__exit__(None, None, None)
    assert _guard._layers == []
