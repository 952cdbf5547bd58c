"""Fused Triton kernels: ``from opake import kernels as K; K.swiglu(gate, up)``.

Every public file of this directory holds one operator, complete in itself, and is found by being
there. Its functions are attributes of this package, loaded with the first one that is used, so
importing the package imports no Triton. Where a kernel cannot run, the operator computes its
PyTorch reference: same numbers, same gradients.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from opake.kernels._examples import Call as Call
from opake.kernels._examples import Draw as Draw
from opake.kernels._examples import Shape as Shape
from opake.kernels._guard import available as available
from opake.kernels._guard import config as config
from opake.kernels._op import Op as Op
from opake.kernels._op import find as find
from opake.kernels._op import last_backend as last_backend
from opake.kernels._op import ops as ops
from opake.kernels._op import register as register
from opake.kernels._op import should_run as should_run

__all__ = [
    "Call",
    "Draw",
    "Op",
    "Shape",
    "available",
    "config",
    "find",
    "last_backend",
    "ops",
    "register",
    "should_run",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = find(name)
    if op is None:
        raise AttributeError(f"module {__name__!r} has no operator {name!r}")
    return op.function


def __dir__() -> list[str]:
    return sorted({*globals(), *(op.name for op in ops())})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a loaded file to its package; the name belongs to the operator.
        if not (isinstance(value, ModuleType) and not name.startswith("_")):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
