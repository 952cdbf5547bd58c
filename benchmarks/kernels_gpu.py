"""Check every kernel on a GPU against fp64, then time it beside eager, torch.compile and peers.

python benchmarks/kernels_gpu.py results.json [commit] [--parts LIST] [--only OP] [--peers DIR]
python benchmarks/kernels_gpu.py benchmarks/results/kernels_h200.json --merge results.json ...

Parts: ``checks`` (numbers of ``--examples`` draws per dtype, vmap, shapes of the benchmarks, CUDA
graphs, synchronisation, devices), ``large`` (more than 2**31 elements), ``times``, ``host`` (tiny
inputs; ``--profile`` adds where the time of ours goes), ``crossover``, and ``sweep``, which tries
program sizes and is run only when named.

``gpu_ms`` is a CUDA graph's replay, or, of what waits for the GPU and cannot be captured
(``captured`` is false), the time between two events; ``host_ms`` is what a caller waits on an idle
queue, from the call to the end of the work; ``enqueue_ms`` is that without waiting for the end.
``bound_ms`` is the time to move the bytes that must move at the copy bandwidth measured in the same
run, or that of the matrix products at 790 TFLOP/s if it is longer; ``share`` is bound over gpu
time. ``memory_mib`` is the peak above what was allocated before: outputs, saved tensors,
temporaries, gradients. ``difference`` is the largest error on a few tokens, over the tensor's
largest number; ``no_difference`` says why there is none. What writes to its arguments gets them
back between calls, outside of the time, and ``overwrites_inputs``; in a graph it runs on what it
wrote.

``--peers DIR`` has folders ``liger``, ``cce`` and ``opake-patches``, of unpacked wheels.
``--smoke`` runs everything once on tiny inputs, on the CPU if need be (with TRITON_INTERPRET=1, for
the kernels to run there).
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
import torch
from host import describe
from kernel_calls import (
    COMPILED,
    Passes,
    benchmark_call,
    bounds,
    cut,
    size,
    small_case,
    timed_shapes,
    tokens,
)
from kernel_checks import check, check_large
from kernel_results import Rows, merge, save, stamped
from kernel_timing import Bench, measured
from peer_functions import torch_functions

from opake import kernels
from opake.kernels import Op

PARTS = ("checks", "large", "times", "host", "crossover")
INSIDE = ("eager", "compile", "torch", "opake")
TIMED = (*INSIDE, "liger", "cce", "opake-patches")

# ---- times


def variants(op: Op, names: list[str]) -> Iterator[tuple[str, list[Callable[..., Any]]]]:
    """What is timed side by side in this process."""
    for name in names:
        if name == "opake":
            yield name, [op.function]
        elif name == "eager":
            yield name, [op.reference]
        elif name == "compile":
            torch._dynamo.reset()
            yield name, [torch.compile(op.reference, dynamic=False)]
        elif name == "torch" and op.name in torch_functions():
            yield name, torch_functions()[op.name]


def times(op: Op, bench: Bench, names: list[str], bandwidth: float) -> Rows:
    """Time every variant of an operator at its shapes, in bf16."""
    rows = []
    for shape in timed_shapes(op, bench.smoke):
        call = benchmark_call(op, shape, bench.device, bench.smoke)
        least = bounds(shape, bench.smoke, bandwidth)
        small = small_case(op.reference, call)
        for name, functions in variants(op, names):
            row = {"op": op.name, "shape": shape.label, "variant": name}
            case = COMPILED if name == "compile" else small
            rows.append(measured(bench, row, functions, call, least, case))
    return rows


def host(op: Op, bench: Bench, names: list[str], profile: str | None) -> Rows:
    """Host time on a tiny input."""
    calls = [
        benchmark_call(op, shape, bench.device, bench.smoke)
        for shape in timed_shapes(op, bench.smoke)
    ]
    like = min(calls, key=size)
    tiny = cut(like, 1)
    del calls
    rows = []
    for name, functions in variants(op, names):
        rows.append(peers.host_row(op.name, name, functions[0], tiny, like, bench))
        if profile and name == "opake":
            _profile(op, Passes(op.function, tiny).both, bench, f"{profile}.{op.name}.txt")
    return rows


def _profile(op: Op, run: Callable[[], Any], bench: Bench, path: str) -> None:
    profiler, count = cProfile.Profile(), 1 if bench.smoke else 1000
    run()
    with profiler:
        for _ in range(count):
            run()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
    Path(path).write_text(text.getvalue())
    print(
        f"-- {count} calls of {op.name}, profiled: {path}",
        *text.getvalue().splitlines()[:22],
        sep="\n",
    )


def crossover(op: Op, bench: Bench) -> dict[str, Any]:
    """Find from how many elements both passes end no later than eager's, on an idle queue."""
    whole = benchmark_call(op, timed_shapes(op, bench.smoke)[0], bench.device, bench.smoke)
    found: list[dict[str, float]] = []
    count = 1
    while count <= (2 if bench.smoke else tokens(whole)):
        call = cut(whole, count)
        eager = bench.host_ms(Passes(op.reference, call).both)[0]
        ours = bench.host_ms(Passes(op.function, call).both)[0]
        elements = op.work(*call.args, **call.kwargs) if op.work else size(call)
        found.append({"tokens": count, "elements": elements, "eager_ms": eager, "opake_ms": ours})
        count *= 4
    slower = [x["elements"] for x in found if x["opake_ms"] > x["eager_ms"]]
    pays = [x["elements"] for x in found if x["elements"] > max(slower, default=-1)]
    row = {"op": op.name, "pays_from": min(pays, default=None), "sizes": found}
    ratios = ", ".join(f"{x['tokens']}: {x['opake_ms'] / x['eager_ms']:.2f}" for x in found)
    print(f"{op.name:18} pays from {row['pays_from']} elements; ours/eager by tokens {ratios}")
    return row


