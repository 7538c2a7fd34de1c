"""A pipeline that balances itself, on paper: what its looks would find, what they would decide, what that would gain.

What layers really cost is given: a profile, devices that take longer from some update on, layers that are frozen. A
look sees of it what the engine's clocks would see, seconds of layers where they run now. The decisions are the
engine's own, :mod:`ds_vpipe.planning.replanning`. Layers move as the engine moves them: one after the other while
training goes on, or in an empty pipeline, which begins anew with the new split.

The passes that a drain throws away are not counted, and a move in an empty pipeline takes the seconds of its bytes over
the links alone. What a layer that moves while training goes on adds to a link is counted as one message more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ds_vpipe.config.replan import Replan
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.planner import predict
from ds_vpipe.planning.replanning import Decision, Looks, Work, decide, in_steps, separated, stages_of_layers
from ds_vpipe.schedules.moves import Move, earliest_cut_over, moved
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import planned_costs
from ds_vpipe.simulation.simulator import Phase, Simulation, simulate
from ds_vpipe.tables import aligned
from ds_vpipe.timelines.figure import Curve, draw
from ds_vpipe.timelines.timeline import Timeline

_SHOWN = 8  # stages whose layers are listed


@dataclass(frozen=True)
class Slowdown:
    """A device that takes another time from an update on."""

    stage: int
    factor: float  # of the seconds in the profile
    update: int  # updates before it

    def __str__(self) -> str:
        return f"stage {self.stage} takes {self.factor:g} x its time"


@dataclass(frozen=True)
class Freezing:
    """Layers that are not trained any more from an update on: the first ones, which then have no backward pass."""

    layers: int
    update: int  # updates before it

    def __str__(self) -> str:
        return f"{self.layers} layers are frozen"


@dataclass(frozen=True)
class Stretch:
    """Updates between two changes of the costs or of the split."""

    updates: range  # counted from 0
    reason: str  # what has changed before
    pipeline: Pipeline  # with its split
    best_s: float  # seconds per micro-batch with the planner's split for these costs, moves not counted


@dataclass(frozen=True)
class Course:
    """Outcome of :func:`replanned`."""

    decisions: list[Decision]
    stretches: list[Stretch]
    moving: Simulation  # with the decisions
    staying: Simulation  # with the split of the start

    @property
    def micro_batches(self) -> int:
        """Micro-batches per batch."""
        return self.moving.pipeline.micro_batches

    @property
    def seconds(self) -> tuple[list[float], list[float]]:
        """Seconds per micro-batch of every update, with looks and without."""
        found: list[list[float]] = []
        batches = self.stretches[-1].updates.stop
        for simulation in (self.moving, self.staying):
            ends = [0.0, *(end for end, _ in simulation.ranks[0].updates[:batches])]
            found.append([(end - begin) / self.micro_batches for begin, end in pairwise(ends)])
        return found[0], found[1]

    def numbers(self) -> dict[str, Any]:
        """The outcome as JSON types. Times are seconds per micro-batch, of a stretch the means."""
        moving, staying = self.seconds
        return {
            "decisions": [decision.line() for decision in self.decisions],
            "stretches": [
                {
                    "updates": [stretch.updates.start, stretch.updates.stop],
                    "reason": stretch.reason,
                    "partition": list(stretch.pipeline.counts),
                    "recompute_ratio": list(stretch.pipeline.recompute_ratio or ()),
                    "replan_s": fmean(moving[stretch.updates.start : stretch.updates.stop]),
                    "without_s": fmean(staying[stretch.updates.start : stretch.updates.stop]),
                    "best_s": stretch.best_s,
                }
                for stretch in self.stretches
            ],
            "replan_s": sum(moving) * self.micro_batches,
            "without_s": sum(staying) * self.micro_batches,
            "longest_update_s": max(moving) * self.micro_batches,
        }

    def table(self) -> str:
        """The decisions as a run logs them, and a row for every stretch."""
        found = self.numbers()
        rows = [
            {
                "updates": f"{row['updates'][0]}-{row['updates'][1] - 1}",
                "layers": _split(row["partition"]),
                "replan ms": f"{1e3 * row['replan_s']:.2f}",
                "without ms": f"{1e3 * row['without_s']:.2f}",
                "best ms": f"{1e3 * row['best_s']:.2f}",
                "what has changed": row["reason"],
            }
            for row in found["stretches"]
        ]
        took, without = found["replan_s"], found["without_s"]
        last = f"{took:.4g} s in all, {without:.4g} s without; longest update {found['longest_update_s']:.3g} s"
        return "\n".join([*found["decisions"], aligned(rows), f"ms per micro-batch; {last}"])

    def draw(self, path: str) -> None:
        """Picture of the seconds of every update: with looks, without, best split."""
        best = [(update, 1e3 * stretch.best_s) for stretch in self.stretches for update in stretch.updates]
        moving, staying = ([*enumerate(1e3 * s for s in seconds)] for seconds in self.seconds)
        curves = [
            Curve("replan", moving, bold=True),
            Curve("without", staying),
            Curve("best split", best, dashed=True),
        ]
        pipeline = self.moving.pipeline
        title = f"{pipeline.schedule}, K = {pipeline.num_stages}, M = {self.micro_batches}"
        draw(path, {title: curves}, "update", "ms per micro-batch")

    @property
    def timeline(self) -> Timeline:
        """That of the training with looks, with the decisions as events."""
        ends = [end for end, _ in self.moving.ranks[0].updates]
        events = [[ends[decision.update - 1], decision.line()] for decision in self.decisions]
        found = self.moving.timeline
        return replace(found, meta={**found.meta, "events": events})


class Conditions:
    """What layers really cost, by update."""

    def __init__(
        self, profile: ModelProfile, num_stages: int, slowdowns: Sequence[Slowdown], freezings: Sequence[Freezing]
    ) -> None:
        for slow in slowdowns:
            if slow.stage >= num_stages:
                raise Refusal("--slow", slow.stage, f"a stage from 0 to {num_stages - 1}", "correct it").error()
        for frozen in freezings:
            if frozen.layers >= len(profile):
                allowed = f"fewer than all {len(profile)} layers"
                raise Refusal("--freeze", frozen.layers, allowed, "leave some to train").error()
        self._profile, self._num_stages = profile, num_stages
        self._slowdowns = sorted(slowdowns, key=lambda slow: slow.update)
        self._freezings = freezings
        changes: list[Slowdown | Freezing] = [*slowdowns, *freezings]
        self.changes = sorted(changes, key=lambda change: change.update)

    def slowness(self, update: int) -> tuple[float, ...]:
        """Factor of every stage; the latest counts."""
        factors = {slow.stage: slow.factor for slow in self._slowdowns if slow.update <= update}
        return tuple(factors.get(stage, 1.0) for stage in range(self._num_stages))

    def profile(self, update: int) -> ModelProfile:
        """Costs of the layers on a device as fast as the profile's."""
        count = max((frozen.layers for frozen in self._freezings if frozen.update <= update), default=0)
        layers = self._profile.layers
        frozen = [
            replace(one, backward_s=0.0, frozen_bytes=one.parameter_bytes, largest_weight_bytes=0)
            for one in layers[:count]
        ]
        return replace(self._profile, layers=(*frozen, *layers[count:]))

    def measured(self, updates: Sequence[int], counts: Sequence[int]) -> ModelProfile:
        """Profile that a look has of batches that were sampled at ``updates``."""
        stages, seen = stages_of_layers(counts), []
        for update in updates:
            slowness = self.slowness(update)
            seen.append([_slowed(one, slowness[s]) for one, s in zip(self.profile(update).layers, stages, strict=True)])
        layers = [
            replace(
                found[-1],
                forward_s=median(one.forward_s for one in found),
                backward_s=median(one.backward_s for one in found),
            )
            for found in zip(*seen, strict=True)
        ]
        return replace(self._profile, layers=tuple(layers))


