"""Every registered operator where no kernel may run, and the registry and the guard."""

from __future__ import annotations

import re
import warnings
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from opake import kernels
from opake.errors import InvalidArgument
from opake.kernels import Call

OPS = [op.name for op in kernels.ops()]
ops = pytest.mark.parametrize("name", OPS)


def total(function: Any) -> Any:
    """A scalar whose second derivatives do not vanish."""
    return lambda *values: sum(x.sin().sum() for x in oracle.outputs(function(*values)))


def other(values: list[Tensor]) -> list[Tensor]:
    """Tensors of the same kinds with other numbers."""
    return [x * -0.5 if x.is_floating_point() else x.clone() for x in values]


def changed(call: Call, change: Any) -> Call:
    """The call with every tensor changed."""
    return oracle.replaced(call, {k: change(x) for k, x in oracle.tensors(call).items()})


def floats(change: Any) -> Any:
    """Change floating-point tensors alone."""
    return lambda x: change(x) if x.is_floating_point() else x


def apply(function: Any, call: Call) -> Any:
    return function(*call.args, **call.kwargs)


# ---- who must not miss an operator


@ops
@interpreted
def test_who_records_operators_misses_none(name: str) -> None:
    op, call = oracle.small(name)
    function, values, argnums = oracle.bound(op.function, call)
    gradients = grad(total(function), argnums)
    traced = make_fx(gradients)(*values)
    others = other(values)
    oracle.assert_all_close(traced(*others), gradients(*others))
    fake = make_fx(gradients, tracing_mode="fake")(*values)
    oracle.assert_all_close(fake(*others), gradients(*others))


@ops
@interpreted
def test_compiled_without_a_graph_break(name: str) -> None:
    op, call = oracle.small(name)
    function, values, argnums = oracle.bound(op.function, call)
    for f in (function, vmap(grad(total(function), argnums))):
        given = values if f is function else [torch.stack([x, x]) for x in values]
        with warnings.catch_warnings():  # torch 2.11 uses what it deprecates at first
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()
        with oracle.counted() as launches:
            found = torch.compile(f, backend="eager", fullgraph=True)(*given)
        assert launches() == 0
        oracle.assert_all_close(found, f(*given))


