"""What a stage tells about its work: statistics, timers, communication log, profile. None of it changes training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from ds_vpipe.config import VPipeConfig
from ds_vpipe.engine.execution.in_flight import StageState
from ds_vpipe.engine.execution.instructions import StageInstruction
from ds_vpipe.engine.links.groups import Groups
from ds_vpipe.engine.links.stage_links import Neighbours, links_by_kind
from ds_vpipe.engine.observe.comms_record import CommsRecord
from ds_vpipe.engine.observe.memory import PeakMemory, memory_line
from ds_vpipe.engine.observe.recorder import Recorder
from ds_vpipe.engine.observe.stage_profile import StageProfile
from ds_vpipe.engine.observe.statistics import StageMeter, StageStatistics, StatisticsMean, line
from ds_vpipe.engine.observe.wall_clock import WallClock, unhooked_timers
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.pipeline import Pipeline

if TYPE_CHECKING:
    from ds_vpipe.planning.plan import Plan


class Observer(Protocol):
    """Something that is told of every action of a stage."""

    def before(self, action: Action) -> None:
        """The action begins."""

    def after(self, action: Action) -> None:
        """The action has ended, or was given up."""


class Observation:
    """The observers of one stage and the statistics that they have gathered.

    Args:
        engine: an engine with its links and its stashing optimizer.
    """

    def __init__(self, engine: Any) -> None:
        links = links_by_kind(engine.neighbours, engine.ties)
        self.meter = StageMeter(engine.stage_id, links, lambda: engine.stashing_optimizer, engine.key_of, engine.device)
        self.rows: Sequence[Sequence[float]] = ()
        self.mean = StatisticsMean()
        self.observers: list[Observer] = [CommsRecord(links)]
        if engine.wall_clock_breakdown():
            self.observers.append(WallClock(engine.timers, engine.grid.pipe_groups[0]))
        if engine.flops_profiler_enabled() and engine.global_rank == 0:
            engine.flops_profiler = StageProfile(engine)
            self.observers.append(engine.flops_profiler)
        self.recorder: Recorder | None = None
        if engine.vpipe_config.timeline.enabled and engine.grid.get_slice_parallel_rank() == 0:
            self.recorder = Recorder(
                engine.stage_id,
                engine.num_stages,
                engine.grid.data_parallel_id,
                lambda: engine.stashing_optimizer,
                engine.key_of,
                engine.device,
            )
            self.recorder.forget_earlier(Path(engine.vpipe_config.timeline.path))
            self.observers.append(self.recorder)
        self.observers.append(self.meter)  # last to begin and first to end: it measures no other observer
        engine.engine_timers = unhooked_timers()
        self.memory: PeakMemory | None = None
        if engine.plan is not None and engine.grid.data_parallel_id == engine.grid.get_slice_parallel_rank() == 0:
            groups = [] if engine.optimizer is None else engine.optimizer.param_groups
            weights = [*engine.module.parameters(), *(weight for group in groups for weight in group["params"])]
            self.memory = PeakMemory(engine.device, weights)
        self.ended = False

    def carry_out(self, action: Action, method: Callable[..., None], *args: Any) -> None:
        """Call ``method``, which is what ``action`` means, under observation."""
        for observer in self.observers:
            observer.before(action)
        try:
            method(*args)
        finally:
            for observer in reversed(self.observers):
                observer.after(action)


class ObservationMixin(PipelineEngine):
    """Statistics of the pipeline, for an engine with an :class:`Observation`."""

    groups: Groups
    neighbours: Neighbours
    state: StageState
    stashing_optimizer: WeightStashingOptimizer
    vpipe_config: VPipeConfig
    pipeline: Pipeline
    plan: Plan | None
    depths: Sequence[int]
    _observation: Observation
    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]]

    def statistics(self) -> list[StageStatistics]:
        """What the latest batch took: every stage's record on the first stage, elsewhere the stage's own.

        The records are those of this rank's pipeline; other replicas have their own. Empty before the first batch.
        """
        return [StageStatistics.from_row(row) for row in self._observation.rows]

    def save_timeline(self, folder: str | os.PathLike[str] | None = None) -> Path | None:
        """Write what this rank has recorded; with ``timeline.enabled`` it is also done when the engine ends.

        Args:
            folder: where to; default: ``timeline.path``.

        Returns:
            The file of this rank, or None if nothing is recorded.
        """
        recorder = self._observation.recorder
        if recorder is None:
            return None
        timeline = self.vpipe_config.timeline
        return recorder.save(
            Path(timeline.path if folder is None else folder),
            self.micro_batches,
            {"schedule": self.pipeline.schedule, "depths": list(self.depths), "device": str(self.device)},
        )

    def _end_observation(self) -> None:
        """Say what the planned memory has come to and write the recording, once; a run must not fail for it."""
        if "_observation" not in self.__dict__ or self._observation.ended:
            return
        self._observation.ended = True
        if self.plan is not None and self._observation.memory is not None:
            print(memory_line(self.plan, self.stage_id, self._observation.memory), flush=True)
        try:
            self.save_timeline()
        except Exception as error:
            logger.warning(f"ds_vpipe: timeline.path {self.vpipe_config.timeline.path!r} cannot be written: {error}")

    def _carry_out(self, instruction: StageInstruction) -> None:
        action, method = instruction.action, self._INSTRUCTION_MAP[type(instruction)]
        part = self.stage_id if action.part is None else action.part
        self.groups.check(action)
        self.neighbours.wait_for_copies(action.kind)  # no part of the action: on an accelerator that is what computes
        self._observation.carry_out(action, method, self, action.index, part)
        ends_batch = action.kind is Kind.BACKWARD and (action.index + 1) % self.micro_batches == 0
        if ends_batch and part == self.stage_id:  # the last of this stage's parts
            self._close_record(batch=action.index // self.micro_batches)

    def _close_record(self, batch: int) -> None:
        """Put this stage's record into the report that goes on to the previous stage."""
        row = self._observation.meter.close(batch).row()
        self._observation.rows = [row]
        if self.state.report is None:
            return  # the caller will find out
        if self._observation.recorder is not None:
            self._observation.recorder.loss(batch, float(self.state.report.losses[1]))
        rows = self.state.report.statistics
        rows[self.stage_id] = row
        if self.is_first_stage():
            self._observation.rows = rows.tolist()
            if self.global_rank == 0:
                self._observation.mean.add(rows)

    def _publish_statistics(self) -> None:
        """On global rank 0: a line and the monitors' events, every ``steps_per_print`` batches."""
        interval = self.steps_per_print()
        if self.global_rank != 0 or (interval is not None and self.global_steps % interval != 0):
            return
        records = self._observation.mean.take()
        if interval is not None:
            print(f"steps: {self.global_steps} stages 0-{self.num_stages - 1}: {line(records)}", flush=True)
        if self.monitor.enabled:
            self.monitor.write_events(
                [
                    (f"Train/Pipeline/stage{record.stage}/{name}", value, self.global_samples)
                    for record in records
                    for name, value in (*dataclasses.asdict(record).items(), ("wait_s", record.wait_s))
                    if name not in ("stage", "batch")
                ]
            )
