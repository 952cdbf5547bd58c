"""Attention under vmap(grad) on a GPU: gradients, time and memory; writes a result file.

python benchmarks/sdpa_gpu.py results.json [COMMIT]     (--smoke: tiny, on the CPU)

Three ways to the gradients of every example: ours (the mapped dimension folded into the batch),
stock's functorch, and a plain backward pass of the folded batch, which is what torch takes for it
without any transform. Ours must be as near to the fp64 truth as stock's operator on one example at
a time, must not fall back to a loop over examples, and runs one fused call each way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from host import describe
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import opake
from opake.compat.folded_sdpa import folded_sdpa

FALLBACK = "There is a performance drop"
Grads = tuple[Tensor, ...]


class Shape(NamedTuple):
    """Examples, query heads, key heads and head_dim, and the lengths to run."""

    examples: int = 4
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)


SMOKE = Shape(heads=4, key_heads=2, head_dim=8, lengths=(16, 24))


class Problem(NamedTuple):
    """Query, key, value and output weights (N, 1, heads, S, head_dim), mask (N, 1, 1, S, S)."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    mask: Tensor | None


def problem(shape: Shape, length: int, padded: bool, device: str) -> Problem:
    """Draw bf16 inputs; padding is on the right, and on the left of the last example."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        size = (shape.examples, 1, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).bfloat16()

    mask = None
    if padded:
        position = torch.arange(length, device=device)
        pads = torch.arange(shape.examples, device=device)[:, None] * length // 8
        real = position < length - pads
        real[-1] = position >= pads[-1]
        mask = (position[:, None] >= position) & real[:, None, None, None]
    return Problem(
        *(draw(n) for n in (shape.heads, shape.key_heads, shape.key_heads)), draw(shape.heads), mask
    )


def loss(
    operator: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Any
) -> Any:
    """Call the operator as transformers does: no grouped heads where there is a mask."""
    if mask is None:
        output = operator(query, key, value, is_causal=True, enable_gqa=True)
    else:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        output = operator(query, key, value, attn_mask=mask)
    return (output.float() * weight).sum()


def per_example(operator: Any, p: Problem) -> Grads:
    """Run ``vmap(grad)``."""
    gradients = grad(lambda *x: loss(operator, *x), (0, 1, 2))
    return vmap(gradients, (0, 0, 0, 0, None if p.mask is None else 0))(*p)


def batched(p: Problem) -> Grads:
    """Run an ordinary backward pass of the folded batch."""
    folded = Problem(*(None if x is None else x.flatten(0, 1) for x in p))
    leaves = [x.detach().requires_grad_() for x in folded[:3]]
    with torch.enable_grad():
        value = loss(F.scaled_dot_product_attention, *leaves, *folded[3:])
    return tuple(g.unsqueeze(1) for g in torch.autograd.grad(value, leaves))


def looped(p: Problem) -> Iterator[tuple[Grads, Grads]]:
    """Yield stock's gradients and the fp64 truth of one example after the other."""
    for i in range(len(p.query)):
        row = Problem(*(None if x is None else x[i] for x in p))
        stock = batched(Problem(*(None if x is None else x[None] for x in row)))
        yield tuple(g[0] for g in stock), truth(row)


def truth(row: Problem) -> Grads:
    """Return the fp64 gradients of one example by plain math, one key head after the other."""
    length, groups = row.query.shape[-2], row.query.shape[1] // row.key.shape[1]
    position = torch.arange(length, device=row.query.device)
    mask = position[:, None] >= position if row.mask is None else row.mask[0, 0]
    sees = mask.any(-1, keepdim=True)
    found = []
    for i in range(row.key.shape[1]):
        heads = slice(i * groups, (i + 1) * groups)
        leaves = [row.query[0, heads], row.key[0, i], row.value[0, i]]
        leaves = [x.double().requires_grad_() for x in leaves]
        with torch.enable_grad():
            scores = leaves[0] @ leaves[1].mT / math.sqrt(leaves[0].shape[-1])
            scores = scores.masked_fill(~(mask | ~sees), -math.inf)
            output = (scores.softmax(-1) @ leaves[2]).where(sees, 0)
            value = (output * row.weight[0, heads]).sum()
        found.append(torch.autograd.grad(value, leaves))
    queries, keys, values = zip(*found, strict=True)
    return torch.cat(queries)[None], torch.stack(keys)[None], torch.stack(values)[None]


