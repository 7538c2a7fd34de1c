"""Resuming with other stages, another split, other recompute ratios and other replicas: states follow their layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.engine.checkpoint.reshape import _take_samplers, take_counters
from ds_vpipe.errors import VPipeError

pytestmark = pytest.mark.mp

ADAMW = OPTIMIZERS["AdamW"][0]
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 20}}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
BATCHES = 5  # before a save; two micro-batches each


class FrozenEmbed(toy.Embed):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.requires_grad_(False)


def with_frozen_words() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(FrozenEmbed, 100), *toy.layer_specs()[1:]]


class Hole(nn.Module):
    """A parameter without elements, as the weight of an expert or an adapter that a script leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def with_a_hole() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [*toy.layer_specs(), LayerSpec(Hole)]


def build(ds_config: dict[str, Any], stages: int, grouped: bool, specs: Any = None) -> Any:
    if not grouped:
        return cases.engine(ds_config, stages, specs=specs)
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(
        toy.layer_specs(), num_stages=stages, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
    )
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return ds_vpipe.initialize(model=net, model_parameters=groups, config=ds_config)[0]


def sessions(*plans: dict[str, Any]) -> list[dict[str, Any]]:
    """For each plan an engine that may load, train and save; what it holds after loading and in the end."""
    reports = []
    for plan in plans:
        torch.manual_seed(1234)
        engine = build(plan["config"], plan["stages"], plan.get("grouped", False), plan.get("specs"))
        client = engine.load_checkpoint(plan["load"], **plan.get("how", {}))[1] if "load" in plan else {}
        report = {"loaded": observe(engine), "client": client.get("note")}
        iterator = toy.data(start=engine.global_steps * 2, replica=engine.grid.data_parallel_id)
        for _ in range(plan["batches"]):
            engine.train_batch(iterator)
        if "save" in plan:
            engine.save_checkpoint(plan["save"], client_state={"note": "from the client"})
        reports.append({**report, "trained": observe(engine), "weights": cases.parameters(engine)})
        cases.end(engine)
    return reports


