"""Refusing arguments of the wrong kind, before anything is computed. Traceable by compilers."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from torch import Tensor

from opake.errors import InvalidArgument, InvalidType

__all__ = ["integer", "number", "require_tensors"]


def require_tensors(**found: Any) -> None:
    """Refuse what is no tensor.

    Raises:
        InvalidType: names it, and what it is.
    """
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise InvalidType(f"{name} is a tensor; found {type(x).__name__}")


def number(name: str, x: Any) -> float:
    """Return a number as a Python float.

    Raises:
        InvalidType: it is none; a tensor would have to be waited for, or differentiated.
    """
    if isinstance(x, float):
        return x
    if not isinstance(x, Real):
        raise InvalidType(f"{name} is a number; found {type(x).__name__}")
    return float(x)


def integer(name: str, x: Any) -> int:
    """Return a whole number of 64 bits as a Python int.

    Raises:
        InvalidArgument: it has more bits.
        InvalidType: it is none; a float would have to be cut off, and a tensor waited for.
    """
    if isinstance(x, bool) or not isinstance(x, Integral):
        raise InvalidType(f"{name} is a whole number, an int; found {type(x).__name__}")
    whole = int(x)
    if not -(2**63) <= whole < 2**63:
        raise InvalidArgument(f"{name} is an int of 64 bits; found {whole}")
    return whole
