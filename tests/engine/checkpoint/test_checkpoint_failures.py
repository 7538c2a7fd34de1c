"""A rank that cannot write or read its part of a checkpoint: every rank raises one line, soon, and may go on."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, size in {"full disk": 2000, "full disk for the rank's own file": 14_000}.items():
        if engine.stage_id == FAILS:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        lines[name] = line_of(engine.save_checkpoint, directory, tag="bad")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        engine.train_batch(iterator)  # of other stages' passes
        lines[name] += ",".join(path.name for path in Path(directory).glob(".*"))
    no_folder = Path(directory, "good", "mp_rank_00_model_states.pt")
    lines["no folder"] = line_of(engine.save_checkpoint, str(no_folder))
    engine.save_checkpoint(directory, tag="good2")
    lines["missing tag"] = line_of(engine.load_checkpoint, directory, tag="nothing")
    lines["nothing loaded"] = line_of(engine.train_batch, iterator)
    if engine.stage_id == FAILS:
        change_a_bit(next(Path(directory, "good").glob(f"vpipe-stage_{FAILS:02d}*")))
    lines["changed bit"] = line_of(engine.load_checkpoint, directory, tag="good")
    lines["nothing loaded"] += line_of(engine.train_batch, iterator)
    if engine.stage_id == FAILS:
        change_a_bit(next(Path(directory, "good").glob(f"vpipe-stage_{FAILS:02d}*")))
        layers = reversed(range(*engine.module.parts[FAILS : FAILS + 2]))  # the first one is looked at before
        layer = next(i for i in layers if list(files(directory, i)))
        next(files(directory, layer)).write_bytes(b"spoilt")
    lines["spoilt file"] = line_of(engine.load_checkpoint, directory, tag="good")
    lines["half loaded"] = line_of(engine.train_batch, toy.data())
    lines["good file"] = line_of(engine.load_checkpoint, directory)
    if engine.stage_id == FAILS:
        engine.load_module_state_dict = cannot_read
    lines["spoilt file"] += line_of(engine.load_checkpoint, directory)
    lines["half loaded elsewhere"] = line_of(engine.train_batch, toy.data())
    vars(engine).pop("load_module_state_dict", None)
    lines["good file"] += line_of(engine.load_checkpoint, directory)
    if engine.zero_optimization():  # states in files of their own, which one stage reads
        if engine.stage_id == FAILS:
            next(Path(directory, "good").glob(f"*_mp_rank_{FAILS:02d}_optim_states.pt")).write_bytes(b"spoilt")
        lines["spoilt states"] = line_of(engine.load_checkpoint, directory, tag="good")
        lines["nothing loaded"] += line_of(engine.train_batch, toy.data())
        lines["good file"] += line_of(engine.load_checkpoint, directory)
    own = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.load_module_state_dict({"module": {"module": own}})  # by the script, which is no load that has failed
    lines["training"] = line_of(engine.train_batch, toy.data(start=engine.consumed_micro_batches))
    cases.end(engine)
    return lines


def cannot_read(*_: Any, **__: Any) -> None:
    raise OSError("gone")


def change_a_bit(file: Path) -> None:
    """Change one in the middle; the second time it is as before."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def files(directory: str, layer: int) -> Any:
    return Path(directory, "good").glob(f"layer_{layer:02d}-*.pt")


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_raise_and_may_go_on(worlds: Worlds, tmp_path: Path, setting: str) -> None:
    extra, model = SETTINGS[setting]
    ds_config = cases.config(2, ADAM, {"partition": "uniform", "peer_timeout_s": 20}, **extra)
    ranks = worlds.run(STAGES, save_and_load, str(tmp_path), ds_config, model)
    for lines in ranks:
        for name, wanted in {
            "full disk": "MiB are free there",
            "full disk for the rank's own file": "MiB are free there",
            "changed bit": f"vpipe-stage_{FAILS:02d}-replica_00-slice_00.pt, which has been changed since",
            "spoilt file": "",
        }.items():
            if name != "changed bit":  # any rank may be the one that reads it
                assert f"stage {FAILS} (rank {FAILS}) failed: " in lines[name] or lines is ranks[FAILS], lines
            assert lines[name]
            assert wanted in lines[name]
            assert "\n" not in lines[name]
        assert "unfinished" not in lines["full disk"] + lines["full disk for the rank's own file"], lines
        assert "Not a directory" in lines["no folder"]
        assert "load another tag: ['good2']" in lines["changed bit"]
        assert "nothing" in lines["missing tag"]
        assert "train_batch() after load_checkpoint" in lines["half loaded"]
        assert "train_batch() after load_checkpoint" in lines["half loaded elsewhere"]
        assert "spoilt states" not in lines or "optim_states.pt, which cannot be read" in lines["spoilt states"]
        assert lines["nothing loaded"] == lines["good file"] == lines["training"] == ""
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py")
    assert left == ["good", "good2", "latest"]


