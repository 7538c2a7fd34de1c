"""The planner: the fastest split of a model over pipeline stages that fits their memory.

Partition and recomputation are chosen together: :mod:`.search` finds for every possible stage the least recomputation
that fits, and the split with the smallest pace among those that fit. Both are exact for the cost model, which is
:mod:`.pace` for seconds and :mod:`.memory` for bytes. Every rank reads the same profile and comes to the same plan, so
that nothing has to be sent.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import MICRO, DeepSpeedJson
from ds_vpipe.errors import Refusal, VPipeConfigError, show
from ds_vpipe.partition import bounds, check_stage_count, checked_counts, resolve_partition
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.memory import MemoryModel, StageMemory, stage_memory
from ds_vpipe.planning.pace import batch_seconds, hiding_depths, pace
from ds_vpipe.planning.plan import Plan, StagePlan, ratio_for
from ds_vpipe.planning.search import Candidates, CandidateTable, SplitCosts, fastest_split, may_swap, swap_seconds
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.tables import show_bytes

_ROUNDS = 4  # of finding depths for a split and a split for depths
_ENDLESS = 10**6  # micro-batches that a stage is ahead of the next one, for which no transfer is waited for
_WORTH = 0.999  # deeper stages must be faster than this part of what they replace


def configured_plan(
    config: VPipeConfig,
    pipeline: Pipeline,
    devices: Devices,
    profile: ModelProfile,
    own_counts: Sequence[int] | None = None,
) -> Plan:
    """The plan of a block: its own numbers, whether they fit or not, or the planner's where it leaves a choice.

    ``pipeline`` is what it says for these sizes. A block without a partition means ``own_counts``, layers per stage as
    the module was built, or even parameters, as DeepSpeed has them.

    Raises:
        VPipeConfigError: a setting is wrong, or something was left to the planner and nothing fits.
    """
    pipeline = replace(pipeline, partition=configured_partition(config, pipeline, profile, own_counts))
    if config.leaves_to_planner:
        return plan(profile, pipeline, devices, hide_transfers=config.stage_to_depth_map == "auto")
    return predict(profile, pipeline, devices)


def configured_partition(
    config: VPipeConfig, pipeline: Pipeline, profile: ModelProfile, own_counts: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Layers of every virtual stage that a block asks for. None if it leaves them to the planner.

    Raises:
        VPipeConfigError: the counts do not fit the profile.
    """
    method = config.partition_or_default(own_counts)
    if method == "profile":
        return None
    weights = [layer.trained_bytes for layer in profile.layers]  # as DeepSpeed counts them
    return resolve_partition(method, lambda: weights, [layer.name for layer in profile.layers], pipeline.num_parts)


def read_profile(path: str | None, json: DeepSpeedJson | None, num_layers: int | None = None) -> ModelProfile:
    """The profile in a file, checked against a JSON.

    ``num_layers`` is None where the model is not known, ``json`` where there is none.

    Raises:
        VPipeConfigError: none is named, the file is not a profile, or it is of another model, or of another precision
            or size of micro-batches than the JSON trains with.
    """
    if path is None:
        allowed = 'a file, as "profile" in the vpipe block or, for a command, --profile'
        raise Refusal("profile", None, allowed, "make one with: python -m ds_vpipe profile").error()
    profile = ModelProfile.load(path)
    fix, reason, size = "make the profile anew with: python -m ds_vpipe profile", "", json.whole(MICRO) if json else 0
    if num_layers is not None and len(profile) != num_layers:
        allowed, reason = "a profile of this model", f"it has {len(profile)} layers but the model has {num_layers}"
    elif json is not None and profile.dtype != json.dtype:
        allowed, reason = f"a profile in {json.dtype}", f"it is of {profile.dtype} and the JSON trains in {json.dtype}"
        fix += f", and layers in {json.dtype}"
    elif size >= 1 and profile.micro_batch_size != size:
        allowed = f"a profile of micro-batches of {size}, which is {MICRO}"
        reason = f"it is of micro-batches of {profile.micro_batch_size}"
    if reason:
        raise Refusal("profile", path, allowed, fix, reason).error()
    return profile


def plan(profile: ModelProfile, pipeline: Pipeline, devices: Devices, *, hide_transfers: bool = False) -> Plan:
    """The fastest split that fits.

    With an interleaved schedule every virtual stage gets an even share of its rank's budget and the slowest one is made
    as fast as possible, so that the plan fits but may not be the best there is.

    Chosen are the partition and the ratios of ``pipeline`` where they are None, and, to ``hide_transfers``, the
    smallest depths of ``asp`` that do so, if they fit.

    Raises:
        VPipeConfigError: a setting is wrong, or nothing fits; the line says by how many bytes, where, and what helps.
    """
    check_stage_count(len(profile), pipeline.num_parts)
    best = _plan_for(profile, pipeline, devices)
    if not hide_transfers or pipeline.schedule != "asp":
        return best
    splits, notes = [_plan_for(profile, pipeline, devices, waits=False), best], best.notes
    for _ in range(_ROUNDS):
        if not splits:
            break
        stages = splits.pop(0).stages
        depths = hiding_depths([s.busy_s for s in stages], [s.transfer_s for s in stages[:-1]])
        try:
            other = _plan_for(profile, replace(pipeline, depth_map=depths), devices)
        except VPipeConfigError as error:
            notes = (*best.notes, f"depths {list(depths)} would hide all transfers but do not fit: {error}")
            continue
        if other.pace_s < best.pace_s * _WORTH:
            best, splits, notes = other, [other], other.notes
    return replace(best, notes=notes)


