"""Checkpoints hold one consistent version, in DeepSpeed's own format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import Worlds

from ds_vpipe.engine.checkpoint import folders
from ds_vpipe.engine.checkpoint.folders import clean, write_latest
from ds_vpipe.errors import VPipeError

pytestmark = pytest.mark.mp


def save_and_load(directory: str, extra: dict[str, Any], load_block: dict[str, Any] | None) -> dict[str, Any]:
    """Train, save while micro-batches are in flight, load into another engine, and go on with that."""
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, **extra)
    trained = cases.engine(ds_config, 2)
    iterator = toy.data()
    for _ in range(5):
        trained.train_batch(iterator)
    trained.save_checkpoint(directory)
    saved = cases.parameters(trained)
    other = cases.engine(cases.config(2, OPTIMIZERS["AdamW"][0], load_block, **extra), 2)
    other.load_checkpoint(directory)
    loaded, steps = cases.parameters(other), other.global_steps
    iterator = toy.data(start=10)
    for _ in range(3):
        other.train_batch(iterator)
    return {
        "saved": saved,
        "loaded": loaded,
        "steps": steps,
        "moved": difference(cases.parameters(other), loaded),
    }


@pytest.mark.parametrize("load_block", [None, {"partition": "uniform"}], ids=["stock", "ours"])
@pytest.mark.parametrize(
    "extra", [{}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}], ids=["fp32", "bf16-zero1"]
)
def test_saved_in_flight_loads_everywhere(
    worlds: Worlds, tmp_path: Path, extra: dict[str, Any], load_block: dict[str, Any] | None
) -> None:
    folder = tmp_path if load_block is None else tmp_path / "lr=[0.1,0.2]"  # which DeepSpeed takes for a pattern
    for report in worlds.run(2, save_and_load, str(folder), extra, load_block):
        assert difference(report["loaded"], report["saved"]) == 0
        assert report["steps"] == 5
        assert 1e-4 < report["moved"] < 1


def save_where_each_thinks(directory: str) -> tuple[float, Any, list[str]]:
    """As scripts do that put the time into a folder's name: the difference that loading makes, folders, warnings."""
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    engine.train_batch(toy.data())
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_vpipe.engine.checkpoint.save_load.logger.warning", said.append)
        engine.save_checkpoint(f"{directory}/at{engine.global_rank}", tag=f"from{engine.global_rank}")
        engine.save_checkpoint(f"{directory}/at{engine.global_rank}", tag="from0", save_latest=False)
        engine.save_checkpoint(f"{directory}/at0", tag=f"next{engine.global_rank}", save_latest=False)
        patch.setattr(engine, "checkpoint_tag_validation_enabled", lambda: False)
        engine.save_checkpoint(f"{directory}/at0", tag=f"next{engine.global_rank}", save_latest=False)
    saved = cases.parameters(engine)
    engine.train_batch(toy.data(start=engine.consumed_micro_batches))
    folder, _ = engine.load_checkpoint(f"{directory}/at0")
    assert Path(folder).parent.name == "from0"
    found = difference(cases.parameters(engine), saved)
    cases.end(engine)
    return found, sorted(path.name for path in Path(directory).iterdir()), said


def test_ranks_that_name_different_folders_save_in_the_first_ranks(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, save_where_each_thinks, str(tmp_path))
    assert first == (0, ["at0"], [])
    assert second[:2] == (0, ["at0"])
    named = [("at1/from1", "at0/from0"), ("at1/from0", "at0/from0"), ("at0/next1", "at0/next0")]
    for line, (other, used) in zip(second[2], named, strict=True):
        assert f"got the folder '{tmp_path}/{other}' on rank 1 and '{tmp_path}/{used}' on rank 0" in line


def save_beside_others(directory: str) -> None:
    """A save next to that of another job, which has begun long ago, and to what a run has left that was killed."""
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    if engine.global_rank == 0:
        for name in ("killed", "other"):
            folder = Path(directory, f".{name}.unfinished")
            folder.mkdir()
            (folder / "layer_00-model_states.pt").write_bytes(b"some")
            os.utime(folder, (0, 0))
        os.utime(Path(directory, ".killed.unfinished", "layer_00-model_states.pt"), (0, 0))
    engine.save_checkpoint(directory, tag="mine")
    cases.end(engine)


