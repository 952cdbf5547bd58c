"""The sum of per-example gradients, each clipped to a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.utils import _pytree as pytree

from opake.functional import _arguments
from opake.functional.per_example import chunk_grads, chunks, no_rows, wide_dtype

_CALLER = "clipped_grad_sum"
_Params = TypeVar("_Params")

# A CPU reduction in fp32 adds in sequence: 1e-5 off at 1e6 elements, 2e-4 at 1e7. Longer rows are
# reduced in pieces of this length, which are 1e-6 off.
_NORM_BLOCK = 1 << 17


@overload
def clipped_grad_sum(
    loss_fn: Callable[[_Params, Any], Tensor],
    params: _Params,
    batch: Any,
    *,
    max_norm: float,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    randomness: str = "different",
) -> tuple[_Params, Tensor, Tensor]: ...


@overload
def clipped_grad_sum(
    loss_fn: Callable[[_Params, Any], Tensor],
    params: _Params,
    batch: Any,
    *,
    max_norm: Mapping[str, float],
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    randomness: str = "different",
) -> tuple[_Params, dict[str, Tensor], Tensor]: ...


def clipped_grad_sum(
    loss_fn: Callable[[_Params, Any], Tensor],
    params: _Params,
    batch: Any,
    *,
    max_norm: float | Mapping[str, float],
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    randomness: str = "different",
) -> tuple[_Params, Tensor | dict[str, Tensor], Tensor]:
    r"""Return ``sum_i g_i * min(1, max_norm / ||g_i||)`` over the examples of a batch.

    Arguments as for `per_example_grads`; never more than ``chunk_size`` examples' gradients are
    alive. Returns ``(sums, norms, losses)``: ``sums`` like ``params``, in their dtypes (added up in
    fp32 or wider); ``norms`` (B,) before clipping, fp32 or wider; ``losses`` (B,).

    ``max_norm`` is positive (``inf`` clips nothing), or ``{regex: number}`` over a flat dict of
    ``params``: a parameter belongs to the first pattern that `re.search` finds in its name, every
    group is clipped on its own, and ``norms`` is ``{regex: (B,)}``, zero for a group of none.

    ``mask`` (B,), bool, drops the examples where it is False, whatever they hold: norm 0, loss 0,
    nothing added. An example whose norm is not finite in one group adds nothing to any group;
    its norms are returned as found. Nothing waits for the device.

    Raises `InvalidBatch` or `InvalidArgument` before ``loss_fn`` is called, and `InvalidArgument`
    if that returns no scalar. Source: Abadi et al. 2016, "Deep Learning with Differential Privacy".
    """
    leaves, _, size = _arguments.check_call(_CALLER, params, batch, chunk_size, randomness)
    _arguments.check_mask(_CALLER, mask, size)
    total = _ClippedSum(leaves, *_groups(params, len(leaves), max_norm))
    grads_of = chunk_grads(_CALLER, loss_fn, params, randomness)
    with torch.no_grad():
        for rows, chunk in chunks(batch, size, chunk_size, randomness, leaves):
            total.add(*grads_of(chunk), None if mask is None else mask[rows])
        sums, norms, losses = total.result()
    by_group = (
        dict(zip(max_norm, norms, strict=True)) if isinstance(max_norm, Mapping) else norms[0]
    )
    return pytree.tree_unflatten(sums, pytree.tree_structure(params)), by_group, losses


def _groups(
    params: Any, n_leaves: int, max_norm: float | Mapping[str, float]
) -> tuple[list[int], list[float]]:
    """The group of every leaf, and the norm that every group is clipped to."""
    if isinstance(max_norm, Mapping):
        return _arguments.norm_groups(_CALLER, params, max_norm)
    return [0] * n_leaves, [_arguments.max_norm_value(_CALLER, max_norm)]


class _ClippedSum:
    """Adds up clipped gradients chunk by chunk, holding one gradient leaf less after each."""

    def __init__(self, params: list[Tensor], group_of: list[int], max_norms: list[float]) -> None:
        self._params = params
        self._group_of = group_of
        self._max_norms = max_norms
        self._norm_dtype = wide_dtype(*(param.dtype for param in params))
        self._sums: dict[int, Tensor] = {}  # by parameter leaf, in fp32 or wider
        self._norms: list[list[Tensor]] = []
        self._losses: list[Tensor] = []

    def add(self, grads: list[Tensor], losses: Tensor, mask: Tensor | None) -> None:
        """Clip and add the gradients of one chunk, emptying the list ``grads``."""
        norms = self._group_norms(grads, losses.device)
        keep = torch.stack(norms).isfinite().all(dim=0)
        if mask is not None:
            mask = mask.to(losses.device)
            keep = keep & mask
            norms = [torch.where(mask, norm, 0) for norm in norms]
        scales = [
            torch.where(norm > limit, limit / norm, 1)
            for norm, limit in zip(norms, self._max_norms, strict=True)
        ]
        for index in reversed(range(len(grads))):
            added = _scaled_sum(grads.pop(), scales[self._group_of[index]], keep)
            if index in self._sums:
                self._sums[index].add_(added)
            else:
                self._sums[index] = added
        self._norms.append(norms)
        # A copy: the losses of a chunk can be a view that keeps its activations alive.
        self._losses.append(losses.clone() if mask is None else torch.where(mask, losses, 0))

    def result(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The sums in the parameters' dtypes, the norms of every group and the losses."""
        if not self._losses:
            norms = [no_rows(self._params) for _ in self._max_norms]
            return [torch.zeros_like(p) for p in self._params], norms, no_rows(self._params)
        sums = [self._sums.pop(index).to(p.dtype) for index, p in enumerate(self._params)]
        norms = [torch.cat(parts) for parts in zip(*self._norms, strict=True)]
        return sums, norms, torch.cat(self._losses)

    def _group_norms(self, grads: list[Tensor], device: torch.device) -> list[Tensor]:
        members: list[list[Tensor]] = [[] for _ in self._max_norms]
        for grad, group in zip(grads, self._group_of, strict=True):
            members[group].append(_row_norms(grad, self._norm_dtype).to(device))
        none = torch.zeros(grads[0].shape[0], dtype=self._norm_dtype, device=device)
        return [vector_norm(torch.stack(of), dim=0) if of else none for of in members]


def _row_norms(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The L2 norm of every row of ``grad`` (rows, ...), in ``dtype``."""
    while math.prod(grad.shape[1:]) > _NORM_BLOCK:
        parts = [
            vector_norm(x, dim=-1, dtype=dtype) for x in torch.split(grad, _NORM_BLOCK, dim=-1)
        ]
        grad = parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)
    grad = grad.unsqueeze(-1)  # a parameter without dimensions has rows of one element
    norms: Tensor = vector_norm(grad, dim=tuple(range(1, grad.ndim)), dtype=dtype)
    return norms


def _scaled_sum(grad: Tensor, scale: Tensor, keep: Tensor) -> Tensor:
    """Add up ``scale * grad`` over the rows to keep, in fp32 or wider."""
    shape = (-1, *[1] * (grad.ndim - 1))
    scale = scale.to(device=grad.device, dtype=wide_dtype(grad.dtype)).view(shape)
    drop = ~keep.to(grad.device).view(shape)
    # Gradients can be expanded or share memory, so nothing is written to them: the product is new.
    # It is NaN where a dropped row is, hence filled with zeros, not multiplied by them.
    product = grad * scale
    del grad  # the last reference: its memory is free before the sum is allocated
    return product.masked_fill_(drop, 0).sum(dim=0)
