"""The kernel behind :mod:`opake.kernels.rope`, and how it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._layout import grouped
from opake.kernels._triton import Launch, Tile, jit, power_of_two, tl

__all__ = ["ROTATE", "Options", "rotate", "table_gradients", "turned"]

# ---- kernels


@jit
def _turn(  # type: ignore[no-untyped-def]
    x_ptrs,
    out_ptrs,
    cos_ptrs,
    sin_ptrs,
    exists,
    known,
    half: tl.constexpr,
    tail: tl.constexpr,
    full: tl.constexpr,
    interleaved: tl.constexpr,
    back: tl.constexpr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    pairs: tl.constexpr,
    tails: tl.constexpr,
):
    """Rotate (tokens, heads) rows; ``cos_ptrs``, ``sin_ptrs`` and ``known`` are (tokens, 1)."""
    for start in range(0, half, pairs):
        pair = start + tl.arange(0, pairs)[None, None, :]
        column = 2 * start + tl.arange(0, 2 * pairs)[None, None, :]
        if full and interleaved:
            mask = known & (column < 2 * half)
            cos = tl.load(cos_ptrs + column, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptrs + column, mask=mask, other=0.0).to(tl.float32)
            cos_a, cos_b = tl.split(tl.reshape(cos, (tokens, 1, pairs, 2)))
            sin_a, sin_b = tl.split(tl.reshape(sin, (tokens, 1, pairs, 2)))
        else:
            mask = known & (pair < half)
            cos_a = tl.load(cos_ptrs + pair, mask=mask, other=0.0).to(tl.float32)
            sin_a = tl.load(sin_ptrs + pair, mask=mask, other=0.0).to(tl.float32)
            cos_b, sin_b = cos_a, sin_a
            if full:
                cos_b = tl.load(cos_ptrs + half + pair, mask=mask, other=0.0).to(tl.float32)
                sin_b = tl.load(sin_ptrs + half + pair, mask=mask, other=0.0).to(tl.float32)
        # A position that the tables do not have.
        cos_a, cos_b = tl.where(known, cos_a, float("nan")), tl.where(known, cos_b, float("nan"))
        if interleaved:
            mask = exists & (column < 2 * half)
            x = tl.load(x_ptrs + column, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (tokens, heads, pairs, 2)))
        else:
            mask = exists & (pair < half)
            a = tl.load(x_ptrs + pair, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_ptrs + half + pair, mask=mask, other=0.0).to(tl.float32)
        if back:
            out_a, out_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        else:
            out_a, out_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        if interleaved:
            out = tl.reshape(tl.join(out_a, out_b), (tokens, heads, 2 * pairs))
            tl.store(out_ptrs + column, out.to(out_ptrs.dtype.element_ty), mask=mask)
        else:
            tl.store(out_ptrs + pair, out_a.to(out_ptrs.dtype.element_ty), mask=mask)
            tl.store(out_ptrs + half + pair, out_b.to(out_ptrs.dtype.element_ty), mask=mask)
    for start in range(0, tail, tails):
        column = start + tl.arange(0, tails)[None, None, :]
        mask = exists & (column < tail)
        x = tl.load(x_ptrs + 2 * half + column, mask=mask, other=0.0)
        tl.store(out_ptrs + 2 * half + column, x.to(out_ptrs.dtype.element_ty), mask=mask)


@jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    x_out_ptr,
    y_out_ptr,
    cos_ptr,
    sin_ptr,
    ids_ptr,
    rows,
    tokens,
    batch,
    x_heads,
    y_heads,
    x_group,
    x_batch,
    x_head,
    x_token,
    y_group,
    y_batch,
    y_head,
    y_token,
    x_out_group,
    x_out_batch,
    x_out_head,
    x_out_token,
    y_out_group,
    y_out_batch,
    y_out_head,
    y_out_token,
    cos_group,
    cos_batch,
    cos_row,
    sin_group,
    sin_batch,
    sin_row,
    ids_group,
    ids_batch,
    half: tl.constexpr,
    tail: tl.constexpr,
    full: tl.constexpr,
    interleaved: tl.constexpr,
    back: tl.constexpr,
    block_tokens: tl.constexpr,
    x_block: tl.constexpr,
    y_block: tl.constexpr,
    pairs: tl.constexpr,
    tails: tl.constexpr,
):
    # Programs with the same rows of the tables are neighbours.
    x_programs = tl.cdiv(x_heads, x_block)
    programs = x_programs + tl.cdiv(y_heads, y_block)
    program = tl.program_id(0) % programs
    block = tl.program_id(0) // programs
    blocks = tl.cdiv(tokens, block_tokens)
    token = (block % blocks).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    example = (block // blocks).to(tl.int64)
    group, example = example // batch, example % batch
    exists = token < tokens
    row = token
    if ids_ptr is not None:
        ids_ptr += group * ids_group + example * ids_batch
        row = tl.load(ids_ptr + token, mask=exists, other=0).to(tl.int64)
    known = ((row >= 0) & (row < rows))[:, None, None]
    cos_ptrs = (cos_ptr + group * cos_group + example * cos_batch + row * cos_row)[:, None, None]
    sin_ptrs = (sin_ptr + group * sin_group + example * sin_batch + row * sin_row)[:, None, None]
    token, exists = token[:, None, None], exists[:, None, None]
    if program < x_programs:
        x_at = program.to(tl.int64) * x_block + tl.arange(0, x_block)[None, :, None]
        _turn(
            x_ptr + group * x_group + example * x_batch + token * x_token + x_at * x_head,
            x_out_ptr
            + (group * x_out_group + example * x_out_batch + token * x_out_token)
            + x_at * x_out_head,
            cos_ptrs,
            sin_ptrs,
            exists & (x_at < x_heads),
            known,
            half,
            tail,
            full,
            interleaved,
            back,
            block_tokens,
            x_block,
            pairs,
            tails,
        )
    elif y_ptr is not None:
        y_at = (program - x_programs).to(tl.int64) * y_block + tl.arange(0, y_block)[None, :, None]
        _turn(
            y_ptr + group * y_group + example * y_batch + token * y_token + y_at * y_head,
            y_out_ptr
            + (group * y_out_group + example * y_out_batch + token * y_out_token)
            + y_at * y_out_head,
            cos_ptrs,
            sin_ptrs,
            exists & (y_at < y_heads),
            known,
            half,
            tail,
            full,
            interleaved,
            back,
            block_tokens,
            y_block,
            pairs,
            tails,
        )


# ---- launchers

_SWEEP = [Tile(elements, warps) for elements in (2048, 4096, 8192) for warps in (4, 8)]
# With 32-lane warps, four 16-byte loads of bf16 for every thread.
ROTATE = Launch(_rope_kernel, {"": Tile(4096, 4)}, _SWEEP)
_HEADS = 8
"""Heads of one program. With more, counts like 12, 28 or 40 leave many of its lanes idle; fewer
read the tables, which half a program shares, more often."""


class Options(NamedTuple):
    """What of a call is no tensor."""

    width: int
    interleaved: bool
    unsqueeze_dim: int


def rotate(
    batch: int,
    options: Options,
    x: Tensor,
    y: Tensor | None,
    tables: tuple[Tensor, Tensor, Tensor | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    back: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate ``x`` and ``y`` by the tables' angles, or ``back`` by the transposed matrix."""
    cos, sin = _dense(tables[0], batch, 2), _dense(tables[1], batch, 2)
    ids = None if tables[2] is None else _dense(tables[2], batch, 1)
    x_view, y_view = _dense(x, batch, 3), None if y is None else _dense(y, batch, 3)
    tile = ROTATE.tile(x.device, x.numel() + (0 if y is None else y.numel()))
    layouts = tuple([None if z is None else (z.shape, z.stride()) for z in (x_view, y_view)])
    others = tuple([None if z is None else (z.shape, z.stride()) for z in (cos, sin, ids)])
    how = _plan(tile, options, back, *layouts, others)
    x_out = _empty(x_view, how.orders[0], dtypes[0])
    y_out = None if y_view is None else _empty(y_view, how.orders[1], dtypes[1])
    if how.programs:
        views = [x_view, y_view, x_out, y_out, cos, sin, ids]
        ROTATE((how.programs, 1, 1), views, how.integers, how.constants, tile.warps)
    # Up to one mapped dimension the results are no views, so that their owner may write to them.
    if batch < 2:
        return x_out, y_out
    return x_out.view(x.shape), None if y is None or y_out is None else y_out.view(y.shape)


