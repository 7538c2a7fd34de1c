"""Bytes of stages in closed form; what stays on them; what optimizers need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import shapes
import torch
from allocations import count_allocations, watched
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine.updates.optimizers import Lamb
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.devices import (
    OptimizerBytes,
    optimizer_bytes,
)
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.memory import MemoryModel, stage_memory
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.counts import StageLoad, rank_counts, stage_loads
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload, rank_program


def load_of(in_flight: int, *others: int, **more: int) -> StageLoad:
    """Of a stage with as many micro-batches in flight when there are gradients as at other times."""
    return StageLoad(in_flight, *others, **{"with_gradients": in_flight, **more})


def model(*layers: LayerProfile, input_bytes: int = 0) -> ModelProfile:
    return ModelProfile(layers, input_bytes, 1, "test", "float32", "analytic")


# Attributes by position: name, seconds, parameters, kept, output, input kept, output kept, workspace, frozen.
CHAIN = model(
    LayerProfile("linear", 1, 2, 100, 0, 10, 8, 0, 5, 0),
    LayerProfile("tanh", 1, 2, 0, 10, 10, 0, 10, 2, 0),
    LayerProfile("linear", 1, 2, 200, 0, 20, 10, 0, 50, 0),
    LayerProfile("frozen", 1, 2, 400, 7, 30, 0, 0, 0, 300),
    input_bytes=8,
)


def named(optimizer: str, params: dict[str, Any] | None = None, **config: Any) -> OptimizerBytes:
    """Of an optimizer on one replica, in fp32 unless ``config`` says otherwise."""
    return optimizer_bytes(DeepSpeedJson({"optimizer": {"type": optimizer, "params": params or {}}, **config}))


def test_tensors_between_layers_count_once() -> None:
    # Input 8; nothing between linear and tanh; tanh's output, which the next layer keeps as well, 10; output 20.
    assert stage_memory(CHAIN, 0, 3, load_of(1)).activations == 8 + 10 + 20
    # The same, times three in flight.
    assert stage_memory(CHAIN, 0, 3, load_of(3)).activations == 3 * 38


def test_recomputed_segments_keep_their_input() -> None:
    found = stage_memory(CHAIN, 0, 4, load_of(2), recomputed=2)
    # Input 8; tanh's output, which is the segment's input, 10; output 30.
    assert found.activations == 2 * (8 + 10 + 30)
    # The segment's input once more, 10; layer 3's own 7.
    assert found.recompute == 10 + 7
    # At layer 2 of the segment: its input 10 and workspace 50, with the gradient of the stage's output, 30.
    assert found.workspace == 10 + 50 + 30 - 17
    everything = stage_memory(CHAIN, 0, 4, load_of(2), recomputed=4)
    assert everything.activations == 2 * (8 + 30)
    assert everything.recompute == 8 + 10 + 7


def test_swapped_layers_keep_their_input_and_output() -> None:
    chain = model(
        LayerProfile("x", 1, 2, 40, 10, 4, 0, 4),
        LayerProfile("x", 1, 2, 40, 20, 4, 4, 0),
        LayerProfile("x", 1, 2, 40, 7, 3, 4, 0),
        input_bytes=8,
    )
    # Input 8; the first's own 6; its output 4, which two keep; the second's own 20; its output 4; 7; output 3.
    kept, swapped = 8 + 6 + 4 + 20 + 4 + 7 + 3, 6 + 4 + 20
    assert MemoryModel(chain).swapped(0, 2) == swapped
    load = load_of(3, at_update=2)
    assert stage_memory(chain, 0, 3, load).activations == 3 * kept
    on_cpu = stage_memory(chain, 0, 3, load, swapped=2)
    assert on_cpu.activations == 3 * (kept - swapped) + swapped
    assert stage_memory(chain, 0, 3, replace(load, in_transit=2), swapped=2).activations == on_cpu.activations + swapped
    alone = stage_memory(chain, 0, 3, load_of(1))
    assert on_cpu.total == alone.total + 2 * (kept - swapped), "the pass itself finds everything"
    update = OptimizerBytes(update=Fraction(6))
    for transit, there in ((1, 0), (2, swapped)):  # an update finds at most what is still leaving
        found = stage_memory(chain, 0, 3, replace(load, in_transit=transit), update, swapped=2)
        assert found.total == 2 * 120 + 5 * 120 + 2 * (kept - swapped) + there
    recomputed = stage_memory(chain, 0, 3, load, recomputed=1, swapped=1)
    assert recomputed.activations == 3 * (kept - 7 - 6) + 6
    assert stage_memory(chain, 0, 3, load_of(1), swapped=3).activations == kept


def test_weights_versions_gradients_and_optimizer() -> None:
    found = stage_memory(CHAIN, 2, 4, load_of(3, versions=3), named("Adam"))
    assert found.weights == 600
    assert found.versions == 2 * 300  # frozen weights have one version,
    assert found.gradients == 300  # no gradients
    assert found.optimizer == 600  # and no state
    assert found.static == 600 + 600 + 300 + 600
    assert found.total == found.static + found.activations + found.recompute + found.workspace


def test_buffers() -> None:
    assert stage_memory(CHAIN, 1, 3, load_of(1, 1, input_buffers=2, output_buffers=3)).buffers == 2 * 10 + 3 * 20


def test_updates_need_multiples_of_the_largest_weight() -> None:
    weights = [90, 0, 80, 70]
    layers = [replace(layer, largest_weight_bytes=most) for layer, most in zip(CHAIN.layers, weights, strict=True)]
    optimizer, profile = named("Lamb"), replace(CHAIN, layers=tuple(layers))
    found = stage_memory(profile, 0, 3, load_of(3, at_update=2), optimizer)
    assert found.activations + found.workspace == 2 * 38 + 2 * 90
    found = stage_memory(profile, 2, 4, load_of(1, at_update=0), optimizer)
    assert found.activations + found.workspace == 2 * 80


@pytest.mark.parametrize(("reduced", "beyond"), [(1, 4 * 200), (Fraction(1, 4), 4 * 75 - 225)])
def test_a_norm_copies_the_largest_gradient(reduced: Fraction, beyond: int) -> None:
    """Of those that a reduction has left, of which there may be less than of that one."""
    layers = [replace(layer, largest_weight_bytes=layer.parameter_bytes) for layer in CHAIN.layers[:3]]
    optimizer = OptimizerBytes(reduced=Fraction(reduced), norm=Fraction(4))
    found = stage_memory(replace(CHAIN, layers=tuple(layers)), 0, 3, load_of(3, at_update=2), optimizer)
    assert found.activations + found.workspace == max(2 * 38 + beyond, 3 * 38 + 50)


@pytest.mark.parametrize(
    ("optimizer", "beyond"),
    [
        (OptimizerBytes(update=Fraction(3)), 2 * 300),
        (OptimizerBytes(update=Fraction(3), bucket_bytes=100), 2 * 300 - 100),  # which the step does not find any more
        (OptimizerBytes(update=Fraction(3), bucket_bytes=1000), 1000),  # a second one, in the reduction
        (OptimizerBytes(bucket_bytes=100, reduced=Fraction(1, 2)), 150),
    ],
)
def test_updates_may_be_the_peak(optimizer: OptimizerBytes, beyond: int) -> None:
    # 38 bytes are kept by each of three in flight, two of them during the update.
    found = stage_memory(CHAIN, 0, 3, load_of(3, at_update=2), optimizer)
    assert found.activations + found.workspace == max(2 * 38 + beyond, 3 * 38 + 50)
    drained = stage_memory(CHAIN, 0, 3, load_of(3), optimizer)
    assert drained.activations + drained.workspace == max(beyond, 3 * 38 + 50)


sizes = st.integers(0, 9)


@st.composite
def chains(draw: st.DrawFn) -> ModelProfile:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        kept, weights = draw(sizes), draw(sizes)
        own, frozen = draw(st.integers(0, kept)), draw(st.integers(0, weights))
        found.append(LayerProfile("x", 1, 2, weights, kept, draw(sizes), draw(sizes), own, draw(sizes), frozen))
    return model(*found, input_bytes=draw(sizes))


@given(profile=chains(), data=st.data())
def test_prefix_sums_against_a_walk(profile: ModelProfile, data: st.DataObject) -> None:
    stop = data.draw(st.integers(1, len(profile)))
    start = data.draw(st.integers(0, stop - 1))
    cut = data.draw(st.integers(start, stop))
    first = data.draw(st.booleans())  # micro-batch of a batch
    found = stage_memory(profile, start, stop, load_of(1, with_gradients=0 if first else 1), recomputed=stop - cut)
    layers = profile.layers
    at = [profile.input_bytes, *(layer.boundary_bytes for layer in layers)]

    def walk(first: int, last: int) -> list[int]:
        """Bytes that layers from ``first`` on have kept after each of them, with what is between them."""
        after, total = [], at[first]
        for index in range(first, last):
            layer = layers[index]
            after.append(total + layer.activation_bytes)
            keeps = layers[index + 1].input_kept_bytes if index + 1 < len(layers) else 0
            total += layer.activation_bytes - layer.output_kept_bytes + max(layer.output_kept_bytes, keeps)
        return after

    def closed(first: int, last: int) -> int:
        """All of them, with the output as it is sent."""
        layer = layers[last - 1]
        return walk(first, last)[-1] - layer.output_kept_bytes + max(layer.output_kept_bytes, layer.boundary_bytes)

    def made(index: int) -> int:
        """Gradients before the backward pass of a layer, and what that needs."""
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in layers[index:stop]]
        if not first:
            return gradients + layers[index].workspace_bytes
        return sum(trained[1:]) + max(trained[0], layers[index].workspace_bytes)

    gradients = sum(layer.parameter_bytes - layer.frozen_bytes for layer in layers[start:stop])
    kept = at[start] if cut == start else closed(start, cut)
    kept += at[stop] if cut < stop else 0
    moments = [gradients]  # the update
    for index, bytes_then in zip(range(start, cut), walk(start, cut), strict=True):
        incoming = at[stop] if index < stop - 1 else 0
        moments.append(bytes_then + at[stop] + made(index) + incoming)
    segment = walk(cut, stop)
    for index, bytes_then in zip(range(cut, stop), segment, strict=True):
        incoming = at[stop] if index < stop - 1 else 0
        moments.append(kept + bytes_then + made(index) + incoming)
    assert found.activations == kept
    assert found.recompute == (segment[-1] if segment else 0)
    moments.append(kept + found.recompute + (0 if first else gradients))
    assert found.total == found.weights + max(moments)


@given(profile=chains())
def test_tables_and_single_stages_agree(profile: ModelProfile) -> None:
    model, load = MemoryModel(profile, named("Adam")), load_of(3, 2, 1, 1, 2)
    for stop in range(1, len(profile) + 1):
        table = model.alternatives(np.arange(stop), stop)(load, 0)
        for start in range(stop):
            for cut in range(start, stop + 1):
                one = stage_memory(profile, start, stop, load, named("Adam"), stop - cut)
                assert (table.activations[start, cut], table.recompute[start, cut]) == (one.activations, one.recompute)
                assert (table.total[start, cut], table.static[start, cut]) == (one.total, one.static)


def test_gradients_of_single_micro_batches_come_late() -> None:
    kept, gradients = 8 + 10 + 20, 300
    every = stage_memory(CHAIN, 0, 3, stage_loads(Pipeline("asp", 3, 2))[0])
    assert every.gradients == gradients
    assert every.total - every.weights - every.versions == 3 * kept + gradients + 50
    # At layer 2 its own 200 are being made. At layer 0, which keeps 8 + 10 of the 38, 300 and the gradient of its
    # stage's output, which is counted to the end, exist.
    single = stage_memory(CHAIN, 0, 3, stage_loads(Pipeline("asp", 3, 1))[0])
    assert single.total - single.weights - single.versions == max(3 * kept + 200, 2 * kept + 8 + 20 + 20 + gradients)
    assert single.gradients + single.workspace == single.total - single.weights - single.versions - 3 * kept
    # All gradients are there before the update, even where nothing is in flight then.
    last = stage_memory(CHAIN, 2, 3, stage_loads(Pipeline("asp", 1, 1))[0])
    assert last.total - last.weights == 30 + 200
    # A batch of three that is all in flight: the same, or its second micro-batch with all gradients.
    batch = stage_memory(CHAIN, 0, 3, stage_loads(Pipeline("1f1b", 3, 3))[0])
    assert batch.total - batch.weights == 2 * kept + gradients + 50


def test_gpt3_weights() -> None:
    # 175e9 weights in bf16 with fp32 Adam states: 2 + 2 + 12 bytes each, as in ZeRO's table (SC 2020).
    weights = 2 * 175_000_000_000
    found = stage_memory(
        model(LayerProfile("all", 0, 0, weights, 0, 0)), 0, 1, load_of(1), named("adamw", bf16={"enabled": True})
    )
    assert found.weights + found.gradients + found.optimizer == 16 * 175_000_000_000


@pytest.mark.parametrize(
    ("config", "held", "update", "bucket"),
    [
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, 0, 1, 0),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 1, 1, 0),
        ({"optimizer": {"type": "AdamW"}}, 2, 1, 0),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, 3, 1, 0),
        ({"optimizer": {"type": "Lamb"}}, 2, 1, 0),
        ({"optimizer": {"type": "Lion"}}, 1, 1, 0),
        ({"optimizer": {"type": "HomeGrown"}}, 2, 1, 0),
        ({}, 2, 1, 0),
        ({"optimizer": {"type": "Adam"}, "bf16": {"enabled": True}}, 6, 5, 0),
        ({"optimizer": {"type": "SGD"}, "fp16": {"enabled": True}}, 2, 3, 0),
        ({"optimizer": {"type": "Adam"}, "bf16": {"enabled": False}}, 2, 1, 0),
        (
            {"optimizer": {"type": "Adam"}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            Fraction(3, 2),
            1,
            1_000_000_000,
        ),
        (
            {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 10}},
            Fraction(3, 4),
            Fraction(1, 2),
            40,
        ),
        # A gradient in fp32 and two temporaries, for all weights at once.
        (
            {
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
            },
            Fraction(3, 2),
            Fraction(3, 2),
            1_000_000_000,
        ),
        ({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True}}, 6, 3, 0),
    ],
)
def test_optimizer_bytes(config: dict[str, object], held: Fraction, update: Fraction, bucket: int) -> None:
    found = optimizer_bytes(DeepSpeedJson(config), replicas=4)
    reduced = Fraction(bucket > 0, 4)
    found = replace(found, temporary=Fraction(0), norm=Fraction(0))
    assert found == OptimizerBytes(held, update, bucket, reduced)


@pytest.mark.parametrize(("params", "update"), [({}, 2), ({"torch_adam": True}, Fraction(7, 3))])
def test_bf16_gradients_that_are_added_in_fp32(params: dict[str, Any], update: Fraction) -> None:
    """In a vector that each replica has in full, in place of ZeRO's buckets."""
    config = {
        "optimizer": {"type": "Adam", "params": params},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    }
    found = optimizer_bytes(DeepSpeedJson(config), replicas=3)
    assert replace(found, temporary=Fraction(0)) == OptimizerBytes(Fraction(2), Fraction(update), sums=Fraction(2))
    load, alone = load_of(1), replace(found, sums=Fraction(0))
    of_sums = stage_memory(CHAIN, 0, 2, load, found).gradients - stage_memory(CHAIN, 0, 2, load, alone).gradients
    assert of_sums == 2 * sum(layer.parameter_bytes for layer in CHAIN.layers[:2])


