"""DeepSeek-V4: compressed attention beside a window, sinks, hyper-connections."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.deepseek_v4.modeling_deepseek_v4",
    base="DeepseekV4Model",
    attention=("DeepseekV4Attention",),
    masks=("create_sliding_window_causal_mask",),
)
