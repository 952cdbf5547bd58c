"""RoBERTa: BERT with positions that count from the padding token."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.roberta.modeling_roberta",
    base="RobertaModel",
    attention=("RobertaSelfAttention", "RobertaCrossAttention"),
    masks=("create_causal_mask", "create_bidirectional_mask"),
    masks_in="_create_attention_masks",
)
