"""The head and the cross entropy in one, a chunk of tokens at a time, in both passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opake.kernels._autograd import Gradients
from opake.kernels._cross_entropy import Options as LossOptions
from opake.kernels._cross_entropy_both import BOTH, launch_both
from opake.kernels._cross_entropy_launch import Inputs, launch_bwd, launch_fwd
from opake.kernels._layout import as_output, grouped
from opake.kernels._triton import Launch, Tile, jit, power_of_two, tl
from opake.kernels.cross_entropy import cross_entropy_reference

__all__ = [
    "BOTH",
    "SCALE",
    "Formed",
    "Options",
    "Tokens",
    "backward",
    "default_budget",
    "formable",
    "forward",
    "multiply",
    "of",
]

_WIDE = 128 << 20
"""Bytes up to which sums over chunks, and what is yet to be multiplied, are kept in fp32."""
_FEW = 8
"""Chunks whose sums may be rounded one by one, if fp32 took more. The error of n roundings of a
growing sum is that of one times about sqrt((n + 1) / 2)."""


class Formed:
    """Gradients of weight and bias that the forward pass has formed, for one backward pass."""

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, Tensor | None] = (None, None)

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Give them away: a second backward pass must not find what the first one returned."""
        found, self.gradients = self.gradients, (None, None)
        return found


class Options(NamedTuple):
    """What is no tensor.

    Attributes:
        loss: of the cross entropy.
        budget: bytes of logits at a time; or where they come in tiles, columns of those.
        forms: whether the forward pass forms the gradients of hidden states, weight and bias. The
            last two only where all losses will have one and the same incoming gradient.
        box: where the last two are put.
    """

    loss: LossOptions
    budget: int
    forms: tuple[bool, bool, bool]
    box: Formed


def formable(dtype: torch.dtype) -> bool:
    """Tell whether gradients may be formed before the incoming one is known.

    fp16 is trained with losses scaled up, without which its gradients vanish.
    """
    return dtype != torch.float16


