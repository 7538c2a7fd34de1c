"""Mitigations of staleness in the engine, against an independent replay in one process and across checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import test_exactness
import torch
import toy
from test_exactness import LAYERS, difference
from test_matrix import by_layer
from test_resume import resume_everywhere
from worlds import CaseFailed, Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.staleness.mitigation import PREVIOUS_CHANGE

pytestmark = pytest.mark.mp

STAGES, BATCHES = 4, 14
# Bias of attention's keys has no gradient but rounding, which Adam would blow up without so large an eps.
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}
OPTIMIZERS = {
    "AdamW": ({"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}, lambda p: torch.optim.AdamW(p, **ADAMW)),
    "FusedAdam": ({"type": "AdamW", "params": ADAMW}, lambda p: torch.optim.AdamW(p, **ADAMW)),
    "SGD": test_exactness.OPTIMIZERS["SGD"],
}
RESCHEDULING = {"lr_rescheduling": {"num_steps": 9}}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "nadam": ("AdamW", {"nadam": True}),
    "feedback": ("SGD", {"error_feedback": True}),
    "rescheduling": ("SGD", RESCHEDULING),
    "nadam, rescheduling": ("AdamW", {"nadam": True, **RESCHEDULING}),
    "nadam, feedback": ("AdamW", {"nadam": True, "error_feedback": True}),
    "synchronous updates": ("SGD", {"synchronous_updates": 5}),
    "synchronous updates, rescheduling": ("SGD", {"synchronous_updates": 5, **RESCHEDULING}),
    "delay warm-up, rescheduling": ("SGD", {"synchronous_updates": 2, "delay_warmup_updates": 6, **RESCHEDULING}),
    "delay warm-up, nadam, feedback": ("AdamW", {"delay_warmup_updates": 5, "nadam": True, "error_feedback": True}),
    "synchronous updates, nadam, feedback": (
        "AdamW",
        {"synchronous_updates": 5, "nadam": True, "error_feedback": True},
    ),
}


def depths_of(settings: dict[str, Any], micro_batches: int) -> tuple[int, ...]:
    """The default, but where no stage may be more than one update behind."""
    return tuple(min(depth, micro_batches) if "error_feedback" in settings else depth for depth in (3, 2, 1, 0))


def ds_config(optimizer: str, settings: dict[str, Any] | None, micro_batches: int, **extra: Any) -> dict[str, Any]:
    block: dict[str, Any] = {"partition": "uniform"}
    if settings is not None:
        block |= {"staleness": settings, "stage_to_depth_map": list(depths_of(settings, micro_batches))}
    return cases.config(micro_batches, OPTIMIZERS[optimizer][0], block, **extra)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_method_against_the_replay(worlds: Worlds, micro_batches: int) -> None:
    configs = [ds_config(*method, micro_batches) for method in METHODS.values()]
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES)
    counts = uniform_partition(LAYERS, STAGES)
    for position, (name, (optimizer, settings)) in enumerate(METHODS.items()):
        depths, make = depths_of(settings, micro_batches), OPTIMIZERS[optimizer][1]
        reports = [rank[position] for rank in ranks]
        wanted, losses = reference.replay(counts, depths, micro_batches, BATCHES, make, staleness=settings)
        plain, _ = reference.replay(counts, depths, micro_batches, BATCHES, make)
        off = difference(cases.merged(reports), wanted)
        assert off <= (1e-6 if optimizer == "SGD" else 1e-4), f"{name}: parameters off by {off:.1e}"
        assert difference(plain, wanted) > 1e-2, f"{name}: a run without it is as near"
        for report in reports:
            assert report["losses"] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_with_vertical_sync_every_stage_is_late(worlds: Worlds, micro_batches: int) -> None:
    settings: dict[str, Any] = RESCHEDULING
    block = {"partition": "uniform", "weight_sync": "vertical", "staleness": settings}
    config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], block)
    reports = worlds.run(STAGES, cases.train, config, STAGES, BATCHES)
    options = {"vertical": True, "staleness": settings}
    counts, sgd = uniform_partition(LAYERS, STAGES), OPTIMIZERS["SGD"][1]
    wanted, _ = reference.replay(counts, (3, 2, 1, 0), micro_batches, BATCHES, sgd, **options)
    assert difference(cases.merged(reports), wanted) <= 1e-6


def test_around_other_optimizers_and_wrappers(worlds: Worlds) -> None:
    """Master weights and partitions are treated as the weights of a plain optimizer are."""
    half = {"bf16": {"enabled": True}}
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    settings = {"nadam": True, "error_feedback": True, **RESCHEDULING}
    rows = [({}, torch.float32, 1e-4), (half, torch.bfloat16, 1e-2), ({**half, **zero}, torch.bfloat16, 1e-2)]
    configs = [ds_config("FusedAdam", settings, 1, **extra) for extra, *_ in rows]
    module = {"loss_fn": toy.float_cross_entropy}
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES, **module)
    counts = uniform_partition(LAYERS, STAGES)
    for position, (extra, dtype, tolerance) in enumerate(rows):
        options = {"dtype": dtype, "criterion": toy.float_cross_entropy, "staleness": settings}
        depths = depths_of(settings, 1)
        wanted, _ = reference.replay(counts, depths, 1, BATCHES, OPTIMIZERS["AdamW"][1], **options)
        off = difference(cases.merged([rank[position] for rank in ranks]), wanted)
        assert off <= tolerance, f"{extra}: parameters off by {off:.1e}"


def test_copies_of_tied_weights_follow_the_owner(worlds: Worlds) -> None:
    module = {"loss_fn": toy.mean_over_positions, "specs": toy.words_tied_specs}
    config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "staleness": {"error_feedback": True}})
    reports = worlds.run(2, cases.train, config, 2, BATCHES, **module)
    options: dict[str, Any] = {"layers": toy.built_tied_layers(), "ties": toy.TIES[:1]}
    options |= {"criterion": toy.mean_over_positions, "staleness": {"error_feedback": True}}
    counts, sgd = uniform_partition(LAYERS, 2), OPTIMIZERS["SGD"][1]
    wanted, _ = reference.replay(counts, (1, 0), 1, BATCHES, sgd, **options)
    assert difference(by_layer(reports), wanted) <= 1e-5


SCHEDULER = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2, "warmup_max_lr": 3e-3}}
DEFAULT: dict[str, Any] = {"partition": "uniform", "staleness": None}


def train_and_say(ds_configs: list[dict[str, Any]], stages: int) -> list[tuple[dict[str, Any], str]]:
    """:func:`cases.train` for several configurations, and what each has printed."""
    reports = []
    for ds_config in ds_configs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            reports.append((cases.train(ds_config, stages, 8), printed.getvalue()))
        cases.close_groups()
    return reports


def test_the_default_is_the_settings_that_it_names(worlds: Worlds) -> None:
    named = {"nadam": True, "synchronous_updates": 4}
    blocks: list[dict[str, Any]] = [DEFAULT, *({**DEFAULT, "staleness": its} for its in (named, "auto", "off"))]
    configs = [cases.config(1, OPTIMIZERS["AdamW"][0], block, scheduler=SCHEDULER) for block in blocks]
    ranks = worlds.run(STAGES, train_and_say, configs, STAGES)
    default, wanted, auto, off = (cases.merged([rank[position][0] for rank in ranks]) for position in range(4))
    assert difference(default, wanted) == difference(auto, wanted) == 0
    assert difference(off, wanted) > 1e-2
    lines = [[line for line in said.splitlines() if "staleness" in line] for _, said in ranks[0]]
    assert [len(found) for found in lines] == [1, 0, 1, 0]
    assert f'"auto" chooses {json.dumps(named)}' in lines[0][0]
    assert all("staleness" not in said for rank in ranks[1:] for _, said in rank)


@pytest.mark.parametrize(("stages", "micro_batches", "optimizer"), [(3, 2, "AdamW"), (3, 1, "SGD"), (1, 1, "AdamW")])
def test_the_default_leaves_alone(worlds: Worlds, stages: int, micro_batches: int, optimizer: str) -> None:
    """Gradients that are at most one update late, and an optimizer of which nothing is known."""
    blocks: list[dict[str, Any]] = [DEFAULT, {**DEFAULT, "staleness": "off"}]
    configs = [cases.config(micro_batches, OPTIMIZERS[optimizer][0], block, scheduler=SCHEDULER) for block in blocks]
    ranks = worlds.run(stages, cases.train_each, configs, stages, 6)
    default, off = (cases.merged([rank[position] for rank in ranks]) for position in range(2))
    assert difference(default, off) == 0


def test_the_default_resumed_bit_for_bit(worlds: Worlds, tmp_path: Path) -> None:
    """Within the synchronous updates and after them."""
    config = cases.config(1, OPTIMIZERS["AdamW"][0], DEFAULT, scheduler=SCHEDULER)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path), config, 3, (2, 6)):
        assert wrong == []


@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_changes_where_nothing_is_late(worlds: Worlds, stages: int) -> None:
    """With one stage, and with a scale of 0, bit for bit."""
    blocks: list[dict[str, Any]] = [{}, {"staleness": {"error_feedback": {"scale": 0.0}}}]
    if stages == 1:
        blocks.append({"staleness": {"nadam": True, **RESCHEDULING}})
    configs = [cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", **block}) for block in blocks]
    ranks = worlds.run(stages, cases.train_each, configs, stages, 8)
    plain, *others = (cases.merged([rank[position] for rank in ranks]) for position in range(len(configs)))
    for other in others:
        assert difference(other, plain) == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_resumed_bit_for_bit(worlds: Worlds, tmp_path: Path, micro_batches: int) -> None:
    settings: dict[str, Any] = {"partition": "uniform", "staleness": {"nadam": True, **RESCHEDULING}}
    config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], settings)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path / "p"), config, 3, (1, 6)):
        assert wrong == []
    settings = {"partition": "uniform", "staleness": {"error_feedback": True}, "stage_to_depth_map": [1, 1, 0]}
    half = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    for number, extra in enumerate(({}, half)):
        config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], settings, **extra)
        for wrong in worlds.run(3, resume_everywhere, str(tmp_path / str(number)), config, 3, (1, 6)):
            assert wrong == []


def train_on(directory: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two batches, a save, and two more with the other configuration."""
    for config in (first, second):
        engine = cases.engine(config, 3)
        if config is second:
            engine.load_checkpoint(directory)
        iterator = toy.data(start=engine.consumed_micro_batches)
        for _ in range(2):
            engine.train_batch(iterator)
        if config is first:
            engine.save_checkpoint(directory)
        parameters = cases.parameters(engine)
        cases.end(engine)
    return parameters


