"""Experts' forward and backward pass: which products are computed, and by what programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._autograd import Gradients
from opake.kernels._guard import architecture
from opake.kernels._layout import grouped
from opake.kernels._moe_kernels import (
    moe_pull_back_kernel,
    moe_rows_kernel,
    moe_up_kernel,
    moe_weight_kernel,
)
from opake.kernels._moe_routing import TOGETHER, Routing, combine, route
from opake.kernels._triton import INTERPRETED, Launch, Tile, power_of_two

__all__ = ["PULL_BACK", "ROWS", "UP", "WEIGHT", "Options", "backward", "forward"]


class Options(NamedTuple):
    """What is no tensor.

    Attributes:
        activation: its name.
        dtype: of the output.
        keep: whether a gradient may be asked for; without what is kept, plain PyTorch computes it.
        skip: whether an id outside means no expert; else it makes its token NaN.
    """

    activation: str
    dtype: torch.dtype
    keep: bool
    skip: bool = False


class Block(NamedTuple):
    """The tile of a product that one program computes, and how."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int


def _half(height: int, *widths: int) -> list[Block]:
    return [
        Block(height, width, depth, warps, stages)
        for width in widths
        for depth, stages in ((64, 3), (64, 4), (32, 4))
        for warps in (4, 8)
        if width < 256 or warps == 8
    ]


# ---- launchers

_ANY = Block(128, 128, 32, 8, 2)
_AMPERE = Block(128, 128, 64, 8, 3)
_HOPPER = Block(128, 256, 64, 8, 4)


def _blocks(hopper: Block, any_: Block = _ANY) -> dict[str, Block]:
    return {"": any_, "sm_80": _AMPERE, "sm_90": hopper, "sm_100": _AMPERE}


UP = Launch(moe_up_kernel, _blocks(_HOPPER), _half(128, 128, 256))
ROWS = Launch(moe_rows_kernel, _blocks(_HOPPER), _half(128, 128, 256))
PULL_BACK = Launch(
    moe_pull_back_kernel,
    {"": Tile(2048, 4)},
    [Tile(elements, warps) for elements in (1024, 2048, 4096) for warps in (4, 8)],
)
WEIGHT = Launch(
    moe_weight_kernel,
    _blocks(_HOPPER._replace(stages=3)),
    [*_half(128, 128, 256), *_half(256, 128)],
)

_COLS = 512  # of gates at a time, each with its up beside it

_SINGLE = Block(64, 64, 16, 8, 2)  # fp32 is multiplied in full, by no tensor core
_TINY = Block(16, 32, 16, 1, 1)


def _block(launch: Launch, x: Tensor, rows: int) -> Block:
    """The tile for a product of matrices like ``x``, where a group has about that many rows."""
    if x.device.type == "cpu":  # programs so small that there are several even in examples
        return _TINY
    if x.dtype == torch.float32:
        chosen = _SINGLE
    else:
        chosen = launch.tiles.get(architecture(x.device.index), launch.tiles[""])
    height = min(chosen.height, max(16, power_of_two(rows)))
    if height == chosen.height:
        return chosen
    return chosen._replace(height=height, width=min(chosen.width, 128), warps=4)


class _Experts(NamedTuple):
    """A stack of weights (examples, experts, rows, columns), read where it lies."""

    tensor: Tensor
    example: int
    expert: int
    row: int


def _experts(weight: Tensor, batch: int) -> tuple[_Experts, bool]:
    """See weights as a stack; also tell whether all examples have the same."""
    sizes = list(zip(weight.shape, weight.stride(), strict=True))[:batch]
    shared = all(stride == 0 or size == 1 for size, stride in sizes)
    if shared:
        weight = weight[(0,) * batch].unsqueeze(0)
    else:
        weight = weight.reshape(weight.shape[:batch].numel(), *weight.shape[batch:])
    if weight.stride(-1) != 1 and weight.shape[-1] > 1:
        weight = weight.contiguous()
    example, expert, row, _ = weight.stride()
    return _Experts(weight, 0 if shared else example, expert, row), shared


