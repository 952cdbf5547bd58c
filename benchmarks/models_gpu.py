"""Time whole models on a GPU, stock beside patched, over many sizes; writes a result file.

python benchmarks/models_gpu.py results.json [COMMIT] [--sizes 1x128,...] [--variants ...]
                                             [--passes train,infer] [--seconds S] [--smoke]

The model has the shape of Qwen2.5-0.5B, random weights, bf16, SDPA. ``train`` is a forward pass
with labels and a backward pass; ``infer`` a forward pass without gradients. ``ms`` is what a caller
waits on an idle queue, the lower quartile of calls in turns with the other variants';
``memory_mib`` the peak above what was allocated before, with no gradients alive, and
``working_mib`` with those of the step before. ``gpu_ms`` is what its kernels take together.
``ratio`` is to stock, the median over rounds of four calls.

Variants: ``stock``; ``kernels`` (``patched(model, kernels=True)``); ``loss_only`` (that, and the
model called with ``loss_only=True``); ``all`` (that, and every kernel at every size); ``guard``
(kernels that never pay, so what it costs to find that out); ``without NAME`` and ``only NAME``,
one concern switched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host import describe
from shapes import qwen2_500m
from torch.profiler import ProfilerActivity, profile

import opake
from opake.flags import UMBRELLAS

SIZES = ("1x128", "1x512", "4x512", "1x2048", "4x1024", "4x2048", "16x1024", "16x2048")
SCOPE = {"compat": False, "peft": False}
_MIN_ELEMENTS = {"all": 0, "guard": 1 << 62}
_LOSS_ONLY = ("loss_only", "all")


class Problem:
    """One model, a batch, and what is run of them."""

    def __init__(self, smoke: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        small = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128} if smoke else {}
        torch.manual_seed(0)
        model = qwen2_500m(**small).to(self.device, torch.bfloat16)
        self.model, self.vocabulary = model, model.config.vocab_size

    def run(self, passes: str, ids: torch.Tensor, loss_only: bool) -> Callable[[], None]:
        """Return the call that is timed."""
        options = {"loss_only": True} if loss_only else {}

        def train() -> None:
            self.model(input_ids=ids, labels=ids, **options).loss.backward()

        def infer() -> None:
            with torch.no_grad():
                self.model(input_ids=ids)

        self.model.train(passes == "train")
        return train if passes == "train" else infer

    def clear(self) -> None:
        """Let the gradients go."""
        self.model.zero_grad(set_to_none=True)


def scope(model: Any, variant: str, passes: str) -> Any:
    """Open what a variant is timed in."""
    if variant == "stock":
        return contextlib.nullcontext()
    how, _, name = variant.partition(" ")
    flags: dict[str, Any] = {"kernels": how != "only", "performance": how != "only", **SCOPE}
    flags |= {"min_elements": _MIN_ELEMENTS[how]} if how in _MIN_ELEMENTS else {}
    if name:
        flags[name] = how == "only"
    return opake.patched(model, mode="train" if passes == "train" else "infer", **flags)


def turns(problem: Problem, size: str, passes: str, names: list[str], seconds: float) -> Any:
    """Time the variants in turns, so that what drifts drifts under all of them."""
    examples, length = map(int, size.split("x"))
    shape = (examples, length)
    ids = torch.randint(problem.vocabulary, shape, device=problem.device)
    rows = {name: {"size": size, "passes": passes, "variant": name} for name in names}
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while not times[names[-1]] or time.perf_counter() < end:
        for name in names:
            with scope(problem.model, name, passes):
                run = problem.run(passes, ids, name in _LOSS_ONLY)
                if not times[name]:
                    rows[name] |= look(problem, run, name)
                once(problem, run)
                times[name].append([once(problem, run) for _ in range(4)])
    for name, row in rows.items():
        found = [statistics.median(each) for each in times[name]]
        stock = [statistics.median(each) for each in times[names[0]]]
        row["ms"] = statistics.quantiles([x for each in times[name] for x in each])[0]
        row["rounds"] = len(found)
        row["ratio"] = statistics.median(a / b for a, b in zip(found, stock, strict=True))
        print(
            f"{passes:6} {size:8} {name:28} {row['ms']:8.2f} ms {row['ratio']:5.3f} "
            f"{row['gpu_ms']:8.2f} ms of the GPU {row['working_mib']:8.0f} MiB "
            f"of {row['rounds']} rounds",
            flush=True,
        )
    return list(rows.values())


def look(problem: Problem, run: Callable[[], None], name: str) -> dict[str, Any]:
    """Return what a variant needs and runs, apart from its time."""
    run()
    problem.clear()
    found = {"memory_mib": memory(run), "working_mib": memory(run), "gpu_ms": busy(run)}
    return found | {"guard": {} if name == "stock" else opake.guard_stats(problem.model)}


def once(problem: Problem, run: Callable[[], None]) -> float:
    """Return the milliseconds of one call."""
    problem.clear()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def memory(run: Callable[[], None]) -> float:
    """Return the MiB that a call needs at its peak."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def busy(run: Callable[[], None]) -> float:
    """Return the milliseconds that all kernels of a call take on the GPU."""
    if not torch.cuda.is_available():
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in prof.key_averages()) / 1e3


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run every size and write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output")
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--passes", default="train,infer")
    parser.add_argument("--variants", default="stock,kernels")
    parser.add_argument("--apart", action="store_true", help="add every concern without and alone")
    parser.add_argument("--seconds", type=float, default=4, help="for each size and pass")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    names = options.variants.split(",")
    if options.apart:
        names += [f"{how} {name}" for how in ("only", "without") for name in UMBRELLAS["kernels"]]
    result: dict[str, Any] = {**describe(options.commit), "date": time.strftime("%Y-%m-%d")}
    result |= {"model": "Qwen2.5-0.5B, random weights, bf16, sdpa", "smoke": options.smoke}
    result["rows"] = []
    problem = Problem(options.smoke)
    for passes in options.passes.split(","):
        kept = [n for n in names if n != "loss_only" or passes == "train"]
        for size in ["2x16"] if options.smoke else options.sizes.split(","):
            seconds = 0 if options.smoke else options.seconds
            result["rows"] += turns(problem, size, passes, kept, seconds)
            Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
