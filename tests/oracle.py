"""What per-example results are judged by: ordinary backward passes of stock, one at a time."""

from __future__ import annotations

import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import opake

GRADIENT_BAR = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest error of a gradient that counts as exact: a few hundred ulps of sums whose terms come
in another order. transformers' loss and norms are fp32 islands in an fp64 model too; they run
unchanged and round alike, so fp64 keeps its own bar."""

MOE_BAR = 1e-4
"""The same in fp32 where there are experts: stock's own implementations differ by as much."""

LOSS_BAR = 1e-5
"""Largest error of a loss. transformers computes it in fp32 whatever the model's dtype, and under
vmap its mean adds up in another order: one fp32 ulp, 1.2e-7, also in an fp64 model."""


WIDE = (
    "deepseek_v3",
    "deepseek_v4",
    "gemma3_text",
    "glm4_moe",
    "llama4_text",
    "mamba2",
    "qwen3_5_moe_text",
    "qwen3_next",
)
"""Families that multiply matrices, or on a GPU sum norms, in fp32 whatever the model's dtype. How
that rounds depends on the size of the batch, so two right results differ by some 1e-6 in an fp64
model. Here fp64 models of them compute in fp64 throughout, stock's and ours."""


class Result(NamedTuple):
    """Losses (B,) and gradients (B, *parameter.shape) of single examples."""

    losses: Tensor
    grads: dict[str, Tensor]

    def row(self, i: int) -> list[Tensor]:
        """The loss and all gradients of example ``i``."""
        return [self.losses[i], *(grad[i] for grad in self.grads.values())]


def model_loss(output: Any) -> Tensor:
    """The loss that a model computes from its labels."""
    return output.loss if hasattr(output, "loss") else output[0]


class _Widened(TorchFunctionMode):
    """Computes in fp64 what asks for fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is torch.autograd.grad:
            return self._grad(*args, **(kwargs or {}))
        args = [torch.float64 if x is torch.float32 else x for x in args]
        wide = {n: torch.float64 if x is torch.float32 else x for n, x in (kwargs or {}).items()}
        return func(*args, **wide)

    def _grad(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``torch.autograd.grad``, what a checkpoint recomputes there in fp64 too.

        A mode is off while it handles a function: put it on again around the engine, in a copy of
        that function, as other threads run the function itself.
        """
        stock, engine = torch.autograd.grad, torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        names = {**vars(torch.autograd), "_engine_run_backward": run}
        copied = types.FunctionType(stock.__code__, names, "grad", stock.__defaults__)
        return copied(*args, **kwargs)


