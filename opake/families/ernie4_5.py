"""ERNIE 4.5: Llama with interleaved rotary embedding and biases by option."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.ernie4_5.modeling_ernie4_5",
    base="Ernie4_5Model",
    attention=("Ernie4_5Attention",),
    mlp="Ernie4_5MLP",
)
