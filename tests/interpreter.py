"""Runs functions in a process of their own, where Triton interprets kernels or compiles them.

Triton reads TRITON_INTERPRET when it is imported, so one process can do only one of the two, and
tests of everything else must not find kernels on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreted(function: F) -> F:
    """Run ``function``, of a module's top level, where kernels are interpreted."""
    return needs_triton(_elsewhere(function, "1"))


def compiled(function: F) -> F:
    """Run ``function``, of a module's top level, where kernels are compiled."""
    return needs_triton(_elsewhere(function, "0"))


def _elsewhere(function: Any, interpret: str) -> Any:
    @functools.wraps(function)
    def there(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(_MARK) == interpret:
            return function(*args, **kwargs)
        call = (function.__module__, function.__name__, args, kwargs)
        return _process(interpret).submit(_call, *call).result()

    return there


_MARK = "OPAKE_TESTS_INTERPRET"


@functools.cache
def _process(interpret: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _start, (interpret, list(sys.path)))


def _start(interpret: str, path: list[str]) -> None:
    os.environ[_MARK] = os.environ["TRITON_INTERPRET"] = interpret
    sys.path[:] = path
    warnings.simplefilter("error")
    # Names operators that functorch runs example by example; stock does the same.
    warnings.filterwarnings("ignore", message="There is a performance drop")
    # torch compiles its forward-mode formulas with torch.jit.script, which it has deprecated.
    # So does dynamo, while it is set up.
    warnings.filterwarnings("ignore", message="`torch.jit.script")
    import torch

    torch.set_num_threads(1)
    if interpret == "1":
        round_bfloat16()


def _call(module: str, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def round_bfloat16() -> None:
    """Make the interpreter convert bf16 as GPUs do.

    Triton 3.6 to 3.9 cut off instead of rounding, or carry wrongly, and read denormals wrongly.

    It holds bf16 as uint16, which arithmetic would take for integers: kernels load to fp32.
    """
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock_cast, stock_convert = builder.cast_impl, builder.create_fp_to_fp

    def rounded(source: Any, target: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(source.data, dtype=np.float32))
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, target.scalar)

    def widened(source: Any, target: Any) -> Any:
        bits = source.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), target.scalar)

    convert = {(tl.float32, tl.bfloat16): rounded, (tl.bfloat16, tl.float32): widened}

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        ours = convert.get((source.dtype.scalar, target.scalar))
        return ours(source, target) if ours else stock_cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        ours = convert.get((source.dtype.scalar, target.scalar))
        return ours(source, target) if ours else stock_convert(self, source, target, mode)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
