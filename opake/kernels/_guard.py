"""When a kernel runs: is there one for this device, do the inputs fit it, does it pay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
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
T = TypeVar("T")

SEVERAL_DEVICES = "the inputs are on several devices"
_YES: Decision = (True, "")
_DTYPES = FLOATS | {torch.int32, torch.int64}
_TYPES = frozenset((Tensor, nn.Parameter))
_NUMBERS = frozenset((float, int, bool, str, type(None)))


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
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind in _TYPES:
            found.append(x)
        elif kind not in _NUMBERS:
            found += tensors((x,))
    if not found:
        return False, "there is no tensor among the inputs"
    device = found[0].device
    if not _ordinary(found, device) and (reason := _unlike(found, device)):
        return False, reason
    here = _here(device, found)
    if not here[0]:
        return here
    if forward_ad._current_level >= 0:
        return False, "forward-mode differentiation goes through the reference"
    if reason := op.fits(*args, **kwargs):
        return False, reason
    return _pays(op, args, kwargs, found, min_elements)


def too_few(op: Op, x: Any, elements: int, min_elements: int | None) -> str:
    """Say at once that kernels would not pay for so many elements; ``""``: :func:`decide` has to.

    Asked where models are small, and every microsecond is waited for.
    """
    if type(x) not in _TYPES or not x.is_cuda:
        return ""
    if min_elements is None and _layers:
        min_elements = _layers[-1][0]
    if min_elements is None:
        min_elements = _measured(op, x.device)
    if elements >= min_elements or peek_interpreter_stack() is not None:
        return ""
    return "" if torch.cuda.is_current_stream_capturing() else _few(min_elements)


@cache
def _few(least: int) -> str:
    return f"fewer than {least} elements: fusion does not pay"


def _here(device: torch.device, found: list[Tensor]) -> Decision:
    """Tell whether kernels run where these tensors are."""
    if device.type == "cuda" and not torch.cuda._is_in_bad_fork():
        return _on_device(device)  # initialized, as there is a tensor
    here = available(device)
    if here[0] and device.type == "cpu" and _bfloat16(found):
        from opake.kernels._triton import interprets_bfloat16

        if not interprets_bfloat16():
            return False, "Triton's interpreter does not round to bfloat16"
    return here


def _bfloat16(found: list[Tensor]) -> bool:
    """Tell whether kernels on the CPU would compute in it: autocast casts behind the guard."""
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return cast or any(x.dtype == torch.bfloat16 for x in found)


def _unlike(found: list[Tensor], device: torch.device) -> str:
    """Say what is not ordinary about the inputs; mapped and tracked ones are."""
    inference = torch.is_inference_mode_enabled()
    if inference and torch._C._are_functorch_transforms_active():
        return "functorch in inference mode goes through the reference"
    for x in found:
        if type(x) not in _TYPES:
            return f"an input is a {type(x).__name__}"
        if x.is_nested or x.layout is not torch.strided:
            return "an input is nested or sparse"
        if x.device != device:
            return SEVERAL_DEVICES
        if x.dtype not in _DTYPES:
            return f"{x.dtype} is computed by the reference"
        if not inference and physical(x).is_inference():  # autograd would not save it
            return "an input is an inference tensor"
    return ""


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists and tuples too."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from tensors(x)


def _pays(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[Tensor],
    min_elements: int | None,
) -> Decision:
    device = found[0].device
    if min_elements is None and _layers:
        min_elements = _layers[-1][0]
    if min_elements is None:
        min_elements = _measured(op, device)
    if not min_elements:
        return _YES
    if op.work is not None:
        if op.work(*args, **kwargs) >= min_elements:
            return _YES
    else:
        for x in found:
            if x.numel() >= min_elements or physical(x).numel() >= min_elements:
                return _YES
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _YES
    return False, _few(min_elements)


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


def physical(x: Tensor) -> Tensor:
    """Return the tensor under every functorch level: all mapped examples, not one."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def tracked(x: Tensor) -> bool:
    """Tell whether a gradient of ``x`` may be asked for, at any functorch level."""
    functorch = torch._C._functorch
    while not x.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)  # a mapped tensor does not say it for what it maps
    return True


# ---- whose memory a kernel may read


def launchable(given: Sequence[Any]) -> bool:
    """Tell whether a kernel may read the memory of these tensors; what is no tensor is skipped.

    It may not where that is not all there is to them (functorch levels, negated views, zero and
    fake tensors, subclasses) or where somebody records operators, who would miss the launch.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    for x in given:
        if x is None:
            continue
        if type(x) in _TYPES:
            keys = _dispatch_keys(x).raw_repr()
            if keys not in _seen:
                if keys not in _plain_keys(x.device.type):
                    return False
                _seen.add(keys)
            if x.dtype not in _DTYPES:
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def _ordinary(found: list[Tensor], device: torch.device) -> bool:
    """Tell at once, for most calls, what :func:`_unlike` would find after asking one by one."""
    plain, index = _grad_keys(device.type), device.index
    for x in found:
        if type(x) not in _TYPES or _dispatch_keys(x).raw_repr() != plain:
            return False
        if x.dtype not in _DTYPES or (index is not None and x.get_device() != index):
            return False
    return True


_dispatch_keys = torch._C._dispatch_keys


_seen: set[int] = set()  # dispatch keys of tensors that were found ordinary


@cache
def _grad_keys(device: str) -> int:
    """The dispatch keys of tensors that were made outside of inference mode."""
    if device not in ("cpu", "cuda"):
        return -1  # nobody's; no kernel runs there
    return apart(lambda: _keys(device, False))


@cache
def _plain_keys(device: str) -> tuple[int, int]:
    """The dispatch keys of ordinary tensors, outside and inside of inference mode."""
    keys = _grad_keys(device)
    return (keys, apart(lambda: _keys(device, True)) if keys >= 0 else keys)


def _keys(device: str, inference: bool) -> int:
    with torch.inference_mode(inference):
        return int(_dispatch_keys(torch.empty(0, device=device)).raw_repr())


def apart(function: Callable[[], T]) -> T:
    """Call ``function`` on a thread of its own, where no transform and no mode is active."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
