"""``python -m opake fuzz``: kernels on drawn inputs, against their references in fp64."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opake.kernels import Op
    from opake.testing._transforms import Example

_ROUND = 25
"""Examples of one operator before it is another's turn, where time is what is given."""

_EPILOG = """\
exit status: 0 if nothing was found, 1 if a kernel is wrong, 2 if nothing could be run.

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
    length.add_argument("--minutes", type=_positive, help="for all operators (default: 1)")
    length.add_argument("--examples", type=_count, help="of each operator")
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
        raise argparse.ArgumentTypeError(f"{text} is no number of examples")
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


# ---- the search


class _Progress:
    """Counts examples, shows a bar, and ends the search when its time is up."""

    def __init__(self, ops: list[Op], options: argparse.Namespace) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self.examples = dict.fromkeys((op.name for op in ops), 0)
        self.ran = dict(self.examples)
        self.started = time.monotonic()
        self.seconds = None if options.examples else 60 * (options.minutes or 1.0)
        shape = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}" if self.seconds else None
        total = self.seconds or options.examples * len(ops)
        self.bar = tqdm(total=total, bar_format=shape, unit=" examples", disable=None)

    def over(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds

    def seen(self, op: Op, ran: bool) -> None:
        self.examples[op.name] += 1
        self.ran[op.name] += ran
        elapsed = min(time.monotonic() - self.started, self.seconds or 0.0)
        self.bar.set_postfix_str(f"{op.name}, {sum(self.examples.values())} examples", False)
        self.bar.update(elapsed - self.bar.n if self.seconds else 1)


def _fuzz(ops: list[Op], device: str, options: argparse.Namespace) -> int:
    from opake.testing._ops import kernel_dtypes

    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    dtypes = kernel_dtypes(device)
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    print(f"device {device}, {names}, seed {seed}", flush=True)
    if len(dtypes) < 3:
        print("bfloat16 is left out: Triton's interpreter does not round to it", flush=True)
    progress = _Progress(ops, options)
    failed: set[str] = set()
    try:
        turn = 0
        while (remaining := [op for op in ops if op.name not in failed]) and not progress.over():
            for op in remaining:
                text = _search(op, device, dtypes, seed + turn, options, progress)
                if text:
                    failed.add(op.name)
                    progress.bar.clear()
                    print(f"\n{text}", flush=True)
            turn += 1
            if progress.seconds is None:
                break
    finally:
        progress.bar.close()
    return _summary(ops, failed, progress)


def _search(
    op: Op,
    device: str,
    dtypes: Any,
    seed: int,
    options: argparse.Namespace,
    progress: _Progress,
) -> str:
    """Search once; return what was found, as a program, ``""`` if nothing was."""
    from hypothesis import strategies as st

    from opake.testing._assert import failing, program, quiet, search
    from opake.testing._ops import example_of, right

    @st.composite
    def examples(draw: st.DrawFn) -> Example:
        def integer(low: int, high: int) -> int:
            return draw(st.integers(low, high))

        return example_of(op, integer, device, dtypes, large=options.large)

    failures = 0

    def fails(example: Example) -> str:
        nonlocal failures
        if not failures and progress.over():
            raise _TimeIsUp
        ran: list[bool] = []
        message = failing(lambda: ran.append(right(op, example)))
        progress.seen(op, any(ran)) if not failures else None
        failures += bool(message)
        return message

    config = quiet(max_examples=options.examples or _ROUND, derandomize=False, database=None)
    try:
        failure = search(examples(), fails, config, seed)
    except _TimeIsUp:
        return ""
    if failure is None:
        return ""
    first = [] if device != "cpu" else ["import os", 'os.environ["TRITON_INTERPRET"] = "1"']
    head = [
        "from opake import kernels",
        f'fn, reference = kernels.{op.name}, kernels.find("{op.name}").reference',
    ]
    if device != "cpu":
        head.append("kernels.config(min_elements=0).__enter__()  # however small the example is")
    return f"{op.name}: " + program(failure, fails, head, ("fn", "reference"), first=first)


def _summary(ops: list[Op], failed: set[str], progress: _Progress) -> int:
    idle = []
    for op in ops:
        examples, ran = progress.examples[op.name], progress.ran[op.name]
        verdict = "WRONG" if op.name in failed else "nothing found"
        if not examples:
            verdict = "not reached, there was no time"
        print(f"{op.name:24} {examples:7} examples, {ran:7} by kernel: {verdict}")
        if examples and not ran and op.name not in failed:
            idle.append(op.name)
    if failed:
        return 1
    if idle:
        print(f"the kernels of {', '.join(idle)} never ran", file=sys.stderr)
        return 2
    return 0
