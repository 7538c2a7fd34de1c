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
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import planned_costs
from ds_vpipe.simulation.simulator import Epoch, Simulation, simulate
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
        """The outcome as JSON types; times are seconds per micro-batch, of a stretch the means."""
        moving, staying = self.seconds
        return {
            "decisions": [decision.line() for decision in self.decisions],
            "stretches": [
                {
                    "updates": [stretch.updates.start, stretch.updates.stop],
                    "reason": stretch.reason,
                    "partition": list(stretch.pipeline.partition or ()),
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
        """Draw the seconds of every update with and without looks, and those of the best split."""
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
        frozen = [replace(one, backward_s=0.0, frozen_bytes=one.parameter_bytes) for one in layers[:count]]
        return replace(self._profile, layers=(*frozen, *layers[count:]))

    def measured(self, updates: Sequence[int], counts: Sequence[int]) -> ModelProfile:
        """Profile that a look has of batches that were sampled at ``updates``."""
        stages, seen = stages_of_layers(counts), []
        for update in updates:
            slowness = self.slowness(update)
            seen.append([_slower(one, slowness[s]) for one, s in zip(self.profile(update).layers, stages, strict=True)])
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
) -> Course:
    """Course of a training of so many ``batches`` with looks at the balance, beside one without.

    ``pipeline`` has the split of the start, ``update_s`` are the seconds of an update.
    """
    started, looks, size = pipeline, Looks.of(pipeline, settings.every), pipeline.micro_batches
    decisions: list[Decision] = []
    splits, reasons, pauses, moves = {0: pipeline}, {0: ["start"]}, dict[int, float](), list[Move]()
    busy = 0  # the update after which layers that move have arrived
    left: list[tuple[int, ...]] = []  # splits
    known: Work | None = None
    move_s: float | None = None
    sampled: list[int] = []
    seen: ModelProfile | None = None
    for update in range(1, batches + 1):
        if update <= busy:
            if update == busy:
                looks = Looks.of(pipeline, settings.every, update)
            continue
        if (update - 1) % looks.stride == 0:
            sampled.append(update - 1)
        due = looks.next(update)
        if due == "leave":
            seen, sampled = conditions.measured(sampled, pipeline.partition or ()), []
        if due == "read" and seen is not None:
            known, seen = separated(seen, pipeline.partition or (), known), None
            decision = decide(
                known,
                pipeline,
                devices,
                update=update,
                every=settings.every,
                threshold=settings.threshold,
                chooses_ratio=chooses_ratio,
                move_s=move_s,
                left=left,
            )
            if settings.moves == "live" and not decision.stays:
                decision = in_steps(decision, known, pipeline, devices)
            decisions.append(decision)
            if decision.stays or settings.dry_run or update == batches:
                continue
            left.append(decision.partition)
            sampled, busy, begun = [], update, list[int]()
            for step in decision.steps:
                cut_over = earliest_cut_over(pipeline, step.source, step.target, busy)
                if cut_over >= batches * size:
                    break
                moves.append(replace(step, micro_batch=cut_over))
                pipeline = replace(pipeline, partition=moved(pipeline.partition or (), step))
                splits[cut_over // size], busy = pipeline, moves[-1].settled_batch(pipeline)
                begun.append(cut_over // size)
            if begun:
                reasons[begun[0]] = ["layers move one by one"]
                reasons[begun[-1]] = ["layers have moved"]
            if decision.steps:
                continue
            move_s = pauses[update] = _move_s(conditions.profile(update), devices, decision)
            pipeline = replace(
                pipeline, partition=decision.better_partition, recompute_ratio=decision.better_ratio or None
            )
            splits[update], reasons[update] = pipeline, ["layers have moved"]
            looks = Looks.of(pipeline, settings.every, update)

    def simulated(splits: dict[int, Pipeline], moves: Sequence[Move]) -> Simulation:
        begins = sorted({*splits, *(change.update for change in conditions.changes if change.update < batches)})
        epochs, running = [], started
        for update in begins:
            running = splits.get(update, running)
            here = replace(devices, slowness=conditions.slowness(update))
            found = predict(conditions.profile(update), running, here)
            costs = planned_costs(found, here.loads(running), update_s)
            epochs.append(Epoch(update * size, costs, pauses.get(update, 0.0) if update in splits else 0.0))
        # Beyond the last batch as many as are in flight, so that the pipeline does not drain before it is over.
        ahead = 0 if started.synchronous else update_delay(started.depths[0], size)
        workload = Workload(
            batches + ahead, tuple(update * size for update in pauses if update in splits), tuple(moves)
        )
        return simulate(started, epochs[0].costs, workload, epochs[1:])

    stretches = _stretches(conditions, splits, reasons, devices, settings, batches, chooses_ratio)
    return Course(decisions, stretches, simulated(splits, moves), simulated({0: started}, ()))


def _stretches(
    conditions: Conditions,
    splits: dict[int, Pipeline],
    reasons: dict[int, list[str]],
    devices: Devices,
    settings: Replan,
    batches: int,
    chooses_ratio: bool,
) -> list[Stretch]:
    for change in conditions.changes:
        if change.update < batches:
            reasons.setdefault(change.update, []).append(str(change))
    stretches = []
    for first, after in pairwise([*sorted(reasons), batches]):
        running = splits[max(update for update in splits if update <= first)]
        work = Work(conditions.profile(first), running.partition or (), conditions.slowness(first))
        best = decide(
            work, running, devices, update=first, every=settings.every, threshold=0.0, chooses_ratio=chooses_ratio
        )
        stretches.append(Stretch(range(first, after), "; ".join(reasons[first]), running, best.better_seconds))
    return stretches


def _split(counts: Sequence[int]) -> str:
    """Layers of every stage, or their range if there are many stages."""
    return f"{list(counts)}" if len(counts) <= _SHOWN else f"{min(counts)} to {max(counts)} on each stage"


def _move_s(profile: ModelProfile, devices: Devices, decision: Decision) -> float:
    """Seconds in which the rank that sends most has sent the layers that leave it, with their optimizer states."""
    sent = [0.0] * len(decision.partition)
    before, after = stages_of_layers(decision.partition), stages_of_layers(decision.better_partition)
    for layer, old, new in zip(profile.layers, before, after, strict=True):
        trained = layer.parameter_bytes - layer.frozen_bytes
        sent[old] += (layer.parameter_bytes + float(devices.optimizer.held) * trained) * (old != new)
    return max(devices.link.seconds(int(size)) if size else 0.0 for size in sent)


def _slower(layer: LayerProfile, factor: float) -> LayerProfile:
    return replace(layer, forward_s=factor * layer.forward_s, backward_s=factor * layer.backward_s)
