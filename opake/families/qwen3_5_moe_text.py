"""Qwen3.5-MoE, text: Qwen3-Next's layers, positions in three parts."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
    base="Qwen3_5MoeTextModel",
    attention=("Qwen3_5MoeAttention",),
    masks=("create_causal_mask", "create_recurrent_attention_mask"),
    mlp="Qwen3_5MoeMLP",
    experts="Qwen3_5MoeExperts",
)
