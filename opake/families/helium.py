"""Helium: Llama with interleaved rotary embedding."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.helium.modeling_helium",
    base="HeliumModel",
    attention=("HeliumAttention",),
    mlp="HeliumMLP",
)
