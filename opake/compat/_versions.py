"""The names that transformers changed between the supported versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""The key/value cache argument: ``past_key_values`` until 5.23, ``cache`` since."""


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call brings a key/value cache of its own."""
    return any(kwargs.get(name) is not None for name in CACHE_NAMES)
