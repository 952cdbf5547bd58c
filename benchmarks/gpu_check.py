"""Every family's per-example gradients on a GPU beside stock's loop; writes a result file.

python benchmarks/gpu_check.py results.json [COMMIT]     (--smoke: tiny, on the CPU)

fp64 and fp32: the error of a gradient as tests/oracle.py defines it; in fp32 twice stock's own
distance from fp64 is allowed, where gradients cancel. bf16: how far ours and stock's are from the
fp64 truth, as root mean squares. Exits with 1 where a row is not within its bar.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from host import describe
from torch import Tensor

import opake

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import zoo
from oracle import Result, errors, per_example, stock_loop

BATCH, LENGTH, VOCAB = 6, 64, 512
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCAB}
GPT2_SIZES = {"n_embd": 256, "n_inner": 512, "vocab_size": VOCAB}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BARS = {torch.float64: 1e-12, torch.float32: 1e-5}
MOE_BARS = {torch.float64: 1e-12, torch.float32: 1e-4}  # as far as stock's implementations differ
RMS_RATIO = 1.05


def model(family: str, attention: str, dtype: torch.dtype, device: str) -> Any:
    """Return a small model of the family, on a GPU with real head sizes."""
    if device == "cpu":
        return zoo.tiny(family, attention, dtype, vocab_size=VOCAB)
    sizes = dict(GPT2_SIZES if family == "gpt2" else SIZES)
    if family == "gemma2":
        sizes |= {"head_dim": 64, "query_pre_attn_scalar": 64}
    fields = {**zoo.FIELDS[family], **sizes, "initializer_range": 0.05}
    if "sliding_window" in fields:
        fields["sliding_window"] = 16
    return zoo.tiny(family, attention, dtype, **fields).to(device)


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


def on_cpu(result: Result) -> Result:
    return Result(result.losses.cpu(), {n: g.cpu() for n, g in result.grads.items()})


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
            expected = on_cpu(stock_loop(stock, batch))
            with opake.patched(patched), torch.no_grad():
                found = on_cpu(per_example(patched, batch, batched=False))
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
            if dtype != torch.float64:
                truth = on_cpu(stock_loop(copy.deepcopy(stock).double(), batch))
                row["stock_error"] = errors(expected, truth)[1]
                row["rms_error"], row["stock_rms_error"] = rms(found, truth), rms(expected, truth)
            yield {**row, "passed": passed(row, dtype)}


def passed(row: dict[str, Any], dtype: torch.dtype) -> bool:
    """Tell whether a row is within the bar of its dtype."""
    if dtype == torch.bfloat16:
        # Stock's own numbers are as good as any, NaN where it has NaN; and in a mixture of experts
        # a last bit turns a token to another expert: nothing to compare then.
        as_stock = row["gradient_error"] == 0 or row["family"] == "mixtral"
        return as_stock or row["rms_error"] <= RMS_RATIO * row["stock_rms_error"]
    bars = MOE_BARS if row["family"] == "mixtral" else BARS
    return bool(row["gradient_error"] <= max(bars[dtype], 2 * row.get("stock_error", 0)))


def main() -> int:
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
    result = {**describe(*arguments[1:]), "rows": found}
    Path(arguments[0]).write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row["passed"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
