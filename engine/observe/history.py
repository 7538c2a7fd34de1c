"""History of a run: recorded by its first rank, or replayed by all ranks of ``python -m ds_vpipe replay``.

The engine and the order of its passes are the same in a replay, and so are the script's calls. What depends on time is
taken from the record: moves of layers and depths that were decided on measurements, and the updates after which the
pipeline was emptied. The script's checkpoints are not written. It goes on from the one that the replay has chosen, and
ends after the update that was asked for; until then every loss is compared with the recorded one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_vpipe.config import VPipeConfig
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.executor import Watcher
from ds_vpipe.engine.observe.layer_watch import FaultWatch, NormWatch
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import Refusal, VPipeError, one_line
from ds_vpipe.run_record import RecordWriter, RunRecord, differences, environment, machine
from ds_vpipe.schedules.moves import Move
from ds_vpipe.whole_file import whole_file

REPLAY = "DS_VPIPE_REPLAY"
"""Environment variable with the path of a replay's JSON: ``record``, ``start``, ``to``, ``latest``, ``find``, ``state``
and ``out``, as :mod:`ds_vpipe.commands.replay` writes them."""
_READ_AT_ONCE = 64  # losses, on an accelerator


class History:
    """Run that is neither recorded nor replayed; those that are override its methods."""

    replays = False

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []  # of the stage's actions
        self.at_loss: list[Callable[[int, torch.Tensor], None]] = []  # get the number and mean loss of every batch

    def writes(self, folder: str) -> bool:
        """Whether the script's checkpoint in a folder is written."""
        return True

    def checkpoint(self, folder: str, tag: str | None) -> tuple[str, str | None] | None:
        """The checkpoint to load in the place of the one that the script names; None for none."""
        return folder, tag

    def event(self, kind: str, update: int, **values: Any) -> None:
        """Something has happened after an update."""

    def updated(self, engine: Any) -> None:
        """A call of the script has ended with an update."""

    def end(self) -> None:
        """The engine ends."""


class RunRecorder(History):
    """History of a run that is recorded, on its first rank. No run fails for it."""

    def __init__(self, stage: Stage, folder: str, start: Mapping[str, Any]) -> None:
        super().__init__()
        self.at_loss.append(self._loss)
        self._stage = stage
        self._start: Mapping[str, Any] | None = start  # until the first batch, before which a checkpoint may be loaded
        self._folder = folder
        self._writer: RecordWriter | None = None
        self._unread: list[tuple[int, torch.Tensor]] = []
        try:
            self._writer = RecordWriter(folder)
        except OSError as error:
            self._give_up(error)

    def event(self, kind: str, update: int, **values: Any) -> None:
        """Record what happens after the first update of this start, and checkpoints and moves before it."""
        if self._start is None or kind in ("saved", "move_layer"):
            self._write(kind, update, **values)

    def _loss(self, batch: int, loss: torch.Tensor) -> None:
        self._begin(batch)
        self._unread.append((batch + 1, loss.float()))
        if len(self._unread) >= _READ_AT_ONCE or self._stage.device.type == "cpu":
            self.end()

    def end(self) -> None:
        """Write the losses that have not been read."""
        unread, self._unread = self._unread, []
        try:
            losses = [(update, loss.item()) for update, loss in unread]
        except RuntimeError as error:  # of a device that has failed, which every further call says again
            self._give_up(error, "losses cannot be read")
            return
        for update, loss in losses:
            self._write("loss", update, loss=loss)

    def _begin(self, update: int) -> None:
        start, self._start = self._start, None
        if start is not None:
            self._write("start", update, **start)

    def _write(self, kind: str, update: int, **values: Any) -> None:
        try:
            if self._writer is not None and kind == "loss":
                self._writer.loss(update, **values)
            elif self._writer is not None:
                self._begin(update)
                self._writer.event(kind, update, **values)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception, what: str = "it cannot be written") -> None:
        self._writer = None
        why = f"{what}: {one_line(error)}"
        logger.warning(f"ds_vpipe: vpipe.record {self._folder!r}: the run is not recorded from here on, as {why}")


