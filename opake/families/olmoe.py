"""OLMoE: OLMo with 64 experts, of which eight run."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.olmoe.modeling_olmoe",
    base="OlmoeModel",
    attention=("OlmoeAttention",),
    experts="OlmoeExperts",
)
