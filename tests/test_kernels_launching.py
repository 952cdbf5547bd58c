"""How kernels are launched, what they compile to, and what a fresh process does with them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kernel_oracle as oracle
import pytest
import torch
from interpreter import interpreted, needs_triton
from kernel_memory import far
from torch import Tensor
from torch.func import vmap

from opake import kernels
from opake.kernels import Call
from opake.kernels._triton import Launch, Tile

ops = pytest.mark.parametrize("name", [op.name for op in kernels.ops()])

# ---- in a process of their own


def python(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    tests = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": tests, "TRITON_INTERPRET": "0", **environment}
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
    call = op.examples(kernels.Draw(lambda low, high: (low + high) // 2))
    plain = op.portable or op.reference
    found, expected = (f(*call.args, **call.kwargs) for f in (op.function, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert kernels.last_backend(op) == "reference"
print(kernels.available("cpu")[1])
"""
    assert python(code, TRITON_INTERPRET="1") == "triton is not installed\n"


@needs_triton
def test_an_interpreter_that_cuts_off_bfloat16_is_not_used() -> None:
    code = """
import kernel_oracle as oracle, torch
from opake import kernels
cuts = (False, "Triton's interpreter does not round to bfloat16")
for op in kernels.ops():
    for seed in range(8):
        args, kwargs = call = oracle.drawn(op, seed, "cpu", torch.bfloat16)
        if kernels.should_run(op, *args, **kwargs)[0]:
            continue
        plain = op.portable or op.reference
        torch.testing.assert_close(op.function(*args, **kwargs), plain(*args, **kwargs))
        found = oracle.tensors(call)
        wide = oracle.replaced(call, {i: found[i].float() for i in oracle.differentiable(call)})
        if kernels.should_run(op, *wide.args, **wide.kwargs)[0]:
            assert kernels.should_run(op, *args, **kwargs) == cuts
            with torch.autocast("cpu", torch.bfloat16):
                assert kernels.should_run(op, *wide.args, **wide.kwargs) == cuts
            with torch.autocast("cpu", torch.float16):
                assert kernels.should_run(op, *wide.args, **wide.kwargs)[0]
"""
    python(code, TRITON_INTERPRET="1")


@interpreted
def test_kernels_are_interpreted_in_several_threads() -> None:
    """Triton's interpreter keeps one grid for all of them."""
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(32, requires_grad=True)

    def once(_: int) -> tuple[Tensor, ...]:
        out = kernels.rms_norm(x, weight)
        return (out, *torch.autograd.grad(out.square().sum(), (x, weight)))

    expected = once(0)
    assert kernels.last_backend("rms_norm") == "triton"
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(once, range(24)):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_first_call_may_be_under_a_transform(dtype: str) -> None:
    """What is asked once and kept must not depend on who asks first."""
    code = f"""
import itertools, kernel_oracle as oracle, torch
from torch.func import grad, vmap
from opake import kernels
def fits(call):
    return all(0 < x.numel() <= 256 and x.abs().max() < 5 for x in oracle.tensors(call).values())

for op in kernels.ops():
    ran = set()
    calls = (oracle.drawn(op, seed, "cpu", torch.{dtype}) for seed in itertools.count())
    for call in itertools.islice(filter(fits, calls), 8):
        results = []
        for f in (op.reference, op.function):
            bound, values, argnums = oracle.bound(f, call)
            total = lambda *a: sum(x.float().sum() for x in oracle.outputs(bound(*a)))
            given = [torch.stack([x, x]) for x in values]
            results.append(vmap(grad(total, argnums))(*given))
        ran.add(kernels.last_backend(op))
        torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2, equal_nan=True)
    print(op.name, "triton" in ran)
"""
    runs = dtype == "float32"  # as Triton's own interpreter does not round to bf16
    found = python(code, TRITON_INTERPRET="1").split("\n")
    assert found == [*(f"{op.name} {runs}" for op in kernels.ops()), ""]


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
    """The last index begins past 2**31 elements; what lies between is never touched."""
    code = "import test_kernels_launching as here; here.compute_far_apart()"
    found = python(code, TRITON_INTERPRET="1").split("\n")  # one that overflows ends its process
    assert found == [*(op.name for op in kernels.ops()), ""]