def _tokens(x: Tensor) -> Tensor:
    """(tokens, H), H contiguous."""
    return grouped(x, 0)[0]


# ---- passes


class _Call(NamedTuple):
    """The arguments, as kernels take them."""

    x: Tensor
    gate_up: _Experts
    down: _Experts
    ids: Tensor
    scale: Tensor
    top_k: int
    examples: int
    shared: bool

    @property
    def experts(self) -> int:
        return self.down.tensor.shape[1]

    @property
    def hidden(self) -> int:
        return self.down.tensor.shape[2]

    @property
    def inner(self) -> int:
        return self.down.tensor.shape[3]

    def blocks(self, *launches: Launch) -> list[Block]:
        """The tiles of these products of rows, of one height, as there is one list of tiles."""
        groups = self.experts * (1 if self.shared else self.examples)
        rows = -(-self.ids.numel() // groups)
        found = [_block(launch, self.x, rows) for launch in launches]
        height = min(block.height for block in found)
        return [block._replace(height=height) for block in found]

    def route(self, height: int) -> Routing:
        return route(self.ids, self.experts, self.examples, height, shared=self.shared)


def _call(batch: int, tensors: Any, *, apart: bool) -> _Call:
    """Look at arguments; where not ``apart``, examples with the same weights are not told apart."""
    x, gate_up, down, ids, scale = tensors
    top_k = ids.shape[-1]
    up, shared_up = _experts(gate_up, batch)
    down_, shared_down = _experts(down, batch)
    shared = shared_up and shared_down
    examples = ids.shape[:batch].numel() if apart or not shared else 1
    flat = (ids.reshape(-1).contiguous(), scale.reshape(-1).contiguous())
    return _Call(_tokens(x), up, down_, *flat, top_k, examples, shared)


def forward(batch: int, options: Options, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """The output, and gate and up of every slot for the backward pass, (..., K, 2I), in pairs."""
    call = _call(batch, tensors, apart=False)
    x, hidden, inner = call.x, call.hidden, call.inner
    up, down = call.blocks(UP, ROWS)
    routing = call.route(up.height)
    slots = call.ids.numel()
    pairs = x.new_empty((*tensors[3].shape, 2 * inner)) if options.keep else None
    h = x.new_empty((slots, inner))
    weight = call.gate_up
    integers = (call.top_k, call.examples, hidden, inner, x.stride(0))
    UP(
        _grid(routing, 2 * inner, up),
        (x, weight.tensor, routing.order, routing.tiles, call.scale, pairs, h),
        (*integers, weight.example, weight.expert, weight.row),
        (options.activation, INTERPRETED, not hidden % up.depth, TOGETHER, *_sizes(up)),
        up.warps,
    )
    y = x.new_empty((slots, hidden))
    _rows(call, routing, h, call.down, y, down, transposed=True)
    del h
    out = torch.empty(tensors[0].shape, dtype=options.dtype, device=x.device)
    combine(y, call.ids, out, call.experts, marked=not options.skip)
    return out, pairs


def backward(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    """The gradients of x, gate_up, down and the weights of the slots."""
    x, gate_up, down, _, scale = tensors
    call = _call(batch, tensors, apart=wanted[1] or wanted[2])
    dout = _tokens(grads[0])
    found: list[Any] = [None] * 5
    if dout.dtype != call.x.dtype:
        dout = dout.to(call.x.dtype)
    (rows,) = call.blocks(ROWS)
    routing = call.route(rows.height)
    dout = _sorted(dout, call, routing)
    dh = dout.new_empty((call.ids.numel(), call.inner))
    _rows(call, routing, dout, call.down, dh, rows, transposed=False)
    dpairs, h, dscale = _pull_back(call, routing, options, wanted, dh, saved[0].contiguous())
    del dh
    if dscale is not None:
        found[4] = dscale.to(scale.dtype).view(scale.shape)
    if wanted[2]:
        found[2] = torch.empty(down.shape, dtype=down.dtype, device=down.device)
        _weight(call, routing, dout, h, found[2], pairs=False)
    del h, dout
    if wanted[0]:
        dx = call.x.new_empty((call.ids.numel(), call.hidden))
        _rows(call, routing, dpairs, call.gate_up, dx, rows, transposed=False, pairs=True)
        found[0] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        combine(dx, call.ids, found[0], call.experts, marked=False)
        del dx
    if wanted[1]:
        found[1] = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _weight(call, routing, dpairs, _sorted(call.x, call, routing), found[1], pairs=True)
    return tuple(found)


# ---- products


def _sizes(block: Block) -> tuple[int, ...]:
    return block.height, block.width, block.depth, block.stages


def _grid(routing: Routing, cols: int, block: Block) -> tuple[int, int, int]:
    return routing.tiles.shape[0] * -(-cols // block.width), 1, 1


def _pull_back(
    call: _Call, routing: Routing, options: Options, wanted: Any, dh: Tensor, pairs: Tensor
) -> tuple[Any, Any, Any]:
    """The gradients of gate and up, and the weighted activations, by row; those of the weights."""
    slots, inner = dh.shape
    dpairs = dh.new_empty((slots, 2 * inner)) if wanted[0] or wanted[1] else None
    h = dh.new_empty((slots, inner)) if wanted[2] else None
    dscale = dh.new_empty((slots,), dtype=torch.float32) if wanted[4] else None
    tile = PULL_BACK.tile(dh.device, slots * inner)
    cols = min(_COLS, power_of_two(inner))
    height = max(1, min(tile.elements // cols, power_of_two(slots)))
    PULL_BACK(
        (-(-slots // height), 1, 1),
        (dh, pairs, routing.order, routing.starts, call.scale, dpairs, h, dscale),
        (slots, len(routing.starts) - 1, inner),
        (options.activation, height, cols),
        max(1, min(tile.warps, height * cols // 256)),
    )
    return dpairs, h, dscale


def _rows(
    call: _Call,
    routing: Routing,
    a: Tensor,
    weight: _Experts,
    out: Tensor,
    block: Block,
    *,
    transposed: bool,
    pairs: bool = False,
) -> None:
    """Multiply rows by their expert's weight, or its transpose, and put them into their slots."""
    inner, cols = a.shape[1], out.shape[1]
    strides = (1, weight.row) if transposed else (weight.row, 1)
    ROWS(
        _grid(routing, cols, block),
        (a, weight.tensor, routing.order, routing.tiles, out),
        (call.examples, inner, cols, call.inner, weight.example, weight.expert, *strides),
        (pairs, INTERPRETED, not inner % block.depth, TOGETHER, *_sizes(block)),
        block.warps,
    )


def _sorted(x: Tensor, call: _Call, routing: Routing) -> Tensor:
    """Copy every row's token: on an H200 the sums over rows then take 0.6 of the time."""
    return x.index_select(0, routing.order // call.top_k)


def _weight(
    call: _Call, routing: Routing, a: Tensor, b: Tensor, out: Tensor, *, pairs: bool
) -> None:
    """Sum ``a.T @ b`` over every group's rows."""
    groups = call.experts * call.examples
    rows, cols = out.shape[-2:]
    block = _block(WEIGHT, a, rows)
    grid = (groups * -(-rows // block.height) * -(-cols // block.width), 1, 1)
    integers = (call.examples, call.experts, rows, cols, a.stride(0), b.stride(0))
    constants = (pairs, INTERPRETED, TOGETHER, *_sizes(block))
    WEIGHT(grid, (a, b, routing.starts, out), integers, constants, block.warps)
