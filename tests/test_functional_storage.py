"""clipped_grad_sum holds a chunk's gradients, never a batch's: counted in bytes of live storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from opake.functional import clipped_grad_sum, per_example_grads

Params = dict[str, Tensor]


class LiveBytes(TorchDispatchMode):
    """The most bytes of storage, other than that of the given tensors, alive after any one op."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


# Four layers of 64 x 64: an example's gradients are 4 x 4096 numbers, its activations (a vector of
# 64 before and after each layer, and their gradients) under 1100, which the bound's second term
# has room for. Parameters dominate, as they do where this bound matters.
STORAGE_PARAMS = {
    f"layer{i}": torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) / 8
    for i in range(4)
}


def storage_loss(params: Params, x: Tensor) -> Tensor:
    for weight in params.values():
        x = torch.tanh(weight @ x)
    return x.cumsum(0)[-1]  # a loss that is a view: kept as it is, it would keep all sums alive


def storage_peak(run: Callable[..., Any], batch_size: int, chunk_size: int) -> int:
    batch = torch.randn(batch_size, 64)
    with LiveBytes([batch, *STORAGE_PARAMS.values()]) as live:
        run(storage_loss, STORAGE_PARAMS, batch, max_norm=1.0, chunk_size=chunk_size)
    return live.peak


def storage_bound(chunk_size: int) -> int:
    sizes = [p.nbytes for p in STORAGE_PARAMS.values()]
    return (chunk_size + 1) * sum(sizes) + 2 * chunk_size * max(sizes)


def clip_all_at_once(
    loss_fn: Callable[[Params, Tensor], Tensor],
    params: Params,
    batch: Tensor,
    *,
    max_norm: float,
    chunk_size: int,
) -> Params:
    """The naive way: every gradient, then clip, then add."""
    grads, _ = per_example_grads(loss_fn, params, batch, chunk_size=chunk_size)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    scale = (max_norm / norms).clamp(max=1)
    return {name: torch.einsum("b,b...->...", scale, g) for name, g in grads.items()}


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("max_norm", [1.0, {"layer[01]": 1.0, ".": 2.0}])
def test_storage_does_not_grow_with_the_batch(chunk_size: int, max_norm: Any) -> None:
    grouped = isinstance(max_norm, dict)

    def run(*args: Any, **options: Any) -> Any:
        mask = torch.ones(args[2].shape[0], dtype=torch.bool) if grouped else None
        return clipped_grad_sum(*args, **options | {"max_norm": max_norm, "mask": mask})

    small, large = (storage_peak(run, size, chunk_size) for size in (8, 32))
    assert small <= storage_bound(chunk_size)
    # All that an example leaves behind: its loss and its norm, or its loss, a norm per group and
    # its place in the mask.
    row = 4 + 2 * 4 + 1 if grouped else 4 + 4
    assert large - small == (32 - 8) * row


def test_storage_test_can_fail() -> None:
    small, large = (storage_peak(clip_all_at_once, size, 4) for size in (8, 32))
    assert large > storage_bound(4)
    assert large - small > 20 * sum(p.nbytes for p in STORAGE_PARAMS.values())
