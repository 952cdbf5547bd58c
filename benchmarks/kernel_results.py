"""Files of kernel results: one row per operator and what was done, each naming its commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
KEYS = ("op", "shape", "variant", "kernel", "tile")


def save(path: str, result: dict[str, Any]) -> None:
    """Write a file of results."""
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def stamped(rows: Rows, commit: str) -> Rows:
    """The rows, each with the commit it was measured at."""
    return [{**row, "commit": commit} for row in rows]


def merge(path: str, parts: list[str]) -> None:
    """Put the rows of other files into the one at ``path``, which need not exist.

    A row takes the place of its like. What it stands beside in a table, the same operator and
    shape, has to be of its commit: rows of another are dropped, and that is said.
    """
    whole: dict[str, Any] = {"runs": []}
    if Path(path).exists():
        whole = json.loads(Path(path).read_text())
        if "runs" not in whole:  # written before rows named their commit
            print(f"{path} is of one run without rows' commits, and is replaced")
            whole = {"runs": []}
    for part in parts:
        result = json.loads(Path(part).read_text())
        _check(part, result)
        for error in result.pop("errors", []):
            print(f"{part}: {error['part']} of {error['op']} broke off: {error['error']}")
        for section, rows in result.items():
            if isinstance(rows, list) and section != "runs":
                whole[section] = _merged(whole.get(section, []), rows, section)
        whole["runs"] += [run for run in result["runs"] if run not in whole["runs"]]
    used = {row["commit"] for rows in whole.values() for row in rows if "op" in row}
    whole["runs"] = [run for run in whole["runs"] if run["commit"] in used]
    save(path, whole)
    print(f"{path}: " + ", ".join(f"{len(v)} {k}" for k, v in whole.items()))


def _check(part: str, result: dict[str, Any]) -> None:
    runs = result["runs"]
    if any(run["smoke"] for run in runs):
        raise SystemExit(f"{part} is of a smoke run")
    if not all(run["commit"] for run in runs):
        raise SystemExit(f"{part} does not name its commit")


def _merged(old: Rows, new: Rows, section: str) -> Rows:
    """The new rows, and old ones without a like among them or a neighbour of another commit."""
    commits = {_place(row): row["commit"] for row in new}
    replaced = {_key(row) for row in new}
    kept = []
    for row in old:
        if _key(row) in replaced:
            continue
        if commits.get(_place(row), row["commit"]) != row["commit"]:
            print(f"dropped {section} {_key(row)}: of {row['commit'][:8]}")
            continue
        kept.append(row)
    return sorted([*kept, *new], key=lambda row: row["op"])  # stable: shapes stay in their order


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(k) for k in KEYS)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["op"], row.get("shape")
