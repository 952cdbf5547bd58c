"""GPT-2: learned positions, LayerNorm, Conv1D projections."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gpt2.modeling_gpt2",
    base="GPT2Model",
    attention=("GPT2Attention",),
    masks=("create_causal_mask", "create_bidirectional_mask"),
)
