"""Every registered operator under every transform of torch.func, its kernels interpreted."""

from __future__ import annotations

from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from opake import kernels
from opake.kernels import Call

OPS = [op.name for op in kernels.ops()]
ops = pytest.mark.parametrize("name", OPS)
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
SEEDS = range(8)


@ops
@dtypes
@interpreted
def test_vmap_of_grad_against_a_loop(name: str, dtype: torch.dtype) -> None:
    """Any tensor may be mapped: weights and not inputs, labels and not logits."""
    op = kernels.find(name)
    ran = 0
    for seed in SEEDS:
        call = oracle.drawn(op, seed, "cpu", dtype)
        for keys in oracle.choices(call, seed):
            ran += oracle.assert_rows(op, call, keys, seed)
    assert ran > len(SEEDS) // 2


def total(function: Any) -> Any:
    """A scalar whose second derivatives do not vanish, different in every output."""

    def scalar(*values: Tensor) -> Tensor:
        outs = oracle.outputs(function(*values))
        return sum((k + 1) * x.sin().sum() for k, x in enumerate(outs))

    return scalar


def of_gradients(gradients: Any) -> Any:
    """A scalar of ``gradients``, to be differentiated again."""
    return lambda *a: sum(g.cos().sum() for g in gradients(*a))


def of_one(f: Any, n: Any) -> Any:
    """The first tensor mapped, the others shared."""

    def mapped(first: Tensor, *rest: Tensor) -> Any:
        dims = (0, *(None for _ in rest))
        return vmap(grad(total(f), n), dims)(first, *(x[0] for x in rest))

    return mapped


def of_all_but_one(f: Any, n: Any) -> Any:
    """The first tensor shared, the others mapped."""

    def mapped(first: Tensor, *rest: Tensor) -> Any:
        if not rest:
            return vmap(grad(total(f), n))(first)
        dims = (None, *(0 for _ in rest))
        return vmap(grad(total(f), n), dims)(first[0], *rest)

    return mapped


def crosswise(f: Any, n: Any) -> Any:
    """The first tensor mapped by the inner vmap alone, the others by the outer."""

    def mapped(first: Tensor, *rest: Tensor) -> Any:
        if not rest:
            return vmap(vmap(grad(total(f), n)))(first)
        inner = vmap(grad(total(f), n), (0, *(None for _ in rest)))
        dims = (None, *(0 for _ in rest))
        return vmap(inner, dims)(first[0], *(x[0] for x in rest))

    return mapped


TRANSFORMS = {
    "grad": lambda f, n: grad(total(f), n),
    "grad_of_vmap": lambda f, n: grad(lambda *a: vmap(total(f))(*a).sum(), n),
    "vmap_of_vmap_of_grad": lambda f, n: vmap(vmap(grad(total(f), n))),
    "vmap_in_chunks": lambda f, n: vmap(grad(total(f), n), chunk_size=1),
    "vmap_to_the_last": lambda f, n: vmap(grad(total(f), n), out_dims=-1),
    "vmap_of_one": lambda f, n: of_one(f, n),
    "vmap_of_all_but_one": lambda f, n: of_all_but_one(f, n),
    "vmap_of_vmap_crosswise": lambda f, n: crosswise(f, n),
    "jacrev": lambda f, n: jacrev(f, n),
    "vmap_of_jacrev": lambda f, n: vmap(jacrev(f, n)),
    "vjp": lambda f, n: lambda *a: vjp(f, *a)[1](f(*a)),
    "grad_of_grad": lambda f, n: grad(of_gradients(grad(total(f), n)), n),
    "grad_of_vmap_of_grad": lambda f, n: grad(of_gradients(vmap(grad(total(f), n))), n),
    "vmap_of_grad_of_grad": lambda f, n: vmap(grad(of_gradients(grad(total(f), n)), n)),
    "jacrev_of_jacrev": lambda f, n: jacrev(jacrev(total(f), n), n),
    "vmap_of_hessian": lambda f, n: vmap(hessian(total(f), n)),
    "jacfwd": lambda f, n: jacfwd(f, n),
    "jvp": lambda f, n: lambda *a: jvp(f, a, tuple(x.cos() for x in a)),
    "jvp_of_vjp": lambda f, n: lambda *a: jvp(vjp(f, *a)[1], (f(*a),), (cos(f(*a)),)),
}
FORWARD_MODE = {"vmap_of_hessian", "jacfwd", "jvp"}
"""Those that no kernel computes any part of."""


