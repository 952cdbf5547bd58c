"""Per-example gradients on a GPU beside stock's, one example at a time; writes a result file.

python benchmarks/gpu_check.py results.json
"""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
import warnings

import torch
import transformers
from torch.func import functional_call, grad_and_value, vmap
from transformers import LlamaConfig, LlamaForCausalLM

import opake

BATCH, LENGTH = 6, 64


def model(dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """Return a small llama with grouped-query attention and real head sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to("cuda", dtype)


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Return a batch for every kind of mask."""
    ids = torch.randint(0, 512, (BATCH, LENGTH), device="cuda")
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    for row in range(1, BATCH):
        right[row, LENGTH - 9 * row :] = 0
        left[row, : 9 * row] = 0
    left[2] = 0  # nothing but padding
    found = {"none": {"input_ids": ids, "labels": ids}}
    for name, mask in (("right", right), ("left", left)):
        labels = ids.masked_fill(mask == 0, -100)
        found[name] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return found


def loop(stock: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> list[tuple]:
    """Return the loss and gradients of each example by an ordinary backward pass."""
    out = []
    for i in range(BATCH):
        stock.zero_grad()
        loss = stock(**{k: v[i : i + 1] for k, v in batch.items()}).loss
        loss.backward()
        out.append((loss.detach(), {n: p.grad.clone() for n, p in stock.named_parameters()}))
    return out


def worst(found: dict, losses: torch.Tensor, expected: list[tuple]) -> tuple[float, float]:
    """Return the largest error of a gradient and of a loss."""
    grads, scalars = 0.0, 0.0
    for i, (loss, reference) in enumerate(expected):
        finite = [g.nan_to_num().abs().max().item() for g in reference.values()]
        for name, g in reference.items():
            grads = max(grads, error(found[name][i], g, 1e-3 * max(finite)))
        scalars = max(scalars, error(losses[i], loss, 0.0))
    return grads, scalars


def error(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    """Return ``max|a - b| / max(max|b|, floor)``; NaN positions must be equal."""
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = a.nan_to_num().double(), b.nan_to_num().double()
    scale = max(b.abs().max().item(), floor)
    return (a - b).abs().max().item() / scale if scale else 0.0


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Run every case and write the file."""
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for attention in ("sdpa", "eager"):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            patched = model(dtype, attention)
            stock = copy.deepcopy(patched)
            params = {n: p.detach() for n, p in patched.named_parameters()}
            for mask, batch in batches().items():
                expected = loop(stock, batch)

                def loss(p: dict, example: dict, net: LlamaForCausalLM = patched) -> torch.Tensor:
                    return functional_call(net, p, (), example).loss

                with opake.patched(patched), torch.no_grad():
                    found, losses = vmap(grad_and_value(loss), (None, 0))(params, batch)
                grads, scalars = worst(found, losses, expected)
                rows.append(
                    {
                        "attention": attention,
                        "dtype": str(dtype),
                        "mask": mask,
                        "gradient_error": grads,
                        "loss_error": scalars,
                    }
                )
                print(rows[-1], flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "host": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": sys.argv[2] if len(sys.argv) > 2 else _commit(),
        "rows": rows,
    }
    with open(sys.argv[1], "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