def test_checkpoints_without_its_state_and_for_engines_without_it(worlds: Worlds, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"partition": "uniform", "stage_to_depth_map": [1, 1, 0]}
    with_it = {**plain, "staleness": {"error_feedback": True, "nadam": True}}
    for number, (first, second) in enumerate([(plain, with_it), (with_it, plain)]):
        configs = [cases.config(1, OPTIMIZERS["FusedAdam"][0], block) for block in (first, second)]
        for parameters in worlds.run(3, train_on, str(tmp_path / str(number)), *configs):
            assert all(bool(torch.isfinite(value).all()) for value in parameters.values())


def extrapolated(directory: str, stages: int, save: bool) -> dict[str, torch.Tensor]:
    """Train and save, or load; what error feedback has of this stage's parameters."""
    block = {"partition": "uniform", "staleness": {"error_feedback": True, "nadam": True}}
    block["stage_to_depth_map"] = [1] * (stages - 1) + [0]
    engine = cases.engine(cases.config(1, OPTIMIZERS["AdamW"][0], block), stages)
    if save:
        iterator = toy.data()
        for _ in range(3):
            engine.train_batch(iterator)
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    states = {name: engine.optimizer.state.get(p, {}) for name, p in engine.module.named_parameters()}
    found = {name: state[PREVIOUS_CHANGE].clone() for name, state in states.items() if PREVIOUS_CHANGE in state}
    if not save:
        engine.train_batch(toy.data(start=engine.consumed_micro_batches))
    engine.destroy()
    return found


