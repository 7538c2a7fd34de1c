"""Scripts with Hugging Face's Trainer, unchanged, as one process and as pipelines."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from launches import run_on_rank
from safetensors.torch import load_file
from trainer_replay import stages_of_names
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from worlds import CaseFailed, Worlds

from ds_vpipe import accelerators
from ds_vpipe.errors import VPipeConfigError

SCRIPT = Path(__file__).parents[1] / "support" / "clients" / "trainer_script.py"
MODELS = {"mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM, "glue": AutoModelForSequenceClassification}
AUTO = dict.fromkeys(
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"], "auto"
)
ARGUMENTS = [
    *("--per_device_train_batch_size", "4", "--num_train_epochs", "2", "--logging_steps", "1", "--report_to", "none"),
    *("--learning_rate", "1e-3", "--save_strategy", "no", "--disable_tqdm", "true", "--optim", "adamw_torch"),
]
LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
pytestmark = pytest.mark.mp


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Of their own, which keep what has been imported."""
    with contextlib.closing(Worlds()) as made:
        yield made


def script_on_rank(*args: Any) -> str:
    """:func:`run_on_rank`, without what accelerators leave in a process; an error says what the script has said."""
    said = io.StringIO()
    try:
        with mock.patch.dict(os.environ), contextlib.redirect_stderr(said):
            return run_on_rank(*args) + said.getvalue()
    except AssertionError as error:
        raise AssertionError(said.getvalue()) from error
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def run(
    worlds: Worlds,
    folder: Path,
    ranks: int,
    ds_config: dict[str, Any] | None,
    *arguments: str,
    on_rank: Callable[..., str] = script_on_rank,
    launch: bool = False,
) -> list[Any]:
    """What every rank of the script reports; without ``ds_config`` the Trainer runs as one process.

    With ``launch`` it starts as `accelerate launch --use_deepspeed --deepspeed_config_file ds.json` does.
    """
    folder.mkdir(exist_ok=True)
    line = [str(SCRIPT), "--output_dir", "out", *ARGUMENTS, *arguments]
    environment = {"HF_HUB_OFFLINE": "1", **(LAUNCHED if launch else {})}
    if ds_config is None:
        line += ["--use_cpu"]
    else:
        (folder / "ds.json").write_text(json.dumps({**AUTO, "zero_optimization": {"stage": 0}, **ds_config}))
        line = ["ds_vpipe.run", *line, *([] if launch else ["--deepspeed", "ds.json"])]
    printed = worlds.run(ranks, on_rank, folder, line, ds_config is not None, environment)
    reports = [json.loads((folder / "out" / f"report-{rank}.json").read_text()) for rank in range(ranks)]
    return [{**report, "printed": text} for report, text in zip(reports, printed, strict=True)]


