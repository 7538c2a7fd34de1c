"""From vPipe's files to a DeepSpeed JSON, devices and a command: every field, every mode."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vpipe_runs import FOUR_GPUS, MAPS, write_run

from ds_vpipe.__main__ import main
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.migration.vpipe import LAYERS_OF_MODEL, MODEL_OF_LAYERS, Hosts
from ds_vpipe.migration.vpipe_files import FIELDS
from ds_vpipe.models.bert.model import SIZE_NAMES, bert_config
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.automatic import settled

Convert = Callable[..., dict[str, Any]]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Converts a run with changed fields and returns what ``--json`` prints."""
    monkeypatch.chdir(tmp_path)

    def run(variant: str = "vpipe", options: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
        path = write_run(Path(), variant, **changes)
        assert main(["convert", str(path), "--json", "--dry-run", *options]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def run(options: tuple[str, ...] = (), **changes: Any) -> str:
        path = write_run(Path(), **changes)
        assert main(["convert", str(path), "--dry-run", *options]) == 2
        streams = capsys.readouterr()
        assert (streams.out, streams.err.count("\n")) == ("", 1)
        return streams.err

    return run


def remarks(result: dict[str, Any], field: str) -> list[str]:
    return [f"{r['becomes'] or 'nothing'}; {r['why']}" for r in result["remarks"] if r["field"] == field]


def four_by(replicas: int, order: list[int] | None = None) -> dict[str, Any]:
    ranks = iter(order or range(4 * replicas))
    return {**MAPS, "stage_to_rank_map": {str(stage): list(itertools.islice(ranks, replicas)) for stage in range(4)}}


# Whole files


def test_values_that_json_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_run(Path())
    path.write_text(f"{path.read_text()}'started': 2020-01-02\n'again': &again [*again]\n")
    assert main(["convert", str(path), "--json", "--dry-run"]) == 0
    values = {remark["field"]: remark["value"] for remark in json.loads(capsys.readouterr().out)["remarks"]}
    assert (values["started"], values["again"]) == ("datetime.date(2020, 1, 2)", "[[...]]")


def test_the_command_takes_any_path_and_bash_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell sees anything but words; a stand-in prints those that the launcher gets."""
    (tmp_path / "it's $(a) folder").mkdir()
    monkeypatch.chdir(tmp_path / "it's $(a) folder")
    data = "da ta/$(touch x)'`id`\"\nend"
    path = write_run(Path(), data_dir="HERE")
    path.write_text(path.read_text().replace("'HERE'", json.dumps(data)))
    assert main(["convert", str(path), "-o", "out put"]) == 0
    (tmp_path / "deepspeed").write_text('#!/bin/bash\nprintf "%s\\0" "$PWD" "$@"\n')
    (tmp_path / "deepspeed").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "out put/launch.sh", "two words"], env=environment, capture_output=True, text=True)
    folder, *words, _ = done.stdout.split("\0")
    assert (done.returncode, folder) == (0, str(Path.cwd()))
    assert words[words.index("--deepspeed_config") + 1] == "out put/ds_config.json"
    assert words[words.index("--data_dir") + 1] == f"bert/{data}"
    assert words[-1] == "two words"


@pytest.mark.parametrize("variant", FOUR_GPUS)
def test_the_shipped_files(convert: Convert, variant: str) -> None:
    sync_mode, batch_size, partition, ratios = FOUR_GPUS[variant]
    result = convert(variant)
    content = result["ds_config"]
    block = VPipeConfig.parse(content["vpipe"])
    block.check_sizes(4, 49)
    pipeline = block.pipeline(4, content["gradient_accumulation_steps"])
    refuse_unsupported(DeepSpeedJson(content), block, 4)
    assert (block.sync_mode, pipeline.partition) == (sync_mode, tuple(partition))
    assert (pipeline.recompute_ratio, pipeline.depths) == (tuple(ratios), (3, 2, 1, 0))
    assert content["train_micro_batch_size_per_gpu"] == batch_size
    assert content["gradient_accumulation_steps"] == {"asp": 1, "bsp": 32}[sync_mode]
    assert content["steps_per_print"] == {"asp": 100, "bsp": 3}[sync_mode]
    params = {"lr": 0.05, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0}
    assert content["optimizer"] == {"type": "Lamb", "params": params}
    assert content["gradient_clipping"] == 1.0
    schedule = {"total_num_steps": 36320, "warmup_num_steps": 7264, "degree": 0.5}
    assert content["scheduler"] == {"type": "PolyWarmupLR", "params": schedule}
    assert result["stages"] == 4
    words = result["command"]
    assert words[:3] == ["deepspeed", "--num_accelerators", "4"]
    assert words[words.index("--config_name") :][:4] == ["--config_name", "large", "--num_train_epochs", "40"]
    assert words[words.index("--data_dir") + 1] == "bert/data/hdf5/bookscorpus"
    assert words[words.index("--output_dir") + 1] == f"bert/output/bert_4{variant}"


# Paths begin in "directory", and "config_file" and "partition" are read; the others mean the same here.
CARRIED_OVER = {"directory", "config_file", "partition", "batch_size", "learning_rate", "print_frequency", "recompute"}


@pytest.mark.parametrize("model_type", ["bert", "translation", "image_classification", "speech_to_text"])
def test_every_field_is_carried_over_or_spoken_of(convert: Convert, model_type: str) -> None:
    flags = ("lr_warmup", "recompute", "macrobatch", "synthetic_data", "no_input_pipelining")
    others = {**dict.fromkeys(flags, True), "verbose_frequency": 10, "surprise": 3, "path": 4}
    machines = [f"a:{gpu}" for gpu in range(1, 5)]
    options = () if model_type == "bert" else ("--root", "bert/..")
    result = convert(options=options, model_type=model_type, **others, distributed_backend="nccl", machines=machines)
    same = CARRIED_OVER | {"sync_mode", "model_type"}
    # BERT's script has --synthetic, and vPipe's always trains with this schedule.
    same |= {"synthetic_data", "learning_rate_policy"} if model_type == "bert" else {"weight_decay"}
    assert {remark["field"] for remark in result["remarks"]} >= {*FIELDS, "surprise", "path"} - same
    assert remarks(result, "surprise") == ["nothing; vPipe does not read it"]


def test_models_of_the_published_splits() -> None:
    assert {name: 2 * bert_config(name).num_hidden_layers + 1 for name in SIZE_NAMES} == LAYERS_OF_MODEL
    assert {LAYERS_OF_MODEL[name]: name for name in ("large", "large-48l")} == MODEL_OF_LAYERS


def test_the_model_has_the_layers_of_the_split(convert: Convert, refused: Callable[..., str]) -> None:
    assert '--bert-config: got "tiny"; it has 9 layers; allowed: a BERT of 49' in refused(("--bert-config", "tiny"))
    assert '--bert-config: got "nonexist"; the file cannot be read' in refused(("--bert-config", "nonexist"))
    for count, line in ((None, "num_hidden_layers in my.json: got null"), (12, "it has 25 layers; allowed: a BERT of")):
        Path("my.json").write_text(json.dumps({"num_hidden_layers": count}))
        assert line in refused(("--bert-config", "my.json"))
    Path("my.json").write_text(json.dumps({"num_hidden_layers": 24}))
    command = convert(options=("--bert-config", "my.json"))["command"]
    assert command[command.index("--config_name") + 1] == "my.json"


def test_defaults_are_those_of_vpipes_script(convert: Convert) -> None:
    left = dict.fromkeys(("batch_size", "learning_rate", "weight_decay", "epochs", "print_frequency"))
    left["learning_rate_policy"] = None
    result = convert(**left)
    assert result["ds_config"]["train_micro_batch_size_per_gpu"] == 8
    assert result["ds_config"]["optimizer"]["params"]["lr"] == 0.1
    assert result["ds_config"]["optimizer"]["params"]["weight_decay"] == 1e-4
    assert result["ds_config"]["steps_per_print"] == 10
    assert "--num_train_epochs 100" in " ".join(result["command"])
    assert result["ds_config"]["scheduler"]["type"] == "PolyWarmupLR"


# Modes


def test_macrobatch_updates_after_two_micro_batches(convert: Convert) -> None:
    result = convert(macrobatch=True)
    assert result["ds_config"]["gradient_accumulation_steps"] == 2
    assert result["ds_config"]["steps_per_print"] == 50
    (line,) = remarks(result, "macrobatch")
    assert line.startswith("gradient_accumulation_steps 2;")
    assert "stage 0 keeps 3 versions" in line
    assert "write 3 for two exact versions" in line
    maps = {**MAPS, "stage_to_depth_map": {"0": 6, "1": 4, "2": 2, "3": 0}}
    (line,) = remarks(convert(macrobatch=True, maps=maps), "macrobatch")
    assert "stage 0 keeps 4 versions" in line
    assert "write 6 for two exact versions" in line
    for result, steps in (
        (convert("gpipe", macrobatch=True), 32),
        (convert(macrobatch=True, no_input_pipelining=True), 1),
    ):
        assert result["ds_config"]["gradient_accumulation_steps"] == steps
        assert remarks(result, "macrobatch") == ["nothing; bsp keeps one version of the weights anyway"]


def test_without_input_pipelining_one_micro_batch_is_in_the_pipeline(convert: Convert) -> None:
    content = convert(no_input_pipelining=True)["ds_config"]
    assert (content["vpipe"]["sync_mode"], content["gradient_accumulation_steps"]) == ("bsp", 1)
    assert "weight_sync" not in content["vpipe"]
    VPipeConfig.parse(content["vpipe"])
    assert "the norm of the whole model here" in remarks(convert(no_input_pipelining=True), "model_type")[0]
    content = convert("gpipe", no_input_pipelining=True)["ds_config"]
    assert (content["vpipe"]["sync_mode"], content["gradient_accumulation_steps"]) == ("bsp", 32)


@pytest.mark.parametrize("kind", ["bert", "translation", "image_classification"])
def test_late_gradients_are_left_as_vpipe_leaves_them(convert: Convert, kind: str) -> None:
    """Whatever this project would choose against them, also if the optimizer or a schedule's length is written in."""
    content = convert(model_type=kind, options=("--root", "."))["ds_config"]
    content |= {"optimizer": {"type": "Adam"}, "scheduler": {"type": "PolyWarmupLR", "params": {"total_num_steps": 90}}}
    pipeline = Pipeline("asp", 4, content["gradient_accumulation_steps"])
    block, choice = settled(VPipeConfig.parse(content["vpipe"]), pipeline, DeepSpeedJson(content))
    assert (block.staleness, choice.settings, choice.line) == (None, None, "")
    del content["vpipe"]["staleness"]
    assert settled(VPipeConfig.parse(content["vpipe"]), pipeline, DeepSpeedJson(content))[1].settings


def test_recompute_is_all_but_the_last_stage(convert: Convert) -> None:
    result = convert(recompute=True)
    assert result["ds_config"]["vpipe"]["recompute_ratio"] == [1, 1, 1, 0]
    (line,) = remarks(result, "recompute_ratio in vgpus=4/vpipe.json")
    assert line.startswith("vpipe.recompute_ratio [1, 1, 1, 0]; ")


def test_a_split_that_plan_wrote_is_carried_over(convert: Convert) -> None:
    split = {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0], "swap_ratio": 0.5}
    block = convert(split=split)["ds_config"]["vpipe"]
    assert {name: block[name] for name in split} == {**split, "swap_ratio": [0.5] * 4}


def test_depths(convert: Convert) -> None:
    maps = {**MAPS, "stage_to_depth_map": {"0": 6, "1": 4, "2": 2, "3": 0}}
    assert convert(maps=maps)["ds_config"]["vpipe"]["stage_to_depth_map"] == [6, 4, 2, 0]
    result = convert("gpipe", maps=maps)
    assert "stage_to_depth_map" not in result["ds_config"]["vpipe"]
    assert remarks(result, "stage_to_depth_map")[0].startswith("nothing")


@pytest.mark.parametrize(
    ("policy", "scheduler"),
    [("linear", "LinearWarmupLR"), ("cosine", "CosineWarmupLR"), ("constant", "ConstantWarmupLR")],
)
def test_policies(convert: Convert, policy: str, scheduler: str) -> None:
    result = convert(learning_rate_policy=policy, lr_warmup=True)
    entry = result["ds_config"]["scheduler"]
    assert (entry["type"], entry["params"]["warmup_num_steps"]) == (scheduler, 7264)
    assert "trained with polynomial" in remarks(result, "learning_rate_policy")[0]
    assert remarks(result, "lr_warmup")[0].startswith("nothing")


def test_a_policy_by_epochs_is_left_to_the_user(convert: Convert, refused: Callable[..., str]) -> None:
    result = convert(learning_rate_policy="step")
    assert "scheduler" not in result["ds_config"]
    assert "StepWarmupLR" in remarks(result, "learning_rate_policy")[0]
    assert 'learning_rate_policy: got "poly"' in refused(learning_rate_policy="poly")


def test_schedules_are_those_of_this_project(convert: Convert) -> None:
    from ds_vpipe import lr_policies as policies

    for policy in ("polynomial", "linear", "cosine", "constant"):
        assert policies.lr_policy(convert(learning_rate_policy=policy)["ds_config"]) is not None
    rates = policies.lr_policy(convert()["ds_config"])
    assert rates.factor(3632) == pytest.approx(0.5)
    assert rates.factor(27240) == pytest.approx(0.5)


# Stages without a partition file, and replicas


def test_modules_are_counted_where_there_is_no_partition(convert: Convert, refused: Callable[..., str]) -> None:
    modules = [stage for stage in range(4) for _ in range(5)] + [3]
    maps = {**MAPS, "module_to_stage_map": modules}
    result = convert(maps=maps, partition=None, options=("--bert-config", "tiny"))
    assert result["ds_config"]["vpipe"]["partition"] == [5, 5, 5, 5]
    assert "the model has to have 20" in remarks(result, "module_to_stage_map")[0]
    result = convert(partition=None, options=("--bert-config", "tiny"))
    assert result["ds_config"]["vpipe"]["partition"] == "parameters"
    assert "name the model: --bert-config" in refused(partition=None)


def test_replicas(convert: Convert, refused: Callable[..., str]) -> None:
    machines = [f"node{rank // 4}:{rank % 4}" for rank in range(8)]
    result = convert(maps=four_by(2), machines=machines)
    assert (result["stages"], result["hosts"]) == (4, {"node0": [0, 1, 2, 3], "node1": [0, 1, 2, 3]})
    words = result["command"]
    assert words[words.index("--num_stages") + 1] == "4"
    assert not remarks(result, "stage_to_rank_map")
    result = convert(maps=four_by(2, [0, 4, 1, 5, 2, 6, 3, 7]), machines=machines)
    assert "order the lines of the hostfile by stage" in remarks(result, "stage_to_rank_map")[0]
    result = convert(config_file=None, machines=machines)
    assert result["command"][result["command"].index("--num_stages") + 1] == "4"
    assert "machines: got 8; stage_to_rank_map in vgpus=4/mp_conf.json has 4 ranks" in refused(machines=machines)
    assert "a multiple of 4" in refused(machines=machines[:6], config_file=None)
    uneven = {**MAPS, "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3], "3": [4]}}
    assert "uneven replication has no counterpart" in refused(maps=uneven, machines=machines[:5])


def test_the_output_is_a_folder(refused: Callable[..., str]) -> None:
    Path("out").touch()
    assert 'argument -o/--output: got "out"; allowed: a folder, new or there' in refused(("-o", "out"))


def test_files_that_do_not_fit_each_other(refused: Callable[..., str]) -> None:
    line = refused(split={"partition": [25, 24]})
    assert "config_file: got \"vgpus=4/mp_conf.json\"; it has 4 stages and the partition 2" in line  # fmt: skip
    line = refused(split={"partition": [12, 13, 13, 10]})
    assert "layers: got 48; allowed: 49 (large), 97 (large-48l); name the model" in line


# Machines


def test_several_hosts(convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines = ["b:0", "b:1", "a:0", "a:1"]
    result = convert(machines=machines)
    assert result["command"][:5] == ["deepspeed", "--hostfile", "bert_4vpipe/hostfile", "--master_addr", "b"]
    assert main(["convert", str(write_run(tmp_path, machines=machines)), "-o", "new/folder"]) == 0
    folder = tmp_path / "new" / "folder"
    assert (folder / "hostfile").read_text() == "b slots=2\na slots=2\n"
    assert f"    export DS_ENV_FILE={folder}/deepspeed_env\n" in (folder / "launch.sh").read_text()
    assert (folder / "deepspeed_env").read_text() == "OMP_NUM_THREADS=1\n"
    capsys.readouterr()


def test_deepspeed_reads_the_hostfile_and_the_devices(convert: Convert) -> None:
    machines = ["v402:5", "v402:4", "v401:1", "v401:3"]
    result = convert(machines=machines)
    from deepspeed.launcher.runner import _parse_hostfile, parse_inclusion_exclusion  # prints

    hosts = Hosts.of(machines)
    pool = _parse_hostfile(hosts.hostfile().splitlines())
    assert parse_inclusion_exclusion(pool, hosts.include(), "") == {"v402": [4, 5], "v401": [1, 3]}
    assert result["command"][3:5] == ["--include", "v402:4,5@v401:1,3"]
    assert "vPipe did not read the GPU's number" in remarks(result, "machines")[0]


def test_one_host_needs_neither_hostfile_nor_ssh(convert: Convert) -> None:
    result = convert(machines=["big:0", "big:1", "big:2", "big:3"])
    assert result["command"][:3] == ["deepspeed", "--num_accelerators", "4"]
    assert remarks(result, "machines")[0].startswith("start the command on big")
    result = convert(machines=["big:0", "big:1", "big:2", "big:4"])
    assert result["command"][:3] == ["deepspeed", "--include", "localhost:0,1,2,4"]


def test_localhost_among_others(convert: Convert) -> None:
    result = convert(machines=["localhost:0", "localhost:1", "a:0", "a:1"])
    assert "--master_addr" not in result["command"]
    assert "cannot reach it by that name" in remarks(result, "machines")[0]


# Other models, and PipeDream


def test_other_models_get_a_command_for_their_script(convert: Convert) -> None:
    result = convert(model_type="image_classification", options=("--root", "."))
    assert result["command"][3:6] == ["--module", "ds_vpipe.run", "YOUR_SCRIPT.py"]
    assert result["ds_config"]["optimizer"]["type"] == "SGD"
    assert "scheduler" not in result["ds_config"]
    assert "degree" in remarks(result, "learning_rate_policy")[0]
    assert "optimizer" not in convert(model_type="speech_to_text")["ds_config"]


def test_a_pipedream_run(tmp_path: Path, convert: Convert) -> None:
    stages = tmp_path / "image_classification" / "models"
    stages.mkdir(parents=True)
    maps = {"module_to_stage_map": [0, 0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2, 3]}}
    (stages / "conf.json").write_text(json.dumps(maps))
    result = convert(
        directory=None,
        partition=None,
        sync_mode=None,
        config_file="models/conf.json",
        model_type="image_classification",
    )
    block = {"sync_mode": "asp", "weight_sync": "stash", "staleness": "off", "partition": [2, 1]}
    assert result["ds_config"]["vpipe"] == block


# Files


def test_paths_in_the_yaml(tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(partition="vgpus=4/other.json")
    assert 'bert_4vpipe.yml: partition: got "vgpus=4/other.json"; there is no bert/vgpus=4/other.json' in line
    assert line.endswith("name the folder in which driver.py was started: --root DIR\n")
    away = tmp_path / "away"
    path = write_run(away)
    moved = path.rename(tmp_path / "moved.yml")
    (tmp_path / "bert" / "vgpus=4" / "vpipe.json").unlink()
    assert main(["convert", str(moved), "--dry-run"]) == 2
    assert "there is no bert/vgpus=4/vpipe.json" in capsys.readouterr().err
    assert main(["convert", str(moved), "--dry-run", "--root", str(away)]) == 0
    assert f"--data_dir {away}/bert/data/hdf5/bookscorpus" in capsys.readouterr().out
    assert not (tmp_path / "moved").exists()


def test_synthetic_data(convert: Convert) -> None:
    for result in (convert(options=("--synthetic",)), convert(synthetic_data=True)):
        assert "--synthetic" in result["command"]
        assert "--data_dir" not in result["command"]
        assert remarks(result, "data_dir")[0].startswith("nothing")


def test_files_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert" / "data" / "hdf5" / "bookscorpus").mkdir(parents=True)
    assert main(["convert", str(write_run(Path()))]) == 0
    *report, _, written, to_train = capsys.readouterr().out.splitlines()
    folder = tmp_path / "bert_4vpipe"
    names = ["ds_config.json", "hostfile", "conversion.txt", "launch.sh"]
    assert written == f"written: {', '.join(f'bert_4vpipe/{name}' for name in names)}"
    assert (folder / "conversion.txt").read_text().splitlines() == report
    assert "compress_activations false -> nothing; vPipe does not read it" in report
    text = (folder / "ds_config.json").read_text()
    assert json.loads(text)["vpipe"]["partition"] == [12, 13, 13, 11]
    assert '    "partition": [12, 13, 13, 11],\n' in text
    assert (folder / "hostfile").read_text() == "localhost slots=4\n"
    script = (folder / "launch.sh").read_text()
    assert f"cd {tmp_path}\n" in script
    assert script.endswith(f'exec {to_train.removeprefix("to train: ")} "$@"\n')
    assert (folder / "launch.sh").stat().st_mode & 0o111