def predict(profile: ModelProfile, pipeline: Pipeline, devices: Devices) -> Plan:
    """Seconds and bytes of a given split, whether it fits or not.

    Raises:
        VPipeConfigError: the partition is not of this model.
    """
    ratios, swap_ratios = (
        found or (0.0,) * pipeline.num_parts for found in (pipeline.recompute_ratio, pipeline.swap_ratio)
    )
    counts = checked_counts(pipeline.counts, len(profile), pipeline.num_parts)
    depths = pipeline.depths if pipeline.schedule == "asp" else None
    pipeline = replace(pipeline, partition=counts, recompute_ratio=ratios, swap_ratio=swap_ratios, depth_map=depths)
    model, swaps = MemoryModel(profile), may_swap(pipeline)
    edges, budgets, stages = bounds(counts), devices.budgets(pipeline), []
    for part, load in enumerate(devices.loads(pipeline)):
        start, stop, last = edges[part], edges[part + 1], int(ratios[part] * counts[part])
        layers, first = profile.layers[start:stop], 0
        slowness = devices.slowness_of(pipeline.rank_of(part))
        if swaps[part]:
            first = min(int(swap_ratios[part] * counts[part]), counts[part] - last)
        swapped = int(model.swapped(start, start + first))
        again = slowness * sum(layer.forward_s for layer in layers[len(layers) - last :])
        hidden = again + slowness * sum(layer.backward_s for layer in layers[first:])
        stage = StagePlan(
            start=start,
            stop=stop,
            recomputed=last,
            forward_s=slowness * sum(layer.forward_s for layer in layers),
            backward_s=slowness * sum(layer.backward_s for layer in layers),
            recompute_s=again,
            transfer_s=0.0 if stop == len(profile) else devices.link.round_trip(layers[-1].boundary_bytes),
            memory=stage_memory(profile, start, stop, load, devices.optimizer, last, first),
            budget=budgets[part],
            swapped=first,
            swap_s=float(swap_seconds(devices, swapped, hidden)),
            host_bytes=load.in_flight * swapped,
            transit_bytes=load.in_transit * swapped,
            reduction_s=devices.reduction_s * sum(layer.trained_bytes for layer in layers) / pipeline.micro_batches,
        )
        stages.append(stage)
    return _timed(pipeline, stages)


def _plan_for(profile: ModelProfile, pipeline: Pipeline, devices: Devices, *, waits: bool = True) -> Plan:
    """The fastest split for known depths; without ``waits`` that of any depths, in the memory of these.

    Stages that are slower than a known split cannot be part of a faster one, so only short stages are looked at first.
    """
    if pipeline.partition is not None:
        checked_counts(pipeline.partition, len(profile), pipeline.num_parts)
    candidates, layers = Candidates(profile, pipeline, devices), profile.layers
    total = float(candidates.passes[-1])
    trips = np.array([0.0, *(devices.link.round_trip(layer.boundary_bytes) for layer in layers)])
    deepest = tuple(_ENDLESS * part for part in reversed(range(pipeline.num_parts)))
    longest = 2 * max(total / pipeline.num_parts, max(layer.forward_s + layer.backward_s for layer in layers))
    while True:
        table = candidates.table(longest)
        costs = SplitCosts(table.seconds, trips, _depths_that_count(pipeline) if waits else deepest)
        counts = fastest_split(costs)
        if counts is not None and (
            longest >= total or costs.pace_of(counts) <= longest * min(devices.slowness, default=1.0)
        ):
            break
        if longest >= total:
            raise _nothing_fits(profile, pipeline, devices, table)
        longest *= 2
    chosen = [(i, stop, counts[i] - 1) for i, stop in enumerate(bounds(counts)[1:])]
    ratios, swap_ratios = (
        tuple(ratio_for(int(layers[place]), count) for place, count in zip(chosen, counts, strict=True))
        for layers in (table.recomputed, table.swapped)
    )
    ratios, swap_ratios = pipeline.recompute_ratio or ratios, pipeline.swap_ratio or swap_ratios
    found = predict(
        profile, replace(pipeline, partition=counts, recompute_ratio=ratios, swap_ratio=swap_ratios), devices
    )
    if pipeline.partition is not None or pipeline.schedule not in ("1f1b", "gpipe"):
        return found
    note = f"{pipeline.schedule}: the split is the one with the best pace, not the one with the shortest batch"
    return replace(found, notes=(*found.notes, note))


def _depths_that_count(pipeline: Pipeline) -> tuple[int, ...] | None:
    """Depths of a 1F1B order, on which the pace depends."""
    return pipeline.depths if pipeline.schedule in ("asp", "1f1b") else None


