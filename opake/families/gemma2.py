"""Gemma 2: soft-capped logits and attention, every other layer with a sliding window."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gemma2.modeling_gemma2",
    base="Gemma2Model",
    attention=("Gemma2Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Gemma2MLP",
)
