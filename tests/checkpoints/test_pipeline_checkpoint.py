"""Files of a checkpoint, held against what its stages' files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder, rank_file
from ds_vpipe.checkpoints.stage_layout import LAYOUT_KEY, StageLayout
from ds_vpipe.errors import VPipeError
from ds_vpipe.export import main

# Layer 3 is frozen, 4 a function, and 5 runs a function of the embedding with a bias of its own, which has no file.
TIED = [("tied_modules.word.weight", (2,))]
LAYOUT = StageLayout(0, (0, 3, 6), 1, 0, 1, [], {0: "word", 5: "word"}, {}, {"5.bias": "tied_modules.word.bias"})
STAGES = [
    (replace(LAYOUT, groups=[[*TIED, ("1.weight", (2,))]], files=(0, 1, 2)), ["2.mean"]),
    (replace(LAYOUT, stage=1, groups=[[*TIED, ("5.bias", (2,))]], files=(3,)), []),
]
LAYERS = {0: "weight", 1: "weight", 2: "mean", 3: "weight"}


@pytest.fixture(params=["ours", "stock"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    for layout, buffers in STAGES:
        content: dict[str, Any] = {"optimizer": None, "buffer_names": buffers, "dp_world_size": 1}
        if request.param == "stock":
            content["param_shapes"] = [{name: torch.Size(shape) for name, shape in layout.groups[0]}]
        else:
            content[LAYOUT_KEY] = layout.plain()
            torch.save({"outside": {"5.bias": torch.ones(2)}}, tmp_path / rank_file(layout.stage, 0, 0))
        torch.save(content, tmp_path / f"mp_rank_{layout.stage:02d}_model_states.pt")
    for index, name in LAYERS.items():
        torch.save({name: torch.ones(2)}, tmp_path / f"layer_{index:02d}-model_states.pt")
    return tmp_path, request.param


def test_lost_layers_are_named(saved: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, kind = saved
    if kind != "stock":
        assert main([str(folder), str(folder / "m.pt")]) == 0
        assert torch.load(folder / "m.pt").keys() == {
            "tied_modules.word.weight", "1.weight", "2.mean", "3.weight", "5.bias",
        }  # fmt: skip
        (folder / "m.pt").unlink()
    for index in {"ours": (0, 1, 2, 3), "stock": (1, 2)}[kind]:
        file = folder / f"layer_{index:02d}-model_states.pt"
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(
            VPipeError, match=f"got no file {file.name}, allowed are all; files are lost; copy it anew, or"
        ):
            PipelineCheckpoint(folder)
        assert main([str(folder), str(folder / "m.pt")]) == 2
        file.write_bytes(content)
    assert not (folder / "m.pt").exists()


def test_names_of_no_checkpoint_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step4").mkdir()
    (tmp_path / "step4" / "mp_rank_00_model_states.pt").touch()
    monkeypatch.chdir(tmp_path)
    for tag in ("", "."):
        with pytest.raises(VPipeError, match=r"got tag '\.?' in '\.'; allowed: \['step4'\]; correct the tag"):
            checkpoint_folder(".", tag)
    for content in (b"", b"step\xff"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(VPipeError, match=r"allowed: \['step4'\]; correct 'latest', or name a tag"):
            checkpoint_folder(".")


def test_saves_of_two_engines_under_one_tag_are_not_mixed(saved: tuple[Path, str], capsys: Any) -> None:
    """As where a script was run with pipelines first, and then with DeepSpeed's engine for whole models."""
    folder, _ = saved
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file), "module": {"weight": torch.ones(2)}}, file)
    assert main([str(folder), str(folder / "m.pt")]) == 2
    assert "got files of a pipeline and, from another save under the same tag, of an engine" in capsys.readouterr().err


def test_a_lost_slice_of_a_layer_is_not_read_as_another(saved: tuple[Path, str]) -> None:
    folder, _ = saved
    for index, name in LAYERS.items():
        (folder / f"layer_{index:02d}-model_states.pt").unlink()
        for part in range(2 if index else 1):
            torch.save({name: torch.ones(2)}, folder / f"layer_{index:02d}-model_{part:02d}-model_states.pt")
    for part in range(2):
        with pytest.raises(VPipeError, match="got 1 of 2 files of layer 0, allowed are all; files are lost"):
            PipelineCheckpoint(folder, part)
