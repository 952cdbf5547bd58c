"""What a fused function is judged by: plain PyTorch in fp64, one example at a time.

Knows torch alone, and no operator.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from opake.kernels import Call
from opake.testing._closeness import (
    DRAWS,
    FP32_BAR,
    Result,
    Slack,
    all_same,
    assert_close,
    compare,
    judge,
    leaves,
)

__all__ = [
    "FP32_BAR",
    "SCALES",
    "Key",
    "Result",
    "Slack",
    "all_same",
    "as_tuple",
    "assert_close",
    "assert_right",
    "assert_rows",
    "by_grad",
    "by_vjp",
    "compare",
    "cotangents",
    "differentiable",
    "judge",
    "leaves",
    "mapped",
    "replaced",
    "run",
    "shake",
    "some_of",
    "subsets",
    "tensors",
    "wide",
]

_SHAKEN = 4
"""Ulps of fp32 by which inputs are changed to see what rounding does to the results."""

SCALES = (1.0, -0.5, 0.25, -2.0)
"""Powers of two: an example scaled by one is exact in every dtype."""

Function = Callable[..., Any]
Key = int | str | tuple[int, ...]
"""A positional argument's place, a keyword argument's name, or the way to a tensor in tuples and
lists among the positional arguments: ``(1, 0)`` is the first of the second argument."""

Cotangents = Sequence[Tensor | None]


# ---- calls


def differentiable(call: Call) -> list[Key]:
    """Keys of the arguments that have gradients."""
    found = tensors(call).items()
    return [k for k, x in found if not isinstance(k, str) and x.is_floating_point()]


def tensors(call: Call) -> dict[Key, Tensor]:
    """Every tensor among the arguments, keyword arguments included."""
    found = dict(_inside(call.args, ()))
    return found | {k: x for k, x in call.kwargs.items() if isinstance(x, Tensor)}


def _inside(values: Sequence[Any], path: tuple[int, ...]) -> Iterator[tuple[Key, Tensor]]:
    for i, x in enumerate(values):
        if isinstance(x, Tensor):
            yield ((*path, i) if path else i), x
        elif isinstance(x, (tuple, list)):
            yield from _inside(x, (*path, i))


def replaced(call: Call, values: Mapping[Any, Any]) -> Call:
    """The same call with other values for some arguments."""
    args = _with(call.args, values, ())
    return Call(tuple(args), {k: values.get(k, x) for k, x in call.kwargs.items()})


def _with(old: Sequence[Any], values: Mapping[Any, Any], path: tuple[int, ...]) -> list[Any]:
    found = []
    for i, x in enumerate(old):
        key = (*path, i) if path else i
        if key in values:
            found.append(values[key])
        elif isinstance(x, (tuple, list)):
            found.append(type(x)(_with(x, values, (*path, i))))
        else:
            found.append(x)
    return found


def wide(call: Call) -> Call:
    """The same call in fp64."""
    found = tensors(call).items()
    return replaced(call, {k: x.double() for k, x in found if x.is_floating_point()})


def subsets(positions: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every choice of at least one of ``positions``."""
    for n in range(1, len(positions) + 1):
        yield from itertools.combinations(positions, n)


# ---- one example


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """The outputs, of a function that may return one tensor or several."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def cotangents(outputs: Sequence[Tensor], seed: int) -> list[Tensor | None]:
    """A gradient of each output: contiguous, transposed, sliced, or expanded from one number.

    None for outputs that have none, being no floating-point numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = enumerate(outputs)
    return [
        _cotangent(out, (seed + i) % 4, generator) if out.is_floating_point() else None
        for i, out in pairs
    ]


