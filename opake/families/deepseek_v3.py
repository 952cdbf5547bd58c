"""DeepSeek-V3 and R1: latent attention, sigmoid routing in groups, a shared expert."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.deepseek_v3.modeling_deepseek_v3",
    base="DeepseekV3Model",
    attention=("DeepseekV3Attention",),
    mlp="DeepseekV3MLP",
    experts="DeepseekV3Experts",
)