def sweep(op: Op, bench: Bench) -> Rows:
    """Time both passes with every program size of every kernel, one kernel after the other."""
    rows = []
    for launch in op.launches:
        stock, best = launch.tiles, (float("inf"), launch.tiles)
        for tile in launch.sweep[: 1 if bench.smoke else None]:
            launch.tiles = {"": tile}
            found = {}
            for shape in timed_shapes(op, bench.smoke)[:2]:
                passes = Passes(op.function, benchmark_call(op, shape, bench.device, bench.smoke))
                for name, run in (("forward", passes.forward), ("both", passes.both)):
                    found[f"{shape.label} {name}"] = bench.gpu_ms(run)
            name = launch.kernel.__name__
            rows.append({"op": op.name, "kernel": name, "tile": str(tile), "gpu_ms": found})
            print(name, tile, {k: round(v, 4) for k, v in found.items()}, flush=True)
            best = min(best, (sum(found.values()), launch.tiles), key=lambda x: x[0])
        if launch.sweep:
            print(f"best for {launch.kernel.__name__}: {best[1]['']}, was {stock}")
        launch.tiles = best[1]  # for the kernels that follow; the process ends with the sweep
    return rows


# ---- peers, each in its own process


def beside(
    options: argparse.Namespace, bench: Bench, bandwidth: float
) -> Iterator[dict[str, Rows]]:
    """Run the processes of peers, one after the other, and yield the rows of each."""
    with tempfile.TemporaryDirectory() as folder:
        calls = f"{folder}/calls.pt"
        peers.write_calls(calls, options.only, bench, bandwidth)
        for peer in ("liger", "cce", "opake-patches"):
            if peer not in options.variants:
                continue
            out = f"{folder}/{peer}.json"
            command = [sys.executable, peers.__file__, peer, out, "--calls", calls]
            command += ["--smoke"] * options.smoke
            target = str((Path(options.peers) / peer).resolve())
            with timed(peer):
                _spawned(command, target, folder, options.peer_seconds)
            found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
            yield {k: found.get(k, []) for k in ("times", "host_tiny")}


def _spawned(command: list[str], target: str, folder: str, seconds: float) -> None:
    """Run a peer where its install target is, and this opake is not."""
    # One that has an __init__ hides one that has none, wherever they stand on the path.
    others = [
        p
        for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if p and not (Path(p) / "opake" / "kernels").is_dir()
    ]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([target, *others]))
    try:
        ended = subprocess.run(command, env=environment, cwd=folder, check=False, timeout=seconds)
        if ended.returncode:
            print(f"-- it ended with {ended.returncode}; what it wrote until then is kept")
    except subprocess.TimeoutExpired:
        print(f"-- it took more than {seconds:.0f} s; what it wrote until then is kept")


