"""Llama 4, text: attention in chunks, full without rotary embedding every fourth layer."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.llama4.modeling_llama4",
    base="Llama4TextModel",
    attention=("Llama4TextAttention",),
    masks=("create_causal_mask", "create_chunked_causal_mask"),
)
