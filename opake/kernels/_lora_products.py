"""Matrix products of examples side by side: shared matrices are multiplied once for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opake.kernels._layout import grouped
from opake.kernels._lora import Adapted, Options, dims_of, keeps, runs
from opake.kernels._lora_launch import LONGEST, LowRank, accumulate

__all__ = [
    "add_low_rank",
    "ahead",
    "by_rows",
    "matrices",
    "of_lower",
    "product",
    "project",
    "pull",
    "raised",
    "read",
    "stacked",
    "unadapted",
    "upper",
    "without_autocast",
]


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in the dtypes that there are: casts, if any, came before."""

    @functools.wraps(function)
    def wrapped(batch: int, options: Any, *args: Any) -> Any:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return wrapped(batch, options, *args)
        return function(batch, options, *args)

    return wrapped


# ---- examples


def matrices(w: Tensor, batch: int) -> Tensor:
    """A mapped matrix as (G, rows, columns), one that all examples share as (rows, columns).

    Of vectors likewise (G, columns) and (columns,).
    """
    if not batch:
        return w
    sizes, strides = w.shape[:batch], w.stride()[:batch]
    if all(n == 1 or not step for n, step in zip(sizes, strides, strict=True)) and 0 not in sizes:
        return w[(0,) * batch]
    return w.reshape(sizes.numel(), *w.shape[batch:])


def by_rows(x: Tensor, batch: int, read: bool = True) -> Tensor:
    """(G, N, columns) of (batch dimensions, any dimensions, columns).

    Not dense where only its shape is of interest.
    """
    if not read:
        outer = x.shape[:-1]
        return x.reshape(outer[:batch].numel(), outer[batch:].numel(), x.shape[-1])
    if not batch and x.is_contiguous():
        return x.view(1, -1, x.shape[-1]) if x.shape[-1] else x.reshape(1, x.shape[:-1].numel(), 0)
    return grouped(x, batch)


