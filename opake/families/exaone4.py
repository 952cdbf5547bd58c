"""EXAONE 4: rotary embedding in the layers with a window alone, norms after each block."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.exaone4.modeling_exaone4",
    base="Exaone4Model",
    attention=("Exaone4Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Exaone4MLP",
)
