"""OLMo 3: OLMo 2 with a sliding window in three layers of four."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.olmo3.modeling_olmo3",
    base="Olmo3Model",
    attention=("Olmo3Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Olmo3MLP",
)
