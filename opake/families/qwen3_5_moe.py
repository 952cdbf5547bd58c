"""Qwen3.5-MoE with images: the text part."""

from opake.families.qwen3_5_moe_text import FAMILY as FAMILY
