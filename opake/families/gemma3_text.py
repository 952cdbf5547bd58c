"""Gemma 3, text: five layers with a window to one without, bidirectional by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gemma3.modeling_gemma3",
    base="Gemma3TextModel",
    attention=("Gemma3Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Gemma3MLP",
)
