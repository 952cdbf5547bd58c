"""What kernels are judged by: plain PyTorch in fp64, one example at a time. Names no operator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from opake import kernels
from opake.kernels import Call, Draw, Op

FP32_BAR = 1e-5
"""Largest error of an fp32 result: some eighty ulps of the tensor's largest number, which leaves
room for sums in another order and for the GPU's approximate exponential (2 ulps)."""

SCALES = (1.0, -0.5, 0.25, -2.0)
"""Powers of two: an example scaled by one is exact in every dtype."""


def drawn(op: Op, seed: int, device: str = "cpu", *dtypes: torch.dtype) -> Call:
    """The example of ``op`` that a seed stands for."""
    rng = random.Random(seed)
    return op.examples(Draw(rng.randint, device, dtypes or (torch.float32,)))


def replayed(op: Op, numbers: Sequence[int], *dtypes: torch.dtype) -> Call:
    """The example of ``op`` that was drawn with these numbers."""
    found = iter(numbers)
    return op.examples(Draw(lambda low, high: next(found), "cpu", dtypes))


def differentiable(call: Call) -> list[int]:
    """Positions of the arguments that have gradients."""
    return [i for i, x in enumerate(call.args) if isinstance(x, Tensor) and x.is_floating_point()]


def run(
    function: Callable[..., Any],
    call: Call,
    wanted: Sequence[int],
    cotangent: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients wrt the arguments at ``wanted``, by autograd."""
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in call.args]
    for i in wanted:
        leaves[i].requires_grad_()
    out = function(*leaves, **call.kwargs)
    if not wanted:
        return out, []
    if cotangent is None:
        cotangent = torch.ones_like(out)
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], cotangent.to(out.dtype))
    return out.detach(), list(found)


def wide(call: Call) -> Call:
    """The same call in fp64."""
    args = tuple(
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call.args
    )
    return Call(args, call.kwargs)


def cotangent_for(call: Call, op: Op, seed: int) -> Tensor:
    """A gradient of the output: contiguous, transposed, sliced, or expanded from one number."""
    out = op.reference(*call.args, **call.kwargs)
    shape = tuple(out.shape)
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(out.device, out.dtype)

    kind = seed % 4
    if kind == 1 and len(shape) > 1:
        return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
    if kind == 2 and shape:
        return normal(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == 3:
        return normal().expand(shape)
    return normal(*shape)


def assert_close(found: Tensor, truth: Tensor, eager: Tensor, floor: float, what: str = "") -> None:
    """Assert that ``found`` is as near to ``truth`` (fp64) as its dtype and eager demand."""
    assert found.shape == truth.shape, f"{what}: {tuple(found.shape)}, not {tuple(truth.shape)}"
    assert found.dtype == eager.dtype, f"{what}: {found.dtype}, not {eager.dtype}"
    rounded = truth.to(found.dtype)
    finite = rounded.isfinite()
    assert torch.equal(found.isfinite(), finite), f"{what}: NaN or infinite elsewhere"
    special = found.masked_fill(finite, 0), rounded.masked_fill(finite, 0)
    assert torch.equal(*(x.nan_to_num(nan=1.0) for x in special)), f"{what}: other infinities"
    keep = finite & eager.isfinite()
    exact = truth[keep]
    if not exact.numel():
        return
    ours, theirs = (x[keep].double() - exact for x in (found, eager))
    scale = max(exact.abs().max().item(), floor)
    worst = ours.abs().max().item()
    if found.dtype in (torch.float32, torch.float64) and worst <= FP32_BAR * scale:
        return
    # Half precision, or eager rounded to it on the way to fp32.
    eps = torch.finfo(found.dtype).eps * scale
    bound = 2 * theirs.abs().max().item() + eps
    assert worst <= bound, f"{what}: off by {worst:.2e}, allowed are {bound:.2e}"
    mine, eagers = (x.square().mean().sqrt().item() for x in (ours, theirs))
    # Both round the same truth; where an fp32 result lies on a tie, ours may round the other way.
    assert mine <= 1.05 * eagers + 2e-4 * eps, f"{what}: RMS {mine:.3e}, eager {eagers:.3e}"


def assert_right(op: Op, call: Call, seed: int = 0) -> bool:
    """Assert output and gradients, that nothing was written, and that a second run is the same.

    Returns whether the kernels ran.
    """
    wanted = differentiable(call)
    cotangent = cotangent_for(call, op, seed)
    before = [x.clone() for x in (*_tensors(call), cotangent)]
    versions = [x._version for x in (*_tensors(call), cotangent)]

    found = run(op.function, call, wanted, cotangent)
    truth = run(op.reference, wide(call), wanted, cotangent.double())
    eager = run(op.reference, call, wanted, cotangent)
    compare(found, truth, eager)

    again = run(op.function, call, wanted, cotangent)
    assert all_same(leaves(found), leaves(again)), "not deterministic"
    assert all_same((*_tensors(call), cotangent), before), "input overwritten"
    assert [x._version for x in (*_tensors(call), cotangent)] == versions, "input written"
    return fused(op)


def compare(found: Any, truth: Any, eager: Any) -> None:
    """Compare ``(output, gradients)`` of ours with fp64's and with eager's."""
    (out, grads), (true_out, true_grads), (eager_out, eager_grads) = found, truth, eager
    assert_close(out, true_out, eager_out, 0.0, "output")
    floor = 1e-3 * max((_largest(g) for g in true_grads), default=0.0)
    for i, (a, b, c) in enumerate(zip(grads, true_grads, eager_grads, strict=True)):
        assert_close(a, b, c, floor, f"gradient {i}")


def leaves(result: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    """Output and gradients in one list."""
    return [result[0], *result[1]]


def all_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether two lists of tensors hold the same numbers, NaN equal to NaN."""
    return all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(found, expected, strict=True)
    )


