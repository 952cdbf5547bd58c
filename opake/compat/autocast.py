"""What autocast does under functorch.

It does not reach operators that have a rule of their own under the transforms: here their inputs
are cast as it would cast them. And on the CPU, it leaves a layer norm its half-precision input and
its fp32 weights. Stock's kernel takes both; under functorch the weights are multiplied outside of
it, which makes the output fp32 and lets the backward fail on a gradient that is wider than the
input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opake.compat.transforms import transforms_active

SYMBOLS = (("torch.overrides", "_get_current_function_mode_stack", ()),)


def autocast(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as autocast, where it is on, gives it to an operator of its dtype.

    Like there, doubles keep their dtype, and so does what is not floating point.
    """
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


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
    with wide_layer_norms():
        return function(*args, **kwargs)


def wide_layer_norms() -> AbstractContextManager[Any]:
    """Let layer norms of this thread compute in their weights' dtype; once, however often."""
    return nullcontext() if has_wide_layer_norms() else _WideLayerNorms()


def has_wide_layer_norms() -> bool:
    """Tell whether layer norms of this thread compute in their weights' dtype."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, _WideLayerNorms) for mode in modes)


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
