"""Llama, and everything that ships with ``model_type="llama"`` (SmolLM2, DeepSeek-Coder, ...)."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.llama.modeling_llama",
    base="LlamaModel",
    attention=("LlamaAttention",),
    mlp="LlamaMLP",
)
