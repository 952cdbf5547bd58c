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
from opake.kernels._guard import SEVERAL_DEVICES, Decision, decide, tensors

if TYPE_CHECKING:
    from opake.kernels._triton import Launch


def _fits(*args: Any, **kwargs: Any) -> str:
    floats = all(x.is_floating_point() for x in args if isinstance(x, torch.Tensor))
    return "" if floats else "integers are left to the reference"


@dataclass(frozen=True, eq=False)
class Op:
    """One operator.

    Attributes:
        name: its attribute of :mod:`opake.kernels`.
        function: the public function, documented; it calls this object.
        reference: plain, differentiable PyTorch with the same signature.
        fused: the kernels, both passes, right under every functorch transform.
        examples: draws a call for the tests; every kind of input that is allowed.
        portable: what runs where the kernels do not, if that is not the reference: for less memory.
        fits: names what in the arguments the kernels cannot compute, ``""`` if nothing; by default
            integers.
        benchmarks: the shapes to time.
        launches: the kernels, for tuning.
        crossover: by architecture (``"sm_90"``), elements from which both passes end no later than
            the reference's, measured on an idle queue; a GPU that is not listed has
            :data:`~opake.kernels._guard.MIN_ELEMENTS`.
        work: counts the elements that ``crossover`` and ``min_elements`` mean, given the call's
            arguments; by default those of its largest tensor.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    fused: Callable[..., Any]
    examples: Callable[[Draw], Call]
    portable: Callable[..., Any] | None = None
    fits: Callable[..., str] = _fits
    benchmarks: tuple[Shape, ...] = ()
    launches: tuple[Launch, ...] = ()
    crossover: dict[str, int] = field(default_factory=dict)
    work: Callable[..., int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernels if they can and should, the reference otherwise.

        Raises:
            InvalidArgument: the inputs are on several devices.
        """
        if torch.compiler.is_compiling():
            return self.reference(*args, **kwargs)
        runs, reason = decide(self, args, kwargs, None)
        if runs:
            return self.fused(*args, **kwargs)
        if reason is SEVERAL_DEVICES:
            found = ", ".join(str(x.device) for x in tensors((*args, *kwargs.values())))
            raise InvalidArgument(f"{self.name} needs its inputs on one device; found {found}")
        record(self.name, "reference")
        return (self.portable or self.reference)(*args, **kwargs)


_registry: dict[str, Op] = {}
_ran: dict[str, str] = {}


def register(op: Op) -> Op:
    """Add an operator: ``opake.kernels.<name>`` is its function, and every test knows it.

    Raises:
        InvalidArgument: the name is taken, or is no public identifier.
    """
    if not isinstance(op, Op):
        raise InvalidArgument(f"expected opake.kernels.Op(...), found {op!r}")
    package = importlib.import_module("opake.kernels")
    name = op.name if isinstance(op.name, str) else ""
    if not name.isidentifier() or name.startswith("_") or name in vars(package):
        raise InvalidArgument(f"{op.name!r} cannot name an operator")
    if not str(getattr(op.function, "__module__", "")).startswith(package.__name__):
        ops()  # those of this directory have their names first
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
    return sorted(_registry.values(), key=lambda op: op.name)


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
    if torch.compiler.is_compiling():
        return False, "torch.compile fuses the reference itself"
    return decide(op, args, kwargs, min_elements)


def record(name: str, backend: str) -> None:
    """Note what computes a pass of the operator of that name: ``"triton"`` or ``"reference"``."""
    _ran[name] = backend


def last_backend(op: str | Op) -> str | None:
    """What computed the operator's last pass, forward or backward.

    ``"triton"``, ``"reference"``, or None where there was none. Compiled calls leave no trace.

    Raises:
        InvalidArgument: no operator has that name.
    """
    return _ran.get(_named(op).name)
