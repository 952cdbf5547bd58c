"""Does upstream still look the way the replacements were written against?"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from opake.errors import UnsupportedTransformers

SUPPORTED = {"torch": ("2.11", None), "transformers": ("5.17", "6")}
"""Lowest version, and the first that is too new."""


@dataclass(frozen=True)
class Symbol:
    """A name upstream, with parameters that it must take, and the flag that does without it."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    concern: str = "compat"


def verify(symbols: Iterable[Symbol]) -> None:
    """Raise one :class:`~opake.errors.UnsupportedTransformers` that lists every mismatch."""
    mismatches = [*_versions(), *(text for text in map(_mismatch, symbols) if text)]
    if mismatches:
        found = ", ".join(f"{name} {_version(name)}" for name in SUPPORTED)
        raise UnsupportedTransformers(
            f"{len(mismatches)} mismatch(es) with {found}; nothing was changed:\n"
            + "\n".join(f"  {text}" for text in mismatches)
        )


def resolve(module: str, name: str) -> Any:
    """Return the object at the dotted ``name`` in ``module``; raises LookupError."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{module}:{name}") from error
    return value


def _mismatch(symbol: Symbol) -> str | None:
    where = f"{symbol.module.replace('.', '/')}.py:{symbol.name}"
    opt_out = f"(do without it by {symbol.concern}=False)"
    try:
        value = resolve(symbol.module, symbol.name)
    except LookupError as error:
        cause = error.__cause__
        instead = f"no such module ({cause})" if isinstance(cause, ImportError) else "nothing"
        return f"{where}: expected to exist, found {instead} {opt_out}"
    if not symbol.parameters:
        return None
    found = parameters(value)
    missing = [name for name in symbol.parameters if not set(name.split("|")) & set(found)]
    if missing:
        return (
            f"{where}: expected parameters {', '.join(missing)}, found ({', '.join(found)}) "
            f"{opt_out}"
        )
    return None


@functools.cache
def parameters(function: Any) -> tuple[str, ...]:
    """Return the parameter names of ``function`` without ``self``, \\*args and \\*\\*kwargs."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return tuple(p.name for p in found if p.kind not in variadic and p.name != "self")


def _versions() -> Iterable[str]:
    for name, (low, high) in SUPPORTED.items():
        found = _version(name)
        if found is None:
            yield f"{name}: expected >= {low}, not installed"
        elif _release(found) < _release(low) or (high and _release(found) >= _release(high)):
            bound = f">= {low}" + (f", < {high}" if high else "")
            yield f"{name}: expected {bound}, found {found} (install a supported version)"


def _release(text: str) -> tuple[int, ...]:
    # Without pre-release and local parts: a vendor's 2.11.0a0 has what 2.11 has.
    return Version(text).release


@functools.cache
def _version(name: str) -> str | None:
    try:
        # What was imported decides: the metadata may belong to another copy on the path.
        return str(importlib.import_module(name).__version__)
    except ImportError:
        pass
    try:
        return version(name)
    except PackageNotFoundError:
        return None
