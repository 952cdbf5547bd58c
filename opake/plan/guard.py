"""Whether a kernel runs, call by call, and how often it did."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from opake.kernels import Op
from opake.kernels._guard import decide, too_few


class Guard:
    """Runs the kernels of one concern where they can and should, and counts.

    Args:
        min_elements: beats :func:`opake.kernels.config`; 0 is always, None as measured.
    """

    def __init__(self, min_elements: int | None) -> None:
        self.min_elements = min_elements
        self.ran = 0
        self.fell_back: Counter[str] = Counter()

    def call(self, op: Op, args: tuple[Any, ...], stock: Callable[..., Any]) -> Any:
        """Return ``op(*args)`` by its kernels, or ``stock(*args)``."""
        return self.run(op, args, {}, stock, args)

    def run(
        self,
        op: Op,
        args: tuple[Any, ...],
        options: dict[str, Any],
        stock: Callable[..., Any],
        given: tuple[Any, ...],
    ) -> Any:
        """Return ``op(*args, **options)`` by its kernels, or ``stock(*given)``."""
        run, reason = decide(op, args, options, self.min_elements)
        if run:
            self.ran += 1
            return op.fused(*args, **options)
        return self.stock(reason, stock, given)

    def few(self, op: Op, x: Any, elements: int) -> bool:
        """Tell at once, and count, that kernels would not pay for ``x`` and what comes of it.

        Where this says no, :meth:`run` decides.
        """
        reason = too_few(op, x, elements, self.min_elements)
        if reason:
            self.fell_back[reason] += 1
        return bool(reason)

    def stock(
        self,
        reason: str,
        stock: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return ``stock(*args, **kwargs)``, and count why."""
        self.fell_back[reason] += 1
        return stock(*args, **(kwargs or {}))

    def stats(self) -> dict[str, Any]:
        """Return ``{"ran": n, "fell_back": {reason: n}}``."""
        return {"ran": self.ran, "fell_back": dict(self.fell_back)}


_GUARDS: weakref.WeakKeyDictionary[nn.Module, dict[str, Guard]] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, guards: dict[str, Guard]) -> None:
    """Make ``guards`` those that :func:`stats` reads for ``model``."""
    _GUARDS[model] = guards


def stats(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the counts of every concern with kernels, of the scope that was opened last."""
    return {concern: guard.stats() for concern, guard in _GUARDS.get(model, {}).items()}
