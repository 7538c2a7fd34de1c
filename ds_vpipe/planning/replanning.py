"""Decisions of a pipeline that balances itself: what is measured, what the planner makes of it, and whether it pays.

Every rank hands in a profile of its own layers. The same measurements give the same decision on every rank: everything
here is a pure function of them and of the decisions before.

A layer that takes long may be a large one, or on a slow device. Both are told apart by what was known before. If the
layers of one stage take longer or shorter than before, beside those of others, its device has changed. Layers that take
another time since they have moved show how slow the device was that they have left. Forward passes decide, since a
backward pass also changes where layers are frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from ds_vpipe.config.replan import Replan
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.partition import bounds
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.planner import plan, predict
from ds_vpipe.schedules.counts import updates_apart
from ds_vpipe.schedules.moves import Move, moved
from ds_vpipe.schedules.pipeline import Pipeline

_DIFFERENT = 1.15  # factor by which a device has to change to be noticed
_LOOKS_TO_PAY = 10  # within so many looks what a move saves has to be more than what it costs
_UNKNOWN_MOVE_S = 1.0  # of the first move
_BACK = 0.06  # least share to save on the way back to a split that was left: two about equal ones would alternate
_SAMPLES = 16  # micro-batches between two looks, at most


@dataclass
class Looks:
    """Schedule of measurements of a running pipeline."""

    every: int  # updates between two looks
    delay: int  # updates until all ranks have written what they have measured for a look
    since: int  # update since which nothing has been changed
    unread: int | None = None  # the look whose measurements have not been read

    @classmethod
    def of(cls, pipeline: Pipeline, every: int, since: int = 0) -> Looks:
        """Looks at a pipeline after its update ``since``."""
        return cls(every, updates_apart(pipeline), since)

    @property
    def stride(self) -> int:
        """Batches from one sampled micro-batch to the next."""
        return max(1, self.every // _SAMPLES)

    def due(self, update: int) -> Literal["write", "read"] | None:
        """Action of every rank on measurements after an update; asked once after each."""
        if self.unread is not None:
            if update < self.unread + self.delay:
                return None
            self.unread = None
            return "read"
        if update % self.every or update - self.since < self.stride:
            return None
        self.unread = update
        return "write"


@dataclass(frozen=True)
class Work:
    """What layers cost on the fastest device, and how slow the others are."""

    profile: ModelProfile  # of all layers, on the fastest device
    counts: tuple[int, ...]  # layers of every stage when they were measured
    slowness: tuple[float, ...]  # of every stage; the fastest one's is 1
    first: ModelProfile | None = None  # the first one with these counts; None: this one


@dataclass(frozen=True)
class Decision:
    """Outcome of one look at the balance; the same on all ranks."""

    update: int  # after which it was made
    partition: tuple[int, ...]  # layers of every stage, at present
    recompute_ratio: tuple[float, ...]
    better_partition: tuple[int, ...]  # the planner's
    better_ratio: tuple[float, ...]
    seconds: float  # per micro-batch with the present split, as planned
    better_seconds: float  # with the planner's
    stays: str  # why layers stay where they are; empty if they move
    steps: tuple[Move, ...] = ()  # to be made while training goes on; cut-overs are set when each begins
    empties: str = ""  # why the pipeline has to be emptied, if it was not to be

    @property
    def gain(self) -> float:
        """Share of the time per micro-batch that the planner expects to save."""
        return 1 - self.better_seconds / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """The decision in one line."""
        there = f"{list(self.better_partition)}"
        if self.better_ratio != self.recompute_ratio:
            there += f", recompute_ratio {list(self.better_ratio)}"
        if self.better_partition == self.partition and self.better_ratio == self.recompute_ratio:
            return f"replan at update {self.update}: {list(self.partition)} stays: {self.stays}"
        expected = f"{1e3 * self.seconds:.2f} -> {1e3 * self.better_seconds:.2f} ms per micro-batch expected"
        what = f" stays: {self.stays}" if self.stays else " moves"
        if self.steps:
            what += f" in {len(self.steps)} steps"
        elif self.empties and not self.stays:
            what += f" in an empty pipeline: {self.empties}"
        return f"replan at update {self.update}: {list(self.partition)} -> {there}, {expected};{what}"


def joined(profiles: Iterable[tuple[int, ModelProfile]]) -> ModelProfile:
    """Profile of the whole model from those of all ranks, with their stages; the slowest replica of a stage counts."""
    stages: dict[int, ModelProfile] = {}
    for stage, found in profiles:
        stages[stage] = found if stage not in stages else _slower(stages[stage], found)
    layers = tuple(layer for stage in sorted(stages) for layer in stages[stage].layers)
    return replace(stages[0], layers=layers)


def separated(measured: ModelProfile, counts: Sequence[int], before: Work | None) -> Work:
    """What layers cost, apart from how slow the devices are that they were measured on."""
    slowness, owners = _slowness(measured, counts, before), stages_of_layers(counts)
    layers = [
        replace(one, forward_s=one.forward_s / slowness[owner], backward_s=one.backward_s / slowness[owner])
        for one, owner in zip(measured.layers, owners, strict=True)
    ]
    first = before.first or before.profile if before is not None and before.counts == tuple(counts) else None
    return Work(replace(measured, layers=tuple(layers)), tuple(counts), slowness, first)


def _slowness(measured: ModelProfile, counts: Sequence[int], before: Work | None) -> tuple[float, ...]:
    stages = range(len(counts))
    if before is None:
        return (1.0,) * len(counts)
    slowness, owners_before = list(before.slowness), stages_of_layers(before.counts)
    # Not with the last look, as small changes add up, and a large one may end in two small ones.
    layers = (before.first or before.profile).layers
    then = [layer.forward_s * slowness[owner] for layer, owner in zip(layers, owners_before, strict=True)]
    now = [layer.forward_s for layer in measured.layers]
    times = list(zip(owners_before, stages_of_layers(counts), then, now, strict=True))  # of every layer

    def ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
        """Of all together: a small layer's time is mostly noise."""
        over, under = map(sum, zip(*pairs, strict=True)) if (pairs := list(pairs)) else (0.0, 0.0)
        return over / under if over > 0 and under > 0 else None

    changes = {s: ratio((after, known) for old, new, known, after in times if old == new == s) for s in stages}
    usual = median([change for change in changes.values() if change is not None] or [1.0])
    for s, change in changes.items():
        if change is not None and _differ(change, usual):
            slowness[s] *= change / usual
    for s in stages:  # what has left a stage shows how slow that was, beside where it is now
        found = ratio((slowness[new] * known * usual, after) for old, new, known, after in times if old == s != new)
        if found is not None and _differ(found, before.slowness[s]):
            slowness[s] *= found / before.slowness[s]  # and it may have changed since
    return tuple(factor / min(slowness) for factor in slowness)


