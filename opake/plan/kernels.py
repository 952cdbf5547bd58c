"""Gated activations: which modules gate what they project, found by trying them, and the kernel."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opake import kernels, symbols
from opake.engine import ForwardPatch
from opake.plan import fused
from opake.plan.fused import Found
from opake.plan.modules import built_class, is_of_file
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("activation")


class Parts(NamedTuple):
    """Which attributes of a module play which part; gate and up are one in a packed one."""

    gate: str
    up: str
    down: str
    act: str | None
    """None where SiLU is written into the code."""


class Formula(NamedTuple):
    """A gated module: its parts, and the operator of its activation."""

    parts: Parts
    op: str
    act_fn: tuple[type, Any] | None
    """What the activation was when it was looked at."""


# ---- activations


_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu_exact": functional.gelu,
    "geglu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}


_OPS: dict[tuple[type, Any], str | None] = {}


def _op_of(act_fn: Any) -> str | None:
    """Name the operator of an activation, or None; found by trying one of each kind."""
    kind = _kind(act_fn)
    if kind not in _OPS:
        upstream = ("torch.nn.modules.activation", "transformers.activations")
        known = isinstance(act_fn, nn.Module) and kind[0].__module__ in upstream
        _OPS[kind] = _tried(act_fn) if known else None
    return _OPS[kind]


def _tried(act_fn: nn.Module) -> str | None:
    x = 3 * fused.draw(64)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = type(act_fn).forward(act_fn, x.clone())
    except Exception:  # it has weights elsewhere, or wants more than one argument
        return None
    ops = (op for op, act in _ACTS.items() if torch.allclose(found, act(x), atol=1e-6))
    return next(ops, None)


def _kind(act_fn: Any) -> tuple[type, Any]:
    fields = getattr(act_fn, "__dict__", {})
    plain = (bool, int, float, str, type(None))
    own = ((n, v) for n, v in fields.items() if n[0] != "_" and n not in ("training", "forward"))
    return type(act_fn), tuple((n, v) for n, v in own if isinstance(v, plain))


def is_plain(act_fn: Any, formula: Formula) -> bool:
    """Tell whether calling ``act_fn`` is what it was and nothing else, now."""
    if formula.act_fn is None:
        return True
    kind: Any = type(act_fn)
    cls, fields = formula.act_fn
    return (
        kind is cls
        and not fused.hooked(act_fn)
        and "forward" not in vars(act_fn)
        and all(vars(act_fn).get(n) == v for n, v in fields)
    )


@functools.cache
def _op(name: str) -> Any:
    found = kernels.find(name)
    assert found is not None, name
    return found


# ---- in the place of stock's


def split(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``down(act(gate(x)) * up(x))`` with the middle fused."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)  # inductor fuses the stock code itself
    site: fused.Site = vars(instance)[_SLOT]
    parts, formula, modules = site.formula.parts, site.formula, instance._modules
    few = args and fused.widened(args[0], modules[parts.gate])
    if few and site.guard.few(_op(formula.op), args[0], few):
        return wrapped(*args, **kwargs)
    why = _strange(wrapped, instance, args, kwargs, "forward", formula)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    gate, up = modules[parts.gate](args[0]), modules[parts.up](args[0])

    def stock(gate: Tensor, up: Tensor) -> Tensor:
        act_fn = functional.silu if parts.act is None else getattr(instance, parts.act)
        product: Tensor = act_fn(gate) * up
        return product

    return modules[parts.down](site.guard.call(_op(formula.op), (gate, up), stock))


def _packed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``down(act(gate) * up)`` of the halves of one projection, with the middle fused."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)[_SLOT]
    parts, formula, modules = site.formula.parts, site.formula, instance._modules
    few = args and fused.widened(args[0], modules[parts.gate])
    if few and site.guard.few(_op(formula.op + "_packed"), args[0], few):
        return wrapped(*args, **kwargs)
    why = _strange(wrapped, instance, args, kwargs, "forward", formula)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    gate_up = instance._modules[parts.gate](args[0])

    def stock(gate_up: Tensor) -> Tensor:
        act_fn = functional.silu if parts.act is None else getattr(instance, parts.act)
        gate, up = gate_up.chunk(2, dim=-1)
        product: Tensor = up * act_fn(gate)
        return product

    product = site.guard.call(_op(formula.op + "_packed"), (gate_up,), stock)
    return instance._modules[parts.down](product)


def expert_gate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run ``act(gate) * up`` of the halves of what the experts projected."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)[_SLOT]
    op = _op(site.formula.op + "_packed")
    if args and site.guard.few(op, args[0], fused.widened(args[0], None)):
        return wrapped(*args, **kwargs)
    why = _strange(wrapped, instance, args, kwargs, "_apply_gate", site.formula)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    return site.guard.call(op, args, wrapped)


def _strange(
    wrapped: Any, instance: Any, args: Any, kwargs: Any, method: str, formula: Formula
) -> str:
    why = fused.strange(wrapped, instance, args, kwargs, method)
    name = formula.parts.act
    if why or name is None or is_plain(getattr(instance, name), formula):
        return why
    return "the activation has hooks, or is another one now"


# ---- which modules fit


def _activation(context: Context) -> Step | Skip:
    classes = declared(context)
    if isinstance(classes, Skip):
        return classes
    looked_at = functools.partial(examine, classes)
    return fused.build(context, "activation", looked_at, "the model has no gated MLP")


def declared(context: Context) -> tuple[type, ...] | Skip:
    """Return the classes that the family says are gated."""
    family, found = context.family, []
    for name in filter(None, (family.mlp, family.experts)):
        try:
            found.append(symbols.resolve(family.module, name))
        except LookupError as error:
            return Skip(f"left to HF: there is no {error}")
    return tuple(found)


def examine(classes: tuple[type, ...], module: nn.Module) -> Found | str | None:
    """Look at a module that may be gated; those of these classes are said to be."""
    cls: Any = built_class(module)
    if cls.__module__.startswith("torch."):
        return None
    named = isinstance(module, classes)
    if named and getattr(cls, "_apply_gate", None):
        return _examine_experts(module, cls)
    act = next((n for n in ("act_fn", "activation_fn", "act") if hasattr(module, n)), None)
    projections = tuple(n for n in module._modules if n != act)
    if not (named or 2 <= len(projections) <= 3):
        return None
    parts = _mlp_parts(cls, cls.forward, projections, act, fused.plain(module))
    if parts is None or not is_of_file(cls.forward, cls):
        said = named or cls.__name__.endswith("MLP")
        return f"{cls.__name__}.forward is another formula" if said else None
    why = fused.unlike_file(module)
    if why:
        return why
    kind = None if act is None else _kind(getattr(module, act))
    op = "swiglu" if act is None else _op_of(getattr(module, act))
    if op is None:
        return f"no kernel for {kind[0].__name__}"  # type: ignore[index]
    wrapper = _packed if parts.gate == parts.up else split
    target = f"{cls.__name__}.forward"
    return Found(Formula(parts, op, kind), [ForwardPatch(module, wrapper)], target)


def _examine_experts(module: nn.Module, cls: Any) -> Found | str:
    function = cls._apply_gate
    if not is_of_file(function, cls) or not _is_expert_gate(function, fused.plain(module)):
        return f"{cls.__name__}._apply_gate is another formula"
    kind = _kind(getattr(module, "act_fn", None))
    op = _op_of(getattr(module, "act_fn", None))
    if op is None:
        return f"no kernel for {kind[0].__name__}"
    used = getattr(module.config, "_experts_implementation", None)
    where = " (eager ones gate by themselves)" if used == "eager" else ""
    formula = Formula(Parts("", "", "", "act_fn"), op, kind)
    patch = ForwardPatch(module, expert_gate, slot="_apply_gate")
    return Found(formula, [patch], f"{cls.__name__}._apply_gate{where}")


@functools.cache
def _mlp_parts(
    cls: Any, forward: Any, projections: tuple[str, ...], act: str | None, plain: Any
) -> Parts | None:
    """Find out which projection is which, by the results."""
    if len(inspect.signature(forward).parameters) != 2:
        return None
    for parts in _castings(projections, act):
        packed = parts.gate == parts.up

        def expected(x: Tensor, packed: bool = packed) -> Tensor:
            gate, up = (x + 1).chunk(2, -1) if packed else (x + 1, 2 * x)
            return functional.silu(gate) * up - 3

        # A projection that is called by another name, or one too many, raises.
        roles: dict[str, Any] = {parts.gate: lambda x: x + 1, parts.down: lambda x: x - 3}
        if not packed:
            roles[parts.up] = lambda x: 2 * x
        if act is not None:
            roles[act] = functional.silu
        if _computes(forward, {**dict(plain), **roles}, expected):
            return parts
    return None


def _castings(projections: tuple[str, ...], act: str | None) -> Iterator[Parts]:
    if len(projections) == 2:
        for gate_up, down in itertools.permutations(projections):
            yield Parts(gate_up, gate_up, down, act)
    if len(projections) == 3:
        for gate, up, down in itertools.permutations(projections):
            yield Parts(gate, up, down, act)


@functools.cache
def _is_expert_gate(apply_gate: Any, plain: Any) -> bool:
    def expected(x: Tensor) -> Tensor:
        return functional.silu(x[:, :3]) * x[:, 3:]

    return _computes(apply_gate, {**dict(plain), "act_fn": functional.silu}, expected)


def _computes(method: Any, parts: dict[str, Any], expected: Callable[[Tensor], Tensor]) -> bool:
    """Run a method on an object that has these parts and nothing else."""
    x = 40 * fused.draw(8, 6)  # large enough for what clamps to show
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = method(SimpleNamespace(**parts), x)
    except Exception:  # it wants more than the parts, whatever that is
        return False
    return isinstance(found, Tensor) and torch.equal(found, expected(x))


ACTIVATION = Concern(_activation)