def _dense(x: Tensor, batch: int, inner: int) -> Tensor:
    """``x`` by groups where there are any, the last dimension contiguous."""
    if batch or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return grouped(x, batch, inner) if batch else x.contiguous()
    return x


Order = tuple[int, ...] | None
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


class _Plan(NamedTuple):
    """How a call is launched, and in which order the results' dimensions lie in memory."""

    programs: int
    integers: tuple[int, ...]
    constants: tuple[Any, ...]
    orders: tuple[Order, Order]


@lru_cache(4096)
def _plan(
    tile: Tile,
    options: Options,
    back: bool,
    x: Layout,
    y: Layout | None,
    tables: tuple[Layout, Layout, Layout | None],
) -> _Plan:
    x_order, x_out = _ordered(x)
    y_order, y_out = (None, None) if y is None else _ordered(y)
    views = [_whole(z, 5) for z in (x, y, x_out, y_out)]
    cos, sin, ids = (_whole(z, n) for z, n in zip(tables, (4, 4, 3), strict=True))
    assert views[0] is not None
    assert cos is not None
    heads_at, tokens_at = (2, 3) if options.unsqueeze_dim == 1 else (3, 2)
    groups, examples, tokens, width = (views[0][0][i] for i in (0, 1, tokens_at, 4))
    heads = views[0][0][heads_at], 0 if views[1] is None else views[1][0][heads_at]
    block_tokens, blocks, pairs, tails = _blocks(tile, tokens, heads, width, options.width)
    programs = sum(-(-n // block) for n, block in zip(heads, blocks, strict=True))
    programs *= groups * examples * -(-tokens // block_tokens)
    integers = (
        *(cos[0][2], tokens, examples, *heads),
        *(step for z in views for step in _strides(z, (0, 1, heads_at, tokens_at))),
        *(step for z in (cos, sin) for step in _strides(z, (0, 1, 2))),
        *_strides(ids, (0, 1)),
    )
    full = options.width == cos[0][3]
    layout = (options.width // 2, width - options.width, full, options.interleaved, back)
    constants = (*layout, block_tokens, *blocks, pairs, tails)
    return _Plan(programs if width else 0, integers, constants, (x_order, y_order))


def _whole(layout: Layout | None, dims: int) -> Layout | None:
    """The layout with groups, and examples, of one in front."""
    if layout is None:
        return None
    missing = dims - len(layout[0])
    return (1,) * missing + tuple(layout[0]), (0,) * missing + layout[1]


def _ordered(layout: Layout) -> tuple[Order, Layout]:
    """The order of dimensions of a result, from far to near, and its layout.

    That of what is rotated, the last one contiguous: attention kernels read such views as they are,
    so stock's have that order too. None stands for a contiguous result.
    """
    shape, stride = layout
    last = len(shape) - 1
    order = (*sorted(range(last), key=stride.__getitem__, reverse=True), last)
    steps, step = [0] * len(shape), 1
    for i in reversed(order):
        steps[i] = step
        step *= max(shape[i], 1)
    return None if order == tuple(range(len(shape))) else order, (shape, tuple(steps))


def _empty(x: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    if order is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.empty_permuted(x.shape, order, dtype=dtype, device=x.device)


def _blocks(
    tile: Tile, tokens: int, heads: tuple[int, int], width: int, rotated: int
) -> tuple[int, tuple[int, int], int, int]:
    """Tokens, heads of both tensors, pairs and other columns that a program holds at once."""
    most = max(1, min(_HEADS, tile.elements // power_of_two(width)))
    x_block, y_block = (min(power_of_two(n), most) for n in heads)
    block = max(x_block, y_block)
    room = max(1, tile.elements // (block * power_of_two(width)))
    block_tokens = min(power_of_two(tokens), room)
    columns = max(2, tile.elements // (block * block_tokens))
    pairs = min(power_of_two(rotated // 2), columns // 2)
    tails = min(power_of_two(width - rotated), columns)
    return block_tokens, (x_block, y_block), pairs, tails


def _strides(layout: Layout | None, dims: Sequence[int]) -> tuple[int, ...]:
    """Distances along ``dims``, 0 along those of one element, which are shared or do not matter."""
    if layout is None:
        return (0,) * len(dims)
    shape, stride = layout
    return tuple([stride[i] if shape[i] > 1 else 0 for i in dims])


# ---- tables that somebody trains


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """Every pair (a, b) of columns turned by a right angle, (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.tensor_split(2, -1)
    return torch.cat((-b, a), -1)


def table_gradients(
    batch: int, options: Options, grads: Sequence[Tensor | None], tensors: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """The gradients of cos and sin, sums over heads and all that shares a row, in plain PyTorch."""
    *inputs, cos, sin, ids = tensors
    heads = -3 if options.unsqueeze_dim == 1 else -2
    sums: list[Any] = [0, 0]
    for grad, x in zip(grads, inputs, strict=True):
        if grad is not None:
            grad, x = (y[..., : options.width].float() for y in (grad, x))
            sums[0] = sums[0] + (grad * x).sum(heads)
            sums[1] = sums[1] + (grad * turned(x, options.interleaved)).sum(heads)
    dcos, dsin = (
        _to_rows(found, x, ids, batch, options.interleaved)
        for found, x in zip(sums, (cos, sin), strict=True)
    )
    return dcos, dsin


def _to_rows(
    found: Tensor, table: Tensor, ids: Tensor | None, batch: int, interleaved: bool
) -> Tensor:
    """Sum ``found``, (batch dimensions, B, S, R), to the rows that it came from."""
    rows, width = table.shape[-2:]
    if width != found.shape[-1]:
        pairs = (width, 2) if interleaved else (2, width)
        found = found.view(*found.shape[:-1], *pairs).sum(-1 if interleaved else -2)
    groups = table.shape[:batch].numel()
    examples, tokens = found.shape[batch:-1]
    found = found.reshape(groups, examples, tokens, width)
    shared = table.dim() == batch + 2 or table.shape[batch] == 1
    if ids is None:
        out = found.sum(1) if shared else found
        return out.reshape(table.shape).to(table.dtype)
    out = found.new_zeros(groups, 1 if shared else examples, rows, width)
    if out.numel():
        each = examples if ids.numel() == found[..., 0].numel() else 1
        ids = ids.reshape(groups, each, tokens).expand(groups, examples, tokens)
        found = found.masked_fill(((ids < 0) | (ids >= rows))[..., None], 0)
        group = torch.arange(groups, device=ids.device)[:, None, None]
        example = torch.arange(examples, device=ids.device)[:, None] * (not shared)
        # Adds in a fixed order, which index_add does not.
        out.index_put_((group, example, ids.clamp(0, rows - 1).long()), found, accumulate=True)
    return out.view(table.shape).to(table.dtype)
