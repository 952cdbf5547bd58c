"""What is run at a benchmark's shape: its arguments, cut, repeated, described, made again.

Knows torch alone and no opake, since a peer may bear that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

FLOPS = 790e12
"""Floating-point operations per second of bf16 matrix products on an H200, as measured."""

TINY = 2**24  # elements; more are not copied to a file, nor called tiny
FIXED = frozenset(("cos", "sin"))


Key = int | tuple[int, ...]  # of a positional argument, or of a tensor in one that is a tuple


class Call(NamedTuple):
    """Positional and keyword arguments, as opake.kernels.Call has them, and what is not trained."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frozen: tuple[Key, ...] = ()


def outputs(found: Any) -> tuple[Tensor, ...]:
    """The outputs of a function that returns one tensor or several."""
    return (found,) if isinstance(found, Tensor) else tuple(found)


def positional(call: Any) -> dict[Key, Tensor]:
    """The tensors among the positional arguments."""
    return dict(_inside(call.args, ()))


def _inside(values: Any, path: tuple[int, ...]) -> Iterator[tuple[Key, Tensor]]:
    for i, x in enumerate(values):
        if isinstance(x, Tensor):
            yield ((*path, i) if path else i), x
        elif isinstance(x, (tuple, list)):
            yield from _inside(x, (*path, i))


def differentiable(call: Any) -> list[Key]:
    """Keys of the arguments that have gradients."""
    frozen = getattr(call, "frozen", ())
    found = positional(call).items()
    return [key for key, x in found if x.is_floating_point() and key not in frozen]


def tensors(call: Any) -> list[Tensor]:
    """Every tensor among the arguments."""
    named = [x for x in call.kwargs.values() if isinstance(x, Tensor)]
    return [*positional(call).values(), *named]


def size(call: Any) -> int:
    """Elements of the largest tensor, what the guard of an operator goes by."""
    return max(x.numel() for x in tensors(call))


def changed(call: Any, change: Callable[[Tensor], Any]) -> Call:
    """The call with ``change`` applied to every tensor."""

    def new(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(new, x))
        return change(x) if isinstance(x, Tensor) else x

    named = {k: new(x) for k, x in call.kwargs.items()}
    return Call(new(call.args), named, getattr(call, "frozen", ()))


# ---- tokens


def tokens(call: Any) -> int:
    """How many tokens a call is about: the largest size of the first tensor, its width aside."""
    first = tensors(call)[0]
    return max(first.shape[:-1] if first.is_floating_point() else first.shape, default=1)


def token_dims(x: Tensor, count: int) -> list[int]:
    """The dimensions of a tensor that stand for ``count`` tokens."""
    last = x.dim() - 1 if x.is_floating_point() else x.dim()
    return [d for d in range(last) if x.shape[d] == count]


def cut(call: Any, count: int) -> Call:
    """The first ``count`` tokens of a call, copied."""
    whole = tokens(call)

    def first(x: Tensor) -> Tensor:
        for d in token_dims(x, whole):
            x = x.narrow(d, 0, min(count, whole))
        return x.clone()

    return changed(call, first)


def repeated(call: Any, copies: int) -> Call:
    """The tokens of a call again and again."""
    whole = tokens(call)

    def again(x: Tensor) -> Tensor:
        dims = token_dims(x, whole)
        return x.repeat([copies if d in dims else 1 for d in range(x.dim())])

    return changed(call, again)


def spread(x: Tensor, dim: int, stride: int) -> Tensor:
    """A copy of ``x`` whose elements along ``dim`` lie ``stride`` apart."""
    others = [d for d in range(x.dim()) if d != dim]
    strides, step = [0] * x.dim(), 1
    for d in reversed(others):
        strides[d], step = step, step * x.shape[d]
    strides[dim] = stride
    room = torch.empty((x.shape[dim] - 1) * stride + step, dtype=x.dtype, device=x.device)
    return room.as_strided(x.shape, strides).copy_(x)


# ---- descriptions, for a process that has no opake


