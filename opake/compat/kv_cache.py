"""No key/value cache where nobody could use it: under a functorch transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from opake.compat._versions import has_cache
from opake.compat.batchify import by_name
from opake.compat.transforms import transforms_active


@functools.cache
def without_cache(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a wrapper that sets ``use_cache=False`` under a functorch transform.

    Only where the call gives neither ``use_cache`` nor a cache: ``config.use_cache`` would build
    one otherwise, and keep every layer's keys and values alive.
    """

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if transforms_active():
            call = by_name(names, args, kwargs)
            if call is not None and call.get("use_cache") is None and not has_cache(call):
                return wrapped(**{**call, "use_cache": False})
        return wrapped(*args, **kwargs)

    forward._opake_permanent = True  # type: ignore[attr-defined]
    return forward
