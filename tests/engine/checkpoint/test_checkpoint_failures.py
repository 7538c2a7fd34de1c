"""A rank that cannot write or read its part of a checkpoint: every rank raises one line, soon, and may go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

STAGES = 3
FAILS = 1
ZERO = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
SETTINGS = {
    "fp32": ({}, {}),
    "ZeRO-1": (ZERO, {"loss_fn": toy.float_cross_entropy}),
    "ties": ({}, {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}),
}


def line_of(work: Any, *args: Any, **kwargs: Any) -> str:
    try:
        work(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return ""


def save_and_load(directory: str, ds_config: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
    """Lines of a save that fails on one stage, and of loading after a file of that stage was spoilt."""
    lines = {}
    engine = cases.engine(ds_config, STAGES, **model)
    iterator = toy.data()
    engine.train_batch(iterator)
    engine.save_checkpoint(directory, tag="good")
    engine.train_batch(iterator)
    save = engine.checkpoint_engine.save
    if engine.stage_id == FAILS:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        engine.checkpoint_engine.save = full
    lines["full disk"] = line_of(engine.save_checkpoint, directory, tag="bad")
    engine.checkpoint_engine.save = save
    engine.train_batch(iterator)
    engine.save_checkpoint(directory, tag="good2")
    lines["missing tag"] = line_of(engine.load_checkpoint, directory, tag="nothing")
    lines["nothing loaded"] = line_of(engine.train_batch, iterator)
    if engine.stage_id == FAILS:
        layer = next(i for i in range(*engine.module.parts[FAILS : FAILS + 2]) if list(files(directory, i)))
        next(files(directory, layer)).write_bytes(b"spoilt")
    lines["spoilt file"] = line_of(engine.load_checkpoint, directory, tag="good")
    lines["half loaded"] = line_of(engine.train_batch, toy.data())
    lines["good file"] = line_of(engine.load_checkpoint, directory)
    if engine.zero_optimization():  # states in files of their own, which one stage reads
        if engine.stage_id == FAILS:
            next(Path(directory, "good").glob(f"*_mp_rank_{FAILS:02d}_optim_states.pt")).write_bytes(b"spoilt")
        lines["spoilt states"] = line_of(engine.load_checkpoint, directory, tag="good")
        lines["half loaded states"] = line_of(engine.train_batch, toy.data())
        lines["good file"] += line_of(engine.load_checkpoint, directory)
    lines["training"] = line_of(engine.train_batch, toy.data(start=engine.consumed_micro_batches))
    engine.destroy()
    cases.close_groups()
    return lines


def files(directory: str, layer: int) -> Any:
    return Path(directory, "good").glob(f"layer_{layer:02d}-*.pt")


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_raise_and_may_go_on(worlds: Worlds, tmp_path: Path, setting: str) -> None:
    extra, model = SETTINGS[setting]
    ds_config = cases.config(2, ADAM, {"partition": "uniform", "peer_timeout_s": 20}, **extra)
    ranks = worlds.run(STAGES, save_and_load, str(tmp_path), ds_config, model)
    for lines in ranks:
        for name, wanted in {"full disk": "No space left on device", "spoilt file": ""}.items():
            assert f"stage {FAILS} (rank {FAILS}) failed: " in lines[name] or lines is ranks[FAILS], lines
            assert lines[name]
            assert wanted in lines[name]
            assert "\n" not in lines[name]
        assert "nothing" in lines["missing tag"]
        for name in {"half loaded", "half loaded states"} & lines.keys():
            assert "train_batch() after load_checkpoint" in lines[name]
        assert lines["nothing loaded"] == lines["good file"] == lines["training"] == ""
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py")
    assert left == ["good", "good2", "latest"]