def _cotangent(out: Tensor, kind: int, generator: torch.Generator) -> Tensor:
    shape = tuple(out.shape)

    def normal(*sizes: int) -> Tensor:
        values: Tensor = torch.randn(sizes, generator=generator)
        return values.to(out.device, out.dtype)

    if kind == 1 and len(shape) > 1:
        return normal(*reversed(shape)).permute(*reversed(range(len(shape))))
    if kind == 2 and shape:
        return normal(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == 3:
        return normal().expand(shape)
    return normal(*shape)


def some_of(given: Cotangents, seed: int) -> list[Tensor | None]:
    """Leave out the cotangents of some outputs, not of all that have one; the rest are unused."""
    rng = random.Random(seed)
    there = [i for i, x in enumerate(given) if x is not None]
    kept = rng.sample(there, rng.randint(1, max(1, len(there) - 1))) if there else []
    return [x if i in kept else None for i, x in enumerate(given)]


def run(
    function: Function, call: Call, wanted: Sequence[Key], given: Cotangents | None = None
) -> Result:
    """The outputs and the gradients wrt the arguments at ``wanted``, by autograd.

    ``given`` has a cotangent for each output, None where that output is not used. Without it, all
    are ones. A gradient that autograd leaves out is zero.
    """
    leaves: dict[Key, Tensor] = {
        k: x.detach() for k, x in tensors(call).items() if not isinstance(k, str)
    }
    for key in wanted:
        leaves[key].requires_grad_()
    here = replaced(call, leaves)
    outputs = as_tuple(function(*here.args, **here.kwargs))
    if given is None:
        given = [torch.ones_like(x) if x.is_floating_point() else None for x in outputs]
    assert len(outputs) == len(given), f"{len(outputs)} outputs, not {len(given)}"
    pairs = [(x, c) for x, c in zip(outputs, given, strict=True) if c is not None]
    pairs = [(x, c.to(x.dtype)) for x, c in pairs if x.requires_grad]
    inputs = [leaves[i] for i in wanted]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs and inputs:
        of, by = zip(*pairs, strict=True)
        found = torch.autograd.grad(of, inputs, by, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return Result(tuple(x.detach() for x in outputs), tuple(grads))


def assert_right(
    function: Function, reference: Function, call: Call, seed: int = 0, bar: float = FP32_BAR
) -> None:
    """Assert outputs and gradients, that nothing was written, and that a second run is the same.

    Where there are several outputs, also with the gradients of some of them alone.
    """
    wanted = differentiable(call)
    given = cotangents(as_tuple(reference(*call.args, **call.kwargs)), seed)
    choices = [given]
    if sum(x is not None for x in given) > 1:
        choices.append(some_of(given, seed))
    for chosen in choices:
        held = [*tensors(call).values(), *(x for x in given if x is not None)]
        before, versions = [x.clone() for x in held], [x._version for x in held]
        found = run(function, call, wanted, chosen)
        again = run(function, call, wanted, chosen)
        assert all_same(held, before), "an input or an incoming gradient was overwritten"
        assert [x._version for x in held] == versions, "an input was written to"
        assert all_same(leaves(found), leaves(again)), "two runs differ"
        _judge_run(reference, call, wanted, chosen, found, bar)


def _judge_run(
    reference: Function,
    call: Call,
    wanted: Sequence[Key],
    given: Cotangents,
    found: Result,
    bar: float,
) -> None:
    """Compare with what is true, in fp64, and what eager makes of it."""

    def both(call: Call, given: Cotangents) -> tuple[Result, Result]:
        exact = [None if x is None else x.double() for x in given]
        return run(reference, wide(call), wanted, exact), run(reference, call, wanted, given)

    judge(found, *both(call, given), lambda k: both(*shake(call, given, k)), bar)


def shake(call: Call, given: Cotangents, k: int) -> tuple[Call, list[Tensor | None]]:
    """The same arguments and cotangents, every number some ulps of fp32 off, and in fp32.

    From :data:`DRAWS` on they have their own dtypes, and are an ulp off of the widest ulp among
    them, to which something may be rounded on the way.
    """
    generator = torch.Generator().manual_seed(k)
    smooth = [x for x in tensors(call).values() if x.is_floating_point()]
    ulp = max((torch.finfo(x.dtype).eps for x in smooth), default=0.0)

    def off(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        if k >= DRAWS:
            return (x.double() * (1 + ulp * signs)).to(x.dtype)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.to(dtype) * (1 + _SHAKEN * torch.finfo(dtype).eps * signs).to(dtype)

    found = tensors(call).items()
    moved = replaced(call, {key: off(x) for key, x in found if x.is_floating_point()})
    return moved, [None if x is None else off(x) for x in given]


# ---- examples side by side


def mapped(call: Call, positions: Sequence[Key], dims: Sequence[int], size: int) -> Call:
    """Give the arguments at ``positions`` a dimension of ``size`` examples, at ``dims``.

    Examples are multiples of the first; of integers, such as labels, they are shifted in place.
    """
    found = tensors(call)
    values: dict[Key, Any] = {}
    for key, dim in zip(positions, dims, strict=True):
        values[key] = torch.stack([_example(found[key], k) for k in range(size)], dim)
    return replaced(call, values)


def _example(x: Tensor, k: int) -> Tensor:
    return x * SCALES[k % len(SCALES)] if x.is_floating_point() else x.roll(k)


def assert_rows(
    function: Function,
    reference: Function,
    call: Call,
    positions: Sequence[Key],
    seed: int,
    size: int = 3,
    *,
    ran: Callable[[], bool] | None = None,
    bar: float = FP32_BAR,
) -> bool:
    """Assert ``vmap(grad)`` over the arguments at ``positions`` against a loop over examples.

    Gradients are those of a sum weighted by cotangents, or those of ``vjp``, which passes the
    cotangents on as they lie. ``ran`` tells whether ``function`` did by kernel what it was last
    asked for. Where it did not, the numbers are those of functorch, which rounds its own way
    between the operators of the reference, and nothing is asserted; returns whether anything was.
    """
    rng = random.Random(seed)
    wanted, found = differentiable(call), tensors(call)
    dims = [rng.randint(0, found[key].dim()) for key in positions]
    batch = mapped(call, positions, dims, size)
    given = cotangents(as_tuple(reference(*call.args, **call.kwargs)), seed)
    if sum(x is not None for x in given) > 1 and rng.randint(0, 1):
        given = some_of(given, seed)
    gradients = by_vjp if rng.randint(0, 1) else by_grad

    def one(*values: Tensor) -> Any:
        here = replaced(call, dict(zip(positions, values, strict=True)))
        return gradients(function, here, wanted, given)

    outputs, grads = vmap(one, tuple(dims))(*(tensors(batch)[key] for key in positions))
    if ran is not None and not ran():
        return False
    for k in range(size):
        chosen: dict[Key, Any] = {
            key: tensors(batch)[key].select(dim, k)
            for key, dim in zip(positions, dims, strict=True)
        }
        row = Result(tuple(x[k] for x in outputs), tuple(g[k] for g in grads))
        _judge_run(reference, replaced(call, chosen), wanted, given, row, bar)
    return True


def by_vjp(
    function: Function, call: Call, wanted: Sequence[Key], given: Cotangents
) -> tuple[Any, Any]:
    def used(*values: Tensor) -> Any:
        call_here = replaced(call, dict(zip(wanted, values, strict=True)))
        outputs = as_tuple(function(*call_here.args, **call_here.kwargs))
        pairs = zip(outputs, given, strict=True)
        return tuple(x for x, c in pairs if c is not None), outputs

    if not wanted:
        return as_tuple(function(*call.args, **call.kwargs)), ()
    of, pull, outputs = vjp(  # type: ignore[misc]
        used, *(tensors(call)[i] for i in wanted), has_aux=True
    )
    by = [c for c in given if c is not None]
    return outputs, pull(tuple(c.to(x.dtype) for x, c in zip(of, by, strict=True)))


def by_grad(
    function: Function, call: Call, wanted: Sequence[Key], given: Cotangents
) -> tuple[Any, Any]:
    def total(*values: Tensor) -> Any:
        call_here = replaced(call, dict(zip(wanted, values, strict=True)))
        outputs = as_tuple(function(*call_here.args, **call_here.kwargs))
        pairs = zip(outputs, given, strict=True)
        # Sums in fp64 do not overflow; the gradient that arrives is rounded back, exactly.
        terms = [(x.double() * c.double()).sum() for x, c in pairs if c is not None]
        return sum(terms), outputs

    if not wanted:
        return as_tuple(function(*call.args, **call.kwargs)), ()
    values = [tensors(call)[i] for i in wanted]
    found, outputs = grad(total, tuple(range(len(wanted))), has_aux=True)(*values)
    return outputs, found
