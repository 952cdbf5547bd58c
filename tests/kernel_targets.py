"""Compiles what operators launch for GPUs that need not be there.

Operators run on meta tensors, so their heuristics see any size without its memory; launches are
only noted.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from kernel_oracle import differentiable, replaced, tensors
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from opake.kernels import Call, Draw, Op

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may have."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8"}


class Signature(NamedTuple):
    """A launch, as far as Triton compiles another kernel for it."""

    kernel: Any
    pointers: tuple[torch.dtype | None, ...]
    integers: tuple[str, ...]
    """``"1"``, a constant; ``"i32"``, ``"i64"``; with ``"/16"`` where 16 divides them."""
    floats: int
    constants: tuple[Any, ...]
    warps: int
    aligned: bool = True
    """Whether 16 bytes divide the pointers."""
    contract: bool = True
    """Whether products and sums are fused."""

    def with_long_integers(self) -> Signature:
        """The same launch over more elements than 32 bits count."""
        return self._replace(integers=tuple(x.replace("i32", "i64") for x in self.integers))


# ---- what is launched


def signatures(op: Op, target: str) -> list[Signature]:
    """All that ``op`` launches on that GPU for benchmarks and for drawn calls."""
    own = any(target in launch.tiles for launch in op.launches)
    return _signatures(op, target if own else "")


@functools.cache
def _signatures(op: Op, target: str) -> list[Signature]:
    calls = itertools.chain(timed(op), drawn(op, DRAWN))
    return list(dict.fromkeys(x for call in calls for x in launched(op, call, target)))


def timed(op: Op) -> Iterator[Call]:
    """The benchmarks, on meta tensors."""
    for shape, dtype in itertools.product(op.benchmarks, FLOATS):
        yield shape.make("meta", dtype)


def drawn(op: Op, seeds: int) -> Iterator[Call]:
    """Examples on meta tensors: of all widths that heuristics tell apart, most of them large."""
    for seed in range(seeds):
        rng = random.Random(seed)
        width = (*_WIDTHS, None)[seed % (len(_WIDTHS) + 1)]
        dtypes = (FLOATS[seed % 3],) if seed % 4 else FLOATS
        kind = Draw if width is None else Large
        draw = kind(rng.randint, "meta", dtypes)
        draw.width = width
        yield op.examples(draw)


DRAWN = 26
"""Twice through the widths."""

_WIDTHS = (64, 128, 300, 1024, 2880, 4096, 8192, 14336, 32000, 65536, 128256, 262144)


_MOST = 1 << 34
"""Elements of one tensor, at two bytes each as much as a GPU's memory holds of a few."""


class Large(Draw):
    """Draws rows as wide as in models, many or few, and wider."""

    width: int | None

    def shape(self, *, min_dims: int = 0, max_dims: int = 4, max_elements: int = 2048) -> list[int]:
        """Draw the shape of a hidden state."""
        assert self.width is not None
        if max_dims == 0:
            return []
        outer = self.integer(max(min_dims, 1), min(max(min_dims, 3), max_dims)) - 1
        sizes = [self.choice([1, 7, 512, 4096]) for _ in range(outer)]
        if math.prod(sizes) * self.width > _MOST:
            sizes[:-1] = [1] * (outer - 1)
        return [*sizes, self.width]


def launched(op: Op, call: Call, target: str) -> list[Signature]:
    """What ``op`` and its backward launch for these arguments, whichever gradients are wanted."""
    call = tree_map_only(Tensor, lambda x: x.detach().to("meta"), call)
    everything = differentiable(call)
    some = [everything, *([i] for i in everything if len(everything) > 1)]
    with recorded(target) as found:
        if op.fits(*call.args, **call.kwargs):
            return []
        op.fused(*call.args, **call.kwargs)
        for wanted in some:
            leaves = {i: tensors(call)[i].detach().requires_grad_() for i in wanted}
            here = replaced(call, leaves)
            out = op.fused(*here.args, **here.kwargs)
            for used in _used(out):
                grads = [torch.empty_like(x) for x in used]
                inputs = list(leaves.values())
                torch.autograd.grad(used, inputs, grads, retain_graph=True, allow_unused=True)
    return found


def _used(out: Any) -> list[list[Tensor]]:
    """All outputs, and where there are several, each alone."""
    every = [x for x in tree_leaves(out) if x.requires_grad]
    return [every, *([x] for x in every if len(every) > 1)]


