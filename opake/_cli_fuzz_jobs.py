"""``python -m opake fuzz --jobs N``: one operator and one seed in each process."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

SHRINKING = 30.0
"""Seconds that shrinking may always take; a fifth of the time given is allowed if it is more."""

_APART = 1 << 20
"""Between the seeds of two processes: each uses those that follow its own, one a turn."""

_PAUSE = 0.5
"""Seconds between two reports of a process."""


@dataclass
class Tally:
    """What the search of one operator came to."""

    examples: int = 0
    by_kernel: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another search of the same operator; one program is one failure."""
        self.examples += other.examples
        self.by_kernel += other.by_kernel
        self.seconds += other.seconds
        known = {failure["program"] or failure["message"] for failure in self.failures}
        for failure in other.failures:
            if (failure["program"] or failure["message"]) not in known:
                self.failures.append(failure)


class Search(NamedTuple):
    """How to search; without ``seconds`` there are ``examples`` of each operator."""

    device: str
    seed: int
    examples: int | None
    seconds: float | None
    large: bool

    @property
    def shrinking(self) -> float:
        """Seconds for which a failure may be shrunk."""
        return max(SHRINKING, (self.seconds or 0.0) / 5)


def bar(seconds: float | None, examples: int) -> Any:
    """A bar for the time, or for the examples where that is what is given."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    shape = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}" if seconds else None
    return tqdm(total=seconds or examples, bar_format=shape, unit=" examples", disable=None)


class Progress:
    """Counts examples and ends the search when its time is up."""

    def __init__(self, names: list[str], search: Search, shown: Any) -> None:
        self.tallies = {name: Tally() for name in names}
        self.started = time.monotonic()
        self.seconds = search.seconds
        self.bar = shown

    def over(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds

    def seen(self, name: str, ran: bool) -> None:
        tally = self.tallies[name]
        tally.examples += 1
        tally.by_kernel += ran
        if self.bar is not None:
            elapsed = min(time.monotonic() - self.started, self.seconds or 0.0)
            examples = sum(tally.examples for tally in self.tallies.values())
            self.bar.set_postfix_str(f"{name}, {examples} examples", False)
            self.bar.update(elapsed - self.bar.n if self.seconds else 1)


def show(op: str, failure: dict[str, Any]) -> None:
    """Print a failure, as a program where there is one."""
    program = failure["program"]
    example = f"\n\nMinimal example:\n\n{program}" if program else ""
    print(f"\n{op}: {failure['message']}{example}\n", flush=True)


# ---- processes


class Task(NamedTuple):
    """What one process does."""

    op: str
    search: Search
    threads: int


def shared(names: list[str], search: Search, jobs: int) -> list[Task]:
    """Share a search out among processes that start ``jobs`` at a time, and leave none idle."""
    import torch

    rounds = math.ceil(len(names) / jobs)
    seconds = None if search.seconds is None else search.seconds / rounds
    threads = max(1, torch.get_num_threads() // jobs)
    tasks = []
    for i in range(rounds * jobs):
        name, turn = names[i % len(names)], i // len(names)
        times = len(range(i % len(names), rounds * jobs, len(names)))
        # the examples that do not divide go to the first processes of the operator
        examples = (
            None if search.examples is None else (search.examples + times - 1 - turn) // times
        )
        if examples != 0:
            own = search._replace(seed=search.seed + i * _APART, seconds=seconds, examples=examples)
            tasks.append(Task(name, own, threads))
    return tasks


class _Sending(Progress):
    """Tells the parent now and then: what a kernel ends the process of was still counted."""

    def __init__(self, task: Task, connection: Connection) -> None:
        super().__init__([task.op], task.search, None)
        self.connection, self.sent = connection, 0.0

    def seen(self, name: str, ran: bool) -> None:
        super().seen(name, ran)
        if time.monotonic() - self.sent >= _PAUSE:
            self.tallies[name].seconds = time.monotonic() - self.started
            self.connection.send(self.tallies[name])
            self.sent = time.monotonic()


def _work(task: Task, connection: Connection) -> None:
    import torch

    from opake._cli_fuzz import _chosen, take_turns

    torch.set_num_threads(task.threads)
    progress = _Sending(task, connection)
    try:
        take_turns(_chosen([task.op]), task.search, progress, lambda op: None)
        tally = progress.tallies[task.op]
        tally.seconds = time.monotonic() - progress.started
        connection.send(tally)
    except BrokenPipeError:  # nobody is left to be told
        return


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Start processes that a terminal's interrupt does not reach: we end them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Jobs:
    """Processes, and what they have reported so far."""

    def __init__(self, tasks: list[Task], jobs: int) -> None:
        self.waiting, self.jobs = deque(enumerate(tasks)), jobs
        self.tasks = tasks
        self.tallies = [Tally() for _ in tasks]
        self.running: dict[Any, tuple[int, SpawnProcess]] = {}

    def start(self) -> bool:
        """Start what may run; return whether anything does."""
        context = multiprocessing.get_context("spawn")
        while self.waiting and len(self.running) < self.jobs:
            i, task = self.waiting.popleft()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(task, there), daemon=True)
            with _uninterrupted():
                process.start()
                self.running[here] = i, process
            # the other end has to be open in the process alone, or its death would not be seen
            there.close()
        return bool(self.running)

    def receive(self) -> list[int]:
        """Take what is reported; return the tasks that ended."""
        ended = []
        connection: Any
        for connection in wait(list(self.running), timeout=_PAUSE):
            i, process = self.running[connection]
            try:
                self.tallies[i] = connection.recv()
            except (EOFError, OSError):
                process.join()
                self._judge(i, process.exitcode or 0)
                del self.running[connection]
                ended.append(i)
        return ended

    def _judge(self, i: int, status: int) -> None:
        """Count it as a failure where a process did not end by itself."""
        if status and not self.tallies[i].failures:
            task, search = self.tasks[i], self.tasks[i].search
            how = f"status {status}" if status > 0 else signal.Signals(-status).name
            length = f"--examples {search.examples}"
            if search.seconds is not None:
                length = f"--minutes {search.seconds / 60:.3g}"
            again = f"python -m opake fuzz {task.op} --seed {search.seed} {length}"
            again += f" --device {search.device}" + " --large" * search.large
            message = f"the process ended with {how}; to see it again: {again}"
            failure = {"seed": search.seed, "message": message, "program": ""}
            self.tallies[i].failures.append(failure)

    def stop(self) -> None:
        for _, process in self.running.values():
            process.terminate()
        for connection, (_, process) in self.running.items():
            process.join()
            connection.close()

    def by_name(self, names: list[str]) -> dict[str, Tally]:
        """Add up the tasks of each operator."""
        sums = {name: Tally() for name in names}
        for task, tally in zip(self.tasks, self.tallies, strict=True):
            sums[task.op].add(tally)
        return sums


def run(
    names: list[str],
    search: Search,
    jobs: int,
    write: Callable[[dict[str, Tally]], None],
) -> dict[str, Tally]:
    """Search in processes; show failures as their processes end."""
    work = _Jobs(shared(names, search, jobs), jobs)
    shown = bar(search.seconds, (search.examples or 0) * len(names))
    started = time.monotonic()
    printed: set[tuple[str, str]] = set()
    try:
        while work.start():
            ended = work.receive()
            for i in ended:
                for failure in work.tallies[i].failures:
                    key = (work.tasks[i].op, failure["program"] or failure["message"])
                    if key not in printed:
                        printed.add(key)
                        shown.clear()
                        show(key[0], failure)
            examples = sum(tally.examples for tally in work.tallies)
            elapsed = min(time.monotonic() - started, search.seconds or 0.0)
            shown.set_postfix_str(f"{len(work.running)} processes, {examples} examples", False)
            shown.update((elapsed if search.seconds else examples) - shown.n)
            if ended:
                write(work.by_name(names))
    finally:
        work.stop()
        shown.close()
        write(work.by_name(names))
    return work.by_name(names)
