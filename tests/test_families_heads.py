"""Every family under functorch inside a scope: its heads, configs, adapters and random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traits
import zoo
from heads import HEADS, head_batch, special, specials
from oracle import assert_exact, errors, model_loss, per_example, stock_loop, trainable
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig
from zoo import assert_loops, grid, last_hidden, turns

import opake

# --- heads


@pytest.mark.case("heads")
@turns(HEADS)
def test_every_head_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    case = HEADS[name]
    model = zoo.tiny(model_type, attn, dtype, head=case.head, **case.fields)
    assert_loops(model, head_batch(case, dtype), last_hidden if name == "base" else model_loss)


PROBLEMS = {
    "classes": "single_label_classification",
    "regression": "regression",
    "several labels": "multi_label_classification",
}


@pytest.mark.case("heads")
@turns(PROBLEMS)
def test_the_problem_type_is_found_and_kept_as_in_stock(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    case = HEADS[name]
    stock, model = (
        zoo.tiny(model_type, attn, torch.float64, head="sequence", **case.fields) for _ in range(2)
    )
    batch = {name: x[:2] for name, x in head_batch(case, torch.float64).items()}
    expected = stock_loop(stock, batch)
    assert model.config.problem_type is None
    with opake.patched(model), torch.no_grad():
        found = per_example(model, batch, batched=False)
    zoo.assert_alike([found], expected, stock, batch)
    assert model.config.problem_type == stock.config.problem_type == PROBLEMS[name]


@specials
@pytest.mark.case("heads")
@pytest.mark.parametrize(
    ("attn", "dtype"), [("sdpa", torch.float64), ("eager", torch.float32)], ids=["sdpa", "eager"]
)
def test_what_one_family_has_alone_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model, batch, loss_of = special(model_type, name, attn, dtype)
    # What moves all choices alike has no gradient but an ulp of the largest.
    floor = 0.1 if name == "double heads" and dtype == torch.float32 else 1e-3
    assert_loops(model, batch, loss_of, floor=floor)
    if "encoder_attention_mask" in batch:
        del batch["encoder_attention_mask"]
        assert_loops(model, batch, loss_of)


# --- configs

ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 4}
_YARN = {**ROPE, "rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one head for each query": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, a head_dim of its own": ("llama", {"head_dim": 6}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, another activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "llama, yarn rope": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0}},
    ),
    "mistral, a head_dim of its own": ("mistral", {"head_dim": 6}),
    "qwen2, one key head": ("qwen2", {"num_key_value_heads": 1}),
    "gemma2, biases": ("gemma2", {"attention_bias": True, "head_dim": 6}),
    "gpt2, another activation": ("gpt2", {"activation_function": "relu", "n_inner": None}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 4}),
    "deepseek_v3, queries in one step": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, one group": ("deepseek_v3", {"n_group": 1}),
    "deepseek_v3, yarn rope": ("deepseek_v3", {"rope_parameters": _YARN}),
    "falcon, a key head of its own": ("falcon", {"multi_query": False, "bias": True}),
    "falcon, ALiBi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}),
    "falcon, groups of heads": ("falcon", _GROUPS),
    "falcon, one norm": ("falcon", {**_GROUPS, "num_ln_in_parallel_attn": 1}),
    "falcon, groups and ALiBi": ("falcon", {**_GROUPS, "alibi": True}),
    "opt, narrow embeddings": ("opt", {"word_embed_proj_dim": 16}),
    "opt, narrow embeddings and norms behind": (
        "opt",
        {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "olmoe, clipped": ("olmoe", {"clip_qkv": 1.0}),
    "phi, a head for each query": ("phi", {"num_key_value_heads": 4, "qk_layernorm": True}),
    "stablelm, normed and in parallel": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "smollm3, no rope": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
    "hunyuan_v1_dense, dynamic rope": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 2.0,
                "rope_theta": 1e4,
            }
        },
    ),
    "mamba2, one group": ("mamba2", {"n_groups": 1, "use_bias": True}),
    "mamba2, one chunk": ("mamba2", {"chunk_size": 16, "residual_in_fp32": False}),
    "llama4_text, colder": ("llama4_text", {"floor_scale": 1, "attn_scale": 1.0}),
    "bert, another activation": ("bert", {"hidden_act": "relu"}),
}


@grid(CONFIGS)
def test_every_config_has_the_loops_gradients(name: str, attn: str, dtype: torch.dtype) -> None:
    model_type, fields = CONFIGS[name]
    model = zoo.tiny(model_type, attn, dtype, **fields)
    assert_loops(model, zoo.batch(zoo.EVERY), forms=(False,))


@zoo.of_each(lambda model_type: traits.switches(model_type))
def test_every_switch_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    if name.startswith("reorder") and (attn, dtype) != ("eager", torch.float32):
        attn, dtype = "eager", torch.float32  # elsewhere stock does not look at it
    fields = {name: not traits.base_config(model_type)[name]}
    model, batch = zoo.tiny(model_type, attn, dtype, **fields), zoo.batch(zoo.EVERY)
    try:
        model(**batch)
    except AttributeError as error:  # transformers 5.17 collects no logits of granitemoe's router
        pytest.skip(f"stock {model_type} cannot run with {fields}: {error}")
    assert_loops(model, batch, forms=(False,))


@turns([0.25, 1.0])
def test_partial_rotary_embedding_has_the_loops_gradients(
    model_type: str, name: float, attn: str, dtype: torch.dtype
) -> None:
    fields = traits.rotates(model_type, name)
    if fields is None:
        pytest.skip(f"stock {model_type} rotates whole heads, or none")
    model = zoo.tiny(model_type, attn, dtype, **fields)
    assert_loops(model, zoo.batch(zoo.EVERY), forms=(False,))


@zoo.families
@pytest.mark.case("tied weights")
@grid([True, False])
def test_tied_and_untied_weights_have_the_loops_gradients(
    model_type: str, name: bool, attn: str, dtype: torch.dtype
) -> None:
    model = zoo.tiny(model_type, attn, dtype, tie_word_embeddings=name)
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (words.weight is head.weight) == name
    assert_loops(model, zoo.batch(zoo.EVERY), forms=(False,))


@zoo.families
@pytest.mark.case("soft-capping")
@grid(["both", "attention", "logits", "neither"])
def test_soft_capping_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    config = AutoConfig.for_model(model_type, **zoo.FIELDS[model_type])
    if not hasattr(config, "attn_logit_softcapping"):
        pytest.skip(f"stock {model_type} caps nothing")
    caps = {
        "attn_logit_softcapping": 2.0 if name in ("both", "attention") else None,
        "final_logit_softcapping": 3.0 if name in ("both", "logits") else None,
    }
    model, batch = zoo.tiny(model_type, attn, dtype, **caps), zoo.batch(zoo.EVERY)
    assert_loops(model, batch)
    none = dict.fromkeys(caps)
    if attn == "eager" and name != "neither":  # stock's SDPA leaves the cap of attention out
        free = stock_loop(zoo.tiny(model_type, attn, dtype, **none), batch)
        bent = errors(stock_loop(model, batch), free)[1]
        if bent == 0 and name == "attention":
            pytest.skip(f"stock {model_type} does not look at the cap of attention")
        assert bent > 1e-2


# --- adapters


def with_lora(model: Any, **options: Any) -> Any:
    if not {"target_modules", "target_parameters"} & options.keys():
        options["target_modules"] = traits.projections(model)
    lora = LoraConfig(
        **{
            "r": 2,
            "lora_alpha": 3,
            "fan_in_fan_out": traits.is_transposed(model),
            "init_lora_weights": False,  # else B is zero, and with it the gradient of A
            **options,
        }
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


@pytest.mark.case("LoRA")
@turns(["attention and MLP"])
def test_lora_has_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model = with_lora(zoo.tiny(model_type, attn, dtype))
    assert all("lora_" in parameter for parameter in trainable(model))
    assert_loops(model, zoo.batch(zoo.EVERY))


@zoo.families
@pytest.mark.case("LoRA")
def test_a_scope_of_the_model_inside_is_one_of_the_peft_model(model_type: str) -> None:
    model = with_lora(zoo.tiny(model_type, None, torch.float64))
    batch = zoo.batch(zoo.EVERY)
    expected = stock_loop(model, batch)
    with opake.patched(model.get_base_model()), torch.no_grad():
        assert_exact(per_example(model, batch, batched=False), expected)


def adapted(model_type: str, name: str, attn: str, dtype: torch.dtype) -> tuple[Any, str]:
    """A model with adapters, and what the name of one of its parameters holds."""
    fields: dict[str, Any] = {"tie_word_embeddings": False}
    if name == "saved classes":
        fields |= {"head": "sequence", "num_labels": 3}
    model = zoo.tiny(model_type, attn, dtype, **fields)
    if name.startswith("adapted"):
        return _adapted(model, name.removeprefix("adapted "))
    if name == "two adapters":
        model = with_lora(model)
        other = {**model.peft_config["default"].to_dict(), "r": 3, "lora_alpha": 5}
        model.add_adapter("other", LoraConfig(**other), autocast_adapter_dtype=False)
        model.base_model.set_adapter(["default", "other"])
        return model, "lora_A.other"
    saved = {
        "saved classes": traits.classes_name,
        "a saved head": traits.head_name,
        "a saved norm": traits.last_norm,
    }[name](model)
    return with_lora(model, modules_to_save=[saved]), f"{saved}.modules_to_save"


def _adapted(model: Any, part: str) -> tuple[Any, str]:
    """The model with adapters on nothing but one part."""
    if part == "experts":
        options = {"target_parameters": traits.expert_parameters(model)}
        return with_lora(model, **options), "experts.lora_A"
    name, kind = {
        "head": (traits.head_name, "lora_A"),
        "embedding": (traits.embedding_name, "lora_embedding_A"),
    }[part]
    options = {"target_modules": [name(model)], "fan_in_fan_out": False}
    return with_lora(model, **options), f"{name(model)}.{kind}"


ADAPTED = ["adapted head", "adapted embedding"]
SAVED = ["a saved head", "a saved norm", "saved classes", "two adapters"]


@pytest.mark.case("LoRA")
@zoo.of_each(
    lambda model_type: [
        *ADAPTED,
        *SAVED,
        *(["adapted experts"] if traits.has_experts(model_type) else []),
    ]
)
def test_adapters_of_other_kinds_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model, part = adapted(model_type, name, attn, dtype)
    assert any(part in parameter for parameter in trainable(model))
    batch = zoo.batch(zoo.EVERY)
    if name == "saved classes":
        batch["labels"] = torch.arange(len(zoo.EVERY)) % 3
    assert_loops(model, batch, forms=(False,))
