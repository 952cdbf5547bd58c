"""LFM2: short gated convolutions between layers of attention."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.lfm2.modeling_lfm2",
    base="Lfm2Model",
    attention=("Lfm2Attention",),
    masks=("create_causal_mask", "create_recurrent_attention_mask"),
)