@ops
@interpreted
def test_jit_trace_records_the_reference(name: str) -> None:
    op, call = oracle.small(name)
    function, values, _ = oracle.bound(op.function, call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has deprecated it
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # a width was looked at
        traced = torch.jit.trace(function, tuple(values))
    others = other(values)
    reference, _, _ = oracle.bound(op.reference, call)
    oracle.assert_all_close(traced(*others), reference(*others))


# ---- what kernels cannot read


class Tagged(Tensor):
    """A subclass whose results are of the subclass."""


@ops
@interpreted
def test_what_kernels_cannot_read_is_left_to_the_reference(name: str) -> None:
    op, call = oracle.small(name)
    expected = oracle.outputs(apply(op.reference, call))
    meta = oracle.outputs(apply(op.function, changed(call, lambda x: x.to("meta"))))
    assert not oracle.fused(op)
    assert all(x.is_meta for x in meta)
    assert [(x.shape, x.dtype) for x in meta] == [(x.shape, x.dtype) for x in expected]
    tagged = changed(call, lambda x: x.as_subclass(Tagged))
    assert all(type(x) is Tagged for x in oracle.outputs(apply(op.function, tagged)))
    assert not oracle.fused(op)
    # torch keeps a minus sign beside the memory of such views.
    minus = changed(call, floats(torch._neg_view))
    wanted = oracle.differentiable(call)
    found = oracle.run(op.function, minus, wanted)
    assert not oracle.fused(op)
    oracle.assert_all_close(
        oracle.leaves(found), oracle.leaves(oracle.run(op.reference, minus, wanted))
    )


@ops
@interpreted
def test_inputs_on_several_devices_are_refused(name: str) -> None:
    op, call = oracle.small(name)
    tensors = oracle.tensors(call)
    for key, x in tensors.items():
        if x.dim() == 0 or len(tensors) == 1:
            continue
        here = oracle.replaced(call, {key: x.to("meta")})
        with pytest.raises(InvalidArgument, match="meta"), oracle.counted() as launches:
            apply(op.function, here)
        assert launches() == 0
        function, values, _ = oracle.bound(op.function, here)
        with pytest.raises(InvalidArgument, match="cpu"):
            vmap(function)(*(v.expand(2, *v.shape) for v in values))


@ops
@interpreted
def test_inference_tensors_are_left_to_the_reference(name: str) -> None:
    """Autograd saves none, and the reference does not save every input for every gradient."""
    op, call = oracle.small(name)
    why = (False, "an input is an inference tensor")
    smooth = oracle.differentiable(call)
    tensors = oracle.tensors(call)
    for made in tensors:
        leaves = {i: tensors[i].detach().requires_grad_() for i in smooth}
        with torch.inference_mode():
            inside = oracle.tensors(call)[made].clone()
            here = oracle.replaced(call, {**leaves, made: inside})
            apply(op.function, here)
            assert oracle.fused(op)
        assert kernels.should_run(op, *here.args, **here.kwargs) == why
        wanted = [x for i, x in leaves.items() if i != made]
        try:
            expected = oracle.outputs(apply(op.reference, here))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                apply(op.function, here)
            continue
        found = oracle.outputs(apply(op.function, here))
        assert oracle.all_same(found, expected)
        if wanted:
            grads = [torch.autograd.grad([x.sum() for x in o], wanted) for o in (found, expected)]
            assert oracle.all_same(*grads)

        def asks(x: Tensor, key: Any = made, call: Call = here) -> Tensor:
            mapped = oracle.replaced(call, {key: x})
            assert kernels.should_run(op, *mapped.args, **mapped.kwargs) == why
            return x

        vmap(asks)(inside.expand(2, *inside.shape))


@ops
@interpreted
def test_other_dtypes_are_computed_by_the_reference(name: str) -> None:
    op, call = oracle.small(name)
    for dtype in (torch.float64, torch.int32, torch.complex64):
        here = changed(call, floats(lambda x, dtype=dtype: x.to(dtype)))
        try:
            expected = apply(op.reference, here)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            with pytest.raises((type(error), TypeError, ValueError)):
                apply(op.function, here)
            continue
        try:
            found = apply(op.function, here)
        except (TypeError, ValueError):  # what it names as no input of its own
            assert dtype is not torch.float64
            continue
        oracle.assert_all_close(found, expected)
        assert not oracle.fused(op)


@ops
def test_the_cpu_runs_the_reference(name: str) -> None:
    op = kernels.find(name)
    call = oracle.drawn(op, 1)
    if kernels.available("cpu")[0]:
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted in this process too")
    found, expected = (oracle.outputs(apply(f, call)) for f in (op.function, op.reference))
    assert oracle.all_same(found, expected)
    run, reason = kernels.should_run(name, *call.args, **call.kwargs)
    assert not run
    assert "TRITON_INTERPRET" in reason
    assert kernels.last_backend(name) == "reference"


@ops
@interpreted
def test_the_backend_is_what_computed_the_last_pass(name: str) -> None:
    op, call = oracle.small(name)
    function, values, argnums = oracle.bound(op.function, call)
    values = [x.detach().requires_grad_(i in argnums) for i, x in enumerate(values)]
    leaves = [values[i] for i in argnums]
    outs = oracle.outputs(function(*values))
    assert oracle.fused(op)
    assert not kernels.should_run(op, *call.args, min_elements=10**9, **call.kwargs)[0]
    assert oracle.fused(op)  # to ask is not to run
    minus = [torch._neg_view(torch.ones_like(x)) for x in outs]
    torch.autograd.grad(outs, leaves, minus, retain_graph=True)
    assert kernels.last_backend(op) == "reference"
    assert kernels.should_run(op, *call.args, **call.kwargs)[0]
    assert kernels.last_backend(op) == "reference"
    torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])
    assert kernels.last_backend(op) == "triton"


# ---- the registry and the guard


def test_names_of_operators_are_functions_of_the_package() -> None:
    import importlib

    for op in kernels.ops():
        assert getattr(kernels, op.name) is op.function
        assert op.name in dir(kernels)
        assert op.benchmarks
        importlib.import_module(op.function.__module__)
        assert getattr(kernels, op.name) is kernels.find(op.name).function
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
    op, call = oracle.small(name)
    args, kwargs = call
    most = max(x.numel() for x in oracle.tensors(call).values())
    most = op.work(*args, **kwargs) if op.work else most
    with kernels.config(min_elements=2 * most):
        assert kernels.should_run(op, *args, **kwargs) == (
            False,
            f"fewer than {2 * most} elements: fusion does not pay",
        )
        assert kernels.should_run(op, *args, min_elements=most, **kwargs)[0]
        with kernels.config(min_elements=0):
            assert kernels.should_run(op, *args, **kwargs)[0]
        assert not kernels.should_run(op, *args, **kwargs)[0]
        function, values, _ = oracle.bound(op.function, call)
        vmap(function)(*(torch.stack([x, x]) for x in values))
        assert oracle.fused(op)
    assert kernels.should_run(op, *args, **kwargs)[0]
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