def described(call: Any) -> Call:
    """The call without its numbers: floats as shape, strides and spread, integers as they are."""

    def described(x: Tensor) -> Any:
        if not x.is_floating_point():
            return x.cpu()
        mean, std = (0.0, 1.0)
        if x.device.type != "meta" and x.numel() > 1:
            mean, std = x.mean().item(), x.std().item()
        return {"shape": tuple(x.shape), "stride": x.stride(), "dtype": x.dtype, "as": (mean, std)}

    return changed(call, described)


def made(description: Any, device: str) -> Call:
    """A call with random numbers of a description."""

    def new(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(device)
        if type(x) in (tuple, list):
            return type(x)(map(new, x))
        if not isinstance(x, dict):
            return x
        shape, stride, (mean, std) = x["shape"], x["stride"], x["as"]
        room = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
        values = torch.randn(room, dtype=x["dtype"], device=device)
        return values.mul_(std).add_(mean).as_strided(shape, stride)

    args, kwargs, frozen = description
    return Call(new(args), {k: new(x) for k, x in kwargs.items()}, frozen)


def from_meta(call: Any, device: str) -> Call:
    """Random numbers for a call on the meta device; integers are zero, which any of them may be.

    Matrices are as small as in models, where products of them neither grow nor vanish.
    """
    count = tokens(call)

    def real(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype, device=device)
        values = torch.randn(x.shape, dtype=x.dtype, device=device)
        matrix = x.dim() > 1 and x.numel() and not token_dims(x, count)
        return values.mul_(x.shape[-1] ** -0.5) if matrix else values

    return changed(call, real)


def benchmark_call(op: Any, shape: Any, device: str, smoke: bool) -> Call:
    """The arguments of a shape in bf16; of a smoke run, a few tokens of it."""
    if not smoke:
        call = shape.make(device, torch.bfloat16)
    else:  # cut before there are numbers: a vocabulary's logits take a CPU seconds
        call = from_meta(cut(shape.make("meta", torch.bfloat16), 4), device)
    return _trained(op, Call(call.args, call.kwargs, shape.frozen))


def _trained(op: Any, call: Any) -> Call:
    """The call with what nobody trains as keywords, so that no gradient of it is timed."""
    names = list(inspect.signature(op.function).parameters)
    fixed = {names[i]: x for i, x in enumerate(call.args) if names[i] in FIXED}
    args = [x for i, x in enumerate(call.args) if names[i] not in FIXED]
    return Call(tuple(args), {**fixed, **call.kwargs}, call.frozen)


def timed_shapes(op: Any, smoke: bool) -> Any:
    """The benchmarks of an operator, the last one alone of a smoke run."""
    return op.benchmarks[-1 if smoke else 0 :]


def bounds(shape: Any, smoke: bool, bandwidth: float) -> dict[str, float]:
    """The ms that each pass takes at least; NaN of a smoke run, whose inputs are smaller.

    Bytes that must move take their time, or products of matrices theirs.
    """
    itemsize = float("nan") if smoke else torch.bfloat16.itemsize
    moved = {"forward": shape.forward, "both": shape.forward + shape.backward}
    flops = {"forward": shape.forward_flops, "both": shape.forward_flops + shape.backward_flops}
    return {k: max(moved[k] * itemsize / bandwidth, flops[k] / FLOPS) * 1e3 for k in moved}


# ---- passes


class Passes:
    """Both passes of a function on its own copy of a call's arguments."""

    def __init__(self, function: Callable[..., Any], call: Any) -> None:
        self.function = function
        own = changed(call, _copied)
        self.wanted = differentiable(own)
        self.kwargs = own.kwargs
        self.args = own.args
        self.leaves = [positional(own)[key].requires_grad_() for key in self.wanted]
        self.held: list[Tensor] = []
        self.kept: list[Tensor] = []
        once = changed(own, _copied)
        with torch.no_grad():
            found = outputs(function(*once.args, **once.kwargs))
        self.cotangents = [_cotangent(x) for x in found]

    def forward(self) -> Any:
        """The forward pass without autograd."""
        with torch.no_grad():
            return self.function(*self.args, **self.kwargs)

    def both(self) -> Any:
        """Outputs and gradients."""
        found = outputs(self.function(*self.args, **self.kwargs))
        pairs = zip(found, self.cotangents, strict=True)
        pairs = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
        of, by = zip(*pairs, strict=True)
        return found, torch.autograd.grad(of, self.leaves, by)

    def keep(self) -> None:
        """Remember what the arguments and incoming gradients are."""
        self.held = tensors(Call(self.args, self.kwargs))
        self.held += [g for g in self.cotangents if g is not None]
        self.kept = [x.detach().clone() for x in self.held]

    def overwrote(self) -> bool:
        """Tell whether one of them is another since."""
        return any(not same(a, b) for a, b in zip(self.held, self.kept, strict=True))

    def restore(self) -> None:
        """Write them as they were."""
        for x, value in zip(self.held, self.kept, strict=True):
            x.detach().copy_(value)


def _copied(x: Tensor) -> Tensor:
    """A copy with the same strides, where numbers do not share memory."""
    return x.detach().clone()


def _cotangent(x: Tensor) -> Tensor | None:
    if not x.is_floating_point():
        return None
    return torch.randn_like(x) if x.dim() else torch.ones_like(x)


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers, NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def per_example(
    function: Callable[..., Any], call: Any, like: Any, count: int
) -> Callable[[], Any]:
    """``vmap(grad)`` over ``count`` copies of what stands for tokens in the uncut call ``like``."""
    whole, wanted = tokens(like), differentiable(call)
    held = positional(call)
    keys = list(held)
    mapped = [bool(token_dims(x, whole)) for x in positional(like).values()]
    batch = [
        torch.stack([held[k]] * count) if m else held[k] for k, m in zip(keys, mapped, strict=True)
    ]

    def loss(*values: Tensor) -> Tensor:
        found = outputs(
            function(*_with(call.args, dict(zip(keys, values, strict=True))), **call.kwargs)
        )
        sums = [x.float().sum() for x in found if x.is_floating_point()]
        return torch.stack(sums).sum() if len(sums) > 1 else sums[0]

    in_dims = tuple(0 if m else None for m in mapped)
    run = vmap(grad(loss, argnums=tuple(keys.index(k) for k in wanted)), in_dims)
    return lambda: run(*batch)


def _with(old: Any, values: dict[Key, Tensor], path: tuple[int, ...] = ()) -> list[Any]:
    """Arguments with other tensors."""
    found: list[Any] = []
    for i, x in enumerate(old):
        key = (*path, i) if path else i
        inside = type(x) in (tuple, list)
        found.append(type(x)(_with(x, values, (*path, i))) if inside else values.get(key, x))
    return found


def difference(function: Callable[..., Any], small: dict[str, Any], device: str) -> float:
    """The largest error of outputs and gradients at a small call, over that tensor's largest."""
    passes = Passes(function, changed(small["call"], lambda x: x.to(device)))
    pairs = zip(small["cotangents"], passes.cotangents, strict=True)
    passes.cotangents = [None if g is None else g.to(own) for g, own in pairs]
    found, gradients = passes.both()
    worst = 0.0
    for a, b in zip((*found, *gradients), small["truth"], strict=True):
        a, b = a.detach().double().cpu(), b.double()
        if a.shape != b.shape:
            return float("inf")
        if b.numel():
            worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item())
    return worst


COMPILED = "it would be compiled for a few tokens as well"


def small_case(reference: Callable[..., Any], call: Any) -> dict[str, Any] | str:
    """A few tokens of a call with what is true of them, computed in fp64; or why there are none."""
    few = cut(call, 4)
    if size(few) > TINY:
        return f"a weight has {size(few)} numbers, too many to compute with in fp64 and to pass on"
    cotangents = Passes(reference, few).cotangents
    passes = Passes(reference, changed(few, _wide))
    passes.cotangents = [None if g is None else _wide(g) for g in cotangents]
    found, gradients = passes.both()
    return {
        "call": changed(few, Tensor.cpu),
        "cotangents": [None if g is None else g.cpu() for g in cotangents],
        "truth": [x.detach().float().cpu() for x in (*found, *gradients)],
    }


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