def _class(x: int) -> str:
    if x == 1:
        return "1"
    return ("i32" if -(2**31) <= x < 2**31 else "i64") + ("" if x % 16 else "/16")


@contextmanager
def recorded(target: str) -> Iterator[list[Signature]]:
    """Take meta tensors for tensors on that GPU, and note launches instead of launching."""
    import opake.kernels._guard as guard
    from opake.kernels._triton import Launch

    found: list[Signature] = []

    def launch(
        self: Any,
        grid: Any,
        tensors: Sequence[Tensor | None],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
        floats: tuple[float, ...] = (),
    ) -> None:
        assert all(0 < n <= most for n, most in zip(grid, _GRID, strict=True)), grid
        pointers = tuple(None if x is None else x.dtype for x in tensors)
        classes = tuple(_class(x) for x in integers)
        signature = Signature(self.kernel, pointers, classes, len(floats), constants, warps)
        found.append(signature._replace(contract=self.contract))

    pretences = {
        guard.launchable: lambda tensors: True,
        guard.architecture: lambda index: target,
    }
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for stock, ours in pretences.items():
                if name.startswith("opake.kernels.") and vars(module).get(stock.__name__) is stock:
                    stack.enter_context(mock.patch.object(module, stock.__name__, ours))
        stack.enter_context(mock.patch.object(Launch, "__call__", launch))
        yield found


_GRID = (2**31 - 1, 65_535, 65_535)  # what CUDA allows


# ---- what it compiles to


def build(signature: Signature, target: str) -> Any:
    """Compile a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, pointers, integers, floats, constants, warps, aligned, _ = signature
    names = kernel.arg_names
    types: dict[str, str] = {}
    constexprs: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    arguments = (
        *(None if x is None else f"*{_TYPES[x]}" for x in pointers),
        *(1 if x == "1" else x for x in integers),
        *("fp32" for _ in range(floats)),
    )
    assert len(names) == len(arguments) + len(constants), kernel
    for i, value in enumerate((*arguments, *constants)):
        if i >= len(arguments) or not isinstance(value, str):
            types[names[i]] = "constexpr"
            constexprs[(i,)] = value
            continue
        types[names[i]] = value.removesuffix("/16")
        if value.endswith("/16") or (value.startswith("*") and aligned):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs, attributes)
    options = {"num_warps": warps, "enable_fp_fusion": signature.contract}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def spilled(kernel: Any) -> int:
    """Bytes or registers that a compiled kernel spills to memory for want of registers."""
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
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    registers, stack = (max(map(int, column)) for column in zip(*found, strict=True))
    most = min(255, 65_536 // (32 * kernel.metadata.num_warps))
    return 0 if registers < 0.9 * most and stack <= _FEW else stack


_FEW = 64
"""Bytes that ptxas of CUDA 13 keeps in memory although registers are left, 48 used of 255: Triton
3.9 asks for its --regAllocOptLevel=2, without which the same kernels keep none there."""


def widest_access(kernel: Any) -> int:
    """Bits that the widest load or store of global memory moves for a thread, on NVIDIA."""
    widths = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    return max(int(many or 1) * int(bits) for many, bits in widths)


# ---- which of all


def sample(found: Sequence[Signature], target: str, others: int) -> list[Signature]:
    """Of every kernel the largest program, and ``others`` that differ from target to target."""
    largest: dict[Any, Signature] = {}
    for signature in sorted(found, key=_size, reverse=True):
        largest.setdefault(signature.kernel, signature)
    chosen = list(largest.values())
    rest = [x for x in variants(found) if x not in chosen]

    def rank(signature: Signature) -> int:
        return zlib.crc32(f"{target} {described(signature)}".encode())

    return chosen + sorted(rest, key=rank)[:others]


def variants(found: Sequence[Signature]) -> list[Signature]:
    """Signatures, those of unaligned pointers, and those of more elements than 32 bits count."""
    every = dict.fromkeys(found)
    for signature in found:
        every.setdefault(signature._replace(aligned=False))
        every.setdefault(signature.with_long_integers())
    return list(every)


def _size(signature: Signature) -> float:
    sizes = [x for x in signature.constants if isinstance(x, int) and x > 1]
    return math.prod(sizes) / signature.warps


def described(signature: Signature) -> str:
    """Name the kernel and what it is compiled for."""
    return f"{signature.kernel.__name__} {signature[1:]}"
