"""The activations that experts may have, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from opake.kernels._triton import jit, tl
from opake.kernels.geglu import _hendrycks, _normal

__all__ = ["ACTIVATIONS", "activation_of"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""By the names that configs have for them."""


@jit
def activation_of(x, name: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation and its derivative."""
    if name == "silu":
        cumulative = tl.sigmoid(x)
        slope = cumulative * (1.0 + x * (1.0 - cumulative))
    elif name == "gelu":
        cumulative, density = _normal(x)
        slope = cumulative + x * density
    else:
        cumulative, density = _hendrycks(x)
        slope = cumulative + x * density
    return x * cumulative, slope
