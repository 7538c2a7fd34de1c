"""Every precision against the replay in that precision: bf16 with and without ZeRO, autocast, fp16 with loss scales."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import LAYERS, MICRO_BATCHES, OPTIMIZERS, adamw, difference, sgd
from torch import nn
from worlds import Worlds

import ds_vpipe
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

ZERO_1 = {"zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}}


def replayed(stages: int, micro_batches: int, make_optimizer: Any, **options: Any) -> reference.Replay:
    counts = uniform_partition(LAYERS, stages)
    run = reference.Replay(counts, default_depths(stages), micro_batches, make_optimizer, **options)
    return run.run(MICRO_BATCHES // micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_bf16(worlds: Worlds, stages: int, micro_batches: int) -> None:
    extras: list[dict[str, Any]] = [ZERO_1, {}]
    configs = [
        cases.config(micro_batches, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, bf16={"enabled": True}, **extra)
        for extra in extras
    ]
    reports = worlds.run(stages, cases.train_each, configs, stages, MICRO_BATCHES // micro_batches)
    wanted = replayed(stages, micro_batches, adamw, dtype=torch.bfloat16)
    for position, extra in enumerate(extras):
        assert difference(cases.merged([r[position] for r in reports]), wanted.parameters()) == 0, extra
        assert reports[0][position]["losses"] == pytest.approx(wanted.losses, rel=1e-2)


def frozen_specs(stage: int) -> list[Any]:
    """Layers of which those of one of two stages are frozen."""
    half, specs = len(toy.LAYERS) // 2, toy.layer_specs()
    there = range(half) if stage == 0 else range(half, 2 * half)
    return [spec.build().requires_grad_(False) if number in there else spec for number, spec in enumerate(specs)]


def with_a_stage_without_gradients(sync_mode: str) -> None:
    extra: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **ZERO_1}
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"sync_mode": sync_mode}, gradient_clipping=1.0, **extra)
    tied = {**ds_config, "vpipe": {**ds_config["vpipe"], "partition": [9, 1]}}
    layers: list[tuple[dict[str, Any], Any, Any]] = [
        (ds_config, partial(frozen_specs, 0), None),
        (ds_config, partial(frozen_specs, 1), None),
        (tied, toy.words_tied_specs, toy.mean_over_positions),
    ]
    for config, specs, loss in layers:
        engine = cases.engine(config, 2, specs=specs, loss_fn=loss)
        iterator, before = toy.data(), cases.parameters(engine)
        for _ in range(3):
            assert bool(engine.train_batch(iterator).isfinite())
        moved = difference(cases.parameters(engine), before)
        assert (moved > 0) == any(p.requires_grad for p in engine.module.parameters())
        cases.end(engine)


@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_stages_without_gradients_to_take_a_norm_of(worlds: Worlds, sync_mode: str) -> None:
    """All frozen, or nothing but the copy of a tied weight: DeepSpeed takes the norm of an empty list."""
    worlds.run(2, with_a_stage_without_gradients, sync_mode)


class Tempered(nn.Module):
    """Scales by a parameter of this shape. Of one with two dimensions the elements are in memory column by column."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape[::-1], 1.5).permute(list(range(len(shape)))[::-1]))
        vars(self.scale)["stride"] = 1  # an attribute in the place of the method, as GPT-NeoX gives its biases one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def tempered(shape: tuple[int, ...], folder: str, extra: dict[str, Any]) -> Any:
    specs = [spec for layer in toy.layer_specs(0.0) for spec in (layer, LayerSpec(Tempered, *shape))][:-1]
    engine = cases.engine(cases.config(2, OPTIMIZERS["AdamW"][0], {}, **extra), 2, specs=lambda: specs)
    iterator = toy.data()
    losses = [float(engine.train_batch(iterator)) for _ in range(2)]
    engine.save_checkpoint(folder)
    losses += [float(engine.train_batch(iterator)) for _ in range(2)]
    engine.load_checkpoint(folder)
    again = [float(engine.train_batch(toy.data(start=4)))]
    shapes = {tuple(part.scale.shape) for part in engine.module.modules() if isinstance(part, Tempered)}
    cases.end(engine)
    return losses, again, shapes


