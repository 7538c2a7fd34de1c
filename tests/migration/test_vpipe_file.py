"""The YAML files of vPipe and PipeDream: as shipped, as edited by hand, and wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from vpipe_runs import fields, yaml_text

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.migration.vpipe_files import VPipeFile, plain_yaml, read_vpipe_file

SHIPPED = yaml_text(fields())


def read(tmp_path: Path, text: str) -> VPipeFile:
    path = tmp_path / "run.yml"
    path.write_text(text, encoding="utf-8")
    return read_vpipe_file(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(VPipeConfigError) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_a_shipped_file(tmp_path: Path) -> None:
    file = read(tmp_path, SHIPPED)
    assert SHIPPED.startswith("'directory': 'bert'\n'log_directory': 'output'\n")
    assert (file.sync_mode, file.batch_size, file.learning_rate) == ("asp", 16, 0.05)
    assert file.machines == [f"localhost:{gpu}" for gpu in range(4)]
    assert (file.partition, file.config_file) == ("vgpus=4/vpipe.json", "vgpus=4/mp_conf.json")
    assert list(file.given) == list(fields())


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("\n", ",\n"),
        lambda text: text.replace("\n", ", # why\n"),
        lambda text: text.replace("': ", "':\t"),
        lambda text: text.replace("\n", "\t\n").replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: "# a comment, with commas,\n\n" + text,
        lambda text: "{\n" + text.replace("\n", ",\n") + "}\n",
        lambda text: text.replace("['localhost:0', ", "[\n  'localhost:0',\n\t"),
        lambda text: text + "'lr_warmup': None\n",
        lambda text: text.replace("'", '"'),
        lambda text: re.sub("'([a-z_]+)':", r"\1:", text),
    ],
    ids=["commas", "comments", "tabs", "windows", "mark", "comment", "braces", "list", "none", "double", "bare"],
)
def test_edited_by_hand(tmp_path: Path, edit: Any) -> None:
    expected = read(tmp_path, SHIPPED)
    assert read(tmp_path, edit(SHIPPED)) == expected


def test_texts_keep_their_commas_and_quotes() -> None:
    text = "'a': 'x, y,'\nb: it's, fine\nc: [1,\n 2,\n 3]\nd: \"p, 'q',\"\ne: {f: 1, g: 2},\n"
    assert yaml.safe_load(plain_yaml(text)) == {
        "a": "x, y,",
        "b": "it's, fine",
        "c": [1, 2, 3],
        "d": "p, 'q',",
        "e": {"f": 1, "g": 2},
    }


def test_pipedreams_file_has_no_mode_and_no_partition(tmp_path: Path) -> None:
    text = yaml_text(fields(directory=None, sync_mode=None, partition=None, model_type="translation"))
    file = read(tmp_path, text)
    assert (file.sync_mode, file.partition) == ("asp", None)


def test_random_tokens_need_no_data(tmp_path: Path) -> None:
    assert "data_dir" in refusal(tmp_path, yaml_text(fields(data_dir=None)))
    assert read(tmp_path, yaml_text(fields(data_dir=None, synthetic_data=True))).synthetic_data


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    line = refusal(tmp_path, f"{SHIPPED}'x': !!python/object/apply:os.system ['touch {marker}']\n")
    assert "it is not plain YAML" in line
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"machines": None}, "run.yml: machines: got null; allowed: a list of different 'HOST:GPU'; add 'machines'"),
        ({"sync_mode": None}, "run.yml: sync_mode: got null; allowed: asp or bsp; add 'sync_mode': ... to the file"),
        ({"sync_mode": "ssp"}, 'run.yml: sync_mode: got "ssp"; allowed: asp or bsp; write one of them'),
        ({"machines": "localhost:0"}, 'run.yml: machines: got "localhost:0"; allowed: a list'),
        ({"machines": []}, "run.yml: machines: got []; allowed: a list"),
        ({"machines": ["a:0", "a:0"]}, 'run.yml: machines: got ["a:0", "a:0"]; allowed: a list of different'),
        ({"machines": ["a"]}, 'run.yml: machines: got ["a"]'),
        ({"machines": ["a:x"]}, 'run.yml: machines: got ["a:x"]'),
        ({"machines": ["-F/x:0"]}, 'run.yml: machines: got ["-F/x:0"]'),
        ({"machines": ["a b:0"]}, 'run.yml: machines: got ["a b:0"]'),
        ({"machines": ["$(id):0"]}, 'run.yml: machines: got ["$(id):0"]'),
        ({"machines": ["a;id:0"]}, 'run.yml: machines: got ["a;id:0"]'),
        ({"machines": ["a:99999999999"]}, 'run.yml: machines: got ["a:99999999999"]'),
        ({"batch_size": "16"}, 'run.yml: batch_size: got "16"; allowed: a whole number >= 1, without quotes'),
        ({"batch_size": 0}, "run.yml: batch_size: got 0;"),
        ({"epochs": True}, "run.yml: epochs: got true;"),
        ({"learning_rate": -1.0}, "run.yml: learning_rate: got -1.0; allowed: a number >= 0"),
        ({"learning_rate": float("inf")}, "run.yml: learning_rate: got Infinity; allowed: a number"),
        ({"recompute": "yes"}, 'run.yml: recompute: got "yes"; allowed: True or False'),
        ({"model_type": "gpt"}, 'run.yml: model_type: got "gpt"; allowed: bert, translation'),
        ({"distributed_backend": "mpi"}, 'run.yml: distributed_backend: got "mpi"; allowed: gloo or nccl'),
        ({"partition": None, "config_file": None}, "run.yml: partition: got null; allowed: partition or config_file"),
        ({"partition": 3}, "run.yml: partition: got 3; allowed: a text; write it in quotes"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    text = yaml_text(fields(**changes)).replace(": inf\n", ": .inf\n")
    assert refusal(tmp_path, text).startswith(line)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it holds no object"),
        ("[1, 2]", "it holds no object"),
        ("'a': [1\n", "it is not plain YAML"),
        (SHIPPED + "'epochs': 3\n", "the key 'epochs' is there twice"),
        (SHIPPED + "'epochs': 3\n", f"line {SHIPPED.count(chr(10)) + 1}, column 1"),
        (SHIPPED.replace("0.05", "5e-2"), 'learning_rate: got "5e-2"; allowed: a number >= 0, without quotes'),
        (SHIPPED.replace("sync_mode", "sync-mode"), "did you mean \"sync_mode\"?"),
        ("[" * 5000, "it is not plain YAML"),
    ],
)  # fmt: skip
def test_other_texts_are_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match=r"nowhere\.yml.*No such file.*correct the path"):
        read_vpipe_file(tmp_path / "nowhere.yml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VPipeConfigError, match="it is not plain YAML"):
        read_vpipe_file(tmp_path / "binary.yml")
