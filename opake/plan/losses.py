"""The loss of plain ``labels=``: transformers' own for causal models, by the kernel."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opake import kernels
from opake.engine import ForwardPatch, LossPatch
from opake.kernels._bounds import check_indices
from opake.plan import fused
from opake.plan.deduce import _names
from opake.plan.deferred import Deferred
from opake.plan.fused import Found
from opake.plan.modules import built_class
from opake.plan.step import Concern, Context, Skip, Step

_MODULE, _NAME = "transformers.loss.loss_utils", "ForCausalLMLoss"


def _cross_entropy(context: Context) -> Step | Skip:
    absent = "the model computes no loss, or one of its own"
    return fused.build(context, "cross_entropy", _examine, absent)


def _examine(module: nn.Module) -> Found | str | None:
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    cls: Any = built_class(module)
    if not isinstance(module, model_class) or "loss_function" not in _names(cls.forward):
        return None
    if "_loss_function" in vars(module):
        return f"{cls.__name__} has a loss function of its own"
    why = fused.unlike_file(module)
    if why:
        return f"{cls.__name__}: {why}"
    found: Any = module.loss_function
    if found is not _stock():
        return f"the loss of {cls.__name__} is {getattr(found, '__name__', found)}"
    patches = [LossPatch(module, _in_place_of(found)), ForwardPatch(module, _ANNOUNCE)]
    return Found(None, [*patches], f"{cls.__name__}.loss_function")


_ANNOUNCE = fused.announce("cross_entropy")


@functools.cache
def _stock() -> Any:
    return getattr(importlib.import_module(_MODULE), _NAME)


@functools.cache
def _in_place_of(stock: Any) -> Any:
    """Return what computes transformers' ``ForCausalLMLoss``, by the kernel where it pays."""

    @functools.wraps(stock)
    def causal_lm_loss(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        given = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        site = None if torch.compiler.is_compiling() else fused.site_here("cross_entropy")
        if site is None or isinstance(logits, Deferred):  # or somebody calls the loss by itself
            loss: Tensor = stock(*given, **kwargs)
            return loss
        computed: Tensor = _computed(site, functools.partial(stock, **kwargs), *given)
        return computed

    del causal_lm_loss.__wrapped__
    causal_lm_loss._opake_permanent = True  # type: ignore[attr-defined]
    return causal_lm_loss


def _computed(
    site: fused.Site, stock: Any, logits: Tensor, labels: Any, vocab_size: int, *others: Any
) -> Any:
    items, ignored, shifted = others
    given = (logits, labels, vocab_size, *others)
    why = _strange(logits, labels, vocab_size, items, shifted)
    if why:
        return site.guard.stock(why, stock, given)
    if shifted is None:
        shifted = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    targets = shifted.reshape(-1).to(logits.device)
    check_indices("labels", targets, vocab_size, ignored)
    if isinstance(items, Tensor):
        items = items.to(logits.device, non_blocking=True)
    options = {"ignore_index": ignored, "num_items": items}
    args = logits.reshape(-1, vocab_size), targets
    return site.guard.run(_OP(), args, options, stock, given)


def _strange(logits: Tensor, labels: Any, vocab_size: int, items: Any, shifted: Any) -> str:
    target = labels if shifted is None else shifted
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        return "labels that are no int32 or int64"
    if vocab_size != logits.shape[-1] or target.shape != logits.shape[:-1]:
        return "shapes that the kernel does not take"
    if not (items is None or isinstance(items, (int, float)) or _is_number(items)):
        return "num_items_in_batch is no number"
    return ""


def _is_number(items: Any) -> bool:
    return isinstance(items, Tensor) and items.dim() == 0


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("cross_entropy")


CROSS_ENTROPY = Concern(_cross_entropy)
