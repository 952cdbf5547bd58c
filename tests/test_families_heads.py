"""Every family under functorch inside a scope: its heads, configs, adapters and random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
        assert_exact(per_example(model, batch, batched=False), expected)
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
    assert_loops(model, batch, loss_of)
    if "encoder_attention_mask" in batch:
        del batch["encoder_attention_mask"]
        assert_loops(model, batch, loss_of)


# --- configs

ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 4}
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
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, reordered": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gpt2, another activation": ("gpt2", {"activation_function": "relu", "n_inner": None}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 4}),
    "mixtral, router losses": ("mixtral", {"output_router_logits": True}),
    "bert, another activation": ("bert", {"hidden_act": "relu"}),
}


@grid(CONFIGS)
def test_every_config_has_the_loops_gradients(name: str, attn: str, dtype: torch.dtype) -> None:
    if name == "gpt2, reordered" and (attn, dtype) != ("eager", torch.float32):
        pytest.skip("stock reorders attention on eager alone, and in fp32")
    model_type, fields = CONFIGS[name]
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
        assert errors(stock_loop(model, batch), free)[1] > 1e-2  # it bends something


# --- adapters

QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "llama": QKV + MLP,
    "qwen2": QKV + MLP,
    "mistral": QKV + MLP,
    "gemma2": QKV + MLP,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mixtral": QKV,
    "bert": ["query", "value", "dense"],
}
NORM = {"gpt2": "ln_f", "bert": "LayerNorm"}
LM_HEAD = {"bert": "decoder"}
CLASSES = {"bert": "classifier"}


def with_lora(model: Any, **options: Any) -> Any:
    model_type = model.config.model_type
    lora = LoraConfig(
        **{
            "r": 2,
            "lora_alpha": 3,
            "target_modules": TARGETS[model_type],
            "fan_in_fan_out": model_type == "gpt2",  # its Conv1D keeps weights the other way round
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
    lm_head = LM_HEAD.get(model_type, "lm_head")
    fields: dict[str, Any] = {"tie_word_embeddings": False}
    if name == "an adapted head":
        model = zoo.tiny(model_type, attn, dtype, **fields)
        options = {"target_modules": [lm_head], "fan_in_fan_out": False}
        return with_lora(model, **options), f"{lm_head}.lora_A"
    if name == "two adapters":
        model = with_lora(zoo.tiny(model_type, attn, dtype))
        other = {**model.peft_config["default"].to_dict(), "r": 3, "lora_alpha": 5}
        model.add_adapter("other", LoraConfig(**other), autocast_adapter_dtype=False)
        model.base_model.set_adapter(["default", "other"])
        return model, "lora_A.other"
    if name == "saved classes":
        fields |= {"head": "sequence", "num_labels": 3}
        saved = CLASSES.get(model_type, "score")
    else:
        saved = NORM.get(model_type, "norm") if "norm" in name else lm_head
    model = zoo.tiny(model_type, attn, dtype, **fields)
    return with_lora(model, modules_to_save=[saved]), f"{saved}.modules_to_save"


@pytest.mark.case("LoRA")
@turns(["an adapted head", "a saved head", "a saved norm", "saved classes", "two adapters"])
def test_adapters_of_other_kinds_have_the_loops_gradients(
    model_type: str, name: str, attn: str, dtype: torch.dtype
) -> None:
    model, part = adapted(model_type, name, attn, dtype)
    assert any(part in parameter for parameter in trainable(model))
    batch = zoo.batch(zoo.EVERY)
    if name == "saved classes":
        batch["labels"] = torch.arange(len(zoo.EVERY)) % 3
    assert_loops(model, batch, forms=(False,))
