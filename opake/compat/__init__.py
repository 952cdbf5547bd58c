"""Replacements that work under functorch, in plain PyTorch against transformers' contracts."""
