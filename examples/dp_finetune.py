"""Fine-tune SmolLM2-135M with DP-SGD on the CPU: per-example gradients of a stock model.

    python examples/dp_finetune.py [--tiny] [--steps N] [--out DIR] [--seed N] [--device DEVICE]

Everything comes from PyPI packages, so that nothing is downloaded at run time. The output folder
receives ``curve.png``, ``log.json`` and ``model/`` (the adapter; with ``--tiny`` the whole model).
The exit code is 1 if per-example gradients differ from the stock loop's, or if the patches left
anything behind.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

# Only the standard library may be imported up to here and in `assets`: a missing package is
# reported before torch and transformers, which take seconds, are imported.
import assets


def main() -> int:
    """Run the demo and return the process's exit code."""
    options = parse_options()
    assets.require_libraries()
    corpus_file = assets.find_corpus()
    if not options.tiny:
        assets.find_gguf()
    # Read once, by huggingface_hub and by OpenMP when torch loads it. Threads that spin while they
    # wait make the demo two to three times slower on a computer that does something else too.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return run(options, corpus_file)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune SmolLM2-135M with DP-SGD.")
    parser.add_argument(
        "--tiny", action="store_true", help="a random model over bytes; needs no model package"
    )
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="default: 20")
    parser.add_argument("--seed", type=_count, default=0, metavar="N", help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), metavar="DIR")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    return parser.parse_args()


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {number}")
    return number


def run(options: argparse.Namespace, corpus_file: Path) -> int:
    """Load, train, check and report; return 1 if a check fails."""
    import report
    import torch
    import transformers
    from corpus import read_entries
    from models import build_tiny, load_smollm2
    from rich.console import Console
    from training import Settings, finetune, prepare_data

    started = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()  # it would interleave with the demo's own
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(steps=options.steps, seed=options.seed, device=device)
    torch.manual_seed(settings.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    task = build_tiny() if options.tiny else load_smollm2()
    model = task.model.to(device)
    data = prepare_data(task, read_entries(corpus_file), settings)
    console = Console()
    with report.ProgressReport(console, settings.steps) as observer:
        outcome = finetune(model, data, settings, observer)
    outcome.seconds["total"] = time.perf_counter() - started
    model.save_pretrained(options.out / "model")
    report.write_log(options.out / "log.json", task.name, settings, data, outcome)
    report.plot(options.out / "curve.png", task.name, settings, data, outcome)
    report.print_verdict(console, outcome, options.out)
    return 0 if report.passed(outcome) else 1


if __name__ == "__main__":
    raise SystemExit(main())
