"""One example under one transform of torch.func, against a loop over its rows in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from opake.errors import InvalidArgument
from opake.kernels import Call
from opake.testing import _parity as parity
from opake.testing._parity import Cotangents, Function, Key, Result

__all__ = ["TRANSFORMS", "Dims", "Example", "assert_parity", "check", "drawn"]

TRANSFORMS = ("none", "vmap", "vmap(grad)", "grad(vmap)", "jacrev")
"""What is checked: autograd alone, then what is mapped before or after it is differentiated."""

Dims = Sequence[int | None]

_ROWS = 16
"""Most rows of a Jacobian, each of which is computed by itself."""


class Example(NamedTuple):
    """Arguments, mapped dimensions included, and what to do with them.

    Attributes:
        call: the arguments.
        transform: one of :data:`TRANSFORMS`.
        in_dims: for each vmap, the outermost first, which dimension of which arguments it maps.
        chunk_size: of the outermost vmap.
        seed: of the incoming gradients.
    """

    call: Call
    transform: str = "none"
    in_dims: tuple[dict[Key, int], ...] = ()
    chunk_size: int | None = None
    seed: int = 0


def drawn(
    integer: Callable[[int, int], int],
    call: Call,
    transforms: Sequence[str] = TRANSFORMS,
    choices: Sequence[Dims] | None = None,
) -> Example:
    """Draw a transform of ``call`` and what it maps, from ``integer(low, high)``.

    ``choices`` are the ``in_dims`` to choose from, all there are if None.
    """
    transform = transforms[integer(0, len(transforms) - 1)]
    seed = integer(0, 1 << 16)
    found = parity.tensors(call)
    if transform == "jacrev" and sum(x.numel() for x in found.values()) > 4 * _ROWS:
        transform = "none"
    if "vmap" not in transform or not found:
        return Example(call, transform if found else "none", seed=seed)
    nested = integer(0, 3) == 3
    in_dims: list[dict[Key, int]] = []
    for _ in range(2 if nested else 1):
        level = _level(integer, call, choices)
        call = parity.mapped(call, list(level), list(level.values()), integer(1, 4 - nested))
        if integer(0, 1):
            call = parity.replaced(call, {k: _spread(parity.tensors(call)[k]) for k in level})
        in_dims.insert(0, level)
    return Example(call, transform, tuple(in_dims), integer(0, 3) or None, seed)


def _level(
    integer: Callable[[int, int], int], call: Call, choices: Sequence[Dims] | None
) -> dict[Key, int]:
    found = parity.tensors(call)
    if choices is not None:
        dims = choices[integer(0, len(choices) - 1)]
        # From the end, a dimension is one of the mapped tensor.
        given = {i: d for i, d in enumerate(dims) if d is not None}
        return {i: d if d >= 0 else d + found[i].dim() + 1 for i, d in given.items()}
    keys = [key for key in found if integer(0, 1)] or [next(iter(found))]
    return {key: integer(0, found[key].dim()) for key in keys}


def _spread(x: Tensor) -> Tensor:
    """The same numbers with gaps between the outermost ones, as a slice of something has."""
    return torch.stack([x, x], 1)[:, 0] if x.dim() else x


def assert_parity(
    fn: Function,
    reference: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    transform: str = "none",
    in_dims: Sequence[Mapping[Key, int]] = (),
    chunk_size: int | None = None,
    seed: int = 0,
    tolerance: float = parity.FP32_BAR,
) -> None:
    """Assert of one example what :func:`opake.testing.assert_vmap_parity` asserts of many.

    Args:
        fn: the function to judge.
        reference: the same in plain, differentiable PyTorch, of one example.
        args: the positional arguments, mapped dimensions included; tensors may be in tuples.
        kwargs: the keyword arguments, likewise.
        transform: one of :data:`TRANSFORMS`.
        in_dims: for each ``vmap``, the outermost first, the dimension that it maps of each argument
            that it maps, by its position, its keyword, or its way in tuples. Those of an inner one
            are counted without those of the outer ones.
        chunk_size: of the outermost ``vmap``.
        seed: of the incoming gradients: their numbers, their layout, and which outputs have one.
        tolerance: largest error in fp32 and fp64, relative to the largest number.

    Raises:
        AssertionError: they differ.
        InvalidArgument: the transform is unknown, or lacks what it maps.
    """
    if transform not in TRANSFORMS or bool(in_dims) != ("vmap" in transform):
        raise InvalidArgument(
            f"transform is one of {TRANSFORMS}, with in_dims where it maps; "
            f"got {transform!r} and {in_dims!r}"
        )
    call = Call(tuple(args), dict(kwargs or {}))
    example = Example(call, transform, tuple(map(dict, in_dims)), chunk_size, seed)
    check(fn, reference, example, bar=tolerance)


def check(
    function: Function,
    reference: Function,
    example: Example,
    *,
    bar: float = parity.FP32_BAR,
    ran: Callable[[], bool] | None = None,
) -> bool:
    """Assert that ``function`` does with an example what ``reference`` does one row at a time.

    ``ran`` tells whether ``function`` did by kernel what it was last asked for. Where it did not,
    the numbers are functorch's own, which rounds between the operators of the reference, and
    nothing is asserted of them. Returns whether anything was.
    """
    call, transform, in_dims, _, seed = example
    row = call
    for level in in_dims:
        row = _select(row, level, 0)
    given = parity.cotangents(parity.as_tuple(reference(*row.args, **row.kwargs)), seed)
    if transform == "none":
        parity.assert_right(function, reference, call, seed, bar)
        _assert_second_backward(function, call, given)
        return ran is None or ran()
    if seed % 3 == 2:
        given = parity.some_of(given, seed)
    if transform == "jacrev":
        return _check_jacobian(function, reference, call, bar, ran)
    held = [*parity.tensors(call).values(), *(x for x in given if x is not None)]
    before, versions = [x.clone() for x in held], [x._version for x in held]
    found = _transformed(function, example, given)
    if ran is not None and not ran():
        return False
    assert parity.all_same(held, before), "an input or an incoming gradient was overwritten"
    assert [x._version for x in held] == versions, "an input was written to"
    _judge_loop(reference, example, given, found, bar)
    return True


def _judge_loop(
    reference: Function, example: Example, given: Cotangents, found: Result, bar: float
) -> None:
    call, transform, in_dims, _, _ = example
    wanted = [] if transform == "vmap" else parity.differentiable(call)

    def both(call: Call, given: Cotangents) -> tuple[Result, Result]:
        exact = [None if x is None else x.double() for x in given]
        truth = _loop(reference, parity.wide(call), in_dims, wanted, exact)
        return truth, _loop(reference, call, in_dims, wanted, given)

    if transform != "grad(vmap)":
        parity.judge(found, *both(call, given), lambda k: both(*parity.shake(call, given, k)), bar)
        return

    def summed(call: Call, given: Cotangents) -> tuple[Result, Result]:
        truth, eager = (_summed(rows, in_dims, wanted) for rows in both(call, given))
        return truth, eager

    # Each example's gradient is rounded before what they share has their sum.
    truth, eager = both(call, given)
    units = [max(bar, torch.finfo(g.dtype).eps) for g in eager.grads]
    largest = [_sum_of_largest(g, len(in_dims)) for g in truth.grads]
    shared = [any(i not in level for level in in_dims) for i in wanted]
    slack = [u * x * s for u, x, s in zip(units, largest, shared, strict=True)]
    truth, eager = (_summed(rows, in_dims, wanted) for rows in (truth, eager))
    # One that fp16 cannot hold leaves no sum, not even a small one; nor does it in eager.
    grads = zip(truth.grads, eager.grads, found.grads, strict=True)
    truth = Result(truth.outputs, tuple(_unless_both_overflow(*each) for each in grads))
    parity.judge(
        found,
        truth,
        eager,
        lambda k: summed(*parity.shake(call, given, k)),
        bar,
        ((), slack),
    )


def _unless_both_overflow(truth: Tensor, eager: Tensor, found: Tensor) -> Tensor:
    if truth.shape != found.shape:  # which is for the comparison to say
        return truth
    return truth.where(eager.isfinite() | found.isfinite(), found.to(truth.dtype))


# ---- vmap


def _transformed(function: Function, example: Example, given: Cotangents) -> Result:
    call, transform, in_dims, chunk_size, seed = example
    keys = list({key: None for level in in_dims for key in level})
    wanted = [] if transform == "vmap" else parity.differentiable(call)
    gradients = (parity.by_grad, parity.by_vjp, parity.run)[
        seed % (3 if "(vmap" in transform else 2)
    ]

    def nest(one: Callable[..., Any]) -> Callable[..., Any]:
        for depth, level in reversed(list(enumerate(in_dims))):
            dims = tuple(level.get(key) for key in keys)
            one = vmap(one, dims, chunk_size=None if depth else chunk_size)
        return one

    def values(call: Call) -> list[Tensor]:
        found = parity.tensors(call)
        return [found[key] for key in keys]

    def batched(*args: Any, **kwargs: Any) -> Any:
        here = Call(args, kwargs)

        def one(*rows: Tensor) -> Any:
            row = parity.replaced(here, dict(zip(keys, rows, strict=True)))
            return function(*row.args, **row.kwargs)

        return nest(one)(*values(here))

    def differentiated(*rows: Tensor) -> Any:
        row = parity.replaced(call, dict(zip(keys, rows, strict=True)))
        return tuple(gradients(function, row, wanted, given))

    if transform != "grad(vmap)":
        return Result(*nest(differentiated)(*values(call)))
    sizes, row = [], call
    for level in in_dims:
        sizes.append(_size(row, level))
        row = _select(row, level, 0)
    every = [None if c is None else c.expand(*sizes, *c.shape) for c in given]
    return Result(*gradients(batched, call, wanted, every))


def _loop(
    reference: Function,
    call: Call,
    in_dims: Sequence[dict[Key, int]],
    wanted: Sequence[Key],
    given: Cotangents,
) -> Result:
    """The rows of each vmap, stacked in front."""
    if not in_dims:
        return parity.run(reference, call, wanted, given)
    level, *inner = in_dims
    rows = [
        _loop(reference, _select(call, level, k), inner, wanted, given)
        for k in range(_size(call, level))
    ]
    return Result(*(tuple(map(torch.stack, zip(*x, strict=True))) for x in zip(*rows, strict=True)))


def _summed(rows: Result, in_dims: Sequence[dict[Key, int]], wanted: Sequence[Key]) -> Result:
    """Add up the gradients of what examples share, put the others where ``vmap`` maps them."""
    grads = []
    for i, g in zip(wanted, rows.grads, strict=True):
        for depth, level in reversed(list(enumerate(in_dims))):
            g = g.movedim(depth, depth + level[i]) if i in level else g.sum(depth)
        grads.append(g)
    return Result(rows.outputs, tuple(grads))


def _sum_of_largest(rows: Tensor, depth: int) -> float:
    """Every example's largest number, added up."""
    if not rows.numel():
        return 0.0
    each = rows.where(rows.isfinite(), 0).abs().reshape(rows.shape[:depth].numel(), -1)
    return each.amax(1).sum().item()


