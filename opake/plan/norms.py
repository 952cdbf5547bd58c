"""Norms: which formula a module's class computes, found by trying it, and the kernel in its place.

A class is tried on weights and inputs of its own, in fp32 to 1e-6 and in bfloat16 bit by bit, so
that where it rounds is known too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import ForwardPatch
from opake.plan import fused
from opake.plan.fused import Found
from opake.plan.modules import built_class, foreign_forward
from opake.plan.step import Concern, Context, Skip, Step

_EPS, _WIDTH, _HEADS = 0.37, 8, 2
_HALF = torch.bfloat16


class RMSFormula(NamedTuple):
    """An RMS norm: the attribute of its epsilon, and the options of the operator."""

    eps: str
    offset: float
    casting_mode: str
    weighted: bool


class LayerFormula(NamedTuple):
    """A layer norm: the attribute of its epsilon, and what is added to the weight."""

    eps: str
    offset: float
    weighted: bool
    biased: bool


# ---- RMS norms


def _rms_norm(context: Context) -> Step | Skip:
    return fused.build(context, "rms_norm", examine_rms, "the model has no RMS norm")


def examine_rms(module: nn.Module) -> Found | str | None:
    """Look at a module that may be an RMS norm."""
    cls: Any = built_class(module)
    if not _is_rms(cls) or not _may_be_norm(module):
        return None
    name, why = cls.__name__, fused.unlike_file(module)
    if why:
        return f"{name}: {why}"
    if _arguments(cls) != 1:
        return f"{name} takes a gate too"
    weight = module._parameters.get("weight")
    if any(p is not None for n, p in module.named_parameters(recurse=False) if n != "weight"):
        return f"{name} has more parameters than a weight"
    formula = _rms_formula(cls, cls.forward, _shape_of(weight), fused.plain(module))
    if formula is None:
        return f"{name}.forward is another formula"
    return Found(formula, [ForwardPatch(module, run_rms)], f"{name}.forward")


def _is_rms(cls: type) -> bool:
    return "RMSNorm" in cls.__name__ or "L2Norm" in cls.__name__


@functools.cache
def _rms_formula(cls: Any, forward: Any, dims: int | None, plain: Any) -> RMSFormula | None:
    if dims not in (None, 1):
        return None
    reference = kernels.find("rms_norm").reference  # type: ignore[union-attr]
    weight = None if dims is None else fused.draw(_WIDTH, seed=1)
    x = fused.draw(64, _WIDTH)
    for eps in _epsilons(plain):
        for offset in (0.0, 1.0):
            for mode in ("llama", "gemma"):
                options = {"offset": offset, "casting_mode": mode}
                expected = functools.partial(_called, reference, options)
                if _agrees(cls, forward, plain, eps, x, {"weight": weight}, expected):
                    return RMSFormula(eps, offset, mode, dims is not None)
    return None


def _called(reference: Any, options: dict[str, Any], x: Tensor, weight: Tensor | None) -> Tensor:
    result: Tensor = reference(x, weight, _EPS, **options)
    return result


def run_rms(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run an RMS norm by its kernel."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)  # inductor fuses the stock code itself
    site: fused.Site = vars(instance)["_opake_rms_norm"]
    why = fused.strange(wrapped, instance, args, kwargs)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    formula: RMSFormula = site.formula
    weight = instance.weight if formula.weighted else None
    options = {"offset": formula.offset, "casting_mode": formula.casting_mode}
    eps = getattr(instance, formula.eps)
    return site.guard.run(_RMS(), (args[0], weight, eps), options, wrapped, args)


@functools.cache
def _RMS() -> Any:  # noqa: N802
    return kernels.find("rms_norm")


# ---- layer norms


def _layer_norm(context: Context) -> Step | Skip:
    return fused.build(context, "layer_norm", _examine_layer, "the model has no layer norm")


def _examine_layer(module: nn.Module) -> Found | str | None:
    cls: Any = built_class(module)
    if "LayerNorm" not in cls.__name__ or _is_rms(cls) or not _may_be_norm(module):
        return None
    name, why = cls.__name__, fused.unlike_file(module) if cls is not nn.LayerNorm else _own(module)
    if why:
        return f"{name}: {why}"
    parts = {n: module._parameters.get(n) for n in ("weight", "bias")}
    dims = {_shape_of(p) for p in parts.values() if p is not None}
    if len(dims) > 1 or len(getattr(module, "normalized_shape", (0,))) != 1:
        return f"{name} norms several dimensions at once"
    rank = next(iter(dims), 1)
    given = tuple(n for n, p in parts.items() if p is not None)
    formula = _layer_formula(cls, cls.forward, rank, given, fused.plain(module))
    if formula is None:
        return f"{name}.forward is another formula"
    return Found(formula, [ForwardPatch(module, _run_layer)], f"{name}.forward")


def _own(module: nn.Module) -> str:
    owner = foreign_forward(module)
    return "" if owner is None else f"an instance forward from {owner}"


@functools.cache
def _layer_formula(
    cls: Any, forward: Any, rank: int, given: tuple[str, ...], plain: Any
) -> LayerFormula | None:
    if rank not in (1, 2):
        return None
    reference = kernels.find("layer_norm").reference  # type: ignore[union-attr]
    shape = (_WIDTH,) if rank == 1 else (_HEADS, _WIDTH)
    parts = {n: fused.draw(*shape, seed=i + 1) for i, n in enumerate(given)}
    if "normalized_shape" in dict(plain):
        plain = (*((n, v) for n, v in plain if n != "normalized_shape"), _NORMALIZED)
    x = fused.draw(64, _HEADS, _WIDTH)
    for eps in _epsilons(plain):
        for offset in (0.0, 1.0) if "weight" in given else (0.0,):

            def expected(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
                weight = weight + offset if offset else weight  # noqa: B023  (called at once)
                result: Tensor = reference(x, weight, bias, _EPS)
                return result

            if _agrees(cls, forward, plain, eps, x, parts, expected, mixed=False):
                return LayerFormula(eps, offset, "weight" in given, "bias" in given)
    return None


_NORMALIZED = ("normalized_shape", (_WIDTH,))


def _run_layer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)["_opake_layer_norm"]
    formula: LayerFormula = site.formula
    if args and site.guard.few(_LAYER(), args[0], fused.widened(args[0], None)):
        return wrapped(*args, **kwargs)
    weight: Any = instance.weight if formula.weighted else None
    bias = instance.bias if formula.biased else None
    why = fused.strange(wrapped, instance, args, kwargs) or _unlike(args[0], weight, bias)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    if formula.offset:
        weight = weight + formula.offset
    given = (args[0], weight, bias, getattr(instance, formula.eps))
    return site.guard.run(_LAYER(), given, {}, wrapped, args)


def _unlike(x: Tensor, *parts: Tensor | None) -> str:
    """Say where the stock operator's dtypes are not simply those of its input."""
    if fused.autocasts(x):
        return "autocast chooses the dtype of a layer norm"
    mixed = any(p is not None and p.dtype != x.dtype for p in parts)
    return "the weight and the input differ in dtype" if mixed else ""


