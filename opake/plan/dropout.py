"""Dropout taken out: every probability 0, wherever a module keeps it or reads it."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from typing import Any

from torch import nn

from opake.engine import AttributePatch, Patch
from opake.engine.patch import SlotPatch
from opake.engine.reclass import stock_class
from opake.engine.slots import attribute_slot
from opake.plan.step import Concern, Context, Skip, Step, compat


def _dropout(context: Context) -> Step | Skip:
    patches: list[Patch] = []
    for module in context.model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            if _is_probability(name, value, is_dropout=is_dropout):
                patches.append(AttributePatch(module, name, 0.0))
        names = _read_by(module)
        if names:
            patches.append(_QuietConfig(module, names))
    if not patches:
        return Skip("the model has no dropout")
    return Step(patches, "dropout probabilities", "attribute", len(patches))


def _is_probability(name: str, value: Any, *, is_dropout: bool) -> bool:
    return isinstance(value, float) and name == "p" if is_dropout else _is_drop(name, value)


def _is_drop(name: str, value: Any) -> bool:
    return isinstance(value, float) and ("dropout" in name or "layerdrop" in name)


def _read_by(module: nn.Module) -> tuple[str, ...]:
    """Return the probabilities that a module reads from its config whenever it is called."""
    config = vars(module).get("config")
    if not hasattr(type(config), "_attn_implementation"):
        return ()  # it has none, or none of transformers'
    names = _read_from_config(stock_class(module))
    return tuple(name for name in names if _is_drop(name, vars(config).get(name)))


@functools.cache
def _read_from_config(cls: Any) -> list[str]:
    """Return what ``forward`` reads as ``….config.name``."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    config = ("LOAD_ATTR", "config", "LOAD_ATTR")
    found = [
        str(second.argval)
        for first, second in itertools.pairwise(steps)
        if (first.opname, first.argval, second.opname) == config
    ]
    return list(dict.fromkeys(found))


class _QuietConfig(SlotPatch):
    """Lets a module read its config with probabilities of 0."""

    how = "view"

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(attribute_slot(module, "config"))
        self._names = names
        self._views = compat("config_view")
        self._quiet = self._views.Quiet()

    def build(self, below: Any) -> Any:
        return self._views.quiet_view(below, self._names, self._quiet)

    def apply(self) -> None:
        super().apply()
        self._quiet.live = True

    def revert(self) -> str | None:
        self._quiet.live = False
        return super().revert()


DROPOUT = Concern(_dropout, any_model=True)
