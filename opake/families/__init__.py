"""Which names mean what, per ``model_type``: one small declaration a file, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from opake.errors import InvalidArgument


@dataclass(frozen=True)
class Family:
    """The names under which a model family keeps what a scope has to reach.

    Args:
        module: the modeling module of transformers, dotted.
        base: the model without a head, which builds the masks.
        attention: the modules that look up ``config._attn_implementation`` among
            ``ALL_ATTENTION_FUNCTIONS``.
        masks: the builders of ``transformers.masking_utils`` that ``base`` calls.
        masks_in: the method of ``base`` that calls them.
        own_sdpa: the modules that call torch's SDPA themselves.
        wrapped_by: models around ``base`` that build its masks for it, each with the functions
            that do so, as its module names them.
        cache: False where the model keeps no keys and values from call to call.
        mlp: the module with a gated MLP, if any; others are found by trying them.
        experts: the module of stacked experts that :mod:`transformers.integrations.moe` runs.
    """

    module: str
    base: str
    attention: tuple[str, ...] = ()
    masks: tuple[str, ...] = ("create_causal_mask",)
    masks_in: str = "forward"
    own_sdpa: tuple[str, ...] = ()
    wrapped_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    cache: bool = True
    mlp: str | None = None
    experts: str | None = None

    def __post_init__(self) -> None:
        for name in ("module", "base", "masks_in"):
            self._require(name, isinstance(getattr(self, name), str), "a name")
        for name in ("mlp", "experts"):
            self._require(name, isinstance(getattr(self, name), str | None), "a name, or None")
        for name in ("attention", "masks", "own_sdpa"):
            self._require(name, _are_names(getattr(self, name)), "a tuple of names")
        outer = self.wrapped_by
        fits = isinstance(outer, Mapping) and all(map(_are_names, outer.values()))
        self._require("wrapped_by", fits, "a dict of tuples of names")

    def _require(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            raise InvalidArgument(f"Family.{name} is {what}, found {getattr(self, name)!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """What has to be found in ``module``."""
        outer = (name for item in self.wrapped_by.items() for name in (item[0], *item[1]))
        builds = f"{self.base}.{self.masks_in}"
        return (self.base, builds, *self.attention, *self.own_sdpa, *self.masks, *outer)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


_REGISTERED: dict[str, Family] = {}


def register_family(model_type: str, family: Family) -> None:
    """Make ``model_type`` known to :func:`opake.patched`; replaces an earlier declaration."""
    if not isinstance(model_type, str) or not model_type:
        raise InvalidArgument(f"model_type is config.model_type, a str; found {model_type!r}")
    if not isinstance(family, Family):
        raise InvalidArgument(f"expected opake.Family(...), found {family!r}")
    _REGISTERED[model_type] = family


def is_registered(model_type: str) -> bool:
    """Tell whether the declaration for ``model_type`` came from :func:`register_family`."""
    return model_type in _REGISTERED


def find(model_type: str) -> Family | None:
    """Return the declaration for ``model_type``, or None."""
    if model_type in _REGISTERED:
        return _REGISTERED[model_type]
    if model_type not in shipped():
        return None
    family: Family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    return family


def supported() -> list[str]:
    """Return every known ``model_type``, sorted."""
    return sorted({*_REGISTERED, *shipped()})


def shipped() -> list[str]:
    """Return every ``model_type`` that has a file here, sorted."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))
