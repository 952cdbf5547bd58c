"""Ctrl-C at a chosen line of the engine."""

from __future__ import annotations

import linecache
import os
from typing import Any

from opake.engine import stacks

ENGINE = os.path.dirname(stacks.__file__)


class Interrupter:
    """A trace function that raises KeyboardInterrupt once, on the n-th line inside the engine."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.with_line: dict[Any, bool] = {}

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(ENGINE) else None

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        # Tracing raises where CPython delivers no signal: on a bare `try:`, before the first
        # instruction in a with block, and between its last one and the release of the lock.
        if event != "line":
            return self.line
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        was_with = self.with_line.pop(frame, False)
        if source.lstrip().startswith("with "):
            self.with_line[frame] = True
        elif not was_with and source.strip() != "try:":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line
