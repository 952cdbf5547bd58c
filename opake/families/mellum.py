"""Mellum 2: Qwen3-MoE's experts, each kind of layer with rotary parameters of its own."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.mellum.modeling_mellum",
    base="MellumModel",
    attention=("MellumAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="MellumMLP",
    experts="MellumExperts",
)