def tempered_both_ways(folder: str) -> list[Any]:
    extras: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}, **ZERO_1}]
    shapes = ((), (1,), (toy.SEQUENCE, toy.HIDDEN))
    return [tempered(shape, f"{folder}/{at}{shape}", extra) for at, extra in enumerate(extras) for shape in shapes]


def test_parameters_that_deepspeed_cannot_send(worlds: Worlds, tmp_path: Path) -> None:
    """Without dimensions, or with elements in another order: DeepSpeed alone cannot start with them."""
    for report in worlds.run(2, tempered_both_ways, str(tmp_path)):
        for scalar, wanted, turned in (report[:3], report[3:]):
            assert scalar[:2] == wanted[:2]
            assert scalar[1][0] == scalar[0][2]
            assert scalar[2] == {()}
            assert turned[1][0] == turned[0][2]


class Sliced(nn.Module):
    """Adds a parameter that is a part of a larger tensor, another one on every rank."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(torch.distributed.get_rank())
        self.shift = nn.Parameter(torch.rand(toy.SEQUENCE, 2 * toy.HIDDEN, generator=own)[:, : toy.HIDDEN])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def sliced() -> torch.Tensor:
    specs = [*toy.layer_specs()[:-1], LayerSpec(Sliced), toy.layer_specs()[-1]]
    engine = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {}), 1, specs=lambda: specs)
    shift = next(part.shift for part in engine.module.modules() if isinstance(part, Sliced)).detach().clone()
    cases.end(engine)
    return shift


def test_replicas_begin_with_the_same_parts_of_tensors(worlds: Worlds) -> None:
    one, other = worlds.run(2, sliced)
    assert one.unique().numel() == one.numel()
    assert torch.equal(one, other)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bf16_autocast(worlds: Worlds, micro_batches: int) -> None:
    extras: list[dict[str, Any]] = [{}, {**ZERO_1, "zero_allow_untested_optimizer": True}]
    configs = [
        cases.config(
            micro_batches,
            OPTIMIZERS["SGD"][0],
            {"partition": "uniform", "recompute_ratio": 0.5},
            torch_autocast={"enabled": True, "dtype": "bfloat16"},
            **extra,
        )
        for extra in extras
    ]
    reports = worlds.run(4, cases.train_each, configs, 4, MICRO_BATCHES // micro_batches)
    wanted = replayed(4, micro_batches, sgd, autocast=True)
    plain = replayed(4, micro_batches, sgd)
    assert difference(plain.parameters(), wanted.parameters()) > 2e-3
    # DeepSpeed's ZeRO reduces what autocast has computed in bf16 in bf16.
    reduced = replayed(4, micro_batches, sgd, autocast=True, reduces_linear_in=torch.bfloat16)
    for position, run in enumerate((wanted, reduced)):
        assert difference(cases.merged([r[position] for r in reports]), run.parameters()) <= 1e-4, extras[position]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stages", [1, 4])
def test_fp16_with_dynamic_loss_scale(worlds: Worlds, stages: int, micro_batches: int) -> None:
    """The scale starts so high that several updates overflow, on one stage and not on another."""
    extras: list[dict[str, Any]] = [ZERO_1, {}, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}]
    configs = [
        {**cases.config(micro_batches, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, **FP16), **extra}
        for extra in extras
    ]
    batches = MICRO_BATCHES // micro_batches
    loss_fn = toy.float_cross_entropy
    reports = worlds.run(stages, cases.train_each, configs, stages, batches, loss_fn=loss_fn)
    for position, extra in enumerate(extras):
        wanted = replayed(
            stages,
            micro_batches,
            sgd if "optimizer" in extra else adamw,
            dtype=torch.float16,
            scaler=reference.Scaler(2.0**20, window=4),
            criterion=loss_fn,
        )
        mine = [r[position] for r in reports]
        skipped = [sum(by_stage[stage] for by_stage in wanted.overflows) for stage in range(stages)]
        assert mine[-1]["scales"] == wanted.scales, extra
        assert len(set(wanted.scales)) > 3
        assert [report["skipped"] for report in mine] == skipped, extra
        assert (stages, micro_batches) != (4, 2) or len(set(skipped)) > 1
        assert difference(cases.merged(mine), wanted.parameters()) <= 2e-3, extra


@pytest.mark.parametrize("block", [{}, {"sync_mode": "bsp"}])
def test_without_norms_of_gradients(worlds: Worlds, block: dict[str, Any]) -> None:
    """ZeRO-1 that computes none trains the same, where nothing is clipped."""
    zero = [{"stage": 1, "compute_grad_norm": computes} for computes in (True, False)]
    configs = [
        cases.config(
            1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", **block}, bf16={"enabled": True}, gradient_clipping=0.0,
            zero_optimization=stage,
        )
        for stage in zero
    ]  # fmt: skip
    for with_norm, without in worlds.run(2, cases.train_each, configs, 2, 4):
        assert with_norm["losses"] == without["losses"]
        assert difference(with_norm["parameters"], without["parameters"]) == 0


def within_autocast(ds_configs: list[dict[str, Any]], stages: int) -> list[dict[str, torch.Tensor]]:
    """Weights after training in which the script has autocast around each batch; at last, as at first, around all."""
    found = []
    for ds_config, around_all in [*((ds_config, False) for ds_config in ds_configs), (ds_configs[0], True)]:
        engine = cases.engine(ds_config, stages)
        iterator = toy.data()
        with torch.autocast("cpu", dtype=torch.bfloat16) if around_all else contextlib.nullcontext():
            for _ in range(6):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    engine.train_batch(iterator)
        found.append(cases.parameters(engine))
        cases.end(engine)
    return found


def test_autocast_around_batches_casts_the_version_of_each_pass(worlds: Worlds) -> None:
    """What is recomputed casts the same weights as its forward pass, and no pass those of another version."""
    kinds = [(sync, micro_batches) for sync in ("stash", "vertical") for micro_batches in (1, 2)]
    blocks = [{"weight_sync": sync, "recompute_ratio": ratio} for sync, _ in kinds for ratio in (0, 1)]
    counts = [micro_batches for _, micro_batches in kinds for _ in range(2)]
    configs = [
        cases.config(micro_batches, OPTIMIZERS["SGD"][0], {"partition": "uniform", **block})
        for block, micro_batches in zip(blocks, counts, strict=True)
    ]
    ranks = worlds.run(2, within_autocast, configs, 2)
    for at, kind in enumerate(kinds):
        for rank in ranks:
            kept, recomputed = rank[2 * at : 2 * at + 2]
            assert all(torch.equal(kept[name], recomputed[name]) for name in kept), kind
    for first, *_, around_all in ranks:
        assert difference(around_all, first) == 0


class Chain(nn.Module):
    """Layers of which autocast casts the weights, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(toy.VOCABULARY, toy.HIDDEN), nn.Linear(toy.HIDDEN, toy.CLASSES)
        self.layers = nn.ModuleList([nn.Linear(toy.HIDDEN, toy.HIDDEN) for _ in range(4)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def evaluated_within_autocast(ratio: float) -> list[float]:
    """Two evaluations of one batch, each in an autocast of its own, after a few rounds of training."""
    block = {"recompute_ratio": ratio}
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 1.0}}, block, pipeline={"stages": 3})
    model = toy.seeded(7, Chain)
    engine = ds_vpipe.initialize(model=model, config=ds_config)[0]
    for number in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*toy.micro_batch(number))
        engine.backward(loss)
        engine.step()
    engine.eval()
    losses = []
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            losses.append(float(engine(*toy.micro_batch(50))))
    engine.destroy()
    return losses


@pytest.mark.parametrize("ratio", [0, 1])
def test_evaluations_within_autocast_have_the_same_weights(worlds: Worlds, ratio: float) -> None:
    for first, again in worlds.run(3, evaluated_within_autocast, ratio):
        assert first == again
