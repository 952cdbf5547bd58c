"""The parts of DP-SGD that are not gradients: sampling, noise and accounting.

Sources: Abadi et al. 2016 (DP-SGD), Koskela et al. 2020 and Doroshenko et al. 2022 (the privacy
loss distributions that dp-accounting composes).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from torch import Tensor


def poisson_draw(size: int, probability: float, generator: torch.Generator) -> Tensor:
    """Return the indices of a Poisson sample: each of ``size`` examples enters independently."""
    return torch.nonzero(torch.rand(size, generator=generator) < probability).flatten()


def microbatches(draw: Tensor, slots: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(indices, mask)`` of shape (slots,) that cover a draw of any size.

    Shapes stay fixed whatever the draw. The slots left over hold example 0 under a mask that is
    False, and an empty draw yields nothing.
    """
    for part in draw.split(slots) if draw.numel() else ():
        indices = part.new_zeros(slots)
        indices[: part.numel()] = part
        yield indices, torch.arange(slots) < part.numel()


def add_noise(
    gradient_sum: dict[str, Tensor], *, std: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the sum with Gaussian noise of standard deviation ``std`` on every coordinate.

    Noise is drawn on the CPU, so that one seed gives the same noise on every device.
    """
    return {
        name: total
        + (std * torch.randn(total.shape, generator=generator, dtype=total.dtype)).to(total.device)
        for name, total in gradient_sum.items()
    }


class Accountant:
    """Privacy loss of Poisson-sampled Gaussian steps under add-or-remove-one-example.

    The loss distribution of one step takes seconds to build and never changes, so it is built
    once; composing it costs milliseconds, which makes epsilon affordable at every step.
    """

    def __init__(self, *, sampling_probability: float, noise_multiplier: float, delta: float):
        self.delta = delta
        self._step = pld.from_gaussian_mechanism(
            standard_deviation=noise_multiplier,
            sampling_prob=sampling_probability,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        self._spent = pld.identity()

    def step(self) -> float:
        """Account for one more step and return the epsilon spent so far."""
        self._spent = self._spent.compose(self._step)
        return self.epsilon

    @property
    def epsilon(self) -> float:
        return float(self._spent.get_epsilon_for_delta(self.delta))