def _largest(x: Tensor) -> float:
    x = x[x.isfinite()]
    return x.abs().max().item() if x.numel() else 0.0


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]


# ---- examples side by side


def mapped(call: Call, positions: Sequence[int], dims: Sequence[int], size: int) -> Call:
    """Give the arguments at ``positions`` a dimension of ``size`` examples, at ``dims``."""
    args = list(call.args)
    for i, dim in zip(positions, dims, strict=True):
        args[i] = torch.stack([args[i] * SCALES[k % len(SCALES)] for k in range(size)], dim)
    return Call(tuple(args), call.kwargs)


def assert_rows(op: Op, call: Call, positions: Sequence[int], seed: int, size: int = 3) -> bool:
    """Assert ``vmap(grad)`` over the arguments at ``positions`` against a loop over examples.

    Returns whether the kernels ran. Where they did not, the numbers are those of functorch, which
    rounds its own way between the operators of the reference, and nothing is asserted.
    """
    rng = random.Random(seed)
    wanted = differentiable(call)
    dims = [rng.randint(0, call.args[i].dim()) for i in positions]
    batch = mapped(call, positions, dims, size)
    in_dims: list[int | None] = [None] * len(call.args)
    for i, dim in zip(positions, dims, strict=True):
        in_dims[i] = dim

    cotangent = cotangent_for(call, op, seed)

    def rows(function: Callable[..., Any]) -> tuple[Any, Any]:
        def total(*args: Any) -> Any:
            out = function(*args, **call.kwargs)
            return (out.float() * cotangent.float()).sum(), out

        gradients = grad(total, argnums=tuple(wanted), has_aux=True)
        return vmap(gradients, tuple(in_dims))(*batch.args)

    found, out = rows(op.function)
    if not fused(op):
        return False
    for k in range(size):
        row = list(batch.args)
        for i, dim in zip(positions, dims, strict=True):
            row[i] = row[i].select(dim, k)
        one = Call(tuple(row), call.kwargs)
        expected = (run(op.reference, x, wanted, cotangent) for x in (wide(one), one))
        compare((out[k], [g[k] for g in found]), *expected)
    return True


def subsets(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of at least one of ``positions``."""
    for n in range(1, len(positions) + 1):
        yield from itertools.combinations(positions, n)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count kernel launches; yields a function that returns their number."""
    from opake.kernels._triton import Launch

    count = 0
    stock = Launch.__call__

    def launch(self: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        stock(self, *args)

    Launch.__call__ = launch  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        Launch.__call__ = stock  # type: ignore[method-assign]


def fused(op: Op) -> bool:
    """Tell whether the last pass ran the kernels."""
    return kernels.last_backend(op) == "triton"
