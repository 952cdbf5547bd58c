"""Residual addition and the norm right after it, in one kernel.

Where a layer's ``forward`` says ``h = a + b; residual = h; h = self.norm(h)`` it is compiled anew
with one call in place of the three lines. A sum whose addend was normed just before is left alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import ForwardPatch
from opake.engine.reclass import stock_class
from opake.plan import fused, norms
from opake.plan.fused import Found
from opake.plan.modules import built_class, stock_method
from opake.plan.step import Concern, Context, Skip, Step

_CALL = "_opake_add_norm"
_SLOT = fused.slot("fused_add_rms_norm")


class _Layer(NamedTuple):
    """A layer's ``forward`` compiled anew, and the norms that it calls that way."""

    forward: Any
    norms: tuple[str, ...]
    parameters: tuple[str, ...]


class _Formula(NamedTuple):
    layer: _Layer
    norms: dict[str, tuple[type, norms.RMSFormula]]


def _fused_add_rms_norm(context: Context) -> Step | Skip:
    absent = "no residual add directly precedes an RMS norm"
    return fused.build(context, "fused_add_rms_norm", _examine, absent)


def _examine(module: nn.Module) -> Found | str | None:
    cls: Any = built_class(module)
    if cls.__module__.startswith("torch.") or not _has_norm(module):
        return None
    layer = _compiled(cls, cls.forward)
    if layer is None:
        return None
    why = fused.unlike_file(module)
    if why:
        return f"{cls.__name__}: {why}"
    found: dict[str, tuple[type, norms.RMSFormula]] = {}
    for name in layer.norms:
        norm = module._modules.get(name)
        seen = norms.examine_rms(norm) if norm is not None else None
        if not isinstance(seen, Found):
            return seen or f"{cls.__name__}.{name} is no RMS norm"
        assert norm is not None
        found[name] = (stock_class(norm), seen.formula)
    formula = _Formula(layer, found)
    target = f"{cls.__name__}.forward: {', '.join(layer.norms)}"
    return Found(formula, [ForwardPatch(module, _run)], target)


def _has_norm(module: nn.Module) -> bool:
    return any("norm" in name for name in module._modules)


# ---- the forward, compiled anew


@functools.cache
def _compiled(cls: Any, forward: Any) -> _Layer | None:
    inner = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType) or inner.__closure__:
        return None
    try:
        lines, first = inspect.getsourcelines(inner)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # no source at hand
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    found: list[str] = []
    _rewrite(definition, found)
    if not found:
        return None
    definition.decorator_list.clear()
    definition.returns = None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    factory = ast.parse(f"def factory({_CALL}):\n    return {inner.__name__}")
    factory.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
    ast.increment_lineno(definition, first - 1)
    code = compile(ast.fix_missing_locations(factory), inner.__code__.co_filename, "exec")
    space: dict[str, Any] = {}
    exec(code, inner.__globals__, space)
    made = space["factory"](_add_norm)
    made.__defaults__, made.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(inner).parameters.values()
    names = tuple(p.name for p in parameters if p.kind not in kinds)
    return _Layer(made, tuple(found), names)


def _rewrite(definition: ast.FunctionDef, found: list[str]) -> None:
    """Put one call in the place of every sum, copy and norm that follow each other."""
    body, after = definition.body, list[ast.stmt]()
    while body:
        three, norm = body[:3], ""
        if not (after and _is_norm(after[-1])):
            norm = _pattern(three)
        if not norm:
            after.append(body.pop(0))
            continue
        found.append(norm)
        total, copied, _ = three
        assert isinstance(total, ast.Assign)
        assert isinstance(copied, ast.Assign)
        assert isinstance(total.value, ast.BinOp)
        hidden, residual = ast.unparse(total.targets[0]), ast.unparse(copied.targets[0])
        call = ast.parse(f"{hidden}, {residual} = {_CALL}(self, {norm!r}, a, b)").body[0]
        assert isinstance(call, ast.Assign)
        assert isinstance(call.value, ast.Call)
        call.value.args[2:] = [total.value.left, total.value.right]
        after.append(_at(call, total))
        del body[:3]
    definition.body = after


def _at(new: ast.stmt, old: ast.stmt) -> ast.stmt:
    for node in ast.walk(new):
        ast.copy_location(node, old)
    return new


def _pattern(three: list[ast.stmt]) -> str:
    """Return the norm of ``h = a + b; residual = h; h = self.norm(h)``, or nothing."""
    if len(three) < 3 or not all(_is_simple(x) for x in three):
        return ""
    total, copied, normed = three
    hidden = total.targets[0].id  # type: ignore[attr-defined]
    is_sum = isinstance(total.value, ast.BinOp) and isinstance(total.value.op, ast.Add)  # type: ignore[attr-defined]
    is_copy = isinstance(copied.value, ast.Name) and copied.value.id == hidden  # type: ignore[attr-defined]
    if not (is_sum and is_copy and _is_norm(normed)):
        return ""
    call = normed.value  # type: ignore[attr-defined]
    same = normed.targets[0].id == hidden and ast.unparse(call.args[0]) == hidden  # type: ignore[attr-defined]
    return call.func.attr if same else ""


def _is_simple(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    )


def _is_norm(statement: ast.stmt) -> bool:
    """Tell whether a statement is ``x = self.<some norm>(y)``."""
    call = getattr(statement, "value", None)
    return (
        _is_simple(statement)
        and isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "self"
        and "norm" in call.func.attr
        and len(call.args) == 1
        and not call.keywords
    )


# ---- in its place


def _run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)[_SLOT]
    layer: _Layer = site.formula.layer
    if args and site.guard.few(_OP(), args[0], fused.widened(args[0], None)):
        return wrapped(*args, **kwargs)
    if getattr(wrapped, "func", None) is not stock_method(instance):
        return site.guard.stock("another wrapper lies beneath", wrapped, args, kwargs)
    if any(name.startswith("past_key_value") for name in kwargs.keys() - {*layer.parameters}):
        # A decorator of transformers' gives it the name of today.
        return site.guard.stock("called with other arguments", wrapped, args, kwargs)
    return layer.forward(instance, *args, **kwargs)


def _add_norm(layer: Any, name: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum."""
    norm = layer._modules[name]
    site: fused.Site | None = vars(layer).get(_SLOT)

    def stock(*_: Any) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total), total

    if site is None:  # the scope ended in the middle of a call
        return stock()
    cls, formula = site.formula.norms[name]
    if not _is_bare(norm, cls) or x.shape != residual.shape:
        why = "the norm has hooks, or another forward"
        return site.guard.stock(why, stock, ())  # type: ignore[no-any-return]
    weight = norm.weight if formula.weighted else None
    options = {"offset": formula.offset, "casting_mode": formula.casting_mode}
    args = (x, residual, weight, getattr(norm, formula.eps))
    return site.guard.run(_OP(), args, options, stock, ())  # type: ignore[no-any-return]


def _is_bare(norm: Any, cls: type) -> bool:
    """Tell whether calling a norm runs its class's formula and nothing else, now."""
    return (
        stock_class(norm) is cls and not fused.hooked(norm) and fused.is_ours(norm, norms.run_rms)
    )


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("fused_add_rms_norm")


FUSED_ADD_RMS_NORM = Concern(_fused_add_rms_norm)
