"""Qwen3: queries and keys normed per head, sliding windows by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.qwen3.modeling_qwen3",
    base="Qwen3Model",
    attention=("Qwen3Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Qwen3MLP",
)
