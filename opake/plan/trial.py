"""Per-example gradients of a tiny model, by the loop and by ``vmap(grad)``, and how they differ."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode

LENGTH = 6
FIELDS: Mapping[str, Any] = {"use_cache": True}
"""What the config of a trial says, whatever the model's does."""

_MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [1, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 0],
    ],
    device="cpu",
)
"""No padding, right, left, holes, and nothing but padding."""

_FLOOR = 1e-3
"""Of an example's largest gradient: what is smaller is rounding of what cancels."""

_LOSS = 1e-5
"""transformers computes losses in fp32, where a mean under vmap adds up in another order."""

_GRADIENT = 1e-5
"""The same for gradients in fp32, or through fp32 islands of an fp64 model."""


class Result(NamedTuple):
    """Losses (B,) and gradients (B, *parameter.shape) of single examples."""

    losses: Tensor
    grads: dict[str, Tensor]


class Expected(NamedTuple):
    """What the loop makes of every batch, and what a call with the first one returns."""

    batches: list[dict[str, Tensor]]
    results: list[Result]
    loss_of: Callable[[Any], Tensor]
    output: Tensor


class Errors(NamedTuple):
    """The largest over all examples and tensors."""

    loss: float
    gradient: float

    @property
    def are_rounding(self) -> bool:
        """Tell whether they are as small as sums in another order make them."""
        return self.loss <= _LOSS and self.gradient <= _GRADIENT


class _OwnChance(TorchFunctionMode):
    """Draws weights from a generator of its own, in this thread, and leaves the process's alone.

    To set that one back afterwards would let other threads draw the same numbers twice. What takes
    no generator (``rand_like``, a dropout written into the code) draws from it all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        draws = func in _DRAWING or "generator" in kwargs  # as what initializes weights passes on
        if draws and kwargs.get("generator") is None and not _is_meta(args, kwargs):
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


_DRAWING = {
    *(getattr(torch, name) for name in ("rand", "randn", "randint", "randperm", "normal")),
    *(getattr(torch, name) for name in ("bernoulli", "multinomial")),
    *(getattr(Tensor, name) for name in ("uniform_", "normal_", "random_", "bernoulli_")),
    *(getattr(Tensor, name) for name in ("exponential_", "log_normal_", "cauchy_", "geometric_")),
    *(getattr(Tensor, name) for name in ("bernoulli", "multinomial")),
}


def _is_meta(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    on_meta = device is not None and torch.device(device).type == "meta"
    given = (*args, *kwargs.values())
    return on_meta or any(isinstance(x, Tensor) and x.is_meta for x in given)


@contextmanager
def apart() -> Iterator[None]:
    """Keep a trial and the caller's random numbers and modes out of each other."""
    with ExitStack() as stack:
        for context in (
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),  # no_grad ends with it
            _OwnChance(),
        ):
            stack.enter_context(context)
        yield


def prepare(model: nn.Module) -> None:
    """Make attention uneven and every bias matter, and leave no dropout that no config sets."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.copy_(0.2 * noise if p.ndim > 1 else p + 0.1 * noise)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def width(model: nn.Module) -> str:
    """Name the model's precision."""
    return "fp64" if next(model.parameters()).dtype == torch.float64 else "fp32"


def loop(model: Any) -> tuple[Any, Expected]:
    """Return the model, in the widest precision in which it runs, and what the loop gives."""
    try:
        return model.double(), _loop(model)
    except Exception:  # it mixes precisions, and says so as it likes
        return model.float(), _loop(model)


def _loop(model: Any) -> Expected:
    batches, loss_of = _batches(model)
    results = [_one_by_one(model, batch, loss_of) for batch in batches]
    if not any(map(_says_something, results)):
        raise ValueError("no row has a finite loss with finite gradients that are not all zero")
    return Expected(batches, results, loss_of, _scores(model, batches[0]))


def _says_something(result: Result) -> bool:
    """Tell whether a row has a loss and gradients that a wrong patch would move."""
    grads = torch.stack([_largest(x) for x in result.grads.values()])
    finite = torch.stack([x.reshape(len(x), -1).isfinite().all(1) for x in result.grads.values()])
    rows = result.losses.isfinite() & finite.all(0) & (grads > 0).any(0)
    return bool(rows.any())


