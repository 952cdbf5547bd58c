"""Every family's per-example gradients on a GPU beside stock's loop; writes a result file.

python benchmarks/gpu_check.py results.json [COMMIT]     (--smoke: tiny, on the CPU)

fp64 and fp32: the error of a gradient as tests/oracle.py defines it. bf16: how far ours and
stock's are from the fp64 truth, as a ratio of root mean squares.
"""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import opake

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import zoo
from oracle import Result, errors, per_example, stock_loop

BATCH, LENGTH, VOCAB = 6, 64, 512
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCAB}
GPT2_SIZES = {"n_embd": 256, "n_inner": 512, "vocab_size": VOCAB}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def model(family: str, attention: str, dtype: torch.dtype, device: str) -> Any:
    """Return a small model of the family with real head sizes."""
    sizes = dict(GPT2_SIZES if family == "gpt2" else SIZES)
    if family == "gemma2":
        sizes |= {"head_dim": 64, "query_pre_attn_scalar": 64}
    fields = {**zoo.FIELDS[family], **sizes, "initializer_range": 0.05}
    if "sliding_window" in fields:
        fields["sliding_window"] = 16
    made = zoo.tiny(family, attention, dtype, **fields).to(device)
    if family == "mixtral" and dtype == torch.float64:
        made.set_experts_implementation("batched_mm")  # stock's grouped_mm has no fp64
    return made


def batches(device: str) -> dict[str, dict[str, Tensor]]:
    """Return a batch for every kind of mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    for row in range(1, BATCH):
        right[row, LENGTH - 9 * row :] = 0
        left[row, : 9 * row] = 0
    left[2] = 0  # nothing but padding
    found = {"none": {"input_ids": ids, "labels": ids}}
    for name, mask in (("right", right), ("left", left)):
        labels = ids.masked_fill(mask == 0, -100)
        found[name] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {k: {n: x.to(device) for n, x in batch.items()} for k, batch in found.items()}


def rms(found: Result, truth: Result) -> float:
    """Return the root mean square of the distance from the truth, relative to the truth's."""
    finite = {n: g.isfinite() for n, g in truth.grads.items()}
    gap = sum(
        (found.grads[n].double() - g).where(finite[n], 0).square().sum()
        for n, g in truth.grads.items()
    )
    size = sum(g.where(finite[n], 0).square().sum() for n, g in truth.grads.items())
    return float((gap / size).sqrt())


def rows(family: str, attention: str, dtype: torch.dtype, device: str) -> Iterator[dict[str, Any]]:
    """Yield what was measured for one family, attention and dtype."""
    patched = model(family, attention, dtype, device)
    stock = copy.deepcopy(patched)
    for checkpointing in (False, True):
        if checkpointing:
            patched.gradient_checkpointing_enable()
        for mask, batch in batches(device).items():
            expected = stock_loop(stock, batch)
            with opake.patched(patched), torch.no_grad():
                found = per_example(patched, batch, batched=False)
            loss, gradient = errors(found, expected)
            row = {
                "family": family,
                "attention": attention,
                "dtype": str(dtype).removeprefix("torch."),
                "mask": mask,
                "checkpointing": checkpointing,
                "gradient_error": gradient,
                "loss_error": loss,
            }
            if dtype == torch.bfloat16 and family != "mixtral":  # routing turns on a last bit
                truth = stock_loop(copy.deepcopy(stock).double(), batch)
                row["rms_error"], row["stock_rms_error"] = rms(found, truth), rms(expected, truth)
            yield row


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Run every case and write the file."""
    arguments = [a for a in sys.argv[1:] if a != "--smoke"]
    smoke = len(arguments) + 1 < len(sys.argv)
    device = "cpu" if smoke else "cuda"
    # A fallback of functorch that goes example by example would say so.
    warnings.filterwarnings("error", message="There is a performance drop")
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for family in zoo.FIELDS:
        for attention in zoo.attentions(family):
            for dtype in DTYPES[:1] if smoke else DTYPES:
                for row in rows(family, attention, dtype, device):
                    print(row, flush=True)
                    found.append(row)
    result = {
        "gpu": None if smoke else torch.cuda.get_device_name(),
        "host": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": arguments[1] if len(arguments) > 1 else commit(),
        "rows": found,
    }
    Path(arguments[0]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
