"""Times and memory of calls on one device. Knows torch alone and no opake."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kernel_calls import Passes, difference

CALLS = 10  # in one graph at most, so that replaying it costs little beside it
GRAPH_MS = 20  # of a graph, if that is more than one call
SECONDS = 0.15  # for each number, if at least 5 calls or replays take no more


class Bench:
    """Times calls on one device."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def repeat(self, once: Callable[[], tuple[float, ...]], most: int) -> list[float]:
        """Medians of what ``once`` returns, the first of which is how many seconds it took."""
        found = [once() for _ in range(1 if self.smoke else 3)]  # warm afterwards
        if not self.smoke:
            count = max(5, min(most, int(SECONDS / max(found[-1][0], 1e-9))))
            found = [once() for _ in range(count)]
        return [statistics.median(column) for column in zip(*found, strict=True)]

    def synchronizes(self, call: Callable[[], Any]) -> bool:
        """Tell whether a call waits for the GPU, which no graph can capture."""
        if not self.cuda:
            return False
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def gpu_ms(self, call: Callable[[], Any]) -> float:
        """Median time of one call in a replayed graph."""
        if not self.cuda:
            return self.host_ms(call)[0]
        calls = max(1, min(CALLS, int(GRAPH_MS / self._once_ms(call))))
        graph, _ = captured(call, calls)
        return self._event_ms(graph.replay) / calls

    def _once_ms(self, call: Callable[[], Any]) -> float:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def queued_ms(self, call: Callable[[], Any]) -> float:
        """Median time of one call between two events; for what no graph can capture."""
        return self._event_ms(call) if self.cuda else self.host_ms(call)[0]

    def _event_ms(self, call: Callable[[], Any]) -> float:
        def once() -> tuple[float, ...]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return (start.elapsed_time(end) / 1e3,)

        return self.repeat(once, 20)[0] * 1e3

    def host_ms(
        self, call: Callable[[], Any], before: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """Median time from the call to its end and to its return, on an idle queue."""

        def once() -> tuple[float, ...]:
            before()
            self.synchronize()
            start = time.perf_counter()
            result = call()
            returned = time.perf_counter()
            self.synchronize()
            ended = time.perf_counter()
            del result
            return ended - start, returned - start

        whole, enqueue = self.repeat(once, 100)
        return whole * 1e3, enqueue * 1e3

    def call_us(self, call: Callable[[], Any]) -> float:
        """Median time of one of many calls in a row, nobody waiting for the GPU."""
        found = []
        for _ in range(1 if self.smoke else 7):
            self.synchronize()
            count = 1 if self.smoke else 100
            start = time.perf_counter()
            for _ in range(count):
                call()
            found.append((time.perf_counter() - start) / count)
        self.synchronize()
        return statistics.median(found) * 1e6

    def memory_mib(self, call: Callable[[], Any]) -> float:
        """Peak memory of a call whose results are held, above what was there before."""
        if not self.cuda:
            return 0.0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        source = torch.randn(2**16 if self.smoke else 2**29, device=self.device)
        target = torch.empty_like(source)
        moved = 2 * source.numel() * source.element_size()
        # Not copy_: a graph captures that as a transfer of the copy engine, which is slower.
        return moved / self.gpu_ms(lambda: torch.neg(source, out=target)) * 1e3


def captured(call: Callable[[], Any], count: int = 1) -> tuple[Any, Any]:
    """A CUDA graph of ``count`` calls, and the results of the last one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            results = call()
    return graph, results


# ---- one variant at one shape


def measured(
    bench: Bench,
    row: dict[str, Any],
    functions: list[Callable[..., Any]],
    call: Any,
    bounds: dict[str, float],
    small: dict[str, Any] | str,
) -> dict[str, Any]:
    """Fill ``row`` with the times of the function that is nearest the truth, or with why not.

    ``bounds`` are ms by pass; ``small`` is a case of :func:`kernel_calls.small_case`, or says why
    there is none.
    """
    try:
        function, off = _agreeing(bench, functions, small)
        row |= {"difference": off} | ({"no_difference": small} if isinstance(small, str) else {})
        passes = Passes(function, call)
        for name, run in (("forward", passes.forward), ("both", passes.both)):
            row[name] = _timed(bench, passes, run, bounds[name])
    except Exception as error:  # of a peer: it stands in the table
        row["error"] = f"{type(error).__name__}: {error}"[:400]
    if bench.cuda:
        torch.cuda.empty_cache()
    print(line(row), flush=True)
    return row


def _agreeing(
    bench: Bench, functions: list[Callable[..., Any]], small: dict[str, Any] | str
) -> tuple[Callable[..., Any], float | None]:
    if isinstance(small, str):
        return functions[0], None
    found: list[tuple[float, Callable[..., Any]]] = []
    errors: list[Exception] = []
    for function in functions:
        try:
            found.append((difference(function, small, bench.device), function))
        except Exception as error:
            errors.append(error)
    if not found:
        raise errors[0]
    off, function = min(found, key=lambda x: x[0])
    if not off < 0.05:
        raise ValueError(f"computes something else: off by {off:.2g} of the largest number")
    return function, off


def _timed(bench: Bench, passes: Passes, run: Callable[[], Any], bound: float) -> dict[str, Any]:
    passes.keep()
    run()  # what it compiles is not its time
    run()
    overwrites = passes.overwrote()
    if not overwrites:
        passes.kept = []
    else:
        passes.restore()
    waits = bench.synchronizes(run)
    gpu = bench.queued_ms(run) if waits else bench.gpu_ms(run)
    before = passes.restore if overwrites else lambda: None
    host, enqueue = bench.host_ms(run, before)
    found: dict[str, Any] = {
        "bound_ms": bound,
        "captured": bench.cuda and not waits,
        "gpu_ms": gpu,
        "share": bound / gpu,
        "host_ms": host,
        "enqueue_ms": enqueue,
        "memory_mib": bench.memory_mib(run),
    }
    if overwrites:
        passes.restore()
        passes.kept = []
        found["overwrites_inputs"] = True
    return found | ({"synchronizes": True} if waits else {})


def line(row: dict[str, Any]) -> str:
    """A row of times in one line."""
    head = f"{row['op']:18} {row['shape']:20} {row['variant']:14}"
    if "error" in row:
        return f"{head} {row['error'][:120]}"
    parts = []
    for name in ("forward", "both"):
        x = row[name]
        marks = "!" * x.get("overwrites_inputs", False) + "s" * x.get("synchronizes", False)
        parts.append(
            f"{name[:4]} {x['gpu_ms']:8.4f} ms ({x['share']:4.2f}){marks:2}"
            f" host {x['host_ms']:8.4f}/{x['enqueue_ms']:.4f} {x['memory_mib']:6.0f} MiB"
        )
    return f"{head} {' | '.join(parts)}"
