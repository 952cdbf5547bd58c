"""Pytest plugin: which cases passed for which family, as ``--matrix FILE`` of JSON.

A test marked ``@pytest.mark.case("name")`` and parametrised by ``model_type`` counts for that
family; a skip counts with its reason. The support matrix in the documentation is made of a
``--thorough`` run; any other is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sampling import family_of, names_tests

_KEY = "case of the support matrix"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", metavar="FILE", help="write the support matrix of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(name): a case of the support matrix")
    path = config.getoption("--matrix")
    if path and not hasattr(config, "workerinput"):
        whole = config.getoption("--thorough") and not names_tests(config)
        config.pluginmanager.register(_Matrix(Path(path), whole))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("case")
    family = family_of(item)
    if marker and family:
        item.user_properties.append((_KEY, [family, marker.args[0]]))


class _Matrix:
    """Collects the reports, those of xdist's workers too."""

    def __init__(self, path: Path, thorough: bool) -> None:
        self._path = path
        self._thorough = thorough
        self._cells: dict[str, dict[str, dict[str, Any]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        for family, case in _cells(report):
            cell = self._cells.setdefault(family, {}).setdefault(
                case, {"passed": 0, "failed": 0, "skipped": []}
            )
            if report.skipped:
                reason = report.longrepr[2].removeprefix("Skipped: ")
                cell["skipped"] = sorted({*cell["skipped"], reason})
            else:
                cell[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        import torch
        import transformers

        found = {
            "transformers": transformers.__version__,
            "torch": torch.__version__.split("+")[0],
            "thorough": self._thorough,
            "families": {f: dict(sorted(c.items())) for f, c in sorted(self._cells.items())},
        }
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def _cells(report: pytest.TestReport) -> Iterator[tuple[str, str]]:
    for key, value in report.user_properties:
        if key == _KEY:
            yield tuple(value)