def read(
    batch: int, options: Options, wanted: tuple[bool, ...], x: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """The input and the ``x A^T`` by rows, dense where gradients of linear layers need them."""
    flags = keeps(options, wanted)
    return by_rows(x, batch, flags[0]), by_rows(left, batch, flags[-1])


def packed(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Matrices of one kind side by side, shared if all are."""
    if len(parts) == 1:
        return parts[0]
    groups = [x.shape[0] for x in parts if x.dim() == 3]
    if groups:
        parts = [x if x.dim() == 3 else x.expand(groups[0], *x.shape) for x in parts]
    return torch.cat(tuple(parts), dim)


def _rows(x: Tensor) -> Tensor | None:
    """(G N, columns) if that is a view."""
    groups, rows, cols = x.shape
    if groups == 1:
        return x[0]
    if x.stride(0) == x.stride(1) * rows and rows:
        return x.view(groups * rows, cols)
    return None


# ---- products


def product(
    x: Tensor, w: Tensor, *, alpha: float = 1.0, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """``alpha x w`` of (G, N, K) and (K, M) or (G, K, M), in ``out`` (G, N, M), or added to it."""
    if not alpha:  # cuBLAS would not see what is infinite
        x, alpha = x * alpha, 1.0
    beta = 1 if add else 0
    if out is None:
        out = torch.empty((*x.shape[:2], w.shape[-1]), dtype=x.dtype, device=x.device)
    if w.dim() == 2:
        rows, to = _rows(x), _rows(out)
        if rows is not None and to is not None:
            if add or alpha != 1.0:
                torch.addmm(to, rows, w, beta=beta, alpha=alpha, out=to)
            else:
                torch.mm(rows, w, out=to)
            return out
        w = w.expand(x.shape[0], *w.shape)
    torch.baddbmm(out, x, w, beta=beta, alpha=alpha, out=out)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: float = 1.0) -> Tensor:
    """``alpha x weight^T + bias`` of (G, N, in), rounded once."""
    w = weight.transpose(-1, -2)
    if bias is None:
        return product(x, w, alpha=alpha)
    if not alpha:
        x, alpha = x * alpha, 1.0
    rows = _rows(x)
    if w.dim() == 2 and bias.dim() == 1 and rows is not None:
        return torch.addmm(bias, rows, w, alpha=alpha).view(*x.shape[:2], w.shape[-1])
    if w.dim() == 2:
        w = w.expand(x.shape[0], *w.shape)
    shape = (*x.shape[:2], w.shape[-1])
    bias = bias if bias.dim() == 1 else bias.unsqueeze(1)
    return torch.baddbmm(bias.expand(shape), x, w, alpha=alpha)


def add_low_rank(out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add ``scale left right`` of (G, N, R) and (R, M) or (G, R, M) to ``out``."""
    if left.shape[-1] > LONGEST and left.dtype == out.dtype:
        product(left, right, alpha=scale, out=out, add=True)
    elif left.shape[-1]:
        accumulate(out, LowRank(left, right, scale))


def ahead(left: Tensor, dtype: torch.dtype) -> bool:
    """Whether the product of low rank comes first, for the large one to be added to it.

    cuBLAS reads what it adds to at no cost, but it has to be of the results' dtype. Small ranks on
    the CPU, where nothing is timed, take the kernel, which would not be tested otherwise.
    """
    return left.dtype == dtype and (left.device.type != "cpu" or left.shape[-1] > 16)


def _transposed(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha x^T y`` of every group."""
    return product(x.transpose(1, 2), y[0] if y.shape[0] == 1 else y, alpha=alpha)


# ---- layers of one input


def project(
    batch: int, x: Tensor, layers: Sequence[Adapted], *, low_rank: bool = True
) -> tuple[list[Tensor], Tensor]:
    """What every layer makes of (G, N, in), and the products with all A side by side.

    Without ``low_rank``, those are still to be multiplied with B and added.
    """
    left = lower(batch, x, layers)
    found = []
    for layer, (first, last) in zip(layers, dims_of(layers), strict=True):
        bias = None if layer.bias is None else matrices(layer.bias, batch)
        w, low = matrices(layer.weight, batch), left[..., first:last]
        if low_rank and last > first and ahead(low, x.dtype):
            out = _raise(batch, low, layer, bias)
            product(x, w.transpose(-1, -2), out=out, add=True)
        else:
            out = linear(x, w, bias)
            if low_rank and last > first:
                _add_adapters(batch, out, low, layer)
        found.append(out)
    return found, left


def _raise(batch: int, low: Tensor, layer: Adapted, bias: Tensor | None) -> Tensor:
    """What a layer's adapters make of their ``x A^T``, scaled here, as PEFT does, and the bias."""
    right = upper(batch, layer)
    (scale, a, b), *others = runs(layer)
    out = linear(low[..., a:b], right[..., a:b, :].transpose(-1, -2), bias, scale)
    for scale, a, b in others:
        product(low[..., a:b], right[..., a:b, :], alpha=scale, out=out, add=True)
    return out


def _add_adapters(batch: int, out: Tensor, low: Tensor, layer: Adapted) -> None:
    """Add what a layer's adapters make of their ``x A^T``, rounded as often as PEFT rounds it."""
    right, found = upper(batch, layer), runs(layer)
    if len(found) > 1 and out.dtype not in (low.dtype, torch.float32):
        parts = [low[..., a:b].to(torch.float32) * scale for scale, a, b in found]
        low, found = torch.cat(parts, -1), [(1.0, 0, low.shape[-1])]
    for scale, a, b in found:
        add_low_rank(out, low[..., a:b], right[..., a:b, :], scale)


def lower(batch: int, x: Tensor, layers: Sequence[Adapted]) -> Tensor:
    """``x A^T`` of every adapter of every layer, side by side, in the adapters' dtype."""
    if not any(layer.A for layer in layers):
        return x.new_empty((*x.shape[:2], 0))
    w = stacked(batch, layers).transpose(-1, -2)
    return product(x.to(w.dtype), w)


def stacked(batch: int, layers: Sequence[Adapted]) -> Tensor:
    """Every A of every layer, one below the other."""
    return packed([matrices(a, batch) for layer in layers for a in layer.A], -2)


def upper(batch: int, layer: Adapted) -> Tensor:
    """``B^T`` of every adapter of a layer, one below the other."""
    if not layer.B:
        shape = (0, layer.weight.shape[-2])
        return torch.empty(shape, dtype=layer.weight.dtype, device=layer.weight.device)
    return packed([matrices(b, batch) for b in layer.B], -1).transpose(-1, -2)


def pull(
    batch: int,
    want_x: bool,
    wants: Sequence[Adapted],
    grads: Sequence[Tensor | None],
    x: Tensor | None,
    layers: Sequence[Adapted],
    left: Tensor,
    pulled: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input (G, N, in), and of weight, bias, A and B of every layer, in a row.

    Args:
        batch: of the layers' tensors.
        want_x: whether the input has one.
        wants: which of the layers' tensors have one.
        grads: (G, N, out) for every layer; None for zeros.
        x: (G, N, in); None where no gradient of a weight or of A is wanted.
        layers: of that input.
        left: what :func:`project` returned beside the outputs.
        pulled: what :func:`raised` returns, if that is known.
    """
    some_a = any(want for this in wants for want in this.A)
    if pulled is None and (want_x or some_a):
        pulled = raised(batch, grads, layers, left)
    dx = None
    if want_x:
        dx = _pull_input(batch, grads, layers, pulled)
    small, da = left.dtype, None
    if some_a and pulled is not None and x is not None:
        da = _transposed(pulled, x.to(small))
    found: list[Tensor | None] = []
    for layer, want, grad, (first, last) in zip(layers, wants, grads, dims_of(layers), strict=True):
        dw = dbias = None
        if grad is not None:
            dw = _transposed(grad, x) if want.weight and x is not None else None
            dbias = grad.sum(1) if want.bias else None
        found += (_like(layer.weight, want.weight, dw), _like(layer.bias, want.bias, dbias))
        found += of_lower(layer, want, None if da is None else da[:, first:last])
        found += _of_upper(layer, want, grad, left[..., first:last])
    return dx, found


def of_lower(layer: Adapted, want: Adapted, da: Tensor | None) -> list[Tensor | None]:
    """Gradients of every A of a layer, of what they are side by side, (G, R, in)."""
    ranks = [a.shape[-2] for a in layer.A]
    parts = [None] * len(ranks) if da is None else torch.split(da, ranks, 1)
    return [_like(*each) for each in zip(layer.A, want.A, parts, strict=True)]


def _of_upper(
    layer: Adapted, want: Adapted, grad: Tensor | None, left: Tensor
) -> list[Tensor | None]:
    """Gradients of every B of a layer; one by one, or they would be no whole matrices."""
    found: list[Tensor | None] = []
    grad = grad.to(left.dtype) if grad is not None and any(want.B) else None
    last = 0
    for b, wanted, scale in zip(layer.B, want.B, layer.scales, strict=True):
        first, last = last, last + b.shape[-1]
        part = None
        if wanted and grad is not None:
            part = _transposed(grad, left[..., first:last], scale)
        found.append(_like(b, wanted, part))
    return found


def raised(
    batch: int, grads: Sequence[Tensor | None], layers: Sequence[Adapted], left: Tensor
) -> Tensor:
    """Gradients of all ``x A^T``, side by side."""
    out = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    for layer, grad, (first, last) in zip(layers, grads, dims_of(layers), strict=True):
        to = out[..., first:last]
        if grad is None:
            to.zero_()
        elif last > first:
            w = packed([matrices(y, batch) for y in layer.B], -1)
            grad = grad.to(left.dtype)
            for scale, a, b in runs(layer):
                product(grad, w[..., a:b], alpha=scale, out=to[..., a:b])
    return out


def _pull_input(
    batch: int,
    grads: Sequence[Tensor | None],
    layers: Sequence[Adapted],
    pulled: Tensor | None,
) -> Tensor:
    if pulled is None or not pulled.shape[-1]:
        return unadapted(batch, grads, layers)
    a = stacked(batch, layers)
    if ahead(pulled, next(g.dtype for g in grads if g is not None)):
        return unadapted(batch, grads, layers, product(pulled, a), add=True)
    dx = unadapted(batch, grads, layers)
    add_low_rank(dx, pulled, a)
    return dx


def unadapted(
    batch: int,
    grads: Sequence[Tensor | None],
    layers: Sequence[Adapted],
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """The gradient of the input through all weights, in ``out`` if there is one, or added to it."""
    for layer, grad in zip(layers, grads, strict=True):
        if grad is not None:
            out = product(grad, matrices(layer.weight, batch), out=out, add=add)
            add = True
    assert out is not None, "no output has a gradient"
    return out


def _like(x: Tensor | None, want: bool, grad: Tensor | None) -> Tensor | None:
    """A gradient (G, ...) in the shape of its tensor, dense, zeros if there is none."""
    if not want or x is None:
        return None
    if grad is None:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return grad.contiguous().view(x.shape)
