"""What a family has, read from its config and its modules."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from typing import Any

import torch
import zoo
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

ENCODERS = ("bert", "roberta")
"""Families that read in both directions, and are decoders by option."""


@functools.cache
def base_config(model_type: str) -> dict[str, Any]:
    """The fields of the tiny config."""
    fields: dict[str, Any] = zoo.tiny_fields(model_type).to_dict()
    return fields


def has(model_type: str, field: str) -> bool:
    """Tell whether a family's config has that field."""
    return field in base_config(model_type)


def is_encoder(model_type: str) -> bool:
    return model_type in ENCODERS


def attends(model_type: str) -> bool:
    """Tell whether a family has layers that attend."""
    return model_type != "mamba2"


def recurs(model_type: str) -> bool:
    """Tell whether a family has layers of convolutions or recurrences, which keep a state."""
    family = zoo.declared.find(model_type)
    return "create_recurrent_attention_mask" in family.masks


def has_experts(model_type: str) -> bool:
    return has(model_type, "num_experts_per_tok") or has(model_type, "moe_topk")


def without_hashing(model_type: str) -> dict[str, Any]:
    """The fields that keep a family from choosing experts by the numbers of tokens."""
    kinds = base_config(model_type).get("mlp_layer_types") or []
    return {"mlp_layer_types": [kind.replace("hash_", "") for kind in kinds]} if kinds else {}


def window(model_type: str, size: int | None) -> dict[str, Any] | None:
    """The fields that give a family a sliding window of that size in a layer; None: it has none."""
    config = base_config(model_type)
    if "sliding_window" not in config:
        return None
    fields: dict[str, Any] = {"sliding_window": size}
    if "use_sliding_window" in config:
        fields |= {"use_sliding_window": size is not None, "max_window_layers": 1}
    kinds = config.get("layer_types")
    if kinds and "full_attention" in kinds:
        first = "full_attention" if size is None else "sliding_attention"
        fields["layer_types"] = [first, *kinds[1:]]
    return {name: value for name, value in fields.items() if name in config}


def reach(model_type: str, size: int | None) -> dict[str, Any] | None:
    """The fields that let a family's layers see ``size`` tokens at most, by a window or by chunks.

    None: it has neither.
    """
    if has(model_type, "attention_chunk_size"):
        return {"attention_chunk_size": size}
    return window(model_type, size)


def depth(model_type: str, layers: int) -> dict[str, int]:
    """The fields that give a family so many layers; none where it has its own list of them."""
    config = base_config(model_type)
    count = next(name for name in ("num_hidden_layers", "n_layer") if name in config)
    listed = any(isinstance(x, list) and len(x) == config[count] for x in config.values())
    return {} if listed else {count: layers}


def dropouts(model_type: str, p: float) -> dict[str, float]:
    """The fields that let a family drop within its layers."""
    elsewhere = ("layerdrop", "classifier_dropout", "summary_first_dropout")
    names = zoo.probabilities(zoo.tiny_fields(model_type))
    return {name: p for name in names if name not in elsewhere}


def switches(model_type: str) -> list[str]:
    """The fields that turn something of the family's own on or off."""
    shared = {*PretrainedConfig().to_dict(), *_SWITCHES_ELSEWHERE}
    config = base_config(model_type).items()
    return [name for name, x in config if isinstance(x, bool) and name not in shared]


_SWITCHES_ELSEWHERE = ("use_cache", "tie_word_embeddings", "is_decoder", "add_cross_attention")
"""What tests of their own turn on and off."""


def rotates(model_type: str, part: float) -> dict[str, Any] | None:
    """The fields that let a family rotate that part of a head; None: it has no such."""
    rope = base_config(model_type).get("rope_parameters") or {}
    if "partial_rotary_factor" not in rope:
        return None
    return {"rope_parameters": {**rope, "partial_rotary_factor": part}}