def default_budget(hidden: Tensor, weight: Tensor) -> int:
    """Bytes of logits at a time: in proportion to what there is anyway, or a part of the device."""
    around = 4 * (hidden.numel() + weight.numel()) * weight.element_size() // 3
    return max(_LEAST, min(around, _memory(weight.device) // 256))


_LEAST = 64 << 20


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 64 << 30
    return int(torch.cuda.get_device_properties(device).total_memory)


# ---- tokens, chunk by chunk

Chunk = tuple[slice, slice]


class Tokens:
    """The arguments as groups of rows; the groups share their weights, or have one each."""

    def __init__(self, batch: int, options: Options, tensors: Any, *, apart: bool, plain: bool):
        hidden, weight, labels, bias, class_weight, share = tensors
        heads = [_stacked(x, batch) for x in (weight, bias, class_weight)]
        apart = apart or any(x is not None and x.shape[0] > 1 for x in heads)
        self.x = grouped(hidden, batch if apart else 0)
        self.shape = self.x.shape[:2]
        self.labels, self.share = labels.reshape(self.shape), share.reshape(self.shape)
        self.bias, self.class_weight = heads[1:]
        if self.class_weight is not None and self.class_weight.stride(-1) != 1:
            self.class_weight = self.class_weight.contiguous()
        self.weight: Tensor = heads[0]  # type: ignore[assignment]
        self.options, self.plain = options, plain
        self.classes = weight.shape[-2]

    def chunks(self) -> Iterator[Chunk]:
        """As many groups, or rows of one group, as there is room for."""
        groups, rows = self.shape
        room = max(1, self.options.budget // (self.classes * self.x.element_size()))
        if rows <= room:
            step = max(1, room // max(rows, 1))
            for g in range(0, groups, step):
                yield slice(g, min(g + step, groups)), slice(0, rows)
            return
        step = -(-rows // -(-rows // room))  # chunks are alike, and whole tiles where that fits
        step = min(-(-step // _TILE) * _TILE, max(room // _TILE * _TILE, step))
        for g in range(groups):
            for r in range(0, rows, step):
                yield slice(g, g + 1), slice(r, min(r + step, rows))

    def buffer(self) -> Tensor:
        """Room for the logits of every chunk."""
        most = max((c[0].stop - c[0].start) * (c[1].stop - c[1].start) for c in self.chunks())
        return self.x.new_empty(most * self.classes)

    def logits(self, chunk: Chunk, buffer: Tensor) -> Tensor:
        """Compute those of a chunk, in the dtype of the hidden states, rounded once."""
        x, weight, bias = self.x[chunk], self.weight, self.bias
        out = buffer[: x.shape[0] * x.shape[1] * self.classes].view(*x.shape[:2], self.classes)
        if bias is not None:
            out.copy_(of(bias, chunk).unsqueeze(1).expand_as(out))
        multiply(x, of(weight, chunk).transpose(1, 2), out, add=bias is not None)
        return out

    def inputs(self, chunk: Chunk, logits: Tensor) -> Inputs:
        """Those of the cross entropy."""
        weight = self.class_weight
        if weight is not None:
            weight = of(weight, chunk).expand(logits.shape[0], -1)
        return Inputs(logits, self.labels[chunk], weight)

    def losses(self, chunk: Chunk, logits: Tensor, loss: Tensor, stats: Tensor) -> None:
        """Write the losses of a chunk."""
        inputs = self.inputs(chunk, logits)
        if self.plain:
            loss[chunk] = _plain_losses(self.options.loss, inputs)
        else:
            launch_fwd(self.options.loss, inputs, loss[chunk], stats[chunk])

    def both(self, chunk: Chunk, logits: Tensor, loss: Tensor, stats: Tensor) -> None:
        """Write the losses of a chunk, and turn its logits into their gradient."""
        if self.plain:
            self.losses(chunk, logits, loss, stats)
            self.pull_back(chunk, logits, self.share, stats)
            return
        grad = self.share[chunk]
        launch_both(self.options.loss, self.inputs(chunk, logits), grad, loss[chunk], stats[chunk])

    def pull_back(self, chunk: Chunk, logits: Tensor, grad: Tensor, stats: Tensor) -> None:
        """Turn the logits of a chunk into their gradient."""
        inputs = self.inputs(chunk, logits)
        if not self.plain:
            launch_bwd(self.options.loss, inputs, grad[chunk], None, stats[chunk], logits)
            return
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = _plain_losses(self.options.loss, inputs._replace(logits=leaf))
        (found,) = torch.autograd.grad(loss, leaf, grad[chunk].to(loss.dtype))
        logits.copy_(found)


_TILE = 128  # rows of a tile in matrix products


def _stacked(x: Tensor | None, batch: int) -> Tensor | None:
    """One of the head's tensors with the groups in front: one, if they share it."""
    if x is None:
        return None
    sizes = list(zip(x.shape, x.stride(), strict=True))[:batch]
    if all(stride == 0 or size == 1 for size, stride in sizes):
        return x[(0,) * batch].unsqueeze(0)
    return x.reshape(x.shape[:batch].numel(), *x.shape[batch:])


def of(x: Tensor, chunk: Chunk) -> Tensor:
    """The part of one of the head's tensors that a chunk's groups have."""
    return x if x.shape[0] == 1 else x[chunk[0]]


def _plain_losses(options: LossOptions, inputs: Inputs) -> Tensor:
    weight = None if inputs.weight is None else inputs.weight.unsqueeze(1)
    chosen = options._asdict()
    return cross_entropy_reference(inputs.logits, inputs.labels, class_weight=weight, **chosen)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write ``a @ b``, or add it, for stacks of matrices; those of ``b`` may be one for all."""
    if b.shape[0] == 1:
        a, b, out = a.reshape(-1, a.shape[-1]), b[0], out.view(-1, out.shape[-1])
    if out.dtype != a.dtype and a.device.type == "cuda":
        aten = torch.ops.aten
        if add:
            function = aten.addmm if a.dim() == 2 else aten.baddbmm
            function.dtype_out(out, a, b, out.dtype, out=out)
        else:
            function = aten.mm if a.dim() == 2 else aten.bmm
            function.dtype_out(a, b, out.dtype, out=out)
        return
    # Autocast, which may be on in a backward pass too, leaves alone what is told where to write.
    a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dim() == 2:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    else:
        torch.baddbmm(out, a, b, out=out) if add else torch.bmm(a, b, out=out)


class _Sums:
    """The wanted gradients, added up over chunks."""

    def __init__(self, tokens: Tokens, wanted: Sequence[bool], *, wide: bool) -> None:
        """Where ``wide``, what is small stays in fp32, as it is yet to be multiplied."""
        self.tokens = tokens
        x, classes = tokens.x, tokens.classes
        groups, _, width = x.shape
        chunks = len({c[1].start for c in tokens.chunks()})
        self.hidden = self._room(x.shape, wide) if wanted[0] else None
        shape = (groups, classes, width)
        self.weight = self._room(shape, wide or chunks > 1, chunks > _FEW) if wanted[1] else None
        dtype = torch.promote_types(x.dtype, torch.float32)
        self.bias = x.new_zeros((groups, classes), dtype=dtype) if wanted[2] else None

    def _room(self, shape: Sequence[int], wide: bool, always: bool = False) -> Tensor:
        x = self.tokens.x
        if always or (wide and 4 * torch.Size(shape).numel() <= _WIDE):
            return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return x.new_empty(shape)

    def add(self, chunk: Chunk, dlogits: Tensor) -> None:
        """Add a chunk's; those of a group come one after the other, the first row's first."""
        if self.hidden is not None:
            weight = of(self.tokens.weight, chunk)
            multiply(dlogits, weight, self.hidden[chunk], add=False)
        later = chunk[1].start > 0
        if self.weight is not None:
            x, out = self.tokens.x[chunk], self.weight[chunk[0]]
            multiply(dlogits.transpose(1, 2), x, out, add=later)
        if self.bias is not None:
            self.bias[chunk[0]] += dlogits.sum(1, dtype=self.bias.dtype)


# ---- passes


def forward(
    batch: int, options: Options, *tensors: Any, plain: bool = False
) -> tuple[Tensor | None, ...]:
    """Each token's share of the loss; what the backward pass needs; a gradient if it is formed."""
    labels = tensors[2]
    tokens = Tokens(batch, options, tensors, apart=False, plain=plain)
    dtype = torch.promote_types(tokens.x.dtype, torch.float32)
    loss = tokens.x.new_empty(tokens.shape, dtype=dtype)
    stats = loss.new_empty((*tokens.shape, 0 if plain else 3))
    sums = _Sums(tokens, options.forms, wide=True) if any(options.forms) else None
    buffer = tokens.buffer()
    for chunk in tokens.chunks():
        logits = tokens.logits(chunk, buffer)
        if sums is None:
            tokens.losses(chunk, logits, loss, stats)
            continue
        tokens.both(chunk, logits, loss, stats)
        sums.add(chunk, logits)
    loss *= tokens.share
    hidden = None
    if sums is not None:
        options.box.gradients = (sums.weight, sums.bias)
        hidden = None if sums.hidden is None else sums.hidden.view(tensors[0].shape)
    return as_output(loss, labels.shape), stats.view(*labels.shape, stats.shape[-1]), hidden


def backward(
    batch: int,
    options: Options,
    wanted: Any,
    grads: Any,
    tensors: Any,
    saved: Any,
    *,
    plain: bool = False,
) -> Gradients:
    """The gradients of hidden states, weight and bias; of class weights only by plain PyTorch."""
    hidden, weight, _, bias, _, _ = tensors
    (grad,), (stats, formed) = grads, saved
    asked = (wanted[0], wanted[1], wanted[3])
    made = [formed, None, None]
    uniform = not batch and formable(hidden.dtype) and _uniform(grad)
    if uniform:
        made[1:] = options.box.take()
    missing = [want and x is None for want, x in zip(asked, made, strict=True)]
    apart = bool(batch) and (asked[1] or asked[2])
    tokens = Tokens(batch, options, tensors, apart=apart, plain=plain)
    by = grad.reshape(tokens.shape)
    scaled = [True, uniform, uniform]
    kept = [formed is not None, False, False]  # for another backward pass
    if any(missing):
        # As in the forward pass, so that a second backward pass finds the same to the last bit.
        share = tokens.share if uniform else tokens.share * by
        scaled[0] = uniform or not missing[0]
        stats = stats.reshape(*tokens.shape, stats.shape[-1]).contiguous()
        found = _recompute(tokens, missing, share, stats, wide=uniform)
        made = [new if miss else x for new, miss, x in zip(found, missing, made, strict=True)]
    out: list[Tensor | None] = []
    likes = (hidden, weight, bias)
    for x, like, want, times, keep in zip(made, likes, asked, scaled, kept, strict=True):
        if not want:
            out.append(None)
            continue
        if times:
            cols = tokens.x.shape[-1] if like is hidden else x.numel()
            flat = by.reshape(-1)
            x = _scaled(x.contiguous(), flat, cols, like.dtype, keep=keep, plain=plain)
        out.append(x.to(like.dtype).view(like.shape))
    return out[0], out[1], None, out[2], None, None


def _uniform(grad: Tensor) -> bool:
    """Tell whether the incoming gradient is one number, by how it lies in memory."""
    pairs = zip(grad.shape, grad.stride(), strict=True)
    return all(stride == 0 or size == 1 for size, stride in pairs)


def _recompute(
    tokens: Tokens, wanted: Sequence[bool], grad: Tensor, stats: Tensor, *, wide: bool
) -> tuple[Tensor | None, ...]:
    sums = _Sums(tokens, wanted, wide=wide)
    buffer = tokens.buffer()
    for chunk in tokens.chunks():
        logits = tokens.logits(chunk, buffer)
        tokens.pull_back(chunk, logits, grad, stats)
        sums.add(chunk, logits)
    return sums.hidden, sums.weight, sums.bias


# ---- multiplying what was formed


@jit
def _scale_kernel(  # type: ignore[no-untyped-def]
    x_ptr, by_ptr, out_ptr, rows, cols, by_row, in_place: tl.constexpr, block: tl.constexpr
):
    """``out = x * by[row]``; in place, there is nothing to do where that is one."""
    blocks = tl.cdiv(cols, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    by = tl.load(by_ptr + row * by_row)
    if in_place:  # noqa: SIM102  (a constant, which decides what is compiled)
        if by == 1.0:
            return
    col = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * cols + col, (x * by).to(out_ptr.dtype.element_ty), mask=col < cols)


SCALE = Launch(_scale_kernel, {"": Tile(4096, 8)}, [Tile(2048, 4), Tile(4096, 8), Tile(8192, 8)])


def _scaled(
    x: Tensor, by: Tensor, cols: int, dtype: torch.dtype, *, keep: bool, plain: bool
) -> Tensor:
    """Multiply ``x``, contiguous, row by row of ``cols``, in place where it is large."""
    whole = cols == x.numel()
    in_place = not keep and whole and x.dtype == dtype and x.numel() * x.element_size() > _WIDE
    out = x if in_place else torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return out
    if plain:
        matrix = x.view(-1, cols)
        return out.copy_((matrix * by[: len(matrix), None]).view_as(x))
    rows = x.numel() // cols
    tile = SCALE.tile(x.device, cols)
    block = min(tile.elements, power_of_two(cols))
    grid = (rows * -(-cols // block), 1, 1)
    integers = (rows, cols, 0 if whole else by.stride(0))
    SCALE(grid, (x, by, out), integers, (in_place, block), max(1, min(tile.warps, block // 256)))
    return out
