"""DeepSpeed's wall clock breakdown, communication log, flops profiler and monitors, for one stage of a pipeline.

DeepSpeed starts its timers and its profiler in hooks on the module, twice for a stage that is not the last, and never
stops some of them; it logs messages through ``deepspeed.comm``, which links between stages do not use. Here timers,
log and profiler are watchers of the stage's actions, and write under the names of DeepSpeed's log lines.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deepspeed.comm import comm as ds_comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.pipe import engine as ds_pipe
from deepspeed.utils import timer as ds_timer

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.stage import Stage
from ds_vpipe.schedules.actions import Action, Kind

Links = Mapping[Kind, Sequence[Sender | Receiver]]

TIMERS: dict[Kind, tuple[str, ...]] = {
    Kind.LOAD: (ds_pipe.BATCH_INPUT_TIMER,),
    Kind.RECV_ACT: (ds_pipe.PIPE_RECV_INPUT_TIMER,),
    Kind.FORWARD: (ds_timer.FORWARD_MICRO_TIMER, ds_timer.FORWARD_GLOBAL_TIMER),
    Kind.SEND_ACT: (ds_pipe.PIPE_SEND_OUTPUT_TIMER,),
    Kind.RECV_GRAD: (ds_pipe.PIPE_RECV_GRAD_TIMER,),
    Kind.DROP_GRAD: (ds_pipe.PIPE_RECV_GRAD_TIMER,),
    Kind.BACKWARD: (
        ds_timer.BACKWARD_MICRO_TIMER,
        ds_timer.BACKWARD_GLOBAL_TIMER,
        ds_timer.BACKWARD_INNER_MICRO_TIMER,
        ds_timer.BACKWARD_INNER_GLOBAL_TIMER,
    ),
    Kind.SEND_GRAD: (ds_pipe.PIPE_SEND_GRAD_TIMER,),
    Kind.REDUCE: (ds_timer.BACKWARD_REDUCE_MICRO_TIMER, ds_timer.BACKWARD_REDUCE_GLOBAL_TIMER),
}  # DeepSpeed's own step starts its timers; it has none for exchanges around updates


def links_by_kind(stage: Stage) -> Links:
    """The links that an action of each kind uses."""
    links, ties = stage.links, stage.ties
    gradients_in, gradients_out = [link.gradients for link in links.after], [link.gradients for link in links.before]
    return {
        Kind.SEND_ACT: [link.activations for link in links.after],
        Kind.RECV_ACT: [link.activations for link in links.before],
        Kind.SEND_GRAD: gradients_out,
        Kind.RECV_GRAD: gradients_in,
        Kind.DROP_GRAD: gradients_in,
        Kind.SEND_PEERS: gradients_out,
        Kind.RECV_PEERS: gradients_in,
        Kind.SEND_TIED: ties.weights_out,
        Kind.RECV_TIED: ties.weights_in,
        Kind.SEND_TIED_GRAD: ties.gradients_out,
        Kind.RECV_TIED_GRAD: ties.gradients_in,
    }


class WallClock:
    """DeepSpeed's wall clock breakdown of one stage. ``ranks`` are one pipeline's: each stage has a log line."""

    def __init__(self, timers: Any, ranks: Sequence[int]) -> None:
        self._timers = timers  # the engine's SynchronizedWallClockTimer
        timers.log = partial(timers.log, ranks=list(ranks))  # DeepSpeed prints those of rank 0 only

    def before(self, action: Action) -> None:
        """Start the timers of the action's kind."""
        for name in TIMERS.get(action.kind, ()):
            self._timers(name).start()

    def after(self, action: Action) -> None:
        """Stop the timers."""
        for name in TIMERS.get(action.kind, ()):
            self._timers(name).stop()


class CommsRecord:
    """The pipeline's messages in DeepSpeed's communication log (``comms_logger``).

    Sends are listed as ``isend``, since they only start, and receives as ``recv``, with the time that the stage waited.
    ``"prof_ops": ["send"]`` has sends too: so DeepSpeed's pipeline calls them.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._bytes = 0
        self._begin = 0.0

    def before(self, action: Action) -> None:
        """Note time and bytes so far."""
        self._begin, self._bytes = time.perf_counter(), self._moved(action)

    def after(self, action: Action) -> None:
        """Log the difference."""
        logger = ds_comm.comms_logger
        size = self._moved(action) - self._bytes
        operation = "isend" if action.kind.value.startswith("SEND") else "recv"
        if size and (logger.prof_all or {operation, operation.removeprefix("i")} & {*logger.prof_ops}):
            milliseconds = max(1e-6, 1e3 * (time.perf_counter() - self._begin))
            logger.append(operation, operation, milliseconds, size)

    def _moved(self, action: Action) -> int:
        """Bytes so far on the links that ``action`` uses."""
        links = self._links.get(action.kind, ())
        return sum(link.bytes_sent if isinstance(link, Sender) else link.bytes_received for link in links)


class _Untimed:
    """The engine as the profiler sees it: without timers, which hold several micro-batches and not the profiled one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def wall_clock_breakdown(self) -> bool:
        return False


class StageProfile(FlopsProfiler):
    """DeepSpeed's flops profile of a stage's first forward pass from ``profile_step`` on, by the engine's settings."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module, _Untimed(engine), engine.flops_profiler_recompute_fwd_factor())
        self._engine = engine
        self._done = False

    def start_profile(self, ignore_list: list[type] | None = None) -> None:
        """Nothing: DeepSpeed's hook calls this within the forward pass, which has been timed already."""

    def stop_profile(self) -> None:
        """Nothing, likewise."""

    def before(self, action: Action) -> None:
        """Start the profile, if the action is the pass to profile."""
        if self._profiles(action):
            super().start_profile()

    def after(self, action: Action) -> None:
        """Print the profile."""
        if not self._profiles(action):
            return
        self._done = True
        super().stop_profile()
        engine = self._engine
        self.print_model_profile(
            profile_step=engine.global_steps,
            module_depth=engine.flops_profiler_module_depth(),
            top_modules=engine.flops_profiler_top_modules(),
            detailed=engine.flops_profiler_detailed(),
            output_file=engine.flops_profiler_output_file(),
        )
        self.end_profile()

    def _profiles(self, action: Action) -> bool:
        if self._done or action.kind is not Kind.FORWARD:
            return False
        return bool(self._engine.global_steps >= self._engine.flops_profiler_profile_step())


def write_events(engine: PatchedPipelineEngine, values: Mapping[str, float]) -> None:
    """Events of DeepSpeed's monitors by name under ``Train/Pipeline/``, on global rank 0."""
    if engine.global_rank == 0 and engine.monitor.enabled:
        samples = engine.global_samples
        engine.monitor.write_events([(f"Train/Pipeline/{name}", value, samples) for name, value in values.items()])
