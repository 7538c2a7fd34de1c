"""Scripts that know nothing of pipelines, unchanged, under DeepSpeed alone and under ``ds_vpipe.run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "plain_scripts"
pytestmark = pytest.mark.mp

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 10**9}
CONFIGS: dict[str, dict[str, Any]] = {
    "masked_lm": {**BASE, **SGD},
    "wrapped_encoder": BASE,
    "pretraining": {**BASE, **SGD},
}
STEPS = {"masked_lm": 20, "wrapped_encoder": 20, "pretraining": 12}


def launch(folder: Path, script: str, ds_config: dict[str, Any], ranks: int, *arguments: str) -> str:
    """Run a script by the deepspeed launcher, with ``ds_vpipe.run`` where the JSON has a block; returns its output."""
    folder.mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(ds_config), encoding="utf-8")
    module = ["--module", "ds_vpipe.run"] if "vpipe" in ds_config else []
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(ranks), *module]
    command += [str(SCRIPTS / f"{script}.py"), "--deepspeed_config", "ds.json", "--output", "saved", *arguments]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the latest checkpoint, by the names that they have in the script's model."""
    tag = (folder / "saved" / "latest").read_text(encoding="utf-8").strip()
    files = sorted((folder / "saved" / tag).glob("layer_*-model_states.pt"))
    if files:
        found: dict[str, torch.Tensor] = {}
        for file in files:
            found |= torch.load(file)
        return found
    (file,) = (folder / "saved" / tag).glob("mp_rank_*_model_states.pt")
    module: dict[str, torch.Tensor] = torch.load(file, weights_only=False)["module"]
    return module


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed alone trains, on one rank."""
    results = {}
    for script, ds_config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(script)
        assert f"trained {STEPS[script]} steps" in launch(folder, script, ds_config, 1)
        results[script] = saved(folder)
    return results


@pytest.mark.parametrize("script", CONFIGS)
@pytest.mark.parametrize("stages", [2, 4])
def test_synchronous_training_is_what_deepspeed_does(
    stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path, script: str, stages: int
) -> None:
    ds_config = {**CONFIGS[script], "pipeline": {"stages": stages}, "vpipe": {"sync_mode": "bsp"}}
    assert launch(tmp_path, script, ds_config, stages).count(f"trained {STEPS[script]} steps") == stages
    assert difference(saved(tmp_path), stock[script]) <= 1e-5


@pytest.mark.parametrize("script", CONFIGS)
def test_asynchronous_training(stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path, script: str) -> None:
    ds_config = {**CONFIGS[script], "pipeline": {"stages": 2}, "vpipe": {}}
    assert launch(tmp_path, script, ds_config, 2).count(f"trained {STEPS[script]} steps") == 2
    assert 1e-5 < difference(saved(tmp_path), stock[script]) < 0.5


def test_resuming(stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Stopped after an epoch and started again, the example ends where it does in one go."""
    ds_config = {**CONFIGS["pretraining"], "pipeline": {"stages": 2}, "vpipe": {"sync_mode": "bsp"}}
    launch(tmp_path, "pretraining", ds_config, 2, "--epochs", "1")
    assert "trained 12 steps" in launch(tmp_path, "pretraining", ds_config, 2, "--resume")
    assert difference(saved(tmp_path), stock["pretraining"]) <= 1e-5
