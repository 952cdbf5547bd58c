"""A tiny config of the same make: every switch as it was, every size cut down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("hidden_dim", "d_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "moe_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("moe_k", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "o_groups", "index_topk"), 2),
    **dict.fromkeys(("linear_num_value_heads", "index_n_heads", "state_size", "mamba_d_state"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_dt_rank", "mamba_chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input", "n_ctx", "embedding_size"), 64),
    "hidden_size_per_layer_input": 8,
    # Less than the tokens of a row, so that they tell.
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size"), 3),
    "block_multiple_of": 8,
}
"""What a field of that name becomes where it is larger."""

_SUFFIXES = ("_size", "_dim", "_rank", "_heads")
"""Other sizes, which become 8."""

_PERIODS = ("_period", "_interval", "_step", "_freq")
"""Every how many layers there is one of a kind, which becomes 2; an offset goes with it."""

_KEPT = ("_per_layer", "conv_kernel_size")
_DROPPED = ("torch_dtype", "dtype", "num_labels", "quantization_config", "transformers_version")
_ORIGINS = ("_name_or_path", "architectures", "auto_map")
_DERIVED = {"moe_layers": "interleave_moe_layer_step", "full_attn_idxs": "layer_types"}
_STACKS = ("decoder_layers", "encoder_layers")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def tiny_config(config: Any, **fields: Any) -> Any:
    """Return a config of the same class for a model of a few layers and thousands of weights.

    One layer of every kind that ``config`` has, two at least. ``fields`` win.
    """
    made = type(config).from_dict(tiny_fields(config, **fields))
    made._attn_implementation = config._attn_implementation
    return made


def tiny_fields(config: Any, **fields: Any) -> dict[str, Any]:
    """Return what :func:`tiny_config` makes a config of."""
    stock = config.to_dict()
    for derived, source in _DERIVED.items():
        if source in fields:
            stock.pop(derived, None)
    return {**_cut(stock, len(fields.get("layer_types", ()))), **fields}


def _cut(fields: Mapping[str, Any], wanted: int = 0) -> dict[str, Any]:
    layers = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), 0)
    kept = [*range(wanted)] or _kinds_of_layers(fields, layers)
    small = {
        name: _smaller(name, value, layers, kept)
        for name, value in fields.items()
        if name not in (*_DROPPED, *_ORIGINS)
    }
    _agree(fields, small)
    return small


def _kinds_of_layers(fields: Mapping[str, Any], layers: int) -> list[int]:
    """Return the first layer of every kind, and the first once more where all are of one."""
    kinds: dict[str, int] = {}
    for index in range(layers):
        kind = [_at(value, index, layers) for value in fields.values()]
        kinds.setdefault(repr(kind), index)
    kept = list(kinds.values())
    return [0, *kept] if len(kept) == 1 and layers > 1 else kept


def _at(value: Any, index: int, layers: int) -> Any:
    """Return what ``value`` says about the layer ``index``."""
    if _is_indices(value, layers):
        return index in value
    if _is_of_layers(value, layers):
        return value[index]
    if _is_by_index(value):
        return {int(key): x for key, x in value.items()}.get(index)
    return None


def _is_indices(value: Any, layers: int) -> bool:
    """Tell whether ``value`` lists some of the layers, in order."""
    if not isinstance(value, list) or not value or len(value) > layers:
        return False
    whole = all(type(x) is int and 0 <= x < layers for x in value)
    return whole and layers > 2 and value == sorted(set(value))


def _is_of_layers(value: Any, layers: int) -> bool:
    """Tell whether ``value`` has an entry for every layer."""
    return isinstance(value, list) and len(value) == layers > 1


def _is_by_index(value: Any) -> bool:
    """Tell whether ``value`` maps some of the layers, as JSON does it."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(str(key).isdigit() and isinstance(x, dict) for key, x in value.items())
    )


def _smaller(name: str, value: Any, layers: int, kept: list[int]) -> Any:
    if _is_indices(value, layers):
        return [index for index, old in enumerate(kept) if old in value]
    if _is_of_layers(value, layers):
        return [_smaller(name, value[index], 0, []) for index in kept]
    if isinstance(value, dict):
        return _smaller_mapping(name, value, kept)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _LAYERS:
        return len(kept)
    if name in SIZES:
        return min(value, SIZES[name])
    if name.endswith(_PERIODS) or name in _STACKS:
        return min(value, 2)
    if name.endswith("_layer_offset"):
        return min(value, 1)
    is_size = name.endswith(_SUFFIXES) and not name.endswith(_KEPT)
    return min(value, 8) if is_size else value


def _smaller_mapping(name: str, value: Mapping[str, Any], kept: list[int]) -> dict[str, Any]:
    if name == "compress_rates":
        return {kind: 2 * index for index, kind in enumerate(value, 1)}
    if _is_by_index(value):
        of = {int(key): x for key, x in value.items()}
        return {str(i): _cut(of[old]) for i, old in enumerate(kept) if old in of}
    return _cut(value) if "model_type" in value else dict(value)


def _agree(fields: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Mend what has to go with something else."""
    for heads, keys in (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_kv_heads"),
    ):
        if fields.get(keys) is not None and fields[keys] == fields.get(heads):
            small[keys] = small[heads]
    least = min(_partial_factors(fields), default=1.0)
    if isinstance(small.get("head_dim"), int):
        small["head_dim"] = max(small["head_dim"], 2 * math.ceil(1 / least))
    if "qk_rope_head_dim" in small and "kv_lora_rank" in small:
        _agree_latent(fields, small)
    for expand, heads, size in (
        ("expand", "num_heads", "head_dim"),
        ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ):
        if expand in small and heads in small and isinstance(small.get(size), int):
            small[heads] = int(small[expand] * small["hidden_size"]) // small[size]
    _agree_rotation(small, least)
    if small.get("mamba_d_ssm") is not None:
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    for index, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        value = small.get(name)
        if isinstance(value, list):
            small[name] = value = value[0]
        if value is not None and value >= small.get("vocab_size", 0):
            small[name] = index


def _agree_rotation(small: dict[str, Any], part: float) -> None:
    """Share out the pairs that are rotated among the sections of a position in several parts."""
    for name, value in small.items():
        if isinstance(value, dict) and isinstance(value.get("mrope_section"), list):
            width = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
            pairs, sections = int(width * part) // 2, len(value["mrope_section"])
            shares = [pairs // sections] * sections
            shares[-1] += pairs - sum(shares)
            small[name] = {**value, "mrope_section": shares}


def _agree_latent(fields: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Mend what latent attention derives of its rotated and its other part."""
    if fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    if fields.get("qk_head_dim") is not None:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]


def _partial_factors(fields: Mapping[str, Any]) -> Iterator[float]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _partial_factors(value)
        elif name == "partial_rotary_factor" and value:
            yield float(value)
