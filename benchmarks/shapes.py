"""The shapes that the benchmarks run, with random weights."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


def smollm2_135m(**changes: object) -> LlamaForCausalLM:
    """Return a model of SmolLM2-135M's shape."""
    fields = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))


def qwen2_500m(**changes: object) -> Qwen2ForCausalLM:
    """Return a model of Qwen2.5-0.5B's shape."""
    fields = {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**fields, **changes}))
