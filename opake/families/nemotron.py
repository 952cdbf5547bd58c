"""Nemotron: LayerNorm that scales by 1 + w, squared ReLU, partial rotary embedding."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.nemotron.modeling_nemotron",
    base="NemotronModel",
    attention=("NemotronAttention",),
)