def _timed(pipeline: Pipeline, stages: Sequence[StagePlan]) -> Plan:
    depths, ranks, size = _depths_that_count(pipeline), pipeline.num_stages, pipeline.micro_batches
    compute = [sum(s.compute_s for s in stages[rank::ranks]) for rank in range(ranks)]
    trips = [stage.transfer_s for stage in stages[:-1]]
    notes: tuple[str, ...] = ()
    if pipeline.schedule == "interleaved":
        steady = max(compute)
        # A batch fills and drains with single virtual stages, not with whole ranks.
        filling = sum(s.compute_s for s in stages[:ranks]) + sum(trips)
        # Fewer micro-batches than ranks go on with the next virtual stage only once they have come round.
        waiting = max(0, ranks - size) * (1 - 1 / pipeline.virtual_stages) * steady
        each = (filling + (size - 1 / pipeline.virtual_stages) * steady + waiting) / size
        each += max(sum(s.reduction_s for s in stages[rank::ranks]) for rank in range(ranks))
        notes = ("interleaved: seconds are an estimate, and the split is the best for evenly shared budgets only",)
    else:
        if pipeline.schedule == "asp":
            compute = [stage.busy_s for stage in stages]
        steady = each = pace(compute, trips, depths)
        if pipeline.schedule != "asp":
            forward = [stage.forward_s for stage in stages]
            backward = [stage.compute_s - stage.forward_s for stage in stages]
            # The next batch begins on a stage after its own reduction, which others may not have to wait for.
            batches = [
                batch_seconds(forward[s:], backward[s:], trips[s:], depths and depths[s:], size) / size
                + stages[s].reduction_s
                for s in range(ranks)
            ]
            each = max(batches)
    return Plan(pipeline, tuple(stages), steady, each, notes)


def _nothing_fits(
    profile: ModelProfile, pipeline: Pipeline, devices: Devices, table: CandidateTable
) -> VPipeConfigError:
    """Refusal with the closest split, the bytes that it lacks, and a remedy."""
    counts, excess = _closest_split(table)
    edges = bounds(counts)
    part = max(range(len(counts)), key=lambda index: excess[index])
    start, stop, load, ratios = edges[part], edges[part + 1], devices.loads(pipeline)[part], pipeline.recompute_ratio
    count = stop - start
    most = 0.0  # of the layers to swap
    if may_swap(pipeline)[part] and pipeline.swap_ratio:
        most = pipeline.swap_ratio[part]
    elif may_swap(pipeline)[part] and devices.host_bandwidth:
        most = 1.0
    memories = [
        stage_memory(profile, start, stop, load, devices.optimizer, last, min(int(most * count), count - last))
        for last in range(count + 1)
    ]
    possible = min(memories, key=lambda memory: memory.total)
    least = possible if ratios is None else memories[int(ratios[part] * count)]
    budget = devices.budgets(pipeline)[part]
    lacking = f"{excess[part]} bytes ({show_bytes(excess[part])}) too many"
    return VPipeConfigError(
        f"memory budget: got {show(budget)} bytes for stage {part}; nothing fits: the split that comes closest, "
        f"{show(counts)}, needs {least.total} bytes there (layers {start}-{stop - 1}), {lacking}; "
        f"allowed: at least {least.total} bytes; {_remedy(profile, pipeline, devices, max(excess), least, possible)}"
    )


def _closest_split(table: CandidateTable) -> tuple[tuple[int, ...], list[int]]:
    """The split that lacks the fewest bytes on its worst stage, and the bytes that every stage lacks."""
    # Without transfers a pace is that of the slowest stage: so the same search finds the fewest bytes that lack.
    counts = fastest_split(SplitCosts(np.maximum(table.excess, 0), np.zeros(table.excess.shape[1]), None)) or ()
    edges = bounds(counts)
    return counts, [int(table.excess[part, edges[part + 1], count - 1]) for part, count in enumerate(counts)]


def _remedy(
    profile: ModelProfile,
    pipeline: Pipeline,
    devices: Devices,
    lacking: int,
    memory: StageMemory,
    possible: StageMemory,
) -> str:
    """Advice against the largest use of memory; ``possible`` is the least with recomputation."""
    moving = memory.activations + memory.recompute + memory.workspace
    remedies, depth = [], pipeline.depths[0]
    if possible.total < memory.total:
        remedies.append('leave recomputation to the planner ("recompute_ratio": "auto")')
    if pipeline.schedule == "asp" and pipeline.weight_sync != "none" and pipeline.micro_batches < depth:
        fewer = Candidates(profile, replace(pipeline, micro_batches=depth), devices)
        if max(_closest_split(fewer.table(float(fewer.passes[-1])))[1]) < lacking:  # gradients live longer
            steps = f"raise gradient_accumulation_steps to {depth}"
            remedies.append(f"{steps}, so that no stage stashes more than one version of its weights")
    if moving > memory.static:
        remedies.append("use smaller micro-batches")
    elif memory.optimizer > memory.weights + memory.versions:
        remedies.append("use ZeRO-1 with more replicas, or an optimizer with less state")
    return ", or ".join([*remedies, "use more stages or more memory"])
