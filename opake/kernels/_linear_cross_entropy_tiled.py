"""The same loss in plain PyTorch, with the logits of a tile of the vocabulary at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opake.kernels._autograd import Gradients
from opake.kernels._cross_entropy import Options as LossOptions
from opake.kernels._layout import as_output
from opake.kernels._linear_cross_entropy import Options, Tokens, multiply

__all__ = ["backward", "forward"]

_ROWS = 4096
"""Tokens at a time: what a tile of the usual width makes tens of megabytes of logits of."""


def forward(batch: int, options: Options, *tensors: Any) -> tuple[Tensor, ...]:
    """Each token's share of the loss, and its log-sum-exp."""
    labels = tensors[2]
    tokens = Tokens(batch, options, tensors, apart=False, plain=True)
    dtype = torch.promote_types(tokens.x.dtype, torch.float32)
    loss, lse = (tokens.x.new_empty(tokens.shape, dtype=dtype) for _ in range(2))
    for rows in _rows(tokens):
        _losses(tokens, rows, loss, lse)
    loss *= tokens.share
    return as_output(loss, labels.shape), lse.view(labels.shape)


def backward(
    batch: int, options: Options, wanted: Any, grads: Any, tensors: Any, saved: Any
) -> Gradients:
    """The gradients of hidden states, weight and bias; of class weights by plain PyTorch alone."""
    hidden, weight, _, bias, _, _ = tensors
    apart = bool(batch) and (wanted[1] or wanted[3])
    tokens = Tokens(batch, options, tensors, apart=apart, plain=True)
    grad = tokens.share * grads[0].reshape(tokens.shape)
    lse = saved[0].reshape(tokens.shape)
    groups, _, width = tokens.x.shape
    dhidden = torch.zeros(tokens.x.shape, dtype=lse.dtype, device=lse.device) if wanted[0] else None
    dweight = tokens.x.new_empty((groups, tokens.classes, width)) if wanted[1] else None
    dbias = tokens.x.new_empty((groups, tokens.classes)) if wanted[3] else None
    for cols in _tiles(tokens):
        size = cols.stop - cols.start
        of_weight = lse.new_zeros((groups, size, width)) if wanted[1] else None
        of_bias = lse.new_zeros((groups, size)) if wanted[3] else None
        for rows in _rows(tokens):
            d = _dlogits(tokens, rows, cols, grad, lse).to(tokens.x.dtype)
            x = tokens.x[:, rows]
            if dhidden is not None:
                multiply(d, tokens.weight[:, cols], dhidden[:, rows], add=True)
            if of_weight is not None:
                multiply(d.transpose(1, 2), x, of_weight, add=True)
            if of_bias is not None:
                of_bias += d.sum(1, dtype=of_bias.dtype)
        if dweight is not None and of_weight is not None:
            dweight[:, cols] = of_weight
        if dbias is not None and of_bias is not None:
            dbias[:, cols] = of_bias
    found = (dhidden, dweight, dbias)
    likes = (hidden, weight, bias)
    pairs = zip(found, likes, strict=True)
    a, b, c = (None if x is None else x.to(like.dtype).view(like.shape) for x, like in pairs)
    return a, b, None, c, None, None


def _rows(tokens: Tokens) -> list[slice]:
    groups, rows = tokens.shape
    step = max(1, _ROWS // max(groups, 1))
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def _tiles(tokens: Tokens) -> list[slice]:
    classes, step = tokens.classes, tokens.options.budget
    return [slice(c, min(c + step, classes)) for c in range(0, classes, step)]


def _logits(tokens: Tokens, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
    """Scaled and capped logits (groups, rows, columns), and the slope of that."""
    x, options = tokens.x[:, rows], tokens.options.loss
    size = cols.stop - cols.start
    raw = x.new_empty((*x.shape[:2], size))
    if tokens.bias is not None:
        raw.copy_(tokens.bias[:, None, cols].expand_as(raw))
    multiply(x, tokens.weight[:, cols].transpose(1, 2), raw, add=tokens.bias is not None)
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32)) * options.logit_scale
    if options.softcap is None:
        return logits, torch.full_like(logits[:1, :1], options.logit_scale)
    bent = torch.tanh(logits / options.softcap)
    return bent * options.softcap, (1 - bent * bent) * options.logit_scale