def distances(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the root mean square and the largest distance, relative to the truth's."""
    gap = (found.double() - exact).where(found.isfinite(), 0)
    rms = gap.square().mean().sqrt() / exact.square().mean().sqrt()
    return rms.item(), (gap.abs().max() / exact.abs().max()).item()


def accuracy(p: Problem) -> dict[str, Any]:
    """Compare ours with stock's operator on one example at a time, both with the truth."""
    found = ours(p)
    row: dict[str, Any] = {"rms_ratio": 0.0, "max_ratio": 0.0, "passed": True}
    ulp = torch.finfo(torch.bfloat16).eps
    for i, (stock, exact) in enumerate(looped(p)):
        for a, b, c in zip(found, stock, exact, strict=True):
            (rms, largest), (stock_rms, stock_largest) = distances(a[i], c), distances(b, c)
            row["rms_ratio"] = max(row["rms_ratio"], rms / stock_rms)
            row["max_ratio"] = max(row["max_ratio"], largest / stock_largest)
            good = rms <= 1.05 * stock_rms and largest <= 2 * stock_largest + ulp
            row["passed"] &= good and torch.equal(a[i].isfinite(), b.isfinite())
    return row


def ours(p: Problem) -> Grads:
    """Run ours; a fallback to a loop over examples is an error."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=FALLBACK)
        return per_example(folded_sdpa, p)


def stock(p: Problem) -> Grads:
    """Run stock's functorch, whatever it falls back to."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FALLBACK)
        return per_example(F.scaled_dot_product_attention, p)


class Calls(TorchDispatchMode):
    """Collects the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "dot_product" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[Problem], Grads], p: Problem) -> list[str]:
    """Return the names of the attention operators that one run calls."""
    with Calls() as calls:
        run(p)
    return calls.names


def measure(run: Callable[[Problem], Grads], p: Problem, repeats: int) -> dict[str, Any]:
    """Return device and host milliseconds (medians) and the peak above what was there, in MiB."""
    cuda = p.query.is_cuda
    try:
        for _ in range(2):
            run(p)
        if cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(p)
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        device, host = zip(*(timed(run, p, cuda) for _ in range(repeats)), strict=True)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    found = {"device_ms": statistics.median(device), "host_ms": statistics.median(host)}
    return {**found, "peak_mib": peak} if cuda else found


def timed(run: Callable[[Problem], Grads], p: Problem, cuda: bool) -> tuple[float, float]:
    """Return the milliseconds between two events, and those until the call returned."""
    if not cuda:
        start = time.perf_counter()
        run(p)
        seconds = time.perf_counter() - start
        return 1e3 * seconds, 1e3 * seconds
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    first.record()
    run(p)
    last.record()
    host = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return first.elapsed_time(last), host


def rows(shape: Shape, device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield what was measured for every length and mask."""
    for length in shape.lengths:
        for padded in (False, True):
            p = problem(shape, length, padded, device)
            row = {"length": length, "mask": "padding" if padded else "causal", **accuracy(p)}
            row["operators"] = operators(ours, p)
            row["passed"] &= len(row["operators"]) == 2
            row["passed"] &= row["operators"] == operators(batched, p)
            for name, run in (("ours", ours), ("stock", stock), ("batched", batched)):
                # With a scope come gradients that keep no graph of themselves.
                with opake.runtime() if name == "ours" else contextlib.nullcontext():
                    row[name] = measure(run, p, repeats)
                if device == "cuda":
                    torch.cuda.empty_cache()
            yield row


def main() -> None:
    """Run every case, write the file, and fail where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    device, shape = ("cpu", SMOKE) if arguments.smoke else ("cuda", Shape())
    found = []
    for row in rows(shape, device, 3 if arguments.smoke else 10):
        found.append(row)
        print(json.dumps(row), flush=True)
    result = {
        **describe(arguments.commit),
        "dtype": "bfloat16",
        "shape": shape._asdict(),
        "rows": found,
    }
    arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    if not all(row["passed"] for row in found):
        raise SystemExit("a check failed: see the rows whose `passed` is false")


if __name__ == "__main__":
    main()
