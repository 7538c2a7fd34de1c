"""Scripts run unchanged: by ``ds_vpipe.run`` in this process, and once as DeepSpeed's launcher starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launches import launched

from ds_vpipe.run import main

pytestmark = pytest.mark.mp

REPORT = """
import json, sys
import deepspeed
from helper import NUMBER
from pathlib import Path
report = {
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "path": sys.path[0],
    "number": NUMBER,
    "initialize": deepspeed.initialize.__module__,
}
Path(__file__).with_suffix(".json").write_text(json.dumps(report))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "helper.py").write_text("NUMBER = 7\n")
    path = folder / "train.py"
    path.write_text(REPORT)
    return path


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a run changes in this process."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed

    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    yield
    sys.modules.pop("helper", None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),
        (["--local_rank=3"], ["--lr", "0.1", "--local_rank=9"]),
        (["--local_rank=0"], ["-x", "train.py"]),
        (["--local-rank=3"], ["--lr", "0.1"]),  # as of torch.distributed.launch
    ],
)
def test_script_gets_its_arguments(script: Path, before: list[str], after: list[str]) -> None:
    assert main([*before, str(script), *after]) == 0
    report = json.loads(script.with_suffix(".json").read_text())
    assert report["argv"] == [str(script), *before, *after]
    assert report["name"] == "__main__"
    assert report["file"] == str(script)
    assert report["path"] == str(script.parent)
    assert report["number"] == 7
    assert report["initialize"].startswith("deepspeed")  # wrapped: looks like DeepSpeed's own


def test_initialize_is_replaced(script: Path) -> None:
    import deepspeed

    from ds_vpipe.initialization import deepspeed_initialize

    original = deepspeed_initialize()  # other tests may have replaced it
    script.write_text("import deepspeed\ndeepspeed.found = deepspeed.initialize\n")
    assert main([str(script)]) == 0
    found: Any = deepspeed.found
    del deepspeed.found
    assert found is not original
    assert found.__wrapped__ is deepspeed_initialize() is original


def test_a_script_may_put_a_function_around_initialize(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("""
import deepspeed

inner = deepspeed.initialize
deepspeed.initialize = lambda config: inner(config={**config, "vpipe": {"depth": 1}})
deepspeed.initialize({"train_batch_size": 1})
""")
    assert main([str(script)]) == 2
    assert "ds_vpipe: vpipe.depth: " in capsys.readouterr().err


def test_relative_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["train.py", "a"]) == 0
    report = json.loads(script.with_suffix(".json").read_text())
    assert report["argv"] == ["train.py", "a"]
    assert report["path"] == str(script.parent)


def test_the_first_path_stays_where_python_puts_none_before_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``PYTHONSAFEPATH`` the first is one of ``PYTHONPATH``."""
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith("_")}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**{**flags, "safe_path": True}))
    monkeypatch.setattr(sys, "path", [str(script.parent / "first"), *sys.path, str(script.parent)])
    assert main([str(script)]) == 0
    assert json.loads(script.with_suffix(".json").read_text())["path"] == str(script.parent / "first")


@pytest.mark.parametrize("before", [[], ["--local_rank=3"]])
def test_modules_as_with_python(script: Path, before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``-m package.train`` from the folder of the package, as ``python -m`` and the launcher have it."""
    package = script.parent / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(REPORT.replace("from helper", "from .helper"))
    script.with_name("helper.py").rename(package / "helper.py")
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path[1:]])
    assert main([*before, "-m", "package.train", "--lr", "0.1"]) == 0
    report = json.loads((package / "train.json").read_text())
    assert report["argv"] == [str(package / "train.py"), *before, "--lr", "0.1"]
    assert (report["name"], report["path"], report["number"]) == ("__main__", str(script.parent), 7)
    for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--local_rank=1"], ["nowhere.py"], ["--local_rank=1", "."], ["-m", "no.where"], ["--local_rank=1", "-m", ""]],
)
def test_missing_script(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ds_vpipe.run: ")
    assert "usage: deepspeed" in line
    assert arguments == [] or arguments[-1].startswith("--") or repr(arguments[-1]) in line


def test_module_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m"]) == 2
    assert capsys.readouterr().err.startswith("ds_vpipe.run: got module ''")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("VPipeConfigError('vpipe.partition: wrong')", 2),
        ("PipelinePeerError('vpipe.partition: wrong')", 1),
        ("VPipeError('vpipe.partition: wrong')", 1),
    ],
)
def test_error_is_one_line_with_the_rank(
    script: Path, error: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "5")
    script.write_text(f"from ds_vpipe import *\nraise {error}\n")
    capsys.readouterr()
    assert main([str(script)]) == status
    assert capsys.readouterr().err == "[rank 5] ds_vpipe: vpipe.partition: wrong\n"


