"""LayerDrop under ``vmap``: a layer is left out for all examples, as stock does with a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opake.compat.transforms import transforms_active

SYMBOLS = (
    ("torch._C", "_ExcludeDispatchKeyGuard", ()),
    ("torch._C", "DispatchKey.FuncTorchVmapMode", ()),
)


class _Shared(TorchFunctionMode):
    """Draws single numbers beneath ``vmap``, whatever its ``randomness``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and not any(args):
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def shared_draws(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run a model that asks a random number whether to run a layer."""
    if not transforms_active() or torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    with _Shared():
        return wrapped(*args, **kwargs)
