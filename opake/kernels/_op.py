"""What an operator is, and which ones there are."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from opake._lock import LOCK
from opake.errors import InvalidArgument
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._guard import Decision, decide

if TYPE_CHECKING:
    from opake.kernels._triton import Launch


def _fits(*args: Any, **kwargs: Any) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class Op:
    """One operator.

    Attributes:
        name: its attribute of :mod:`opake.kernels`.
        function: the public function, documented; it calls this object.
        reference: plain, differentiable PyTorch with the same signature.
        fused: the kernels, both passes, right under every functorch transform.
        examples: draws a call for the tests; every kind of input that is allowed.
        fits: names what in the arguments the kernels cannot compute, ``""`` if nothing.
        eager: what stock code runs, if that is not ``reference``.
        benchmarks: the shapes to time.
        launches: the kernels, for tuning.
        crossover: elements from which the kernels pay, measured, by architecture (``"sm_90"``).
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    fused: Callable[..., Any]
    examples: Callable[[Draw], Call]
    fits: Callable[..., str] = _fits
    eager: Callable[..., Any] | None = None
    benchmarks: tuple[Shape, ...] = ()
    launches: tuple[Launch, ...] = ()
    crossover: dict[str, int] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernels if they can and should, the reference otherwise."""
        if torch.compiler.is_compiling():
            return self.reference(*args, **kwargs)
        run, _ = should_run(self, *args, **kwargs)
        return self.fused(*args, **kwargs) if run else self.reference(*args, **kwargs)


_registry: dict[str, Op] = {}
_ran: dict[str, str] = {}


def register(op: Op) -> Op:
    """Add an operator: ``opake.kernels.<name>`` is its function, and every test knows it.

    Raises:
        InvalidArgument: the name is taken, or is no public identifier.
    """
    if not op.name.isidentifier() or op.name.startswith("_"):
        raise InvalidArgument(f"{op.name!r} cannot name an operator")
    if _registry.setdefault(op.name, op) is not op:
        raise InvalidArgument(f"an operator named {op.name!r} is registered already")
    return op


def ops() -> list[Op]:
    """Every operator, with the files of this directory loaded."""
    package = importlib.import_module("opake.kernels")
    with LOCK:  # a fork waits, so no child is born in the middle of an import
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"opake.kernels.{module.name}")
    return list(_registry.values())


def find(name: str) -> Op | None:
    """The operator of that name, or None."""
    if name not in _registry:
        ops()
    return _registry.get(name)


def _named(op: str | Op) -> Op:
    found = find(op) if isinstance(op, str) else op
    if found is None:
        known = ", ".join(sorted(_registry))
        raise InvalidArgument(f"no operator is named {op!r}; there are {known}")
    return found


def should_run(
    op: str | Op, *args: Any, min_elements: int | None = None, **kwargs: Any
) -> Decision:
    """Tell whether ``op`` should run its kernels on these arguments, and if not, why.

    ``min_elements`` beats what :func:`config` says. The operator asks for itself at every call;
    who must know the answer asks here and then calls ``Op.fused`` or what it would run instead.

    Raises:
        InvalidArgument: no operator has that name.
    """
    op = _named(op)
    decision = decide(op, args, kwargs, min_elements)
    _ran[op.name] = "triton" if decision[0] else "reference"
    return decision


def last_backend(op: str | Op) -> str | None:
    """What the last call, or :func:`should_run`, chose: ``"triton"``, ``"reference"`` or None.

    Compiled calls leave no trace.

    Raises:
        InvalidArgument: no operator has that name.
    """
    return _ran.get(_named(op).name)
