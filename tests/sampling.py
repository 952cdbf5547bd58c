"""Pytest plugin: of most families, a sample of the tests, the same in every run.

``--thorough`` runs every test of every family.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

WHOLE = ("llama", "gpt2", "bert", "mixtral", "qwen3_next", "falcon")
"""Families of which every test runs: one for every kind of model."""

EVERY = 10
"""Of the others, one test in so many runs, and two at least."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run every test of every family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough") or names_tests(config):
        return
    sampled: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        family = family_of(item)
        if family is not None and family not in WHOLE:
            sampled[family].append(item)
    left_out = {id(item) for family in sampled.values() for item in _left_out(family)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def names_tests(config: pytest.Config) -> bool:
    """Tell whether the caller named tests: they run, all that are meant and no others."""
    return bool(config.getoption("keyword")) or any("::" in arg for arg in config.args)


def family_of(item: pytest.Item) -> str | None:
    """Return the family that a test is parametrised by."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("model_type") if callspec else None


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return all but a tenth, spread over the tests by the names they have."""
    ranked = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
    kept = max(2, round(len(items) / EVERY))
    return ranked[kept:]
