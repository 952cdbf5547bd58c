"""Logits that are not there yet: a loss can be computed without them, all else brings them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

Loss = Callable[..., Tensor]
"""``loss(hidden, target, scale, softcap, **options)``: the cross entropy of a head's logits."""


class Formula(NamedTuple):
    """``cap * tanh(times * logits / by)``, or without a cap ``times * logits / by``."""

    times: float = 1.0
    by: float = 1.0
    bent: bool = False
    """True after ``tanh``."""
    cap: float | None = None


class Head:
    """One projection that has been put off.

    Args:
        hidden: (..., H), what is projected.
        classes: the width of the logits.
        dtype: that of the logits.
        project: returns the logits.
        loss: computes the cross entropy without them.
    """

    def __init__(
        self,
        hidden: Tensor,
        classes: int,
        dtype: torch.dtype,
        project: Callable[[], Tensor],
        loss: Loss,
    ) -> None:
        self.classes, self.project, self.loss = classes, project, loss
        self.projected = False
        self.lost = False
        """True when a loss was computed without logits."""
        self.logits = Deferred(self, hidden, dtype, self._real)

    def _real(self) -> Tensor:
        self.projected = True
        return self.project()


class Deferred:
    """Stands for logits in a model's own code: scales, caps, casts and views are remembered."""

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        formula: Formula | None = Formula(),  # noqa: B008  (a constant)
    ) -> None:
        self._head, self._hidden, self._formula, self._make = head, hidden, formula, make
        self.dtype, self.device = dtype, hidden.device

    # ---- what is known without them

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.classes))

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    def dim(self) -> int:
        return self._hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # ---- what a loss can be computed after

    def _next(
        self,
        name: str,
        *args: Any,
        hidden: Tensor | None = None,
        formula: Formula | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        def make() -> Tensor:
            found: Tensor = getattr(self.real, name)(*args)
            return found

        if self._head.projected:
            return make()
        return Deferred(
            self._head,
            self._hidden if hidden is None else hidden,
            dtype or self.dtype,
            make,
            formula or self._formula,
        )

    def float(self) -> Any:
        return self if self.dtype == torch.float32 else self._next("float", dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(given, torch.dtype) and given.is_floating_point:
            return self if given == self.dtype else self._next("to", given, dtype=given)
        if isinstance(given, (str, torch.device)) and torch.device(given) == self.device:
            return self
        return self.real.to(*args, **kwargs)

    def contiguous(self) -> Any:
        return self

    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    def _reshaped(self, name: str, shape: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not all(type(x) is int for x in sizes) or sizes[-1:] != (self._head.classes,):
            return getattr(self.real, name)(*shape)
        rows = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
        return self._next(name, *shape, hidden=rows)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        plain = all(isinstance(k, (int, slice)) or k is Ellipsis for k in keys)
        whole = keys[-1:] == (slice(None),) and (Ellipsis in keys or len(keys) == self.dim())
        few = len(keys) < self.dim() and Ellipsis not in keys
        if plain and (whole or few):
            return self._next("__getitem__", key, hidden=self._hidden[key])
        return self.real[key]

    def _scaled(self, name: str, by: Any) -> Any:
        formula = self._formula
        if type(by) not in (int, float) or not by or formula is None or formula.cap is not None:
            return getattr(self.real, name)(by)
        if formula.bent:
            if "div" in name:
                return getattr(self.real, name)(by)
            return self._next(name, by, formula=formula._replace(cap=float(by)))
        changed = {"by": formula.by * by} if "div" in name else {"times": formula.times * by}
        return self._next(name, by, formula=formula._replace(**changed))

    def __mul__(self, other: Any) -> Any:
        return self._scaled("__mul__", other)

    def __rmul__(self, other: Any) -> Any:
        return self._scaled("__rmul__", other)

    def mul(self, other: Any) -> Any:
        return self._scaled("mul", other)

    def __truediv__(self, other: Any) -> Any:
        return self._scaled("__truediv__", other) if other else self.real / other

    def div(self, other: Any) -> Any:
        return self._scaled("div", other)

    def tanh(self) -> Any:
        formula = self._formula
        if formula is None or formula.bent:
            return self.real.tanh()
        return self._next("tanh", formula=formula._replace(bent=True))

    # ---- the loss

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if function in _METHODS and isinstance(args[0], Deferred) and not kwargs:
            return getattr(args[0], _METHODS[function])(*args[1:])
        return function(*real(args), **real(kwargs))

    def _loss(self, target: Any, options: dict[str, Any]) -> Tensor | None:
        """Compute the loss without logits; None where that cannot be done."""
        formula = self._formula
        if self._head.projected or formula is None or (formula.bent and formula.cap is None):
            return None
        fits = isinstance(target, Tensor) and target.dtype == torch.int64
        if not fits or self.dim() != 2 or target.shape != self.shape[:1]:
            return None
        scale = formula.times / formula.by
        if formula.cap is not None:
            scale = formula.times * formula.cap / formula.by
        loss = self._head.loss(self._hidden, target, scale, formula.cap, **options)
        self._head.lost = True
        kind = self.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return loss if cast else loss.to(self.dtype)

    # ---- all else

    @functools.cached_property
    def real(self) -> Tensor:
        """The logits."""
        return self._make()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and torch look for in objects of any kind
            raise AttributeError(name)
        return getattr(self.real, name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Take the arguments of :func:`torch.nn.functional.cross_entropy`."""
    target, weight = real(target), real(weight)
    if isinstance(input, Deferred) and size_average is None and reduce is None:
        options = {
            "class_weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        loss = input._loss(target, options)
        if loss is not None:
            return loss
    return functional.cross_entropy(
        real(input), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def real(x: Any) -> Any:
    """Return ``x`` with the logits themselves wherever they were put off."""
    if isinstance(x, Deferred):
        return x.real
    if isinstance(x, (tuple, list, dict)):
        return tree_map(lambda leaf: leaf.real if isinstance(leaf, Deferred) else leaf, x)
    return x


_METHODS = {torch.tanh: "tanh", functional.tanh: "tanh", torch.mul: "mul", torch.div: "div"}

_ARITHMETIC = ("add", "sub", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_REFLECTED = (*(f"r{name}" for name in _ARITHMETIC), "rtruediv")
_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_ALONE = ("neg", "pos", "abs", "invert", "bool", "float", "int", "index", "complex", "array")
_OPERATORS = (*_ARITHMETIC, *_REFLECTED, *_IN_PLACE, *_COMPARED, *_ALONE, "contains", "iter")


def _operator(name: str) -> Any:
    def operator(self: Deferred, *args: Any) -> Any:
        return getattr(self.real, name)(*real(args))

    return operator


for _name in _OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]
