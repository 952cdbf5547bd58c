"""The two models of the demo, each with its tokenisation."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from assets import cache_folder, find_gguf, model_version
from corpus import Tokenise
from peft import LoraConfig, get_peft_model
from torch import nn

BYTE_PAD = 256


@dataclass
class Task:
    """A model whose trainable parameters are set, and how text becomes its tokens."""

    name: str
    model: nn.Module
    tokenise: Tokenise
    pad_id: int


def load_smollm2() -> Task:
    """Return SmolLM2-135M in fp32 with LoRA of rank 2 on the last three layers."""
    folder = _converted(find_gguf())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    last = range(model.config.num_hidden_layers - 3, model.config.num_hidden_layers)
    lora = LoraConfig(
        r=2,
        lora_alpha=16,
        target_modules=["o_proj", "down_proj"],
        layers_to_transform=list(last),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks by a name that newer transformers deprecates.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted = get_peft_model(model, lora)
    return Task(
        "SmolLM2-135M",
        adapted,
        lambda texts: tokenizer(texts)["input_ids"],
        tokenizer.pad_token_id,
    )


def build_tiny() -> Task:
    """Return a Llama of about 0.2 M parameters over bytes, random and trained in full."""
    config = transformers.LlamaConfig(
        vocab_size=BYTE_PAD + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=BYTE_PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Task(
        "tiny Llama",
        transformers.LlamaForCausalLM(config),
        lambda texts: [list(text.encode()) for text in texts],
        BYTE_PAD,
    )


def _converted(gguf: Path) -> Path:
    """Return the folder with the model as safetensors, converting the GGUF file only once."""
    target = cache_folder() / f"smollm2-135m-{model_version()}"
    if target.is_dir():
        return target
    print(f"Unpacking {gguf.name} into {target}, this once")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        _convert(gguf, unfinished)
        os.rename(unfinished, target)
    except OSError:
        # Another process may have finished the same conversion first: its result is as good.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    options = {"dtype": torch.float32}
    # Releases that can compute on packed GGUF blocks do so unless told to unpack them; earlier
    # ones always unpack and have no such class.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    transformers.AutoModelForCausalLM.from_pretrained(**source, **options).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)