def _losses(tokens: Tokens, rows: slice, loss: Tensor, lse: Tensor) -> None:
    options = tokens.options.loss
    labels, used = _labels(tokens, rows)
    top = torch.full(labels.shape, -math.inf, dtype=lse.dtype, device=lse.device)
    total, target, spread = (torch.zeros_like(top) for _ in range(3))
    for cols in _tiles(tokens):
        logits, _ = _logits(tokens, rows, cols)
        above = torch.maximum(top, logits.amax(-1))
        finite = above.masked_fill(above == -math.inf, 0.0)
        total = total * (top - finite).exp() + (logits - finite.unsqueeze(-1)).exp().sum(-1)
        top = above
        here = used & (labels >= cols.start) & (labels < cols.stop)
        found = logits.gather(-1, (labels - cols.start).where(here, 0).unsqueeze(-1)).squeeze(-1)
        target = found.where(here, target)
        if options.label_smoothing:
            weight = _class_weight(tokens, cols)
            spread = spread + (logits if weight is None else logits * weight).sum(-1)
    log = top.masked_fill(top == -math.inf, 0.0) + total.log()
    hard, soft, everyone = _shares(tokens, rows)
    found = hard * (log - target)
    if options.label_smoothing:
        found = found + soft * (everyone * log - spread)
    if options.z_loss:
        found = found + options.z_loss * log.square()
    ignored = tokens.labels[:, rows] == options.ignore_index
    loss[:, rows] = found.masked_fill(~used, math.nan).masked_fill(ignored, 0.0)
    lse[:, rows] = log


def _dlogits(tokens: Tokens, rows: slice, cols: slice, grad: Tensor, lse: Tensor) -> Tensor:
    options: LossOptions = tokens.options.loss
    labels, used = _labels(tokens, rows)
    logits, slope = _logits(tokens, rows, cols)
    hard, soft, everyone = _shares(tokens, rows)
    log = lse[:, rows]
    each = hard + soft * everyone + 2 * options.z_loss * log
    d = (logits - log.unsqueeze(-1)).exp() * each.unsqueeze(-1)
    if options.label_smoothing:
        weight = _class_weight(tokens, cols)
        d = d - (soft if weight is None else soft * weight)
    columns = torch.arange(cols.start, cols.stop, device=d.device)
    d = d - hard.unsqueeze(-1) * (columns == labels.unsqueeze(-1))
    d = d * slope * grad[:, rows].unsqueeze(-1)
    return d.masked_fill(~used.unsqueeze(-1), 0.0)


def _labels(tokens: Tokens, rows: slice) -> tuple[Tensor, Tensor]:
    labels = tokens.labels[:, rows].long()
    used = (labels != tokens.options.loss.ignore_index) & (labels >= 0) & (labels < tokens.classes)
    return labels.where(used, 0), used


def _class_weight(tokens: Tokens, cols: slice) -> Tensor | None:
    weight = tokens.class_weight
    return None if weight is None else weight[:, None, cols].to(tokens.share.dtype)


def _shares(tokens: Tokens, rows: slice) -> tuple[Tensor, float, Tensor | float]:
    """Of the true class, of every class, and how many classes there are, by weight."""
    options, weight = tokens.options.loss, tokens.class_weight
    labels, _ = _labels(tokens, rows)
    soft = options.label_smoothing / tokens.classes
    if weight is None:
        hard = torch.full_like(tokens.share[:, rows], 1 - options.label_smoothing)
        return hard, soft, float(tokens.classes)
    weight = weight.to(tokens.share.dtype).expand(labels.shape[0], -1)
    hard = weight.gather(-1, labels) * (1 - options.label_smoothing)
    return hard, soft, weight.sum(-1, keepdim=True)
