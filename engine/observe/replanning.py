"""Changes that ``"replan"`` makes to the split and the depths of a running pipeline, on all ranks after one update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

from ds_vpipe.engine.build import Prepared
from ds_vpipe.engine.checkpoint.layer_moves import refuse_moves
from ds_vpipe.engine.checkpoint.rank_state import SavedSplit
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.ending import Failures
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.links.wiring import MOST_AHEAD
from ds_vpipe.engine.observe.balance import Balance
from ds_vpipe.engine.observe.history import History
from ds_vpipe.engine.stage import Stage
from ds_vpipe.planning.depth_changes import DepthChoice, DepthDecision


def balance_of(
    engine: PatchedPipelineEngine, stage: Stage, moves: LiveMoves, prepared: Prepared, note: Callable[[str], None]
) -> Balance | None:
    """The measurements and decisions of a stage, if the block asks for them.

    Raises:
        VPipeConfigError: layers cannot move; on every rank.
    """
    settings = prepared.config.replan
    if not settings.every or prepared.devices is None:
        return None
    refuse_moves(engine, stage, f"vpipe.replan.every: got {settings.every}")
    depths = None
    if prepared.follows_depths:
        most_late = max(settings.max_staleness or 0, stage.pipeline.delays[0])
        depths = DepthChoice(stage.pipeline.depths, most_late, MOST_AHEAD - 1, settings.threshold)
    return Balance(engine, stage, moves, settings, prepared.devices, prepared.chooses_ratio, depths, note)


class Replanning:
    """Decisions of a balance, carried out and entered in the history.

    Args:
        balance: decides.
        stage: of this rank.
        history: may be a replay, which has recorded decisions.
        failures: of the stage.
        set_depths: the engine's.
        repartition: likewise.
    """

    def __init__(
        self,
        balance: Balance,
        stage: Stage,
        history: History,
        failures: Failures,
        set_depths: Callable[[Sequence[int]], None],
        repartition: Callable[[Sequence[int], Sequence[float] | None], None],
    ) -> None:
        self._balance, self._stage, self._history, self._failures = balance, stage, history, failures
        self._set_depths, self._repartition = set_depths, repartition

    def after_batch(self, update: int, seconds: float) -> None:
        """Look at the balance, if it is time to, after an update whose batch took so many seconds."""
        balance, event = self._balance, self._history.event
        if self._history.replays:
            return
        begun = len(balance.steps)
        with self._failures.aborting():
            decision = balance.after_batch(seconds)
            for at, move in balance.steps[begun:]:
                event("moved", at, move=astuple(move), until=move.micro_batch // self._stage.pipeline.micro_batches)
            if isinstance(decision, DepthDecision):
                event("depths", update, depths=decision.better_depths)
                self._set_depths(decision.better_depths)
            elif decision is not None:
                begin = time.perf_counter()
                counts, ratios = decision.better_partition, decision.better_ratio
                event("split", update, partition=counts, recompute_ratio=ratios)
                self._repartition(counts, ratios)
                balance.carried_out(decision, time.perf_counter() - begin)

    def follow(self, saved: SavedSplit) -> None:
        """Go on with the split of a checkpoint, which may have been found by measurements, if it began as this run did.

        Else the script or the JSON asks for another split than before. Likewise with the depths, where they follow.
        """
        if tuple(saved.first_counts) != self._stage.first_partition:
            return
        choice, depths = self._balance.depths, saved.depths
        if choice is not None and depths is not None and choice.may_be(depths, self._stage.pipeline.micro_batches):
            self._set_depths(depths)
        pipeline, counts, ratios = self._stage.pipeline, saved.counts, saved.recompute_ratio
        if ratios is None or not self._balance.chooses_ratio:
            ratios = pipeline.recompute_ratio
        if (tuple(counts), ratios) != (pipeline.partition, pipeline.recompute_ratio):
            if self._stage.links.me.rank == 0:
                print(f"ds_vpipe: training goes on with the checkpoint's split {list(counts)}", flush=True)
            self._repartition(counts, ratios)
