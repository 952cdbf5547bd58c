"""Phi-1 and Phi-2: attention and MLP side by side, partial rotary embedding, LayerNorm."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.phi.modeling_phi",
    base="PhiModel",
    attention=("PhiAttention",),
)
