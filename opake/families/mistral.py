"""Mistral: a sliding window where the config has one."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.mistral.modeling_mistral",
    base="MistralModel",
    attention=("MistralAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="MistralMLP",
)
