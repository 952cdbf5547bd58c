"""Caches of convolutions and recurrences under a functorch transform."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from opake.compat._versions import CACHE_NAMES
from opake.compat.batchify import LEADING, by_name
from opake.compat.transforms import transforms_active

SYMBOLS = (
    ("transformers.cache_utils", "LinearAttentionCacheLayerMixin", ()),
    (
        "transformers.cache_utils",
        "LinearAttentionLayer.lazy_initialization",
        ("conv_states", "recurrent_states", "state_idx"),
    ),
)

_INITIALIZE = "lazy_initialization"
_STATES = ("conv_states", "recurrent_states")


def dynamic_cache(*args: Any, **kwargs: Any) -> Any:
    """Build a ``DynamicCache``, one that can be written under a functorch transform."""
    return writable(cache_utils.DynamicCache(*args, **kwargs))


@functools.cache
def with_writable_cache(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a wrapper that makes a cache which a call brings one that a transform can write.

    Args:
        names: the positional parameters of the ``forward``.
    """

    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        call = by_name(names, args, kwargs) if transforms_active() else None
        if call is None:
            return wrapped(*args, **kwargs)
        caches = [call[name] for name in CACHE_NAMES if call.get(name) is not None]
        held: list[tuple[dict[int, Any], int, Tensor]] = []
        try:
            for cache in caches:
                held += _map_states(writable(cache), call)
            output = wrapped(*args, **kwargs)
            fields = output.values() if isinstance(output, dict) else output
            caches += [x for x in fields if isinstance(x, cache_utils.Cache)]
            return output
        except BaseException:
            for states, index, state in held:
                states[index] = state
            raise
        finally:
            for cache in caches:
                _as_before(cache)

    forward._opake_permanent = True  # type: ignore[attr-defined]
    return forward


def _map_states(cache: Any, call: dict[str, Any]) -> Iterator[tuple[dict[int, Any], int, Tensor]]:
    """Give every example states of its own, where those held were made outside the transform.

    Yields where each was, its index and what it was.
    """
    like: Any = next((call[name] for name in LEADING if call.get(name) is not None), None)
    for layer in getattr(cache, "layers", ()) if isinstance(like, Tensor) else ():
        for kind in _STATES:
            states = getattr(layer, kind, {})
            for index, state in states.items():
                if state is not None:
                    yield states, index, state
                    states[index] = state + like.new_zeros((), dtype=state.dtype)


def _as_before(cache: Any) -> None:
    for layer in getattr(cache, "layers", ()):
        vars(layer).pop(_INITIALIZE, None)


def writable(cache: Any) -> Any:
    """Let the layers of ``cache`` hold states of mapped examples, and return it.

    Stock writes states in place into zeros that belong to no example, which ``vmap`` refuses.
    """
    if transforms_active():
        for layer in getattr(cache, "layers", ()):
            is_recurrent = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
            if is_recurrent and _INITIALIZE not in vars(layer):
                vars(layer)[_INITIALIZE] = functools.partial(_initialize, layer)
    return cache


def _initialize(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize a layer of a cache, its zeros mapped as what will be written into them is."""
    type(layer).lazy_initialization(layer, *args, **kwargs)
    states: Tensor | None = kwargs.get("conv_states")
    if states is not None and transforms_active():
        index = kwargs.get("state_idx", 0)
        made: Tensor = layer.conv_states[index]
        layer.conv_states[index] = states.new_zeros(made.shape)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(layer.conv_states[index])
