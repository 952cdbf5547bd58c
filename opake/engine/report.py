"""What a set did or would do, as rows that print as a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, overload

from opake.engine.slots import MISSING

Status = Literal["on", "off", "skipped"]


@dataclass(frozen=True)
class Row:
    """One concern: where it acts, how, how often, and why not where it does not."""

    concern: str
    target: str
    how: str
    count: int
    status: Status
    reason: str = ""


class Report(Sequence[Row]):
    """Rows in order. ``str()`` is a table; notebooks show it as HTML."""

    def __init__(self, rows: Iterable[Row], title: str = "") -> None:
        self.rows = tuple(rows)
        self.title = title

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        head = [field.name for field in fields(Row)]
        lines = [head, *([str(getattr(row, name)) for name in head] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        text.insert(1, "  ".join("-" * width for width in widths))
        if self.title:
            text.insert(0, self.title)
        return "\n".join(line.rstrip() for line in text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = [field.name for field in fields(Row)]
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(str(getattr(row, name)))}</td>" for name in names)
            + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Change:
    """One slot that a live set changed."""

    slot: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.slot}: {_short(self.before)} -> {_short(self.after)}"


class Diff(tuple[Change, ...]):
    """The slots that a set holds changed right now, one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no slot is changed"

    __repr__ = __str__


def _short(value: object) -> str:
    if value is MISSING:
        return "absent"
    name = getattr(value, "__qualname__", None)
    if name:
        return f"{getattr(value, '__module__', '')}.{name} at {id(value):#x}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"<{type(value).__qualname__} at {id(value):#x}>"
