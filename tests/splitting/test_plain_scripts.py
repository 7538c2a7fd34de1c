"""Scripts that know nothing of pipelines, unchanged, under DeepSpeed alone and under ``ds_vpipe.run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plain_reference
import pytest
import torch
from launches import launched
from transformers import BertForMaskedLM
from worlds import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "support" / "plain_scripts"
pytestmark = pytest.mark.mp

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "masked_lm": {**BASE, **SGD},
    "wrapped_encoder": BASE,
    "pretraining": {**BASE, **SGD},
}
# The pieces of a model are its embeddings, its layers and its head.
PARTITIONS = {
    "masked_lm": {2: [2, 3], 4: [2, 1, 1, 1]},
    "wrapped_encoder": {2: [3, 3], 4: [2, 2, 1, 1]},
    "pretraining": {2: [3, 3], 4: [2, 2, 1, 1]},
}
COPIES = {"masked_lm": ["cls.predictions.decoder.weight"]}  # further names of tied weights, on the last stage
STEPS = {"masked_lm": 20, "wrapped_encoder": 20, "pretraining": 20}


def write_json(folder: Path, ds_config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(ds_config), encoding="utf-8")


def command_line(script: str, ds_config: dict[str, Any], ranks: int, *arguments: str) -> list[str]:
    """For the launcher, with ``ds_vpipe.run`` where the JSON has a block."""
    module = ["--module", "ds_vpipe.run"] if "vpipe" in ds_config else []
    script = str(SCRIPTS / f"{script}.py")
    return [
        *("--num_accelerators", str(ranks), *module, script),
        *("--deepspeed_config", "ds.json", "--output", "saved", *arguments),
    ]


def launch(folder: Path, script: str, ds_config: dict[str, Any], ranks: int) -> str:
    """Run a script by the deepspeed launcher; returns its output."""
    write_json(folder, ds_config)
    command = [str(Path(sys.executable).with_name("deepspeed")), "--master_port", str(free_port())]
    command += command_line(script, ds_config, ranks)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run(folder: Path, script: str, ds_config: dict[str, Any], ranks: int, *arguments: str) -> str:
    """As :func:`launch`, without the launcher."""
    write_json(folder, ds_config)
    return launched(folder, command_line(script, ds_config, ranks, *arguments))


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the latest checkpoint, by the names that they have in the script's model.

    The script's own file, which it writes in its last lines, has the same ones.
    """
    found = checkpoint(folder)
    if (folder / "saved" / "model.pt").is_file():
        own = torch.load(folder / "saved" / "model.pt")
    else:
        model, report = BertForMaskedLM.from_pretrained(
            folder / "saved" / "model", output_loading_info=True, dtype="auto"
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        own = model.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(value, own[name]) and value.dtype is own[name].dtype for name, value in found.items())
    return found


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters in the files of layers, or in DeepSpeed's own."""
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