class RecordedReplay(History):
    """History of a replay, on every rank."""

    replays = True

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, plan: Mapping[str, Any]) -> None:
        super().__init__()
        self.at_loss.append(self._loss)
        self._plan, self._record = plan, RunRecord.read(plan["record"])
        self._to, self._rank = int(plan["to"]), engine.global_rank
        self._said: dict[str, Any] = {"began": None, "loaded": None, "reached": None}
        engine.monitor.enabled = False
        self._faults = FaultWatch(engine, stage, self._write) if plan["find"] == "nan" else None
        self._norms = NormWatch(stage, self._to - 1) if plan["find"] == "loss-jump" else None
        self.watchers += [watch for watch in (self._faults, self._norms) if watch is not None]

    def writes(self, folder: str) -> bool:
        """Whether it is the state that was asked for."""
        return folder == self._plan["state"]

    def checkpoint(self, folder: str, tag: str | None) -> tuple[str, str | None] | None:
        """Folder and tag to load; of a folder of the recorded run the latest checkpoint that may be used."""
        if self._said["began"] is not None or not self._record.has_saved_in(folder):
            return folder, tag
        found = self._record.checkpoint(self._plan["latest"], folder)
        self._said["loaded"] = None if found is None else os.path.join(folder, found)
        return None if found is None else (folder, found)

    def _loss(self, batch: int, loss: torch.Tensor) -> None:
        update = batch + 1
        if self._said["began"] is None:
            self._said["began"] = batch
        if update > self._to:
            raise VPipeError(f"training begins after update {batch}, which is not before update {self._to}")
        begin = self._record.starts[0]["update"]
        if update <= begin:
            raise VPipeError(
                f"training begins after update {batch}, but the record after update {begin}, with a checkpoint that is "
                f"no part of it; name an update after a checkpoint that the recorded run has saved"
            )
        line = self._record.difference(update, found := float(loss.float()))
        if line is not None:
            self._said |= {"difference": (update, self._record.losses[update], found), "line": line}
            self._write()
            raise VPipeError(line)

    def updated(self, engine: Any) -> None:
        """Repeat what the recorded run's engine, not its script, did after this update; end after the last one."""
        update = engine.global_steps
        for event in self._record.at("split", update):
            engine.repartition(event["partition"], event["recompute_ratio"])
        for event in self._record.at("depths", update):
            engine.set_depths(event["depths"])
        for event in self._record.at("moved", update):
            engine.moves.settle(update)
            engine.moves.begin(Move(*event["move"]))
        ends = update >= self._to
        if ends or self._record.at("emptied", update):
            engine.quiesce("replay")
        if any(start["update"] == update for start in self._record.starts):
            engine.moves.give_up()  # as where the checkpoint of this update was loaded
        if ends:
            if self._plan["state"] is not None:
                engine.save_checkpoint(self._plan["state"])
            self._said["reached"] = update
            self._write()
            engine.destroy()
            raise SystemExit(0)

    def _write(self) -> None:
        """Leave for the command what this rank has found."""
        found = None if self._faults is None or self._faults.fault is None else asdict(self._faults.fault)
        norms = [] if self._norms is None else self._norms.rows()
        path = Path(self._plan["out"], f"rank{self._rank:03d}.json")
        with whole_file(path) as part:  # a rank that is killed meanwhile leaves none
            part.write_text(json.dumps({**self._said, "fault": found, "norms": norms}), encoding="utf-8")


def history_of(engine: PatchedPipelineEngine, stage: Stage, config: VPipeConfig) -> History:
    """The history that the block, or the command ``replay``, asks for.

    Raises:
        VPipeConfigError: in a replay: the JSON is not the one that was recorded.
    """
    file, ds_config = os.environ.get(REPLAY), json.loads(json.dumps(engine._config._param_dict, default=str))
    if file is not None:
        plan = json.loads(Path(file).read_text(encoding="utf-8"))
        changed = differences(plan["start"]["ds_config"], ds_config)
        if changed:
            allowed, remedy = "the one that was recorded", f"take it from the start in {plan['record']}/events.jsonl"
            raise Refusal("DeepSpeed JSON", changed[0], allowed, remedy, "it has changed").error()
        return RecordedReplay(engine, stage, plan)
    if config.record is None or engine.global_rank != 0:
        return History()
    start = {
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "ranks": torch.distributed.get_world_size(),
        "environment": environment(os.environ),
        "machine": machine(stage.device.type),
        "ds_config": ds_config,
        "data_begin_anew": engine.data_iterator is not None,  # training_data, also if an iterator follows
    }
    return RunRecorder(stage, config.record, start)
