"""DeepSpeed's flops profiler for one stage of a pipeline.

DeepSpeed starts its profiler in a hook on the module and prints in ``step()``, which a pipeline never
calls. Here it is started and printed around one forward pass.
"""

from __future__ import annotations

from typing import Any

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

from ds_vpipe.schedules.actions import Action, Kind


class _Untimed:
    """The engine as the profiler sees it: without timers, which hold several micro-batches and not the profiled one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def wall_clock_breakdown(self) -> bool:
        return False


class StageProfile(FlopsProfiler):
    """Observes the actions of a stage and profiles the first forward pass from ``profile_step`` on.

    Args:
        engine: the stage's engine; its ``flops_profiler`` settings hold.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module, _Untimed(engine), engine.flops_profiler_recompute_fwd_factor())
        self._engine = engine
        self._done = False

    def start_profile(self, ignore_list: list[type] | None = None) -> None:
        """What DeepSpeed's hook calls within the module's forward pass: too late, the pass has been timed already."""

    def stop_profile(self) -> None:
        """What DeepSpeed's hook calls at its end."""

    def before(self, action: Action) -> None:
        """An action begins."""
        if self._profiles(action):
            super().start_profile()

    def after(self, action: Action) -> None:
        """It has ended."""
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
