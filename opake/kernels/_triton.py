"""Launching: Triton if it is there, compiled once per call signature, on the tensors' device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opake._lock import LOCK
from opake.kernels._guard import apart, architecture

try:
    import triton  # type: ignore[import-untyped]
    from triton import language as tl
except ImportError:  # operators are declared all the same, and run their references
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "Launch",
    "Tile",
    "axes",
    "find_group",
    "interprets_bfloat16",
    "jit",
    "power_of_two",
    "tl",
]

INTERPRETED = triton is not None and not isinstance(tl.sigmoid, triton.JITFunction)
"""Whether triton was imported with TRITON_INTERPRET=1. Its own library is bound to one of the two
then, so the variable cannot be changed later."""


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or nothing without triton."""
    return function if triton is None else triton.jit(function)


@dataclass(frozen=True)
class Tile:
    """Elements and warps of one program."""

    elements: int
    warps: int


class Launch:
    """A kernel and how it is launched.

    The kernel's parameters are pointers, then integers, then floats, then constants. Triton
    analyses the arguments of every launch, which takes longer than a small kernel runs; here the
    compiled kernel is looked up by what the arguments were: dtypes, integers and constants.

    Args:
        kernel: the jitted function.
        tiles: the program sizes (a ``Tile``, or what else the kernel's launcher takes) by
            architecture, ``""`` for all others.
        sweep: the sizes among which a tuning run chooses.
        contract: whether products and sums become one operation, rounded once: faster, but it
            leaves something where a number is taken from itself, multiplied a second time.
    """

    def __init__(
        self, kernel: Any, tiles: dict[str, Any], sweep: Sequence[Any] = (), contract: bool = True
    ) -> None:
        self.kernel = kernel
        self.contract = contract
        self.tiles = tiles
        self.sweep = tuple(sweep)
        self._compiled: dict[Any, Any] = {}

    def tile(self, device: torch.device, elements: int) -> Any:
        """The program size for a tensor of that many elements; on the CPU always a ``Tile``."""
        if device.type == "cpu":
            # Interpreted programs take a millisecond each, whatever their size.
            return Tile(max(64, power_of_two(-(-elements // 8))), 1)
        return self.tiles.get(architecture(device.index), self.tiles[""])

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
        floats: tuple[float, ...] = (),
    ) -> None:
        """Run the kernel on the current stream of the first tensor's device."""
        # Of an int, Triton would compile the value in, or another type.
        floats = tuple([float(x) for x in floats])
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device < 0:
            self._interpret(grid, (*tensors, *integers, *floats, *constants))
        elif device == torch._C._cuda_getDevice():
            self._launch(device, grid, tensors, integers, constants, warps, floats)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, tensors, integers, constants, warps, floats)

    def _interpret(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        import numpy as np

        # Triton's interpreter writes into its own module while it runs; nor do GPUs warn.
        with LOCK, np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            self.kernel[grid](*args)

    def _launch(
        self,
        device: int,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
        floats: tuple[float, ...],
    ) -> None:
        pointers: list[int | None] = []
        dtypes: list[torch.dtype | None] = []
        together = 0
        for x in tensors:
            if x is None:
                pointers.append(None)
                dtypes.append(None)
            else:
                pointer = x.data_ptr()
                pointers.append(pointer)
                dtypes.append(x.dtype)
                together |= pointer
        key = (device, *dtypes, integers, constants, warps)
        compiled = None if together & 15 else self._compiled.get(key)
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            args = (*pointers, *integers, *floats, *constants)
            runtime = triton.knobs.runtime
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                compiled[grid](*args, stream=stream)  # what a profiler asks to be told
                return
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args
            )
            return
        options = {"num_warps": warps, "enable_fp_fusion": self.contract}
        compiled = self.kernel[grid](*tensors, *integers, *floats, *constants, **options)
        # Triton also looks at 16-byte alignment, which most tensors have, and on ROCm at sizes.
        if not together & 15 and torch.version.hip is None:
            if len(self._compiled) >= _MOST:
                self._compiled.clear()
            self._compiled[key] = compiled


_MOST = 4096  # signatures of one kernel; each takes a few hundred bytes


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


# ---- what can be launched on


@jit
def _to_bfloat16_kernel(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.load(x_ptr).to(tl.bfloat16))


@cache
def interprets_bfloat16() -> bool:
    """Tell whether the interpreter rounds to bf16; Triton's own, up to 3.9, cuts off."""

    def rounds() -> bool:
        x = torch.tensor([1.999])
        out = torch.empty(1, dtype=torch.bfloat16)
        _to_bfloat16_kernel[(1,)](x, out)
        return torch.equal(out, x.bfloat16())

    return apart(rounds)


# ---- groups along the grid's last two axes, of which CUDA allows 65 535 each

_GROUPS = 1 << 15


def axes(blocks: int, groups: int) -> tuple[int, int, int]:
    """The grid of ``blocks`` for each of ``groups``; there may be more groups than there are."""
    return blocks, min(groups, _GROUPS), -(-groups // _GROUPS)


@jit
def find_group():  # type: ignore[no-untyped-def]
    """Return the program's group, int64."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