def replanned(
    conditions: Conditions,
    pipeline: Pipeline,
    devices: Devices,
    settings: Replan,
    batches: int,
    *,
    chooses_ratio: bool = False,
    update_s: float = 0.0,
    unfit: str | None = None,
) -> Course:
    """Course of a training with looks at the balance, beside one without.

    ``pipeline`` has the split of the start, ``update_s`` are the seconds of an update, and ``unfit`` says why layers
    cannot move while training goes on, if so.
    """
    training = _Training(conditions, pipeline, devices, settings, batches, chooses_ratio, unfit)
    training.run()

    def simulated(splits: dict[int, Pipeline], pauses: dict[int, float], moves: Sequence[Move]) -> Simulation:
        changed = (change.update for change in conditions.changes if change.update < batches)
        phases, running, size = list[Phase](), pipeline, pipeline.micro_batches
        for update in sorted({*splits, *changed}):
            running = splits.get(update, running)
            here = replace(devices, slowness=conditions.slowness(update))
            costs = planned_costs(predict(conditions.profile(update), running, here), here, update_s)
            phases.append(Phase(update * size, costs, pauses.get(update, 0.0)))
        # Beyond the last batch as many as are in flight, so that the pipeline does not drain before it is over.
        workload = Workload(batches + pipeline.delays[0], tuple(update * size for update in pauses), tuple(moves))
        return simulate(pipeline, phases[0].costs, workload, phases[1:])

    moving, staying = simulated(training.splits, training.pauses, training.moves), simulated({0: pipeline}, {}, ())
    return Course(training.decisions, training.stretches(), moving, staying)


