"""Plans against brute force, over all partitions and all numbers of recomputed and swapped layers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.partition import bounds
from ds_vpipe.planning.devices import Devices, OptimizerBytes, optimizer_bytes
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.memory import stage_memory
from ds_vpipe.planning.pace import LinkCost, pace
from ds_vpipe.planning.planner import plan, predict
from ds_vpipe.planning.search import Candidates
from ds_vpipe.schedules.pipeline import Pipeline


def layer(forward: float = 1, backward: float = 2, parameters: int = 0, kept: int = 0, out: int = 0) -> LayerProfile:
    return LayerProfile("layer", forward, backward, parameters, kept, out)


def model(*layers: LayerProfile, input_bytes: int = 0) -> ModelProfile:
    return ModelProfile(layers, input_bytes, 1, "test", "float32", "analytic")


@st.composite
def layers(draw: st.DrawFn) -> LayerProfile:
    small = st.integers(0, 12)
    kept, parameters = draw(small), draw(small)
    return LayerProfile(
        "layer",
        forward_s=draw(st.integers(1, 16)) / 8,  # sums are exact
        backward_s=draw(st.integers(0, 16)) / 8,
        parameter_bytes=parameters,
        activation_bytes=kept,
        boundary_bytes=draw(small),
        input_kept_bytes=draw(small),
        output_kept_bytes=draw(st.integers(0, kept)),
        workspace_bytes=draw(small),
        frozen_bytes=draw(st.sampled_from([0, parameters])),
        largest_weight_bytes=draw(st.integers(0, parameters)),
    )


Problem = tuple[ModelProfile, Pipeline, Devices]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    found = draw(st.lists(layers(), min_size=1, max_size=6))
    stages = draw(st.integers(1, min(4, len(found))))
    schedule = draw(st.sampled_from(["asp", "asp", "1f1b", "gpipe"]))
    ahead = draw(st.lists(st.integers(0, 3), min_size=stages - 1, max_size=stages - 1))
    pipeline = Pipeline(schedule, stages, draw(st.integers(1, 5)))
    if schedule == "asp":
        depths = tuple(sum(ahead[s:]) for s in range(stages))
        weight_sync = draw(st.sampled_from(["stash", "vertical", "none"]))
        pipeline = replace(pipeline, depth_map=depths, weight_sync=weight_sync)
    sizes = st.integers(1, 250)
    devices = Devices(
        budget=draw(st.none() | sizes | st.lists(sizes, min_size=stages, max_size=stages).map(tuple)),
        optimizer=OptimizerBytes(held=draw(st.sampled_from([Fraction(0), Fraction(5, 3)])), update=Fraction(1, 2)),
        link=LinkCost(draw(st.integers(0, 8)) / 8, draw(st.sampled_from([1, 8, float("inf")]))),
        host_transfers=draw(st.booleans()),
        host_bandwidth=draw(st.none() | st.sampled_from([16, 64, 256])),
        reduction_s=draw(st.sampled_from([0, 0, 1 / 8])),
        slowness=tuple(draw(st.lists(st.sampled_from([0.5, 1, 3]), min_size=stages, max_size=stages))),
    )
    return model(*found, input_bytes=draw(st.integers(0, 12))), pipeline, devices


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))


def brute_force(profile: ModelProfile, pipeline: Pipeline, devices: Devices) -> float | None:
    """The smallest pace over everything that fits."""
    budgets, loads, best = devices.budgets(pipeline), devices.loads(pipeline), None
    depths = None if pipeline.schedule == "gpipe" else pipeline.depths

    def swap_seconds(mine: Sequence[LayerProfile], again: int, swapped: int) -> float:
        size, hidden = 0, sum(one.backward_s for one in mine[swapped:])
        hidden += sum(one.forward_s for one in mine[len(mine) - again :])
        for one, after in pairwise(mine[:swapped]):
            size += one.activation_bytes - one.output_kept_bytes + max(one.output_kept_bytes, after.input_kept_bytes)
        if swapped:
            size += mine[swapped - 1].activation_bytes - mine[swapped - 1].output_kept_bytes
        one_way = size / (devices.host_bandwidth or 1)
        return 2 * one_way if devices.host_transfers else max(0.0, one_way - hidden)

    @cache
    def seconds(stage: int, start: int, stop: int, again: int) -> float | None:
        """Of a stage that fits, with the best number of swapped layers, else None."""
        limit, slow, found = budgets[stage], devices.slowness_of(stage), list[float]()
        layers = profile.layers[start:stop]
        mine = [replace(one, forward_s=slow * one.forward_s, backward_s=slow * one.backward_s) for one in layers]
        may_swap = devices.host_bandwidth is not None and pipeline.in_flight(stage) > 1
        for swapped in range(len(mine) - again + 1 if may_swap else 1):
            memory = stage_memory(profile, start, stop, loads[stage], devices.optimizer, again, swapped)
            if limit is None or memory.total <= limit:
                found.append(swap_seconds(mine, again, swapped))
        if not found:
            return None
        passes = sum(one.forward_s + one.backward_s for one in mine)
        if pipeline.schedule == "asp":  # where nothing else is waited for
            trained = sum(one.parameter_bytes - one.frozen_bytes for one in mine)
            passes += devices.reduction_s * trained / pipeline.micro_batches
        return passes + sum(one.forward_s for one in mine[len(mine) - again :]) + min(found)

    partitions = all_partitions(len(profile), pipeline.num_stages)
    for counts in partitions if pipeline.partition is None else [pipeline.partition]:
        edges = bounds(counts)
        trips = [devices.link.round_trip(profile.layers[cut - 1].boundary_bytes) for cut in edges[1:-1]]
        for again in product(*(range(count + 1) for count in counts)):
            compute = [seconds(s, edges[s], edges[s + 1], again[s]) for s in range(len(counts))]
            known = [one for one in compute if one is not None]
            if len(known) == len(counts):
                found = pace(known, trips, depths)
                best = found if best is None else min(best, found)
    return best


@st.composite
def tight_problems(draw: st.DrawFn) -> Problem:
    """Problems in which the split is given and some stages have fewer bytes than they need as they are."""
    profile, pipeline, devices = draw(problems())
    counts = draw(st.sampled_from(list(all_partitions(len(profile), pipeline.num_stages))))
    pipeline = replace(pipeline, partition=counts)
    whole = predict(profile, pipeline, replace(devices, budget=None)).stages
    least = predict(profile, replace(pipeline, swap_ratio=(1,) * len(counts)), replace(devices, budget=None)).stages
    budgets = tuple(draw(st.integers(a.memory.total, b.memory.total)) + 1 for a, b in zip(least, whole, strict=True))
    return profile, pipeline, replace(devices, budget=budgets, host_bandwidth=draw(st.sampled_from([16, 64, 256])))


@settings(max_examples=120)
@given(problem=problems() | tight_problems())
def test_plans_are_optimal_and_fit(problem: Problem) -> None:
    best = brute_force(*problem)
    if best is None:
        with pytest.raises(VPipeConfigError, match="nothing fits"):
            plan(*problem)
        return
    found = plan(*problem)
    assert found.pace_s == pytest.approx(best, rel=1e-11)
    for stage in found.stages:
        assert stage.budget is None or stage.memory.total <= stage.budget
    profile, _, devices = problem
    assert replace(predict(profile, found.pipeline, devices), notes=found.notes) == found


@settings(max_examples=60)
@given(problem=tight_problems())
def test_no_more_is_swapped_than_must_be(problem: Problem) -> None:
    profile, pipeline, devices = problem
    found = plan(profile, replace(pipeline, recompute_ratio=(0,) * pipeline.num_stages), devices)
    for stage, load in zip(found.stages, devices.loads(pipeline), strict=True):
        if stage.swapped:
            less = stage_memory(profile, stage.start, stage.stop, load, devices.optimizer, 0, stage.swapped - 1)
            assert less.total > (stage.budget or 0)


@settings(max_examples=60)
@given(problem=tight_problems(), data=st.data())
def test_the_search_knows_the_seconds_of_a_prediction(problem: Problem, data: st.DataObject) -> None:
    profile, pipeline, devices = problem
    given = st.lists(st.sampled_from([0, 0.4, 0.7]), min_size=pipeline.num_stages, max_size=pipeline.num_stages)
    ratios = {"recompute_ratio": tuple(data.draw(given)), "swap_ratio": tuple(data.draw(given))}
    pipeline, devices = replace(pipeline, **ratios), replace(devices, budget=None, host_bandwidth=2)
    table = Candidates(profile, pipeline, devices).table(1e9)
    for number, stage in enumerate(predict(profile, pipeline, devices).stages):
        seconds = stage.busy_s if pipeline.schedule == "asp" else stage.compute_s
        assert table.seconds[number, stage.stop, stage.stop - stage.start - 1] == pytest.approx(seconds)


def test_copies_back_hide_behind_the_backward_passes_before_them() -> None:
    profile = model(*[layer(1, 2, kept=10)] * 4)
    pipeline = replace(asp(2, 1), partition=(3, 1), recompute_ratio=(0.4, 0), swap_ratio=(0.7, 0))
    for bandwidth, seconds in (
        (100, 0.0),
        (5, 1.0),
        (4, 2.0),
    ):  # 20 bytes; a backward pass of 2 s, recomputation of 1 s
        found = predict(profile, pipeline, Devices(host_bandwidth=bandwidth)).stages[0]
        assert (found.recomputed, found.swapped, found.swap_s) == (1, 2, seconds)
    assert predict(profile, pipeline, Devices(host_bandwidth=5, host_transfers=True)).stages[0].swap_s == 8.0


@settings(max_examples=60)
@given(problem=problems(), data=st.data())
def test_fixed_partitions_and_ratios_are_kept(problem: Problem, data: st.DataObject) -> None:
    profile, pipeline, devices = problem
    devices, stages = replace(devices, budget=None), pipeline.num_stages
    counts = data.draw(st.sampled_from(list(all_partitions(len(profile), stages))))
    ratios = data.draw(st.lists(st.sampled_from([0, 0.3, 1]), min_size=stages, max_size=stages).map(tuple))
    swaps = data.draw(st.lists(st.sampled_from([0, 0.5, 1]), min_size=stages, max_size=stages).map(tuple))
    fixed = replace(pipeline, partition=counts, recompute_ratio=ratios, swap_ratio=swaps)
    assert plan(profile, fixed, devices) == predict(profile, fixed, devices)
    pipeline = replace(pipeline, swap_ratio=(0,) * stages)
    # Each stage may have what it needs without recomputation: then nothing is recomputed, and with one byte less on one
    # stage either that stage recomputes, or it does not fit.
    pipeline = replace(pipeline, partition=counts)
    never = predict(profile, replace(pipeline, recompute_ratio=(0,) * stages), devices)
    budgets = tuple(max(1, stage.memory.total) for stage in never.stages)
    found = plan(profile, pipeline, replace(devices, budget=budgets))
    assert [stage.recomputed for stage in found.stages] == [0] * stages
    if budgets[0] > 1:
        try:
            tighter = plan(profile, pipeline, replace(devices, budget=(budgets[0] - 1, *budgets[1:])))
        except VPipeConfigError as error:
            refused = str(error)
            assert "for stage 0; nothing fits" in refused
        else:
            assert tighter.pipeline.partition == counts
            assert tighter.stages[0].recomputed > 0


@settings(max_examples=60)
@given(problem=problems())
def test_the_missing_bytes_are_exact(problem: Problem) -> None:
    profile, pipeline, devices = problem
    try:
        plan(profile, pipeline, replace(devices, budget=1))
    except VPipeConfigError as error:
        line = str(error)
    else:
        return
    assert "\n" not in line
    missing = int(re.search(r", (\d+) bytes \(", line).group(1))  # type: ignore[union-attr]
    plan(profile, pipeline, replace(devices, budget=1 + missing))
    if missing > 1:
        with pytest.raises(VPipeConfigError, match=r", 1 bytes \(1 B\) too many"):
            plan(profile, pipeline, replace(devices, budget=missing))


def asp(num_stages: int, micro_batches: int) -> Pipeline:
    return Pipeline("asp", num_stages, micro_batches)


def test_the_first_stage_recomputes_what_it_must() -> None:
    # K = 2, W = (1, 0): stage 0 holds two micro-batches. 4 layers of 10 bytes each, boundaries of 1 byte.
    profile = model(*[layer(kept=10, out=1)] * 4, input_bytes=1)
    # Per micro-batch: input 1, layers 10 + 10, output 1; what is between them and kept by nobody does not count.
    free = plan(profile, asp(2, 1), Devices())
    assert free.pipeline.partition == (2, 2)
    assert free.stages[0].memory.activations == 44
    assert free.stages[0].memory.total == 44
    assert free.pace_s == 6
    # A byte less: the last layer is recomputed. Per micro-batch: input 1, layer 10, segment's input 1, output 1.
    # Once: the segment's input again, 1, and its layer, 10.
    tight = plan(profile, asp(2, 1), Devices(43))
    assert tight.pipeline.partition == (2, 2)
    assert tight.stages[0].recomputed == 1
    assert tight.stages[0].memory.activations == 26
    assert tight.stages[0].memory.recompute == 11
    assert tight.stages[0].memory.total == 37
    assert tight.pipeline.recompute_ratio == (0.5, 0)
    assert tight.pace_s == 7


def test_versions_move_layers_to_later_stages() -> None:
    # M = 1: stages hold 4, 3, 2, 1 versions. 10 layers of 10 bytes and as many of gradients; 100 bytes fit 2, 2, 3, 5.
    profile = model(*[layer(parameters=10)] * 10)
    found = plan(profile, asp(4, 1), Devices(100))
    assert all(stage.memory.total <= 100 for stage in found.stages)
    counts = found.pipeline.partition or ()
    assert [stage.memory.versions for stage in found.stages] == [30 * counts[0], 20 * counts[1], 10 * counts[2], 0]
    assert max(counts) == 3
    with pytest.raises(VPipeConfigError, match="raise gradient_accumulation_steps to 3, so that no stage stashes"):
        plan(profile, asp(4, 1), Devices(75))


def test_more_micro_batches_are_advised_only_where_they_save_memory() -> None:
    # With M = 1 gradients do not exist while a pass has its highest moment; on the last stage, without other versions,
    # that is all there is.
    profile = model(*[layer(parameters=1)] * 3, layer(parameters=50, kept=100))
    lacking = []
    for micro_batches in (1, 3):
        with pytest.raises(VPipeConfigError) as error:
            plan(profile, asp(4, micro_batches), Devices(60))
        assert "raise gradient_accumulation_steps" not in str(error.value)
        lacking.append(int(re.findall(r", (\d+) bytes \(", str(error.value))[0]))
    assert lacking[0] <= lacking[1]


@pytest.mark.parametrize(
    ("round_trip", "depths", "seconds"),
    [(0.0, (3, 2, 1, 0), 3.0), (1.5, (6, 4, 2, 0), 3.0), (6.0, (9, 6, 3, 0), 3.0)],
)
def test_depths_that_hide_transfers(round_trip: float, depths: tuple[int, ...], seconds: float) -> None:
    profile = model(*[layer()] * 4)
    link = LinkCost(latency_s=round_trip / 2)
    hiding = plan(profile, asp(4, 4), Devices(link=link), hide_transfers=True)
    assert (hiding.depths, hiding.pace_s) == (depths, seconds)
    waiting = plan(profile, asp(4, 4), Devices(link=link))
    assert waiting.pace_s == 3 + 0.75 * round_trip  # three round trips for four micro-batches in flight


@given(st.lists(layers(), min_size=3, max_size=6), st.sampled_from([2, 3]), st.sampled_from([1, 8, 40]))
def test_depths_are_those_of_the_fastest_split(found: list[LayerProfile], stages: int, bandwidth: int) -> None:
    """No split with depths of its own is faster, where all fit."""
    profile, pipeline, devices = model(*found), Pipeline("asp", stages, 1), Devices(link=LinkCost(0, bandwidth))
    hiding = plan(profile, replace(pipeline, swap_ratio=(0.0,) * stages), devices, hide_transfers=True)
    deepest = tuple(100 * stage for stage in reversed(range(stages)))
    best = min(
        predict(profile, replace(pipeline, partition=counts, depth_map=deepest), devices).pace_s
        for counts in product(range(1, len(found)), repeat=stages)
        if sum(counts) == len(found)
    )
    assert hiding.pace_s <= best / 0.999


def test_depths_that_do_not_fit_are_named() -> None:
    profile = model(*[layer(out=10)] * 4, input_bytes=10)
    found = plan(profile, asp(4, 4), Devices(100, link=LinkCost(0.75)), hide_transfers=True)
    assert found.depths == (3, 2, 1, 0)
    assert "depths [6, 4, 2, 0] would hide all transfers but do not fit" in found.notes[0]


def test_interleaved_parts_fit_their_rank() -> None:
    profile = model(*[layer(kept=10, parameters=4)] * 16)
    devices = Devices(2000, optimizer_bytes(DeepSpeedJson({})))
    found = plan(profile, Pipeline("interleaved", 2, 4, virtual_stages=2), devices)
    assert found.pipeline.partition == (4, 4, 4, 4)
    assert found.pace_s == 24
    # 4 micro-batches of 24 s, and a bubble of (K - 1) / v of them.
    assert found.seconds_per_micro_batch == 24 + 12 / 4
    # Rank 0 runs 5 forward passes before its first backward pass: 4 of its first part, 1 of its second; 40 bytes each.
    # 2 x 16 bytes of weights, as many of gradients, twice as many of optimizer state.
    assert [memory.total for memory in found.rank_memory()] == [5 * 40 + 4 * 32, 3 * 40 + 4 * 32]
    assert found.stages[0].memory.activations == 4 * 40


def test_what_a_synchronous_split_is_the_best_of() -> None:
    profile = model(*[layer()] * 4)
    for schedule in ("1f1b", "gpipe"):
        pipeline = Pipeline(schedule, 2, 4)
        assert plan(profile, pipeline, Devices()).notes[0].startswith(f"{schedule}: the split is the one with the best")
        assert plan(profile, replace(pipeline, partition=(2, 2)), Devices()).notes == ()
    assert plan(profile, asp(2, 1), Devices()).notes == ()


def test_synchronous_seconds() -> None:
    profile = model(*[layer()] * 4)
    for schedule in ("1f1b", "gpipe"):
        found = plan(profile, Pipeline(schedule, 4, 8), Devices())  # type: ignore[arg-type]
        assert 1 - 3.0 / found.seconds_per_micro_batch == pytest.approx(3 / 11)  # the bubble (K-1) / (K-1+M)


def test_reductions_over_replicas() -> None:
    profile = model(*[layer(parameters=8)] * 3, layer(parameters=40))
    devices = Devices.of(VPipeConfig(), DeepSpeedJson({}), replicas=4, reduce_bandwidth=12)
    assert devices.reduction_s == 2 * 3 / 4 / 12  # all bytes but a quarter go around a ring twice
    assert plan(profile, asp(2, 1), Devices()).pipeline.partition == (2, 2)
    found = plan(profile, asp(2, 1), devices)
    assert found.pipeline.partition == (3, 1), "many weights to reduce take time too"
    assert [stage.reduction_s for stage in found.stages] == [3, 5]
    assert (found.pace_s, found.stages[0].compute_s) == (12, 9)
    head, first, *_ = found.table().splitlines()
    assert head[: head.index("depth")].endswith("transfer ms  reduction ms  ")
    assert first.split()[5] == "3000.00"
    assert predict(profile, replace(found.pipeline, micro_batches=5), devices).stages[1].reduction_s == 1, (
        "once a batch"
    )
    even, far = model(*[layer(parameters=24)] * 4), LinkCost(4)  # 6 s of passes a stage, 6 s of reductions, 8 s away
    assert plan(even, asp(2, 1), Devices(link=far), hide_transfers=True).depths == (3, 0)
    assert plan(even, asp(2, 1), replace(devices, link=far), hide_transfers=True).depths == (2, 0)
    for schedule in ("1f1b", "gpipe", "interleaved"):
        virtual = 2 if schedule == "interleaved" else 1
        pipeline = Pipeline(schedule, 2, 4, virtual_stages=virtual, partition=(1,) * 4 if virtual > 1 else (3, 1))
        without, with_them = predict(profile, pipeline, Devices()), predict(profile, pipeline, devices)
        more = with_them.seconds_per_micro_batch - without.seconds_per_micro_batch
        # Each stage begins its next batch after its own: that of the second, of 5 s, goes on while the first one works.
        assert more == pytest.approx(6 / 4 if virtual > 1 else 3 / 4)


def test_plans_become_files(tmp_path: Path) -> None:
    profile = model(*[layer(kept=10, out=1, parameters=4)] * 7, input_bytes=1)
    found = plan(profile, asp(3, 2), Devices(70, link=LinkCost(0.1)))
    assert any(stage.recomputed for stage in found.stages)
    path = tmp_path / "split.json"
    found.save_split(path)
    assert "swap_ratio" not in json.loads(path.read_text())
    swapping = plan(profile, asp(3, 2), Devices(70, link=LinkCost(0.1), host_bandwidth=1e6))
    assert not any(stage.recomputed for stage in swapping.stages), "it takes no time"
    assert [stage.swapped > 0 for stage in swapping.stages] == [True, False, False]
    swapping.save_split(path)
    config = VPipeConfig.parse({"partition": str(path)})
    assert config.swap_ratio == swapping.pipeline.swap_ratio
    found.save_split(path)
    config = VPipeConfig.parse({"partition": str(path)})
    assert config.partition == found.pipeline.partition
    assert config.recompute_ratio == found.pipeline.recompute_ratio
    config.check_sizes(3, 7)
    content = json.loads(json.dumps(found.to_json()))
    assert content["partition"] == list(found.pipeline.partition or ())
    assert [stage["memory"]["total"] for stage in content["stages"]] == [s.memory.total for s in found.stages]


def test_table() -> None:
    profile = model(*[layer(0.001, 0.002, kept=10_000_000, out=1000, parameters=4_000_000)] * 4, input_bytes=1000)
    lines = plan(profile, asp(2, 1), Devices()).table().splitlines()
    assert [line[:83] for line in lines[:3]] == [
        "stage  layers  recompute  compute ms  transfer ms  depth  weights  versions  gradie",
        "    0     0-1        0/2        6.00         0.00      1     8 MB      8 MB       4",
        "    1     2-3        0/2        6.00         0.00      0     8 MB       0 B       4",
    ]
    assert [line[83:] for line in lines[:3]] == [
        "nts  activations   peak  budget",
        " MB        40 MB  60 MB       -",  # the last layer's gradients are being made
        " MB        20 MB  32 MB       -",
    ]
    assert lines[3] == "asp, M = 1: 6.00 ms per micro-batch; pace 6.00 ms"


def test_table_has_recomputed_and_swapped_layers() -> None:
    profile = model(*[layer(0.001, 0.002, kept=10_000_000, out=1000, parameters=4_000_000)] * 4, input_bytes=1000)
    ratios = {"partition": (2, 2), "recompute_ratio": (0.5, 0.5), "swap_ratio": (1.0, 1.0)}
    head, first, last, *_ = predict(profile, replace(asp(2, 1), **ratios), Devices()).table().splitlines()
    assert head.split()[:4] == ["stage", "layers", "recompute", "swap"]
    assert head.split()[-6:] == ["activations", "recomputed", "peak", "budget", "on", "host"]
    assert first.split()[2:4] == ["1/2", "1/2"]
    assert first.endswith("20 MB")
    assert last.split()[2:4] == ["1/2", "0/2"], "one micro-batch in flight"


def test_refused() -> None:
    profile = model(*[layer()] * 4)
    with pytest.raises(VPipeConfigError, match=r"^number of stages.*: got 5; the model has 4 layers"):
        plan(profile, asp(5, 1), Devices())
    allowed = r"allowed: bytes > 0, one number or one for each of 2 ranks"
    with pytest.raises(VPipeConfigError, match=rf"^memory budget: got \[1, 2, 3\]; {allowed}"):
        plan(profile, asp(2, 1), Devices((1, 2, 3)))
    with pytest.raises(VPipeConfigError, match=r"^vpipe.partition: got \[1, 2\]; these are 2 counts that sum to 3"):
        plan(profile, replace(asp(2, 1), partition=(1, 2)), Devices())


def test_virtual_stages_share_the_budget_of_their_rank() -> None:
    budgets = Devices((30, 60)).budgets(Pipeline("interleaved", 2, 4, virtual_stages=3))
    assert budgets == [10, 20, 10, 20, 10, 20]


@pytest.mark.parametrize(("num_layers", "num_stages", "budget", "seconds"), [(97, 8, 43_000, 2), (400, 64, 40_000, 30)])
def test_plans_are_quick(num_layers: int, num_stages: int, budget: int, seconds: float) -> None:
    costs: Sequence[int] = [1 + index * 37 % 11 for index in range(num_layers)]
    profile = model(*[layer(cost / 1e3, cost / 5e2, 100 * cost, 300, 10) for cost in costs], input_bytes=10)
    begin = time.process_time()
    found = plan(profile, asp(num_stages, 8), Devices(budget, optimizer_bytes(DeepSpeedJson({}))))
    assert time.process_time() - begin < seconds
    assert any(stage.recomputed for stage in found.stages)


def test_a_device_that_is_faster_than_the_profile() -> None:
    slowness = (1, 0.1, 1, 1)
    layers = tuple(LayerProfile("Layer", 0.01, 0.02, 1, 0, 0) for _ in range(16))
    profile, devices = ModelProfile(layers, 0, 1, "cpu", "float32", "measured"), Devices(slowness=slowness)
    splits = (tuple(b - a for a, b in pairwise((0, *cuts, 16))) for cuts in combinations(range(1, 16), 3))
    best = min(max(0.03 * count * slow for count, slow in zip(one, slowness, strict=True)) for one in splits)
    assert plan(profile, Pipeline("gpipe", 4, 4), devices).pace_s == pytest.approx(best)
