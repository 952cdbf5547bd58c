"""Rotary embeddings: the function that attention calls, tried for its layout, and the kernel.

The function is a global of the modeling file; attention gets a ``forward`` that sees another one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import ForwardPatch, Patch, RebindPatch
from opake.plan import fused
from opake.plan.deduce import _names
from opake.plan.fused import Found
from opake.plan.modules import built_class, is_of_file, own_slot
from opake.plan.step import Concern, Context, Skip, Step

_COLUMNS = 16
Call = tuple[tuple[Tensor, ...], dict[str, Any]]
"""Arguments and options of the operator."""


class Formula(NamedTuple):
    """How a function rotates.

    Args:
        layout: a key of ``_LAYOUTS``.
        partial: True where tables may be narrower than heads.
        casts: True where half precision stays half precision beside fp32 tables.
    """

    layout: str
    partial: bool
    casts: bool


# ---- what a layout makes of the function's arguments


def _halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    return (q, k, cos, sin), {"rotary_dim": cos.shape[-1]}


def _pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    return (q, k, cos, sin), {"rotary_dim": cos.shape[-1], "interleaved": True}


def _pairs_by_first_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    width = cos.shape[-1]
    tables = (x[..., : width // 2] for x in (cos, sin))
    return (q, k, *tables), {"rotary_dim": width, "interleaved": True}


def _pairs_to_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    q, k = (x.reshape(*x.shape[:-1], -1, 2).mT.flatten(-2) for x in (q, k))
    return _halves(q, k, cos, sin)


def _pairs_to_halves_by_first_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    width = cos.shape[-1]
    tables = (x[..., : width // 2] for x in (cos, sin))
    args, _ = _pairs_to_halves(q, k, *tables)
    return args, {"rotary_dim": width}


def _halves_by_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    return (q, k, cos, sin), {"rotary_dim": 2 * cos.shape[-1]}


def _pairs_by_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Call:
    return (q, k, cos, sin), {"rotary_dim": 2 * cos.shape[-1], "interleaved": True}


def _complex(q: Tensor, k: Tensor, both: Tensor) -> Call:
    (args, options), heads = _pairs_by_half(q, k, both.real, both.imag), {"unsqueeze_dim": 2}
    return args, options | heads


_LAYOUTS: dict[str, Callable[..., Call]] = {
    "halves": _halves,
    "pairs": _pairs,
    "pairs, angles in the first half": _pairs_by_first_half,
    "pairs, sorted into halves": _pairs_to_halves,
    "pairs, sorted into halves, angles in the first half": _pairs_to_halves_by_first_half,
    "halves, half a table": _halves_by_half,
    "pairs, half a table": _pairs_by_half,
    "pairs, complex": _complex,
}
_HALF_TABLES = ("halves, half a table", "pairs, half a table", "pairs, complex")


# ---- looking at modules


def _rope(context: Context) -> Step | Skip:
    return fused.build(context, "rope", _examine, "the model calls no rotary embedding")


def _examine(module: nn.Module) -> Found | str | None:
    cls: Any = built_class(module)
    if cls.__module__.startswith("torch."):
        return None
    names = [name for name in _reads(cls.forward) if "apply_rotary" in name]
    if not names:
        return None
    why = fused.unlike_file(module)
    if why:
        return f"{cls.__name__}: {why}"
    space = inspect.unwrap(cls.forward).__globals__
    replacements: dict[str, Any] = {}
    for name in names:
        found = space.get(name)
        if not isinstance(found, types.FunctionType) or not is_of_file(found, cls):
            return f"{name} of {cls.__name__} was replaced"
        formula = _formula(found)
        if formula is None:
            return f"{name} of {cls.__name__} has another layout"
        replacements[name] = _replacement(found, formula)
    how = " and ".join(dict.fromkeys(_formula(space[name]).layout for name in names))  # type: ignore[union-attr]
    patches: list[Patch] = [
        RebindPatch(module, replacements, slot=own_slot(module)),
        ForwardPatch(module, fused.announce("rope")),
    ]
    return Found(how, patches, f"{cls.__name__}: {', '.join(names)} ({how})")


@functools.cache
def _reads(forward: Any) -> tuple[str, ...]:
    return tuple(sorted(_names(forward)))


@functools.cache
def _formula(function: Any) -> Formula | None:
    """Find out how a function rotates, by its results."""
    reference = kernels.find("rope").reference  # type: ignore[union-attr]
    for layout, arguments in _LAYOUTS.items():
        half = layout in _HALF_TABLES
        if not _agrees(function, reference, arguments, _sample(layout, _COLUMNS)):
            continue
        narrow = _sample(layout, _COLUMNS // 2)
        partial = not half and _agrees(function, reference, arguments, narrow)
        q, k, *tables = _sample(layout, _COLUMNS)
        with torch.no_grad():
            found = function(q.bfloat16(), k.bfloat16(), *tables)[0]
        return Formula(layout, partial, found.dtype == torch.bfloat16)
    return None


def _sample(layout: str, rotated: int) -> tuple[Tensor, ...]:
    width = rotated // 2 if layout in _HALF_TABLES else rotated
    if layout == "pairs, complex":
        both = torch.complex(fused.draw(2, 3, width, seed=2), fused.draw(2, 3, width, seed=3))
        return fused.draw(2, 3, 4, _COLUMNS), fused.draw(2, 3, 1, _COLUMNS, seed=1), both
    tables = (fused.draw(2, 3, width, seed=seed) for seed in (2, 3))
    return fused.draw(2, 4, 3, _COLUMNS), fused.draw(2, 1, 3, _COLUMNS, seed=1), *tables


def _agrees(function: Any, reference: Any, arguments: Any, sample: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = function(*sample)
            args, options = arguments(*sample)
            expected = reference(*args, **options)
    except Exception:  # tables of another width, or another signature
        return False
    if not (isinstance(found, tuple) and len(found) == 2):
        return False
    return all(
        isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(found, expected, strict=True)
    )


# ---- in its place


@functools.cache
def _replacement(stock: Any, formula: Formula) -> Any:
    arguments = _LAYOUTS[formula.layout]

    @functools.wraps(stock)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return stock(*args, **kwargs)
        site = fused.site_here("rope")
        if site is None:  # somebody calls what announces it by another name
            return stock(*args, **kwargs)
        if args and site.guard.few(_ROPE(), args[0], fused.widened(args[0], None)):
            return stock(*args, **kwargs)
        why = _strange(formula, args, kwargs)
        if why:
            return site.guard.stock(why, stock, args, kwargs)
        given, options = arguments(*args)
        found = site.guard.run(_ROPE(), given, options, lambda *_: None, given)
        if found is None:
            return stock(*args)
        if formula.casts:
            q, k = found
            return q.to(args[0].dtype), k.to(args[1].dtype)
        return found

    del rotated.__wrapped__
    rotated._opake_permanent = True  # type: ignore[attr-defined]
    return rotated


def _strange(formula: Formula, args: Any, kwargs: Any) -> str:
    """Say why these arguments are not those that the operator takes."""
    count = 3 if formula.layout == "pairs, complex" else 4
    if len(args) != count or kwargs:
        return "called with other arguments"
    q, k, *tables = args
    heads = 2 if count == 3 else 1
    if q.dim() != 4 or k.dim() != 4 or tables[0].dim() not in (2, 3):
        return "shapes that the kernel does not take"
    tokens, examples = q.shape[3 - heads], q.shape[0]
    shape = tables[0].shape
    width = shape[-1] * (2 if formula.layout in _HALF_TABLES else 1)
    alike = all(
        k.shape[dim] == q.shape[dim] and k.shape[0] == examples for dim in (0, 3 - heads, 3)
    )
    fits = shape[-2] == tokens and (len(shape) == 2 or shape[0] in (1, examples))
    wide = width == q.shape[3] or (formula.partial and width < q.shape[3])
    if alike and fits and wide and all(x.shape == shape for x in tables):
        return ""
    return "shapes that the kernel does not take"


@functools.cache
def _ROPE() -> Any:  # noqa: N802
    return kernels.find("rope")


ROPE = Concern(_rope)
