"""What a plan is made of: concerns, and the steps or skips that they become."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from opake import symbols
from opake.engine import Patch, Report, Row
from opake.errors import UnsupportedTransformers
from opake.families import Family
from opake.flags import Flags
from opake.plan.guard import Guard


@dataclass
class Plan:
    """What a scope would do: its patches, and a row for every concern."""

    patches: list[Patch] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    guards: dict[str, Guard] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        return Report(self.rows)


@dataclass(frozen=True)
class Skip:
    """Why a concern that is on does nothing here."""

    reason: str


@dataclass(frozen=True)
class Step:
    """The patches of one concern, and what its row says about them."""

    patches: list[Patch]
    target: str
    how: str
    count: int
    note: str = ""
    beneath: bool = False
    """True where the patches have to lie beneath those of the other concerns."""


@dataclass(frozen=True)
class Context:
    """What the builders look at: a model, the transformers model inside it, and its family."""

    model: nn.Module
    inner: Any
    family: Family
    flags: Flags
    guards: dict[str, Guard] = field(default_factory=dict)

    @functools.cached_property
    def all_modules(self) -> list[nn.Module]:
        """Every module of the transformers model; of ``model`` where there is none inside."""
        return list((self.model if self.inner is None else self.inner).modules())

    @functools.cached_property
    def implementation(self) -> str:
        """The attention implementation of the family's base model, as the config says it."""
        base: Any = self.modules(self.family.base)[0]
        return str(base.config._attn_implementation)

    def modules(self, *class_names: str) -> list[nn.Module]:
        """Return the modules of the family's classes of these names, subclasses included."""
        classes = tuple(symbols.resolve(self.family.module, name) for name in class_names)
        return [module for module in self.all_modules if isinstance(module, classes)]


Need = tuple[str, str, tuple[str, ...]]
"""A module upstream, a dotted name in it, and parameters that it must take."""


def no_needs(family: Family) -> Iterable[Need]:
    return ()


@dataclass(frozen=True)
class Concern:
    """One concern of a model: how it is built, and what it needs from upstream."""

    build: Callable[[Context], Step | Skip]
    needs: Callable[[Family], Iterable[Need]] = no_needs
    any_model: bool = False
    """True where a model of no known family will do."""


@dataclass(frozen=True)
class ProcessConcern:
    """One concern of the process, which a model scope enters with itself."""

    build: Callable[[], Step | Skip]
    needs: Callable[[], Iterable[Need]]
    runtime_only: bool = False
    """True where a model scope does not enter it with itself."""


def compat(name: str) -> Any:
    """Import ``opake.compat.<name>``, which imports transformers."""
    try:
        return importlib.import_module(f"opake.compat.{name}")
    except ImportError as error:
        raise UnsupportedTransformers(
            f"opake.compat.{name} cannot be imported with the installed transformers: {error}"
        ) from error


def compat_needs(*names: str) -> list[Need]:
    """Return what these modules of ``opake.compat`` need from upstream."""
    return [need for name in names for need in compat(name).SYMBOLS]
