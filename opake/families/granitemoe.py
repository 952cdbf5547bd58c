"""Granite MoE: Granite's multipliers, experts in place of the MLP."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.granitemoe.modeling_granitemoe",
    base="GraniteMoeModel",
    attention=("GraniteMoeAttention",),
    experts="GraniteMoeExperts",
)
