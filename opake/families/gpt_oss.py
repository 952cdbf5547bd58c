"""gpt-oss: attention sinks, windows in every other layer, clamped experts with biases."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gpt_oss.modeling_gpt_oss",
    base="GptOssModel",
    attention=("GptOssAttention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
)
