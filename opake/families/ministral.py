"""Ministral: Mistral with a window in every layer or some."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.ministral.modeling_ministral",
    base="MinistralModel",
    attention=("MinistralAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="MinistralMLP",
)
