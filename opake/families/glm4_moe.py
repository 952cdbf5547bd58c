"""GLM-4.5: sigmoid routing in groups, a shared expert, a dense layer first."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.glm4_moe.modeling_glm4_moe",
    base="Glm4MoeModel",
    attention=("Glm4MoeAttention",),
    mlp="Glm4MoeMLP",
    experts="Glm4MoeExperts",
)