# ---- the run


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long a part of the run took."""
    start = time.perf_counter()
    yield
    print(f"-- {what}: {time.perf_counter() - start:.1f} s", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output")
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the run, by commas")
    parser.add_argument("--only", action="append", help="an operator; may be repeated")
    parser.add_argument("--variants", default=",".join(TIMED), help="what is timed, by commas")
    parser.add_argument("--peers", help="the folder of peers' install targets")
    parser.add_argument("--peer-seconds", type=float, default=300, help="for each peer")
    parser.add_argument("--examples", type=int, default=25, help="draws per dtype")
    parser.add_argument("--profile", action="store_true", help="write profiles beside the output")
    parser.add_argument("--sweep", action="store_true", help="the same as --parts sweep")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--merge", nargs="+", help="files to put into the output; nothing is run")
    options = parser.parse_args()
    options.parts = ["sweep"] if options.sweep else options.parts.split(",")
    options.variants = options.variants.split(",")
    for known, given in (((*PARTS, "sweep"), options.parts), (TIMED, options.variants)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    if not options.merge and not options.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; --smoke runs without one")
    return options


def attempted(part: str, op: Op, work: Callable[[Op], Rows], result: dict[str, Any]) -> Rows:
    """The rows of one part of one operator; where it breaks off, a row of the errors instead."""
    with timed(f"{part} of {op.name}"):
        try:
            return work(op)
        except Exception as error:  # the others still want to be measured
            text = f"{type(error).__name__}: {error}"[:400]
            print(f"FAILED {part} of {op.name}: {text}", flush=True)
            row = {"op": op.name, "part": part, "error": text}
            result.setdefault("errors", []).extend(stamped([row], result["runs"][0]["commit"]))
            return []


def measure(options: argparse.Namespace, bench: Bench, result: dict[str, Any]) -> None:
    """Run the parts that were asked for, saving what there is after each operator."""
    run = result["runs"][0]
    commit, bandwidth = run["commit"], run["copy_bytes_per_second"]
    inside = [name for name in INSIDE if name in options.variants]
    inside = [name for name in inside if name != "compile" or not bench.smoke]
    examples = 1 if bench.smoke else options.examples
    tiny = [name for name in inside if name != "compile"]
    profile = str(Path(options.output).with_suffix("")) if options.profile else None
    works: dict[str, tuple[str, Callable[[Op], Rows]]] = {
        "checks": ("checks", lambda op: [check(op, bench, examples)]),
        "large": ("large", lambda op: [check_large(op, bench)]),
        "times": ("times", lambda op: times(op, bench, inside, bandwidth)),
        "host": ("host_tiny", lambda op: host(op, bench, tiny, profile)),
        "crossover": ("crossover", lambda op: [crossover(op, bench)]),
        "sweep": ("sweep", lambda op: sweep(op, bench)),
    }
    ops = [op for op in kernels.ops() if not options.only or op.name in options.only]
    for part, (section, work) in works.items():
        if part not in options.parts:
            continue
        for op in ops:
            rows = attempted(part, op, work, result)
            for failure in (x for row in rows for x in row.get("failures", ())):
                print(f"FAILED {op.name}: {failure}")
            result.setdefault(section, []).extend(stamped(rows, commit))
            save(options.output, result)
    if options.peers and {"times", "host"} & set(options.parts):
        for found in beside(options, bench, bandwidth):
            for section, rows in found.items():
                result.setdefault(section, []).extend(stamped(rows, commit))
            save(options.output, result)


def main() -> int:
    """Run the parts and write the file; the exit status tells whether all numbers were right."""
    options = arguments()
    if options.merge:
        merge(options.output, options.merge)
        return 0
    bench = Bench(options.smoke)
    if kernels.available("cpu")[0]:
        from interpreter import round_bfloat16

        round_bfloat16()
    run = describe(options.commit) | {"smoke": options.smoke, "date": time.strftime("%Y-%m-%d")}
    run["copy_bytes_per_second"] = bandwidth = bench.bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s, commit {run['commit'] or 'unknown'}")
    result: dict[str, Any] = {"runs": [run]}
    with kernels.config(min_elements=0):
        measure(options, bench, result)
    checks = result.get("checks", [])
    for row in checks:
        print(
            f"{row['op']:18} {row['checks']} checks, kernels in {row['kernels_ran']}, "
            f"{len(row['failures'])} failed"
        )
    failed = [row for row in (*checks, *result.get("large", ())) if row["failures"]]
    failed += result.get("errors", [])
    return int(bool(failed) or any(not row["kernels_ran"] for row in checks))


if __name__ == "__main__":
    sys.exit(main())
