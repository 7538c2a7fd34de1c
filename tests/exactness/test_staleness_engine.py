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

pytestmark = pytest.mark.mp

STAGES, BATCHES = 4, 14
# Bias of attention's keys has no gradient but rounding, which Adam would blow up without so large an eps.
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}
OPTIMIZERS = {
    "AdamW": ({"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}, lambda p: torch.optim.AdamW(p, **ADAMW)),
    "FusedAdam": ({"type": "AdamW", "params": ADAMW}, lambda p: torch.optim.AdamW(p, **ADAMW)),
    "SGD": test_exactness.OPTIMIZERS["SGD"],
}
NADAM: dict[str, Any] = {"nadam": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "nadam": ("AdamW", NADAM),
    "synchronous updates": ("SGD", {"synchronous_updates": 5}),
    "synchronous updates, nadam": ("AdamW", {"synchronous_updates": 5, **NADAM}),
    "delay warm-up": ("SGD", {"synchronous_updates": 2, "delay_warmup_updates": 6}),
    "delay warm-up, nadam": ("AdamW", {"delay_warmup_updates": 5, **NADAM}),
}
DEPTHS = (3, 2, 1, 0)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_method_against_the_replay(worlds: Worlds, micro_batches: int) -> None:
    configs = [
        cases.config(micro_batches, OPTIMIZERS[optimizer][0], {"partition": "uniform", "staleness": settings})
        for optimizer, settings in METHODS.values()
    ]
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES)
    counts = uniform_partition(LAYERS, STAGES)
    for position, (name, (optimizer, settings)) in enumerate(METHODS.items()):
        make = OPTIMIZERS[optimizer][1]
        reports = [rank[position] for rank in ranks]
        wanted, losses = reference.replay(counts, DEPTHS, micro_batches, BATCHES, make, staleness=settings)
        plain, _ = reference.replay(counts, DEPTHS, micro_batches, BATCHES, make)
        off = difference(cases.merged(reports), wanted)
        assert off <= (1e-6 if optimizer == "SGD" else 1e-4), f"{name}: parameters off by {off:.1e}"
        assert difference(plain, wanted) > 1e-2, f"{name}: a run without it is as near"
        for report in reports:
            assert report["losses"] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_with_vertical_sync_every_stage_is_late(worlds: Worlds, micro_batches: int) -> None:
    settings = {"synchronous_updates": 2, "delay_warmup_updates": 6}
    block = {"partition": "uniform", "weight_sync": "vertical", "staleness": settings}
    config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], block)
    reports = worlds.run(STAGES, cases.train, config, STAGES, BATCHES)
    options: dict[str, Any] = {"vertical": True, "staleness": settings}
    counts, sgd = uniform_partition(LAYERS, STAGES), OPTIMIZERS["SGD"][1]
    wanted, _ = reference.replay(counts, DEPTHS, micro_batches, BATCHES, sgd, **options)
    assert difference(cases.merged(reports), wanted) <= 1e-6


def test_around_other_optimizers_and_wrappers(worlds: Worlds) -> None:
    """Master weights and partitions are treated as the weights of a plain optimizer are."""
    half = {"bf16": {"enabled": True}}
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    rows = [({}, torch.float32, 1e-4), (half, torch.bfloat16, 1e-2), ({**half, **zero}, torch.bfloat16, 1e-2)]
    depths = (1, 1, 1, 0)  # with later gradients rounding to bf16 grows
    block = {"partition": "uniform", "staleness": NADAM, "stage_to_depth_map": list(depths)}
    configs = [cases.config(1, OPTIMIZERS["FusedAdam"][0], block, **extra) for extra, *_ in rows]
    module = {"loss_fn": toy.float_cross_entropy}
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES, **module)
    counts = uniform_partition(LAYERS, STAGES)
    for position, (extra, dtype, tolerance) in enumerate(rows):
        options = {"dtype": dtype, "criterion": toy.float_cross_entropy, "staleness": NADAM}
        wanted, _ = reference.replay(counts, depths, 1, BATCHES, OPTIMIZERS["AdamW"][1], **options)
        off = difference(cases.merged([rank[position] for rank in ranks]), wanted)
        assert off <= tolerance, f"{extra}: parameters off by {off:.1e}"


def test_copies_of_tied_weights_follow_the_owner(worlds: Worlds) -> None:
    module = {"loss_fn": toy.mean_over_positions, "specs": toy.words_tied_specs}
    config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", "staleness": NADAM})
    reports = worlds.run(2, cases.train, config, 2, BATCHES, **module)
    options: dict[str, Any] = {"layers": toy.built_tied_layers(), "ties": toy.TIES[:1]}
    options |= {"criterion": toy.mean_over_positions, "staleness": NADAM}
    counts, adamw = uniform_partition(LAYERS, 2), OPTIMIZERS["AdamW"][1]
    wanted, _ = reference.replay(counts, (1, 0), 1, BATCHES, adamw, **options)
    assert difference(by_layer(reports), wanted) <= 1e-4


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


def test_nothing_changes_where_nothing_is_late(worlds: Worlds) -> None:
    """With one stage, bit for bit."""
    blocks: list[dict[str, Any]] = [{}, {"staleness": NADAM}]
    configs = [cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", **block}) for block in blocks]
    ranks = worlds.run(1, cases.train_each, configs, 1, 8)
    plain, other = (cases.merged([rank[position] for rank in ranks]) for position in range(2))
    assert difference(other, plain) == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_resumed_bit_for_bit(worlds: Worlds, tmp_path: Path, micro_batches: int) -> None:
    settings: dict[str, Any] = {"partition": "uniform", "staleness": NADAM}
    config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], settings)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path / "p"), config, 3, (1, 6)):
        assert wrong == []
    half = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], settings, **half)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path / "half"), config, 3, (1, 6)):
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


def test_checkpoints_of_engines_without_it_and_for_them(worlds: Worlds, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"partition": "uniform", "stage_to_depth_map": [1, 1, 0]}
    with_it = {**plain, "staleness": NADAM}
    for number, (first, second) in enumerate([(plain, with_it), (with_it, plain)]):
        configs = [cases.config(1, OPTIMIZERS["FusedAdam"][0], block) for block in (first, second)]
        for parameters in worlds.run(3, train_on, str(tmp_path / str(number)), *configs):
            assert all(bool(torch.isfinite(value).all()) for value in parameters.values())


REFUSED = [
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
    engine = engine_of(module, optimizer, {"staleness": NADAM})
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


@pytest.mark.parametrize("block", [{"sync_mode": "bsp"}, {}])
def test_a_mitigation_ends_with_its_engine(worlds: Worlds, block: dict[str, Any]) -> None:
    again, anew = (cases.merged(worlds.run(2, goes_on, block, fresh)) for fresh in (False, True))
    assert difference(again, anew) == 0
