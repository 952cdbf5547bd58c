"""Qwen2 and Qwen2.5: biased q/k/v, tied in the small ones, sliding windows by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.qwen2.modeling_qwen2",
    base="Qwen2Model",
    attention=("Qwen2Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Qwen2MLP",
)
