"""Plot the GPU results: ``python benchmarks/plot.py`` writes docs/sdpa.png and docs/kernels.png.

``--table`` prints the kernels' table in Markdown instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]

OURS = "opake"
NAMES = {
    "compile": "torch.compile",
    "cce": "cut-cross-entropy",
    "opake-patches": "opake-patches",
    "torch": "torch's own",
}
# The ms of both passes on the GPU, and the MiB, to reach where products of matrices are the bound.
LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    ("linear_cross_entropy", "8192x4096x128256 frozen"): (25.0, 640),
    ("linear_cross_entropy", "8192x4096x128256 trained"): (38.0, 1650),
    ("linear_cross_entropy", "8192x896x151936 frozen"): (8.5, 400),
    ("linear_cross_entropy", "8192x896x151936 trained"): (12.0, 650),
    ("lora_qkv", "8192x4096x4096+2x1024 r16"): (1.45, 165),
    ("lora_mlp", "8192x4096x14336 r16"): (9.0, 1100),
    ("moe", "E64 K8 H2048 I1024 T8192"): (5.8, 1825),
}
# The share of the bound to reach, forward and both passes, and the ms on an idle queue.
TARGETS: dict[tuple[str, str], tuple[float, float, float | None]] = {
    ("rms_norm", "8192x4096"): (0.85, 0.75, 0.15),
    ("rms_norm", "8192x8192"): (0.92, 0.80, None),
    ("fused_add_rms_norm", "8192x4096"): (0.92, 0.80, None),
    ("layer_norm", "8192x4096"): (0.80, 0.70, None),
    ("swiglu", "8192x14336"): (0.98, 0.98, None),
    ("swiglu", "8192x4864"): (0.92, 0.95, None),
    ("geglu_tanh", "8192x14336"): (0.98, 0.98, None),
    ("geglu_exact", "8192x14336"): (0.92, 0.97, None),
    ("rope", "4x2048 32/8x128"): (0.85, 0.85, None),
    ("cross_entropy", "8192x128256"): (0.85, 0.90, None),
    ("cross_entropy", "4096x151936"): (0.85, 0.90, None),
}
COLOURS = {
    OURS: "#c1272d",
    "eager": "#b0b0b0",
    "torch": "#7f9f7f",
    "compile": "#5b8db8",
    "liger": "#8e6fa8",
    "cce": "#4f9da6",
    "opake-patches": "#d8a657",
}


def load(name: str) -> dict[str, Any]:
    """Read a file of results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def sdpa() -> None:
    """Time and memory of attention per example, by length, beside stock's functorch."""
    from matplotlib import pyplot as plt

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


# ---- kernels


