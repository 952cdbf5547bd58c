"""The flags of a scope: umbrellas, concerns, and what a call sets of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opake.errors import InvalidArgument, UnknownFlag

UMBRELLAS: dict[str, tuple[str, ...]] = {
    "compat": (
        "eager_attention",
        "sdpa",
        "batchify",
        "vmap_masking",
        "moe",
        "vmap_checkpointing",
        "first_order",
        "vmap_grouped_mm",
        "empty_batches",
    ),
    "performance": ("kv_cache", "fused_linear_cross_entropy", "chunked_linear_cross_entropy"),
    "kernels": (
        "rope",
        "rms_norm",
        "layer_norm",
        "fused_add_rms_norm",
        "activation",
        "cross_entropy",
        "embedding",
        "grouped_moe",
    ),
    "peft": ("lora_w", "lora_qkv", "lora_mlp"),
}
"""Every concern under the flag that switches it when it is not set alone."""

STANDALONE = ("dropout",)
"""Concerns under no umbrella, off by default."""

PROCESS_WIDE = ("vmap_checkpointing", "first_order", "vmap_grouped_mm", "empty_batches")
"""Concerns that act on the process; ``runtime()`` gives them without a model."""

CONCERNS = (*(name for group in UMBRELLAS.values() for name in group), *STANDALONE)

KERNEL_CONCERNS = {
    **{name: name for name in (*UMBRELLAS["kernels"], *UMBRELLAS["peft"])},
    "fused_linear_cross_entropy": "fused_linear_cross_entropy",
    "linear_cross_entropy": "fused_linear_cross_entropy",
    "swiglu": "activation",
    "geglu_exact": "activation",
    "geglu_tanh": "activation",
    "moe": "grouped_moe",
}
"""What ``kernels=[...]`` may name, and the concern it switches on."""

MODES = ("train", "infer")
_NOT_IN_INFER = ("cross_entropy", "fused_linear_cross_entropy", "chunked_linear_cross_entropy")


@dataclass(frozen=True)
class Flags:
    """The resolved flags of one scope. Two equal ones make the same plan."""

    concerns: Mapping[str, bool | int] = field(hash=False)
    mode: str = "train"
    min_elements: int | None = None
    triton: bool = True
    """False where no kernel may run, not that of a loss either."""

    def __getitem__(self, concern: str) -> bool | int:
        return self.concerns[concern]

    @property
    def compat(self) -> bool:
        """True where any model concern of the compat umbrella is on."""
        return any(self[c] for c in UMBRELLAS["compat"] if c not in PROCESS_WIDE)


def resolve(
    *,
    compat: bool = True,
    performance: bool = True,
    kernels: bool | Iterable[str] | None = None,
    peft: bool = True,
    mode: str = "train",
    min_elements: int | None = None,
    **concerns: Any,
) -> Flags:
    """Resolve umbrellas and overrides. A concern set alone beats its umbrella.

    Raises :class:`~opake.errors.UnknownFlag` for a keyword that is none, naming the nearest, and
    :class:`~opake.errors.InvalidArgument` for a value that cannot be used.
    """
    known = (*UMBRELLAS, *CONCERNS, "mode", "min_elements")
    for name in concerns:
        if name not in CONCERNS:
            if name in KERNEL_CONCERNS:
                concern = KERNEL_CONCERNS[name]
                raise UnknownFlag(
                    f"{name!r} is a kernel, not a flag: pass {concern}=True, or kernels=[{name!r}]"
                )
            raise UnknownFlag(f"unknown flag {name!r}{_nearest(name, known)}")
    switches = {
        "compat": boolean("compat", compat),
        "performance": boolean("performance", performance),
        "peft": boolean("peft", peft),
    }
    chosen = _kernels(kernels, default=switches["performance"])
    switches["kernels"] = chosen is True
    values: dict[str, bool | int] = {
        name: switches[group] for group, names in UMBRELLAS.items() for name in names
    }
    # The tiled path is forced only where somebody asks for it.
    values["chunked_linear_cross_entropy"] = False
    values.update(dict.fromkeys(STANDALONE, False))
    if isinstance(chosen, frozenset):
        named = {*UMBRELLAS["kernels"], *UMBRELLAS["peft"], "fused_linear_cross_entropy"}
        values.update({name: name in chosen for name in named})
    if mode not in MODES:
        raise InvalidArgument(f"mode is one of {', '.join(MODES)}, found {mode!r}")
    if mode == "infer":
        values.update(dict.fromkeys((*_NOT_IN_INFER, *UMBRELLAS["peft"]), False))
    values.update({name: _value(name, value) for name, value in concerns.items()})
    return Flags(values, mode, _elements(min_elements), chosen is not False)


def _kernels(value: Any, *, default: bool) -> bool | frozenset[str]:
    if value is None or isinstance(value, bool):
        return default if value is None else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"kernels is True, False or a list of names, found {value!r}")
    names = list(value)
    for name in names:
        if name not in KERNEL_CONCERNS:
            raise UnknownFlag(f"unknown kernel {name!r}{_nearest(str(name), KERNEL_CONCERNS)}")
    return frozenset(KERNEL_CONCERNS[name] for name in names)


def _value(name: str, value: Any) -> bool | int:
    if name == "chunked_linear_cross_entropy" and not isinstance(value, bool):
        if not isinstance(value, int) or value <= 0:
            raise InvalidArgument(f"{name} is a bool or a positive tile width, found {value!r}")
        return value
    return boolean(name, value)


def boolean(name: str, value: Any) -> bool:
    """Return ``value``, or raise :class:`~opake.errors.InvalidArgument`."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is True or False, found {value!r}")
    return value


def _elements(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise InvalidArgument(f"min_elements is a number of elements >= 0 or None, found {value!r}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
