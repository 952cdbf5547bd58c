"""What README shows runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import opake

README = Path(__file__).parent.parent / "README.md"


def test_the_first_snippet_runs_as_printed():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    norms, losses = names["norms"], names["losses"]
    assert norms.shape == losses.shape == (4,)
    assert torch.isfinite(losses).all()
    total = names["total"]
    assert set(total) == {name for name, _ in names["model"].named_parameters()}
    assert opake.active() == []
