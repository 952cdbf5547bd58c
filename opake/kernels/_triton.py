"""Launching: Triton if it is there, compiled once per call signature, on the tensors' device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from opake.kernels._guard import FLOATS, architecture

try:
    import triton  # type: ignore[import-untyped]
    from triton import language as tl
except ImportError:  # operators are declared all the same, and run their references
    triton = tl = None

__all__ = [
    "INTERPRETED",
    "Launch",
    "Tile",
    "interprets_bfloat16",
    "jit",
    "launchable",
    "power_of_two",
    "tl",
]

T = TypeVar("T")

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

    The kernel's parameters are pointers, then integers, then constants. Triton analyses the
    arguments of every launch, which takes longer than a small kernel runs; here the compiled
    kernel is looked up by what the arguments were: dtypes, integers and constants.

    Args:
        kernel: the jitted function.
        tiles: the program sizes by architecture, ``""`` for all others.
        sweep: the sizes among which a tuning run chooses.
    """

    def __init__(self, kernel: Any, tiles: dict[str, Tile], sweep: Sequence[Tile] = ()) -> None:
        self.kernel = kernel
        self.tiles = tiles
        self.sweep = tuple(sweep)
        self._compiled: dict[Any, Any] = {}

    def tile(self, device: torch.device, elements: int) -> Tile:
        """The program size for a tensor of that many elements."""
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
    ) -> None:
        """Run the kernel on the current stream of the first tensor's device."""
        first = tensors[0]
        assert first is not None
        if not first.is_cuda:
            self._interpret(grid, (*tensors, *integers, *constants))
            return
        device = first.device.index
        if device == torch.cuda.current_device():
            self._launch(device, grid, tensors, integers, constants, warps)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, tensors, integers, constants, warps)

    def _interpret(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        import numpy as np

        with np.errstate(all="ignore"):  # GPUs do not warn of infinities either
            self.kernel[grid](*args)

    def _launch(
        self,
        device: int,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        pointers, together = [], 0
        for x in tensors:
            pointer = None if x is None else x.data_ptr()
            pointers.append(pointer)
            together |= pointer or 0
        aligned = not together & 15
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        key = (device, dtypes, integers, constants, warps)
        compiled = self._compiled.get(key) if aligned else None
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled[grid](*pointers, *integers, *constants, stream=stream)
            return
        # Said aloud, since Triton's default for fusing into FMAs is about to change.
        options = {"num_warps": warps, "enable_fp_fusion": True}
        compiled = self.kernel[grid](*tensors, *integers, *constants, **options)
        # Triton also looks at 16-byte alignment, which most tensors have, and on ROCm at sizes.
        if aligned and torch.version.hip is None:
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

    return _apart(rounds)


def _apart(function: Callable[[], T]) -> T:
    """Call ``function`` on a thread of its own, where no transform and no mode is active."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


_TYPES = frozenset((Tensor, nn.Parameter))


def launchable(*tensors: Tensor) -> bool:
    """Tell whether a kernel may read these tensors' memory.

    It may not where that is not all there is to them (functorch levels, negated views, zero and
    fake tensors, subclasses) or where somebody records operators, who would miss the launch.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    for x in tensors:
        if type(x) not in _TYPES or x.dtype not in FLOATS:
            return False
        if _dispatch_keys(x).raw_repr() not in _plain_keys(x.is_cuda):
            return False
    return True


_dispatch_keys = torch._C._dispatch_keys


@cache
def _plain_keys(cuda: bool) -> frozenset[int]:
    """The dispatch keys of ordinary tensors, inside and outside of inference mode."""

    def keys() -> frozenset[int]:
        found = []
        for inference in (False, True):
            with torch.inference_mode(inference):
                x = torch.empty(0, device="cuda" if cuda else "cpu")
            found.append(_dispatch_keys(x).raw_repr())
        return frozenset(found)

    return _apart(keys)