def _select(call: Call, level: dict[Key, int], k: int) -> Call:
    found = parity.tensors(call)
    return parity.replaced(call, {key: found[key].select(dim, k) for key, dim in level.items()})


def _size(call: Call, level: dict[Key, int]) -> int:
    found = parity.tensors(call)
    return next(found[key].shape[dim] for key, dim in level.items())


# ---- autograd and Jacobians


def _assert_second_backward(function: Function, call: Call, given: Cotangents) -> None:
    """Assert that a graph can be gone through again, and that nothing is left of the first time."""
    found = parity.tensors(call)
    values: dict[Key, Any] = {i: found[i].detach() for i in parity.differentiable(call)}
    leaves = [x.requires_grad_() for x in values.values()]
    call = parity.replaced(call, values)
    outputs = parity.as_tuple(function(*call.args, **call.kwargs))
    other = [None if c is None else c.flip([*range(c.dim())]) * -0.5 for c in given]

    def backward(cotangents: Cotangents) -> list[Tensor]:
        pairs = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if c is not None]
        pairs = [(x, c) for x, c in pairs if x.requires_grad]
        if not pairs or not leaves:
            return []
        of, by = zip(*pairs, strict=True)
        found = torch.autograd.grad(of, leaves, by, True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    first, second, third = backward(given), backward(other), backward(given)
    assert parity.all_same(first, third), "a second backward changes what the next one finds"
    if second:
        fresh = parity.run(function, call, parity.differentiable(call), other).grads
        assert parity.all_same(second, fresh), "a second backward finds other gradients"


def _check_jacobian(
    function: Function,
    reference: Function,
    call: Call,
    bar: float,
    ran: Callable[[], bool] | None,
) -> bool:
    wanted = parity.differentiable(call)
    outputs = parity.as_tuple(reference(*call.args, **call.kwargs))
    rows = sum(x.numel() for x in outputs if x.is_floating_point())
    if not wanted or not 0 < rows <= _ROWS:
        return False

    def smooth(*values: Tensor) -> Any:
        here = parity.replaced(call, dict(zip(wanted, values, strict=True)))
        found = parity.as_tuple(function(*here.args, **here.kwargs))
        return tuple(x for x in found if x.is_floating_point())

    found = jacrev(smooth, tuple(range(len(wanted))))(*(parity.tensors(call)[i] for i in wanted))
    if ran is not None and not ran():
        return False

    def both(call: Call) -> tuple[Result, Result]:
        truth, eager = (_jacobian(reference, c, wanted, outputs) for c in (parity.wide(call), call))
        return truth, eager

    jacobians = Result((), tuple(x for of in found for x in of))
    parity.judge(jacobians, *both(call), lambda k: both(parity.shake(call, [], k)[0]), bar)
    return True


def _jacobian(
    reference: Function, call: Call, wanted: Sequence[Key], outputs: Sequence[Tensor]
) -> Result:
    found: list[Tensor] = []
    inputs = [parity.tensors(call)[i] for i in wanted]
    for place, out in enumerate(outputs):
        if not out.is_floating_point():
            continue
        rows = []
        for hot in torch.eye(out.numel(), dtype=out.dtype, device=out.device):
            given: list[Tensor | None] = [None] * len(outputs)
            given[place] = hot.view(out.shape)
            rows.append(parity.run(reference, call, wanted, given).grads)
        for place_in, x in enumerate(inputs):
            shape = (*out.shape, *x.shape)
            column = [row[place_in] for row in rows]
            found.append(torch.stack(column).view(shape) if rows else x.new_zeros(shape))
    return Result((), tuple(found))
