"""``python -m opake fuzz``: kernels on drawn inputs, against their references in fp64."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opake import _cli_fuzz_jobs
from opake._cli_fuzz_jobs import Progress, Search, Tally, bar, show

if TYPE_CHECKING:
    from opake.kernels import Op
    from opake.testing._assert import Failure
    from opake.testing._transforms import Example

_ROUND = 25
"""Examples of one operator before it is another's turn, where time is what is given."""

_EPILOG = """\
exit status: 0 if nothing was found, 1 if a kernel is wrong, 2 if nothing could be run, 130 if it
was interrupted.

Without a GPU, kernels are interpreted on the CPU by Triton (about a hundred times slower)."""


class _Unusable(Exception):
    """Nothing can be run; says why and what to do."""


class _TimeIsUp(BaseException):
    """Leaves Hypothesis, which would take an Exception for a failure."""


def add_to(commands: Any) -> None:
    """Add the command to those of ``python -m opake``."""
    parser = commands.add_parser(
        "fuzz",
        help="search for inputs on which a kernel is wrong",
        description="Compare kernels with plain PyTorch in fp64, one example at a time, on drawn "
        "shapes, layouts, dtypes and transforms of torch.func. What fails is shrunk and printed "
        "as a program.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators of opake.kernels, or all")
    parser.add_argument("--list", action="store_true", help="name the operators and end")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=_positive,
        help="for all operators (default: 1); a failure is shrunk for at most a fifth of the "
        "time its process has, or 30 s, whichever is more",
    )
    length.add_argument(
        "--examples", type=_count, help="of each operator; a failure is shrunk for at most 30 s"
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        metavar="N",
        help="processes, each with one operator and a seed of its own, that share the time or the "
        "examples; what they need to start is not counted",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--seed", type=int, help="search as the run that printed it did")
    parser.add_argument("--device", help="where the inputs are (default: cuda, else cpu)")
    parser.add_argument("--large", action="store_true", help="inputs of up to 4M elements")
    parser.set_defaults(run=lambda options: _run(parser, options))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no length of time")
    return value


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        if options.list:
            return _list()
        for package in ("hypothesis", "tqdm"):
            if find_spec(package) is None:
                raise _Unusable(f"{package} is not installed: pip install opake[testing]")
        device = _device(options.device)
        return _fuzz(_chosen(options.ops), device, options)
    except KeyboardInterrupt:
        found = f"; what was found until then is in {options.json}" if options.json else ""
        print(f"interrupted{found}", file=sys.stderr)
        return 128 + signal.SIGINT
    except _Unusable as reason:
        parser.error(str(reason))


def _list() -> int:
    from opake import kernels

    for op in sorted(kernels.ops(), key=lambda op: op.name):
        summary = (op.function.__doc__ or "").strip().partition("\n")[0]
        print(f"{op.name:24} {summary}".rstrip())
    return 0


def _device(asked: str | None) -> str:
    """Where to run; kernels are interpreted on a CPU, which has to be said before Triton loads."""
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET")
    try:
        there = torch.cuda.is_available() and interpreted is None
        device = torch.device(asked or ("cuda" if there else "cpu"))
    except RuntimeError as error:
        raise _Unusable(str(error).partition("\n")[0]) from None
    if device.type == "cpu" and interpreted is None:
        if "triton" in sys.modules:
            raise _Unusable("triton is loaded already: set TRITON_INTERPRET=1 before it is")
        os.environ["TRITON_INTERPRET"] = "1"
    from opake import kernels

    can, why = kernels.available(device)
    if not can:
        hint = "unset TRITON_INTERPRET, or set it to 1" if interpreted else "use --device cpu"
        hint = "pip install opake[kernels]" if "installed" in why else hint
        raise _Unusable(f"no kernel can run on {device}: {why} ({hint})")
    return str(device)


def _chosen(names: list[str]) -> list[Op]:
    from opake import kernels

    known = {op.name: op for op in sorted(kernels.ops(), key=lambda op: op.name)}
    if "all" in names:
        return list(known.values())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"no operator is named {unknown[0]!r}" if unknown else "name an operator"
        raise _Unusable(f"{what}; there are {', '.join(known)}, and all")
    return [known[name] for name in dict.fromkeys(names)]


# ---- what was found


class _Report:
    """The file of ``--json``; written at once, so that what cannot be written is not searched."""

    def __init__(self, path: Path | None, **head: Any) -> None:
        self.path, self.head = path, head
        self.write({})

    def write(self, tallies: dict[str, Tally]) -> None:
        if self.path is None:
            return
        ops = {name: asdict(tally) for name, tally in tallies.items()}
        text = json.dumps({**self.head, "ops": ops}, indent=2) + "\n"
        try:
            self.path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _Unusable(f"--json: {error}") from None


def _versions() -> dict[str, str]:
    import torch
    import triton  # type: ignore[import-untyped]

    import opake

    modules = {"opake": opake, "torch": torch, "triton": triton}
    versions = {name: str(module.__version__) for name, module in modules.items()}
    return {"python": platform.python_version(), **versions}


def _device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


# ---- the search


def _fuzz(ops: list[Op], device: str, options: argparse.Namespace) -> int:
    from opake.testing._ops import kernel_dtypes

    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    seconds = None if options.examples else 60 * (options.minutes or 1.0)
    search = Search(device, seed, options.examples, seconds, options.large)
    named = {"device": device, "device_name": _device_name(device)}
    report = _Report(options.json, seed=seed, jobs=options.jobs, **named, versions=_versions())
    dtypes = kernel_dtypes(device)
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    print(f"device {device}, {names}, seed {seed}", flush=True)
    if len(dtypes) < 3:
        print("bfloat16 is left out: Triton's interpreter does not round to it", flush=True)
    tallies = _searched(ops, search, options.jobs, report.write)
    return _summary(tallies)


def _searched(
    ops: list[Op], search: Search, jobs: int, write: Callable[[dict[str, Tally]], None]
) -> dict[str, Tally]:
    """Search here or in processes; ``write`` what there is at every failure and at the end."""
    if jobs > 1:
        return _cli_fuzz_jobs.run([op.name for op in ops], search, jobs, write)
    shown = bar(search.seconds, (search.examples or 0) * len(ops))
    progress = Progress([op.name for op in ops], search, shown)

    def found(op: Op) -> None:
        shown.clear()
        show(op.name, progress.tallies[op.name].failures[-1])
        write(progress.tallies)

    try:
        take_turns(ops, search, progress, found)
    finally:
        shown.close()
        write(progress.tallies)
    return progress.tallies


def take_turns(
    ops: list[Op], search: Search, progress: Progress, found: Callable[[Op], None]
) -> None:
    """Search each operator in turn, until its first failure or until the time is up."""
    turn = 0
    remaining = ops
    while remaining and not progress.over():
        for op in remaining:
            tally, started = progress.tallies[op.name], time.monotonic()
            try:
                failure = _search(op, search._replace(seed=search.seed + turn), progress)
            finally:
                tally.seconds += time.monotonic() - started
            if failure:
                tally.failures.append(failure)
                found(op)
        if progress.seconds is None:
            break
        turn += 1
        remaining = [op for op in ops if not progress.tallies[op.name].failures]


class _Judge:
    """Says how examples fail, until the time to search, or then to shrink, is up."""

    def __init__(self, op: Op, progress: Progress, shrinking: float) -> None:
        self.op, self.progress, self.shrinking = op, progress, shrinking
        self.last: Failure | None = None
        self.failed = math.inf

    def __call__(self, example: Example) -> str:
        # a quarter is kept for the numbers of the tensors: without it programs are unreadable
        return self._judged(example, until=self.failed + 0.75 * self.shrinking)

    def again(self, example: Example) -> str:
        """Say it of a simpler example; what cannot be tried any more does not fail."""
        try:
            return self._judged(example, until=self.failed + self.shrinking)
        except _TimeIsUp:
            known = self.last is not None and example.call is self.last.example.call
            return self.last.message if known and self.last else ""

    def _judged(self, example: Example, until: float) -> str:
        from opake.testing._assert import Failure, failing
        from opake.testing._ops import right

        if self.progress.over() if self.last is None else time.monotonic() >= until:
            raise _TimeIsUp
        ran: list[bool] = []
        message = failing(lambda: ran.append(right(self.op, example)))
        if self.last is None:
            self.progress.seen(self.op.name, any(ran))
        if message:
            self.failed = min(self.failed, time.monotonic())
            self.last = Failure(example, message)
        return message


def _search(op: Op, how: Search, progress: Progress) -> dict[str, Any] | None:
    """Search once; return what was found, and the program that shows it."""
    from hypothesis import strategies as st

    from opake.testing._assert import program, quiet, search
    from opake.testing._ops import example_of, kernel_dtypes

    dtypes = kernel_dtypes(how.device)

    @st.composite
    def examples(draw: st.DrawFn) -> Example:
        def integer(low: int, high: int) -> int:
            return draw(st.integers(low, high))

        return example_of(op, integer, how.device, dtypes, large=how.large)

    judge = _Judge(op, progress, how.shrinking)
    config = quiet(max_examples=how.examples or _ROUND, derandomize=False, database=None)
    try:
        failure = search(examples(), judge, config, how.seed)
    except _TimeIsUp:
        failure = judge.last
    if failure is None:
        return None
    first = [] if how.device != "cpu" else ["import os", 'os.environ["TRITON_INTERPRET"] = "1"']
    head = [
        "from opake import kernels",
        f'fn, reference = kernels.{op.name}, kernels.find("{op.name}").reference',
    ]
    if how.device != "cpu":
        head.append("kernels.config(min_elements=0).__enter__()  # however small the example is")
    text = program(failure, judge.again, head, ("fn", "reference"), first=first)
    message, _, code = text.partition("\n\nMinimal example:\n\n")
    return {"seed": how.seed, "message": message, "program": code}


def _summary(tallies: dict[str, Tally]) -> int:
    idle = []
    for name, tally in tallies.items():
        examples, ran = tally.examples, tally.by_kernel
        verdict = "WRONG" if tally.failures else "nothing found"
        if not examples and not tally.failures:
            verdict = "not reached, there was no time"
        print(f"{name:24} {examples:7} examples, {ran:7} by kernel: {verdict}")
        if examples and not ran and not tally.failures:
            idle.append(name)
    if any(tally.failures for tally in tallies.values()):
        return 1
    if idle:
        print(f"the kernels of {', '.join(idle)} never ran", file=sys.stderr)
        return 2
    return 0
