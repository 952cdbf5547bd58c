"""GLM: GLM-4 with its norms before each block alone."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.glm.modeling_glm",
    base="GlmModel",
    attention=("GlmAttention",),
)
