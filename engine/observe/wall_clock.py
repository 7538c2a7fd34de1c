"""DeepSpeed's wall clock breakdown for stages that do not go through its forward and backward calls in pairs.

DeepSpeed starts its timers in hooks on the module, twice for a stage that is not the last, and never
stops some of them. Here its own timers are started and stopped around the instructions instead, under
the names that its log lines use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from deepspeed.runtime.engine import EngineTimers
from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
)
from deepspeed.utils.timer import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_INNER_MICRO_TIMER,
    BACKWARD_MICRO_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    BACKWARD_REDUCE_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
)

from ds_vpipe.schedules.actions import Action, Kind

TIMERS: dict[Kind, tuple[str, ...]] = {
    Kind.LOAD: (BATCH_INPUT_TIMER,),
    Kind.RECV_ACT: (PIPE_RECV_INPUT_TIMER,),
    Kind.FORWARD: (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
    Kind.SEND_ACT: (PIPE_SEND_OUTPUT_TIMER,),
    Kind.RECV_GRAD: (PIPE_RECV_GRAD_TIMER,),
    Kind.DROP_GRAD: (PIPE_RECV_GRAD_TIMER,),
    Kind.BACKWARD: (
        BACKWARD_MICRO_TIMER,
        BACKWARD_GLOBAL_TIMER,
        BACKWARD_INNER_MICRO_TIMER,
        BACKWARD_INNER_GLOBAL_TIMER,
    ),
    Kind.SEND_GRAD: (PIPE_SEND_GRAD_TIMER,),
    Kind.REDUCE: (BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER),
}  # DeepSpeed's own step starts its timers; it has none for tied weights and news


class WallClock:
    """Observes the actions of one stage with DeepSpeed's timers.

    Args:
        timers: the engine's ``SynchronizedWallClockTimer``.
        ranks: whose log lines are printed: one pipeline, so that there is a line for every stage.
    """

    def __init__(self, timers: Any, ranks: Sequence[int]) -> None:
        self._timers = timers
        timers.log = partial(timers.log, ranks=list(ranks))  # DeepSpeed prints those of rank 0 only

    def before(self, action: Action) -> None:
        """An action begins."""
        for name in TIMERS.get(action.kind, ()):
            self._timers(name).start()

    def after(self, action: Action) -> None:
        """It has ended."""
        for name in TIMERS.get(action.kind, ()):
            self._timers(name).stop()


def unhooked_timers() -> EngineTimers:
    """What DeepSpeed's hooks on the module start and stop: nothing."""
    return EngineTimers(enable_micro_timers=False, enable_global_timers=False)
