"""Check every kernel on a GPU against fp64, then time it beside eager and torch.compile.

python benchmarks/kernels_gpu.py results.json [commit] [--sweep] [--only OP] [--smoke]

``gpu_ms`` is a CUDA graph's replay; ``host_ms`` is what a caller waits on an idle queue, from the
call to the end of the work; ``enqueue_ms`` is that without waiting for the end. ``bound_ms`` is
the time to move the bytes that must move at the copy bandwidth measured in the same run, and
``share`` is bound over gpu time. ``--smoke`` runs everything once on tiny inputs, on the CPU if
need be (with TRITON_INTERPRET=1, for the kernels to run there).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from host import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import kernel_oracle as oracle
from interpreter import round_bfloat16

from opake import kernels
from opake.kernels import Call, Op, Shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS = 10  # in one graph, so that replaying it costs little beside it


class Bench:
    """Times calls on one device."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def gpu_ms(self, call: Callable[[], Any]) -> float:
        """Median time of one call in a replayed graph."""
        if not self.cuda:
            return self.host_ms(call)[0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        for _ in range(3):
            graph.replay()
        found = []
        for _ in range(1 if self.smoke else 20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / CALLS)
        return statistics.median(found)

    def host_ms(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Median time from the call to its end and to its return, on an idle queue."""
        for _ in range(0 if self.smoke else 3):
            call()
        whole, enqueue = [], []
        for _ in range(1 if self.smoke else 100):
            self.synchronize()
            start = time.perf_counter()
            result = call()
            returned = time.perf_counter()
            self.synchronize()
            whole.append(time.perf_counter() - start)
            enqueue.append(returned - start)
            del result
        return statistics.median(whole) * 1e3, statistics.median(enqueue) * 1e3

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


# ---- correctness


def check(op: Op, bench: Bench) -> dict[str, Any]:
    """Run an operator on drawn inputs; returns how often kernels ran and what was wrong."""
    ran, total, failures = 0, 0, []
    with kernels.config(min_elements=0):
        for dtypes in (*((dtype,) for dtype in DTYPES), DTYPES):
            for seed in range(1 if bench.smoke else 25):
                call = oracle.drawn(op, seed, bench.device, *dtypes)
                for name, test in _checks(op, call, seed):
                    total += 1
                    try:
                        test()
                    except Exception as error:
                        where = f"{name}, seed {seed}, {[str(d) for d in dtypes]}"
                        failures.append(f"{where}: {type(error).__name__}: {error}"[:400])
                    ran += oracle.fused(op)
        failures += _large(op, bench)
    return {"op": op.name, "checks": total, "kernels_ran": ran, "failures": failures}


def _checks(op: Op, call: Call, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "values", lambda: oracle.assert_right(op, call, seed)
    everything = oracle.differentiable(call)
    for positions in oracle.subsets(everything):
        yield f"vmap over {positions}", lambda p=positions: oracle.assert_rows(op, call, p, seed)


def _large(op: Op, bench: Bench) -> list[str]:
    """More than 2**31 elements: the last rows must come out as they do on their own."""
    if bench.smoke:
        return []
    torch.cuda.empty_cache()
    small = op.benchmarks[0].make(bench.device, torch.bfloat16)
    rows = small.args[0].shape[0]
    copies = 2**31 // small.args[0].numel() + 2
    args = tuple(
        x.repeat(copies, *(1,) * (x.dim() - 1)) if x.shape[:1] == (rows,) else x for x in small.args
    )
    wanted = oracle.differentiable(small)
    found = oracle.leaves(oracle.run(op.function, Call(args, small.kwargs), wanted))
    alone = oracle.leaves(oracle.run(op.function, small, wanted))
    wrong = [
        i
        for i, (a, b) in enumerate(zip(found, alone, strict=True))
        if a.shape[0] == copies * rows and not torch.equal(a[-rows:], b)
    ]
    return [f"more than 2**31 elements: results {wrong} differ"] if wrong else []


# ---- time


def variants(op: Op) -> dict[str, Callable[..., Any]]:
    """What is timed side by side."""
    torch._dynamo.reset()
    compiled = torch.compile(op.reference)
    return {"eager": op.reference, "compile": compiled, "opake": op.function}


def passes(function: Callable[..., Any], call: Call) -> dict[str, Callable[[], Any]]:
    """The forward pass and both passes of a call, as functions of nothing."""
    wanted = oracle.differentiable(call)
    leaves = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(call.args)]
    gradient = torch.randn_like(function(*call.args, **call.kwargs))

    def forward() -> Any:
        with torch.no_grad():
            return function(*call.args, **call.kwargs)

    def both() -> Any:
        out = function(*leaves, **call.kwargs)
        return out, torch.autograd.grad(out, [leaves[i] for i in wanted], gradient)

    return {"forward": forward, "both": both}


def shrunk(call: Call, rows: int) -> Call:
    """The first rows of the arguments that have as many as the first."""
    length = call.args[0].shape[:1]
    args = tuple(x[:rows].contiguous() if x.shape[:1] == length else x for x in call.args)
    return Call(args, call.kwargs)


def measure(op: Op, shape: Shape, bench: Bench, bandwidth: float) -> list[dict[str, Any]]:
    """Time every variant of an operator at one shape, in bf16."""
    dtype = torch.bfloat16
    call = shape.make(bench.device, dtype)
    call = shrunk(call, 4) if bench.smoke else call
    rows = []
    for variant, function in variants(op).items():
        if variant == "compile" and bench.smoke:
            continue
        row: dict[str, Any] = {"op": op.name, "shape": shape.label, "variant": variant}
        for name, run in passes(function, call).items():
            elements = shape.forward + (shape.backward if name == "both" else 0)
            bound = elements * dtype.itemsize / bandwidth * 1e3
            if bench.smoke:
                bound = float("nan")  # the inputs are smaller than it knows
            gpu = bench.gpu_ms(run)
            host, enqueue = bench.host_ms(run)
            row[name] = {
                "bound_ms": bound,
                "gpu_ms": gpu,
                "share": bound / gpu,
                "host_ms": host,
                "enqueue_ms": enqueue,
                "memory_mib": bench.memory_mib(run),
            }
            shares = (
                f"{bound / gpu:5.2f} of the bound, host {host:.4f} ms ({enqueue:.4f} to return)"
            )
            print(f"{op.name:16} {shape.label:14} {variant:8} {name:8} {gpu:.4f} ms, {shares}")
        rows.append(row)
    return rows


def crossover(op: Op, bench: Bench) -> dict[str, Any]:
    """Find from how many elements both passes end no later than eager's, on an idle queue."""
    whole = op.benchmarks[0].make(bench.device, torch.bfloat16)
    found: list[dict[str, float]] = []
    rows = 1
    while rows <= (2 if bench.smoke else whole.args[0].shape[0]):
        call = shrunk(whole, rows)
        eager = bench.host_ms(passes(op.reference, call)["both"])[0]
        ours = bench.host_ms(passes(op.function, call)["both"])[0]
        elements = max(x.numel() for x in call.args)
        found.append({"elements": elements, "eager_ms": eager, "opake_ms": ours})
        rows *= 4
    slower = [x["elements"] for x in found if x["opake_ms"] > x["eager_ms"]]
    pays = [x["elements"] for x in found if x["elements"] > max(slower, default=-1)]
    return {"op": op.name, "sizes": found, "pays_from": min(pays, default=None)}


def sweep(op: Op, bench: Bench) -> list[dict[str, Any]]:
    """Time both passes with every program size of every kernel, one kernel after the other."""
    rows = []
    for launch in op.launches:
        stock, best = launch.tiles, (float("inf"), launch.tiles)
        for tile in launch.sweep[: 1 if bench.smoke else None]:
            launch.tiles = {"": tile}
            times = {}
            for shape in op.benchmarks[: 1 if bench.smoke else 2]:
                call = shape.make(bench.device, torch.bfloat16)
                call = shrunk(call, 4) if bench.smoke else call
                for name, run in passes(op.function, call).items():
                    times[f"{shape.label} {name}"] = bench.gpu_ms(run)
            name = launch.kernel.__name__
            rows.append({"op": op.name, "kernel": name, "tile": str(tile), "gpu_ms": times})
            print(name, tile, {k: round(v, 4) for k, v in times.items()}, flush=True)
            best = min(best, (sum(times.values()), launch.tiles), key=lambda x: x[0])
        print(f"best for {launch.kernel.__name__}: {best[1]['']}, was {stock}")
        launch.tiles = best[1]  # for the kernels that follow; the process ends with the sweep
    return rows


# ---- the run


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long a part of the run took."""
    start = time.perf_counter()
    yield
    print(f"-- {what}: {time.perf_counter() - start:.1f} s", flush=True)


def main() -> int:
    """Run every part and write the file; the exit status tells whether all numbers were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--sweep", action="store_true", help="time program sizes and nothing else")
    parser.add_argument("--only", action="append", help="an operator; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    bench = Bench(options.smoke)
    if kernels.available("cpu")[0]:
        round_bfloat16()
    if not bench.cuda and not options.smoke:
        parser.error("there is no GPU; --smoke runs without one")
    ops = [op for op in kernels.ops() if not options.only or op.name in options.only]
    result: dict[str, Any] = describe(options.commit)
    result["copy_bytes_per_second"] = bandwidth = bench.bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    with kernels.config(min_elements=0):
        if options.sweep:
            with timed("sweep"):
                result["sweep"] = [row for op in ops for row in sweep(op, bench)]
        else:
            with timed("checks"):
                result["checks"] = [check(op, bench) for op in ops]
                print(json.dumps(result["checks"], indent=1))
            with timed("times"):
                result["times"] = [
                    row
                    for op in ops
                    for s in op.benchmarks
                    for row in measure(op, s, bench, bandwidth)
                ]
            with timed("crossover"):
                result["crossover"] = [crossover(op, bench) for op in ops]
                print(
                    json.dumps(
                        [{k: c[k] for k in ("op", "pays_from")} for c in result["crossover"]]
                    )
                )
    with open(options.output, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    wrong = any(row["failures"] or not row["kernels_ran"] for row in result.get("checks", ()))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
