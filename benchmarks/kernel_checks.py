"""What is checked of every operator on a GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernel_calls import (
    benchmark_call,
    changed,
    cut,
    repeated,
    same,
    size,
    spread,
    timed_shapes,
    token_dims,
    tokens,
)
from kernel_timing import Bench, captured
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import kernel_oracle as oracle

from opake.kernels import Call, Op, Shape
from opake.kernels._triton import Launch
from opake.testing import _parity as parity

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HUGE = 2**31  # elements: more than an int32 counts

Check = tuple[str, Callable[[], None]]


def plain(call: Any) -> Call:
    """The call as operators are checked: whatever can have a gradient has one."""
    return Call(call.args, call.kwargs)


def made(op: Op, shape: Shape, bench: Bench) -> Call:
    """The arguments of a benchmark, as they are timed."""
    return plain(benchmark_call(op, shape, bench.device, bench.smoke))


def check(op: Op, bench: Bench, examples: int) -> dict[str, Any]:
    """Run every check of an operator; returns how often kernels ran and what was wrong."""
    ran, total, failures = 0, 0, []
    for name, test in _checks(op, bench, examples):
        total += 1
        try:
            test()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}"[:400])
            if bench.cuda and "CUDA error" in str(error):
                failures.append("nothing more can run in this process")
                break
        ran += oracle.fused(op)
    return {"op": op.name, "checks": total, "kernels_ran": ran, "failures": failures}


def _checks(op: Op, bench: Bench, examples: int) -> Iterator[Check]:
    for dtypes in (*((dtype,) for dtype in DTYPES), DTYPES):
        named = "/".join(str(d).removeprefix("torch.") for d in dtypes)
        for seed in range(examples):
            call = oracle.drawn(op, seed, bench.device, *dtypes)
            for name, test in _numbers(op, call, seed, bench.smoke):
                yield f"{name}, seed {seed}, {named}", test
    for shape in timed_shapes(op, bench.smoke):
        yield f"numbers at {shape.label}", lambda s=shape: _right_at(op, s, bench)
        yield f"two runs at {shape.label}", lambda s=shape: _deterministic(op, made(op, s, bench))
    if not bench.cuda:
        return
    for seed, call in _running(op, bench, 8):
        for test in ON_GPU:
            yield f"{test.__name__[1:]}, seed {seed}", lambda t=test, c=call: t(op, c)
    few = cut(made(op, op.benchmarks[0], bench), 64)
    for test in ON_GPU:
        yield f"{test.__name__[1:]}, benchmark", lambda t=test: t(op, few)


def _numbers(op: Op, call: Call, seed: int, smoke: bool) -> Iterator[Check]:
    yield "values", lambda: oracle.assert_right(op, call, seed)
    choices = oracle.choices(call, seed)
    if smoke or seed >= 4:  # all of them at first
        choices = random.Random(seed).sample(choices, min(1, len(choices)))
    for keys in choices:
        yield f"vmap over {keys}", lambda k=keys: oracle.assert_rows(op, call, k, seed)


def _running(op: Op, bench: Bench, count: int) -> Iterator[tuple[int, Call]]:
    """Drawn examples that the kernels run."""
    for seed in range(1000):
        call = oracle.drawn(op, seed, bench.device, torch.bfloat16)
        if not size(call) or not oracle.differentiable(call):
            continue
        _step(op, call)
        if oracle.fused(op):
            yield seed, call
            count -= 1
        if not count:
            return


def _step(op: Op, call: Call, seed: int = 0) -> list[Tensor]:
    """Outputs and gradients, of incoming gradients that a seed stands for."""
    with torch.no_grad():
        found = parity.as_tuple(op.function(*call.args, **call.kwargs))
    return _both(op, call, parity.cotangents(found, seed))


def _both(op: Op, call: Call, cotangents: list[Tensor | None]) -> list[Tensor]:
    return parity.leaves(parity.run(op.function, call, parity.differentiable(call), cotangents))


def _right_at(op: Op, shape: Shape, bench: Bench) -> None:
    few = plain(cut(made(op, shape, bench), 64))
    for seed in range(2):
        oracle.assert_right(op, few, seed)
    assert oracle.fused(op), "the kernels did not run"


def _deterministic(op: Op, call: Call) -> None:
    first = _step(op, call)
    for _ in range(2):
        assert parity.all_same(_step(op, call), first), "two runs differ"


# ---- graphs, synchronisation, devices


def _captures(op: Op, call: Call) -> None:
    """A replay of both passes in one graph, on new numbers in the same memory, is as without."""
    own = plain(changed(call, lambda x: x.detach().clone()))
    with torch.no_grad():
        found = parity.as_tuple(op.function(*own.args, **own.kwargs))
    cotangents = [torch.randn_like(x) if x.is_floating_point() else None for x in found]
    _waits_for_nothing(op, own)  # what does would leave a broken capture behind
    graph, results = captured(lambda: _both(op, own, cotangents))
    for _ in range(2):
        changed(own, _renew)
        for x in cotangents:
            if x is not None:
                _renew(x)
        graph.replay()
        replayed = [x.clone() for x in results]
        assert parity.all_same(replayed, _both(op, own, cotangents)), "a replay differs"


def _renew(x: Tensor) -> None:
    """Write other numbers; integers change places, so that they stay in range."""
    if x.is_cuda:  # what lies on the CPU was read when the graph was captured
        new = torch.randn_like(x) if x.is_floating_point() else x.flatten().roll(1).view(x.shape)
        x.copy_(new)


def _waits_for_nothing(op: Op, call: Call) -> None:
    with torch.no_grad():
        found = parity.as_tuple(op.function(*call.args, **call.kwargs))
    cotangents = [torch.randn_like(x) if x.is_floating_point() else None for x in found]
    _both(op, call, cotangents)  # what a first call compiles and loads may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        _both(op, call, cotangents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _keeps_the_device(op: Op, call: Call) -> None:
    """Kernels run where the tensors are, and leave the current device as it is."""
    if torch.cuda.device_count() > 1:
        there = plain(changed(call, lambda x: x.to("cuda:1") if x.is_cuda else x))
        here = plain(changed(there, lambda x: x.to("cuda:0") if x.is_cuda else x))
        expected, found = _step(op, here), _step(op, there)
        assert torch.cuda.current_device() == 0, "the current device was changed"
        assert all(x.device.index == 1 for x in found), "results are on another device"
        assert parity.all_same([x.to("cuda:0") for x in found], expected), "another device differs"
        return
    with oracle.counted() as launches:
        expected = _step(op, call)
    with _another_current_device() as entered:
        found = _step(op, call)
    assert entered or not launches(), "kernels were launched on another device"
    assert all(entered), "a launch outside of its tensors' device"
    assert parity.all_same(found, expected), "another current device differs"


@contextmanager
def _another_current_device() -> Iterator[list[bool]]:
    """Say that another device is current, except inside ``torch.cuda.device``.

    Yields a list that gets, for every launch, whether it was inside.
    """
    stock_device, stock_get, stock_launch = (
        torch.cuda.device,
        torch._C._cuda_getDevice,
        Launch._launch,
    )
    inside = 0
    entered: list[bool] = []

    class device(stock_device):  # type: ignore[misc, valid-type]  # noqa: N801  (torch's name)
        def __enter__(self) -> None:
            nonlocal inside
            inside += 1
            super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            nonlocal inside
            inside -= 1
            return super().__exit__(*error)

    def launch(self: Launch, *args: Any) -> None:
        entered.append(bool(inside))
        stock_launch(self, *args)

    torch.cuda.device, Launch._launch = device, launch  # type: ignore[method-assign, misc]
    torch._C._cuda_getDevice = lambda: stock_get() if inside else 1
    try:
        yield entered
    finally:
        torch.cuda.device, Launch._launch = stock_device, stock_launch  # type: ignore[method-assign, misc]
        torch._C._cuda_getDevice = stock_get


ON_GPU = (_waits_for_nothing, _keeps_the_device, _captures)

# ---- more than 2**31 elements


def check_large(op: Op, bench: Bench) -> dict[str, Any]:
    """More than 2**31 elements, and so far apart: the numbers must be those of a small call."""
    failures, done = [], []
    for name, test in (("by size", _by_size), ("by stride", _by_stride)):
        if not bench.cuda:
            continue
        torch.cuda.empty_cache()
        try:
            done.append(f"{name}: {test(op, bench)}")
            assert oracle.fused(op), "the kernels did not run"
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}"[:400])
    torch.cuda.empty_cache()
    return {"op": op.name, "done": done, "failures": failures}


def _by_size(op: Op, bench: Bench) -> str:
    """Compare the last tokens of many with the same tokens alone."""
    small = made(op, op.benchmarks[0], bench)
    wanted, count = oracle.differentiable(small), tokens(small)
    with torch.no_grad():
        found = parity.as_tuple(op.function(*small.args, **small.kwargs))
    moving = [x for x in (*parity.tensors(small).values(), *found) if token_dims(x, count)]
    copies = 1  # a power of two, so that a mean's gradient scales without rounding
    cotangents = [_ones_or_normal(x) for x in found]
    torch.cuda.reset_peak_memory_stats()
    alone = _both(op, small, cotangents)
    used = torch.cuda.max_memory_allocated()
    room = torch.cuda.get_device_properties(0).total_memory / 3
    while copies * max(x.numel() for x in moving) <= HUGE and copies * used < room:
        copies *= 2
    large = plain(repeated(small, copies))
    del small
    many = [None if g is None else _again(g, count, copies) for g in cotangents]
    together = parity.leaves(parity.run(op.function, large, wanted, many))
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        longer = [d for d in range(b.dim()) if a.shape[d] != b.shape[d]]
        for d in longer:
            a = a.narrow(d, a.shape[d] - b.shape[d], b.shape[d])
        # Products of more rows are summed in another order.
        exact = bool(longer) and not op.benchmarks[0].forward_flops
        _compare_scaled(a, b, copies, exact, f"result {i}")
    return f"{copies} times {count} tokens"


def _ones_or_normal(x: Tensor) -> Tensor | None:
    if not x.is_floating_point():
        return None
    return torch.randn_like(x) if x.dim() else torch.ones_like(x)


def _again(x: Tensor, count: int, copies: int) -> Tensor:
    dims = token_dims(x, count)
    return x.repeat([copies if d in dims else 1 for d in range(x.dim())])


def _compare_scaled(a: Tensor, b: Tensor, copies: int, exact: bool, what: str) -> None:
    """Tokens' numbers must be equal, or a mean's share; sums over tokens as many times, or so."""
    if exact:
        assert same(a, b) or same(a, (b / copies).to(b.dtype)), f"{what} differs"
        return
    a, b = a.double(), b.double()
    off = min(
        (a - b * factor).abs().max() / (b * factor).abs().max()
        for factor in (1, copies, 1 / copies)
    )
    assert off < 0.02, f"{what} is off by {off:.2e}"


def _by_stride(op: Op, bench: Bench) -> str:
    """Compare tokens that lie 2**30 numbers apart with the same tokens side by side."""
    whole = made(op, op.benchmarks[0], bench)
    few, count = plain(cut(whole, 4)), 4
    whole_count = tokens(whole)
    dims = {k: token_dims(x, whole_count) for k, x in parity.tensors(whole).items()}
    del whole
    wanted = oracle.differentiable(few)
    with torch.no_grad():
        found = parity.as_tuple(op.function(*few.args, **few.kwargs))
    cotangents = [_ones_or_normal(x) for x in found]
    alone = _both(op, few, cotangents)
    step = HUGE // 2 + 64
    far: dict[Any, Tensor] = {
        k: spread(x, dims[k][0], step) for k, x in parity.tensors(few).items() if dims[k]
    }
    apart = [
        g if g is None or not token_dims(g, count) else spread(g, token_dims(g, count)[0], step)
        for g in cotangents
    ]
    together = parity.leaves(parity.run(op.function, parity.replaced(few, far), wanted, apart))
    assert parity.all_same(together, alone), "tokens far apart differ"
    return f"{len(far)} arguments, {step} numbers between tokens"