@dataclass
class _Training:
    """The looks of a training, and what they change."""

    _conditions: Conditions
    _pipeline: Pipeline  # as it is after the update that run() has come to
    _devices: Devices
    _settings: Replan
    _batches: int
    _chooses_ratio: bool
    _unfit: str | None

    def __post_init__(self) -> None:
        self._abandoned: list[tuple[int, ...]] = []  # splits that layers have moved away from
        self._busy = 0  # the update after which layers that move have arrived
        self._known: Work | None = None
        self._move_s: float | None = None
        self.decisions: list[Decision] = []
        self.splits = {0: self._pipeline}  # by the first update with it
        self.reasons = {0: ["start"]}
        self.pauses: dict[int, float] = {}  # seconds before an update in which layers move in an empty pipeline
        self.moves: list[Move] = []  # while training goes on

    def run(self) -> None:
        every = self._settings.every
        looks, sampled, seen = Looks.of(self._pipeline, every), list[int](), None
        for update in range(1, self._batches + 1):
            if update <= self._busy:
                if update == self._busy:
                    looks = Looks.of(self._pipeline, every, update)
                continue
            if (update - 1) % looks.stride == 0:
                sampled.append(update - 1)
            due = looks.due(update)
            if due == "write":
                seen, sampled = self._conditions.measured(sampled, self._pipeline.counts), []
            if due == "read" and seen is not None:
                decision, seen = self._decided(update, seen), None
                if decision.stays or self._settings.dry_run or update == self._batches:
                    continue
                sampled = []
                self._abandoned.append(decision.partition)
                if decision.steps:
                    self._move_live(decision, update)
                else:
                    self._move_emptied(decision, update)
                    looks = Looks.of(self._pipeline, every, update)

    def _decided(self, update: int, seen: ModelProfile) -> Decision:
        self._known = separated(seen, self._pipeline.counts, self._known)
        decision = decide(
            self._known,
            self._pipeline,
            self._devices,
            self._settings,
            update=update,
            chooses_ratio=self._chooses_ratio,
            move_s=self._move_s,
            abandoned=self._abandoned,
        )
        if self._settings.moves == "live" and not decision.stays:
            decision = in_steps(decision, self._known, self._pipeline, self._devices, self._unfit)
        self.decisions.append(decision)
        return decision

    def _move_live(self, decision: Decision, update: int) -> None:
        self._busy, begun, size = update, list[int](), self._pipeline.micro_batches
        for step in decision.steps:
            cut_over = earliest_cut_over(self._pipeline, step.source, step.target, self._busy)
            if cut_over >= self._batches * size:
                break
            self.moves.append(replace(step, micro_batch=cut_over))
            self._pipeline = replace(self._pipeline, partition=moved(self._pipeline.counts, step))
            self.splits[cut_over // size] = self._pipeline
            self._busy = self.moves[-1].settled_batch(self._pipeline)
            begun.append(cut_over // size)
        if begun:
            self.reasons[begun[0]] = ["layers move one by one"]
            self.reasons[begun[-1]] = ["layers have moved"]

    def _move_emptied(self, decision: Decision, update: int) -> None:
        self._move_s = self.pauses[update] = _move_s(self._conditions.profile(update), self._devices, decision)
        split, ratio = decision.better_partition, decision.better_ratio or None
        self._pipeline = replace(self._pipeline, partition=split, recompute_ratio=ratio)
        self.splits[update], self.reasons[update] = self._pipeline, ["layers have moved"]

    def stretches(self) -> list[Stretch]:
        for change in self._conditions.changes:
            if change.update < self._batches:
                self.reasons.setdefault(change.update, []).append(str(change))
        found = []
        for first, after in pairwise([*sorted(self.reasons), self._batches]):
            running = self.splits[max(update for update in self.splits if update <= first)]
            best = decide(
                Work(self._conditions.profile(first), running.counts, self._conditions.slowness(first)),
                running,
                self._devices,
                self._settings,
                update=first,
                chooses_ratio=self._chooses_ratio,
            )
            reason = "; ".join(self.reasons[first])
            found.append(Stretch(range(first, after), reason, running, best.better_seconds))
        return found


def _split(counts: Sequence[int]) -> str:
    """Layers of every stage, or their range if there are many stages."""
    return f"{list(counts)}" if len(counts) <= _SHOWN else f"{min(counts)} to {max(counts)} on each stage"


def _move_s(profile: ModelProfile, devices: Devices, decision: Decision) -> float:
    """Seconds of the rank that sends most layers, with their optimizer states."""
    sent = [0.0] * len(decision.partition)
    before, after = stages_of_layers(decision.partition), stages_of_layers(decision.better_partition)
    for layer, old, new in zip(profile.layers, before, after, strict=True):
        trained = layer.trained_bytes
        sent[old] += (layer.parameter_bytes + float(devices.optimizer.held) * trained) * (old != new)
    return max(devices.link.seconds(int(size)) if size else 0.0 for size in sent)


def _slowed(layer: LayerProfile, factor: float) -> LayerProfile:
    return replace(layer, forward_s=factor * layer.forward_s, backward_s=factor * layer.backward_s)
