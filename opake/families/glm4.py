"""GLM-4: partial, interleaved rotary embedding; gate and up projection in one matrix."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.glm4.modeling_glm4",
    base="Glm4Model",
    attention=("Glm4Attention",),
)
