"""What a scope costs: import, plan, enter and exit. Run with ``make bench``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from shapes import smollm2_135m

import opake


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):  # no weight is read
        return smollm2_135m()


def test_plan_cold(benchmark):
    code = (
        "import time, torch, transformers.models.llama.modeling_llama\n"
        "from shapes import smollm2_135m\n"
        "with torch.device('meta'): model = smollm2_135m()\n"
        "import opake; opake.patched, opake.PatchSet\n"
        "t = time.perf_counter(); opake.patched(model); print(time.perf_counter() - t)\n"
    )

    def cold():
        out = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            cwd="benchmarks",
        )
        return float(out.stdout)

    times = benchmark.pedantic(lambda: [cold() for _ in range(3)], rounds=1)
    benchmark.extra_info["seconds"] = sorted(times)
    assert sorted(times)[1] < 0.030


def test_plan_warm(benchmark, model):
    benchmark(opake.patched, model)


def test_enter_and_exit(benchmark, model):
    scope = opake.patched(model)

    def through():
        with scope:
            pass

    benchmark(through)
    assert benchmark.stats.stats.median < 0.005


def test_import_over_torch(benchmark):
    code = (
        "import time, torch\n"
        "t = time.perf_counter(); import opake; print(time.perf_counter() - t)\n"
    )

    def once():
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        return float(out.stdout)

    times = benchmark.pedantic(lambda: [once() for _ in range(3)], rounds=1)
    benchmark.extra_info["seconds"] = sorted(times)
    assert sorted(times)[1] < 0.100
