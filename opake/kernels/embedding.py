"""Embedding: rows of a table, and a gradient that is deterministic and written once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._arguments import require_tensors
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._bounds import check_indices
from opake.kernels._embedding import (
    embedding_bwd_kernel,
    embedding_fwd_kernel,
    embedding_keys_kernel,
    embedding_partial_kernel,
    embedding_starts_kernel,
)
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._layout import grouped
from opake.kernels._op import Op, register
from opake.kernels._triton import Launch, Tile, axes, power_of_two

# ---- reference


def embedding_reference(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """``torch.nn.functional.embedding``; on a GPU, rows that do not exist are NaN."""
    if ids.device.type != "cuda":
        return F.embedding(ids, weight, padding_idx)
    if not weight.shape[0]:
        return weight.sum() + weight.new_full((*ids.shape, weight.shape[1]), math.nan)
    outside = (ids < 0) | (ids >= weight.shape[0])
    rows = F.embedding(ids.masked_fill(outside, 0), weight, padding_idx)
    return rows.masked_fill(outside.unsqueeze(-1), math.nan)


# ---- launchers

_SWEEP = [Tile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (2, 4, 8)]
FORWARD = Launch(embedding_fwd_kernel, {"": Tile(4096, 8)}, _SWEEP)
KEYS = Launch(embedding_keys_kernel, {"": Tile(1024, 4)})
STARTS = Launch(embedding_starts_kernel, {"": Tile(512, 4)})
PARTIAL = Launch(embedding_partial_kernel, {"": Tile(1024, 4)}, _SWEEP)
# Two 16-byte loads of bf16 for each thread and row.
BACKWARD = Launch(embedding_bwd_kernel, {"": Tile(2048, 4)}, _SWEEP)

_AT_ONCE = 8  # bytes of a column that a program has on their way: more of fp32 spill on sm_80
_TILE = 8192  # elements of the gradient that a program writes; most are zeros, and soon written


def _fwd(batch: int, padding_idx: int | None, ids: Tensor, weight: Tensor) -> tuple[Tensor]:
    size, cols = weight.shape[-2:]
    out = torch.empty((*ids.shape, cols), dtype=weight.dtype, device=weight.device)
    if not out.numel():
        return (out,)
    table = grouped(weight, batch, 2)
    groups = table.shape[0]
    ids = ids.reshape(groups, -1)
    rows = ids.shape[1]
    tile = FORWARD.tile(out.device, out.numel())
    width = min(tile.elements, power_of_two(cols))
    height = max(1, min(tile.elements // width, power_of_two(rows)))
    FORWARD(
        axes(-(-rows // height) * -(-cols // width), groups),
        (table, ids, out),
        (groups, rows, size, cols, table.stride(0), table.stride(2), *ids.stride()),
        (height, width),
        max(1, min(tile.warps, height * width // 128)),
    )
    return (out,)


def _bwd(
    batch: int, padding_idx: int | None, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    ids, weight = tensors
    if not wanted[1]:
        return None, None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if not dweight.numel():
        return None, dweight
    if not ids.numel():
        return None, dweight.zero_()
    groups = weight.shape[:batch].numel()
    keys = _keys(ids.reshape(groups, -1), weight.shape[-2], padding_idx)
    keys, order = torch.sort(keys, stable=True)
    starts = _starts(keys, groups * weight.shape[-2])
    _sum(grouped(grads[0], batch), keys, order, starts, dweight)
    return None, dweight


def _keys(ids: Tensor, size: int, padding_idx: int | None) -> Tensor:
    groups, rows = ids.shape
    total = groups * size
    dtype = torch.int32 if total < 2**31 else torch.int64
    keys = torch.empty(groups * rows, dtype=dtype, device=ids.device)
    tile = KEYS.tile(ids.device, keys.numel())
    padding = -1 if padding_idx is None else padding_idx
    integers = (groups, rows, size, *ids.stride(), padding, total)
    grid = axes(-(-rows // tile.elements), groups)
    KEYS(grid, (ids, keys), integers, (tile.elements,), tile.warps)
    return keys


def _starts(keys: Tensor, total: int) -> Tensor:
    count = keys.numel()
    starts = torch.empty(total + 1, dtype=torch.int64, device=keys.device)
    tile = STARTS.tile(keys.device, total)
    grid = (-(-(total + 1) // tile.elements), 1, 1)
    constants = (count.bit_length(), tile.elements)
    STARTS(grid, (keys, starts), (count, total), constants, tile.warps)
    return starts


def _sum(grad: Tensor, keys: Tensor, order: Tensor, starts: Tensor, dweight: Tensor) -> None:
    groups, rows, cols = grad.shape
    count, size = keys.numel(), dweight.shape[-2]
    # A row that takes all tokens reads about as many chunks as there are tokens in one.
    chunk = min(1024, max(8, power_of_two(math.isqrt(count) // 2)))
    chunks = count // chunk
    partial = torch.empty((max(chunks, 1), cols), dtype=torch.float32, device=grad.device)
    at_once = _AT_ONCE // grad.element_size()
    integers = (rows, size, cols, grad.stride(0), grad.stride(1), chunk)
    if chunks:
        tile = PARTIAL.tile(grad.device, chunks * cols)
        width = min(tile.elements, power_of_two(cols))
        grid = (chunks * -(-cols // width), 1, 1)
        tensors, constants = (grad, order, keys, partial), (2 * at_once, width)
        PARTIAL(grid, tensors, (groups * size, *integers), constants, _warps(tile, width))
    tile = BACKWARD.tile(grad.device, dweight.numel())
    width = min(tile.elements, power_of_two(cols))
    on_cpu = grad.device.type == "cpu"
    height = power_of_two(-(-size // 8)) if on_cpu else max(1, min(_TILE // width, 32))
    grid = axes(-(-size // height) * -(-cols // width), groups)
    lengths = (groups, *integers, chunk.bit_length() - 1)
    results = (grad, order, starts, partial, dweight)
    BACKWARD(grid, results, lengths, (height, at_once, width), _warps(tile, width))


def _warps(tile: Tile, width: int) -> int:
    return max(1, min(tile.warps, width // 128))


# ---- autograd and functorch

_function = fused_function(
    "embedding",
    lambda padding_idx, ids, weight: embedding_reference(ids, weight, padding_idx),
    _fwd,
    _bwd,
    rows=(0,),
)


def _fused(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Any:
    return _function(padding_idx, ids, weight)


# ---- public


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of ``weight``, as ``torch.nn.functional.embedding``.

    Args:
        ids: (...), int32 or int64.
        weight: (V, H).
        padding_idx: a row that gets no gradient; counted from the end if negative.

    Returns:
        (..., H) in the dtype of ``weight``. The weight's gradient is summed in fp32, in an order
        that does not change from run to run, and rounded once.

    Raises:
        IndexError: on the CPU, an id outside of [0, V). On a GPU, its row is NaN, and it has no
            gradient.
        InvalidArgument: ``weight`` is no matrix, or has no row ``padding_idx``.
        InvalidType: ids that are no indices, or what is no tensor.
    """
    require_tensors(ids=ids, weight=weight)
    if ids.dtype not in (torch.int32, torch.int64):
        raise InvalidType(f"ids are int32 or int64; found {ids.dtype}")
    if weight.dim() != 2:
        raise InvalidArgument(f"weight is (V, H); found {tuple(weight.shape)}")
    size = weight.shape[0]
    if padding_idx is not None:
        if not -size <= padding_idx < size:
            raise InvalidArgument(f"padding_idx is one of {size} rows; found {padding_idx}")
        padding_idx %= size
    check_indices("ids", ids, size)
    result: Tensor = EMBEDDING(ids, weight, padding_idx)
    return result


# ---- registration


def _fits(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> str:
    return "" if weight.is_floating_point() else "weights are no floating-point numbers"


def _examples(draw: Draw) -> Call:
    size, cols = draw.integer(1, 20), draw.choice([1, 3, 8, 17, 64])
    shape = draw.shape(max_dims=3, max_elements=128)
    ids = draw.indices(shape, draw.choice([size, 1]))
    padding_idx = draw.choice([None, 0, size - 1, -1])
    return Call((ids, draw.tensor([size, cols], draw.dtype())), {"padding_idx": padding_idx})


def _shape(size: int, cols: int, tokens: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        weight = torch.randn(size, cols, device=device, dtype=dtype)
        return Call((torch.randint(size, (tokens,), device=device), weight))

    # Forward reads and writes the tokens' rows; backward reads those and writes every row.
    rows = tokens * cols
    return Shape(f"{size}x{cols}, {tokens}", make, 2 * rows, rows + size * cols)


EMBEDDING = register(
    Op(
        name="embedding",
        function=embedding,
        reference=embedding_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(32000, 4096, 8192), _shape(151936, 896, 8192), _shape(100, 64, 16)),
        launches=(FORWARD, KEYS, STARTS, PARTIAL, BACKWARD),
    )
)
