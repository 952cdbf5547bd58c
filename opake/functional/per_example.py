"""Gradients of one example at a time, by ``vmap(grad)`` over chunks of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from opake.errors import InvalidArgument
from opake.functional import _arguments

_CALLER = "per_example_grads"
_Params = TypeVar("_Params")


def per_example_grads(
    loss_fn: Callable[[_Params, Any], Tensor],
    params: _Params,
    batch: Any,
    *,
    chunk_size: int | None = None,
    randomness: str = "different",
) -> tuple[_Params, Tensor]:
    r"""Return the gradient and the loss of every example.

    ``loss_fn(params, example)`` gives a scalar; ``params`` is a pytree of floating point tensors,
    ``batch`` one of tensors that share their leading size B, ``example`` the same without it.
    Returns ``(grads, losses)``: ``grads`` like ``params`` with leaves (B, \*p.shape) in their
    dtypes, ``losses`` (B,); all detached, none sharing memory with another.

    ``chunk_size`` bounds how many examples are differentiated at once. ``randomness``:
    ``"different"`` draws anew for every example, ``"same"`` once for all, ``"error"`` refuses.
    With B = 0 ``loss_fn`` is not called.

    Raises `InvalidBatch` or `InvalidArgument` before ``loss_fn`` is called, and `InvalidArgument`
    if that returns no scalar.
    """
    leaves, inputs, size = _arguments.check_call(_CALLER, params, batch, chunk_size, randomness)
    grads_of = chunk_grads(_CALLER, loss_fn, params, randomness)
    with torch.no_grad():
        if size == 0:
            grads = [leaf.new_empty((0, *leaf.shape)) for leaf in leaves]
            losses = no_rows(leaves)
        elif chunk_size is None or chunk_size >= size:
            grads, losses = grads_of(batch)
            grads, losses = _separate(grads, inputs + leaves), losses.clone()
        else:
            grads = []
            for rows, chunk in chunks(batch, size, chunk_size, randomness, leaves):
                _store(grads, rows, size, *grads_of(chunk))
            losses = grads.pop()
    return pytree.tree_unflatten(grads, pytree.tree_structure(params)), losses


def chunk_grads(
    caller: str, loss_fn: Callable[[Any, Any], Tensor], params: Any, randomness: str
) -> Callable[[Any], tuple[list[Tensor], Tensor]]:
    """A function from a chunk of the batch to its gradient leaves and losses.

    The leaves may be expanded or share memory: do not write to them.
    """

    def scalar_loss(params: Any, example: Any) -> Tensor:
        loss = loss_fn(params, example)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise InvalidArgument(f"{caller}: {_not_a_scalar(loss)}")
        return loss

    grads = vmap(grad_and_value(scalar_loss), in_dims=(None, 0), randomness=randomness)

    def of_chunk(chunk: Any) -> tuple[list[Tensor], Tensor]:
        tree, losses = grads(params, chunk)
        return pytree.tree_leaves(tree), losses

    return of_chunk


def _not_a_scalar(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return (
            f"loss_fn must return a scalar tensor, found {type(loss).__name__}; "
            "return the loss alone, such as output.loss"
        )
    if loss.ndim:
        return (
            "loss_fn must return a scalar (0-dim) tensor for one example, found shape "
            f"{tuple(loss.shape)}; reduce it with .mean() or .sum(), or, if a batch dimension of "
            "one was left over, with .squeeze(0)"
        )
    return f"loss_fn must return a floating point loss, found {loss.dtype}"


def chunks(
    batch: Any, batch_size: int, chunk_size: int | None, randomness: str, params: list[Tensor]
) -> Iterator[tuple[slice, Any]]:
    """The chunks of a batch, each with the rows that it holds; none of an empty batch.

    Under ``randomness="same"`` every chunk starts from the RNG states of the first, as in torch's
    chunked vmap (which restores the CPU's alone).
    """
    leaves, spec = pytree.tree_flatten(batch)
    step = chunk_size or max(batch_size, 1)
    restore = None
    if randomness == "same" and batch_size > step:
        restore = _rng_restorer({x.device for x in leaves + params if x.device.type == "cuda"})
    for start in range(0, batch_size, step):
        if start and restore is not None:
            restore()
        rows = slice(start, min(start + step, batch_size))
        yield rows, pytree.tree_unflatten([leaf[rows] for leaf in leaves], spec)


def _rng_restorer(devices: set[torch.device]) -> Callable[[], None]:
    cpu = torch.get_rng_state()
    cuda = [(torch.cuda.get_rng_state(device), device) for device in devices]

    def restore() -> None:
        torch.set_rng_state(cpu)
        for state, device in cuda:
            torch.cuda.set_rng_state(state, device)

    return restore


def no_rows(params: list[Tensor]) -> Tensor:
    """The (0,) losses or norms of an empty batch: fp32, or wider if a parameter is."""
    return params[0].new_empty((0,), dtype=wide_dtype(*(leaf.dtype for leaf in params)))


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The narrowest dtype that is at least fp32 and holds all of ``dtypes``."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def _separate(grads: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Give every gradient memory of its own, so that writing to one changes nothing else."""
    taken = {other.untyped_storage().data_ptr() for other in others}
    for index, grad in enumerate(grads):
        storage = grad.untyped_storage().data_ptr()
        expanded = any(s == 0 and n > 1 for s, n in zip(grad.stride(), grad.shape, strict=True))
        if expanded or (storage in taken and grad.numel()):
            grads[index] = grad.clone(memory_format=torch.contiguous_format)
        taken.add(storage)
    return grads


def _store(
    results: list[Tensor], rows: slice, batch_size: int, grads: list[Tensor], losses: Tensor
) -> None:
    """Copy the gradients and losses of some rows to where they belong in ``results``."""
    sources = [*grads, losses]
    if not results:
        results.extend(source.new_empty((batch_size, *source.shape[1:])) for source in sources)
    for result, source in zip(results, sources, strict=True):
        result[rows] = source
