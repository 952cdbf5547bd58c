"""The two promises of opake, checked on the demo's own run.

Gradients taken inside the scope equal the stock loop's, and after it every slot that a patch could
have written holds the object that it held before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from corpus import Batch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import _LazyModule

# fp32 rounds at 6e-8; sums over a few thousand terms in another order differ by a few 1e-6.
MAX_GRADIENT_ERROR = 1e-5

# A tensor whose whole gradient is this far below the example's largest one is compared at that
# scale: its own values are rounding noise of the rest.
GRADIENT_FLOOR = 1e-3

# Packages in which a patch could write.
_WATCHED = ("transformers", "peft", "torch")

# Where Python notes which warnings it has shown: any code may warn for the first time.
_IGNORED_KEYS = {"__warningregistry__"}

_MISSING = object()


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest ``max|a-b| / max(max|b|, floor)`` over the tensors of one example.

    The floor is `GRADIENT_FLOOR` times the largest expected gradient; 0/0 counts as 0, and a value
    that is not finite on both sides alike as infinite.
    """
    scales = {name: float(tensor.abs().max()) for name, tensor in expected.items()}
    floor = GRADIENT_FLOOR * max(scales.values())
    worst = 0.0
    for name, scale in scales.items():
        difference = float((found[name] - expected[name]).abs().max())
        if difference != 0.0:
            error = difference / max(scale, floor)
            worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def loop_gradients(model: nn.Module, examples: Batch) -> Iterator[dict[str, Tensor]]:
    """Yield each example's gradients from an ordinary backward pass over it alone."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for row in range(len(examples["input_ids"])):
        example = {name: tensor[row : row + 1] for name, tensor in examples.items()}
        loss = model(**example).loss
        gradients = torch.autograd.grad(loss, list(trainable.values()))
        yield dict(zip(trainable, gradients, strict=True))


def max_loop_error(model: nn.Module, examples: Batch, found: dict[str, Tensor]) -> float:
    """Return the largest error of gradients (B, ...) against the loop over ``model``."""
    return max(
        gradient_error({name: tensor[row] for name, tensor in found.items()}, expected)
        for row, expected in enumerate(loop_gradients(model, examples))
    )


class Snapshot:
    """What every watched slot holds: the object itself, kept alive so that none takes its place.

    Take it after one forward pass. The first one leaves traces of transformers' own (its output
    capturing installs hooks on the modules) that no patch is responsible for.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._modules = dict(_watched_modules())
        self._places = self._read()

    def _read(self) -> dict[str, dict[Any, Any]]:
        return {
            label: {key: value for key, value in place.items() if key not in _IGNORED_KEYS}
            for label, place in (
                *_model_places(self._model),
                *_library_places(self._modules),
                *_registry_places(),
            )
        }

    @property
    def slots(self) -> int:
        return sum(len(place) for place in self._places.values())

    def summary(self) -> dict[str, int]:
        """Count the slots of every kind of place, the label's first word."""
        counts: dict[str, int] = {}
        for label, place in self._places.items():
            kind = label.split(" ", 1)[0]
            counts[kind] = counts.get(kind, 0) + len(place)
        return counts

    def differences(self) -> list[str]:
        """Say where the process now differs: a value by identity, a key, or the order of keys."""
        now = self._read()
        return [
            difference
            for label in self._places | now
            for difference in _differences(label, self._places.get(label, {}), now.get(label, {}))
        ]


def _differences(label: str, before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[str]:
    for key in before | after:
        if before.get(key, _MISSING) is not after.get(key, _MISSING):
            change = "left behind" if key not in before else "lost" if key not in after else "other"
            yield f"{label}: {key} is {change}"
    if before.keys() == after.keys() and list(before) != list(after):
        yield f"{label}: keys are in another order"


def _model_places(model: nn.Module) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield "type of modules", {name: type(module) for name, module in model.named_modules()}
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        yield f"instance {name}", vars(module)
        for key, value in vars(module).items():
            # nn.Module keeps its parameters, submodules and hooks in dicts of its own.
            if isinstance(value, dict):
                yield f"instance {name}.{key}", value
        if hasattr(module, "config"):
            configs.setdefault(id(module.config), module.config)
    for index, config in enumerate(configs.values()):
        yield f"config {index} {type(config).__name__}", getattr(config, "__dict__", {})


def _library_places(
    modules: Mapping[str, ModuleType],
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    for name, module in modules.items():
        yield f"globals {name}", vars(module)
        for value in list(vars(module).values()):
            # Only where a class is defined: elsewhere it is the same one under another name. The
            # type is asked, since isinstance runs code of objects that pose as another class.
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"class {name}.{value.__qualname__}", vars(value)


def _registry_places() -> Iterator[tuple[str, Mapping[Any, Any]]]:
    for interface in (AttentionInterface, AttentionMaskInterface):
        yield f"registry {interface.__name__}", interface._global_mapping


def _watched_modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        # A lazy module gains an attribute whenever somebody reads one of its names first.
        if name.split(".")[0] in _WATCHED and not isinstance(module, _LazyModule):
            yield name, module
