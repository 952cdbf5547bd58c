"""Compiles what operators launch for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernel_oracle import differentiable
from torch import Tensor

from opake.kernels import Call, Op

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TYPES |= {torch.int32: "i32", torch.int64: "i64"}


def launched(op: Op, call: Call) -> list[tuple[Any, ...]]:
    """What ``op`` and its backward would launch on a GPU for these arguments: signatures."""
    from opake.kernels._triton import Launch

    found: list[tuple[Any, ...]] = []

    def record(
        self: Any,
        grid: Any,
        tensors: Sequence[Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        dtypes = tuple(None if x is None else x.dtype for x in tensors)
        found.append((self.kernel, dtypes, integers, constants, warps))

    def tile(self: Any, device: Any, elements: int) -> Any:
        return self.tiles[""]

    leaves = [x.detach() if isinstance(x, Tensor) else x for x in call.args]
    for i in differentiable(call):
        leaves[i].requires_grad_()
    with mock.patch.object(Launch, "__call__", record), mock.patch.object(Launch, "tile", tile):
        op.fused(*leaves, **call.kwargs).sum().backward()
    return found


def build(launch: tuple[Any, ...], target: str) -> Any:
    """Compile one of :func:`launched` as Triton does when pointers are aligned to 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, dtypes, integers, constants, warps = launch
    names = kernel.arg_names
    signature: dict[str, str] = {}
    constexprs: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, value in enumerate((*dtypes, *integers, *constants)):
        fixed = value is None or value == 1 or i >= len(dtypes) + len(integers)
        if fixed:
            signature[names[i]] = "constexpr"
            constexprs[(i,)] = value
        elif i < len(dtypes):
            signature[names[i]] = f"*{_TYPES[value]}"
        else:
            signature[names[i]] = "i32" if value < 2**31 else "i64"
        if not fixed and (i < len(dtypes) or value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def spilled(kernel: Any) -> int:
    """Bytes or registers that a compiled kernel spills to memory."""
    if "amdgcn" in kernel.asm:
        counts = re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        assert counts
        return max(map(int, counts))
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernel.cubin")
        Path(file).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", file]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+)", text)
    assert found, text
    return max(map(int, found))


def widest_access(kernel: Any) -> int:
    """Bits that the widest load or store of global memory moves for a thread, on NVIDIA."""
    widths = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    return max(int(many or 1) * int(bits) for many, bits in widths)
