"""What every operator launches, compiled for GPUs that are not there, and how often it launches.

Of what heuristics can choose a sample is compiled, the same in every run; ``--thorough`` compiles
all of it.
"""

from __future__ import annotations

import functools
from typing import Any

import kernel_oracle as oracle
import kernel_targets as targets
import pytest
import torch
from interpreter import compiled
from torch.func import grad, vmap

from opake import kernels

OPS = [op.name for op in kernels.ops()]
ops = pytest.mark.parametrize("name", OPS)

OTHERS = 3
"""With two or three kernels an operator, some 24 compilations of a third of a second each."""


SIZES = (32, 33, 100)
"""Numbers of examples; with very few, an operator may need a launch less."""


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--thorough")


@ops
@pytest.mark.parametrize("target", targets.TARGETS)
@compiled
def test_kernels_compile_without_spilling(name: str, target: str, thorough: bool) -> None:
    found = targets.signatures(kernels.find(name), target)
    assert found
    every = targets.variants(found) if thorough else targets.sample(found, target, OTHERS)
    spills = [(targets.described(x), spilled(x, target)) for x in every]
    assert not any(n for _, n in spills), [(x, n) for x, n in spills if n]


@functools.cache
def spilled(signature: targets.Signature, target: str) -> int:
    built = targets.build(signature, target)
    assert built.metadata.shared <= targets.SHARED[target], targets.described(signature)
    return targets.spilled(built)


@ops
@compiled
def test_memory_is_moved_16_bytes_at_a_time(name: str) -> None:
    op = kernels.find(name)
    call = op.benchmarks[0].make("meta", torch.bfloat16)
    for signature in dict.fromkeys(targets.launched(op, call, "sm_90")):
        if torch.bfloat16 in signature.pointers:  # of ids and labels there are few
            widest = targets.widest_access(targets.build(signature, "sm_90"))
            assert widest == 128, targets.described(signature)


@ops
@compiled
def test_launches_do_not_depend_on_the_examples(name: str) -> None:
    """Meta tensors have no numbers: to wait for one, as no captured pass may, is an error."""
    op = kernels.find(name)
    found = []
    for call in (*targets.timed(op), *targets.drawn(op, targets.DRAWN)):
        call = oracle.in_one_chunk(op, call)
        if not op.fits(*call.args, **call.kwargs):
            for keys in oracle.choices(call, 0)[-2:]:
                once, *more = (launches(op, call, keys, size) for size in SIZES)
                assert [once, once] == more
                found += once
    assert found


def launches(op: Any, call: kernels.Call, keys: Any, size: int) -> list[Any]:
    """The kernels that ``vmap(grad)`` launches over ``size`` examples in these arguments."""
    everything = oracle.tensors(call)
    dims = tuple(0 if key in keys else None for key in everything)
    values = [x.expand(size, *x.shape) if key in keys else x for key, x in everything.items()]
    function, _, argnums = oracle.bound(op.fused, call)

    def total(*values: Any) -> Any:
        return sum(x.sum() for x in oracle.outputs(function(*values)))

    with targets.recorded("sm_90") as found:
        vmap(grad(total, argnums), dims)(*values)
    return [x.kernel for x in found]
