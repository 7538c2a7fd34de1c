"""Scripts with an accelerator of Hugging Face's Accelerate, unchanged, as one process and as pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from test_trainer import AUTO, LAUNCHED, difference, pipeline, script_on_rank, worlds  # noqa: F401
from transformers import BertForSequenceClassification
from worlds import Worlds

from ds_vpipe import accelerators

SCRIPT = Path(__file__).parents[1] / "support" / "clients" / "accelerate_script.py"
pytestmark = pytest.mark.mp


def run(worlds: Worlds, folder: Path, ranks: int, ds_config: dict[str, Any] | None, *arguments: str) -> list[Any]:  # noqa: F811
    """What every rank of the script reports; without ``ds_config`` it runs as one process."""
    folder.mkdir(exist_ok=True)
    line = [str(SCRIPT), "--output_dir", "out", *arguments]
    environment = {"HF_HUB_OFFLINE": "1"}
    if ds_config is not None:
        (folder / "ds.json").write_text(json.dumps({**AUTO, "zero_optimization": {"stage": 0}, **ds_config}))
        line.insert(0, "ds_vpipe.run")
        environment |= LAUNCHED
    worlds.run(ranks, script_on_rank, folder, line, ds_config is not None, environment)
    return [json.loads((folder / "out" / f"report-{rank}.json").read_text()) for rank in range(ranks)]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    model, report = BertForSequenceClassification.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def test_synchronous_training_is_that_of_one_process(worlds: Worlds, tmp_path: Path) -> None:  # noqa: F811
    """Losses, the schedule, metrics, gathered objects and weights; an epoch ends inside a batch."""
    (alone,) = run(worlds, tmp_path / "alone", 1, None)
    reports = run(worlds, tmp_path / "two", 2, {**pipeline(sync_mode="bsp"), "gradient_clipping": 0.0})
    assert difference(saved(tmp_path / "two"), saved(tmp_path / "alone")) <= 1e-5
    for report in reports:
        assert report["rates"] == pytest.approx(alone["rates"])
        assert report["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert report["found"] == alone["found"]


@pytest.mark.parametrize("synchronous", [True, False])
def test_schedules_are_alike_on_all_ranks(synchronous: bool) -> None:
    """In fp16 every stage's optimizer overflows when its late update does, so that in asp schedules count batches."""
    engine = SimpleNamespace(drain=None, pipeline=SimpleNamespace(synchronous=synchronous))
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.overflow = True  # type: ignore[attr-defined]
    with mock.patch("accelerate.optimizer.AcceleratorState"):
        _, made = accelerators._prepare(lambda: (engine, DeepSpeedOptimizerWrapper(optimizer)))
    assert made.step_was_skipped == synchronous


def test_resuming_is_going_on(worlds: Worlds, tmp_path: Path) -> None:  # noqa: F811
    """Bit for bit, from `save_state()` in the midst of an asynchronous run."""
    through, _ = run(worlds, tmp_path, 2, pipeline())
    wanted = saved(tmp_path)
    resumed, _ = run(worlds, tmp_path, 2, pipeline(), "--resume")
    assert resumed["losses"] == through["losses"][len(through["losses"]) // 2 :]
    assert difference(saved(tmp_path), wanted) == 0


def test_optimizers_may_write_weights_for_an_evaluation(worlds: Worlds, tmp_path: Path) -> None:  # noqa: F811
    """As schedule-free ones do in ``optimizer.eval()``; here they are the same as before."""
    run(worlds, tmp_path / "as they are", 2, pipeline())
    run(worlds, tmp_path / "written", 2, pipeline(), "--averages")
    assert difference(saved(tmp_path / "written"), saved(tmp_path / "as they are")) == 0
