"""The operators under the names that others published."""

from __future__ import annotations

from torch import Tensor

from opake.kernels.swiglu import swiglu

__all__ = ["opake_swiglu"]


def opake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute :func:`opake.kernels.swiglu`."""
    return swiglu(gate, up)