def places(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of every operator and shape, by variant; those too small to move bytes left out."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["times"]:
        found.setdefault((row["op"], row["shape"]), {})[row["variant"]] = row
    return {k: v for k, v in found.items() if _bound(v) > 0.002}


def _bound(rows: dict[str, Row]) -> float:
    return max((row["both"]["bound_ms"] for row in rows.values() if "error" not in row), default=0)


def best(rows: dict[str, Row], name: str, field: str) -> tuple[str, float] | None:
    """Which peer has the least of a field, and how much; None where none ran."""
    found = [
        (
            row[name][field],
            NAMES.get(variant, variant) + "*" * row[name].get("overwrites_inputs", False),
        )
        for variant, row in rows.items()
        if variant != OURS and "error" not in row
    ]
    return (min(found)[1], min(found)[0]) if found else None


def table() -> str:
    """The kernels' results in Markdown; what a peer does better is set in bold at the peer."""
    result = load("kernels_h200.json")
    lines = [
        "| op, bf16 | bound | eager | best peer | opake: gpu, share of bound | host: best peer |"
        " opake | MiB: peer | opake |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (op, shape), rows in places(result).items():
        lines.append(_line(op, shape, rows))
    return "\n".join([*lines, "", _commits(result)])


def _line(op: str, shape: str, rows: dict[str, Row]) -> str:
    ours, eager = rows.get(OURS, {}), rows.get("eager", {})
    if "both" not in ours:
        return f"| {op} {shape} | | | | {ours.get('error', 'not measured')} | | | | |"
    cells = [f"{op} {shape}"]
    cells.append(" / ".join(f"{ours[x]['bound_ms']:.3f}" for x in ("forward", "both")))
    cells.append(_pair(eager, "gpu_ms"))
    peers = [best(rows, name, "gpu_ms") for name in ("forward", "both")]
    cells.append(
        " / ".join(
            _mark(peer, ours[name]["gpu_ms"])
            for name, peer in zip(("forward", "both"), peers, strict=True)
        )
    )
    shares = _shares(op, shape, ours)
    cells.append(f"{_pair(ours, 'gpu_ms')}{_over(op, shape, ours)}, {shares}")
    for field, digits in (("host_ms", 3), ("memory_mib", 0)):
        cells.append(_mark(best(rows, "both", field), ours["both"][field], digits))
        cells.append(f"{ours['both'][field]:.{digits}f}{_late(op, shape, field, ours)}")
    return f"| {' | '.join(cells)} |"


def _over(op: str, shape: str, ours: Row) -> str:
    limit = LIMITS.get((op, shape), (float("inf"), 0.0))[0]
    return f" (target {limit:g})" if ours["both"]["gpu_ms"] > limit else ""


def _late(op: str, shape: str, field: str, ours: Row) -> str:
    limit = LIMITS.get((op, shape), (0.0, float("inf")))[1]
    if field == "memory_mib" and ours["both"][field] > limit:
        return f" (target {limit:g})"
    target = TARGETS.get((op, shape), (0.0, 0.0, None))[2]
    late = field == "host_ms" and target is not None and ours["both"][field] > target
    return f" (target {target:.2f})" if late else ""


def _shares(op: str, shape: str, ours: Row) -> str:
    """The share of the bound that ours reaches, and the one to reach where it is less."""
    cells = []
    targets = TARGETS.get((op, shape), (0.0, 0.0, None))
    for name, target in zip(("forward", "both"), targets[:2], strict=True):
        share = ours[name]["share"]
        cells.append(f"{share:.2f}" + (f" (target {target:.2f})" if share < target else ""))
    return " / ".join(cells)


def _pair(row: Row, field: str) -> str:
    if "both" not in row:
        return "–"
    return " / ".join(f"{row[name][field]:.3f}" for name in ("forward", "both"))


def _mark(peer: tuple[str, float] | None, ours: float, digits: int = 3) -> str:
    if peer is None:
        return "–"
    name, value = peer
    text = f"{value:.{digits}f} ({name})"
    return f"**{text}**" if value < ours * 0.98 else text


def _commits(result: dict[str, Any]) -> str:
    about = sorted({f"{run['gpu']}, torch {run['torch'].split('+')[0]}" for run in result["runs"]})
    commits = sorted({row["commit"][:8] for row in result["times"]})
    return (
        f"Milliseconds, forward / forward and backward, on {'; '.join(about)}, commit "
        f"{', '.join(commits)}. Bold: what a peer does better by more than 2 %. "
        "A star: it writes to what it is given."
    )


def kernels() -> None:
    """Share of the bandwidth bound and host time of every operator and shape, beside its peers."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    result = load("kernels_h200.json")
    found = places(result)
    present = {variant for rows in found.values() for variant in rows}
    variants = [variant for variant in COLOURS if variant in present]
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 1.2 + 0.62 * len(found)), layout="constrained", sharey=True
    )
    panels = [("forward", "share"), ("both", "share"), ("both", "host_ms")]
    for axis, (name, field) in zip(axes, panels, strict=True):
        _bars(axis, found, variants, name, field)
    labels = [f"{op}\n{shape}" for op, shape in found]
    axes[0].set_yticks(range(len(labels)), labels, fontsize=7)
    axes[0].invert_yaxis()
    axes[0].set_title("forward: share of the bound", fontsize=9)
    axes[1].set_title("forward and backward: share of the bound", fontsize=9)
    axes[2].set_title("forward and backward on an idle queue, ms", fontsize=9)
    axes[2].set_xscale("log")
    axes[2].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[2].xaxis.set_major_formatter("{x:g}")
    axes[2].xaxis.set_minor_locator(NullLocator())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    gpu = result["runs"][0]["gpu"]
    figure.suptitle(
        f"bf16, {gpu}; bound: bytes over copy bandwidth, or matrix products at 790 TFLOP/s; "
        "red ring: a peer is more than 2 % better",
        fontsize=9,
    )
    figure.savefig(ROOT / "docs" / "kernels.png", dpi=120)


def _bars(
    axis: Any, found: dict[Any, dict[str, Row]], variants: list[str], name: str, field: str
) -> None:
    """One bar for every variant that ran, and a ring at ours where it is not the best."""
    height = 0.84 / len(variants)
    for k, variant in enumerate(variants):
        there = [
            (i - 0.42 + height * (k + 0.5), rows[variant][name][field])
            for i, rows in enumerate(found.values())
            if name in rows.get(variant, {})
        ]
        label = NAMES.get(variant, variant)
        values = [value for _, value in there]
        axis.barh(
            [at for at, _ in there], values, height * 0.95, color=COLOURS[variant], label=label
        )
        if variant == OURS:
            lost = [x for x in there if _lost(list(found.values())[round(x[0])], name, field)]
            axis.plot([v for _, v in lost], [at for at, _ in lost], "o", mfc="none", mec="red")
    if field == "share":
        axis.axvline(1.0, color="black", linewidth=0.6)
        axis.set_xlim(0, 1.3)


def _lost(rows: dict[str, Row], name: str, field: str) -> bool:
    """Whether some peer is better than ours by more than 2 %."""
    peer = best(rows, name, "host_ms" if field == "host_ms" else "gpu_ms")
    ours = rows[OURS][name]["host_ms" if field == "host_ms" else "gpu_ms"]
    return peer is not None and peer[1] < ours * 0.98


def main() -> None:
    """Draw everything, or print the table."""
    parser = argparse.ArgumentParser(description="Plot the GPU results.")
    parser.add_argument("--table", action="store_true", help="print the kernels' table instead")
    if parser.parse_args().table:
        print(table())
        return
    import matplotlib

    matplotlib.use("Agg")
    sdpa()
    kernels()


if __name__ == "__main__":
    main()
