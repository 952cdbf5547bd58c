"""Persimmon: queries, keys and values in one matrix, squared ReLU."""

from opake.families import Family

FAMILY = Family(
    module="transformers.models.persimmon.modeling_persimmon",
    base="PersimmonModel",
    attention=("PersimmonAttention",),
)
