"""Qwen3-MoE: Qwen3 with 128 experts, of which eight run."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    base="Qwen3MoeModel",
    attention=("Qwen3MoeAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Qwen3MoeMLP",
    experts="Qwen3MoeExperts",
)
