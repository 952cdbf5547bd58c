"""What the norms share: how rows are shared out over programs, and sums over all rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._triton import Launch, Tile, jit, power_of_two, tl

__all__ = [
    "BACKWARD_SWEEP",
    "BACKWARD_TILES",
    "FORWARD_SWEEP",
    "SUM",
    "RowTile",
    "plan",
    "sum_partials",
]


_LOOPED = 4096
"""Elements of a longer row that are taken at once: with more, registers spill on some GPUs."""


@dataclass(frozen=True)
class RowTile:
    """How much of the rows a thread and a program hold at a time.

    Attributes:
        per_thread: elements of a row, at most; four warps share what is enough for four.
        per_program: elements; shorter rows are taken several at a time.
        longest: elements of a row up to which it is held whole, and read once.
        per_sm: programs of a persistent kernel for every multiprocessor.
        stages: of loads in flight.
    """

    per_thread: int
    per_program: int
    longest: int
    per_sm: int = 4
    stages: int = 1


FORWARD_SWEEP = [
    RowTile(each, whole, 16384, per_sm, stages)
    for each in (8, 16, 32)
    for whole in (1024, 4096)
    for per_sm, stages in ((0, 1), (4, 2))
]
BACKWARD_TILES = {
    "": RowTile(per_thread=32, per_program=2048, longest=8192, per_sm=2),
    "sm_90": RowTile(per_thread=32, per_program=2048, longest=8192, per_sm=2, stages=3),
}
BACKWARD_SWEEP = [
    RowTile(each, 2048, 8192, per_sm, stages)
    for each in (8, 16, 32)
    for per_sm in (1, 2, 4)
    for stages in (1, 2)
]


class Plan(NamedTuple):
    """How a row kernel is launched: ``programs`` for each group, every one with steps of rows."""

    programs: int
    rows: int
    block: int
    loop: bool
    stages: int
    warps: int

    @property
    def constants(self) -> tuple[int | bool, ...]:
        """The last of a row kernel's parameters."""
        return (self.rows, self.block, self.loop, self.stages)


def plan(launch: Launch, groups: int, rows: int, cols: int, device: torch.device) -> Plan:
    """Share out ``groups`` of ``rows`` of ``cols`` elements; a group's sums stay together."""
    tile: Any = launch.tile(device, groups * rows * cols)
    if isinstance(tile, Tile):  # interpreted: few programs, but more than one, to test them
        loop = cols > 256
        block = 128 if loop else power_of_two(cols)
        step = 1 if loop else power_of_two(-(-rows // 6))
        return Plan(min(-(-rows // step), 3), step, block, loop, 1, 1)
    return _plan(tile, groups, rows, cols, _multiprocessors(device) if tile.per_sm else 0)


@lru_cache(4096)
def _plan(tile: RowTile, groups: int, rows: int, cols: int, multiprocessors: int) -> Plan:
    loop = cols > tile.longest
    block = power_of_two(cols)
    if loop:
        block = min(block, tile.longest, _LOOPED)
    step = 1 if loop else max(1, tile.per_program // block)
    step = min(step, power_of_two(rows))
    whole = step * block // 32
    warps = max(whole // tile.per_thread, min(whole // 16, 4), 1)
    warps = min(warps, 16)
    programs = steps = -(-rows // step)
    if multiprocessors:
        most = max(1, multiprocessors * tile.per_sm // groups)
        each = -(-steps // most)  # alike for all programs, so that none is waited for
        programs = -(-steps // each)
    return Plan(programs, step, block, loop, tile.stages, warps)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # of an H100 and H200; asked for where kernels are compiled without a GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@jit
def _sum_partials_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, out_ptr, partials, cols, blocks, block_partials: tl.constexpr, block: tl.constexpr
):
    """Sum (groups, partials, cols) over the partials, in one order."""
    group = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * block + tl.arange(0, block)[None, :]
    partial_ptr += group * partials * cols
    acc = tl.zeros((block_partials, block), tl.float32)
    for start in range(0, partials, block_partials):
        row = start + tl.arange(0, block_partials)[:, None]
        mask = (row < partials) & (col < cols)
        acc += tl.load(partial_ptr + row.to(tl.int64) * cols + col, mask=mask, other=0.0)
    out = tl.sum(acc, 0)[None, :].to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + group * cols + col, out, mask=col < cols)


SUM = Launch(_sum_partials_kernel, {"": Tile(32 * 64, 4)})


def sum_partials(partial: Tensor, out: Tensor) -> Tensor:
    """Sum (G, P, H), fp32, over P into ``out``, contiguous, of G * H elements."""
    groups, partials, cols = partial.shape
    tile = SUM.tile(partial.device, cols)
    width = min(tile.elements // 32, power_of_two(cols))
    blocks = -(-cols // width)
    SUM((groups * blocks, 1, 1), (partial, out), (partials, cols, blocks), (32, width), tile.warps)
    return out
