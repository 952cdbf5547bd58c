"""Where the experts' kernel pays inside a model: against every implementation of transformers'.

``python benchmarks/experts_gpu.py`` prints host times on an idle queue, forward alone and both
passes, by tokens, with the work that ``Op.crossover`` of ``moe`` goes by; ``--smoke`` runs one
small case on any device.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import Bench
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from opake import kernels

SHAPES = ((8, 2, 4096, 14336), (64, 8, 2048, 1024), (128, 8, 2048, 768), (16, 2, 1024, 512))
"""Experts, those of a token, width, width inside."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    bench = Bench(parser.parse_args().smoke)
    shapes = ((4, 2, 32, 16),) if bench.smoke else SHAPES
    for shape in shapes:
        for tokens in (2,) if bench.smoke else (1, 4, 16, 64, 256, 1024, 4096):
            with kernels.config(min_elements=0):
                print(row(bench, shape, tokens), flush=True)


def row(bench: Bench, shape: tuple[int, ...], tokens: int) -> str:
    """Time one number of tokens."""
    experts, top_k, hidden, inner = shape
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    with torch.device(bench.device):
        module = MixtralExperts(config).bfloat16()
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        scores = torch.rand(tokens, experts)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=hidden**-0.5)
    weights, ids = scores.softmax(-1).topk(top_k)
    weights = weights.bfloat16()
    op = kernels.find("moe")
    assert op is not None
    fused = functools.partial(op.fused, x, module.gate_up_proj, module.down_proj, ids, weights)
    leaves = [x, *module.parameters()]
    found = {"opake": times(bench, fused, leaves)}
    copies = 6 * tokens * top_k * hidden * inner  # bytes
    for name in ("eager", "grouped_mm", "batched_mm")[: 2 if copies > 2**33 else 3]:
        module.config._experts_implementation = name
        found[name] = times(bench, functools.partial(module, x, ids, weights), leaves)
    work = op.work(x, module.gate_up_proj, module.down_proj, ids, weights) if op.work else 0
    label = f"E{experts} K{top_k} H{hidden} I{inner} T{tokens:<5} work {work:<13}"
    return label + "  ".join(f"{name} {a:.3f} / {b:.3f}" for name, (a, b) in found.items())


def times(bench: Bench, call: Callable[[], Any], leaves: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the forward pass without gradients, and of both passes."""

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call().sum(), leaves)

    return bench.host_ms(forward)[0], bench.host_ms(both)[0]


if __name__ == "__main__":
    main()
