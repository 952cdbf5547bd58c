"""LayerDrop under ``vmap``: a layer is left out for all examples, as stock does with a batch."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opake.compat.transforms import in_mode

SYMBOLS = (
    ("torch._C", "_ExcludeDispatchKeyGuard", ()),
    ("torch._C", "DispatchKey.FuncTorchVmapMode", ()),
)


class _Shared(TorchFunctionMode):
    """Draws the single numbers of one module's own code beneath ``vmap``, for all examples."""

    def __init__(self, home: str) -> None:
        super().__init__()
        self._home = home

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.rand or any(args):
            return func(*args, **(kwargs or {}))
        if sys._getframe(1).f_code.co_filename != self._home:
            return func(*args, **(kwargs or {}))  # a layer's or a hook's, which is not about layers
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return func(*args, **(kwargs or {}))


def _of(model: Any) -> AbstractContextManager[Any]:
    if not model.training:
        return nullcontext()
    # By file: its globals may be private ones of ours, which name no module.
    return _Shared(inspect.unwrap(type(model).forward).__code__.co_filename)


shared_draws = in_mode(_of)
"""Runs a model that asks a random number whether to run a layer."""
