"""``"staleness": "auto"``: what is chosen for which pipeline, and where nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.staleness.automatic import OF_SCRIPT, Choice, settled

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
KNOWN = {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}
NADAM = {"nadam": {}}
FIFTH = {"synchronous_updates": 200}
K4, K8 = {**NADAM, **FIFTH}, {**NADAM, **FIFTH, "delay_warmup_updates": 200}
K16 = {**NADAM, **FIFTH, "delay_warmup_updates": 400}


def choice(
    stages: int, micro_batches: int, block: dict[str, Any], optimizer: Any = ADAMW, scheduler: Any = KNOWN, **own: Any
) -> tuple[dict[str, Any] | None, Choice]:
    config = VPipeConfig.parse(block)
    json = DeepSpeedJson({"optimizer": optimizer, "scheduler": scheduler} if optimizer else {})
    result, found = settled(config, config.pipeline(stages, micro_batches), json, **own)
    assert "\n" not in found.line
    return result.to_dict()["staleness"], found


@pytest.mark.parametrize(
    ("stages", "micro_batches", "block", "wanted"),
    [
        (4, 1, {}, K4),
        (4, 1, {"staleness": "auto"}, K4),
        (8, 1, {}, K8),
        (8, 2, {}, K8),
        (8, 3, {}, K4),
        (9, 1, {}, K16),
        (16, 1, {}, K16),
        (32, 1, {}, K16),
        (2, 1, {"stage_to_depth_map": [4, 0]}, K8),
        (4, 2, {"stage_to_depth_map": [4, 2, 2, 0]}, K4),
        (4, 3, {"staleness": "auto"}, NADAM),
        (2, 1, {"staleness": "auto", "weight_sync": "none"}, NADAM),
    ],
)
def test_adamw(stages: int, micro_batches: int, block: Any, wanted: Any) -> None:
    found, told = choice(stages, micro_batches, block)
    assert found == wanted
    assert not told.is_warning
    assert '"staleness": "off"' in told.line
    assert f"K={stages}, M={micro_batches}" in told.line
    assert ("1000 updates" in told.line) == ("synchronous_updates" in wanted)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "block"),
    [
        (4, 3, {}),  # one update late, and nobody has asked
        (2, 1, {}),
        (1, 1, {}),
        (4, 1, {"staleness": "off"}),
        (4, 1, {"sync_mode": "bsp"}),
        (4, 8, {"sync_mode": "bsp", "schedule": "gpipe"}),
        (4, 1, {"stage_to_depth_map": [0, 0, 0, 0]}),
    ],
)
def test_nothing_is_chosen_or_said(stages: int, micro_batches: int, block: Any) -> None:
    assert choice(stages, micro_batches, block) == (None, Choice(None))


def test_what_is_given_is_left() -> None:
    given = {"synchronous_updates": 5, "nadam": None}
    assert choice(4, 1, {"staleness": given}) == (given, Choice(VPipeConfig.parse({"staleness": given}).staleness))


def test_auto_says_that_nothing_is_late() -> None:
    for stages, block in ((1, {}), (4, {"sync_mode": "bsp"})):
        found, told = choice(stages, 1, {**block, "staleness": "auto"})
        assert found is None
        assert "no gradient is late" in told.line


@pytest.mark.parametrize("scheduler", [None, {"type": "WarmupLR"}, {"params": {"total_num_steps": "auto"}}])
def test_a_run_of_unknown_length(scheduler: Any) -> None:
    found, told = choice(8, 1, {}, scheduler=scheduler)
    assert found == NADAM
    assert told.is_warning, "it is not enough"
    assert "total_num_steps" in told.line
    assert choice(16, 1, {}, scheduler=scheduler)[1].is_warning, "no experiment"


@pytest.mark.parametrize("stages", [2, 4, 16])
def test_soap_needs_nothing(stages: int) -> None:
    found, told = choice(stages, 1, {"staleness": "auto"}, {"type": "SOAP"}, None)
    assert found is None
    assert not told.is_warning
    assert "SOAP needs nothing" in told.line
    assert choice(stages, 1, {}, {"type": "SOAP"}, None) == (None, Choice(None))


@pytest.mark.parametrize(
    ("optimizer", "block", "words"),
    [
        ({"type": "SGD", "params": {"lr": 0.1}}, {}, "SGD"),
        ({"type": "Lamb"}, {}, "Lamb"),
        (None, {}, "own"),
        ({**ADAMW, "params": {"amsgrad": True}}, {}, "AdamW with amsgrad"),
        ({**ADAMW, "params": {"bias_correction": False}}, {}, "AdamW with bias_correction false"),
        ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, {}, "Adam with adam_w_mode false"),
        (ADAMW, {"weight_sync": "vertical"}, 'AdamW and weight_sync "vertical"'),
        (ADAMW, {"weight_sync": "none"}, 'AdamW and weight_sync "none"'),
        ({"type": "SOAP"}, {"weight_sync": "none"}, 'SOAP and weight_sync "none"'),
    ],
)
def test_without_experiments_nothing_is_chosen_and_a_line_says_so(optimizer: Any, block: Any, words: str) -> None:
    found, told = choice(4, 1, block, optimizer)
    assert found is None
    assert told.is_warning
    for part in (words, "up to 3 updates late (K=4, M=1)", "M = 3", '"staleness": "off"'):
        assert part in told.line
    assert ("the optimizer SOAP" in told.line) == (optimizer != {"type": "SOAP"})


def test_an_optimizer_of_the_script_counts() -> None:
    found, told = choice(4, 1, {}, own_optimizer=OF_SCRIPT)
    assert (found, told.is_warning) == (None, True)
    assert choice(4, 1, {}, own_optimizer="SOAP") == (None, Choice(None))


def test_decay_as_adamw_has_it() -> None:
    for params in ({}, {"adam_w_mode": False}, {"weight_decay": 0.1}):
        assert choice(4, 1, {}, {"type": "Adam", "params": params})[0] == K4


def test_soap_on_deep_pipelines_needs_more_updates() -> None:
    cases: list[tuple[int, dict[str, Any], bool]] = [
        (17, {}, True), (32, {}, True), (33, {}, False), (32, {"weight_sync": "none"}, False)
    ]  # fmt: skip
    for stages, block, helps in cases:
        found, told = choice(stages, 1, block, {"type": "SOAP"})
        assert (found, told.is_warning) == (None, True)
        assert ("half the learning rate and twice the updates" in told.line) == helps


def test_too_late_for_every_experiment() -> None:
    for optimizer in ({"type": "SOAP"}, ADAMW):
        found, told = choice(33, 1, {}, optimizer)
        assert (found, told.is_warning) == (None, True)
        assert "the optimizer SOAP" not in told.line
        assert "M = 32" in told.line


@pytest.mark.parametrize(("total", "updates", "fifth"), [(1000, 50, 10), (1000, 5000, 200), (1000, None, 200)])
def test_a_run_that_is_shorter_than_its_schedule(total: int, updates: int | None, fifth: int) -> None:
    """A forecast makes a few updates of a long run: they would all be synchronous otherwise."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": total}}
    assert choice(4, 1, {}, scheduler=scheduler, updates=updates)[0] == {**NADAM, "synchronous_updates": fifth}


def test_a_length_that_is_none() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": -100}}
    assert choice(4, 1, {}, scheduler=scheduler)[0] == NADAM
