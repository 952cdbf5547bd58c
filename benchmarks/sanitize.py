"""Launch every kernel on small drawn inputs, for a sanitizer to watch.

compute-sanitizer --tool memcheck|racecheck|initcheck python benchmarks/sanitize.py [draws]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import kernel_oracle as oracle

from opake import kernels

DTYPES = (torch.bfloat16, torch.float32)


def main(draws: int) -> None:
    """Run both passes of every operator."""
    for op in kernels.ops():
        for seed in range(draws):
            call = oracle.drawn(op, seed, "cuda", DTYPES[seed % len(DTYPES)])
            wanted = oracle.differentiable(call)
            oracle.run(op.function, call, wanted)
        torch.cuda.synchronize()
        print(op.name, kernels.last_backend(op), flush=True)


if __name__ == "__main__":
    with kernels.config(min_elements=0):
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
