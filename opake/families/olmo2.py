"""OLMo 2: norms after attention and MLP, queries and keys normed as a whole."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.olmo2.modeling_olmo2",
    base="Olmo2Model",
    attention=("Olmo2Attention",),
    mlp="Olmo2MLP",
)
