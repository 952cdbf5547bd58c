"""The cross entropy of rows of logits, as kernels compute it."""

from __future__ import annotations

from opake.kernels._triton import jit, tl

__all__ = ["bend", "load_labels", "loss_of", "online", "slope_of"]


@jit
def load_labels(ptr, exists, classes, ignore_index):  # type: ignore[no-untyped-def]
    """Return labels, int32, -1 where there is no loss; and where they are ignored."""
    label = tl.load(ptr, mask=exists, other=ignore_index).to(tl.int64)
    ignored = label == ignore_index
    used = exists & (label >= 0) & (label < classes) & (label != ignore_index)
    return tl.where(used, label, -1).to(tl.int32), ignored


@jit
def bend(x, scale, softcap, scaled: tl.constexpr, capped: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and cap fp32 logits; returns the cap's slope too.

    With a cap, ``scale`` is already divided by it.
    """
    if scaled or capped:
        x = x * scale
    slope = x
    if capped:
        size = tl.abs(x)
        decay = tl.exp2(size * -2.885390081777927)  # exp(-2 |x|)
        far = (1.0 - decay) / (1.0 + decay)
        far = tl.where(x < 0, -far, far)
        # That cancels near zero; this polynomial, fitted to tanh there, is off by 1e-8 of it.
        square = x * x
        near = -0.05387514 + square * (0.02111621 - 0.00627639 * square)
        near = -0.33333330 + square * (0.13332924 + square * near)
        x = softcap * tl.where(size < 0.6, x + x * square * near, far)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return x, slope


@jit
def online(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    label,
    origin,
    classes,
    scale,
    softcap,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    smooth: tl.constexpr,
    aligned: tl.constexpr,
    block_rows: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
):
    """Read rows once; per row: maximum, sum of exponentials, and the sums that smoothing needs.

    Every lane keeps its own maximum and sum, and ``width`` logits share one correction of the sum:
    it takes one exponential a logit, and no two lanes meet before the end.
    """
    lane, part = tl.arange(0, lanes)[None, :, None], tl.arange(0, width)[None, None, :]
    tile = lane * width + part if aligned else part * lanes + lane
    top = tl.full((block_rows, lanes), float("-inf"), tl.float32)
    total = tl.zeros((block_rows, lanes), tl.float32)
    spread = tl.zeros((block_rows, lanes), tl.float32)
    weights = tl.zeros((block_rows, lanes), tl.float32)
    used = (label >= 0)[:, None, None]
    for start in range(0, tl.max(tl.where(label >= 0, classes, 0), 0), lanes * width):
        col = start + tile
        mask = used & (col < classes)
        x = tl.load(x_ptr[:, None, None] + col, mask=mask, other=float("-inf")).to(tl.float32)
        x, _ = bend(x, scale, softcap, scaled, capped)
        if scaled or capped:
            x = tl.where(mask, x, float("-inf"))
        above = tl.maximum(top, tl.max(x, 2))
        finite = tl.where(above == float("-inf"), 0.0, above)
        total *= tl.exp2((top - finite) * 1.4426950408889634)
        total += tl.sum(tl.exp2((x - finite[:, :, None]) * 1.4426950408889634), 2)
        top = above
        if smooth:
            excess = tl.where(mask, x - origin[:, None, None], 0.0)
            if weight_ptr is not None:
                w = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
                weights += tl.sum(w, 2)
                excess = tl.where(mask, excess * w, 0.0)
            spread += tl.sum(excess, 2)
    above = tl.max(top, 1)
    above = tl.where(above == float("-inf"), 0.0, above)
    total = tl.sum(total * tl.exp2((top - above[:, None]) * 1.4426950408889634), 1)
    return above, total, tl.sum(spread, 1), tl.sum(weights, 1)


@jit
def loss_of(  # type: ignore[no-untyped-def]
    above,
    total,
    spread,
    weights,
    target,
    origin,
    factor,
    soft,
    z_loss,
    smooth: tl.constexpr,
    squared: tl.constexpr,
):
    """Return the losses of rows from what :func:`online` found."""
    log_total = tl.log(total)
    # The target's distance from the maximum is exact where lse - target would cancel.
    loss = factor * (above - target + log_total)
    if smooth:
        loss += soft * (weights * (above - origin + log_total) - spread)
    if squared:
        lse = above + log_total
        loss += z_loss * lse * lse
    return loss


@jit
def slope_of(  # type: ignore[no-untyped-def]
    x,
    weight_ptr,
    col,
    classes,
    label,
    above,
    total,
    weights,
    grad,
    target,
    scale,
    softcap,
    soft,
    z_loss,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    smooth: tl.constexpr,
    squared: tl.constexpr,
):
    """Return the gradient of logits ``x`` (rows, columns); ``target`` is the true class's share."""
    x, slope = bend(x, scale, softcap, scaled, capped)
    p = tl.exp2((x - above[:, None]) * 1.4426950408889634) * (1.0 / total)[:, None]
    # Each term cancels on its own; together, the largest would round the others away.
    dlogits = (p - tl.where(col == label[:, None], 1.0, 0.0)) * target[:, None]
    if smooth:
        even = p * weights[:, None]
        if weight_ptr is not None:
            even -= tl.load(weight_ptr + col, mask=col < classes, other=0.0).to(tl.float32)
        else:
            even -= 1.0
        dlogits += even * (grad * soft)[:, None]
    if squared:
        lse = above + tl.log(total)
        dlogits += p * (2.0 * z_loss * lse * grad)[:, None]
    if capped:
        dlogits *= slope
    return dlogits
