"""GPT-NeoX and Pythia: attention and MLP side by side, partial rotary embedding."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.gpt_neox.modeling_gpt_neox",
    base="GPTNeoXModel",
    attention=("GPTNeoXAttention",),
)
