"""Command R: attention and MLP side by side, interleaved rotary embedding, scaled logits."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.cohere.modeling_cohere",
    base="CohereModel",
    attention=("CohereAttention",),
    mlp="CohereMLP",
)
