"""Plot the GPU results: ``python benchmarks/plot.py`` writes docs/sdpa.png and docs/kernels.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def sdpa() -> None:
    """Time and memory of attention per example, by length, beside stock's functorch."""
    result = load("sdpa_h200.json")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, (field, label) in zip(
        axes, [("device_ms", "ms"), ("peak_mib", "peak MiB")], strict=True
    ):
        for side, name in [("ours", "opake"), ("stock", "stock vmap"), ("batched", "no vmap")]:
            rows = [row for row in result["rows"] if row["mask"] == "padding"]
            lengths = [row["length"] for row in rows]
            axis.loglog(lengths, [row[side][field] for row in rows], marker="o", label=name)
        axis.set(xlabel="length", ylabel=label, xticks=lengths, xticklabels=lengths)
        axis.minorticks_off()
    axes[0].legend()
    examples = result["shape"]["examples"]
    figure.suptitle(f"vmap(grad) of SDPA, {examples} padded examples, bf16, {result['gpu']}")
    figure.savefig(ROOT / "docs" / "sdpa.png", dpi=120)


def kernels() -> None:
    """GPU time of every operator, forward and backward, as a share of the bandwidth bound."""
    result = load("kernels_h200.json")
    rows = [row for row in result["times"] if row["both"]["bound_ms"] > 0.01]
    labels = list(dict.fromkeys(f"{row['op']}\n{row['shape']}" for row in rows))
    figure, axis = plt.subplots(figsize=(9, 3.5), layout="constrained")
    for i, variant in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        shares = [row["both"]["share"] for row in rows if row["variant"] == variant]
        axis.bar([x + 0.25 * i for x in range(len(shares))], shares, 0.23, label=variant)
    axis.set_xticks([x + 0.25 for x in range(len(labels))], labels)
    axis.set_ylabel("share of copy bandwidth")
    axis.legend(loc="lower right", ncols=3)
    figure.suptitle(f"forward and backward, bf16, {result['gpu']}")
    figure.savefig(ROOT / "docs" / "kernels.png", dpi=120)


if __name__ == "__main__":
    sdpa()
    kernels()
