"""Sorting tokens by expert, and adding up what their experts said, without a look at the numbers.

A *slot* is a token at one of its K experts: slot = token * K + k. A *row* is a slot's place when
slots are sorted by expert, and by example within an expert, so that an expert's rows lie together
for a product, and those of each example for its gradient of the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opake.kernels._elementwise import block
from opake.kernels._embedding import embedding_starts_kernel
from opake.kernels._triton import Launch, Tile, axes, jit, power_of_two, tl

__all__ = ["COMBINE", "KEYS", "STARTS", "TILES", "TOGETHER", "Routing", "combine", "route"]

TOGETHER = 8
"""Tiles of rows that run side by side over all columns: what they read then stays in the cache."""


class Routing(NamedTuple):
    """Where every slot goes."""

    order: Tensor
    """(slots,), int64: the slot in each row."""
    starts: Tensor
    """(groups + 1,), int64: the first row of each group, which is an expert and an example."""
    tiles: Tensor
    """(tiles, 3), int64: the group of each tile of rows, its first row, the one behind its last."""
    height: int
    """Rows of a tile."""
    examples: int
    """Groups of one expert."""


# ---- kernels


@jit
def moe_keys_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, keys_ptr, count, of_example, examples, experts, block: tl.constexpr
):
    """Number the groups of all slots; those without an expert come behind them."""
    slot = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    expert = tl.load(ids_ptr + slot, mask=slot < count, other=-1).to(tl.int64)
    inside = (expert >= 0) & (expert < experts)
    key = tl.where(inside, expert * examples + slot // of_example, experts * examples)
    tl.store(keys_ptr + slot, key.to(keys_ptr.dtype.element_ty), mask=slot < count)


@jit
def moe_tiles_kernel(  # type: ignore[no-untyped-def]
    starts_ptr,
    tiles_ptr,
    groups,
    step,
    count,
    height: tl.constexpr,
    at_once: tl.constexpr,
    block: tl.constexpr,
):
    """Find the rows of every tile: ``step`` groups are cut into tiles as if they were one."""
    tile = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    found = tl.zeros((block,), tl.int64)
    first = tl.zeros((block,), tl.int64)
    last = tl.zeros((block,), tl.int64)
    before = tl.zeros((), tl.int64)
    for base in range(0, groups, at_once):
        group = base + tl.arange(0, at_once).to(tl.int64)
        begin = tl.load(starts_ptr + group * step, mask=group < groups, other=0)
        end = tl.load(starts_ptr + (group + 1) * step, mask=group < groups, other=0)
        many = (end - begin + height - 1) // height
        high = before + tl.cumsum(many, 0)
        low = high - many
        mine = (tile[:, None] >= low[None, :]) & (tile[:, None] < high[None, :])
        at = begin[None, :] + (tile[:, None] - low[None, :]) * height
        found += tl.sum(tl.where(mine, (group * step)[None, :], 0), 1)
        first += tl.sum(tl.where(mine, at, 0), 1)
        last += tl.sum(tl.where(mine, end[None, :], 0), 1)
        before += tl.sum(many, 0)
    exists = tile < count
    tl.store(tiles_ptr + tile * 3, found, mask=exists)
    tl.store(tiles_ptr + tile * 3 + 1, first, mask=exists)
    tl.store(tiles_ptr + tile * 3 + 2, last, mask=exists)


@jit
def moe_combine_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    ids_ptr,
    out_ptr,
    rows,
    cols,
    top_k,
    experts,
    marked: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Add a token's slots up, in fp32. One without an expert is NaN if ``marked``, else nothing."""
    row, col, mask = block(rows, cols, block_rows, block_cols)
    sums = tl.zeros((block_rows, block_cols), tl.float32)
    for k in range(top_k):
        slot = row * top_k + k
        expert = tl.load(ids_ptr + slot, mask=row < rows, other=-1).to(tl.int64)
        inside = (expert >= 0) & (expert < experts)
        y = tl.load(y_ptr + slot * cols + col, mask=mask & inside, other=0.0).to(tl.float32)
        if marked:
            y = tl.where(inside, y, float("nan"))
        sums += y
    tl.store(out_ptr + row * cols + col, sums.to(out_ptr.dtype.element_ty), mask=mask)


# ---- launchers

KEYS = Launch(moe_keys_kernel, {"": Tile(1024, 4)})
STARTS = Launch(embedding_starts_kernel, {"": Tile(512, 4)})
TILES = Launch(moe_tiles_kernel, {"": Tile(64, 4)})
_SWEEP = [Tile(elements, warps) for elements in (1024, 2048, 4096) for warps in (4, 8)]
COMBINE = Launch(moe_combine_kernel, {"": Tile(1024, 4)}, _SWEEP)


def route(ids: Tensor, experts: int, examples: int, height: int, *, shared: bool) -> Routing:
    """Sort slots by expert and example, and cut their rows into tiles.

    Args:
        ids: (slots,), contiguous, those of the first example first.
        experts: how many there are.
        examples: how many groups each expert has.
        height: of a tile.
        shared: whether tiles may hold rows of several examples, an expert's weight being the same.
    """
    slots, total = ids.numel(), experts * examples
    dtype = torch.int32 if total < 2**31 else torch.int64
    keys = torch.empty(slots, dtype=dtype, device=ids.device)
    tile = KEYS.tile(ids.device, slots)
    grid = (-(-slots // tile.elements), 1, 1)
    integers = (slots, slots // examples, examples, experts)
    KEYS(grid, (ids, keys), integers, (tile.elements,), tile.warps)
    keys, order = torch.sort(keys, stable=True)
    starts = torch.empty(total + 1, dtype=torch.int64, device=ids.device)
    tile = STARTS.tile(ids.device, total)
    grid = (-(-(total + 1) // tile.elements), 1, 1)
    constants = (slots.bit_length(), tile.elements)
    STARTS(grid, (keys, starts), (slots, total), constants, tile.warps)
    step = examples if shared else 1
    tiles = _tiles(starts, slots, total // step, step, height)
    return Routing(order, starts, tiles, height, examples)


def _tiles(starts: Tensor, slots: int, groups: int, step: int, height: int) -> Tensor:
    """Of as many tiles as there may be; those that are too many have no rows."""
    most = slots // height + min(groups, slots)
    most = -(-most // TOGETHER) * TOGETHER
    tiles = torch.empty((most, 3), dtype=torch.int64, device=starts.device)
    tile = TILES.tile(starts.device, most)
    grid = (-(-most // tile.elements), 1, 1)
    constants = (height, min(32, power_of_two(groups)), tile.elements)
    TILES(grid, (starts, tiles), (groups, step, most), constants, tile.warps)
    return tiles


def combine(y: Tensor, ids: Tensor, out: Tensor, experts: int, *, marked: bool) -> None:
    """Add up the slots ``y`` (slots, H) of every token; those without an expert are NaN, or 0."""
    slots, cols = y.shape
    rows = out.numel() // cols
    tile = COMBINE.tile(y.device, rows * cols)
    width = min(tile.elements, power_of_two(cols))
    height = max(1, min(tile.elements // width, power_of_two(rows)))
    warps = max(1, min(tile.warps, height * width // 128))
    grid = axes(-(-cols // width), -(-rows // height))
    integers = (rows, cols, slots // rows, experts)
    COMBINE(grid, (y, ids, out), integers, (marked, height, width), warps)
