"""A plan carried out on paper holds and takes what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.pace import LinkCost
from ds_vpipe.planning.planner import plan
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import planned_costs
from ds_vpipe.simulation.simulator import simulate

MB = 1_000_000
LAYERS = tuple(
    LayerProfile(f"Layer{i}", 1e-3 * (1 + i % 3), 2e-3 * (1 + i % 2), MB * (1 + i), 3 * MB, MB * (1 + i % 2))
    for i in range(12)
)
PROFILE = ModelProfile(LAYERS, MB, 4, "cpu", "float32", "measured")


def test_costs_of_parts() -> None:
    pipeline, devices = Pipeline("asp", 3, 2, partition=(3, 4, 5)), Devices(link=LinkCost(bytes_per_s=1e9))
    found = plan(PROFILE, pipeline, devices)
    costs = planned_costs(found, devices, update_s=0.5)
    assert sum(cost.forward_s for cost in costs) == pytest.approx(sum(layer.forward_s for layer in LAYERS))
    # Layer 2 ends the first part and sends 1 MB, layer 6 the second.
    assert [cost.send_activation_s for cost in costs] == pytest.approx([1e-3, 1e-3, 0.0])
    assert [cost.send_gradient_s for cost in costs] == pytest.approx([0.0, 1e-3, 1e-3])
    uneven = plan(PROFILE, replace(pipeline, partition=(2, 5, 5)), devices)
    costs = planned_costs(uneven, devices)
    assert [cost.send_activation_s for cost in costs] == pytest.approx([2e-3, 1e-3, 0.0])
    assert [cost.send_gradient_s for cost in costs] == pytest.approx([0.0, 2e-3, 1e-3])
    assert {cost.update_s for cost in costs} == {0.0}


@pytest.mark.parametrize("schedule", ["asp", "1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("budget", [None, 100 * MB])
@pytest.mark.parametrize("reduction_s", [0, 4e-10])
def test_simulated_plans_keep_their_promises(
    schedule: str, micro_batches: int, budget: int | None, reduction_s: float
) -> None:
    pipeline = Pipeline(schedule, 3, micro_batches)  # type: ignore[arg-type]
    devices = Devices(budget, link=LinkCost(bytes_per_s=5e9), reduction_s=reduction_s)
    found = plan(PROFILE, pipeline, devices)
    simulation = simulate(pipeline, planned_costs(found, devices), Workload(24))
    # A plan spreads a batch's reduction over its micro-batches; other stages wait a little for it all the same.
    off = 0.03 if reduction_s else 0.02
    assert simulation.throughput == pytest.approx(1 / found.seconds_per_micro_batch, rel=off)
    for rank, stage in zip(simulation.ranks, found.stages, strict=True):
        assert rank.peak_bytes == pytest.approx(stage.memory.total, rel=0.03)
        assert budget is None or rank.peak_bytes <= budget


@pytest.mark.parametrize("sizes", [(8, 2, 1), (8, 4, 1), (8, 3, 5), (4, 2, 2), (4, 2, 4), (3, 2, 7)])
def test_fewer_micro_batches_than_ranks_wait_until_they_come_round(sizes: tuple[int, int, int]) -> None:
    stages, virtual, micro_batches = sizes
    layers = (LayerProfile("Even", 1.0, 2.0, MB, MB, MB),) * (stages * virtual)
    pipeline = Pipeline("interleaved", stages, micro_batches, virtual_stages=virtual)
    found = plan(replace(PROFILE, layers=layers), pipeline, Devices())
    simulation = simulate(pipeline, planned_costs(found, Devices()), Workload(3))
    assert found.seconds_per_micro_batch == pytest.approx(1 / simulation.throughput)


def test_an_update_is_shared_by_the_parts_of_a_rank() -> None:
    pipeline, devices = Pipeline("interleaved", 2, 4, virtual_stages=2), Devices()
    costs = planned_costs(plan(PROFILE, pipeline, devices), devices, update_s=0.5)
    assert [cost.update_s for cost in costs] == [0.25] * 4
