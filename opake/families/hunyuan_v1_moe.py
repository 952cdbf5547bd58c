"""Hunyuan-Large: keys and queries normed after rotation, a shared expert."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe",
    base="HunYuanMoEV1Model",
    attention=("HunYuanMoEV1Attention",),
    mlp="HunYuanMoEV1MLP",
    experts="HunYuanMoEV1Experts",
)
