"""Export of a checkpoint to one state dict, against the weights that the engine had."""

from __future__ import annotations

import resource
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_exactness import OPTIMIZERS
from test_reshape import BF16, observe, same, union
from torch import nn
from worlds import Worlds

from ds_vpipe.checkpoints.optimizer_states import ParameterState
from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint
from ds_vpipe.export import main

pytestmark = pytest.mark.mp

PRECISIONS = {"fp32": {}, "bf16": BF16}


class Shared(nn.Module):
    """One weight under two names, a buffer of integers, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one = toy.seeded(5, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN))
        self.two = nn.Linear(toy.HIDDEN, toy.HIDDEN)
        self.two.weight = self.one.weight
        self.frozen = toy.seeded(6, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN)).requires_grad_(False)
        self.register_buffer("calls", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen(torch.tanh(self.two(torch.tanh(self.one(x)))))


def vocabulary(layer: toy.Embed, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.embedding.weight)


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.mean(1).float(), labels)


def tied_model(stages: int) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    specs = [
        TiedLayerSpec("word", toy.Embed, 100, tied_weight_attr=["embedding.weight"]),
        LayerSpec(toy.Scale, 110),
        torch.relu,
        LayerSpec(Shared),
        LayerSpec(toy.Scale, 130),
        TiedLayerSpec("word", toy.Embed, 100, forward_fn=vocabulary, tied_weight_attr=["embedding.weight"]),
    ]
    return PipelineModule(specs, num_stages=stages, loss_fn=loss, partition_method="uniform")


def save(folder: str, partition: list[int], again: list[int]) -> list[dict[str, Any]]:
    """Train and save in each precision, and load into another split."""
    import ds_vpipe

    reports = []
    for name, extra in PRECISIONS.items():
        for vpipe, batches in (({"partition": partition}, 3), ({"partition": again}, 0), (None, 3)):
            torch.manual_seed(1234)
            block = None if vpipe is None else {"sync_mode": "bsp", **vpipe}
            ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], block, **extra)
            engine = ds_vpipe.initialize(model=tied_model(2), config=ds_config)[0]
            if not batches:
                engine.load_checkpoint(folder, tag=name)
            iterator = toy.data()
            for _ in range(batches):
                engine.train_batch(iterator)
            if block and batches:
                engine.save_checkpoint(folder, tag=f"{name}-trained", exclude_frozen_parameters=True)
            if batches:
                engine.save_checkpoint(folder, tag=name if block else f"stock-{name}")
            reports.append({"states": observe(engine), "weights": cases.parameters(engine)})
            cases.end(engine)
    return reports


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: Any) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, worlds.run(2, save, str(folder), [2, 4], [4, 2])


def expected(ranks: list[list[dict[str, Any]]], index: int) -> dict[str, torch.Tensor]:
    """fp32 weights of all trained parameters by global name."""
    states = union(ranks, index, "states")
    return {name.rpartition("|")[0]: value for name, value in states.items() if name.endswith("|weight")}


def test_tied_and_shared_weights_follow_their_layers(saved: Any) -> None:
    for index in (0, 3):
        before, after = union(saved[1], index, "states"), union(saved[1], index + 1, "states")
        assert len(before) > 50
        same(before, after)


def test_master_weights_of_ties_are_their_owners(saved: Any, monkeypatch: Any) -> None:
    checkpoint = PipelineCheckpoint(saved[0] / "bf16")
    states = checkpoint.states(["tied_modules.word.embedding.weight"])
    of_stage = checkpoint._unpacked

    def others(stage: int) -> dict[str, ParameterState]:
        found = of_stage(stage)
        return {name: replace(state, master=stage + state.master) for name, state in found.items()}  # type: ignore[operator]

    monkeypatch.setattr(checkpoint, "_unpacked", others)
    masters = checkpoint.masters()
    for name, state in states.items():
        assert torch.equal(masters[name], state.master), "that of stage 0"


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("tag", ["fp32", "bf16", "stock-fp32", "stock-bf16"])
def test_export_has_the_trained_weights(saved: Any, tmp_path: Path, tag: str, suffix: str, capsys: Any) -> None:
    folder, ranks = saved
    trained = expected(ranks, ["fp32", "", "stock-fp32", "bf16", "", "stock-bf16"].index(tag))
    output = tmp_path / f"model{suffix}"
    assert main([str(folder), str(output), "--tag", tag]) == 0
    found = torch.load(output) if suffix == ".pt" else load_file(output)
    if tag == "stock-fp32":  # DeepSpeed writes no keys of ties where ZeRO does not need them
        found["tied_modules.word.embedding.weight"] = found.pop("0.embedding.weight")
    kept = {"3.frozen.weight", "3.frozen.bias", "3.calls", "3.two.weight"}
    assert found.keys() == trained.keys() | kept
    for name, value in trained.items():
        assert torch.equal(found[name], value), name
    rounded = trained["3.one.weight"] if tag != "stock-bf16" else trained["3.one.weight"].bfloat16().float()
    assert torch.equal(found["3.two.weight"], rounded)
    assert found["3.calls"].dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert f"{len(found)} tensors" in capsys.readouterr().out


def test_names_by_layer_repeat_ties_and_dtype_rounds(saved: Any, tmp_path: Path) -> None:
    folder, ranks = saved
    trained = expected(ranks, 3)
    (folder / "latest").write_text("bf16")
    for output in (tmp_path / "model.pt", tmp_path / "model.safetensors"):
        assert main([str(folder), str(output), "--names", "layers", "--dtype", "float16"]) == 0
        found = torch.load(output) if output.suffix == ".pt" else load_file(output)
        assert not any(name.startswith("tied") for name in found)
        words = "tied_modules.word.embedding.weight"
        for name, source in (("0.embedding.weight", words), ("5.embedding.weight", words), ("4.scale", "4.scale")):
            assert torch.equal(found[name], trained[source].half())
    assert main([str(folder / "bf16"), str(tmp_path / "again.pt")]) == 0


def test_command_runs_by_itself(saved: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_vpipe.export", str(saved[0]), str(tmp_path / "model.pt"), "--tag", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "1.linear.weight" in torch.load(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{folder}", "{out}/m.pt", "--tag", "bf61"], "got tag 'bf61' in "),
        (["{out}", "{out}/m.pt"], "has neither a file 'latest' nor mp_rank_*_model_states.pt"),
        (["{folder}", "{out}/m.bin", "--tag", "bf16"], "m.bin'; allowed: a name that ends in .pt or .safetensors"),
        (["{folder}", "{out}/no/m.pt", "--tag", "bf16"], "which cannot be written"),
        (["{folder}", "{out}/no/m.safetensors", "--tag", "bf16"], "which cannot be written"),
    ],
)
def test_wrong_command_lines_end_in_one_line(
    saved: Any, tmp_path: Path, arguments: list[str], text: str, capsys: Any
) -> None:
    filled = [argument.format(folder=saved[0], out=tmp_path) for argument in arguments]
    assert main(filled) == 2
    message = capsys.readouterr().err
    assert text in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_lost_files_are_named(saved: Any, tmp_path: Path, capsys: Any) -> None:
    for path in (saved[0] / "bf16").iterdir():
        if "zero_pp_rank_0_mp_rank_01" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    assert main([str(tmp_path), str(tmp_path / "m.pt")]) == 2
    assert "got no file zero_pp_rank_0_mp_rank_01_optim_states.pt" in capsys.readouterr().err
    (tmp_path / "mp_rank_00_model_states.pt").unlink()
    assert main([str(tmp_path), str(tmp_path / "m.pt")]) == 2
    assert "got stages [1], allowed are all of them" in capsys.readouterr().err


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_left_out_of_a_checkpoint_are_named(saved: Any, tmp_path: Path, precision: str, capsys: Any) -> None:
    file = saved[0] / f"{precision}-trained" / "layer_03-model_states.pt"
    names = torch.load(file, weights_only=False).keys()
    assert names
    assert "frozen.weight" not in names
    assert main([str(saved[0]), str(tmp_path / "m.pt"), "--tag", f"{precision}-trained"]) == 2
    message = capsys.readouterr().err
    assert "got no weights of 3.frozen.weight (and 1 more), saved with exclude_frozen_parameters" in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_objects_without_their_code_are_named(saved: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Scripts put their arguments into the client state, of classes of their own."""
    for path in (saved[0] / "fp32").iterdir():
        if path.name != "mp_rank_00_model_states.pt":
            (tmp_path / path.name).symlink_to(path)
    script = types.ModuleType("a_script")
    script.Arguments = type("Arguments", (), {"__module__": "a_script"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_script", script)
    content = torch.load(saved[0] / "fp32" / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save({**content, "args": script.Arguments()}, tmp_path / "mp_rank_00_model_states.pt")
    monkeypatch.delitem(sys.modules, "a_script")
    assert main([str(tmp_path), str(tmp_path / "m.pt")]) == 2
    message = capsys.readouterr().err
    assert "objects whose code is not here (No module named 'a_script')" in message
    assert message.count("\n") == 1


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A damaged pickle may ask for any amount, which is refused before the machine has to find it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pickles_with_any_bytes_end_in_one_line(
    saved: Any, tmp_path: Path, little_memory: None, capsys: Any, data: st.DataObject
) -> None:
    """Their archive has the right checksums, as if somebody had written them so."""
    files = sorted((saved[0] / data.draw(st.sampled_from(["bf16", "fp32"]))).iterdir())
    damaged = data.draw(st.sampled_from([file for file in files if "states" in file.name]))
    with zipfile.ZipFile(damaged) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in records if name.endswith("/data.pkl"))
    content = bytearray(records[name])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    for path in tmp_path.iterdir():
        path.unlink()
    for file in files:
        if file != damaged:
            (tmp_path / file.name).symlink_to(file)
    with zipfile.ZipFile(tmp_path / damaged.name, "w") as archive:
        for other, value in {**records, name: bytes(content)}.items():
            archive.writestr(other, value)
    capsys.readouterr()
    status, said = main([str(tmp_path), str(tmp_path / "m.pt")]), capsys.readouterr().err
    assert status in (0, 2)
    # Python itself says of some objects, once they go, that they were left half made.
    assert sum(line.startswith("ds_vpipe.export: ") for line in said.splitlines()) == (1 if status else 0)
    assert "Traceback" not in said
