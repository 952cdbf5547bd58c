"""What the demo shows: a progress bar, a plot, a JSON log and a verdict."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from checks import MAX_GRADIENT_ERROR
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from training import Data, Observer, Outcome, Settings, Step

import opake

_PACKAGES = ("torch", "transformers", "peft", "dp-accounting")

_TRAIN, _VALIDATION, _EPSILON = "#9db4c8", "#1f4e79", "#c8553d"


class ProgressReport(Observer):
    """Shows the plan once, then a bar with the latest loss and epsilon."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("DP-SGD"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("ε {task.fields[epsilon]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("steps", total=steps, loss="–", epsilon="0")

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planned(self, table: object) -> None:
        print(table)
        self._progress.start()

    def validated(self, step: int, loss: float) -> None:
        self._console.print(f"step {step:>3}  validation loss {loss:.3f}", highlight=False)

    def stepped(self, step: Step) -> None:
        loss = {} if step.train_loss is None else {"loss": f"{step.train_loss:.3f}"}
        self._progress.update(self._task, advance=1, epsilon=f"{step.epsilon:.2f}", **loss)


def passed(outcome: Outcome) -> bool:
    """Say whether both checks hold."""
    return outcome.gradient_error <= MAX_GRADIENT_ERROR and not outcome.differences


def print_verdict(console: Console, outcome: Outcome, out: Path) -> None:
    """Print where the run ended, what the checks compared and found, and where the files are."""
    losses = [outcome.initial_validation_loss]
    losses += [step.validation_loss for step in outcome.steps if step.validation_loss is not None]
    gradients = "passed" if outcome.gradient_error <= MAX_GRADIENT_ERROR else "FAILED"
    restored = "FAILED" if outcome.differences else "passed"
    slots = ", ".join(f"{count:,} {kind}" for kind, count in outcome.compared_slots.items())
    lines = [
        f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f} at ε = {epsilon(outcome):.3f}: "
        f"{len(outcome.steps)} steps in {outcome.seconds['steps']:.1f} s, validation in "
        f"{outcome.seconds['validation']:.1f} s",
        f"gradients {gradients}: largest error {outcome.gradient_error:.1e} against one backward "
        f"pass per example on the unpatched model (at most {MAX_GRADIENT_ERROR:.0e})",
        f"restored {restored}: {sum(outcome.compared_slots.values()):,} slots compared by identity "
        f"({slots})",
        *(f"  {difference}" for difference in outcome.differences),
        f"written to {out}: {', '.join(sorted(file.name for file in out.iterdir()))}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def epsilon(outcome: Outcome) -> float:
    """Return the epsilon that the whole run spent."""
    return outcome.steps[-1].epsilon if outcome.steps else 0.0


def write_log(path: Path, name: str, settings: Settings, data: Data, outcome: Outcome) -> None:
    """Write the run as JSON: configuration, versions, steps, timings in seconds, checks."""
    log: dict[str, Any] = {
        "model": name,
        "settings": asdict(settings),
        "train_examples": data.train_size,
        "validation_examples": len(data.validation["input_ids"]),
        "neighbouring_relation": "add or remove one example",
        "versions": {
            "python": platform.python_version(),
            "opake": opake.__version__,
            **{package: metadata.version(package) for package in _PACKAGES},
        },
        "threads": torch.get_num_threads(),
        "initial_validation_loss": outcome.initial_validation_loss,
        "steps": [asdict(step) for step in outcome.steps],
        "epsilon": epsilon(outcome),
        "outside_epsilon": ["draw", "microbatches", "train_loss", "clipped_share"],
        "seconds": outcome.seconds,
        "checks": {
            "passed": passed(outcome),
            "max_gradient_error": outcome.gradient_error,
            "compared_slots": outcome.compared_slots,
            "differences": outcome.differences,
        },
    }
    path.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")


def plot(path: Path, name: str, settings: Settings, data: Data, outcome: Outcome) -> None:
    """Draw both losses (left axis) and epsilon (right axis) over the steps."""
    # Not through pyplot: a bare figure renders with Agg, whatever backend is configured.
    figure = Figure(figsize=(8.0, 4.8), dpi=150, layout="constrained")
    losses = figure.add_subplot()
    budget = losses.twinx()
    drawn = [(step.step, step.train_loss) for step in outcome.steps if step.train_loss is not None]
    validated = [(0, outcome.initial_validation_loss)] + [
        (step.step, step.validation_loss)
        for step in outcome.steps
        if step.validation_loss is not None
    ]
    spent = [(0, 0.0), *((step.step, step.epsilon) for step in outcome.steps)]
    handles = [
        _line(losses, drawn, "o-", color=_TRAIN, markersize=3.5, label="training loss (draw)"),
        _line(losses, validated, "o-", color=_VALIDATION, label="validation loss"),
        _line(budget, spent, "--", color=_EPSILON, label="privacy loss ε"),
    ]
    _decorate(losses, budget, name, settings, data)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def _line(axes: Axes, points: list[tuple[int, float]], style: str, **options: Any) -> Any:
    return axes.plot([x for x, _ in points], [y for _, y in points], style, **options)[0]


def _decorate(losses: Axes, budget: Axes, name: str, settings: Settings, data: Data) -> None:
    losses.set_title(
        f"{name}, DP-SGD: {settings.expected_batch} of {data.train_size:,} examples expected per "
        f"step, C = {settings.max_norm:g}, σ = {settings.noise_multiplier:g}",
        fontsize=10,
        loc="left",
    )
    losses.set_xlabel("optimizer step")
    losses.set_ylabel("loss (nats per token)", color=_VALIDATION)
    budget.set_ylabel(f"ε at δ = {settings.delta:.0e}".replace("e-0", "e-"), color=_EPSILON)
    budget.set_ylim(bottom=0.0)
    losses.set_xlim(-0.5, settings.steps + 0.5)
    losses.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    losses.grid(alpha=0.25)
    for axes in (losses, budget):
        axes.spines["top"].set_visible(False)
