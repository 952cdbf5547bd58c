"""Falcon: one key head or a few, ALiBi by option, and torch's SDPA called by itself."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.falcon.modeling_falcon",
    base="FalconModel",
    own_sdpa=("FalconAttention",),
)
