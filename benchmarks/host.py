"""Where a result file was made: host, GPU, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "triton")


def describe(commit: str | None = None) -> dict[str, Any]:
    """Return the fields that every result file begins with; ``commit``: of a copy without git."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found: dict[str, Any] = {"host": platform.machine(), "gpu": gpu}
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {"commit": commit or _commit()}


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
