"""DP-SGD over per-example gradients from ``torch.func``, inside ``opake.patched``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from checks import Snapshot, max_loop_error
from corpus import Batch, encode, split, take
from models import Task
from privacy import Accountant, add_noise, microbatches, poisson_draw
from torch import Tensor, nn

import opake
from opake.functional import clipped_grad_sum, make_functional, per_example_grads

LossFn = Callable[[dict[str, Tensor], Batch], Tensor]


@dataclass(frozen=True)
class Settings:
    """Everything that the outcome depends on, beside the model and the corpus."""

    steps: int
    seed: int = 0
    device: str = "cpu"
    sequence_length: int = 32
    validation_share: float = 0.1
    validation_examples: int = 64
    validate_every: int = 5
    expected_batch: int = 48
    slots: int = 64  # two standard deviations above the expected batch: 1 draw in 100 needs more
    chunk_size: int = 16
    max_norm: float = 0.5
    noise_multiplier: float = 0.5
    learning_rate: float = 1e-2
    delta: float = 1e-5
    checked_examples: int = 8


@dataclass(frozen=True)
class Data:
    """Token tensors: the private training set, and what is held out for validation."""

    train: Batch
    validation: Batch

    @property
    def train_size(self) -> int:
        return len(self.train["input_ids"])


@dataclass
class Step:
    """One optimizer step. Its losses and norms are diagnostics that epsilon does not cover."""

    step: int
    draw: int
    microbatches: int
    train_loss: float | None  # of the drawn examples before the update; None for an empty draw
    clipped_share: float | None
    epsilon: float
    seconds: float
    validation_loss: float | None = None


@dataclass
class Outcome:
    """What a run gives back."""

    initial_validation_loss: float
    steps: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    gradient_error: float = float("inf")
    compared_slots: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


class Observer:
    """Is told how a run proceeds. This one does nothing with it."""

    def planned(self, table: object) -> None: ...

    def validated(self, step: int, loss: float) -> None: ...

    def stepped(self, step: Step) -> None: ...


def prepare_data(task: Task, entries: list[str], settings: Settings) -> Data:
    """Tokenise the training part of a corpus, and the first of the held-out part."""
    train, held_out = split(entries, validation=settings.validation_share, seed=settings.seed)

    def encoded(texts: list[str]) -> Batch:
        batch = encode(texts, task.tokenise, length=settings.sequence_length, pad_id=task.pad_id)
        return {name: tensor.to(settings.device) for name, tensor in batch.items()}

    return Data(encoded(train), encoded(held_out[: settings.validation_examples]))


def finetune(model: nn.Module, data: Data, settings: Settings, observer: Observer) -> Outcome:
    """Train a model in place inside a patched scope, then check gradients and restoration.

    What the checks find is reported in the outcome, not raised.
    """
    warm_up(model, take(data.validation, torch.arange(1)))
    before = Snapshot(model)
    sample = take(data.train, torch.arange(min(settings.checked_examples, data.train_size)))
    with opake.patched(model) as ps:
        observer.planned(ps.explain())
        fmodel, params = make_functional(model)

        def loss_fn(params: dict[str, Tensor], example: Batch) -> Tensor:
            return fmodel(
                params,
                input_ids=example["input_ids"],
                attention_mask=example["attention_mask"],
                labels=example["labels"],
            ).loss

        outcome = DPSGD(loss_fn, params, data, settings).run(observer)
        found, _ = per_example_grads(loss_fn, params, sample, chunk_size=settings.chunk_size)
    started = time.perf_counter()
    outcome.compared_slots = before.summary()
    outcome.differences = before.differences()
    # The model holds the trained values by now: the functional parameters share its memory.
    outcome.gradient_error = max_loop_error(model, sample, found)
    outcome.seconds["checks"] = time.perf_counter() - started
    return outcome


def warm_up(model: nn.Module, batch: Batch) -> None:
    """Let torch and transformers leave the traces that a first use leaves, patched or not.

    They are transformers' output-capturing hooks, functorch's decomposition library and the
    profiling wrapper of ``Adam.step``.
    """
    with torch.no_grad():
        model(**batch)
    parameter = torch.zeros(1, device=batch["input_ids"].device)
    parameter.grad = torch.func.vmap(torch.func.grad(torch.sum))(parameter[None])[0]
    torch.optim.Adam([parameter]).step()


class DPSGD:
    """Differentially private Adam: Poisson sampling, clipping, noise on the sum, accounting."""

    def __init__(
        self, loss_fn: LossFn, params: dict[str, Tensor], data: Data, settings: Settings
    ) -> None:
        self.loss_fn = loss_fn
        self.params = params
        self.data = data
        self.settings = settings
        # The size of the training set counts as public, as is usual under Poisson sampling.
        self.sampling_probability = min(1.0, settings.expected_batch / data.train_size)
        self.accountant = Accountant(
            sampling_probability=self.sampling_probability,
            noise_multiplier=settings.noise_multiplier,
            delta=settings.delta,
        )
        # Two streams, so that noise is independent of sampling. Seeds make the demo repeatable;
        # the guarantee holds only against those who do not know them.
        self.sampling = torch.Generator().manual_seed(2 * settings.seed)
        self.noise = torch.Generator().manual_seed(2 * settings.seed + 1)
        self.optimizer = torch.optim.Adam(list(params.values()), lr=settings.learning_rate)

    def run(self, observer: Observer) -> Outcome:
        """Take all steps, validating before the first, at intervals, and after the last."""
        settings = self.settings
        started = time.perf_counter()
        outcome = Outcome(self.validate())
        validation = time.perf_counter() - started
        observer.validated(0, outcome.initial_validation_loss)
        for number in range(1, settings.steps + 1):
            step = self.step(number)
            outcome.steps.append(step)
            observer.stepped(step)
            if number % settings.validate_every == 0 or number == settings.steps:
                paused = time.perf_counter()
                step.validation_loss = self.validate()
                validation += time.perf_counter() - paused
                observer.validated(number, step.validation_loss)
        outcome.seconds["steps"] = sum(step.seconds for step in outcome.steps)
        outcome.seconds["validation"] = validation
        return outcome

    def step(self, number: int) -> Step:
        """Draw a batch and update the parameters from its noised gradient."""
        started = time.perf_counter()
        draw = poisson_draw(self.data.train_size, self.sampling_probability, self.sampling)
        gradient_sum, norms, losses = self.clipped_sum(draw)
        noised = add_noise(
            gradient_sum,
            std=self.settings.noise_multiplier * self.settings.max_norm,
            generator=self.noise,
        )
        # An empty draw was noised too and counts as a step: who is absent must not show.
        epsilon = self.accountant.step()
        for name, parameter in self.params.items():
            parameter.grad = noised[name] / self.settings.expected_batch
        self.optimizer.step()
        return Step(
            step=number,
            draw=len(draw),
            microbatches=-(-len(draw) // self.settings.slots),
            train_loss=float(losses.mean()) if len(draw) else None,
            clipped_share=float((norms > self.settings.max_norm).float().mean())
            if len(draw)
            else None,
            epsilon=epsilon,
            seconds=time.perf_counter() - started,
        )

    def clipped_sum(self, draw: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the sum of the drawn examples' clipped gradients, their norms and losses."""
        total = {name: torch.zeros_like(parameter) for name, parameter in self.params.items()}
        norms, losses = [], []
        for rows, mask in microbatches(draw, self.settings.slots):
            sums, row_norms, row_losses = clipped_grad_sum(
                self.loss_fn,
                self.params,
                take(self.data.train, rows),
                max_norm=self.settings.max_norm,
                chunk_size=self.settings.chunk_size,
                mask=mask.to(self.settings.device),
            )
            for name, value in sums.items():
                total[name] += value
            norms.append(row_norms.cpu()[mask])
            losses.append(row_losses.cpu()[mask])
        if not norms:
            return total, torch.zeros(0), torch.zeros(0)
        return total, torch.cat(norms), torch.cat(losses)

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean over the validation examples of what training minimises."""
        losses = torch.func.vmap(
            self.loss_fn, in_dims=(None, 0), chunk_size=self.settings.chunk_size
        )(self.params, self.data.validation)
        return float(losses.mean())
