"""The names that transformers changed between the supported versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
"""What a cache is passed as: ``cache`` since 5.23; until then ``past_key_values``, and
``cache_params`` in state-space models. ``layer_past``: in the layers of a few."""


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call brings a key/value cache of its own."""
    return any(kwargs.get(name) is not None for name in CACHE_NAMES)
