"""How near a result must be to what is true in fp64, given what eager makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DRAWS",
    "FP32_BAR",
    "Result",
    "Slack",
    "all_same",
    "assert_close",
    "compare",
    "judge",
    "leaves",
]

Slack = tuple[Sequence[float], Sequence[float]]
Luck = tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]

DRAWS = 20
"""How often inputs are changed to see what rounding does."""

_CHANCES = 100
"""How often, to see what eager's error might have been: of four roundings in a row, with all others
alike, twenty draws seldom show three that agree."""

FP32_BAR = 1e-5
"""Largest error of an fp32 result: some eighty ulps of the tensor's largest number, which leaves
room for sums in another order and for the GPU's approximate exponential (2 ulps)."""

_FLUSHED = torch.finfo(torch.float32).smallest_normal
"""What is smaller may be zero: the GPU's exponential, for one, returns no such number."""


class Result(NamedTuple):
    """What a call returned, and the gradients of the arguments that were asked for."""

    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]


def compare(
    found: Result,
    truth: Result,
    eager: Result,
    bar: float = FP32_BAR,
    slack: Slack = ((), ()),
    luck: Luck = ((), ()),
) -> None:
    """Assert that outputs and gradients are as near to fp64's as their dtypes and eager's demand.

    Small ones are held to the scale of the largest of their kind, times 1e-3. ``slack``: absolute
    errors that outputs and that gradients may have, whatever eager's. ``luck``: of each, what
    eager's largest and RMS error might as well have been.
    """
    kinds = ("output", "gradient")
    for part, (kind, ours, exact, theirs) in enumerate(
        zip(kinds, found, truth, eager, strict=True)
    ):
        assert len(ours) == len(exact), f"{len(ours)} {kind}s, not {len(exact)}"
        floor = 1e-3 * max(map(_largest, exact), default=0.0)
        allowed = slack[part] or [0.0] * len(exact)
        might = luck[part] or [(0.0, 0.0)] * len(exact)
        rows = zip(ours, exact, theirs, allowed, might, strict=True)
        for i, (a, b, c, d, e) in enumerate(rows):
            assert_close(a, b, c, floor, f"{kind} {i}", bar, d, e)


def judge(
    found: Result,
    truth: Result,
    eager: Result,
    shaken: Callable[[int], tuple[Result, Result]],
    bar: float = FP32_BAR,
    slack: Slack = ((), ()),
) -> None:
    """Assert as :func:`compare` does, except of what the last digits of fp32 decide.

    What a sum cancels is not there to be computed, and the remainder that eager happens to leave is
    no measure for ours. ``shaken(k)`` is what is true of other inputs within rounding, the
    ``k``-th, and what eager makes of them in fp32; from :data:`DRAWS` on, of inputs rounded to the
    dtypes they have. Where few numbers are rounded on the way, eager's error is a matter of luck,
    and what it would have been there is as good a measure.
    """
    try:
        compare(found, truth, eager, bar, slack)
    except AssertionError:
        others = [shaken(k) for k in range(DRAWS)]
        noise = []
        for part, exact in enumerate(truth):
            allowed = list(slack[part]) or [0.0] * len(exact)
            for other, theirs in ((other[part], theirs[part]) for other, theirs in others):
                for i, (x, y, z) in enumerate(zip(exact, other, theirs, strict=True)):
                    # A remainder is the sum of a few roundings, of which twenty draws show some.
                    allowed[i] = max(allowed[i], _largest(x - y) + 4 * _largest(y - z))
            noise.append(allowed)
        try:
            compare(found, truth, eager, bar, (noise[0], noise[1]))
        except AssertionError:
            luck = _luck([shaken(k) for k in range(DRAWS, DRAWS + _CHANCES)])
            compare(found, truth, eager, bar, (noise[0], noise[1]), luck)


