"""StableLM: LayerNorm, partial rotary embedding, queries and keys normed by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.stablelm.modeling_stablelm",
    base="StableLmModel",
    attention=("StableLmAttention",),
    mlp="StableLmMLP",
)
