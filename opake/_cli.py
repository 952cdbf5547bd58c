"""The command line: ``python -m opake COMMAND``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opake import _cli_fuzz


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status, 2 where the command was not understood."""
    parser = argparse.ArgumentParser(prog="python -m opake")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _cli_fuzz.add_to(commands)
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status
