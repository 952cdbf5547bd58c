"""Mamba-2: state-space layers, no attention."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.mamba2.modeling_mamba2",
    base="Mamba2Model",
    masks=("create_recurrent_attention_mask",),
)