def test_a_save_removes_what_was_interrupted_and_nothing_of_another_job(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_beside_others, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.unfinished", "latest", "mine"]
    assert [path.name for path in (tmp_path / ".other.unfinished").iterdir()] == ["layer_00-model_states.pt"]


def save_while_another_does(directory: str) -> tuple[bool, list[str]]:
    """Another job begins to save the same name meanwhile, removes what seems to be left, and is ready first."""
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    write = engine.checkpoints.write

    def writes(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        other = Path(directory, ".mine.unfinished")
        if engine.global_rank == 0 and not Path(directory, "mine").exists():
            shutil.rmtree(other, ignore_errors=True)
            other.mkdir()
            (other / "layer_00-model_states.pt").write_bytes(b"another")
            os.replace(other, Path(directory, "mine"))

    engine.checkpoints.write = writes
    engine.save_checkpoint(directory, tag="mine")
    loaded = engine.load_checkpoint(directory, tag="mine")[0] is not None
    cases.end(engine)
    return loaded, sorted(path.name for path in Path(directory).iterdir())


def test_two_jobs_may_save_one_name(worlds: Worlds, tmp_path: Path) -> None:
    """Each has files of its own, and one of the two checkpoints is there, whole."""
    for loaded, left in worlds.run(2, save_while_another_does, str(tmp_path)):
        assert loaded
        assert left == ["latest", "mine"]


def test_two_jobs_may_name_their_checkpoints_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = folders._sync

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(folders, "_sync", sync)
        write_latest(tmp_path / "latest", tmp_path / "theirs", "2")
        sync(path)

    monkeypatch.setattr(folders, "_sync", meanwhile)
    write_latest(tmp_path / "latest", tmp_path / "mine", "1")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "mine"


@pytest.mark.parametrize("ahead", [-1000, 0, 1000])
def test_a_file_servers_clock_may_be_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Times of files are the server's, and when a run began is its host's."""
    real = time.time
    monkeypatch.setattr("ds_vpipe.engine.checkpoint.folders.time", SimpleNamespace(time=lambda: real() + ahead))
    for name in ("killed", "other"):
        (tmp_path / f".{name}.unfinished").mkdir()
    (tmp_path / ".latest.killed.unfinished").touch()
    for name in ("", "latest."):
        os.utime(tmp_path / f".{name}killed.unfinished", (0, real() - 100))
    (tmp_path / "mine").mkdir()
    clean(tmp_path / "mine", began=real() + ahead - 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.unfinished", "mine"]


def what_reaches_the_disk(directory: str) -> list[tuple[str, str]]:
    """Files that a rank waits for and what it renames, in order, in a save."""
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    engine.train_batch(toy.data())
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.replace

    def syncs(handle: int) -> None:
        done.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), directory)))
        sync(handle)

    def renames(source: Any, target: Any) -> None:
        rename(source, target)
        done.append(("rename", os.path.relpath(target, directory)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", syncs)
        patch.setattr(os, "replace", renames)
        engine.save_checkpoint(directory, tag="saved")
    cases.end(engine)
    return done


def test_files_are_on_the_disk_before_they_have_their_names(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, what_reaches_the_disk, str(tmp_path))
    files = {str(path.relative_to(tmp_path)) for path in (tmp_path / "saved").iterdir()}
    (unfinished,) = {Path(path).parts[0] for _, path in second}
    synced = {path.replace(unfinished, "saved") for kind, path in [*first, *second] if kind == "sync"}
    assert len(files) > 10
    assert files <= synced
    assert "rename" not in {kind for kind, _ in second}
    begin = first.index(("rename", "saved"))
    assert [kind for kind, _ in first[:begin]] == ["sync"] * begin
    assert first[begin - 1 :] == [
        ("sync", unfinished), ("rename", "saved"), ("sync", "."),
        ("sync", unfinished.replace(".saved.", ".latest.")), ("rename", "latest"), ("sync", "."),
    ]  # fmt: skip


def go_on_with_what_was_loaded(directory: str) -> dict[str, Any]:
    """As DeepSpeed's tutorial does it: a save of the client_state that was loaded, and a scheduler from then on."""
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform"})
    engine = cases.engine(ds_config, 2)
    iterator = toy.data()
    for _ in range(3):
        engine.train_batch(iterator)
    engine.save_checkpoint(directory, tag="one", client_state={"epoch": 1})
    cases.end(engine)
    found = {}
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 9}}
    for name, partition in {"same split": "uniform", "other split": [4, 6]}.items():
        ds_config = {**ds_config, "scheduler": warmup, "vpipe": {**ds_config["vpipe"], "partition": partition}}
        engine = cases.engine(ds_config, 2)
        _, client = engine.load_checkpoint(directory, tag="one")
        iterator = toy.data(start=engine.consumed_micro_batches)
        for _ in range(3):
            engine.train_batch(iterator)
        engine.save_checkpoint(directory, tag=name, client_state=client)
        resumed = cases.engine(ds_config, 2)
        _, again = resumed.load_checkpoint(directory, tag=name)
        counts = [(one.global_steps, one.consumed_micro_batches, one.get_lr()) for one in (engine, resumed)]
        found[name] = client, again, counts
        engine.destroy()
        cases.end(resumed)
    return found


def test_a_loaded_client_state_is_saved_again(worlds: Worlds, tmp_path: Path) -> None:
    splits = []
    for rank in worlds.run(2, go_on_with_what_was_loaded, str(tmp_path)):
        for client, again, (trained, resumed) in rank.values():
            assert client.pop("ds_version") == again.pop("ds_version")
            # As DeepSpeed returns it, of the run that saved: scripts note their position in ``engine.config``.
            assert client.pop("ds_config")["vpipe"]["partition"] == "uniform"
            assert client.keys() == again.keys() - {"ds_config"} == {"epoch"}
            assert client["epoch"] == again["epoch"] == 1
            splits.append(again["ds_config"]["vpipe"]["partition"])
            assert trained == resumed
            assert trained[:2] == (6, 12)
    assert splits == ["uniform", [4, 6]] * 2


