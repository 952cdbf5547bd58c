"""Gemma 3 with images: the text part, and the masks that the model around it builds."""

from dataclasses import replace

from opake.families.gemma3_text import FAMILY as TEXT

FAMILY = replace(
    TEXT,
    wrapped_by={"Gemma3Model": ("create_masks_for_generate", "create_masks_for_vision_model")},
)
