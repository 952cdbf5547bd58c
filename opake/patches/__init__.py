"""The names under which others published these entry points, as aliases.

Each returns the live, reversible scope.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opake.api import Scope, is_runtime_patched, patch, runtime

__all__ = [
    "apply_model_patches",
    "apply_peft_model_patches",
    "apply_runtime_patches",
    "apply_transformers_model_patches",
    "is_runtime_patched",
]


def apply_runtime_patches(
    *, performance: bool = True, compat: bool = True, **concerns: Any
) -> Scope:
    """Apply :func:`opake.runtime` until ``unpatch()``."""
    return runtime(performance=performance, compat=compat, **concerns).patch()


def apply_model_patches(
    model: nn.Module,
    *,
    performance: bool = True,
    compat: bool = True,
    peft: bool = True,
    fused_linear_cross_entropy: bool | None = None,
    **concerns: Any,
) -> Scope:
    """Apply :func:`opake.patched` until ``unpatch()``."""
    if fused_linear_cross_entropy is not None:
        concerns["fused_linear_cross_entropy"] = fused_linear_cross_entropy
    return patch(model, performance=performance, compat=compat, peft=peft, **concerns)


def apply_transformers_model_patches(model: nn.Module, **flags: Any) -> Scope:
    """Apply everything but the LoRA fusions."""
    return patch(model, **{**flags, "peft": False})


def apply_peft_model_patches(model: nn.Module, **flags: Any) -> Scope:
    """Apply the LoRA fusions alone."""
    return patch(model, **{"compat": False, "performance": False, "kernels": False, **flags})
