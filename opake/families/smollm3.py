"""SmolLM3: no rotary embedding in every fourth layer (NoPE), sliding windows by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.smollm3.modeling_smollm3",
    base="SmolLM3Model",
    attention=("SmolLM3Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
    mlp="SmolLM3MLP",
)
