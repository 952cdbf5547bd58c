"""OPT: learned positions that count the mask, LayerNorm before or after each block."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.opt.modeling_opt",
    base="OPTDecoder",
    attention=("OPTAttention",),
)
