"""Embeddings of tokens: torch's own and those that scale what it returns."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opake import kernels
from opake.engine import ForwardPatch
from opake.kernels._bounds import check_indices
from opake.plan import fused
from opake.plan.fused import Found
from opake.plan.modules import built_class, foreign_forward
from opake.plan.step import Concern, Context, Skip, Step

_SCALE = "embed_scale"


def _embedding(context: Context) -> Step | Skip:
    step = fused.build(context, "embedding", _examine, "the model has no embedding")
    # What lets hooks of an embedding be called under a transform has to see what they see.
    return step if isinstance(step, Skip) else dataclasses.replace(step, beneath=True)


def _examine(module: nn.Module) -> Found | str | None:
    cls: Any = built_class(module)
    if not isinstance(module, nn.Embedding):
        return None
    owner = foreign_forward(module)
    if owner is not None:
        return f"{cls.__name__}: an instance forward from {owner}"
    why = _options(module)
    if why:
        return f"{cls.__name__}: {why}"
    scaled = _scaled(cls, cls.forward)
    if scaled is None:
        return f"{cls.__name__}.forward is another formula"
    return Found(scaled, [ForwardPatch(module, _run)], f"{cls.__name__}.forward")


def _options(module: Any) -> str:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq or sparse is set"
    return ""


@functools.cache
def _scaled(cls: Any, forward: Any) -> bool | None:
    """Tell whether a class multiplies by its ``embed_scale``; None: it does something else."""
    if forward is nn.Embedding.forward:
        return False
    ids = torch.tensor([[0, 2, 1], [4, 0, 3]], device="cpu")
    for scaled in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            made = _made(cls, dtype)
            scale = getattr(made, _SCALE).to(dtype) if scaled else 1
            expected = functional.embedding(ids, made.weight) * scale
            try:
                with torch.no_grad():
                    found = forward(made, ids)
            except Exception:  # it wants more than that
                return None
            if not (isinstance(found, Tensor) and torch.equal(found, expected)):
                break
        else:
            return scaled
    return None


def _made(cls: Any, dtype: torch.dtype) -> Any:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    fields: dict[str, Any] = {
        "num_embeddings": 5,
        "embedding_dim": 8,
        "padding_idx": 0,
        "max_norm": None,
    }
    fields |= {"norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    vars(made).update(fields)
    made.weight = nn.Parameter(fused.draw(5, 8).to(dtype))
    made.register_buffer(_SCALE, torch.tensor(1.7, device="cpu"))
    return made


def _run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    site: fused.Site = vars(instance)["_opake_embedding"]
    why = fused.strange(wrapped, instance, args, kwargs) or _options(instance)
    ids: Any = args[0] if args else None
    weight = instance.weight
    if not why and not (isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)):
        why = "ids that are no int32 or int64"
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    check_indices("ids", ids, weight.shape[0])
    padding = instance.padding_idx
    given = (ids, weight, None if padding is None else padding % weight.shape[0])

    def stock(*_: Any) -> Tensor:
        return functional.embedding(ids, weight, padding)

    found = site.guard.run(_OP(), given, {}, stock, given)
    return found * instance.embed_scale.to(weight.dtype) if site.formula else found


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("embedding")


EMBEDDING = Concern(_embedding)
