"""``python -m opake fuzz``, ended by its user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interpreter import needs_triton
from test_testing import ROOT, WRONG

SLOW = WRONG.replace("x.dim() == 2", "__import__('time').sleep(0.05) or 0")


@needs_triton
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups to interrupt")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_is_one_line(tmp_path: Path, jobs: str) -> None:
    """As a terminal does it: every process gets the signal."""
    script, out = tmp_path / "fuzzed.py", tmp_path / "out.json"
    call = ["fuzz", "planted", "--minutes", "5", "--jobs", jobs, "--json", str(out)]
    main = f"    from opake._cli import main\n    raise SystemExit(main({call}))\n"
    script.write_text(f"{SLOW}\nif __name__ == '__main__':\n{main}")
    there = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        env={**there, "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("device cpu")
        time.sleep(10)  # it searches
        os.killpg(running.pid, signal.SIGINT)
        said, errors = running.communicate(timeout=60)
    assert "Traceback" not in said + errors, errors
    lines = [line for line in errors.split("\n") if "interrupted" in line]
    assert lines == [f"interrupted; what was found until then is in {out}"]
    assert running.returncode == 130
    assert "planted" in json.loads(out.read_text())["ops"]
    for _ in range(100):  # multiprocessing's own helper notices that it is alone
        if not _alive(running.pid):
            break
        time.sleep(0.1)
    assert not _alive(running.pid)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
