"""Fixtures that more than one test file uses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest_plugins = ["sampling", "matrix"]

with warnings.catch_warnings():  # torch 2.11 uses what it deprecates while dynamo is set up
    warnings.simplefilter("ignore", DeprecationWarning)
    torch._dynamo.reset()


@pytest.fixture
def make_llama() -> Callable[..., Any]:
    """Build the same tiny llama at every call, in eval mode."""

    def make(config: Any = None, **fields: Any) -> Any:
        torch.manual_seed(0)
        shape = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        return LlamaForCausalLM(config or LlamaConfig(**{**shape, **fields})).eval()

    return make
