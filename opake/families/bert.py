"""BERT: bidirectional, also as a decoder and with cross-attention."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.bert.modeling_bert",
    base="BertModel",
    attention=("BertSelfAttention", "BertCrossAttention"),
    masks=("create_causal_mask", "create_bidirectional_mask"),
    masks_in="_create_attention_masks",
)
