"""Phi-3: queries, keys and values from one matrix, gate and up projection from another."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.phi3.modeling_phi3",
    base="Phi3Model",
    attention=("Phi3Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
)