def test_wrong_block(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    config = script.with_name("config.json")
    config.write_text(json.dumps({"train_batch_size": 1, "vpipe": {"sync_mod": "asp"}}))
    script.write_text(f"import deepspeed\ndeepspeed.initialize(model=None, config={str(config)!r})\n")
    assert main([str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('[rank 1] ds_vpipe: vpipe.sync_mod: got "asp"; unknown key, did you mean "sync_mode"?')
    config.write_text(json.dumps({"train_batch_size": 1, "vpipe": {}}))
    assert main([str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("got NoneType, allowed is a torch.nn.Module; pass the model to train")
    script.write_text(script.read_text().replace("model=None", "model=None, mpu=object()"))
    assert main([str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "initialize(mpu): got a object, allowed with a vpipe block is None" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "the file cannot be read: No such file"), ('{"vpipe": {}, "vpipe": {}}', 'key "vpipe" is given twice')],
)
def test_wrong_file(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None, says: str
) -> None:
    path = script.parent / "nope.json"
    if content is not None:
        path.write_text(content)
    script.write_text(f"import deepspeed\ndeepspeed.initialize(config={str(path)!r})\n")
    monkeypatch.setenv("RANK", "3")
    assert main([str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'[rank 3] ds_vpipe: DeepSpeed JSON: got "{path}"; ')
    assert says in line


def test_a_run_without_a_pipeline_says_so_once(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the JSON with the block does not come to DeepSpeed, or has none."""
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        capsys.readouterr()
        assert main([str(script)]) == 0
        assert capsys.readouterr().err.count("no pipeline was made") == lines


def test_an_interrupt_is_one_line(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    script.write_text("raise KeyboardInterrupt\n")
    capsys.readouterr()
    assert main([str(script)]) == 130
    assert capsys.readouterr().err == "[rank 1] ds_vpipe: interrupted by SIGINT, as Ctrl-C sends it\n"


def test_other_errors_and_exits_are_the_scripts_own(script: Path) -> None:
    script.write_text("raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        main([str(script)])
    script.write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(SystemExit) as exit_:
        main([str(script)])
    assert exit_.value.code == 7
    script.write_text("import sys\nsys.exit('')\n")  # which is 1
    with pytest.raises(SystemExit):
        main([str(script)])


class Arguments(dict[str, Any]):
    """Arguments whose attributes are items, and cannot be deleted."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class ComputingArguments:
    """Arguments that compute the configuration, as GPT-NeoX's do."""

    @property
    def deepspeed_config(self) -> str:
        return "ds.json"


class DerivedArguments(ComputingArguments):
    """Arguments of a class that does not have the property itself."""


@dataclass(frozen=True)
class FrozenArguments:
    """Arguments that a script cannot change."""

    deepspeed_config: Any = "ds.json"


@pytest.mark.parametrize("kind", [Arguments, ComputingArguments, DerivedArguments, FrozenArguments])
def test_a_configuration_in_arguments_of_any_class(kind: type[Any]) -> None:
    from ds_vpipe.initialization import _as_configuration

    arguments = Arguments(deepspeed_config="ds.json") if kind is Arguments else kind()
    with _as_configuration({"args": arguments}, {"read": True}):
        assert arguments.deepspeed_config == {"read": True}
    assert arguments.deepspeed_config == "ds.json"
    assert kind is not Arguments or arguments == {"deepspeed_config": "ds.json"}
    assert kind is not DerivedArguments or "deepspeed_config" not in vars(kind)


TRAIN = """
import argparse, json, os, sys
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--vpipe", action="store_true")
parser.add_argument("--out")
args = parser.parse_args()
deepspeed.init_distributed(dist_backend="gloo")

def one(vpipe):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
    module = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=torch.nn.CrossEntropyLoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    if vpipe:
        config["vpipe"] = {}
    engine, *_ = deepspeed.initialize(args=args, model=module, config=config)
    torch.manual_seed(2)
    batches = iter([(torch.randn(2, 4), torch.randint(2, (2,))) for _ in range(6)])
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    kind = type(engine)
    return [f"{kind.__module__}.{kind.__name__}", losses]

report = {"local_rank": args.local_rank, "stock": one(False), "vpipe": one(True)}
open(args.out, "w").write(json.dumps(report))
sys.exit(0)
"""


def test_as_the_launcher_starts_it(tmp_path: Path) -> None:
    """Through the launcher itself are test_restarts.py, test_plain_scripts.py and test_gpt2.py."""
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(TRAIN)
    launched(tmp_path, ["--num_accelerators", "1", "--module", "ds_vpipe.run", str(script), "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["local_rank"] == 0
    assert report["stock"][0] == "deepspeed.runtime.pipe.engine.PipelineEngine"
    assert report["vpipe"][0] == "ds_vpipe.engine.engine.VPipeEngine"
    assert report["stock"][1] == report["vpipe"][1]
