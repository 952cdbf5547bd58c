"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, many experts."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.qwen3_next.modeling_qwen3_next",
    base="Qwen3NextModel",
    attention=("Qwen3NextAttention",),
    masks=("create_causal_mask", "create_recurrent_attention_mask"),
    mlp="Qwen3NextMLP",
    experts="Qwen3NextExperts",
)