@pytest.mark.parametrize(
    ("on_host", "wanted"),
    [
        (
            False,
            OptimizerBytes(bucket_bytes=20, temporary=Fraction(4), buffers=Fraction(1)),
        ),
        (
            True,
            OptimizerBytes(
                Fraction(3, 2),
                bucket_bytes=20,
                sums=Fraction(3, 4),
                temporary=Fraction(4),
                buffers=Fraction(2),
            ),
        ),
    ],
)
def test_an_offloaded_optimizer(on_host: bool, wanted: OptimizerBytes) -> None:
    """It needs host memory, but for buffers as large as the largest parameter's gradient."""
    zero = {"stage": 1, "reduce_bucket_size": 10, "offload_optimizer": {"device": "cpu"}}
    config = {"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "zero_optimization": zero}
    found = optimizer_bytes(DeepSpeedJson(config), replicas=4, on_host=on_host)
    assert found == wanted
    layers = [replace(layer, largest_weight_bytes=layer.parameter_bytes) for layer in CHAIN.layers]
    profile = replace(CHAIN, layers=tuple(layers))
    kept, alone = (
        stage_memory(profile, 0, 2, load_of(1), one).optimizer for one in (found, replace(found, buffers=Fraction(0)))
    )
    assert kept - alone == wanted.buffers * max(layer.parameter_bytes for layer in layers[:2]) > 0
    without = stage_memory(profile, 0, 2, load_of(1), replace(found, bucket_bytes=0)).optimizer
    assert kept - without == 20, "a reduction's buffer is there from the first backward pass of a batch on"


@pytest.mark.parametrize(
    ("schedule", "in_flight", "versions"),
    [("asp", [4, 3, 2, 1], [3, 2, 2, 1]), ("1f1b", [2, 2, 2, 1], [1] * 4), ("gpipe", [2] * 4, [1] * 4)],
)
def test_loads(schedule: str, in_flight: list[int], versions: list[int]) -> None:
    found = stage_loads(Pipeline(schedule, 4, 2))  # type: ignore[arg-type]
    assert [stage.in_flight for stage in found] == in_flight
    assert [stage.versions for stage in found] == versions
    assert all(stage.input_buffers == stage.output_buffers == 0 for stage in found)


def test_loads_of_asynchronous_pipelines() -> None:
    def versions(**options: Any) -> list[int]:
        return [stage.versions for stage in stage_loads(Pipeline("asp", 4, 2, **options))]

    assert versions(weight_sync="vertical") == [3, 3, 3, 3]
    assert versions(weight_sync="none") == [1, 1, 1, 1]
    assert versions(depth_map=(6, 4, 2, 0)) == [4, 3, 2, 1]
    # Buffers: gradients posted W_s - W_(s+1) + 1, activations sent and unanswered W_s + 1; on the other side two each.
    host = stage_loads(Pipeline("asp", 3, 1, (4, 1, 0)), host_transfers=True)
    assert [(stage.input_buffers, stage.output_buffers) for stage in host] == [(0, 4 + 5), (8, 2 + 2), (4, 0)]


def test_messages_packed_on_a_device() -> None:
    """Activations on their way to the next stage, also there, and gradients that no later activation confirms."""
    found = stage_loads(Pipeline("asp", 3, 1, (4, 1, 0)), packed_on_device=True)
    assert [(stage.input_buffers, stage.output_buffers) for stage in found] == [(0, 4), (4 + 4, 2), (2 + 2, 0)]
    assert [replace(stage, input_buffers=0, output_buffers=0) for stage in found] == [
        *stage_loads(Pipeline("asp", 3, 1, (4, 1, 0)))
    ]


def buffers(*arguments: Any, **options: Any) -> list[tuple[int, int]]:
    found = stage_loads(Pipeline(*arguments, **options), host_transfers=True)
    return [(stage.input_buffers, stage.output_buffers) for stage in found]


def test_buffers_of_synchronous_schedules() -> None:
    # Activations in flight and posted gradients; posted activations and gradients that nobody has confirmed.
    assert buffers("1f1b", 3, 4) == [(0, 3 + 2), (2 + 3, 2 + 2), (2 + 2, 0)]
    assert buffers("1f1b", 3, 2) == [(0, 2 + 2), (2 + 2, 2 + 2), (2 + 2, 0)]
    assert buffers("gpipe", 3, 4) == [(0, 4 + 1), (1 + 4, 4 + 1), (1 + 4, 0)]
    counts = [stage.in_flight for stage in stage_loads(Pipeline("interleaved", 2, 4, virtual_stages=2))]
    # Links are a rank's, so the receives posted count with its first or last part; gradients stay until the update.
    assert buffers("interleaved", 2, 4, virtual_stages=2) == [
        (0, counts[0] + 2),
        (4, counts[1] + 2),
        (4 + 2, counts[2]),
        (4 + 2, 0),
    ]


@given(pipeline=shapes.pipelines())
def test_counts_are_the_closed_forms(pipeline: Pipeline) -> None:
    """Versions, micro-batches in flight and unconfirmed gradients of the papers, and the most that checks allow."""
    size, depths, loads = pipeline.micro_batches, pipeline.depths, stage_loads(pipeline, host_transfers=True)
    for rank in range(pipeline.num_stages):
        counts = rank_counts(pipeline, rank)
        assert max(map(sum, counts.moments)) == pipeline.in_flight(rank)
        depth = depths[0] if pipeline.vertical else depths[rank]
        assert counts.versions == (1 if pipeline.synchronous else update_delay(depth, size) + 1)
        if pipeline.virtual_stages == 1 and rank:
            ahead = depths[rank - 1] + 1 - (0 if pipeline.synchronous else depths[rank])
            assert counts.unconfirmed == (min(ahead, size) if pipeline.synchronous else ahead,)
    assert loads[0].input_buffers == loads[-1].output_buffers == 0


@pytest.mark.parametrize(("ranks", "parts", "rank"), [(4, 2, 0), (4, 2, 3), (2, 3, 1), (8, 4, 2)])
def test_interleaved_warm_up(ranks: int, parts: int, rank: int) -> None:
    # Megatron-LM's warm-up, and the forward pass before the first backward pass.
    counts = rank_counts(Pipeline("interleaved", ranks, 4 * ranks, virtual_stages=parts), rank)
    assert max(map(sum, counts.moments)) == 2 * (ranks - rank - 1) + (parts - 1) * ranks + 1
    assert counts.in_flight == tuple(max(column) for column in zip(*counts.moments, strict=True))


@pytest.mark.parametrize("micro_batches", range(1, 13))
@pytest.mark.parametrize(("ranks", "parts"), [(k, v) for k in (2, 3, 4) for v in (2, 3)])
def test_interleaved_counts_are_those_of_the_program_that_runs(ranks: int, parts: int, micro_batches: int) -> None:
    pipeline = Pipeline("interleaved", ranks, micro_batches, virtual_stages=parts)
    found = stage_loads(pipeline)
    for rank in range(ranks):
        open_now, most = Counter[int](), Counter[int]()
        for action in rank_program(pipeline, rank, Workload(2)):
            if action.part is not None and action.kind in (Kind.FORWARD, Kind.BACKWARD):
                open_now[action.part] += 1 if action.kind is Kind.FORWARD else -1
                most |= open_now
        assert {part: found[part].in_flight for part in pipeline.parts_of(rank)} == most


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("ASGD", {}),
        ("Rprop", {}),
    ],
)
def test_optimizers_of_torch_keep_and_need_as_much(name: str, params: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(50, 50))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **params)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.dim())
    assert kept == named(name, params).held * weight.numel()
    needed = watched_peak(optimizer.step)
    planned = named(name, {**params, "torch_adam": True}).temporary * size(weight)
    assert needed <= planned + 100  # a few numbers
    assert needed >= planned or name in ("Adagrad", "Adamax", "RMSprop", "ASGD")