def without_positions(model_type: str) -> dict[str, Any]:
    """The fields that take positions away from as many layers as a family's config can."""
    config = base_config(model_type)
    layers = config.get("num_hidden_layers")
    fields: dict[str, Any] = {
        "attn_temperature_tuning": False,
        "no_rope_layers": [0] * (layers or 0),
    }
    if "sliding_attention" in (config.get("layer_types") or []):
        fields["layer_types"] = ["full_attention"] * len(config["layer_types"])
    return {name: value for name, value in fields.items() if name in config}


def counts_positions(model: nn.Module) -> bool:
    """Tell whether positions are counted off the mask, which then has to have two dimensions."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any("attention_mask" in inspect.signature(m.forward).parameters for m in embeddings)


def projections(model: nn.Module) -> list[str]:
    """The names of the matrices in the layers that PEFT can adapt, by which it finds them."""
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        if _is_matrix(module) and module is not head and re.search(r"\.\d+\.", name):
            last = name.rpartition(".")[2]
            found[last] = found.get(last, True) and _multiplies(module)
    return sorted(name for name, fits in found.items() if fits and _adapts(model, name))


def _adapts(model: nn.Module, name: str) -> bool:
    """Tell whether PEFT adapts the matrices of that name.

    It refuses some, whose bare weights Mamba's kernels take, and takes some for experts.
    """
    config = LoraConfig(target_modules=[name], fan_in_fan_out=is_transposed(model))
    try:
        adapted = get_peft_model(copy.deepcopy(model), config)
    except ValueError:
        return False
    return any(f".{name}.lora_A" in parameter for parameter, _ in adapted.named_parameters())


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _multiplies(module: Any) -> bool:
    """Tell whether a matrix multiplies what it is given, and does nothing else to it.

    Some of its subclasses work by groups or route, and PEFT knows no adapter for these.
    """
    if not isinstance(module, nn.Linear):
        return True
    x = torch.randn(1, 2, module.in_features, dtype=module.weight.dtype)
    try:
        y = module(x)
    except RuntimeError:
        return False
    return isinstance(y, torch.Tensor) and y.shape == (1, 2, module.out_features)


def expert_parameters(model: nn.Module) -> list[str]:
    """The names of the stacked matrices of experts, as PEFT's ``target_parameters`` wants them."""
    found = {
        ".".join(f"{name}.{of}".rsplit(".", 3)[1:])
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Experts")
        for of, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    return sorted(found)


def gates(model: nn.Module) -> int:
    """How many modules compute ``down_proj(silu(gate_proj(x)) * up_proj(x))``, or experts so."""
    return sum(map(_gates, model.modules()))


def _gates(module: Any) -> bool:
    if not hasattr(module, "act_fn"):
        return False
    x = 50 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))  # where clamps show
    if getattr(module, "has_gate", False):
        found = module._apply_gate(x)
        return torch.equal(found, functional.silu(x[:, :4]) * x[:, 4:])
    if not {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys():
        return False
    x = x[:, :1].expand(-1, module.gate_proj.in_features).to(module.gate_proj.weight.dtype)
    product = functional.silu(module.gate_proj(x)) * module.up_proj(x)
    return torch.equal(module(x), module.down_proj(product))


def is_transposed(model: nn.Module) -> bool:
    """Tell whether the matrices are kept the other way round, as those of GPT-2."""
    return any(type(module).__name__ == "Conv1D" for module in model.modules())


def head_name(model: nn.Module) -> str:
    """The name of the language-modelling head."""
    return _name_of(model, model.get_output_embeddings())


def embedding_name(model: nn.Module) -> str:
    """The name of the embedding of tokens."""
    return _name_of(model, model.get_input_embeddings())


def classes_name(model: nn.Module) -> str:
    """The name of the head of a classifier."""
    return [name for name, _ in model.named_children()][-1]


def last_norm(model: nn.Module) -> str:
    """The last part of the name of the last norm before the head."""
    names = [
        name
        for name, module in model.base_model.named_modules()
        if re.search(r"norm|ln_", name, re.I) and list(module.parameters(recurse=False))
    ]
    return names[-1].rpartition(".")[2]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, m in model.named_modules() if m is wanted).rpartition(".")[2]
