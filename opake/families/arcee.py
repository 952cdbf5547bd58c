"""Arcee (AFM), a Llama whose MLP has no gate: ``down(act(up(x)))``."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.arcee.modeling_arcee",
    base="ArceeModel",
    attention=("ArceeAttention",),
)
