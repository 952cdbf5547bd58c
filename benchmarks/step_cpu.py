"""Per-example gradients on the CPU: the patched model beside stock's ``vmap(grad)``.

    python benchmarks/step_cpu.py                 # 7 pairs, writes benchmarks/results/step_cpu.json

A model of SmolLM2-135M's shape with LoRA on every linear layer, without a padding mask (stock
fails with one). Each measurement runs in a process of its own with one thread, stock and patched
in turn. On both sides glibc keeps what is freed and never maps a block on its own: memory that is
given back to the system is paid for by page faults when it is taken again, and the side that frees
more would pay more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "step_cpu.json"
# glibc ignores an mmap threshold above 32 MiB, which the logits exceed; no mappings is the same.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "OMP_NUM_THREADS": "1"}


def measure(side: str, batch: int, length: int) -> dict[str, float]:
    """Time one step after a warm-up step, in this process."""
    import contextlib

    import peft
    import torch
    from shapes import smollm2_135m

    import opake

    torch.manual_seed(0)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=8, target_modules=linear, init_lora_weights=False)
    model = peft.get_peft_model(smollm2_135m(), lora).train()
    fmodel, params = opake.functional.make_functional(model)
    ids = torch.randint(0, 49152, (batch, length))

    def loss(p: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        row = row[None]
        return fmodel(p, input_ids=row, labels=row, use_cache=False).loss

    step = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0))
    seconds, cpu_seconds = [], []
    with opake.patched(model) if side == "patched" else contextlib.nullcontext(), torch.no_grad():
        for _ in range(3):
            start, cpu = time.perf_counter(), time.process_time()
            step(params, ids)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": min(seconds[1:]), "cpu_seconds": min(cpu_seconds[1:]), "peak_gib": peak}


def compare(pairs: int, batch: int, length: int) -> dict[str, object]:
    """Run ``pairs`` measurements of each side in turn."""
    runs: dict[str, list[dict[str, float]]] = {"stock": [], "patched": []}
    for number in range(pairs):
        order = ("stock", "patched") if number % 2 == 0 else ("patched", "stock")
        for side in order:
            command = [sys.executable, __file__, "--side", side]
            command += ["--batch", str(batch), "--length", str(length)]
            out = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, **MALLOC}
            )
            runs[side].append(json.loads(out.stdout.splitlines()[-1]))
            print(side, runs[side][-1], flush=True)
    both = list(zip(runs["patched"], runs["stock"], strict=True))

    def ratio(key: str) -> float:
        return statistics.median(patched[key] / stock[key] for patched, stock in both)

    return {
        "batch": batch,
        "length": length,
        "pairs": pairs,
        "time_ratio_paired_median": ratio("seconds"),
        "cpu_time_ratio_paired_median": ratio("cpu_seconds"),
        **{
            f"{side}_{key}_median": statistics.median(run[key] for run in runs[side])
            for side in runs
            for key in ("seconds", "cpu_seconds", "peak_gib")
        },
        "runs": runs,
    }


def environment() -> dict[str, object]:
    """Return what the numbers depend on."""
    from host import describe

    cores = {"processor": _processor(), "cores": os.cpu_count(), "threads": 1}
    return {**describe(), **cores}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("stock", "patched"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.batch, options.length)))
        return
    result = {**environment(), **compare(options.pairs, options.batch, options.length)}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))


if __name__ == "__main__":
    main()