def saved(folder: Path, task: str) -> dict[str, torch.Tensor]:
    """The model that ``save_model()`` has written, all of it."""
    model, report = MODELS[task].from_pretrained(folder / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def pipeline(stages: int = 2, **block: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": stages}, "vpipe": block}


@pytest.mark.parametrize(
    ("task", "accumulation", "samples", "extra"),
    [
        ("mlm", "2", "27", []),
        ("clm", "1", "23", []),
        ("clm", "2", "21", ["--drawn", "true", "--dataloader_num_workers", "1"]),  # other tokens on every rank
        ("clm", "1", "21", ["--seq2seq", "true"]),  # which gathers what it evaluates by another function
        ("clm", "2", "21", ["--own_loss", "true"]),
        ("glue", "2", "24", []),
    ],
    ids=["mlm, M = 2", "clm", "clm, M = 2, drawn in workers", "clm, Seq2SeqTrainer", "clm, own loss", "glue, M = 2"],
)
def test_synchronous_training_is_that_of_one_process(
    worlds: Worlds, tmp_path: Path, task: str, accumulation: str, samples: str, extra: list[str]
) -> None:
    """Losses, rates, norms, metrics, predictions and weights; also where an epoch ends inside a batch."""
    line = ["--task", task, "--gradient_accumulation_steps", accumulation, "--samples", samples, *extra]
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *line)
    reports = run(worlds, tmp_path / "two", 2, pipeline(sync_mode="bsp"), *line)
    assert difference(saved(tmp_path / "two", task), saved(tmp_path / "alone", task)) <= 1e-5
    alone["history"][-2].pop("total_flos")  # tied weights count on each of their stages
    for report in reports:
        report["history"][-2].pop("total_flos")
        assert report["events"] == alone["events"]
        assert report["predictions"] == alone["predictions"]
        assert report["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
        assert len(report["history"]) == len(alone["history"])
        for found, wanted in zip(report["history"], alone["history"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_streamed_data(worlds: Worlds, tmp_path: Path) -> None:
    """Two pipelines read a data set without a length as one process with twice the batch does; it begins anew."""
    line = ["--task", "clm", "--samples", "24", "--iterable", "true", "--max_steps", "4", "--optim", "sgd"]
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *line, "--per_device_train_batch_size", "8")
    reports = run(worlds, tmp_path / "four", 4, pipeline(sync_mode="bsp"), *line)
    assert difference(saved(tmp_path / "four", "clm"), saved(tmp_path / "alone", "clm")) <= 1e-5
    for report in reports:
        assert report["events"] == alone["events"]
        assert report["predictions"] == alone["predictions"]
        assert report["loss"] == pytest.approx(alone["loss"], abs=1e-5)


def replayed(stage_of: dict[str, int], *args: Any) -> str:
    """The script in one process, with the reference as its training."""
    from trainer_replay import replaying

    with replaying(stage_of):
        return script_on_rank(*args)


@pytest.mark.parametrize(
    ("task", "partition", "replicas", "extra"),
    [
        ("glue", [3, 2], 1, ["--gradient_accumulation_steps", "2", "--samples", "27"]),  # epochs end inside a batch
        ("mlm", [2, 2, 1], 1, ["--samples", "24"]),
        ("clm", [2, 3], 2, ["--samples", "24", "--optim", "sgd", "--learning_rate", "0.1"]),
    ],
    ids=["glue, M = 2", "mlm, three stages, tied", "clm, two replicas, tied"],
)
def test_asynchronous_training_is_the_replay(
    worlds: Worlds, tmp_path: Path, task: str, partition: list[int], replicas: int, extra: list[str]
) -> None:
    """With the Trainer's schedule, clipping and share of a micro-batch; every rank tells the same."""
    stages, line = len(partition), ["--task", task, *extra]
    save = ["--save_strategy", "steps"]  # whose only checkpoint is that of the end: in between it would drain
    reports = run(worlds, tmp_path / "asp", stages * replicas, pipeline(stages, partition=partition), *line, *save)
    stage_of = stages_of_names(tmp_path / "asp" / "out", partition)
    line += ["--per_device_train_batch_size", str(4 * replicas)]
    run(worlds, tmp_path / "alone", 1, None, *line)
    (wanted,) = run(worlds, tmp_path / "replay", 1, None, *line, on_rank=partial(replayed, stage_of))
    found = saved(tmp_path / "asp", task)
    assert difference(found, saved(tmp_path / "replay", task)) <= 1e-6
    assert difference(found, saved(tmp_path / "alone", task)) > 1e-4, "late gradients make a difference"
    for report in reports:
        assert report["predictions"] == wanted["predictions"]
        for entry, other in zip(report["history"], wanted["history"], strict=True):
            assert entry.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)
        if replicas == 1:  # the loss also sees samples that fill up the last batch of several
            assert report["metrics"] == pytest.approx(wanted["metrics"], abs=1e-5)


def test_weights_are_cast_for_an_evaluation_when_nothing_is_in_flight(worlds: Worlds, tmp_path: Path) -> None:
    """The Trainer casts them, and optimizers put averages in their place, before the first micro-batch is evaluated."""
    line = ["--task", "clm", "--samples", "24"]
    plain = run(worlds, tmp_path / "plain", 2, pipeline(), *line)
    cast = run(worlds, tmp_path / "cast", 2, pipeline(), *line, "--bf16_full_eval", "--use_cpu")
    for one, other in zip(plain, cast, strict=True):
        assert one["metrics"]["eval_loss"] == pytest.approx(other["metrics"]["eval_loss"], rel=0.02)


def test_launches_and_further_accelerators_change_nothing(worlds: Worlds, tmp_path: Path) -> None:
    """What is logged in asp, also by `accelerate launch`, and where the script makes an accelerator of its own."""
    line = ["--task", "clm", "--samples", "21", "--max_steps", "5"]
    wanted = run(worlds, tmp_path / "plain", 2, pipeline(), *line)
    for name, launch in (("another", False), ("launched", True)):
        reports = run(worlds, tmp_path / name, 2, pipeline(), *line, "--another", "true", launch=launch)
        for report, other in zip(reports, wanted, strict=True):
            assert report["history"] == other["history"]
            assert report["batch_size"] == other["batch_size"] == 4


def test_resuming_is_going_on(worlds: Worlds, tmp_path: Path) -> None:
    """Bit for bit, from a checkpoint in the midst of an epoch; both drain where they save."""
    arguments = ["--task", "glue", "--gradient_accumulation_steps", "2", "--samples", "24"]
    arguments += ["--save_strategy", "steps", "--save_steps", "2"]
    through = run(worlds, tmp_path / "through", 2, pipeline(), *arguments)
    checkpoint = str(tmp_path / "through" / "out" / "checkpoint-2")
    resumed = run(worlds, tmp_path / "resumed", 2, pipeline(), *arguments, "--resume_from_checkpoint", checkpoint)
    assert difference(saved(tmp_path / "resumed", "glue"), saved(tmp_path / "through", "glue")) == 0
    assert [report["metrics"] for report in resumed] == [report["metrics"] for report in through]
    assert [report["events"] for report in resumed] == [report["events"][2:] for report in through]


def test_adapters(worlds: Worlds, tmp_path: Path) -> None:
    """LoRA: in bsp that of one process; in asp going on from a checkpoint, which has no frozen weights, is going on."""
    line = ["--task", "clm", "--lora", "true", "--gradient_accumulation_steps", "2", "--samples", "24"]
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *line)
    reports = run(worlds, tmp_path / "bsp", 2, pipeline(sync_mode="bsp"), *line)
    steps = ["--save_strategy", "steps", "--save_steps", "2"]
    run(worlds, tmp_path / "asp", 2, pipeline(), *line, *steps)
    checkpoint = tmp_path / "asp" / "out" / "checkpoint-2"
    run(worlds, tmp_path / "resumed", 2, pipeline(), *line, *steps, "--resume_from_checkpoint", str(checkpoint))
    names = ("alone", "bsp", "asp", "resumed")
    one, bsp, asp, resumed = (load_file(tmp_path / name / "out" / "adapter_model.safetensors") for name in names)
    assert difference(bsp, one) <= 1e-5
    assert difference(asp, one) > 1e-5
    assert difference(resumed, asp) == 0
    for report in reports:
        assert report["predictions"] == alone["predictions"]
        assert report["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
    states = [name for file in checkpoint.glob("global_step*/layer_*-model_states.pt") for name in torch.load(file)]
    assert any("lora_A" in name for name in states)
    assert not any("base_layer.weight" in name for name in states)


def test_adapters_of_a_classifier(worlds: Worlds, tmp_path: Path) -> None:
    """PEFT trains its head whole; the Trainer writes on one rank, at every checkpoint."""
    line = ["--task", "glue", "--lora", "true", "--samples", "24", "--save_strategy", "epoch"]
    run(worlds, tmp_path / "alone", 1, None, *line)
    run(worlds, tmp_path / "two", 2, pipeline(sync_mode="bsp"), *line)
    for file in ("adapter_model.safetensors", "checkpoint-6/adapter_model.safetensors"):
        one, two = (load_file(tmp_path / name / "out" / file) for name in ("alone", "two"))
        assert any("classifier" in name for name in one)
        assert difference(two, one) <= 1e-5


def told_nothing() -> str:
    """What a script gets that makes an engine for its accelerator without `ds_vpipe.run`."""
    from ds_vpipe.accelerators import own_config
    from ds_vpipe.config.deepspeed_json import DeepSpeedJson

    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())
        with pytest.raises(VPipeConfigError) as refused:
            own_config(DeepSpeedJson({}), 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    return str(refused.value)


def test_what_cannot_be_told_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    with pytest.raises(CaseFailed) as failed:
        run(worlds, tmp_path, 2, pipeline(stages=3))
    said = (text.splitlines() for text in failed.value.errors.values())
    lines = [line for text in said for line in text if "pipeline.stages" in line]
    assert len(lines) == 2, "one on every rank"
    assert all("got 3" in line and "the 2 ranks" in line for line in lines)
    (line,) = set(worlds.run(2, told_nothing))
    assert line.startswith("initialize(): called by Accelerate or Trainer, which takes the 2 ranks of a pipeline")


REFUSED = {
    "average_tokens_across_devices": "false",
    "include_num_input_tokens_seen": "true",
    "train_sampling_strategy": "batch_rebalance",
    "label_smoothing_factor": "0.1",
    "auto_find_batch_size": "true",
    "predict_with_generate": "true --seq2seq true --task t5 --do_eval true",
}


def refused_each(folder: Path, line: list[str], as_module: bool, environment: dict[str, str]) -> str:
    """What the script says with each of the arguments, with ``--deepspeed ds.json`` and by ``accelerate launch``."""
    said = []
    for words, variables in ((line, environment), (line[:-2], {**environment, **LAUNCHED})):
        for name, value in REFUSED.items():
            with pytest.raises(AssertionError) as refused:
                script_on_rank(folder, [*words, f"--{name}", *value.split()], as_module, variables)
            said.append(str(refused.value).splitlines()[-1])
    with mock.patch("transformers.__version__", "5.18.0"), pytest.raises(AssertionError) as refused:
        script_on_rank(folder, line, as_module, environment)
    said.append(str(refused.value).splitlines()[-1])
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / f"report-{os.environ['RANK']}.json").write_text("{}")
    return "\n".join(said)


def test_what_the_trainer_does_wrong_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    """By name, on every rank."""
    for report in run(worlds, tmp_path, 2, pipeline(), "--task", "clm", on_rank=refused_each):
        *lines, version = report["printed"].splitlines()
        for name, line in zip([*REFUSED] * 2, lines, strict=True):
            assert f"ds_vpipe: TrainingArguments({name}): got" in line
        assert 'ds_vpipe: version of transformers: got "5.18.0"; allowed: transformers>=5.19; pip install' in version


def test_what_deals_out_by_rank_is_refused() -> None:
    """Where every rank generates what it trains, and where the JSON names other ranks than stages."""
    shared = {"tensor_parallel": {"autotp_size": 2, "stages_of_a_pipeline": True}}
    args, finalized = SimpleNamespace(generation_batch_size=8), mock.Mock()
    with pytest.raises(VPipeConfigError, match="generation_batch_size: got 8; each rank would generate"):
        accelerators._finalize(SimpleNamespace(config=shared), finalized, args, None)
    finalized.assert_not_called()
    accelerators._finalize(SimpleNamespace(config={}), finalized, args, None)
    finalized.assert_called_once()
    accelerator = SimpleNamespace(num_processes=3, unwrap_model=None)
    with pytest.raises(VPipeConfigError, match="autotp_size: got 2; the ranks of a pipeline share their"):
        accelerators._set_up(accelerator, shared, 3)
    accelerator = mock.Mock(num_processes=4, dispatch_batches=None, state=SimpleNamespace(deepspeed_plugin=mock.Mock()))
    accelerator.state.deepspeed_plugin.hf_ds_config = None
    with pytest.raises(VPipeConfigError, match=r"with TrainingArguments.* not by accelerate launch"):
        accelerators._set_up(accelerator, {}, 2)


def monitored(*args: Any) -> str:
    """The script, with stand-ins for TensorBoard and W&B."""
    path = [*sys.path, str(SCRIPT.parent / "monitors")]
    absent: Any = {"torch.utils.tensorboard": None}  # so that the Trainer takes tensorboardX
    with mock.patch.object(sys, "path", path), mock.patch.dict(sys.modules, absent):
        return script_on_rank(*args)


def test_replicas_beside_stages(worlds: Worlds, tmp_path: Path) -> None:
    """Two pipelines of two stages train what one process with twice the batch does, and tell it once."""
    # A model that divides by the Trainer's number of tokens: of others it multiplies the loss by that of replicas.
    # With Adam, gradients that are zero but for rounding, those of keys' biases, would make a difference.
    task = ["--task", "clm", "--samples", "24", "--optim", "sgd", "--learning_rate", "0.1"]
    (alone,) = run(worlds, tmp_path / "alone", 1, None, *task, "--per_device_train_batch_size", "8")
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}}
    told = ("--disable_tqdm", "false", "--report_to", "all")
    ds_config = {**pipeline(sync_mode="bsp"), **monitor}
    reports = run(worlds, tmp_path / "four", 4, ds_config, *task, *told, on_rank=monitored)
    assert difference(saved(tmp_path / "four", "clm"), saved(tmp_path / "alone", "clm")) <= 1e-5
    assert reports[0]["steps"] == 6
    for text in ("'train_loss': ", "'grad_norm': ", "6/6 ["):
        assert [text in report["printed"] for report in reports] == [True, False, False, False], text
    assert [reports[0]["printed"].count(f"'{name}': ") for name in ("grad_norm", "train_loss")] == [6, 1]
    for name in ("train_loss", "lr"):
        with (tmp_path / "monitor" / f"Train_Samples_{name}.csv").open() as file:
            assert [int(samples) for samples, _ in list(csv.reader(file))[1:]] == [8, 16, 24, 32, 40, 48], name
    (file,) = (tmp_path / "four").glob("monitored-*.jsonl")
    assert file.name == "monitored-0.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert events.count(["wandb", "init", 0.0, 0]) == 1
    losses = [[entry["loss"], entry["step"]] for entry in reports[0]["history"] if "loss" in entry]
    for name in ("tensorboard", "wandb"):
        assert [event[2:] for event in events if event[:2] == [name, "train/loss"]] == losses, name
        assert sum(event[:2] == [name, "eval/loss"] for event in events) == 1, name
    for report in reports:
        assert report["events"] == alone["events"]
        assert report["predictions"] == alone["predictions"]
        for metric in ("eval_accuracy", "eval_counted"):  # the loss also sees samples that fill up the last batch
            assert report["metrics"][metric] == alone["metrics"][metric]
        assert report["loss"] == pytest.approx(alone["loss"], abs=1e-5)
