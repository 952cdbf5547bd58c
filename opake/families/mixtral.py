"""Mixtral: Mistral's attention, eight experts of which two run."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.mixtral.modeling_mixtral",
    base="MixtralModel",
    attention=("MixtralAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    experts="MixtralExperts",
)
