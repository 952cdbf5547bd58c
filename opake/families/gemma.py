"""Gemma: norms that scale by 1 + w, GeGLU, tied embeddings."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gemma.modeling_gemma",
    base="GemmaModel",
    attention=("GemmaAttention",),
    mlp="GemmaMLP",
)