def decide(
    work: Work,
    pipeline: Pipeline,
    devices: Devices,
    settings: Replan,
    *,
    update: int,
    chooses_ratio: bool,
    move_s: float | None = None,
    abandoned: Collection[tuple[int, ...]] = (),
) -> Decision:
    """Decision on the split of a running pipeline.

    Args:
        work: of all layers.
        pipeline: what runs, with its partition and ratios.
        devices: budgets and links.
        settings: what a move has to gain, and how often is looked.
        update: number of updates so far.
        chooses_ratio: whether recomputation is the planner's to choose.
        move_s: seconds that the last move took; None before the first one.
        abandoned: splits that layers have moved away from.
    """
    devices = replace(devices, slowness=work.slowness)
    partition, ratios = pipeline.counts, pipeline.recompute_ratio or ()
    now = predict(work.profile, pipeline, devices)
    stay = Decision(
        update, partition, ratios, partition, ratios, now.seconds_per_micro_batch, now.seconds_per_micro_batch, ""
    )
    try:
        open_choice = replace(pipeline, partition=None, recompute_ratio=None if chooses_ratio else ratios)
        best = plan(work.profile, open_choice, devices)
    except VPipeConfigError as error:
        return replace(stay, stays=f"no split fits the memory ({error})")
    found = replace(
        stay,
        better_partition=best.pipeline.counts,
        better_ratio=best.pipeline.recompute_ratio or (),
        better_seconds=best.seconds_per_micro_batch,
    )
    saved = found.seconds - found.better_seconds
    if (found.better_partition, found.better_ratio) == (partition, ratios) or (now.fits and saved <= 0):
        return replace(stay, stays="no split is faster")
    threshold = max(settings.threshold, _BACK) if found.better_partition in abandoned else settings.threshold
    if now.fits and found.gain <= threshold:
        return replace(found, stays=f"it would save {found.gain:.1%}, threshold {threshold:.1%}")
    # To fill the pipeline again takes about one micro-batch through all stages.
    cost = (_UNKNOWN_MOVE_S if move_s is None else move_s) + sum(stage.compute_s for stage in best.stages)
    if now.fits and saved * pipeline.micro_batches * settings.every * _LOOKS_TO_PAY <= cost:
        within = f"{_LOOKS_TO_PAY * settings.every} updates"
        return replace(found, stays=f"a move of {cost:.2f} s would not pay within {within}")
    return found


