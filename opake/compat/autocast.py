"""What autocast does to a layer norm on the CPU, under functorch.

There, autocast leaves a layer norm its half-precision input and its fp32 weights. Stock's kernel
takes both; under functorch the weights are multiplied outside of it, which makes the output fp32
and lets the backward fail on a gradient that is wider than the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opake.compat.transforms import transforms_active


def mixes_layer_norms(module: Any) -> bool:
    """Tell whether a layer norm in ``module`` could meet two dtypes under a functorch transform."""
    # On other devices autocast runs a layer norm in fp32; a compiler takes it apart by itself.
    # accelerate's mixed precision enables autocast beneath us where it came first.
    return (
        transforms_active()
        and (torch.is_autocast_enabled("cpu") or "_original_forward" in vars(module))
        and not torch.compiler.is_compiling()
    )


def with_wide_layer_norms(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, with layer norms that compute in their weights' dtype.

    The result has the input's dtype, as stock's kernel gives it: that computes in fp32, too.
    """
    with _WideLayerNorms():
        return function(*args, **kwargs)


class _WideLayerNorms(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_layer_norm if func is F.layer_norm else func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    wide = input if weight is None else input.to(weight.dtype)
    return F.layer_norm(wide, list(normalized_shape), weight, bias, eps).to(input.dtype)