def compute_far_apart() -> None:
    """Every operator on rows, heads and examples that are far apart, in each of its tensors."""
    for op in kernels.ops():
        for skip in (0, 100, 200):
            call = oracle.small(op.name, torch.float16, skip)[1]
            if op.name.startswith("lora_") and call.args[0].shape[:-1].numel() == 1:
                continue  # torch's own fp16 product of one row with such a matrix ends the process
            check_far_apart(op, call)
            assert oracle.fused(op)
        print(op.name)


def check_far_apart(op: Any, call: Call) -> None:
    wanted, keys = oracle.differentiable(call), list(oracle.tensors(call))
    outs = oracle.outputs(op.reference(*call.args, **call.kwargs))
    plain = [torch.linspace(-1, 1, x.numel()).to(x).view(x.shape) for x in outs]

    def check(call: Call, expected: Any, given: Any = plain, dims: Any = None) -> Any:
        def gradients(*values: Any) -> Any:
            here = oracle.replaced(call, dict(zip(keys, values, strict=True)))
            return oracle.by_vjp(op.function, here, wanted, given)

        found = (vmap(gradients, dims) if dims else gradients)(*oracle.tensors(call).values())
        assert oracle.fused(op)
        if expected:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        return found

    near = check(call, None)
    for key, x in oracle.tensors(call).items():
        for dim in _outer(x):
            check(oracle.replaced(call, {key: far(x, dim)}), near)
    for i, x in enumerate(plain):
        for dim in _outer(x):
            check(call, near, [far(x, dim) if k == i else y for k, y in enumerate(plain)])
    batch, dims = oracle.mapped(call, keys, [0] * len(keys), 2), (0,) * len(keys)
    near = check(batch, None, dims=dims)
    for key, x in oracle.tensors(batch).items():
        check(oracle.replaced(batch, {key: far(x, 0)}), near, dims=dims)


def _outer(x: Tensor) -> list[int]:
    """Dimensions that can be spread out, but the innermost, which kernels take contiguous."""
    return [dim for dim in range(max(x.dim() - 1, 1)) if x.dim() and x.shape[dim] > 1]


# ---- launching, on a GPU that is not there


class Kernel:
    """Stands for a jitted kernel: records how it and what it compiles to are launched."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.calls.append(("hooked" if "stream" in options else "jit", gpu.current, args))
            return self

        return launch

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        assert stream == 70 + gpu.current
        self.calls.append(("compiled", gpu.current, args[5:]))


class Memory:
    """Stands for a tensor on a GPU."""

    is_cuda = True
    dtype = torch.bfloat16

    def __init__(self, index: int, pointer: int = 4096) -> None:
        self.device = torch.device("cuda", index)
        self.pointer = pointer

    def get_device(self) -> int:
        return self.device.index

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
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 70 + i, raising=False)
    return Kernel()


@needs_triton
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


@needs_triton
def test_who_profiles_launches_is_told_of_each(kernel: Kernel) -> None:
    import triton

    launch = Launch(kernel, {"": Tile(1024, 4)})
    hooks = triton.knobs.runtime.launch_enter_hook
    listener = lambda metadata: None  # noqa: E731
    for _ in range(2):
        launch((1, 1, 1), [Memory(0)], (), (), 4)
    hooks.add(listener)
    try:
        launch((1, 1, 1), [Memory(0)], (), (), 4)
    finally:
        hooks.remove(listener)
    launch((1, 1, 1), [Memory(0)], (), (), 4)
    assert [kind for kind, *_ in kernel.calls] == ["jit", "compiled", "hooked", "compiled"]


@needs_triton
def test_numbers_that_are_no_constants_compile_no_other_kernel(kernel: Kernel) -> None:
    launch = Launch(kernel, {"": Tile(1024, 4)})
    for eps in (1e-5, 1e-6):
        launch((1, 1, 1), [Memory(0)], (3,), (8,), 4, (eps,))
    assert kernel.calls[1:] == [("compiled", 0, (4096, 3, 1e-6, 8))]


@needs_triton
def test_a_launch_is_on_the_tensors_device(kernel: Kernel) -> None:
    launch = Launch(kernel, {"": Tile(1024, 4)})
    for _ in range(2):
        launch((1, 1, 1), [Memory(1)], (), (), 4)
        launch((1, 1, 1), [Memory(0)], (), (), 4)
    assert [device for _, device, _ in kernel.calls] == [1, 0, 1, 0]
    assert gpu.current == 0