def test_the_first_failure_to_write_is_raised_once(tmp_path: Path) -> None:
    from ds_vpipe.engine.checkpoint.save_load import Checkpoints

    def fail(error: Exception) -> None:
        raise error

    checkpoints = Checkpoints(None, None)  # type: ignore[arg-type]
    for first, text in (
        (KeyError("epoch"), "^'epoch'$"),
        (OSError("position 7"), r"\(position 7\); [0-9]+ MiB are free"),
    ):
        checkpoints.write(fail, first)
        checkpoints.write(fail, OSError("another"))
        with pytest.raises(type(first), match=text):
            checkpoints._raise_unwritten(tmp_path)
        checkpoints._raise_unwritten(tmp_path)


def refused_saves(directory: str) -> tuple[dict[str, str], set[str]]:
    """Lines of saves that are refused, and keys of a checkpoint's file that are not said to be the engine's own."""
    from ds_vpipe.engine.checkpoint.reshape import OWN_KEYS

    ds_config = cases.config(2, ADAM, {"partition": "uniform"}, checkpoint={"tag_validation": "Fail"})
    engine = cases.engine(ds_config, 2)
    engine.train_batch(toy.data())
    engine.save_checkpoint(directory, tag="good")
    lines = {tag: line_of(engine.save_checkpoint, directory, tag=tag) for tag in BAD_TAGS}
    for key in ("vpipe", "global_samples", "checkpoint_parallel_dimensions"):
        lines[key] = line_of(engine.save_checkpoint, directory, tag="bad", client_state={key: 0})
    _, loaded = engine.load_checkpoint(directory, tag="good")
    loaded["ds_config"]["mine"] = 1
    lines["ds_config"] = line_of(engine.save_checkpoint, directory, tag="bad", client_state=loaded)
    lines["two tags"] = line_of(engine.save_checkpoint, directory, tag=f"of{engine.global_rank}")
    Path(directory, "notes").touch()
    torch.distributed.barrier()
    lines["notes"] = line_of(engine.save_checkpoint, directory, tag="notes")
    assert Path(directory, "notes").is_file()
    engine.module.ckpt_layer_path = lambda folder, position: f"{folder}/my_layer_{position:02d}-model_states.pt"
    lines["own names"] = line_of(engine.save_checkpoint, directory, tag="bad")
    lines["own names, loaded"] = line_of(engine.load_checkpoint, directory, tag="good")
    del engine.module.ckpt_layer_path
    latest = Path(directory, "latest")
    torch.distributed.barrier()
    if engine.global_rank == 0:
        latest.write_text("good\nbetter\n")
    torch.distributed.barrier()
    lines["two lines"] = line_of(engine.load_checkpoint, directory)
    assert engine.save_checkpoint(directory, tag=" run//..epoch1/")
    for tag in (None, " run//..epoch1/"):
        assert engine.load_checkpoint(directory, tag=tag)[0]
    keys = engine._common_checkpoint_state(None, False, False).keys()
    cases.end(engine)
    return lines, set(keys - OWN_KEYS)


BAD_TAGS = ("", ".", "run/..", "..", "../other", "/tmp/other", "latest", "two\nlines")