def _luck(draws: Sequence[tuple[Result, Result]]) -> Luck:
    """What eager's largest error and its RMS might have been, for every output and gradient.

    That is the most among the draws and as much again as lies between them, which is next to
    nothing where many numbers are rounded.
    """
    found = []
    for part in range(2):
        each = []
        for i in range(len(draws[0][0][part])):
            pairs = [(truth[part][i], eager[part][i]) for truth, eager in draws]
            errors = zip(*(_errors(y.double() - x) for x, y in pairs), strict=True)
            largest, rms = (2 * max(values) - min(values) for values in errors)
            each.append((largest, rms))
        found.append(each)
    return found[0], found[1]


def _errors(x: Tensor) -> tuple[float, float]:
    x = x[x.isfinite()]
    return _largest(x), x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_close(
    found: Tensor,
    truth: Tensor,
    eager: Tensor,
    floor: float,
    what: str = "",
    bar: float = FP32_BAR,
    slack: float = 0.0,
    luck: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Assert that ``found`` is as near to ``truth`` (fp64) as its dtype and eager demand.

    Nothing smaller than ``slack`` is an error. ``luck``: what eager's largest error and its RMS
    might as well have been.
    """
    assert found.shape == truth.shape, f"{what}: {tuple(found.shape)}, not {tuple(truth.shape)}"
    assert found.dtype == eager.dtype, f"{what}: {found.dtype}, not {eager.dtype}"
    if not found.is_floating_point():
        assert torch.equal(found, truth), f"{what}: {found}, not {truth}"
        return
    rounded = truth.to(found.dtype)
    finite = rounded.isfinite()
    assert torch.equal(found.isfinite(), finite), f"{what}: NaN or infinite elsewhere"
    special = found.masked_fill(finite, 0), rounded.masked_fill(finite, 0)
    assert all_same(special[:1], special[1:]), f"{what}: other infinities"
    keep = finite & eager.isfinite()
    exact = truth[keep]
    if not exact.numel():
        return
    ours, theirs = (x[keep].double() - exact for x in (found, eager))
    scale = max(exact.abs().max().item(), floor)
    worst = ours.abs().max().item()
    if worst <= max(slack, _FLUSHED):
        return
    if found.dtype in (torch.float32, torch.float64) and worst <= bar * scale:
        return
    # Half precision, or eager rounded to it on the way to fp32.
    limits = torch.finfo(found.dtype)
    eps = limits.eps * max(scale, limits.smallest_normal)  # no ulp is smaller
    bound = 2 * max(theirs.abs().max().item(), luck[0]) + eps
    assert worst <= bound, f"{what}: off by {worst:.2e}, allowed are {bound:.2e}"
    mine, eagers = (x.square().mean().sqrt().item() for x in (ours, theirs))
    # Both round the same truth; where an fp32 result lies on a tie, ours may round the other way.
    if mine > 1.05 * max(eagers, luck[1]) + 2e-4 * eps:
        excess = torch.zeros_like(truth)
        excess[keep] = ours.square() - (1.05 * theirs).square()
        chance = 3 * _standard_error(excess)
        message = f"{what}: RMS {mine:.3e}, eager {eagers:.3e}"
        assert excess.sum().item() <= chance * exact.numel(), message


def _standard_error(x: Tensor) -> float:
    """Of the mean of ``x``, whose numbers may be alike along any dimension.

    Under a gradient expanded from one number, every row rounds as the others do: then there are
    only as many independent numbers as columns. Of fewer than two nothing can be said.
    """
    worst = 0.0
    for dim in range(x.dim()):
        means = x.movedim(dim, 0).flatten(1).mean(1) if x.dim() > 1 else x
        if len(means) > 1:
            worst = max(worst, means.std().item() / len(means) ** 0.5)
    return worst if worst else float("inf")


def leaves(result: Result) -> list[Tensor]:
    """Outputs and gradients in one list."""
    return [*result.outputs, *result.grads]


def all_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tell whether two lists of tensors hold the same numbers, NaN equal to NaN."""
    return all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(found, expected, strict=True)
    )


def _largest(x: Tensor) -> float:
    x = x[x.isfinite()]
    return x.abs().max().item() if x.numel() else 0.0
