"""Other implementations of our operators, each timed in a process and install target of its own.

python benchmarks/peers.py PEER out.json [--calls FILE] [--only OP] [--smoke]

PEER is eager, compile (both ours, in plain PyTorch), torch (its own fused operators), liger
(liger-kernel 0.8.5), cce (cut-cross-entropy 25.1.1) or opake-patches (0.16.1; that package is
called opake too, so PYTHONPATH must lead to it and not here). What they are run on comes from a
file that a process with our opake writes, which is started where none is given. Peers are called by
their public names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from host import describe
from kernel_calls import (
    COMPILED,
    TINY,
    Passes,
    benchmark_call,
    bounds,
    cut,
    described,
    made,
    per_example,
    size,
    small_case,
    timed_shapes,
)
from kernel_timing import Bench, measured
from peer_functions import (
    Functions,
    cce_functions,
    liger_functions,
    seed_functions,
    torch_functions,
)

ROOT = Path(__file__).resolve().parents[1]


def ours(compiled: bool) -> Functions:
    """The references of our operators."""
    from opake import kernels

    def function(op: Any) -> Callable[..., Any]:
        if not compiled:
            return op.reference
        return torch.compile(op.reference, dynamic=False)

    return {op.name: [function(op)] for op in kernels.ops()}


PEERS: dict[str, Callable[[], Functions]] = {
    "eager": lambda: ours(False),
    "compile": lambda: ours(True),
    "torch": torch_functions,
    "liger": liger_functions,
    "opake-patches": seed_functions,
    "cce": cce_functions,
}

# ---- what they are run on


def write_calls(path: str, only: list[str] | None, bench: Bench, bandwidth: float) -> None:
    """Describe every benchmark of our operators in a file, with a small case and what is true."""
    from opake import kernels

    found: dict[str, Any] = {"ops": {}}
    for op in kernels.ops():
        if only and op.name not in only:
            continue
        found["ops"][op.name] = [
            _described(op, shape, bench, bandwidth) for shape in timed_shapes(op, bench.smoke)
        ]
        if bench.cuda:
            torch.cuda.empty_cache()
    torch.save(found, path)


def _described(op: Any, shape: Any, bench: Bench, bandwidth: float) -> dict[str, Any]:
    call = benchmark_call(op, shape, bench.device, bench.smoke)
    return {
        "label": shape.label,
        "size": size(call),
        "call": tuple(described(call)),
        "bounds": bounds(shape, bench.smoke, bandwidth),
        "small": small_case(op.reference, call),
    }


def host_row(
    name: str, peer: str, function: Callable[..., Any], call: Any, like: Any, bench: Bench
) -> dict[str, Any]:
    """Host time of both passes on a tiny input, plain and under ``vmap(grad)``."""
    row: dict[str, Any] = {"op": name, "variant": peer, "elements": size(call)}
    if size(call) > TINY:
        return row | {"error": "no benchmark of this operator is tiny"}
    runs: dict[str, Callable[[], Callable[[], Any]]] = {
        "plain_us": lambda: Passes(function, call).both,
        "vmap_us": lambda: per_example(function, call, like, 4),
    }
    for kind, make in runs.items():
        try:
            run = make()
            for _ in range(3):
                run()
            row[kind] = bench.call_us(run)
        except Exception as error:
            row[f"{kind.removesuffix('_us')}_error"] = f"{type(error).__name__}: {error}"[:300]
    times = [f"{k} {row[k]:.0f}" if k in row else f"no {k}" for k in runs]
    print(f"{name:18} {peer:14} {', '.join(times)}", flush=True)
    return row


# ---- a peer's process


def release(peer: str) -> str | None:
    """The version of what a peer is installed from."""
    try:
        return version({"liger": "liger-kernel", "cce": "cut-cross-entropy"}.get(peer, peer))
    except PackageNotFoundError:
        return None


def run(peer: str, calls: dict[str, Any], bench: Bench, write: Callable[..., None]) -> None:
    """Time a peer at every shape, then its host; write what there is after each operator."""
    times: list[dict[str, Any]] = []
    host: list[dict[str, Any]] = []
    try:
        functions = PEERS[peer]()
        error = f"{peer} has no such operator"
    except Exception as problem:
        functions, error = {}, f"{type(problem).__name__}: {problem}"[:400]
    for name, shapes in calls["ops"].items():
        found = functions.get(name)
        for shape in shapes:
            row = {"op": name, "shape": shape["label"], "variant": peer, "version": release(peer)}
            if found is None:
                times.append(row | {"error": error})
                continue
            if peer == "compile":
                torch._dynamo.reset()
            call = made(shape["call"], bench.device)
            small = COMPILED if peer == "compile" else shape["small"]
            times.append(measured(bench, row, found, call, shape["bounds"], small))
        if found is not None:
            smallest = min(shapes, key=lambda x: x["size"])
            like = made(smallest["call"], bench.device)
            tiny = cut(like, 1)
            host.append(host_row(name, peer, _first(found, tiny), tiny, like, bench))
        write(times, host)


def _first(functions: list[Callable[..., Any]], call: Any) -> Callable[..., Any]:
    """The first that can be called so."""
    for function in functions:
        try:
            Passes(function, call)
        except Exception:  # the next one, or the last, whose error then stands in the table
            continue
        return function
    return functions[-1]


def _calls_of_ours(arguments: list[str]) -> str:
    path = str(Path(tempfile.mkdtemp()) / "calls.pt")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    command = [sys.executable, __file__, "calls", path, *arguments]
    subprocess.run(command, env=environment, check=True)
    return path


def main() -> None:
    """Write the rows of one peer, or the file of calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=[*PEERS, "calls"])
    parser.add_argument("output")
    parser.add_argument("--calls", help="a file of what to run")
    parser.add_argument("--only", action="append", help="an operator; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    bench = Bench(options.smoke)
    if options.peer == "calls":
        write_calls(options.output, options.only, bench, bench.bandwidth())
        return
    passed = [f"--only={name}" for name in options.only or ()] + ["--smoke"] * options.smoke
    calls = torch.load(options.calls or _calls_of_ours(passed), weights_only=False)

    def write(times: list[dict[str, Any]], host: list[dict[str, Any]]) -> None:
        found = describe() | {"peer": options.peer, "times": times, "host_tiny": host}
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")

    run(options.peer, calls, bench, write)


if __name__ == "__main__":
    main()
