"""Hypothesis profiles: HYPOTHESIS_PROFILE chooses one, ``ci`` by default."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline anywhere: the first example pays for imports, and shared machines stall.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    stateful_step_count=25,
    print_blob=True,
    database=None,
)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=300,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