def gathered(engine: Any, value: Any) -> list[Any]:
    group = engine.optimizer.dp_process_group
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def observe(engine: Any) -> dict[str, Any]:
    from ds_vpipe.engine.checkpoint.parameter_states import read_states

    live = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    result: dict[str, Any] = {}
    found = read_states(engine, partial(gathered, engine))
    for name in found.keys() & live.keys():  # others are placeholders
        state = found[name]
        result[f"{name}|weight"] = (live[name] if state.master is None else state.master).clone()
        result[f"{name}|rounded"] = live[name]
        for key, value in state.state.items():
            result[f"{name}|{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        result[f"{name}|decay"] = state.options["weight_decay"]
        result[f"{name}|lr"] = state.options["lr"]
    result["steps"] = engine.global_steps, engine.global_samples, engine.skipped_steps
    return result


def union(ranks: list[list[dict[str, Any]]], index: int, key: str) -> dict[str, Any]:
    """What all ranks say of plan ``index``."""
    return {name: value for reports in ranks for name, value in reports[index][key].items()}


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            other[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def exact(report: dict[str, Any]) -> dict[str, Any]:
    """Without the weights that the layers compute with, which may be rounded."""
    return {name: value for name, value in report.items() if not name.endswith("|rounded")}


def plan(vpipe: dict[str, Any], stages: int, batches: int, extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"config": cases.config(2, ADAMW, vpipe, **extra), "stages": stages, "batches": batches, **more}


ASP: dict[str, Any] = {}
BSP = {"sync_mode": "bsp"}


def test_other_stages_splits_and_ratios_in_fp32(worlds: Worlds, tmp_path: Path) -> None:
    two, four = str(tmp_path / "two"), str(tmp_path / "four")
    ranks = worlds.run(
        2,
        sessions,
        plan(ASP | {"partition": [3, 7]}, 2, BATCHES, WARMUP, save=two),
        plan(BSP | {"partition": [3, 7]}, 2, 2, WARMUP, load=two),
        plan(BSP | {"partition": [6, 4], "recompute_ratio": [0.5, 1]}, 2, 2, WARMUP, load=two),
        plan(BSP | {"partition": [3, 7], "recompute_ratio": 1}, 2, 2, WARMUP, load=two),
        plan(BSP | {"partition": [6, 4]}, 2, 0, WARMUP | BF16, load=two),
    )
    saved, expected = union(ranks, 0, "trained"), union(ranks, 1, "trained")
    assert saved["steps"] == (BATCHES, BATCHES * 4, 0)
    assert len(saved) == 1 + 7 * len(cases.merged([]) | union(ranks, 0, "weights"))
    for index in (1, 2, 3):
        same(saved, union(ranks, index, "loaded"))
        same(expected, union(ranks, index, "trained"))
        assert ranks[0][index]["client"] == "from the client"
    same(exact(saved), exact(union(ranks, 4, "loaded")))
    ranks = worlds.run(
        4,
        sessions,
        plan(BSP, 4, 2, WARMUP, load=two),
        plan(ASP, 4, 3, WARMUP, load=two, save=four),
    )
    same(saved, union(ranks, 0, "loaded"))
    same(expected, union(ranks, 0, "trained"))
    saved = union(ranks, 1, "trained")
    ranks = worlds.run(2, sessions, plan(ASP | {"partition": [8, 2]}, 2, 2, WARMUP, load=four))
    same(saved, union(ranks, 0, "loaded"))
    assert union(ranks, 0, "trained")["steps"][0] == BATCHES + 5


def test_what_is_frozen_alone_on_a_stage_joins_others(worlds: Worlds, tmp_path: Path) -> None:
    """A stage that has nothing to train saves no states."""
    folder, block = str(tmp_path / "three"), ASP | {"partition": [1, 4, 5]}
    three = worlds.run(3, sessions, plan(block, 3, BATCHES, WARMUP, specs=with_frozen_words, save=folder))
    others = worlds.run(
        2,
        sessions,
        plan(ASP | {"partition": [3, 7]}, 2, 1, WARMUP, specs=with_frozen_words, load=folder),
        plan(ASP | {"partition": [1, 9]}, 2, 1, WARMUP, specs=with_frozen_words, load=folder),
        plan(ASP | {"partition": [3, 7]}, 2, 1, WARMUP | BF16, specs=with_frozen_words, load=folder),
    )
    saved = {name: value for name, value in exact(union(three, 0, "trained")).items() if name[0].isdigit()}
    for index in range(3):
        loaded = exact(union(others, index, "loaded"))
        same(saved, {name: loaded[name] for name in saved})


def test_a_stage_whose_parameters_have_no_elements(worlds: Worlds, tmp_path: Path) -> None:
    """DeepSpeed's wrappers leave such parameters out, and a plain optimizer has states of them."""
    ranks = worlds.run(
        2,
        sessions,
        plan(ASP | {"partition": [10, 1]}, 2, BATCHES, WARMUP | BF16, specs=with_a_hole, save=str(tmp_path)),
        plan(ASP | {"partition": [6, 5]}, 2, 1, WARMUP, specs=with_a_hole, load=str(tmp_path)),
    )
    saved = {name: value for name, value in exact(union(ranks, 0, "trained")).items() if name[0].isdigit()}
    loaded = exact(union(ranks, 1, "loaded"))
    assert saved
    same(saved, {name: loaded[name] for name in saved})


def test_parameter_groups_of_the_client(worlds: Worlds, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks = worlds.run(
        2,
        sessions,
        plan(ASP, 2, BATCHES, {}, save=folder, grouped=True),
        plan(BSP, 2, 2, {}, load=folder, grouped=True),
    )
    saved, expected = union(ranks, 0, "trained"), union(ranks, 1, "trained")
    assert {saved[name] for name in saved if name.endswith("|decay")} == {0.0, 0.3}
    ranks = worlds.run(4, sessions, plan(BSP, 4, 2, {}, load=folder, grouped=True))
    same(saved, union(ranks, 0, "loaded"))
    same(expected, union(ranks, 0, "trained"))
    with pytest.raises(CaseFailed) as failure:
        worlds.run(4, sessions, plan(BSP, 4, 0, {}, load=folder))
    assert "parameter group 0: got weight_decay" in failure.value.errors[0]
    next(tmp_path.glob("*/layer_09-model_states.pt")).unlink()
    with pytest.raises(CaseFailed) as failure:
        worlds.run(4, sessions, plan(BSP, 4, 0, {}, load=folder, grouped=True))
    text = "got no file layer_09-model_states.pt, allowed are all; files are lost"
    assert text in failure.value.errors[3]


def test_other_replicas_in_bf16_with_zero(worlds: Worlds, tmp_path: Path) -> None:
    wide, narrow = str(tmp_path / "wide"), str(tmp_path / "narrow")
    ranks = worlds.run(
        4,
        sessions,
        plan(ASP | {"partition": [3, 7]}, 2, BATCHES, BF16, save=wide),
        plan(ASP | {"partition": [6, 4]}, 2, 2, BF16, load=wide),
    )
    saved = union(ranks, 0, "trained")
    same(saved, union(ranks, 1, "loaded"))
    same(union(ranks[:2], 1, "trained"), union([ranks[1], ranks[0]], 1, "trained"))
    ranks = worlds.run(
        2,
        sessions,
        plan(ASP | {"partition": [3, 7]}, 2, BATCHES, BF16, load=wide, save=narrow),
        plan(BSP | {"partition": [3, 7]}, 2, 2, BF16, load=narrow),
        plan(BSP | {"partition": [7, 3]}, 2, 2, BF16, load=narrow),
        plan(BSP | {"partition": [7, 3]}, 2, 0, {}, load=narrow),
        plan(BSP | {"partition": [7, 3]}, 2, 0, BF16, load=narrow, how={"load_module_only": True}),
    )
    same(saved, union(ranks, 0, "loaded"))
    saved, expected = union(ranks, 0, "trained"), union(ranks, 1, "trained")
    same(saved, union(ranks, 2, "loaded"))
    same(expected, union(ranks, 2, "trained"), 1e-6)
    same(exact(saved), exact(union(ranks, 3, "loaded")))
    weights_only = union(ranks, 4, "loaded")
    assert weights_only["steps"] == (0, 0, 0)
    for name in (name for name in saved if name.endswith("|rounded")):
        master = name.replace("|rounded", "|weight")
        assert torch.equal(weights_only[master], saved[name])  # not what the engine was built with
        assert not torch.equal(weights_only[master], saved[master])
    ranks = worlds.run(
        4,
        sessions,
        plan(BSP | {"partition": [2, 8]}, 2, 0, BF16, load=narrow),
        plan(BSP, 4, 2, BF16, load=narrow),
    )
    same(saved, union(ranks, 0, "loaded"))
    same(saved, union(ranks, 1, "loaded"))
    same(expected, union(ranks, 1, "trained"), 1e-6)


def test_checkpoints_of_the_stock_engine(worlds: Worlds, tmp_path: Path) -> None:
    plans = []
    for name, extra in (("fp32", {}), ("bf16", BF16)):
        folder = str(tmp_path / name)
        stock = plan({}, 2, 3, extra, save=folder)
        stock["config"].pop("vpipe")
        split = {"partition": [3, 7]}
        plans += [stock, plan(BSP, 2, 2, extra, load=folder), plan(BSP | split, 2, 2, extra, load=folder)]
    ranks = worlds.run(2, sessions, *plans)
    for first, tolerance in ((0, 0.0), (3, 1e-6)):
        same(union(ranks, first, "trained"), union(ranks, first + 2, "loaded"))
        same(union(ranks, first + 1, "trained"), union(ranks, first + 2, "trained"), tolerance)
    with_replicas = worlds.run(4, sessions, plan(BSP, 2, 0, BF16, load=folder))
    same(union(ranks, 3, "trained"), union(with_replicas, 0, "loaded"))


def more_layers(folder: str) -> str:
    """Line of loading a checkpoint of the stock engine into fewer layers than it has."""
    engine = cases.engine(cases.config(2, ADAMW, None), 2)
    engine.train_batch(toy.data())
    engine.save_checkpoint(folder)
    cases.end(engine)
    engine = cases.engine(cases.config(2, ADAMW, {}), 2, specs=lambda: toy.layer_specs()[:7], loss_fn=torch.dist)
    with pytest.raises(VPipeError) as error:
        engine.load_checkpoint(folder)
    return str(error.value)


def test_a_larger_model_of_the_stock_engine_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    for line in worlds.run(2, more_layers, str(tmp_path)):
        assert "got weights of layers [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], allowed are those of this model's 7" in line


def test_partitions_that_are_saved_with_their_padding(worlds: Worlds, tmp_path: Path) -> None:
    """bf16 and ZeRO-1 with gradients in fp32, which DeepSpeed gives an optimizer wrapper of its own."""
    padded, plain = str(tmp_path / "padded"), str(tmp_path / "plain")
    fp32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    ranks = worlds.run(
        4,
        sessions,
        plan(BSP | {"partition": [3, 7]}, 2, BATCHES, fp32, save=padded),
        plan(BSP | {"partition": [6, 4]}, 2, 2, fp32, load=padded),
        plan(BSP | {"partition": [6, 4]}, 2, 1, BF16, load=padded, save=plain),
        plan(BSP | {"partition": [3, 7]}, 2, 0, fp32, load=plain),
    )
    for saved, loaded in ((0, 1), (0, 2), (2, 3)):
        same(exact(union(ranks, saved, "trained")), exact(union(ranks, loaded, "loaded")))


def fp16_with_and_without_zero(folder: str) -> list[tuple[float, int]]:
    """Loss scales and skipped updates of a run, and after loading its checkpoint with the other wrapper, both ways."""
    zero = {"zero_optimization": {"stage": 1}}
    found = []
    for number, (first, second) in enumerate((({}, zero), (zero, {}))):
        for load in (False, True):
            fp16 = {"fp16": {"enabled": True, "initial_scale_power": 5 if load else 24, "hysteresis": 1}}
            extra = fp16 | (second if load else first)
            engine = cases.engine(cases.config(2, ADAMW, ASP, **extra), 2, loss_fn=toy.float_cross_entropy)
            if load:
                engine.load_checkpoint(folder, tag=number)
            else:
                iterator = toy.data()
                for _ in range(12):
                    engine.train_batch(iterator)
                engine.save_checkpoint(folder, tag=number)
            found.append((engine.optimizer.loss_scale, engine.skipped_steps))
            cases.end(engine)
    return found


def test_the_loss_scale_goes_on_with_and_without_zero(worlds: Worlds, tmp_path: Path) -> None:
    for into_zero, in_zero, from_zero, plain in worlds.run(2, fp16_with_and_without_zero, str(tmp_path)):
        assert into_zero == in_zero
        assert from_zero == plain
        assert all(scale < 2**24 and skipped > 0 for scale, skipped in (in_zero, plain))


def fp16_states(folder: str, stages: int, load: bool) -> list[dict[str, Any]]:
    """States of the stock engine in fp16, which the CPU's accelerator has to be talked into, in both wrappers."""
    from deepspeed.accelerator import get_accelerator

    from ds_vpipe.engine.checkpoint.reshape import checked, load_reshaped

    reports = []
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        for name in ("AdamW", "FusedAdam"):
            fp16 = {"fp16": {"enabled": True, "initial_scale_power": 3}}
            engine = cases.engine(cases.config(2, OPTIMIZERS[name][0], None, **fp16), stages)
            iterator = toy.data()
            for _ in range(0 if load else 3):
                engine.train_batch(iterator)
            if load:
                options = {
                    f"load_{what}": True for what in ("module_strict", "optimizer_states", "lr_scheduler_states")
                }
                options["load_module_only"] = False
                checkpoint = checked(engine, folder, name, **options)
                checkpoint.stages[0]["random_ltd"] = "tokens"
                taken = SimpleNamespace(load_state_dict=mock.Mock())
                engine.random_ltd_enabled, engine.random_ltd_scheduler = lambda: True, taken
                load_reshaped(engine, checkpoint, **options)
                taken.load_state_dict.assert_called_once_with("tokens")
                engine.random_ltd_enabled = lambda: False
            else:
                engine.optimizer.loss_scale = 32.0
                engine.save_checkpoint(folder, tag=name)
            reports.append(
                {
                    "states": observe(engine),
                    "wrapper": type(engine.optimizer).__name__,
                    "scale": engine.optimizer.loss_scale,
                }
            )
            cases.end(engine)
    finally:
        del accelerator.is_fp16_supported
    return reports


def test_fp16_wrappers(worlds: Worlds, tmp_path: Path) -> None:
    before = worlds.run(2, fp16_states, str(tmp_path), 2, False)
    after = worlds.run(1, fp16_states, str(tmp_path), 1, True)
    assert [report["wrapper"] for report in after[0]] == ["FP16_UnfusedOptimizer", "FP16_Optimizer"]
    for index in range(2):
        same(union(before, index, "states"), union(after, index, "states"))
        assert after[0][index]["scale"] == 32.0


def test_a_schedule_of_other_groups_is_refused() -> None:
    """As of a script that has made other groups since: its rates would go to the wrong ones, or to none."""
    loaded: list[Any] = []
    engine: Any = SimpleNamespace(
        basic_optimizer=SimpleNamespace(param_groups=[{}, {}]),
        lr_scheduler=SimpleNamespace(load_state_dict=loaded.append),
        train_batch_size=lambda: 1,
    )
    content = {"lr_scheduler": {"base_lrs": [0.1]}, "global_steps": 3, "skipped_steps": 0}
    with pytest.raises(VPipeError, match="got the rates of 1 parameter groups, allowed are those of the 2 that"):
        take_counters(engine, content, with_lr_scheduler=True)
    take_counters(engine, content, with_lr_scheduler=False)
    for rates in ({"base_lrs": [0.1, 0.2]}, {"last_batch_iteration": 3}):
        take_counters(engine, {**content, "lr_scheduler": rates}, with_lr_scheduler=True)
    assert loaded == [{"base_lrs": [0.1, 0.2]}, {"last_batch_iteration": 3}]


def test_what_chooses_samples_goes_on() -> None:
    """On every stage with data, also one that had none when the checkpoint was written."""
    loaded: list[Any] = []
    takes = SimpleNamespace(load_state_dict=loaded.append)
    engine: Any = SimpleNamespace(
        random_ltd_enabled=lambda: True,
        random_ltd_scheduler=takes,
        curriculum_learning_enabled=lambda: True,
        training_dataloader=None,
    )
    _take_samplers(engine, {"random_ltd": "tokens", "data_sampler": "samples"})
    engine.training_dataloader = SimpleNamespace(data_sampler=takes)
    _take_samplers(engine, {"random_ltd": None, "data_sampler": "samples"})
    _take_samplers(engine, {})
    assert loaded == ["tokens", "samples"]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
ZERO = {"zero_optimization": {"stage": 1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, ZeRO-1": ZERO,
    "bf16": {"bf16": {"enabled": True}},
    "bf16, ZeRO-1": BF16,
    "fp16": FP16,
    "fp16, ZeRO-1": {**FP16, **ZERO},
}


class WeightedLoss(nn.Module):
    """A loss with a parameter, which is in no layer's file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(toy.CLASSES))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return toy.float_cross_entropy(outputs * self.weight, labels)


def another_precision(folder: str, saved: str) -> dict[str, tuple[float, float]]:
    """Per precision the largest differences of weights to the saved master weights: theirs, and rounded once."""
    from ds_vpipe.engine.checkpoint.parameter_states import read_states

    found: dict[str, tuple[float, float]] = {}
    masters: dict[str, torch.Tensor] = {}
    for precision in (saved, *(PRECISIONS.keys() - {saved})):
        ds_config = cases.config(2, ADAMW, ASP, **PRECISIONS[precision])
        engine = cases.engine(ds_config, 2, loss_fn=WeightedLoss())
        if precision == saved:
            iterator = toy.data()
            for _ in range(4):
                engine.train_batch(iterator)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        states = read_states(engine, partial(gathered, engine))
        weights = dict(engine.module.named_parameters())
        if precision == saved:
            named = ((name, weights[name] if state.master is None else state.master) for name, state in states.items())
            own = ((name, value) for name, value in named if engine.is_last_stage() or name[0].isdigit())
            masters = {name: value.detach().clone() for name, value in own}
            assert not engine.is_last_stage() or (masters["loss_fn.weight"] != 1).all()
        off = [
            (
                float((weights[name].float() - value.to(weights[name].dtype).float()).abs().max()),
                float((state.master - value).abs().max()) if (state := states[name]).master is not None else 0.0,
            )
            for name, value in masters.items()
        ]
        found[precision] = max(one for one, _ in off), max(other for _, other in off)
        cases.end(engine)
    return found


@pytest.mark.parametrize("saved", ["fp32", "bf16", "bf16, ZeRO-1", "fp16", "fp16, ZeRO-1"])
def test_another_precision_begins_with_the_master_weights(worlds: Worlds, tmp_path: Path, saved: str) -> None:
    """Not with what the checkpoint's precision had made of them."""
    for found in worlds.run(2, another_precision, str(tmp_path), saved):
        assert found == dict.fromkeys(PRECISIONS, (0.0, 0.0))


CYCLE = {"scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1e-3, "total_steps": 9}}}
"""A schedule that keeps its limits in the optimizer's groups."""


def schedules_begin(folder: str) -> dict[str, list[float]]:
    """Rates after the start and after each of two updates, with a schedule that begins and where one is loaded."""
    found: dict[str, list[float]] = {}
    for name, vpipe, extra in (
        ("saved", ASP, {}), ("anew", ASP, CYCLE), ("loaded", ASP, CYCLE), ("moved", {"partition": [7, 3]}, CYCLE),
        ("weights", {"partition": [7, 3]}, CYCLE),
    ):  # fmt: skip
        engine = cases.engine(cases.config(2, ADAMW, vpipe, **extra), 2)
        if name not in ("saved", "anew"):
            path, _ = engine.load_checkpoint(folder, load_optimizer_states=name != "weights")
            assert Path(path).is_file()
            assert Path(path).parent == Path(folder, "global_step2")
        iterator, rates = toy.data(start=engine.consumed_micro_batches), [*engine.get_lr()]
        for _ in range(2):
            engine.train_batch(iterator)
            rates += engine.get_lr()
        if name == "saved":
            engine.skipped_steps = 10 + engine.stage_id  # stages skip updates by themselves
            engine.global_samples += 3  # of batches of another size
            engine.save_checkpoint(folder)
        found[name] = rates
        found["skipped"] = [*found.get("skipped", []), engine.skipped_steps - 10 - engine.stage_id]
        found["samples"] = [*found.get("samples", []), engine.global_samples]
        cases.end(engine)
    return found


def test_a_schedule_that_the_checkpoint_does_not_have_begins_anew(worlds: Worlds, tmp_path: Path) -> None:
    for found in worlds.run(2, schedules_begin, str(tmp_path)):
        assert found["loaded"] == found["moved"] == found["weights"] == found["anew"]
        assert found["anew"][0] < found["saved"][-1]
        saved, _, *loaded = found["skipped"]
        assert loaded == [saved] * 3
        saved, anew, *loaded = found["samples"]
        assert loaded == [saved + anew] * 3


def without_optimizer(folder: str, extra: dict[str, Any]) -> tuple[list[float], str]:
    """Losses of an evaluation by the engine that has trained, and by one that has no optimizer; and its save."""
    losses, said = [], ""
    for trains in (True, False):
        ds_config = cases.config(2, ADAMW, ASP, **extra)
        if not trains:
            del ds_config["optimizer"]
        engine = cases.engine(ds_config, 2, loss_fn=toy.float_cross_entropy)
        if trains:
            engine.train_batch(toy.data())
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        losses.append(float(engine.eval_batch(toy.data(50, 40))))
        if not trains:
            with pytest.raises(VPipeError) as error:
                engine.save_checkpoint(f"{folder}/again")
            said = str(error.value)
        cases.end(engine)
    return losses, said


def test_an_engine_without_an_optimizer_loads_what_one_with_it_has_saved(worlds: Worlds, tmp_path: Path) -> None:
    for (trained, loaded), said in worlds.run(2, without_optimizer, str(tmp_path), {"bf16": {"enabled": True}}):
        assert trained == loaded
        assert 'save_checkpoint(): got "an engine without an optimizer"; allowed: one with' in said