def stages_of_names(folder: Path, partition: list[int]) -> dict[str, int]:
    """The stage of every parameter of the latest checkpoint, by name."""
    tag = (folder / "saved" / "latest").read_text(encoding="utf-8").strip()
    stage_of_layer = [stage for stage, count in enumerate(partition) for _ in range(count)]
    files = (folder / "saved" / tag).glob("layer_*-model_states.pt")
    return {
        name: stage_of_layer[int(file.name.split("_")[1].split("-")[0])] for file in files for name in torch.load(file)
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed alone trains, on one rank."""
    results = {}
    for script, ds_config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(script)
        assert f"trained {STEPS[script]} steps" in run(folder, script, ds_config, 1)
        results[script] = saved(folder)
    return results


# Every script in both modes, one of them in two stages and the other in four.
@pytest.mark.parametrize(("script", "stages"), [("masked_lm", 4), ("wrapped_encoder", 2), ("pretraining", 2)])
def test_synchronous_training_is_what_deepspeed_does(
    stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path, script: str, stages: int
) -> None:
    ds_config = {**CONFIGS[script], "pipeline": {"stages": stages}, "vpipe": {"sync_mode": "bsp"}}
    assert run(tmp_path, script, ds_config, stages).count(f"trained {STEPS[script]} steps") == stages
    assert difference(saved(tmp_path), stock[script]) <= 1e-5


@pytest.mark.parametrize(("script", "stages"), [("masked_lm", 2), ("wrapped_encoder", 4), ("pretraining", 4)])
def test_asynchronous_training_is_the_references(
    stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path, script: str, stages: int
) -> None:
    partition = PARTITIONS[script][stages]
    ds_config = {**CONFIGS[script], "pipeline": {"stages": stages}, "vpipe": {"partition": partition}}
    assert run(tmp_path, script, ds_config, stages).count(f"trained {STEPS[script]} steps") == stages
    found = saved(tmp_path)
    (tmp_path / "reference").mkdir()
    reference = plain_reference.run(
        SCRIPTS / f"{script}.py",
        stages_of_names(tmp_path, partition),
        dict.fromkeys(COPIES.get(script, ()), stages - 1),
        ds_config["gradient_accumulation_steps"],
        ds_config["gradient_clipping"],
        lambda groups: torch.optim.SGD(groups, **SGD["optimizer"]["params"]),
        ["--deepspeed_config", str(tmp_path / "ds.json"), "--output", str(tmp_path / "reference")],
    )
    assert difference(found, {name: reference[name] for name in found}) <= 1e-5
    assert difference(found, stock[script]) > 1e-4, "asynchronous updates are not those of DeepSpeed"


def test_half_precision_with_and_without_zero(stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Tied weights clipped by the whole model's norm: DeepSpeed has another optimizer with ZeRO-1, and both agree."""
    found = []
    for zero in (0, 1):
        block = {"partition": PARTITIONS["masked_lm"][2], "gradient_clipping_scope": "delayed_global"}
        extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": zero}, "gradient_clipping": 0.1}
        extra["zero_allow_untested_optimizer"] = True
        ds_config = {**CONFIGS["masked_lm"], **extra, "pipeline": {"stages": 2}, "vpipe": block}
        folder = tmp_path / str(zero)
        assert run(folder, "masked_lm", ds_config, 2).count("trained 20 steps") == 2
        found.append(saved(folder))
    (decoder,) = COPIES["masked_lm"]
    assert torch.equal(found[1][decoder], found[1]["bert.embeddings.word_embeddings.weight"])
    assert {value.dtype for value in found[1].values()} == {torch.bfloat16}
    assert difference(*found) <= 2e-3
    assert difference(found[1], stock["masked_lm"]) > 5e-3, "clipped more than DeepSpeed alone has"


def test_through_the_launcher(tmp_path: Path, stock: dict[str, dict[str, torch.Tensor]]) -> None:
    ds_config = {**CONFIGS["masked_lm"], "pipeline": {"stages": 2}, "vpipe": {"sync_mode": "bsp"}}
    assert launch(tmp_path, "masked_lm", ds_config, 2).count("trained 20 steps") == 2
    assert difference(saved(tmp_path), stock["masked_lm"]) <= 1e-5


def test_resuming(stock: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Stopped after an epoch and started again, the example ends where it does in one go."""
    ds_config = {**CONFIGS["pretraining"], "pipeline": {"stages": 2}, "vpipe": {"sync_mode": "bsp"}}
    run(tmp_path, "pretraining", ds_config, 2, "--epochs", "1")
    assert "trained 20 steps" in run(tmp_path, "pretraining", ds_config, 2, "--resume")
    assert difference(saved(tmp_path), stock["pretraining"]) <= 1e-5


def test_resuming_asynchronously(tmp_path: Path) -> None:
    """The same, against a run that has not been stopped; both drain at the end of the first epoch."""
    ds_config = {**CONFIGS["pretraining"], "pipeline": {"stages": 2}, "vpipe": {}}
    stopped, through = tmp_path / "stopped", tmp_path / "through"
    run(stopped, "pretraining", ds_config, 2, "--epochs", "1")
    assert "trained 20 steps" in run(stopped, "pretraining", ds_config, 2, "--resume")
    assert "trained 20 steps" in run(through, "pretraining", ds_config, 2)
    assert difference(saved(stopped), saved(through)) == 0


def test_data_dealt_out_to_ranks(tmp_path: Path) -> None:
    """The script makes its samplers, and somebody its JSON, for as many replicas as ranks; with dropout and logits."""
    reports = {}
    for name, ranks, extra in [
        ("stock", 1, {}),
        ("alone", 1, {"pipeline": {"stages": 1}, "vpipe": {}}),
        ("two", 2, {"pipeline": {"stages": 2}, "vpipe": {"partition": [2, 2]}}),
    ]:
        sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * 2 * ranks}
        output = run(tmp_path / name, "sharded", {**CONFIGS["masked_lm"], **sizes, **extra}, ranks)
        lines = [line for line in output.splitlines() if line.startswith("report ")]
        reports[name] = [json.loads(line.removeprefix("report ")) for line in lines]
    assert difference(saved(tmp_path / "alone"), saved(tmp_path / "stock")) == 0
    assert saved(tmp_path / "two").keys() == saved(tmp_path / "stock").keys()
    (stock,) = reports["stock"]
    assert reports["alone"] == [stock]
    first, last = reports["two"]
    assert first == last
    assert first["seen"] == stock["seen"]
    assert sorted(first["seen"]) == sorted([*range(12), *range(12)])
    assert first["steps"] == stock["steps"] == 6
    assert (len(first["correct"]), len(first["losses"])) == (8, 4)