def test_refused_saves_leave_everything(worlds: Worlds, tmp_path: Path) -> None:
    for rank, (lines, unknown) in enumerate(worlds.run(2, refused_saves, str(tmp_path))):
        for name, line in lines.items():
            if name == "two lines":
                allowed = f"the name of a checkpoint in {str(tmp_path / 'latest')!r}"
                assert line.endswith(f'got "good\\nbetter"; allowed: {allowed}; write it there, or give a tag')
            elif name in (*BAD_TAGS, "notes"):
                text = f"save_checkpoint(tag): got {json.dumps(name)}; allowed: the name of a folder"
                assert line.startswith(text), name
            elif name == "two tags":
                text = "save_checkpoint(tag): got \"of1\"; allowed: the tag of rank 0, 'of0'"
                assert line.startswith(text) if rank else text in line
            elif name.startswith("own names"):
                text = 'PipelineModule.ckpt_layer_path(): got "my_layer_00-model_states.pt"; checkpoints are read'
                assert line.startswith(text)
            else:
                assert line.startswith(f'save_checkpoint(client_state): got "{name}"; allowed: keys'), line
            assert "\n" not in line
        assert not unknown
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/") if path != tmp_path)
    assert left == ["good", "run", "run/..epoch1"]
    assert (tmp_path / "latest").read_text() == "run/..epoch1"


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def whole(path: Path) -> None:
    """Make the folder one that DeepSpeed's engine for whole models saves."""
    for file in path.parent.iterdir():
        file.unlink()
    torch.save({"module": {"0.weight": torch.ones(1)}, "dp_world_size": 1}, path)


SPOILT: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "rank file": ("vpipe-stage_01-*.pt", Path.unlink, "got no file vpipe-stage_01-replica_00-slice_00.pt, allowed"),
    "stage": ("mp_rank_01_*.pt", Path.unlink, "got stages [0], allowed are all of them; files are lost"),
    "layer": ("layer_01-*.pt", Path.unlink, "got no file layer_01-model_states.pt"),
    "empty layer": ("layer_01-*.pt", emptied, "layer_01-model_states.pt, which is empty"),
    "no pipeline": ("mp_rank_00_*.pt", whole, "got one of an engine that is no pipeline, allowed are those of"),
}


def refused_loads(directory: str) -> dict[str, str]:
    """Lines of loading, and of training on with nothing loaded."""
    block, lines = {"partition": "uniform"}, {}
    engine = cases.engine(cases.config(2, ADAM, block), 2)
    engine.train_batch(toy.data())
    engine.save_checkpoint(directory, tag="good")
    for name, (pattern, change, _) in SPOILT.items():
        if engine.global_rank == 0:
            shutil.copytree(Path(directory, "good"), Path(directory, name))
            change(next(Path(directory, name).glob(pattern)))
        torch.distributed.barrier()
        lines[name] = line_of(engine.load_checkpoint, directory, tag=name)
    lines["two tags"] = line_of(engine.load_checkpoint, directory, tag=("good", "layer")[engine.global_rank])
    lines["custom_load_fn"] = line_of(engine.load_checkpoint, directory, tag="good", custom_load_fn=dict)
    passes = engine.module.micro_offset
    lines["no checkpoints"] = str(engine.load_checkpoint(f"{directory}/nowhere"))
    assert engine.module.micro_offset == passes > 0
    lines["training"] = line_of(engine.train_batch, toy.data(start=2))
    cases.end(engine)
    for name, partition in {"another optimizer": "uniform", "another optimizer and split": [4, 6]}.items():
        sgd = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
        engine = cases.engine(cases.config(2, sgd, {"partition": partition}), 2)
        lines[name] = line_of(engine.load_checkpoint, directory, tag="good")
        lines["training"] += line_of(engine.train_batch, toy.data())
        lines["training"] += line_of(engine.load_checkpoint, directory, tag="good", load_optimizer_states=False)
        lines["training"] += line_of(engine.train_batch, toy.data(start=2))
        cases.end(engine)
    return lines


def test_refused_loads_change_nothing(worlds: Worlds, tmp_path: Path) -> None:
    for lines in worlds.run(2, refused_loads, str(tmp_path)):
        for name, (_, _, text) in SPOILT.items():
            assert text in lines[name], name
        assert lines["custom_load_fn"].startswith("load_checkpoint(custom_load_fn): got ")
        assert "got good and layer by rank, allowed is one checkpoint; give all ranks the same tag" in lines["two tags"]
        for name in ("another optimizer", "another optimizer and split"):
            assert "got states of an optimizer without dampening, allowed are" in lines[name]
        assert lines["training"] == ""
        assert lines["no checkpoints"] == "(None, None)"
        assert not any("\n" in line for line in lines.values())
