"""How kernels are launched, what they compile to, and what a fresh process does with them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import kernel_targets as targets
import pytest
import torch
from interpreter import compiled, needs_triton

from opake import kernels
from opake.kernels import Call
from opake.kernels._triton import Launch, Tile

ops = pytest.mark.parametrize("name", [op.name for op in kernels.ops()])

# ---- in a process of their own


def python(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    env = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_triton() -> None:
    code = "import opake.kernels, sys; opake.kernels.available(); print('triton' in sys.modules)"
    assert python(code) == "False\n"


def test_without_triton_the_reference_runs() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None
from opake import kernels
for op in kernels.ops():
    shape = op.benchmarks[-1]
    call = op.examples(kernels.Draw(lambda low, high: low))
    assert torch.equal(op.function(*call.args), op.reference(*call.args))
    assert kernels.last_backend(op) == "reference"
print(kernels.available("cpu")[1])
"""
    assert python(code, TRITON_INTERPRET="1") == "triton is not installed\n"


@needs_triton
def test_an_interpreter_that_cuts_off_bfloat16_is_not_used() -> None:
    code = """
import torch
from opake import kernels
for op in kernels.ops():
    call = op.benchmarks[-1].make("cpu", torch.bfloat16)
    call = kernels.Call(tuple(x[:1] for x in call.args))
    run, why = kernels.should_run(op, *call.args)
    assert run or why == "Triton's interpreter does not round to bfloat16"
    torch.testing.assert_close(op.function(*call.args), op.reference(*call.args))
    assert kernels.should_run(op, *[x.float() for x in call.args])[0]
"""
    python(code, TRITON_INTERPRET="1")


@needs_triton
def test_the_first_call_may_be_under_a_transform() -> None:
    """What is asked once and kept must not depend on who asks first."""
    code = """
import torch
from torch.func import grad, vmap
from opake import kernels
for dtype in (torch.bfloat16, torch.float32):
    for op in kernels.ops():
        call = op.benchmarks[-1].make("cpu", dtype)
        args = [x[:2, :8] for x in call.args]
        positions = tuple(range(len(args)))
        both = (op.function, op.reference)
        gradients = (grad(lambda *a, f=f: f(*a).float().sum(), positions) for f in both)
        found, expected = (vmap(g)(*args) for g in gradients)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)
    print(kernels.last_backend(op))
"""
    assert python(code, TRITON_INTERPRET="1") == "reference\ntriton\n"


@needs_triton
def test_interpreting_too_late_is_refused() -> None:
    code = """
import os, triton
os.environ["TRITON_INTERPRET"] = "1"
from opake import kernels
print(kernels.available("cpu"))
"""
    late = "(False, 'TRITON_INTERPRET was set after triton had been imported')\n"
    assert python(code) == late


@needs_triton
def test_addresses_have_64_bits() -> None:
    """The last row begins past 2**31 elements; what lies between the rows is never touched."""
    code = """
import torch
from opake import kernels

step = 2**30 + 64
for op in kernels.ops():
    few = [x[:3, :64] for x in op.benchmarks[-1].make("cpu", torch.float16).args]
    few = [x if len(x) == 3 else torch.randn(3, 64).half() for x in few]
    memory = torch.empty(2 * step + 64 * (len(few) + 1), dtype=torch.float16)
    far = [memory.as_strided((3, 64), (step, 1), 64 * i) for i in range(len(few))]
    shape = op.reference(*few).shape
    few.append(torch.linspace(-1, 1, shape.numel()).half().view(shape))
    far.append(memory.as_strided(shape, (step, 1), 64 * len(far)))
    for x, values in zip(far, few):
        x.copy_(values)
    results = []
    for *args, grad in (far, few):
        leaves = [x.detach().requires_grad_() for x in args]
        out = op.function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
        assert kernels.last_backend(op) == "triton"
    for a, b in zip(*results):
        assert torch.equal(a, b)
"""
    python(code, TRITON_INTERPRET="1")


# ---- launching, on a GPU that is not there


class Kernel:
    """Stands for a jitted kernel: records how it and what it compiles to are launched."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.calls.append(("compiled" if "stream" in options else "jit", gpu.current, args))
            return self

        return launch


class Memory:
    """Stands for a tensor on a GPU."""

    is_cuda = True
    dtype = torch.bfloat16

    def __init__(self, index: int, pointer: int = 4096) -> None:
        self.device = torch.device("cuda", index)
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class gpu:  # noqa: N801
    """Stands for ``torch.cuda``."""

    current = 0

    def __init__(self, index: int) -> None:
        self.index, self.before = index, gpu.current

    def __enter__(self) -> None:
        gpu.current = self.index

    def __exit__(self, *_: Any) -> None:
        gpu.current = self.before


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "device", gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 70 + i, raising=False)
    return Kernel()


def test_a_launch_is_compiled_once_per_signature(kernel: Kernel) -> None:
    launch = Launch(kernel, {"": Tile(1024, 4)})

    def kind(*tensors: Any, integers: tuple[int, ...] = (16,), grid: int = 2) -> str:
        launch((grid, 1, 1), tensors, integers, (8,), 4)
        return kernel.calls[-1][0]

    assert [kind(Memory(0)), kind(Memory(0, 8192)), kind(Memory(0), grid=9)] == [
        "jit",
        "compiled",
        "compiled",
    ]
    assert kernel.calls[1][2] == (8192, 16, 8)
    assert [kind(Memory(0), integers=(17,)), kind(Memory(1)), kind(Memory(0), None)] == ["jit"] * 3
    assert [kind(Memory(1)), kind(Memory(0), None)] == ["compiled"] * 2
    # Code for aligned pointers must not read others.
    assert [kind(Memory(0, 4098)), kind(Memory(0, 4098)), kind(Memory(0))] == [
        "jit",
        "jit",
        "compiled",
    ]


def test_a_launch_is_on_the_tensors_device(kernel: Kernel) -> None:
    launch = Launch(kernel, {"": Tile(1024, 4)})
    for _ in range(2):
        launch((1, 1, 1), [Memory(1)], (), (), 4)
        launch((1, 1, 1), [Memory(0)], (), (), 4)
    assert [device for _, device, _ in kernel.calls] == [1, 0, 1, 0]
    assert gpu.current == 0


# ---- compiling for GPUs that are not there


@ops
@pytest.mark.parametrize("target", targets.TARGETS)
@compiled
def test_kernels_compile_without_spilling(name: str, target: str) -> None:
    op = kernels.find(name)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        seen = 0
        for launch in targets.launched(op, _aligned(op, dtype)):
            seen += 1
            built = targets.build(launch, target)
            assert targets.spilled(built) == 0
            if "ptx" in built.asm:
                assert targets.widest_access(built) == 128
            kernel, dtypes, integers, constants, warps = launch
            huge = tuple(i + 2**31 if i > 1 else i for i in integers)
            assert (
                targets.spilled(targets.build((kernel, dtypes, huge, constants, warps), target))
                == 0
            )
        assert seen == 2


def _aligned(op: Any, dtype: torch.dtype) -> Call:
    """The operator's first benchmark, at a 64th of its rows."""
    call = op.benchmarks[0].make("meta", dtype)
    return Call(tuple(torch.randn(128, *x.shape[1:], dtype=dtype) for x in call.args))