def cos(outs: Any) -> Any:
    """The cosines of one tensor or of several."""
    return outs.cos() if isinstance(outs, Tensor) else tuple(x.cos() for x in outs)


def examples_of(transform: str) -> int:
    """Over how many dimensions of examples a transform maps."""
    return 2 if transform.startswith("vmap_of_vmap") else int("vmap" in transform)


@ops
@pytest.mark.parametrize("transform", TRANSFORMS)
@interpreted
def test_transforms_against_those_of_plain_pytorch_in_fp64(name: str, transform: str) -> None:
    op, call = oracle.small(name)
    positions = oracle.differentiable(call)
    # jvp itself refuses expanded tensors.
    call = oracle.replaced(call, {i: oracle.tensors(call)[i].contiguous() for i in positions})
    batch = call
    for _ in range(examples_of(transform)):
        batch = oracle.mapped(batch, positions, [0] * len(positions), 2)

    def transformed(function: Any, batch: Call) -> Any:
        def of_floats(*values: Tensor) -> Any:
            here = oracle.replaced(call, dict(zip(positions, values, strict=True)))
            return function(*here.args, **here.kwargs)

        argnums = tuple(range(len(positions)))
        values = oracle.tensors(batch)
        return TRANSFORMS[transform](of_floats, argnums)(*(values[i] for i in positions))

    with oracle.counted() as launches:
        found = transformed(op.function, batch)
    assert bool(launches()) == (transform not in FORWARD_MODE)
    call, batch = oracle.wide(call), oracle.wide(batch)
    expected = transformed(op.reference, batch)
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    floor = 1e-3 * max(b.abs().max().item() for _, b in pairs)
    for a, b in pairs:
        oracle.assert_close(a, b, a, floor, transform)


def one_launch_for_all(op: Any, call: Call, keys: Any, *, nested: bool = False) -> list[int]:
    """Launches of ``vmap(grad)`` over these arguments, for several numbers of examples."""
    function, _, argnums = oracle.bound(op.function, call)
    found = []
    for size in (1, 2, 5):
        batch = oracle.mapped(call, keys, [0] * len(keys), size)
        dims = tuple(0 if key in keys else None for key in oracle.tensors(call))
        gradients = grad(total(function), argnums)
        if nested:
            batch = oracle.mapped(batch, keys, [0] * len(keys), 2)
            gradients = vmap(gradients, dims)
        with oracle.counted() as launches:
            vmap(gradients, dims)(*oracle.tensors(batch).values())
        assert oracle.fused(op)
        found.append(launches())
    return found


@ops
@interpreted
def test_launches_do_not_grow_with_the_examples(name: str) -> None:
    """And so a CUDA graph of one batch does for every other of its size."""
    op, call = oracle.small(name)
    call = oracle.in_one_chunk(op, call)
    smooth = set(oracle.differentiable(call))
    for keys in oracle.choices(call, 0):
        found = one_launch_for_all(op, call, keys)
        if smooth <= set(keys):
            found += one_launch_for_all(op, call, keys, nested=True)
        # The fewest rows may need a launch less; test_kernels_compiling.py counts those of many.
        assert 0 < max(found) <= min(found) + 1, keys


@ops
@interpreted
def test_outputs_alone_are_mapped(name: str) -> None:
    """Without gradients, over each tensor, and over dimensions in every place."""
    op, call = oracle.small(name)
    function, values, _ = oracle.bound(op.function, call)
    reference, _, _ = oracle.bound(op.reference, call)
    for i, key in enumerate(oracle.tensors(call)):
        for dim in range(values[i].dim() + 1):
            batch = oracle.mapped(call, [key], [dim], 3)
            dims = tuple(dim if k == i else None for k in range(len(values)))
            given = tuple(oracle.tensors(batch).values())
            found = vmap(function, dims)(*given)
            assert oracle.fused(op)
            for k in range(3):
                row = [x.select(dim, k) if j == i else x for j, x in enumerate(given)]
                one = [x[k] for x in oracle.outputs(found)]
                oracle.assert_all_close(one, oracle.outputs(reference(*row)))
