"""The public fuzzing tool: what is wrong is found, and said in code that runs."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from interpreter import needs_triton
from torch import Tensor
from torch.autograd import Function

from opake import _cli_fuzz, _cli_fuzz_jobs, kernels
from opake.errors import InvalidArgument
from opake.testing import (
    STRIDES,
    _code,
    assert_parity,
    assert_vmap_parity,
    dtypes,
    shapes,
    shared_shapes,
    tensors,
)

ROOT = Path(__file__).parents[1]
SEARCH: dict[str, Any] = {"max_examples": 300, "seed": 0}


def reference(x: Tensor, y: Tensor) -> Tensor:
    return x * y.sin()


class Right:
    """``x * sin(y)`` by hand; what is planted overrides one step."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y.sin()

    def dx(self, ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return grad * y.sin()

    def front(self, x: Tensor, dim: int | None, size: int) -> Tensor:
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    def out_of_vmap(self, out: Tensor) -> Tensor:
        return out

    def function(self) -> Callable[..., Tensor]:
        """Make an autograd function with a vmap rule of its own, as a kernel has."""
        me = self

        class Backward(Function):
            @staticmethod
            def forward(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
                return me.dx(None, grad, x, y)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

            @staticmethod
            def vmap(info: Any, dims: Any, *args: Tensor) -> Any:
                fronts = [me.front(x, d, info.batch_size) for x, d in zip(args, dims, strict=True)]
                return Backward.apply(*fronts), 0

        class Forward(Function):
            @staticmethod
            def forward(x: Tensor, y: Tensor) -> Tensor:
                return me.forward(x, y)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, y = ctx.saved_tensors
                me.ctx = ctx
                return Backward.apply(grad, x, y), grad * x * y.cos()

            @staticmethod
            def vmap(info: Any, dims: Any, *args: Tensor) -> Any:
                fronts = [me.front(x, d, info.batch_size) for x, d in zip(args, dims, strict=True)]
                return me.out_of_vmap(Forward.apply(*fronts)), 0

        return Forward.apply


class WrongGradient(Right):
    def dx(self, ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return grad * y.sin() * (1 + 1e-4)


class MissingAxis(Right):
    def front(self, x: Tensor, dim: int | None, size: int) -> Tensor:
        return x.expand(size, *x.shape) if dim is None else x  # right if dim is 0


class WrittenInput(Right):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(1) * y.sin()


class OverwrittenInput(Right):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = x * y.sin()
        x.data.mul_(2)  # no version tells
        return out


class OverwrittenGradient(Right):
    def dx(self, ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        out = grad * y.sin()
        if 0 not in grad.stride():
            grad.data.zero_()
        return out


class SwallowedNaN(Right):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y.sin()).nan_to_num()


class WrongDtype(Right):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y.sin()).float()


class WrongRowWhenNested(Right):
    def out_of_vmap(self, out: Tensor) -> Tensor:
        return out.flip(0) if torch._C._functorch.is_batchedtensor(out) else out


class StaleBackward(Right):
    def dx(self, ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self.ctx, "found"):
            self.ctx.found = grad * y.sin()
        return self.ctx.found


class Dice(Right):
    def __init__(self) -> None:
        self.runs = itertools.count()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y.sin() * (1 + 1e-6 * (next(self.runs) % 2))


class AssumesContiguousGradients(Right):
    def dx(self, ctx: Any, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (grad if grad.is_contiguous() else 2 * grad) * y.sin()


PLANTED = {
    WrongGradient: "gradient 0: off by",
    MissingAxis: "off by|size|, not ",
    WrittenInput: "written",
    OverwrittenInput: "overwritten",
    OverwrittenGradient: "overwritten",
    SwallowedNaN: "NaN or infinite elsewhere",
    WrongDtype: "float32, not torch.float16",
    WrongRowWhenNested: "off by",
    StaleBackward: "second backward",
    Dice: "two runs differ",
    AssumesContiguousGradients: "gradient 0: off by",
}


def arguments() -> tuple[Any, Any]:
    shape = shared_shapes(max_elements=64)
    dtype = st.shared(dtypes(torch.float32, torch.float16))
    # At 0.01, half precision ends in denormals.
    some = {"scales": (1.0, 8.0), "specials": (math.nan,)}
    return tensors(shape, dtype, **some), tensors(shape, dtype, **some)


def program(error: BaseException) -> str:
    """The code that an error's message ends in."""
    return str(error).partition("Minimal example:\n\n")[2]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_what_is_planted_is_found_and_printed(planted: type[Right]) -> None:
    fn = planted().function()
    with pytest.raises(AssertionError, match=PLANTED[planted]) as found:
        assert_vmap_parity(fn, reference, *arguments(), **SEARCH)
    code = program(found.value)
    names = {"fn": fn, "reference": reference}
    with pytest.raises((AssertionError, RuntimeError, IndexError), match=PLANTED[planted]):
        exec(code, names)
    exec(code, {"fn": Right().function(), "reference": reference})  # its fault, not the program's
    assert sum(x.numel() for x in names["args"]) <= 16, code


def test_what_is_right_passes() -> None:
    assert_vmap_parity(Right().function(), reference, *arguments(), **SEARCH)
    for plain in (reference, torch.mul):
        assert_vmap_parity(plain, plain, *arguments(), max_examples=50)


def several(x: Tensor, ids: Tensor, w: Tensor | None, power: int, *, by: Tensor) -> Any:
    rows = x[ids] * by
    return rows, (x if w is None else x * w).square().sum() ** power, ids


def forgets_one(*args: Any, **kwargs: Any) -> Any:
    rows, total, ids = several(*args, **kwargs)
    return rows, total.detach(), ids


def shifts_integers(*args: Any, **kwargs: Any) -> Any:
    rows, total, ids = several(*args, **kwargs)
    return rows, total, ids.to(torch.int32)


def calls() -> tuple[list[Any], dict[str, Any]]:
    shape = shared_shapes(2, 2, min_size=1, max_size=4)
    last = shape.map(lambda s: s[1:])
    ids = shape.flatmap(lambda s: tensors((3,), torch.int64, high=s[0]))
    args = [tensors(shape), ids, st.none() | tensors(last), st.integers(1, 2)]
    return args, {"by": tensors(last)}


def test_tuples_integers_none_and_keywords() -> None:
    args, kwargs = calls()
    assert_vmap_parity(several, several, *args, kwargs=kwargs, **SEARCH)
    for wrong in (forgets_one, shifts_integers):
        with pytest.raises(AssertionError, match=r"gradient|int32") as found:
            assert_vmap_parity(wrong, several, *args, kwargs=kwargs, **SEARCH)
        run = [sys.executable, "-c", program(found.value)]
        there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        done = subprocess.run(run, env=there, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "AssertionError" in done.stderr, done.stderr


def by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def test_what_cancels_is_no_error() -> None:
    """The gradient of a sum of normalised numbers is zero, but for rounding."""

    def plain(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:])

    strategy = tensors((14,), strides=["contiguous"], scales=[1.0])
    assert_vmap_parity(by_hand, plain, strategy, transforms=("none", "vmap(grad)"), **SEARCH)
    with pytest.raises(AssertionError, match="off by"):
        assert_vmap_parity(lambda x: by_hand(x) + 1e-4 * x, plain, strategy, **SEARCH)


def raises(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() == 2:
        raise ValueError("no matrices")
    return reference(x, y)


def test_an_error_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="ValueError: no matrices"):
        assert_vmap_parity(raises, reference, *arguments(), **SEARCH)


def test_only_the_dimensions_that_may_be_mapped_are() -> None:
    seen = set()

    def fn(x: Tensor, y: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(x):
            seen.add("x")
        if torch._C._functorch.is_batchedtensor(y):
            seen.add("y")
        return reference(x, y)

    options = {**SEARCH, "transforms": ("vmap",)}
    assert_vmap_parity(fn, reference, *arguments(), in_dims=[(0, None), (-1, None)], **options)
    assert seen == {"x"}
    assert_vmap_parity(fn, reference, *arguments(), **options)
    assert seen == {"x", "y"}


def test_strategies_draw_what_they_are_asked_for() -> None:
    drawn: list[Tensor] = []

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(tensors(shapes(1, 3, max_elements=64), dtypes(torch.float32, torch.int32), low=-2))
    def collect(x: Tensor) -> None:
        drawn.append(x)

    collect()
    assert {x.dtype for x in drawn} == {torch.float32, torch.int32}
    assert {x.dim() for x in drawn} == {1, 2, 3}
    assert max(x.numel() for x in drawn) <= 64
    assert {0, 1} < {x.numel() for x in drawn}
    assert any(0 in x.stride() for x in drawn)
    assert any(x.storage_offset() for x in drawn)
    assert any(not x.is_contiguous() and 0 not in x.stride() for x in drawn)
    whole = torch.cat([x.flatten() for x in drawn if x.dtype == torch.int32])
    assert (int(whole.min()), int(whole.max())) == (-2, 9)


ANY = settings(derandomize=True, database=None, phases=[Phase.generate], max_examples=1)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("size", [0, 3, 40])
def test_code_makes_the_tensor_again(strides: str, dtype: torch.dtype, size: int) -> None:
    strategy = tensors((2, size), dtype, strides=[strides], specials=(math.nan, -math.inf))
    x = find(strategy, lambda x: True, settings=ANY)
    for y in (x, x.T):
        code = _code._expression(y, _code._literal(_code._flat(y)))
        again = eval(f"{code}", {**vars(math), "torch": torch, "zlib": zlib, "base64": base64})
        assert (again.dtype, again.shape, again.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(again.nan_to_num(7.0), y.nan_to_num(7.0))
        assert (again.storage_offset() - y.storage_offset()) % 16 == 0 or not size


def test_arguments_are_validated() -> None:
    for wrong in ({"transforms": ()}, {"transforms": ("vmapp",)}):
        with pytest.raises(InvalidArgument, match="transforms"):
            assert_vmap_parity(reference, reference, *arguments(), **wrong)
    args = [torch.ones(2), torch.ones(2)]
    for wrong in ({"transform": "vmap"}, {"in_dims": [{0: 0}]}, {"transform": "nothing"}):
        with pytest.raises(InvalidArgument, match="transform"):
            assert_parity(reference, reference, args, **wrong)
    with pytest.raises(InvalidArgument, match="strides"):
        tensors((2,), strides=["diagonal"])
    with pytest.raises(InvalidArgument, match="dimensions"):
        shapes(3, 2)


# ---- the command line


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process without ``TRITON_INTERPRET``, warnings being errors."""
    there = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    there |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=there, capture_output=True, text=True, check=False)


WRONG = """
import torch
from opake import kernels
from opake.kernels._op import record

def reference(x, scale=None):
    return x * 2 if scale is None else x * scale

def fused(x, scale=None):
    record("planted", "triton")
    return reference(x, scale) + (x.dim() == 2)

def planted(x, scale=None):
    return op(x, scale)

def examples(draw):
    shape, dtype = draw.shape(), draw.dtype()
    return kernels.Call((draw.tensor(shape, dtype), draw.choice([None, 3.0])))

op = kernels.register(kernels.Op("planted", planted, reference, fused, examples))
"""


@needs_triton
def test_fuzz_prints_a_program_that_fails() -> None:
    search = "from opake._cli import main; raise SystemExit(main(['fuzz', 'planted', *{}]))"
    done = python(WRONG + search.format(["--examples", "200", "--seed", "1"]), TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout
    code = program(ValueError(done.stdout)).rpartition("\n\n")[0]
    again = python(WRONG + code, TRITON_INTERPRET="1")
    assert again.returncode == 1
    assert "AssertionError: output 0: off by" in again.stderr, (code, again.stderr)
    right = WRONG.replace("x.dim() == 2", "0")
    assert python(right + code, TRITON_INTERPRET="1").returncode == 0
    assert (
        python(right + search.format(["--minutes", "0.05"]), TRITON_INTERPRET="1").returncode == 0
    )
    never = right.replace('record("planted", "triton")', "pass")
    done = python(never + search.format(["--examples", "5"]), TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "never ran" in done.stderr


@needs_triton
def test_fuzz_goes_over_the_registry() -> None:
    name = kernels.ops()[0].name
    code = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('opake', run_name='__main__')"
    done = python(code.format(["fuzz", name, "--examples", "20", "--seed", "0"]))
    assert done.returncode == 0, done.stderr
    assert "20 examples" in done.stdout
    assert "bfloat16 is left out" in done.stdout
    done = python(code.format(["fuzz", "--list"]))
    assert all(op.name in done.stdout for op in kernels.ops())
    done = python(code.format(["fuzz", name]), TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


USAGE = """
import sys
import zlib
from opake._cli import main
for argv in (["nope"], [], ["swiglu", "--device", "cuda"], ["swiglu", "--device", "cup"],
             ["swiglu", "--examples", "0"], ["swiglu", "--minutes", "-1"]):
    try:
        main(["fuzz", *argv])
    except SystemExit as end:
        assert end.code == 2, end.code
    else:
        raise AssertionError(argv)
for package in ("hypothesis", "tqdm"):
    kept, sys.modules[package] = sys.modules.get(package), None
    try:
        main(["fuzz", "swiglu"])
    except SystemExit as end:
        assert end.code == 2
    del sys.modules[package]
"""


@needs_triton
def test_fuzz_says_what_it_cannot_do() -> None:
    done = python(USAGE)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    expected = ["'nope'; there are", "name an operator; there are", "CUDA is not available", "cup"]
    expected += ["--examples: 0", "--minutes: -1", "opake[testing]", "opake[testing]"]
    assert len(errors) == len(expected)
    for line, part in zip(errors, expected, strict=True):
        assert part in line


def test_hypothesis_is_optional() -> None:
    without = "import sys; sys.modules['hypothesis'] = None; import opake.testing as t; "
    done = python(without + "from opake import testing; t.assert_parity; t.tensors")
    assert "ImportError: opake.testing.tensors needs Hypothesis: pip install opake[testing]" in (
        done.stderr
    )
    unused = "import sys, opake.testing._ops; assert 'hypothesis' not in sys.modules"
    assert python(unused).returncode == 0


def test_a_sum_of_what_fp16_cannot_hold_is_held_to_eager_alone() -> None:
    x = torch.tensor([60000.0, -60000.0, 60000.0, -60000.0], dtype=torch.float16)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    for seed in range(12):
        assert_parity(
            product,
            product,
            (x, torch.ones(3, dtype=torch.float16)),
            transform="grad(vmap)",
            in_dims=({0: 0},),
            seed=seed,
        )


def test_what_no_normal_number_holds_may_be_zero() -> None:
    def flushing(x: Tensor) -> Tensor:
        held = x.detach()
        return x - held + held.where(held.abs() > 1e-37, 0)

    x = torch.tensor([1e-40, -3e-42])
    assert_parity(flushing, torch.clone, (x,))
    with pytest.raises(AssertionError):
        assert_parity(flushing, torch.clone, (x * 1000,))


# ---- the command line: a bound on shrinking, processes, a file


def fuzzed(where: Path, code: str, *argv: str, head: str = "") -> tuple[int, dict[str, Any], str]:
    """Run the command in a file, which its processes import again; status, JSON, what it said."""
    script, out = where / "fuzzed.py", where / "out.json"
    call = ["fuzz", *argv, "--json", str(out)]
    main = f"    from opake._cli import main\n    raise SystemExit(main({call}))\n"
    script.write_text(f"{code}\n{head}\nif __name__ == '__main__':\n{main}")
    there = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    there |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=there, capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


@needs_triton
def test_fuzz_shares_examples_among_processes(tmp_path: Path) -> None:
    argv = ("planted", "--examples", "61", "--jobs", "2", "--seed", "1")
    status, found, said = fuzzed(tmp_path, WRONG, *argv)
    assert status == 1, said
    failures = found["ops"]["planted"]["failures"]
    assert failures
    assert {failure["seed"] for failure in failures} <= {1, 1 + (1 << 20)}
    assert "planted: fn differs from reference: output 0: off by" in said
    again = python(WRONG + failures[0]["program"], TRITON_INTERPRET="1")
    assert "AssertionError: output 0: off by" in again.stderr
    status, found, said = fuzzed(tmp_path, WRONG.replace("x.dim() == 2", "0"), *argv)
    assert status == 0, said
    ran = found["ops"]["planted"]
    assert ran["examples"] == 61
    assert 0 < ran["by_kernel"] <= 61
    assert ran["seconds"] > 0
    assert ran["failures"] == []
    assert (found["seed"], found["jobs"], found["device"]) == (1, 2, "cpu")
    assert found["device_name"]
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"opake", "python", "torch", "triton"}


@needs_triton
def test_fuzz_outlives_a_kernel_that_ends_its_process(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    deadly = WRONG.replace('    record("planted", "triton")', f"    {kill}")
    other = kernels.ops()[0].name
    argv = ("planted", other, "--examples", "4", "--jobs", "2", "--seed", "1")
    status, found, said = fuzzed(tmp_path, deadly, *argv)
    assert status == 1, said
    (failure,) = found["ops"]["planted"]["failures"]
    assert "the process ended with SIGKILL" in failure["message"]
    assert "fuzz planted --seed 1 --examples 4" in failure["message"]
    assert found["ops"][other]["examples"] == 4
    assert found["ops"][other]["failures"] == []


@needs_triton
@pytest.mark.parametrize("length", [("--minutes", "0.2"), ("--examples", "200")])
def test_fuzz_ends_shrinking_in_time(tmp_path: Path, length: tuple[str, str]) -> None:
    wait = "    import time; time.sleep(0.6 if x.dim() == 2 else 0)\n"
    code = WRONG.replace(
        '    record("planted", "triton")', wait + '    record("planted", "triton")'
    )
    short = "from opake import _cli_fuzz_jobs; _cli_fuzz_jobs.SHRINKING = 1.0"
    argv = ("planted", *length, "--seed", "1")
    status, found, said = fuzzed(tmp_path, code, *argv, head=short)
    assert status == 1, said
    searched = found["ops"]["planted"]
    # without a bound, 0.6 s and more for each of the dozens of examples that shrinking tries
    assert searched["seconds"] < 20, searched["seconds"]
    again = python(WRONG + searched["failures"][0]["program"], TRITON_INTERPRET="1")
    assert "AssertionError" in again.stderr


def test_fuzz_gives_each_process_its_share(tmp_path: Path) -> None:
    search = _cli_fuzz_jobs.Search("cpu", 7, None, 60.0, False)
    tasks = _cli_fuzz_jobs.shared(["a", "b", "c"], search, 2)
    assert [task.op for task in tasks] == ["a", "b", "c", "a"]
    assert {task.search.seconds for task in tasks} == {30.0}
    assert len({task.search.seed for task in tasks}) == 4
    assert tasks[0].search.seed == 7
    counted = search._replace(seconds=None, examples=5)
    tasks = _cli_fuzz_jobs.shared(["a", "b"], counted, 3)
    assert [(task.op, task.search.examples) for task in tasks] == [("a", 3), ("b", 5), ("a", 2)]
    few = _cli_fuzz_jobs.shared(["a"], counted._replace(examples=2), 4)
    assert [task.search.examples for task in few] == [1, 1]
    assert search.shrinking == 30.0
    assert search._replace(seconds=600.0).shrinking == 120.0
    assert counted.shrinking == 30.0
    with pytest.raises(_cli_fuzz._Unusable, match=r"--json: .*No such file"):
        _cli_fuzz._Report(tmp_path / "nowhere" / "out.json")
