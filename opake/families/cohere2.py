"""Command R7B: Cohere with windows; no rotary embedding where there is none (NoPE)."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.cohere2.modeling_cohere2",
    base="Cohere2Model",
    attention=("Cohere2Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="Cohere2MLP",
)