def _scores(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what an ordinary call gives beside the loss."""
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    scores: Tensor = output[0]
    return scores


def errors(model: Any, expected: Expected) -> Errors:
    """Return how far ``vmap(grad)`` is from the loop, with and without a batch dimension.

    An ordinary call counts with the gradients.
    """
    found = [
        _errors(_mapped(model, batch, expected.loss_of, batched), result)
        for batch, result in zip(expected.batches, expected.results, strict=True)
        for batched in (True, False)
    ]
    ordinary = _scores(model, expected.batches[0])
    floors = _FLOOR * _largest(expected.output).amax().expand(len(ordinary))
    found.append(Errors(0.0, _error(ordinary, expected.output, floors)))
    return Errors(max(e.loss for e in found), max(e.gradient for e in found))


def _batches(model: Any) -> tuple[list[dict[str, Tensor]], Callable[[Any], Tensor]]:
    """Return rows with every kind of padding and rows without a mask, and a loss of an output."""
    embedded = model.get_input_embeddings().weight.shape[0]
    # Some embed more tokens than they score.
    rows = min(embedded, getattr(model.config.get_text_config(), "vocab_size", embedded))
    generator = torch.Generator("cpu").manual_seed(1)
    # The first few are special, as a rule.
    ids = torch.randint(min(4, rows - 1), rows, _MASK.shape, generator=generator)
    padded = {"input_ids": ids.masked_fill(_MASK == 0, 0), "attention_mask": _MASK.clone()}
    batches = [padded, {"input_ids": ids[:2]}]
    for labels in _labels(model, ids):
        labelled = [
            {**batch, **{name: x[: len(batch["input_ids"])] for name, x in labels.items()}}
            for batch in batches
        ]
        try:
            first = {name: x[:1] for name, x in labelled[0].items()}
            torch.autograd.grad(_loss(model(**first)), [*_trainable(model).values()][:1])
        except Exception:  # labels of another shape or range than this head's
            continue
        return labelled, _loss
    return batches, _of_hidden


def _labels(model: Any, ids: Tensor) -> Iterator[dict[str, Tensor]]:
    """Return what different heads may take for labels."""
    names = inspect.signature(model.forward).parameters
    if "labels" in names:
        kept = (_MASK == 1) | (_MASK.sum(1, keepdim=True) == 0)
        yield {"labels": ids.where(kept, -100)}
        yield {"labels": (ids % 2).where(kept, -100)}
        yield {"labels": ids[:, 0] % 2}
    if "start_positions" in names:
        yield {"start_positions": ids[:, 0] % LENGTH, "end_positions": ids[:, 1] % LENGTH}


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _of_hidden(output: Any) -> Tensor:
    """Return a functional of an output that is uneven in all entries."""
    hidden: Tensor = output[0].flatten()
    weights = torch.arange(hidden.numel(), dtype=hidden.dtype, device="cpu").cos()
    return (hidden * weights).sum()


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _one_by_one(
    model: Any, batch: Mapping[str, Tensor], loss_of: Callable[[Any], Tensor]
) -> Result:
    params = _trainable(model)
    losses, rows = [], []
    for i in range(len(batch["input_ids"])):
        loss = loss_of(model(**{name: x[i : i + 1] for name, x in batch.items()}))
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        pairs = zip(found, params.values(), strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
        losses.append(loss.detach())
    grads = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(params)}
    return Result(torch.stack(losses), grads)


def _mapped(
    model: Any, batch: Mapping[str, Tensor], loss_of: Callable[[Any], Tensor], batched: bool
) -> Result:
    def loss(params: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        if batched:
            example = {name: x.unsqueeze(0) for name, x in example.items()}
        return loss_of(functional_call(model, params, (), example))

    params = {name: p.detach() for name, p in _trainable(model).items()}
    with torch.no_grad():
        grads, losses = vmap(grad_and_value(loss), in_dims=(None, 0))(params, dict(batch))
    return Result(losses, grads)


def _errors(found: Result, expected: Result) -> Errors:
    floors = _FLOOR * torch.stack([_largest(x) for x in expected.grads.values()]).amax(0)
    none = torch.zeros_like(floors)
    gradients = [_error(found.grads[name], x, floors) for name, x in expected.grads.items()]
    return Errors(_error(found.losses, expected.losses, none), max(gradients))


def _error(found: Tensor, expected: Tensor, floors: Tensor) -> float:
    """``max|a-b| / max(max|b|, floor)`` of the worst row; inf where NaN or inf stand elsewhere."""
    if found.shape != expected.shape:
        return math.inf
    a, b = (x.double().reshape(len(x), -1) for x in (found, expected))
    finite = b.isfinite()
    misplaced = torch.where(finite, ~a.isfinite(), (a != b) & ~(a.isnan() & b.isnan())).any(1)
    difference = (a - b).abs().where(finite, 0).amax(1)
    relative = difference / _largest(expected).maximum(floors)
    return relative.where(difference != 0, 0).where(~misplaced, math.inf).max().item()


def _largest(x: Tensor) -> Tensor:
    x = x.double().reshape(len(x), -1).abs()
    return x.where(x.isfinite(), 0).amax(1)
