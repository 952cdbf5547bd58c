"""Scatter in place, as routers and indexers do, without going example by example."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from opake.compat.transforms import in_mode

_IN_PLACE = "scatter_"


class _OutOfPlace(TorchFunctionMode):
    """Computes ``scatter_`` out of place, for which functorch has a batching rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.scatter_:
            return args[0].copy_(Tensor.scatter(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


out_of_place = in_mode(lambda module: _OutOfPlace())
"""Runs a module that scatters in place, mapped where a functorch transform maps."""


@functools.cache
def scatters(cls: type) -> bool:
    """Tell whether a method of the class, or of a base that is no layer of torch, does so."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    methods = [f for base in bases for f in vars(base).values()]
    functions = [inspect.unwrap(f) for f in methods if isinstance(f, types.FunctionType)]
    codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    return any(_IN_PLACE in code.co_names for code in codes)