def in_steps(decision: Decision, work: Work, pipeline: Pipeline, devices: Devices, unfit: str | None) -> Decision:
    """``decision`` with the steps that lead to its split, or with the reason why there are none, such as ``unfit``.

    Each step moves one layer to a neighbouring stage: of those towards the new split that after which the slowest
    stages are fastest. The layer is on both stages for a while, and both need the memory.
    """
    if unfit is None and decision.better_ratio != decision.recompute_ratio:
        unfit = "recompute_ratio changes"
    if unfit is not None:
        return replace(decision, empties=unfit)
    devices, partition, goal = replace(devices, slowness=work.slowness), decision.partition, decision.better_partition
    steps: list[Move] = []
    now = predict(work.profile, pipeline, devices)
    while partition != goal:
        possible = []
        for move in _towards(partition, goal):
            after = predict(work.profile, replace(pipeline, partition=moved(partition, move)), devices)
            fits = now.fits_on(move.source) and after.fits_on(move.target)
            left = work.profile.layers[after.stages[move.source].start : after.stages[move.source].stop]
            if fits and any(layer.trained_bytes for layer in left):
                possible.append((sorted((stage.compute_s for stage in after.stages), reverse=True), move.layer, move))
        if not possible:
            reason = f"from {list(partition)} no layer can go on by itself, with its memory on two stages"
            return replace(decision, empties=reason)
        step = min(possible)[-1]
        steps.append(step)
        partition = moved(partition, step)
        now = predict(work.profile, replace(pipeline, partition=partition), devices)
    return replace(decision, steps=tuple(steps))


def _towards(partition: Sequence[int], goal: Sequence[int]) -> Iterable[Move]:
    """Moves that bring one boundary nearer to that of ``goal``; there is one unless all are there."""
    for stage, (edge, wanted) in enumerate(zip(bounds(partition), bounds(goal), strict=True)):
        source, target = (stage - 1, stage) if edge > wanted else (stage, stage - 1)
        if edge != wanted and partition[source] > 1:
            yield Move(edge - 1 if edge > wanted else edge, source, target, 0)


def stages_of_layers(counts: Sequence[int]) -> list[int]:
    """Stage of every layer."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _differ(one: float, other: float) -> bool:
    return not 1 / _DIFFERENT < one / other < _DIFFERENT


def _slower(one: ModelProfile, other: ModelProfile) -> ModelProfile:
    pairs = zip(one.layers, other.layers, strict=True)
    layers = tuple(
        replace(a, forward_s=max(a.forward_s, b.forward_s), backward_s=max(a.backward_s, b.backward_s))
        for a, b in pairs
    )
    return replace(one, layers=layers)
