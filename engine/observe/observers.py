"""Observation of one stage: statistics, timers, communication log, profile, recording. It changes no training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

import torch
from deepspeed.comm import comm as ds_comm
from deepspeed.runtime.engine import EngineTimers
from deepspeed.utils import logger

from ds_vpipe.config.block import TimelineConfig
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.executor import Watcher
from ds_vpipe.engine.observe.deepspeed_tools import CommsRecord, StageProfile, WallClock, links_by_kind, write_events
from ds_vpipe.engine.observe.recorder import TimelineRecorder
from ds_vpipe.engine.observe.statistics import (
    PeakMemory,
    StageMeter,
    StageStatistics,
    StatisticsMean,
    line,
    memory_line,
    pass_seconds,
)
from ds_vpipe.engine.stage import Stage
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.stragglers import Stragglers

_COMPARED = 16  # batches whose median is compared with earlier ones
_PAUSES_IN_A_ROW = 20
_LONG_PAUSE = 0.25  # as a share of the time from one call's end to the next one's


class Observation:
    """Watchers of one stage, with their statistics. The engine's profiler and its hooks' timers are replaced."""

    def __init__(
        self, engine: PatchedPipelineEngine, stage: Stage, timeline: TimelineConfig, plan: Plan | None
    ) -> None:
        self._engine, self._stage, self._timeline, self._plan = engine, stage, timeline, plan
        links = links_by_kind(stage)
        self._comms = CommsRecord(links)
        self._rows: Sequence[Sequence[float]] = ()
        self._mean = StatisticsMean()
        self.watchers: list[Watcher] = []  # in the order in which they begin
        self.log_messages()
        if engine.wall_clock_breakdown():
            self.watchers.append(WallClock(engine.timers, engine.grid.topology().get_axis_comm_lists("pipe")[0]))
        if engine.flops_profiler_enabled() and engine.global_rank == 0:
            engine.flops_profiler = StageProfile(engine)
            self.watchers.append(engine.flops_profiler)
        self.at_loss: list[Callable[[int, torch.Tensor], None]] = []  # get the number and the mean loss of every batch
        self._recorder: TimelineRecorder | None = None
        if self._timeline.enabled and engine.grid.get_slice_parallel_rank() == 0:
            self._recorder = TimelineRecorder(stage, engine.grid.data_parallel_id)
            self._recorder.forget_earlier(Path(self._timeline.path), engine.dp_world_size)
            self.watchers.append(self._recorder)
            self.at_loss.append(self._recorder.loss)
        # Last of these to begin and first to end: its seconds are of no other one. They are also of those behind it, of
        # a replay and of the balance.
        self.watchers.append(StageMeter(stage, links, self._record_batch))
        # For DeepSpeed's hooks on the module.
        engine.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=False)
        self._memory: PeakMemory | None = None
        first_replica = engine.grid.data_parallel_id == engine.grid.get_slice_parallel_rank() == 0
        if plan is not None and first_replica:
            groups = [] if engine.optimizer is None else engine.optimizer.param_groups
            weights = [*engine.module.parameters(), *(weight for group in groups for weight in group["params"])]
            self._memory = PeakMemory(engine.device, weights)
        self._ended = False
        # On accelerators passes last as long as it takes to queue them, and a script that waits for its own device to
        # read a loss looks like one that waits for other ranks.
        on_host = stage.copies is None
        self._pauses = PauseWatch() if stage.may_withdraw and stage.is_last and first_replica and on_host else None
        # The first stage has the records of all.
        self._compares = stage.is_first and on_host and engine.grid.get_slice_parallel_rank() == 0
        self._split: object = None
        self._stragglers = Stragglers()
        self._passes: list[Sequence[Sequence[float]]] = []  # records of the latest batches whose passes compare

    def log_messages(self) -> None:
        """Watch for DeepSpeed's communication log if it is on, which scripts may change before any batch."""
        wanted, watches = bool(ds_comm.comms_logger.enabled), self._comms in self.watchers
        if wanted and not watches:
            self.watchers.insert(0, self._comms)
        elif watches and not wanted:
            self.watchers.remove(self._comms)

    def _record_batch(self, row: list[float]) -> None:
        """Enter this stage's record of a batch in the report for the previous stage."""
        stage = self._stage
        assert stage.report is not None
        self._rows = [row]
        batch = stage.progress.completed // stage.pipeline.micro_batches - 1
        for take in self.at_loss:
            take(batch, stage.report.losses[1])
        rows = stage.report.statistics
        rows[stage.number] = row
        if stage.is_first:
            self._rows = rows.tolist()
            if self._engine.global_rank == 0:
                self._mean.add(rows)

    def statistics(self) -> list[StageStatistics]:
        """Records of the latest batch: all stages' on the first stage, elsewhere the stage's own."""
        return [StageStatistics.from_row(row) for row in self._rows]

    def note(self, event: str) -> None:
        """Keep an event in the recording, with its time."""
        if self._recorder is not None:
            self._recorder.note(event)

    def save_timeline(self) -> Path | None:
        """Write the recording to ``timeline.path``; returns its file, or None without a recording."""
        return None if self._recorder is None else self._recorder.save(Path(self._timeline.path))

    def end(self) -> None:
        """Print the measured peak and write the recording, once; no run fails for it."""
        if self._ended:
            return
        self._ended = True
        if self._plan is not None and self._memory is not None:
            stage = self._stage
            said = memory_line(self._plan, stage.pipeline, stage.number, self._memory)
            print(f"{said}\n", end="", flush=True)  # in one write: all ranks print theirs at once
        try:
            self.save_timeline()
        except Exception as error:
            logger.warning(f"ds_vpipe: timeline.path {self._timeline.path!r} cannot be written: {error}")

    def after_batch(self, begin: float) -> None:
        """A call of ``train_batch()`` that began at ``begin``, in seconds, ends."""
        if self._pauses is not None:
            self._pauses.after_batch(begin, time.perf_counter())

    def _note_passes(self) -> None:
        """Keep how long passes have taken, to compare them."""
        progress, pipeline = self._stage.progress, self._stage.pipeline
        split = pipeline.partition, pipeline.recompute_ratio, pipeline.micro_batches
        if split != self._split:  # what a stage takes has changed because it has other work
            self._split, self._stragglers, self._passes = split, Stragglers(), []
        filled = progress.completed - progress.filled_from == pipeline.micro_batches  # from an empty pipeline on
        if progress.forwarded - progress.completed != (0 if filled else pipeline.depths[0]):
            return  # with more forward passes than a batch has, or fewer
        self._passes.append(self._rows)
        if len(self._passes) == _COMPARED:
            self._name_stragglers()

    def _name_stragglers(self) -> None:
        """Compare the stages of this pipeline with their past."""
        engine, size, seconds = self._engine, self._stage.pipeline.micro_batches, list[float]()
        for rows in zip(*self._passes, strict=True):  # of one stage
            seconds.append(median(map(pass_seconds, rows)) / size)
        self._passes = []
        for found in self._stragglers.add(seconds):
            replica = f"replica {engine.grid.data_parallel_id}: " if engine.dp_world_size > 1 else ""
            event = replica + found.line(engine.global_steps)
            self.note(event)
            print(f"ds_vpipe: {event}", flush=True)
            write_events(engine, {f"stage{found.stage}/slower_by": found.factor})

    def publish(self) -> None:
        """Line and monitors' events on global rank 0, every ``steps_per_print`` batches."""
        if self._compares:
            self._note_passes()
        engine, interval = self._engine, self._engine.steps_per_print()
        if engine.global_rank != 0 or (interval is not None and engine.global_steps % interval):
            return
        records = self._mean.take()
        if interval is not None:
            stages = f"stages 0-{self._stage.pipeline.num_stages - 1}"
            print(f"steps: {engine.global_steps} {stages}: {line(records)}", flush=True)
        values = {
            f"stage{record.stage}/{name}": value
            for record in records
            for name, value in (*dataclasses.asdict(record).items(), ("wait_s", record.wait_s))
            if name not in ("stage", "batch")
        }
        write_events(engine, values)


class PauseWatch:
    """Count of batches in a row before which the script took long on the last stage.

    That stage is the first to return from ``train_batch()``, so that it waits longest where a script lets ranks wait
    for each other. Stages are then no longer ahead of each other, as an asynchronous pipeline needs it.
    """

    def __init__(self) -> None:
        self._warned = False
        self._end: float | None = None
        self._pauses: list[float] = []

    def after_batch(self, begin: float, end: float) -> None:
        """A call of ``train_batch()`` has lasted from ``begin`` to ``end``, in seconds."""
        if self._warned:
            return
        share = 0.0 if self._end is None else (begin - self._end) / max(end - self._end, 1e-9)
        self._end = end
        self._pauses = [*self._pauses, share] if share > _LONG_PAUSE else []
        if len(self._pauses) >= _PAUSES_IN_A_ROW:
            self._warned = True
            logger.warning(
                f"ds_vpipe: in {_PAUSES_IN_A_ROW} batches in a row the script took {mean(self._pauses):.0%} of the "
                f"time on the last stage: if it waits for other ranks there, by a barrier or a collective, stages wait "
                f"as in a synchronous pipeline; if so, do that every 50 batches (Megatron's --log-interval 50)"
            )
