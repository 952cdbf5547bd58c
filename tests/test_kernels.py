"""Every registered operator: its kernels against fp64, and under autograd.

Kernels are interpreted, in another process, so that a machine without a GPU tests them.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from pathlib import Path
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
import torch.utils.checkpoint
from interpreter import interpreted
from torch import Tensor

from opake import kernels
from opake.kernels import Call, _op
from opake.kernels._elementwise import block, elementwise
from opake.kernels._triton import Launch, Tile, jit, tl

OPS = [op.name for op in kernels.ops()]
ops = pytest.mark.parametrize("name", OPS)
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
SEEDS = range(8)


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
    op, call = oracle.small(name)
    positions = oracle.differentiable(call)

    def function(*values: Tensor) -> Any:
        here = oracle.replaced(call, dict(zip(positions, values, strict=True)))
        return op.function(*here.args, **here.kwargs)

    leaves = [oracle.tensors(call)[i].double().requires_grad_() for i in positions]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
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


SPECIAL = (torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 90.0, -90.0)


@ops
@interpreted
def test_infinities_and_nan_as_in_eager(name: str) -> None:
    """Or as in fp64: torch's vectorized fp32 GELU makes NaN of infinity, unlike its scalar one."""
    op, call = oracle.small(name)
    special = torch.tensor(SPECIAL)
    positions = oracle.differentiable(call)
    for k in range(len(special)):
        values = {}
        for n, i in enumerate(positions):
            x = oracle.tensors(call)[i]
            numbers = special.roll(k * (n + 1)).repeat(x.numel() // len(special) + 1)
            values[i] = numbers[: x.numel()].view(x.shape)
        here = oracle.replaced(call, values)
        found = oracle.run(op.function, here, positions)
        assert oracle.fused(op)
        eager = oracle.run(op.reference, here, positions)
        truth = oracle.run(op.reference, oracle.wide(here), positions)
        for a, b, c in zip(*map(oracle.leaves, (found, eager, truth)), strict=True):
            right = torch.where(a.isnan() == b.isnan(), b, c.to(b.dtype))
            torch.testing.assert_close(a, right, equal_nan=True)


# ---- autograd


@ops
@interpreted
def test_gradients_exactly_where_asked(name: str) -> None:
    op, call = oracle.small(name)
    everywhere = oracle.differentiable(call)
    _, full = oracle.run(op.function, call, everywhere)
    inputs = oracle.tensors(call)
    for wanted in oracle.some_subsets(everywhere):
        leaves = {i: inputs[i].detach().requires_grad_(i in wanted) for i in everywhere}
        total(op.function, oracle.replaced(call, leaves)).backward()
        assert oracle.fused(op)
        for k, (i, leaf) in enumerate(leaves.items()):
            assert (leaf.grad is not None) == (i in wanted)
            assert leaf.grad is None or torch.equal(leaf.grad, full[k])
    plain = oracle.outputs(op.function(*call.args, **call.kwargs))
    assert all(x.grad_fn is None for x in plain)
    here = oracle.replaced(call, {i: x.requires_grad_() for i, x in leaves.items()})
    with torch.no_grad():
        outs = oracle.outputs(op.function(*here.args, **here.kwargs))
        assert not any(x.requires_grad for x in outs)
    with torch.inference_mode():
        copies = oracle.replaced(call, {k: x.clone() for k, x in oracle.tensors(call).items()})
        inside = oracle.outputs(op.function(*copies.args, **copies.kwargs))
        assert oracle.fused(op)
    # Copies as well, since BLAS adds up in an order that depends on how numbers lie.
    copies = oracle.replaced(call, {k: x.clone() for k, x in oracle.tensors(call).items()})
    plain = oracle.outputs(op.function(*copies.args, **copies.kwargs))
    assert oracle.all_same(inside, plain)


def total(function: Any, call: Call) -> Tensor:
    """The sum of all outputs."""
    return sum(x.sum() for x in oracle.outputs(function(*call.args, **call.kwargs)))


@ops
@interpreted
def test_gradients_whichever_output_is_used(name: str) -> None:
    op, call = oracle.small(name)
    wanted = oracle.differentiable(call)
    shapes = oracle.outputs(op.reference(*call.args, **call.kwargs))
    for used in oracle.subsets(range(len(shapes))):
        given = [torch.randn_like(x) if i in used else None for i, x in enumerate(shapes)]
        exact = [None if x is None else x.double() for x in given]
        found = oracle.run(op.function, call, wanted, given)
        assert oracle.fused(op)
        truth = oracle.run(op.reference, oracle.wide(call), wanted, exact)
        oracle.compare(found, truth, oracle.run(op.reference, call, wanted, given))


@ops
@interpreted
def test_a_second_backward_is_right(name: str) -> None:
    op, call = oracle.small(name)
    positions = oracle.differentiable(call)
    leaves = {i: oracle.tensors(call)[i].detach().requires_grad_() for i in positions}
    here = oracle.replaced(call, leaves)
    outs = oracle.outputs(op.function(*here.args, **here.kwargs))
    _, once = oracle.run(op.function, call, positions)
    for factor in (1.0, 2.0, -0.5):
        for _ in range(2):
            grads = [torch.full_like(x, factor) for x in outs]
            found = torch.autograd.grad(outs, list(leaves.values()), grads, retain_graph=True)
            for a, b in zip(found, once, strict=True):
                assert torch.equal(a, b * factor)  # powers of two


@ops
@interpreted
def test_writing_to_an_input_before_backward_is_noticed_or_harmless(name: str) -> None:
    op, call = oracle.small(name)
    wanted = oracle.differentiable(call)
    plain = oracle.run(op.function, call, wanted).grads
    messages = []
    for key in oracle.tensors(call):
        held = {k: x.detach().clone() for k, x in oracle.tensors(call).items()}
        leaves = [held[i].requires_grad_() for i in wanted]
        inner = {k: x * 1 for k, x in held.items()}
        out = total(op.function, oracle.replaced(call, inner))
        assert oracle.fused(op)
        inner[key].mul_(2)
        try:
            found = torch.autograd.grad(out, leaves)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            assert oracle.all_same(found, plain)
    assert messages
    assert all("modified by an inplace operation" in message for message in messages)


@ops
@interpreted
def test_autocast_casts_no_more_than_in_eager(name: str) -> None:
    op, call = oracle.small(name)
    wanted = oracle.differentiable(call)
    with torch.autocast("cpu", torch.bfloat16):
        found = oracle.run(op.function, call, wanted)
        assert oracle.fused(op)

    def both(call: Call) -> tuple[oracle.Result, oracle.Result]:
        with torch.autocast("cpu", torch.bfloat16):
            eager = oracle.run(op.reference, call, wanted)
        return oracle.run(op.reference, oracle.wide(call), wanted), eager

    def shaken(k: int) -> tuple[oracle.Result, oracle.Result]:
        """Of inputs that bf16 hardly tells from the call's."""
        generator = torch.Generator().manual_seed(k)
        moved = {}
        for key, x in oracle.tensors(call).items():
            signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
            moved[key] = x * (1 + 2**-8 * signs) if x.is_floating_point() else x
        return both(oracle.replaced(call, moved))

    oracle.judge(found, *both(call), shaken)


@ops
@interpreted
def test_saved_tensors_go_through_hooks(name: str) -> None:
    op, call = oracle.small(name)
    wanted = oracle.differentiable(call)
    plain = oracle.run(op.function, call, wanted).grads
    packed = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal packed
        packed += 1
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.clone()):
        hooked = oracle.run(op.function, call, wanted).grads
    assert packed
    assert oracle.all_same(hooked, plain)
    function, values, argnums = oracle.bound(op.function, call)
    leaves = [x.detach() for x in values]
    for i in argnums:
        leaves[i].requires_grad_()
    outs = torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False)
    sum(x.sum() for x in oracle.outputs(outs)).backward()
    assert oracle.all_same([leaves[i].grad for i in argnums], plain)


@ops
@interpreted
def test_anomalies_are_found_where_they_are(name: str) -> None:
    """Anomaly mode looks for NaN among gradients that are None too."""
    op, call = oracle.small(name)
    for wanted in itertools.islice(oracle.subsets(oracle.differentiable(call)), 3):
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
            found = oracle.run(op.function, call, wanted)
        assert oracle.all_same(found.grads, oracle.run(op.function, call, wanted).grads)


@interpreted
def test_the_operator_in_contributing() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = text[text.index('"""Squared ReLU') :].split("```")[0]
    file = Path(tempfile.mkdtemp()) / "relu2.py"  # Triton reads the source of kernels from files
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("relu2", file)
    module = importlib.util.module_from_spec(spec)
    stock = dict(_op._registry)
    try:
        spec.loader.exec_module(module)
        for seed in range(8):
            for dtype in FLOATS.values():
                call = oracle.drawn(module.RELU2, seed, "cpu", dtype)
                oracle.assert_right(module.RELU2, call, seed)
                oracle.assert_rows(module.RELU2, call, (0,), seed)
    finally:
        _op._registry.clear()
        _op._registry.update(stock)
