"""Every family's per-example gradients on a GPU beside stock's loop; writes a result file.

python benchmarks/gpu_check.py results.json [COMMIT] [--only FAMILY ...] [--smoke]

fp64 and fp32: the error of a gradient as tests/oracle.py defines it; in fp32 twice stock's own
distance from fp64 is allowed, where gradients cancel. bf16: how far ours and stock's are from the
fp64 truth, as root mean squares. Exits with 1 where a row is not within its bar.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
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
import traits
import zoo
from oracle import LOSS_BAR, Result, errors, per_example, stock_loop

BATCH, LENGTH, VOCAB = 6, 64, 512
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 512),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar"), 64),
}
"""Head sizes as real models have them."""

TIED = ("expand", "kv_lora_rank", "o_lora_rank")
"""Fields of families whose sizes hang together in other ways: theirs stay tiny."""

EVERYWHERE = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 2 * LENGTH,
    "n_positions": 2 * LENGTH,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "initializer_range": 0.05,
    "init_std": 0.05,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BARS = {"float64": 1e-12, "float32": 1e-5}
MOE_BARS = {"float64": 1e-12, "float32": 1e-4}  # as far as stock's implementations differ
RMS_RATIO = 1.05
MOE_RMS_RATIO = 1.5


def model(family: str, attention: str, dtype: torch.dtype, device: str) -> Any:
    """Return a small model of the family, on a GPU with real head sizes."""
    if device == "cpu":
        return zoo.tiny(family, attention, dtype, vocab_size=VOCAB)
    config = traits.base_config(family)
    sizes = EVERYWHERE if any(name in config for name in TIED) else {**SIZES, **EVERYWHERE}
    # What a family has not got, or has switched off, stays so.
    fields = {name: size for name, size in sizes.items() if config.get(name) is not None}
    return zoo.tiny(family, attention, dtype, **fields).to(device)


CASES = (("none", False), ("right", False), ("left", False), ("left", True))
"""Masks, with and without checkpointing."""


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
    given = batches(device)
    for mask, checkpointing in CASES:
        if checkpointing:
            if not patched.supports_gradient_checkpointing:
                continue
            patched.gradient_checkpointing_enable()
        expected = on_cpu(stock_loop(stock, given[mask]))
        with opake.patched(patched), torch.no_grad():
            found = on_cpu(per_example(patched, given[mask], batched=False))
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
            truth = on_cpu(stock_loop(copy.deepcopy(stock).double(), given[mask]))
            row["stock_error"] = errors(expected, truth)[1]
            row["rms_error"], row["stock_rms_error"] = rms(found, truth), rms(expected, truth)
        yield row


def tried(family: str, attention: str, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Return the rows, or one that says what was raised: the others are still worth having."""
    try:
        found = list(rows(family, attention, dtype, device))
    except Exception as error:
        row = {"family": family, "attention": attention, "dtype": str(dtype).removeprefix("torch.")}
        return [{**row, "error": f"{type(error).__name__}: {error}"[:500], "passed": False}]
    return [{**row, "passed": passed(row, found)} for row in found]


def passed(row: dict[str, Any], model: list[dict[str, Any]]) -> bool:
    """Tell whether a row is within the bar of its dtype, given all rows of its model."""
    if row["dtype"] == "bfloat16":
        # Stock's own numbers to an ulp are as good as any, NaN where it has NaN. In a mixture of
        # experts a last bit turns a token to another expert, in ours and in stock's.
        as_stock = row["gradient_error"] <= 2**-8 and row["loss_error"] <= 2**-7
        ratio = MOE_RMS_RATIO if traits.has_experts(row["family"]) else RMS_RATIO
        return as_stock or row["rms_error"] <= ratio * row["stock_rms_error"]
    if row["loss_error"] > LOSS_BAR:
        return False
    loose = traits.has_experts(row["family"]) or traits.recurs(row["family"])
    bar = (MOE_BARS if loose else BARS)[row["dtype"]]
    return bool(row["gradient_error"] <= max(bar, 2 * _noise(row, model)))


def _noise(row: dict[str, Any], model: list[dict[str, Any]]) -> float:
    """Return how far stock is from fp64; where only one of them has NaN, with the other masks."""
    found = [other.get("stock_error", 0.0) for other in (row, *model)]
    return next((x for x in found if math.isfinite(x)), 0.0)


def main() -> int:
    """Run every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("commit", nargs="?", help="of a copy without git")
    parser.add_argument("--smoke", action="store_true", help="tiny, in fp64, on the CPU")
    parser.add_argument("--only", nargs="*", default=list(zoo.FIELDS), help="families")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    # A fallback of functorch that goes example by example would say so.
    warnings.filterwarnings("error", message="There is a performance drop")
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for family in args.only:
        for attention in zoo.attentions(family):
            for dtype in DTYPES[:1] if args.smoke else DTYPES:
                found += tried(family, attention, dtype, device)
        failed = [row for row in found if row["family"] == family and not row["passed"]]
        print(family, failed or "passed", flush=True)
    result = {**describe(args.commit), "rows": found}
    args.file.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row["passed"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