@functools.cache
def _LAYER() -> Any:  # noqa: N802
    return kernels.find("layer_norm")


# ---- trying a class


def _may_be_norm(module: nn.Module) -> bool:
    return not module._modules and bool(_epsilons(fused.plain(module)))


def _epsilons(plain: Any) -> list[str]:
    return [name for name, value in plain if "eps" in name and isinstance(value, float)]


def _shape_of(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.dim()


def _arguments(cls: Any) -> int:
    return len(inspect.signature(cls.forward).parameters) - 1


def _agrees(
    cls: Any,
    forward: Any,
    plain: Any,
    eps: str,
    x: Tensor,
    parts: Mapping[str, Tensor | None],
    expected: Callable[..., Tensor],
    *,
    mixed: bool = True,
) -> bool:
    """Tell whether a class computes ``expected(x, **parts)``, and rounds where that does."""
    pairs = [(torch.float32, torch.float32), (_HALF, _HALF)]
    if mixed:
        pairs.append((_HALF, torch.float32))
    for of_x, of_parts in pairs:
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        vars(made).update(plain)
        setattr(made, eps, _EPS)
        given = {n: None if p is None else p.to(of_parts) for n, p in parts.items()}
        for name, p in given.items():
            made.register_parameter(name, None if p is None else nn.Parameter(p))
        for name in ("weight", "bias"):
            if name not in given and cls is nn.LayerNorm:
                made.register_parameter(name, None)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                found = forward(made, x.to(of_x))
                wanted = expected(x.to(of_x), **given)
        except Exception:  # it wants more than that, whatever it is
            return False
        if not isinstance(found, Tensor) or found.dtype != wanted.dtype:
            return False
        close = torch.equal if of_x == _HALF else functools.partial(torch.allclose, atol=1e-6)
        if found.shape != wanted.shape or not close(found, wanted):
            return False
    return True


RMS_NORM = Concern(_rms_norm)
LAYER_NORM = Concern(_layer_norm)