def precise(model: Any) -> AbstractContextManager[Any]:
    """Compute in fp64 throughout where the model is of :data:`WIDE` and of that dtype."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    wide = kind in WIDE and next(model.parameters()).dtype == torch.float64
    return _Widened() if wide else nullcontext()


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, detached, tied ones once."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def stock_loop(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    seed: int | None = None,
    **options: Any,
) -> Result:
    """Run one ordinary backward pass per example, each a batch of one.

    ``model`` must be stock and the process without a scope. ``seed`` restarts the random numbers
    before every example. A parameter that the loss does not reach has a gradient of zero.
    """
    assert not opake.active(), "the reference is stock's: run it where no scope is open"
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    size = len(next(iter(batch.values())))
    losses, rows = [], []
    for i in range(size):
        if seed is not None:
            torch.manual_seed(seed)
        row = {name: x[i : i + 1] for name, x in batch.items()}
        with precise(model):
            loss = loss_of(model(**row, **options))
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        rows.append(
            [
                torch.zeros_like(p) if g is None else g
                for g, p in zip(found, params.values(), strict=True)
            ]
        )
        losses.append(loss.detach())
    grads = {
        name: torch.stack(column)
        for name, column in zip(params, zip(*rows, strict=True), strict=True)
    }
    return Result(torch.stack(losses), grads)


def per_example(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss_of: Callable[[Any], Tensor] = model_loss,
    *,
    batched: bool,
    chunk_size: int | None = None,
    randomness: str = "error",
    **options: Any,
) -> Result:
    """Run ``vmap(grad_and_value)`` of the model as it is, in the caller's grad mode.

    ``batched``: the loss function adds a batch dimension of one; otherwise the model is called
    with ``input_ids`` of shape (S,).
    """

    def loss(params: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        if batched:
            example = {name: x.unsqueeze(0) for name, x in example.items()}
        return loss_of(functional_call(model, params, (), {**example, **options}))

    rows = vmap(
        grad_and_value(loss), in_dims=(None, 0), randomness=randomness, chunk_size=chunk_size
    )
    with precise(model):
        grads, losses = rows(trainable(model), dict(batch))
    return Result(losses.detach(), {name: grad.detach() for name, grad in grads.items()})


def error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """``max|a-b| / max(max|b|, floor)``; inf where NaN or inf stand elsewhere; 0/0 is 0."""
    if found.shape != expected.shape:
        return math.inf
    floors = torch.tensor([floor], dtype=torch.float64)
    return _row_errors(found[None], expected[None], floors).item()


def errors(found: Result, expected: Result, *, floor: float = 1e-3) -> tuple[float, float]:
    """The largest error of a loss and of a gradient, over all examples and parameters.

    ``floor`` is that of a gradient, as a part of its example's largest.
    """
    loss, gradient = errors_by_row(found, expected, floor=floor)
    return loss.max().item(), gradient.max().item()


def errors_by_row(found: Result, expected: Result, *, floor: float = 1e-3) -> tuple[Tensor, Tensor]:
    """The same for every example: (B,) and (B,)."""
    assert list(found.grads) == list(expected.grads)
    pairs = [(found.grads[name], grad) for name, grad in expected.grads.items()]
    assert all(a.shape == b.shape for a, b in [*pairs, (found.losses, expected.losses)])
    none = torch.zeros(len(expected.losses), dtype=torch.float64)
    floors = floor * torch.stack([_largest(grad) for grad in expected.grads.values()]).amax(0)
    loss = _row_errors(found.losses, expected.losses, none)
    return loss, torch.stack([_row_errors(a, b, floors) for a, b in pairs]).amax(0)


def _row_errors(found: Tensor, expected: Tensor, floor: Tensor) -> Tensor:
    """The error of every row of two tensors (B, ...), given the floor (B,) of each."""
    a, b = (x.double().reshape(len(x), -1) for x in (found, expected))
    finite = b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    misplaced = torch.where(finite, ~a.isfinite(), ~same).any(1)
    difference = (a - b).abs().where(finite, 0).amax(1)
    relative = difference / _largest(expected).maximum(floor)
    return relative.where(difference != 0, 0).where(~misplaced, math.inf)


def _largest(x: Tensor) -> Tensor:
    """The largest finite magnitude in every row of a tensor (B, ...)."""
    x = x.double().reshape(len(x), -1).abs()
    return x.where(x.isfinite(), 0).amax(1)


def assert_exact(
    found: Result,
    expected: Result,
    *,
    floor: float = 1e-3,
    noise: float | Tensor = 0.0,
    loss_noise: float | Tensor = 0.0,
) -> None:
    """Assert that dtypes agree and that losses and gradients are exact.

    ``noise`` and ``loss_noise``, of all examples or of each (B,), are how far ``expected`` itself
    is from the truth: where its gradients cancel to nothing, the rounding of both sides is all that
    is left to compare. Ours may be twice as far from the truth as stock's, in another direction:
    hence three times that.
    """
    assert found.losses.dtype == expected.losses.dtype
    for name, grad in expected.grads.items():
        assert found.grads[name].dtype == grad.dtype, name
    bar = max(GRADIENT_BAR[grad.dtype] for grad in expected.grads.values())
    loss, gradient = errors_by_row(found, expected, floor=floor)
    for name, error_of, least, rounding in (
        ("loss", loss, LOSS_BAR, loss_noise),
        ("a gradient", gradient, bar, noise),
    ):
        bars = (3 * torch.as_tensor(rounding, dtype=torch.float64)).clamp(min=least)
        over = error_of.where(error_of > bars, 0).max().item()
        assert not over, f"{name} is off by {over:.2e}"


def same_bits(found: Any, expected: Any) -> bool:
    """Tell whether two pytrees of tensors hold the same numbers, NaN equal to NaN."""
    a, b = tree_leaves(found), tree_leaves(expected)
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and x == y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return bool(((x == y) | ((x != x) & (y != y))).all())


# ---- has everything been put back?


class Snapshot:
    """What a scope may touch, by identity and in order; :meth:`changes` lists what differs."""

    def __init__(self, *models: nn.Module) -> None:
        self._models = models
        self._state = self._read()

    def changes(self) -> list[str]:
        """Name every place whose contents are not the identical objects in the same order."""
        now = self._read()
        assert [place for place, _, _ in now] == [place for place, _, _ in self._state]
        return [
            place
            for (place, keys, values), (_, old_keys, old_values) in zip(
                now, self._state, strict=True
            )
            if keys != old_keys or any(x is not y for x, y in zip(values, old_values, strict=False))
        ]

    def _read(self) -> list[tuple[str, list[Any], list[Any]]]:
        """Hold on to the values, so that no other object can take their identity."""
        places: list[tuple[str, Any]] = []
        for model in self._models:
            for name, module in model.named_modules():
                owner = f"{type(model).__qualname__}.{name}"
                places += [(owner, vars(module)), (f"{owner}'s class", {"class": type(module)})]
                places += [(f"{owner}.{n}", vars(module)[n]) for n in _CONTAINERS]
                if hasattr(module, "config"):
                    places.append((f"{owner}.config", vars(module.config)))
        for name in _TOUCHED:
            # Python puts a warning registry into a module that warned.
            names = vars(sys.modules[name]).items()
            places.append((name, {n: v for n, v in names if n != "__warningregistry__"}))
        places += [
            ("the attention registry", ALL_ATTENTION_FUNCTIONS._global_mapping),
            ("the mask registry", ALL_MASK_ATTENTION_FUNCTIONS._global_mapping),
        ]
        return [(place, list(held), list(held.values())) for place, held in places]


_CONTAINERS = ("_parameters", "_buffers", "_modules")
_TOUCHED = (
    "torch._functorch.eager_transforms",
    "transformers.models.llama.modeling_llama",
    "transformers.masking_utils",
    "transformers.integrations.sdpa_attention",
)


# ---- how much is kept alive?


class _Storages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage())
        return output

    def _watch(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Count the bytes of tensor storages alive at once; yields a function that returns the peak."""
    with _Storages() as storages:
        yield lambda: storages.peak
