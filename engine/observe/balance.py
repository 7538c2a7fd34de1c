"""Balance of a running pipeline: layers are measured, and all ranks decide alike whether they should move.

Nothing stands still for it. At a look every rank leaves what it has measured in the store; all ranks read it a fixed
number of updates later, by when every rank has made the update of the look and so left its own. That follows from the
order of the passes: a rank that has done update u has an activation or a gradient of every other stage, which that one
has sent after its update ``u - ceil((W_0 + 1) / M)``. What is decided depends on what was left alone
(:mod:`ds_vpipe.planning.replanning`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple
from statistics import mean, median
from typing import Any

from ds_vpipe.engine.build import Prepared
from ds_vpipe.engine.checkpoint.layer_moves import refuse_moves
from ds_vpipe.engine.checkpoint.rank_state import SavedSplit
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.execution.movable_layers import options_of, other_options, unfit_configuration, unfit_layers
from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.wiring import MOST_AHEAD
from ds_vpipe.engine.modules.built_layers import Built
from ds_vpipe.engine.modules.recompute import layers_by_number
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.observe.deepspeed_tools import write_events
from ds_vpipe.engine.observe.layer_costs import LayerCosts
from ds_vpipe.engine.observe.layer_probe import LayerProbe
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.depth_changes import DepthChoice, DepthDecision
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.profiler import copy_of
from ds_vpipe.planning.replanning import Decision, Looks, Work, decide, in_steps, joined, separated, stages_of_layers
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.moves import Move, earliest_cut_over

_PASSES = (Kind.FORWARD, Kind.BACKWARD)
_KEPT = 2  # looks whose measurements stay in the store


class Balance:
    """Watcher of one stage that measures its layers, and the changes of split and depths that all ranks decide on.

    Raises:
        VPipeConfigError: layers cannot move, or not be timed, or not be copied where memory has a limit; on every rank.
    """

    def __init__(self, engine: Any, prepared: Prepared) -> None:
        settings, devices, stage = prepared.config.replan, prepared.devices, engine.stage
        assert devices is not None  # with "every"
        refuse_moves(engine, stage, f"vpipe.replan.every: got {settings.every}")
        self._engine = engine  # which carries decisions out; its history gets every change, a replay has recorded ones
        self._stage: Stage = stage
        self._live: LiveMoves = engine.moves  # which carry out decisions while training goes on
        self._settings, self._devices, self.chooses_ratio = settings, devices, prepared.chooses_ratio
        self.depths: DepthChoice | None = None  # what is known of depths that follow; None if they are fixed
        if prepared.follows_depths:
            most_late = max(settings.max_staleness or 0, stage.pipeline.delays[0])
            self.depths = DepthChoice(stage.pipeline.depths, most_late, MOST_AHEAD - 1, settings.threshold)
        self._probe = LayerProbe(stage.device)
        self._looks = Looks.of(stage.pipeline, settings.every, engine.global_steps)
        self._counted = 0  # looks so far
        self._batches: list[float] = []  # seconds of calls of train_batch() since then
        self._costs = LayerCosts(engine, stage, self._probe, sized=devices.budget is not None)
        self._step_began = 0.0
        self._known: Work | None = None
        self._move_s: float | None = None
        self._abandoned: set[tuple[int, ...]] = set()  # splits that layers have moved away from
        self._pace = 0.0  # measured seconds per micro-batch at the last look
        self._under_way: Decision | None = None  # whose steps are being made
        self._begun = 0.0
        self._steps_to_come: deque[Move] = deque()
        # Decisions so far, oldest first, the same on all ranks.
        self.decisions: list[Decision] = []
        self.depth_decisions: list[DepthDecision] = []
        self.steps: list[tuple[int, Move]] = []  # moves of single layers, each with the update after which it was given
        self.moves: list[dict[str, Any]] = []  # decisions carried out; "after_s" is None as long as it is not known
        if isinstance(stage.module, SplitModule) and devices.budget is not None:
            raise VPipeConfigError(
                f"vpipe.replan.every: got {settings.every} for a plain module with {devices.budget} bytes of memory "
                f"per stage, allowed is no limit, on the CPU without vpipe.memory_budget, since the activations of "
                f"pieces are not known; remove one of them"
            )
        if devices.budget is not None:
            with stage.consensus.all_or_none("vpipe.replan.every"):
                for layer in stage.module.forward_funcs:
                    copy_of(layer, meta=True)

    # Measurement

    def before(self, action: Action) -> None:
        """Begin to measure a pass or an update."""
        if action.kind in _PASSES and self._is_sampled(action.index):
            labels = self._stage.in_flight[action.index, self._stage.number].labels
            self._probe.begin(self._stage.module, action.index, action.kind is Kind.FORWARD, labels)
        elif action.kind is Kind.STEP:
            self._step_began = time.perf_counter()

    def after(self, action: Action) -> None:
        """End the measurement of a pass or an update."""
        if action.kind in _PASSES and self._is_sampled(action.index):
            self._probe.end(self._stage.module, action.index, action.kind is Kind.FORWARD)
        elif action.kind is Kind.STEP:
            self._costs.updates.append(time.perf_counter() - self._step_began)

    def start_over(self) -> None:
        """Forget measurements of what has changed since; all ranks call this after the same update."""
        self._probe.forget()
        self._costs.start_over()
        self._batches = []
        self._looks = Looks.of(self._stage.pipeline, self._settings.every, self._engine.global_steps)
        self._under_way = None
        self._steps_to_come.clear()

    def _is_sampled(self, index: int) -> bool:
        batch, first = divmod(index, self._stage.pipeline.micro_batches)
        return first == 0 and batch % self._looks.stride == 0 and self._under_way is None

    # Decisions

    def after_batch(self, update: int, seconds: float) -> None:
        """Look at the balance, if it is time to, after an update whose batch took so many seconds; change what pays."""
        event = self._engine.history.event
        if self._engine.history.replays:
            return
        begun = len(self.steps)
        with self._engine.failures.aborting():
            decision = self._looked(update, seconds)
            for at, move in self.steps[begun:]:
                event("moved", at, move=astuple(move), until=move.micro_batch // self._stage.pipeline.micro_batches)
            if isinstance(decision, DepthDecision):
                event("depths", update, depths=decision.better_depths)
                self._engine.set_depths(decision.better_depths)
            elif decision is not None:
                begin = time.perf_counter()
                counts, ratios = decision.better_partition, decision.better_ratio
                event("split", update, partition=counts, recompute_ratio=ratios)
                self._engine.repartition(counts, ratios)
                self._move_s = time.perf_counter() - begin
                self._count(decision, self._move_s, f"{self._move_s:.2f} s")

    def follow(self, saved: SavedSplit) -> None:
        """Go on with the split of a checkpoint, which may have been found by measurements, if it began as this run did.

        Else the script or the JSON asks for another split than before. Likewise with the depths, where they follow.
        """
        if tuple(saved.first_counts) != self._stage.first_partition:
            return
        choice, depths = self.depths, saved.depths
        if choice is not None and depths is not None and choice.may_be(depths, self._stage.pipeline.micro_batches):
            self._engine.set_depths(depths)
        pipeline, counts, ratios = self._stage.pipeline, saved.counts, saved.recompute_ratio
        if ratios is None or not self.chooses_ratio:
            ratios = pipeline.recompute_ratio
        if (tuple(counts), ratios) != (pipeline.partition, pipeline.recompute_ratio):
            if self._stage.links.me.rank == 0:
                print(f"ds_vpipe: training goes on with the checkpoint's split {list(counts)}", flush=True)
            self._engine.repartition(counts, ratios)

    def _looked(self, update: int, seconds: float) -> Decision | DepthDecision | None:
        """Count a batch; at a look leave the measurements, some updates later decide, and make steps one by one.

        Returns:
            A decision for which the pipeline has to be emptied, if one has been made.
        """
        self._batches.append(seconds)
        if self._under_way is not None:
            self._go_on(self._under_way, update)
            return None
        due = self._looks.due(update)
        if due == "write":
            self._leave()
        if due != "read":
            return None
        decision = self._decide(update)
        if decision is None or decision.stays or self._settings.dry_run:
            return None
        if isinstance(decision, DepthDecision):
            return decision
        self._abandoned.add(decision.partition)
        if not decision.steps:
            return decision
        self._begun, self._under_way, self._steps_to_come = time.perf_counter(), decision, deque(decision.steps)
        self._go_on(decision, update)
        return None

    def _go_on(self, decision: Decision, update: int) -> None:
        """Begin the next step if the one before is done on all ranks, which all know without asking."""
        self._live.settle(update)
        if self._live.move is not None:
            return
        if self._steps_to_come:
            step, pipeline = self._steps_to_come.popleft(), self._stage.pipeline
            cut_over = earliest_cut_over(pipeline, step.source, step.target, update)
            move = dataclasses.replace(step, micro_batch=cut_over)
            self._live.begin(move)
            self.steps.append((update, move))
        else:
            self.start_over()
            took = f"{len(decision.steps)} steps and {update - decision.update} updates"
            self._count(decision, time.perf_counter() - self._begun, took)

    def _count(self, decision: Decision, seconds: float, took: str) -> None:
        self.moves.append({"update": decision.update, "seconds": seconds, "before_s": self._pace, "after_s": None})
        self._say(f"replan at update {decision.update}: moved in {took}")

    def _leave(self) -> None:
        """Put measurements of this rank since the last look into the store."""
        profile, rank = self._costs.profile(), self._engine.global_rank
        self._counted += 1
        # The first batch after a change has filled the pipeline.
        filled = int(len(self._batches) > 1 and self._engine.global_steps - len(self._batches) == self._looks.since)
        content = {
            "stage": self._stage.number,
            "profile": None if profile is None else profile.text(),
            "batch_s": median(self._batches),
            "mean_s": mean(self._batches[filled:]),
            "passes": [] if self.depths is None else self._costs.passes(),
            "move_s": self._move_s,
            "unfit": self._unfit(),
            "changed": self._changed(),
        }
        self._stage.groups.put(_key(self._counted, rank), json.dumps(content))
        if self._counted > _KEPT:
            self._stage.groups.delete(_key(self._counted - _KEPT, rank))
        self._probe.samples = []
        self._batches, self._costs.updates = [], []

    def _unfit(self) -> tuple[str | None, dict[int, str], dict[str, Any]] | None:
        """What is against moves from this stage while training goes on, if they are wanted."""
        if self._settings.moves != "live":
            return None
        reason = unfit_configuration(self._engine, self._stage)
        if reason is not None:
            return reason, {}, {}
        return None, unfit_layers(self._stage.module, self._stage.built), options_of(self._engine)

    def _changed(self) -> list[int]:
        """Layers here whose modules or hooks are not those that another stage would build."""
        layers, built = layers_by_number(self._stage.module), self._stage.built
        return [number for number, layer in layers.items() if Built.of(layer).structure != built[number].structure]

    def _with_steps(self, decision: Decision, work: Work, unfit: Sequence[Any]) -> Decision:
        """``decision`` with its steps, or with the reason why the pipeline has to be emptied for it."""
        if decision.stays or self._settings.moves != "live":
            return decision
        reason = next((one for one, *_ in unfit if one is not None), None)
        if reason is None:
            reason = other_options([options for *_, options in unfit])
        found = in_steps(decision, work, self._stage.pipeline, self._devices, reason)
        layers = {int(number): why for _, reasons, _ in unfit for number, why in reasons.items()}
        stay = next((layers[step.layer] for step in found.steps if step.layer in layers), None)
        return found if stay is None else dataclasses.replace(decision, empties=stay)

    def _decide(self, update: int) -> Decision | DepthDecision | None:
        engine, stage, pipeline = self._engine, self._stage, self._stage.pipeline
        topology = engine.grid.topology()
        peers = [Peer(topology.get_coord(rank).pipe, rank) for rank in range(engine.grid.world_size)]
        found = [json.loads(stage.groups.wait_for(_key(self._counted, peer.rank), peer)) for peer in peers]
        self._pace = max(one["batch_s"] for one in found) / pipeline.micro_batches
        if self.moves and self.moves[-1]["after_s"] is None:
            last = self.moves[-1]
            last["after_s"] = self._pace
            self._say(
                f"replan at update {last['update']}: {1e3 * last['before_s']:.2f} -> {1e3 * self._pace:.2f} ms per "
                f"micro-batch measured"
            )
        profiles = [(one["stage"], one["profile"]) for one in found]
        if any(profile is None for _, profile in profiles):
            self._say(f"replan at update {update}: {list(pipeline.counts)} stays: nothing was measured")
            return None
        measured = joined((number, ModelProfile.from_text(profile)) for number, profile in profiles)
        self._known = separated(measured, pipeline.counts, self._known)
        decision = decide(
            self._known,
            pipeline,
            self._devices,
            self._settings,
            update=update,
            chooses_ratio=self.chooses_ratio,
            move_s=max((one["move_s"] for one in found if one["move_s"] is not None), default=None),
            abandoned=self._abandoned,
        )
        homes, others = stages_of_layers(decision.partition), stages_of_layers(decision.better_partition)
        for number in sorted(number for one in found for number in one["changed"]):
            if homes[number] != others[number] and not decision.stays:
                reason = f"the script has changed modules or hooks of layer {number}, and another stage cannot build it"
                decision = dataclasses.replace(decision, stays=reason)
        decision = self._with_steps(decision, self._known, [one["unfit"] for one in found])
        self.decisions.append(decision)
        self._say(decision.line())
        seconds = {"planned_s": decision.seconds, "better_s": decision.better_seconds, "measured_s": self._pace}
        write_events(engine, {f"replan/{name}": value for name, value in seconds.items()})
        measured_from = max(0, update - self._looks.delay - self._settings.every)
        drained = stage.delay_warmup.drain_interval(measured_from)[1] is not None  # so its pace says nothing of depths
        if self.depths is None or drained or not decision.stays:
            return decision
        return self._decide_depths(self.depths, update, found)

    def _decide_depths(self, choice: DepthChoice, update: int, found: list[dict[str, Any]]) -> DepthDecision:
        assert self._known is not None
        pipeline = self._stage.pipeline
        passes = [(one["stage"], one["passes"]) for one in found]
        mean_s = max(one["mean_s"] for one in found) / pipeline.micro_batches
        decision = choice.decide(pipeline, self._known, self._devices, passes, update=update, measured_s=mean_s)
        if self._settings.dry_run:
            choice.deepened = None
        self.depth_decisions.append(decision)
        self._say(decision.line())
        write_events(self._engine, {"replan/depth": decision.better_depths[0]})
        return decision

    def _say(self, line: str) -> None:
        self._engine.observation.note(line)
        if self._engine.global_rank == 0:
            print(f"ds_vpipe: {line}", flush=True)  # DeepSpeed's logger shows warnings alone by default


def _key(look: int, rank: int) -> str:
    return f"replan {look} of rank {rank}"
