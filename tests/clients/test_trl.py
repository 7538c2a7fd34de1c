"""Scripts with TRL's trainers, unchanged, as one process and as pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_trainer
from test_trainer import difference, pipeline, replayed, saved
from trainer_replay import stages_of_names
from worlds import CaseFailed, Worlds

pytest.importorskip("trl")
pytestmark = pytest.mark.mp
SCRIPT = Path(__file__).parents[1] / "support" / "clients" / "trl_script.py"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with contextlib.closing(Worlds()) as made:
        yield made


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_trainer, "SCRIPT", SCRIPT)


def run(worlds: Worlds, folder: Path, ranks: int, ds_config: dict[str, Any] | None, *line: str, **given: Any) -> Any:
    common = ("--bf16", "false", "--gradient_accumulation_steps", "2")
    return test_trainer.run(worlds, folder, ranks, ds_config, *common, *line, **given)


def history_of(report: dict[str, Any]) -> list[dict[str, float]]:
    assert any("mean_token_accuracy" in entry for entry in report["history"])
    return report["history"]


def test_fine_tuning(worlds: Worlds, tmp_path: Path) -> None:
    """In bsp that of one process, with the trainer's own loss and metrics; in asp the replay's."""
    # With Adam, gradients that are zero but for rounding, those of keys' biases, would make a difference.
    line = ("--optim", "sgd", "--learning_rate", "0.1", "--save_strategy", "steps")
    # The replay would compute blocks again with other weights than it has called the model with.
    line = (*line, "--gradient_checkpointing", "false")
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *line)
    synchronous = run(worlds, tmp_path / "bsp", 2, pipeline(sync_mode="bsp"), *line)
    assert difference(saved(tmp_path / "bsp", "clm"), saved(tmp_path / "alone", "clm")) <= 1e-5
    wanted = history_of(alone)
    for report in synchronous:
        for found, entry in zip(report["history"], wanted, strict=True):
            assert found == pytest.approx(entry, rel=1e-5, abs=1e-5)
    late = run(worlds, tmp_path / "asp", 2, pipeline(partition=[2, 3]), *line)
    stage_of = stages_of_names(tmp_path / "asp" / "out", [2, 3])
    run(worlds, tmp_path / "replay", 1, None, *line, on_rank=partial(replayed, stage_of))
    weights = saved(tmp_path / "asp", "clm")
    assert difference(weights, saved(tmp_path / "replay", "clm")) <= 1e-6
    assert difference(weights, saved(tmp_path / "alone", "clm")) > 1e-4, "late gradients make a difference"
    (loss,) = (entry["train_loss"] for entry in wanted if "train_loss" in entry)
    for report in late:  # earlier stages add losses that are older, each divided by the tokens of its own batch
        (found,) = (entry["train_loss"] for entry in report["history"] if "train_loss" in entry)
        assert found == pytest.approx(loss, abs=0.1)


def test_preferences(worlds: Worlds, tmp_path: Path) -> None:
    """In bsp those of one process; the model for comparison is a pipeline too."""
    line = ("--trainer", "dpo", "--samples", "16", "--num_train_epochs", "1")
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *line)
    reports = run(worlds, tmp_path / "two", 2, pipeline(sync_mode="bsp"), *line)
    assert difference(saved(tmp_path / "two", "clm"), saved(tmp_path / "alone", "clm")) <= 1e-5
    for report in reports:
        for found, entry in zip(report["history"], history_of(alone), strict=True):
            assert found == pytest.approx(entry, rel=1e-5, abs=1e-5)


def test_preferences_are_refused_in_asp(worlds: Worlds, tmp_path: Path) -> None:
    """Where the loss compares with what another model says of the script's own micro-batch."""
    with pytest.raises(CaseFailed) as failed:
        run(worlds, tmp_path, 2, pipeline(), "--trainer", "dpo", "--samples", "16")
    said = (text.splitlines() for text in failed.value.errors.values())
    lines = [line for text in said for line in text if "ds_vpipe: outputs: got sub() of a tensor" in line]
    assert len(lines) == 2, "one on every rank"
