"""What the concerns with kernels share: which modules are looked at, and how they are called."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from opake import kernels
from opake.engine import AttributePatch, Patch, stacks
from opake.engine.slots import MISSING, attribute_slot
from opake.plan.guard import Guard
from opake.plan.modules import built_class, foreign_forward, is_of_file, stock_method
from opake.plan.step import Context, Skip, Step


class Site(NamedTuple):
    """What a patched module carries for one concern."""

    guard: Guard
    formula: Any
    """What the wrapper has to know of the module's class."""


@dataclass(frozen=True)
class Found:
    """A module that fits: its formula, the patches over it, and what ``explain()`` names."""

    formula: Any
    patches: list[Patch]
    target: str


Examine = Callable[[nn.Module], Found | str | None]
"""Returns what was found in a module, why it is left to stock, or None: none of this concern."""


def slot(concern: str) -> str:
    """Return the attribute under which a module carries its :class:`Site`."""
    return f"_opake_{concern}"


def build(context: Context, concern: str, examine: Examine, absent: str) -> Step | Skip:
    """Look at every module, and patch those that fit."""
    able, reason = kernels.available()
    if not able:
        return Skip(reason)
    guard = Guard(context.flags.min_elements)
    patches: list[Patch] = []
    left: dict[str, None] = {}
    targets: dict[str, None] = {}
    count = 0
    for module in context.all_modules:
        found = examine(module)
        if isinstance(found, str):
            left[found] = None
        elif found is not None:
            site = Site(guard, found.formula)
            patches.append(AttributePatch(module, slot(concern), site, create=True))
            patches += found.patches
            targets[found.target] = None
            count += 1
    note = f"left to HF: {'; '.join(left)}" if left else ""
    if not patches:
        return Skip(note or f"left to HF: {absent}")
    context.guards[concern] = guard
    return Step(patches, ", ".join(targets), "forward", count, note)


def unlike_file(module: nn.Module) -> str:
    """Say why the ``forward`` of a module is not the one that its modeling file gives it."""
    cls: Any = built_class(module)
    owner = foreign_forward(module)
    if owner is not None:
        return f"an instance forward from {owner}"
    if not is_of_file(cls.forward, next(c for c in cls.__mro__ if "forward" in vars(c))):
        return f"{cls.__name__}.forward was replaced"
    return ""


def strange(wrapped: Any, instance: Any, args: Any, kwargs: Any, method: str = "forward") -> str:
    """Say why what lies below must run: a call that stock never makes, or somebody's wrapper."""
    if len(args) != 1 or kwargs:
        return "called with other arguments"
    if getattr(wrapped, "func", None) is not stock_method(instance, method):
        return "another wrapper lies beneath"
    return ""


def hooked(module: nn.Module) -> bool:
    """Tell whether calling a module runs more than its ``forward``."""
    return has_hooks(module) or globally_hooked()


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def globally_hooked() -> bool:
    """Tell whether somebody hooks every module there is."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


@functools.cache
def parameters(forward: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a method."""
    return tuple(inspect.signature(forward).parameters)


def is_ours(module: Any, *wrappers: Any, method: str = "forward") -> bool:
    """Tell whether nobody but us, with these wrappers, has changed a method of a module."""
    if method not in vars(module):
        return True
    stack = stacks.find(attribute_slot(module, method))
    if stack is None or stack.base is not MISSING or not stack.is_ours(vars(module)[method]):
        return False
    return all(_wrapper_of(layer.build) in wrappers for layer in stack.layers)


def _wrapper_of(build: Any) -> Any:
    return getattr(getattr(build, "__self__", None), "wrapper", None)


def widened(x: Any, layer: Any) -> int:
    """Return how many elements a linear layer makes of ``x``; those of ``x`` where it says not."""
    if not isinstance(x, Tensor):
        return 0
    out, width = getattr(layer, "out_features", 0), getattr(layer, "in_features", 0)
    return x.numel() // width * out if out and width else x.numel()


def autocasts(x: Tensor) -> bool:
    """Tell whether autocast may choose dtypes where ``x`` is."""
    return torch.is_autocast_enabled(x.device.type)


_PLAIN = (bool, int, float, str, type(None), tuple)


def plain(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return a module's own plain attributes, without what training mode it is in."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name[0] != "_" and name != "training" and isinstance(value, _PLAIN)
    )


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return the same uneven numbers at every call, drawn from no generator."""
    count = math.prod(shape)
    steps = torch.arange(count, device="cpu", dtype=torch.float64)
    return (2.0 * (steps * (0.7548776662 + 0.1 * seed) + seed).sin()).float().view(shape)


# ---- the guard that a free function finds


class _Current(threading.local):
    rope: Site | None = None
    cross_entropy: Site | None = None


_CURRENT = _Current()


def announce(concern: str) -> Any:
    """Return the wrapper that lets functions which a ``forward`` calls find its module's site."""
    return _ANNOUNCING[concern]


def site_here(concern: str) -> Site | None:
    """Return the site of the innermost announcing module that is running in this thread."""
    site: Site | None = getattr(_CURRENT, concern)
    return site


def _announcing(concern: str) -> Any:
    key = slot(concern)

    def announcing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        outer = getattr(_CURRENT, concern)
        setattr(_CURRENT, concern, vars(instance)[key])
        try:
            return wrapped(*args, **kwargs)
        finally:
            setattr(_CURRENT, concern, outer)

    announcing._opake_permanent = True  # type: ignore[attr-defined]
    return announcing


_ANNOUNCING = {concern: _announcing(concern) for concern in ("rope", "cross_entropy")}
