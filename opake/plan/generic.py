"""The family of a model that none was declared for: deduced, verified on a tiny copy, remembered.

What decides is the class, its config cut down to a tiny one, and the attention implementation; the
weights of the model are never looked at. So it may be on any device, quantised or wrapped.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opake import symbols
from opake.engine import PatchSet, stacks
from opake.engine.reclass import stock_class
from opake.errors import UnsupportedModel
from opake.families import Family
from opake.plan import trial
from opake.plan.deduce import deduce
from opake.plan.modules import built_class
from opake.plan.step import Plan, compat

Planner = Callable[[Any, Family], Plan]
"""Plans everything for a model that is known to be of a family."""


@dataclass(frozen=True)
class Verdict:
    """A family and what was found and verified; or None and the reason."""

    family: Family | None
    note: str
    settled: bool = True
    """False where what was raised may be no fault of the model's."""


_LARGEST = 20_000_000
"""Weights of a copy that is tried. Most have some 50 000; gradients of rows are kept in fp64."""

_DRAWS = "vmap: called random operation"
"""How functorch begins where a model draws random numbers."""

_VERDICTS: weakref.WeakKeyDictionary[type, dict[Any, Verdict]] = weakref.WeakKeyDictionary()


def judge(inner: Any, plan: Planner, text: Family | None = None) -> Verdict:
    """Return the verdict on the class and config of ``inner``; takes a second the first time.

    Args:
        inner: a transformers model.
        plan: what plans a copy of it.
        text: the family of the part that reads text, where that is a model of its own.
    """
    cls = built_class(inner)
    fields = {**compat("tiny").tiny_fields(inner.config), **trial.FIELDS}
    _without_chance(fields)
    used = inner.config._attn_implementation
    attention = used if used in ("sdpa", "eager") else "eager"
    experts = getattr(inner.config, "_experts_implementation", None)
    code = frozenset((kind, kind.forward) for kind in _kinds(inner))
    key = (type(inner.config), repr(fields), attention, experts, text, code)
    with stacks.LOCK:
        known = _VERDICTS.setdefault(cls, {})
        if key not in known:
            if compat("transforms").transforms_active():
                reason = (
                    "a copy cannot be tried inside a functorch transform: open a scope, or call "
                )
                return Verdict(None, f"{reason}opake.check(model), once outside of it")
            make = functools.partial(_build, cls, type(inner.config), fields, attention, experts)
            verdict = _verdict(make, inner, plan, text)
            if not verdict.settled:  # perhaps no fault of the model's
                return verdict
            known[key] = verdict
        return known[key]


def _kinds(model: Any) -> set[Any]:
    """Return the classes of the modules that a modeling file defines."""
    kinds = {stock_class(module) for module in model.modules()}
    return {kind for kind in kinds if not kind.__module__.startswith(_LIBRARIES)}


_LIBRARIES = ("torch.", "peft.", "accelerate.", "bitsandbytes.", "torchao.")


def _verdict(make: Callable[[], Any], inner: Any, plan: Planner, text: Family | None) -> Verdict:
    name = stock_class(inner).__name__
    with trial.apart():
        try:
            with torch.device("meta"):  # what could not be cut down costs nothing there
                model = make()
            size = sum(p.numel() for p in model.parameters())
            if size > _LARGEST:
                reason = f"a copy of {name} with every size known cut down has still {size} weights"
                return Verdict(None, reason)
            family = text or deduce(model)
            _refuse_strangers(inner, model, family)
            model = make()
        except UnsupportedModel as error:
            return Verdict(None, str(error))
        except Exception as error:  # whatever a constructor makes of a config it did not expect
            return _unsettled(f"a tiny copy of {name} cannot be built: {_told(error)}")
        trial.prepare(model)
        verdict = _try_all(model, family, name, plan)
        if verdict.family is None and _DRAWS in verdict.note:
            # Dropout of layers, noise on a router: nothing that the two sides could agree on.
            verdict = _try_all(model.eval(), family, name, plan)
        return verdict


