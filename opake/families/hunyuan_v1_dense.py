"""Hunyuan dense: keys and queries normed after rotation."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense",
    base="HunYuanDenseV1Model",
    attention=("HunYuanDenseV1Attention",),
    mlp="HunYuanDenseV1MLP",
)
