"""StarCoder2: LayerNorm, biases, an MLP without a gate, sliding windows by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.starcoder2.modeling_starcoder2",
    base="Starcoder2Model",
    attention=("Starcoder2Attention",),
    masks=("create_causal_mask", "create_sliding_window_causal_mask"),
)