def _refuse_strangers(inner: Any, copy: Any, family: Family) -> None:
    """Raise where the model attends, or builds masks, by modules that a copy has not got."""
    names = (family.base, *family.attention, *family.own_sdpa)
    classes = tuple(symbols.resolve(family.module, name) for name in names)
    strangers = [
        kind.__name__ for kind in _kinds(inner) - _kinds(copy) if issubclass(kind, classes)
    ]
    if strangers:
        raise UnsupportedModel(
            f"its {', '.join(sorted(strangers))} was put in after it was built, so a copy has none "
            "to be tried"
        )


def _unsettled(note: str) -> Verdict:
    return Verdict(None, note, settled=False)


def _try_all(model: Any, family: Family, name: str, plan: Planner) -> Verdict:
    """Return the first verdict in favour, else the first one."""
    try:
        model, expected = trial.loop(model)
    except Exception as error:
        return _unsettled(f"a tiny copy of {name} does not run: {_told(error)}")
    tried: list[Verdict] = []
    for reading in _readings(family):
        tried.append(_try(model, reading, expected, plan))
        if tried[-1].family is not None:
            return tried[-1]
    return tried[0]


def _readings(family: Family) -> Iterator[Family]:
    """Return the families to try, in order."""
    yield family
    if family.attention:
        # Attention that compares the name of its implementation must go on reading stock's.
        own = (*family.attention, *family.own_sdpa)
        yield dataclasses.replace(family, attention=(), own_sdpa=own)


def _try(model: Any, family: Family, expected: trial.Expected, plan: Planner) -> Verdict:
    """Return the verdict on one family: does the patched model agree with the loop?"""
    found = _found(family)
    try:
        with PatchSet(plan(model, family).patches):
            errors = trial.errors(model, expected)
    except Exception as error:  # functorch, transformers and opake all raise what they like
        reason = f"{found}, but a tiny copy raises: {_told(error)}"
        # Hooks of the caller's, as those that offload activations, do not go through functorch.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return Verdict(None, reason, settled=not hooked and not isinstance(error, MemoryError))
    width = trial.width(model)
    measured = f"gradients off by {errors.gradient:.0e} in {width}, loss by {errors.loss:.0e}"
    if errors.loss > 1e-12 and width == "fp64":
        measured += " (transformers computes it in fp32)"
    if not errors.are_rounding:
        return Verdict(None, f"{found}, but a tiny copy disagrees with the loop: {measured}")
    rows = sum(len(result.losses) for result in expected.results)
    islands = ", which has fp32 islands" if errors.gradient > 1e-12 and width == "fp64" else ""
    mode = "" if model.training else ", in eval mode: in training it draws random numbers"
    note = f"verified against the loop on {rows} rows of a tiny copy: {measured}{islands}{mode}"
    return Verdict(family, f"{found}; {note}")


def _found(family: Family) -> str:
    attention = [*family.attention, *(f"{name} (which runs SDPA)" for name in family.own_sdpa)]
    masks = f"{', '.join(family.masks) or 'no mask builder'} in {family.base}.{family.masks_in}"
    return f"read in {family.module}: attention {', '.join(attention) or 'none'}; {masks}"


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def _build(
    cls: Any, config_class: Any, fields: Mapping[str, Any], attention: str, experts: str | None
) -> Any:
    config = config_class.from_dict(dict(fields))
    if experts is not None:
        # Of the two that stock has under vmap, grouped_mm knows no fp64 on a CPU.
        config._experts_implementation = "eager" if experts == "eager" else "batched_mm"
    return cls._from_config(config, attn_implementation=attention).train()


def _without_chance(fields: dict[str, Any]) -> None:
    """Set every probability and noise to 0: the two sides draw apart."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _without_chance(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0
