"""When a kernel runs: is there one for this device, do the inputs fit it, does it pay."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from opake.errors import InvalidArgument

if TYPE_CHECKING:
    from opake.kernels._op import Op

MIN_ELEMENTS = 1 << 20
"""Elements below which the reference runs on a GPU that ``Op.crossover`` does not list.

An H200 moves forward and backward of 2**20 bf16 elements of a gated activation, 16 MiB, in 4 µs,
less than one launch costs its host: fusing so little saves no time that anybody waits for, unless
a CUDA graph is being captured, whose replay has no host."""

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""What kernels compute, in fp32. fp64 and complex numbers are left to the reference."""

Decision = tuple[bool, str]

_YES: Decision = (True, "")
_DTYPES = FLOATS | {torch.int32, torch.int64}
_TYPES = frozenset((Tensor, nn.Parameter))


def available(where: Tensor | torch.device | str | int | None = None) -> Decision:
    """Tell whether kernels can run where a tensor or a device is, and if not, why.

    Without an argument: on the current CUDA device, else on the CPU, where only
    ``TRITON_INTERPRET=1`` makes them run (set it before the first kernel is used).
    """
    if where is None:
        where = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(where, int):  # torch.device asks which accelerator there is
        where = f"cuda:{where}"
    device = where.device if isinstance(where, Tensor) else torch.device(where)
    if device.type == "cpu":
        return _on_cpu(os.environ.get("TRITON_INTERPRET", ""))
    if device.type == "cuda" and torch.cuda.is_available():
        if torch.cuda._is_in_bad_fork():
            return False, "CUDA cannot be used in a process that was forked from one that uses it"
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nor do we do it
            return (True, "") if find_spec("triton") else (False, "triton is not installed")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return _on_device(device)


@cache
def _on_cpu(interpret: str) -> Decision:
    if interpret.lower() not in ("1", "true", "on", "yes", "y"):
        return False, "kernels need a CUDA device (TRITON_INTERPRET=1 interprets them on the CPU)"
    if find_spec("triton") is None:
        return False, "triton is not installed"
    from opake.kernels._triton import INTERPRETED

    if not INTERPRETED:
        return False, "TRITON_INTERPRET was set after triton had been imported"
    return _YES


@cache
def _on_device(device: torch.device) -> Decision:
    if device.type != "cuda":
        return False, f"there are no kernels for the device type {device.type!r}"
    if not torch.cuda.is_available():
        return False, "CUDA is not available"
    if find_spec("triton") is None:
        return False, "triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return False, "the GPU is older than sm_80, the oldest that the kernels are compiled for"
    return _YES


_layers: list[list[int | None]] = []


@contextmanager
def config(*, min_elements: int | None) -> Iterator[None]:
    """Set from how many elements kernels run; 0: always, None: as measured (the default).

    It holds for the whole process, autograd's threads too.

    Raises:
        InvalidArgument: ``min_elements`` is neither None nor a number of elements.
    """
    whole = isinstance(min_elements, int) and not isinstance(min_elements, bool)
    if min_elements is not None and not (whole and min_elements >= 0):
        raise InvalidArgument(
            f"min_elements must be an int, 0 or more, or None; got {min_elements!r}"
        )
    layer = [min_elements]  # told apart by identity: blocks of two threads end in any order
    _layers.append(layer)
    try:
        yield
    finally:
        _layers[:] = [other for other in _layers if other is not layer]


def decide(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], min_elements: int | None
) -> Decision:
    """Tell whether ``op`` should run its kernels on these arguments, and if not, why."""
    if torch._C._is_tracing():
        return False, "torch.jit.trace records operators"
    tensors = list(_tensors((*args, *kwargs.values())))
    if not tensors:
        return False, "there is no tensor among the inputs"
    device = tensors[0].device
    inference = torch.is_inference_mode_enabled()
    if inference and torch._C._are_functorch_transforms_active():
        return False, "functorch in inference mode goes through the reference"
    for x in tensors:
        if type(x) not in _TYPES:
            return False, f"an input is a {type(x).__name__}"
        if x.is_nested or x.layout is not torch.strided:
            return False, "an input is nested or sparse"
        if x.device != device:
            return False, "the inputs are on several devices"
        if x.dtype not in _DTYPES:
            return False, f"{x.dtype} is computed by the reference"
        if not inference and _physical(x).is_inference():  # autograd would not save it
            return False, "an input is an inference tensor"
    here = available(device)
    if not here[0]:
        return here
    if device.type == "cpu" and any(x.dtype == torch.bfloat16 for x in tensors):
        from opake.kernels._triton import interprets_bfloat16

        if not interprets_bfloat16():
            return False, "Triton's interpreter does not round to bfloat16"
    if forward_ad._current_level >= 0:
        return False, "forward-mode differentiation goes through the reference"
    if reason := op.fits(*args, **kwargs):
        return False, reason
    return _pays(op, tensors, device, min_elements)


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _pays(
    op: Op, tensors: list[Tensor], device: torch.device, min_elements: int | None
) -> Decision:
    if min_elements is None and _layers:
        min_elements = _layers[-1][0]
    if min_elements is None:
        min_elements = _measured(op, device)
    for x in tensors:
        if x.numel() >= min_elements or _physical(x).numel() >= min_elements:
            return _YES
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _YES
    return False, f"fewer than {min_elements} elements: fusion does not pay"


def _measured(op: Op, device: torch.device) -> int:
    if device.type == "cpu":
        return 0  # who interprets kernels wants to see them run
    return op.crossover.get(architecture(device.index), MIN_ELEMENTS)


@cache
def architecture(index: int) -> str:
    """Name a GPU's architecture: ``"sm_90"``, ``"gfx942"``."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(index).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _physical(x: Tensor) -> Tensor:
    """The tensor under every functorch level: all mapped examples, not one."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