def test_adam_of_torch_updates_all_weights_at_once_on_a_gpu() -> None:
    params = {"torch_adam": True, "foreach": True}
    weights = [torch.nn.Parameter(torch.ones(50, 50)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, foreach=True)  # the default there
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    planned, total = named("AdamW", params), sum(map(size, weights))
    json = DeepSpeedJson({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    assert planned == optimizer_bytes(json, on_host=False)
    assert planned.temporary == 0
    assert abs(watched_peak(optimizer.step) - (planned.update - 1) * total) <= size(weights[0])


@pytest.mark.parametrize(
    ("name", "params", "on_host", "at_once"),
    [
        ("SGD", {"weight_decay": 0.1}, False, 1),
        ("SGD", {"weight_decay": 0.1, "foreach": None}, False, 1),
        ("SGD", {"weight_decay": 0.1, "foreach": False}, False, 0),
        ("SGD", {"weight_decay": 0.1}, True, 0),
        ("Adagrad", {}, False, 2),
        ("Lamb", {}, False, 0),  # DeepSpeed's
    ],
)
def test_where_an_optimizer_updates_all_weights_at_once(
    name: str, params: dict[str, Any], on_host: bool, at_once: int
) -> None:
    found = optimizer_bytes(DeepSpeedJson({"optimizer": {"type": name, "params": params}}), on_host=on_host)
    assert found.update == 1 + at_once
    assert (found.temporary == 0) == bool(at_once)


@pytest.mark.parametrize("params", [{}, {"eps_inside_sqrt": True}, {"bias_correction": False}])
def test_lamb_needs_two_tensors(params: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(50, 50))
    optimizer = Lamb([weight], **params)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    planned = named("Lamb").temporary * size(weight)
    assert planned <= watched_peak(optimizer.step) <= planned + 100


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def watched_peak(step: Callable[[], Any]) -> int:
    def work() -> None:
        with watched():
            step()

    return count_allocations(work).peak


def test_a_senseless_stage_of_zero_is_refused() -> None:
    with pytest.raises(VPipeConfigError, match=r'zero_optimization.stage: got "x"'):
        optimizer_bytes(DeepSpeedJson({"zero_optimization": {"stage": "x"}}))
