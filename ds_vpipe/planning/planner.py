"""The fastest split of a model over pipeline stages that fits their memory.

Partition and recomputation are chosen together: :mod:`.stage_choices` finds for every possible stage the least
recomputation that fits, and :mod:`.split_search` the split with the smallest pace among those that fit. Both
are exact for the cost model, which is :mod:`.pace` for seconds and :mod:`.memory` for bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ds_vpipe.errors import Refusal, VPipeConfigError, show
from ds_vpipe.partition import bounds, check_size, checked_counts
from ds_vpipe.planning.memory import ActivationSums, StageMemory, stage_memory
from ds_vpipe.planning.pace import advances, batch_seconds, hiding_depths, pace
from ds_vpipe.planning.plan import Plan, StagePlan, show_bytes
from ds_vpipe.planning.plan_settings import PlanSettings
from ds_vpipe.planning.split_search import Band, fastest_split, smallest_maximum
from ds_vpipe.planning.stage_choices import UNLIMITED, Choices, StageCosts
from ds_vpipe.profiles.layer_profile import ModelProfile

_ROUNDS = 4  # of finding depths for a split and a split for depths
_WORTH = 0.999  # deeper stages must be faster than this part of what they replace


def plan(
    profile: ModelProfile,
    pipeline: PlanSettings,
    partition: Sequence[int] | None = None,
    recompute_ratio: Sequence[float] | None = None,
) -> Plan:
    """The fastest split that fits.

    Args:
        profile: all layers of the model.
        pipeline: what to plan for.
        partition: layer counts, if they are settled; None to choose them.
        recompute_ratio: one per part, if they are settled; None to choose the smallest that fit.

    With an interleaved schedule every part gets an even share of its rank's budget and the slowest part is made as fast
    as possible, so that the plan fits but may not be the best there is.

    Raises:
        VPipeConfigError: a setting is wrong, or nothing fits; the line says by how many bytes, where, and what helps.
    """
    check_size(len(profile), pipeline.parts)
    _check_settled(len(profile), pipeline.parts, partition, recompute_ratio)
    best = _plan_for(profile, pipeline, partition, recompute_ratio)
    if pipeline.depths != "auto" or pipeline.schedule != "asp":
        return best
    for _ in range(_ROUNDS):
        depths = hiding_depths([s.compute_s for s in best.stages], [s.transfer_s for s in best.stages[:-1]])
        deeper = dataclasses.replace(pipeline, depths=depths)
        if depths == best.depths:
            break
        try:
            other = _plan_for(profile, deeper, partition, recompute_ratio)
        except VPipeConfigError as error:
            note = f"depths {list(depths)} would hide all transfers but do not fit: {error}"
            return dataclasses.replace(best, notes=(*best.notes, note))
        if other.pace_s >= best.pace_s * _WORTH:
            break
        best = other
    return best


def predict(
    profile: ModelProfile, pipeline: PlanSettings, partition: Sequence[int], recompute_ratio: Sequence[float]
) -> Plan:
    """Seconds and bytes of a split that is given, whether it fits or not."""
    _check_settled(len(profile), pipeline.parts, partition, recompute_ratio)
    again = [int(ratio * count) for ratio, count in zip(recompute_ratio, partition, strict=True)]
    return _result(profile, pipeline, partition, again)


def _plan_for(
    profile: ModelProfile,
    pipeline: PlanSettings,
    partition: Sequence[int] | None,
    ratios: Sequence[float] | None,
) -> Plan:
    limits = [UNLIMITED if budget is None else budget for budget in pipeline.part_budgets()]
    costs = StageCosts(profile, pipeline.residencies(), limits, pipeline.optimizer, ratios, partition)
    counts, choices = _search(costs, pipeline)
    if counts is None:
        raise _nothing_fits(profile, pipeline, choices, ratios)
    stops = bounds(counts)[1:]
    again = [
        int(choices.recomputed[i, stop, count - 1]) for i, (stop, count) in enumerate(zip(stops, counts, strict=True))
    ]
    return _result(profile, pipeline, counts, again)


def _search(costs: StageCosts, pipeline: PlanSettings) -> tuple[tuple[int, ...] | None, Choices]:
    """The fastest split and the tables that it was found in.

    Stages that are slower than a known split cannot be part of a faster one, so only short stages are looked at first.
    """
    layers = costs.profile.layers
    total = float(costs.passes[-1])
    trips = np.array([0.0, *(pipeline.link.round_trip(layer.boundary_bytes) for layer in layers)])
    depths = pipeline.known_depths()
    longest = 2 * max(total / pipeline.parts, max(layer.forward_s + layer.backward_s for layer in layers))
    while True:
        choices = costs.choices(longest)
        band = Band(choices.seconds, trips, None if depths is None else advances(depths))
        counts = fastest_split(band)
        if longest >= total or (counts is not None and band.pace_of(counts) <= longest):
            return counts, choices
        longest *= 2


def _result(profile: ModelProfile, pipeline: PlanSettings, counts: Sequence[int], again: Sequence[int]) -> Plan:
    sums, edges, budgets = ActivationSums(profile), bounds(counts), pipeline.part_budgets()
    stages = []
    for part, there in enumerate(pipeline.residencies()):
        start, stop = edges[part], edges[part + 1]
        layers = profile.layers[start:stop]
        stages.append(
            StagePlan(
                start=start,
                stop=stop,
                recomputed=again[part],
                forward_s=sum(layer.forward_s for layer in layers),
                backward_s=sum(layer.backward_s for layer in layers),
                recompute_s=sum(layer.forward_s for layer in layers[len(layers) - again[part] :]),
                transfer_s=0.0 if stop == len(profile) else pipeline.link.round_trip(layers[-1].boundary_bytes),
                memory=stage_memory(profile, start, stop, there, pipeline.optimizer, again[part], sums),
                budget=budgets[part],
            )
        )
    return _timed(pipeline, stages)


def _timed(pipeline: PlanSettings, stages: Sequence[StagePlan]) -> Plan:
    depths, ranks = pipeline.known_depths(), pipeline.num_stages
    compute = [sum(s.compute_s for s in stages[rank::ranks]) for rank in range(ranks)]
    trips = [stage.transfer_s for stage in stages[:-1]]
    notes: list[str] = []
    if pipeline.schedule == "interleaved":
        steady = max(compute)
        # A batch fills and drains with single parts, not with whole ranks.
        filling = sum(s.compute_s for s in stages[:ranks]) + sum(trips)
        each = (filling + (pipeline.micro_batches - 1 / pipeline.virtual_stages) * steady) / pipeline.micro_batches
        notes.append("interleaved: seconds are an estimate, and the split is the best for evenly shared budgets only")
    else:
        steady = each = pace(compute, trips, depths)
        if pipeline.schedule != "asp":
            forward = [stage.forward_s for stage in stages]
            backward = [stage.backward_s + stage.recompute_s for stage in stages]
            each = batch_seconds(forward, backward, trips, depths, pipeline.micro_batches) / pipeline.micro_batches
    return Plan(
        schedule=pipeline.schedule,
        stages=tuple(stages),
        depths=depths if depths is not None and pipeline.schedule == "asp" else (),
        micro_batches=pipeline.micro_batches,
        pace_s=steady,
        seconds_per_micro_batch=each,
        virtual_stages=pipeline.virtual_stages,
        notes=tuple(notes),
    )


def _check_settled(
    num_layers: int, parts: int, partition: Sequence[int] | None, ratios: Sequence[float] | None
) -> None:
    if partition is not None:
        checked_counts(partition, num_layers, parts)
    if ratios is not None and (len(ratios) != parts or not all(0 <= ratio <= 1 for ratio in ratios)):
        raise Refusal("recompute_ratio", list(ratios), f"{parts} numbers in [0, 1]", "correct the ratios").error()


def _nothing_fits(
    profile: ModelProfile, pipeline: PlanSettings, choices: Choices, ratios: Sequence[float] | None
) -> VPipeConfigError:
    """Say what the split that comes closest lacks, where, and what would help there."""
    counts = smallest_maximum(choices.excess)
    edges = bounds(counts)
    excess = [int(choices.excess[part, edges[part + 1], count - 1]) for part, count in enumerate(counts)]
    part = max(range(len(counts)), key=lambda index: excess[index])
    start, stop, there = edges[part], edges[part + 1], pipeline.residencies()[part]
    sums = ActivationSums(profile)
    options = range(stop - start + 1) if ratios is None else [int(ratios[part] * (stop - start))]
    memories = [stage_memory(profile, start, stop, there, pipeline.optimizer, again, sums) for again in options]
    least = min(memories, key=lambda memory: memory.total)
    budget = pipeline.part_budgets()[part]
    lacking = f"{excess[part]} bytes ({show_bytes(excess[part])}) too many"
    return VPipeConfigError(
        f"memory budget: got {show(budget)} bytes for stage {part}; nothing fits: the split that comes closest, "
        f"{show(counts)}, needs {least.total} bytes there (layers {start}-{stop - 1}), {lacking}; "
        f"allowed: at least {least.total} bytes; {_remedy(pipeline, least)}"
    )


def _remedy(pipeline: PlanSettings, memory: StageMemory) -> str:
    """What would make most of what is largest go away."""
    moving = memory.activations + memory.recompute + memory.workspace
    depths = pipeline.known_depths() if pipeline.schedule == "asp" else None
    remedies = []
    if depths is not None and pipeline.weight_sync != "none" and pipeline.micro_batches < depths[0]:
        steps = f"raise gradient_accumulation_steps to {depths[0]}"
        remedies.append(f"{steps}, so that no stage stashes more than one version of its weights")
    if moving > memory.static:
        remedies.append("use smaller micro-batches")
    elif memory.optimizer > memory.weights + memory.versions:
        remedies.append("use ZeRO-1 with more replicas, or an optimizer with less state")
    return ", or ".join([*remedies, "use more stages or more memory"])
