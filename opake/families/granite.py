"""Granite: Llama with multipliers on embeddings, residuals, attention and logits."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.granite.modeling_granite",
    base="GraniteModel",
    attention=("GraniteAttention",),
    mlp="GraniteMLP",
)