def save_over(directory: str) -> list[list[str]]:
    """Names in the folders after saves of one name, the second of which is killed before it cleans up."""
    from ds_vpipe.engine.checkpoint import save_load

    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    iterator, tag = toy.data(), Path(directory, "best")
    found = []
    for killed in (False, True, False):
        engine.train_batch(iterator)
        with pytest.MonkeyPatch.context() as patch:
            if killed:
                patch.setattr(save_load, "clean", lambda *_: None)
            engine.save_checkpoint(directory, tag="other" if found else "best")
            engine.save_checkpoint(directory, tag="best")
        found.append(sorted(path.name for path in (*Path(directory).iterdir(), *tag.glob("[!lmv]*"))))
        torch.distributed.barrier()
        if engine.global_rank == 0 and len(found) == 1:
            (tag / "tokenizer.json").write_text("{}")
            (tag / "extra").mkdir()
            (tag / "layer_77-model_states.pt").write_text("of a larger model")
        torch.distributed.barrier()
    cases.end(engine)
    return found


def test_a_save_keeps_what_scripts_have_put_there(worlds: Worlds, tmp_path: Path) -> None:
    for first, killed, last in worlds.run(2, save_over, str(tmp_path)):
        assert first == ["best", "latest"]
        assert killed == [".best.previous", "best", "latest", "other"]
        assert last == ["best", "extra", "latest", "other", "tokenizer.json"]
    assert not (tmp_path / "best" / "layer_77-model_states.pt").exists()


def save_on_a_disk_of_its_own(directory: str) -> list[tuple[str, list[str]]]:
    """What ``latest`` names on each machine, and the folders there, after saves of which one fails on one machine."""
    from ds_vpipe.engine.checkpoint import save_load

    rank, found = torch.distributed.get_rank(), []
    mine = Path(directory, str(rank))
    mine.mkdir()
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"}), 2)
    engine.local_rank = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(mine)
        for tag in ("first", "second", "third"):
            with pytest.MonkeyPatch.context() as fault:
                if tag == "second" and rank == 1:
                    fault.setattr(save_load, "put_own_in_place", lambda *_: (mine / "gone").rename(mine / "there"))
                with pytest.raises(VPipeError) if tag == "second" else nullcontext():
                    engine.save_checkpoint("saves", tag=tag)
            folders = sorted(path.parent.name for path in Path("saves").glob("[!.]*/mp_rank_*.pt"))
            found.append((Path("saves", "latest").read_text(), folders))
    cases.end(engine)
    return found


def test_latest_is_replaced_when_all_machines_have_the_checkpoint(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, save_on_a_disk_of_its_own, str(tmp_path))
    assert [latest for latest, _ in first] == [latest for latest, _ in second] == ["first", "first", "third"]
    assert [folders for _, folders in first] == [["first"], ["first", "second"], ["first", "second", "third"]]
    assert [folders for _, folders in second] == [["first"], ["first"], ["first", "third"]]


def save_universal(directory: str, ds_config: dict[str, Any]) -> Any:
    engine = cases.engine(ds_config, 2, loss_fn=toy.float_cross_entropy)
    iterator = toy.data(replica=engine.grid.data_parallel_id)
    for _ in range(3):
        engine.train_batch(iterator)
    state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(directory, tag="parted", client_state=state)
    saved = cases.parameters(engine)
    cases.end(engine)
    return saved


def load_universal(directory: str, ds_config: dict[str, Any], tag: str | None) -> tuple[Any, Any]:
    engine = cases.engine(ds_config, 2, loss_fn=toy.float_cross_entropy)
    with pytest.raises(VPipeError, match=r"got no zero/[0-9].* in it, allowed is what ds_to_universal makes of"):
        engine.load_checkpoint(directory, tag="parted")
    engine.load_checkpoint(directory, tag=tag)
    loaded = cases.parameters(engine)
    engine.train_batch(toy.data(start=engine.consumed_micro_batches, replica=engine.grid.data_parallel_id))
    changed = cases.parameters(engine)
    cases.end(engine)
    return loaded, changed


def test_universal_checkpoints(worlds: Worlds, tmp_path: Path) -> None:
    zero = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, **zero)
    saved = worlds.run(4, save_universal, str(tmp_path), ds_config)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(tmp_path / "parted"), "--output_folder", str(tmp_path / "universal")]
    subprocess.run([*command, *folders], check=True, capture_output=True)
    (tmp_path / "latest_universal").write_text("universal")
    ds_config["checkpoint"] = {"load_universal": True}
    for tag in ("universal", None):
        for before, (loaded, changed) in zip(
            saved, worlds.run(4, load_universal, str(tmp_path), ds_config, tag), strict=True
        ):
            assert difference(loaded, before) == 0
            assert 1e-4 < difference(changed, loaded) < 1