def test_its_state_follows_the_layers_to_other_stages(worlds: Worlds, tmp_path: Path) -> None:
    saved: dict[str, torch.Tensor] = {}
    for found in worlds.run(3, extrapolated, str(tmp_path), 3, True):
        saved |= found
    loaded: dict[str, torch.Tensor] = {}
    for found in worlds.run(2, extrapolated, str(tmp_path), 2, False):
        loaded |= found
    assert saved
    assert difference(loaded, saved) == 0


def moved_to_and_fro(ds_configs: list[dict[str, Any]]) -> list[tuple[dict[str, torch.Tensor], set[str]]]:
    """Parameters after layers have come from the last stage, and gone there and come back; what the last remembers."""
    found = []
    for ds_config in ds_configs:
        engine = cases.engine(ds_config, 2)
        iterator, remembered = toy.data(), set[str]()
        for counts in ([3, 7], [7, 3], [3, 7], [5, 5]):
            engine.repartition(counts)
            for _ in range(4):
                engine.train_batch(iterator)
            if engine.is_last_stage():
                states = engine.basic_optimizer.state.values()
                remembered |= {key for state in states for key in state if key == PREVIOUS_CHANGE}
        found.append((cases.parameters(engine), remembered))
        cases.end(engine)
    return found


def test_layers_that_have_moved_remember_no_update_of_long_ago(worlds: Worlds) -> None:
    """With flat vectors as without: a layer from a stage that is not late has no update that it could extrapolate."""
    block = {"partition": [3, 7], "staleness": {"error_feedback": True}}
    plain = cases.config(1, OPTIMIZERS["SGD"][0], block)
    flat = {**plain, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    for (one, nothing), (other, nothing_either) in worlds.run(2, moved_to_and_fro, [plain, flat]):
        assert nothing == nothing_either == set()
        assert difference(one, other) < 1e-6


REFUSED = [
    ({"error_feedback": True}, "AdamW", "vpipe.staleness.error_feedback: got true; stage 0 is 2 updates behind"),
    ({"nadam": True}, "SGD", "vpipe.staleness.nadam: got an optimizer of type SGD"),
]


@pytest.mark.parametrize(("settings", "optimizer", "line"), REFUSED)
def test_refused_on_every_rank(worlds: Worlds, settings: dict[str, Any], optimizer: str, line: str) -> None:
    config = cases.config(1, OPTIMIZERS[optimizer][0], {"partition": "uniform", "staleness": settings})
    with pytest.raises(CaseFailed) as failed:
        worlds.run(3, cases.train, config, 3, 1)
    assert len(failed.value.errors) == 3
    for error in failed.value.errors.values():
        assert line in error
        assert "\n" not in error


def other_batch_size(config: dict[str, Any]) -> list[Any]:
    """Delays before and after M grows, and what becomes of a change that is refused."""
    engine = cases.engine(config, 3)
    iterator, found = toy.data(), []
    for size in (2, 4, 1):
        try:
            engine.set_train_batch_size(size * toy.MICRO_BATCH)
        except ValueError as error:
            found.append(str(error).split(":")[0])
        for _ in range(2):
            engine.train_batch(iterator)
        found.append(0 if engine.stage.mitigation is None else engine.stage.mitigation.delay)
    engine.destroy()
    return found


def test_batch_size_changes_the_delay(worlds: Worlds) -> None:
    feedback = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", "staleness": {"error_feedback": True}})
    refused = ["vpipe.staleness.error_feedback"]
    for stage, found in enumerate(worlds.run(3, other_batch_size, feedback)):
        assert found == [*[min(1, 2 - stage)] * 2, *refused, min(1, 2 - stage)]
    block = {"partition": "uniform", "staleness": RESCHEDULING}
    for stage, found in enumerate(worlds.run(3, other_batch_size, cases.config(2, OPTIMIZERS["SGD"][0], block))):
        assert found == [min(1, 2 - stage), min(1, 2 - stage), 2 - stage]


def goes_on(block: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """Train with a mitigation, and then with ``block``: the same module and optimizer, or new ones like them."""
    import deepspeed

    import ds_vpipe

    def engine_of(module: Any, optimizer: Any, vpipe: dict[str, Any]) -> Any:
        ds_config = {k: v for k, v in cases.config(1, {}, vpipe).items() if k != "optimizer"}
        return ds_vpipe.initialize(model=module, config=ds_config, optimizer=optimizer)[0]

    def made() -> tuple[Any, torch.optim.Optimizer]:
        module = deepspeed.pipe.PipelineModule(
            toy.layer_specs(), num_stages=2, loss_fn=torch.nn.CrossEntropyLoss(), partition_method="uniform"
        )
        return module, torch.optim.AdamW(module.parameters(), **ADAMW)

    module, optimizer = made()
    engine = engine_of(module, optimizer, {"staleness": {"nadam": True, "error_feedback": True}})
    data = toy.data()
    for _ in range(4):
        engine.train_batch(data)
    engine.quiesce()
    engine.destroy()
    if fresh:
        weights, states = [p.detach().clone() for p in module.parameters()], optimizer.state_dict()
        module, optimizer = made()
        optimizer.load_state_dict(states)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), weights, strict=True):
                parameter.copy_(value)
    engine = engine_of(module, optimizer, block)
    data = toy.data(start=50)
    for _ in range(6):
        engine.train_batch(data)
    engine.quiesce()
    found = cases.parameters(engine)
    cases.end(engine)
    return {"parameters": found}


@pytest.mark.parametrize("block", [{"sync_mode": "bsp"}, {}, {"staleness": {"error_feedback": True}}])
def test_a_mitigation_ends_with_its_engine(worlds: Worlds, block: dict[str, Any]) -> None:
    again, anew = (cases.merged(worlds.run(2, goes_on, block, fresh)) for fresh in (False, True))
    assert difference(again, anew) == 0
