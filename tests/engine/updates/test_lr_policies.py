"""Learning-rate policies against their closed forms, how a JSON names them, and a schedule at work."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.lr_policies import LR_POLICIES, LRPolicy, lr_policy
from ds_vpipe.lr_schedule import LRSchedule

TOTAL, WARMUP = 40, 8
CLOSED_FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "ConstantWarmupLR": ({}, lambda n: 1.0),
    "PolyWarmupLR": ({"total_num_steps": TOTAL}, lambda n: math.sqrt(1 - n / TOTAL)),
    "LinearWarmupLR": ({"total_num_steps": TOTAL}, lambda n: (TOTAL - n) / (TOTAL - WARMUP)),
    "CosineWarmupLR": (
        {"total_num_steps": TOTAL},
        lambda n: (1 + math.cos(math.pi * (n - WARMUP) / (TOTAL - WARMUP))) / 2,
    ),
    "TrapezoidWarmupLR": (
        {"total_num_steps": TOTAL, "decay_num_steps": 10},
        lambda n: 1.0 if n < 30 else (TOTAL - n) / 10,
    ),
    "StepWarmupLR": ({"step_size": 10, "gamma": 0.5}, lambda n: 0.5 ** ((n - 1) // 10)),
}


def policy_of(name: str, **params: Any) -> LRPolicy:
    policy = lr_policy({"scheduler": {"type": name, "params": params}})
    assert policy is not None
    return policy


def test_every_policy_is_tested() -> None:
    assert set(CLOSED_FORMS) == set(LR_POLICIES)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form(name: str) -> None:
    params, after = CLOSED_FORMS[name]
    policy = policy_of(name, warmup_num_steps=WARMUP, **params)
    for n in range(1, TOTAL + 1):
        assert policy.factor(n) == pytest.approx(n / WARMUP if n < WARMUP else after(n), abs=1e-12)
    if "total_num_steps" in params:
        assert policy.factor(TOTAL) == policy.factor(TOTAL + 1) == policy.factor(10 * TOTAL) == pytest.approx(0)
    assert policy_of(name, **params).factor(1) > 0.95


@pytest.mark.parametrize("name", [name for name, (params, _) in CLOSED_FORMS.items() if "total_num_steps" in params])
def test_a_run_of_one_update_has_no_warm_up(name: str) -> None:
    """Trainer fills ``"auto"`` in with 1 at least."""
    ones = {**dict.fromkeys(CLOSED_FORMS[name][0], 1), "total_num_steps": 1}
    assert policy_of(name, warmup_num_steps=1, **ones).factor(1) == policy_of(name, **ones).factor(1) == 0


def test_published_warm_up_of_vpipe() -> None:
    policy = policy_of("PolyWarmupLR", total_num_steps=36320, warmup_num_steps=7264)
    for n in (1, 100, 7263, 7264, 20000, 36319, 36320):
        p = n / 36320
        assert policy.factor(n) == pytest.approx(p / 0.2 if p < 0.2 else (1 - p) ** 0.5)
    assert policy_of("PolyWarmupLR", total_num_steps=10, degree=1.0).factor(4) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("PolyWarmupLR", {}, "scheduler.params.total_num_steps: got null; allowed: an int >= 1"),
        ("PolyWarmupLR", {"total_num_steps": 0}, "scheduler.params.total_num_steps: got 0; allowed: an int >= 1"),
        (
            "PolyWarmupLR",
            {"total_num_steps": 9, "degre": 1},
            "degre: got 1; allowed: warmup_num_steps, total_num_steps",
        ),
        ("PolyWarmupLR", {"total_num_steps": 9, "degre": 1}, 'did you mean "degree"?'),
        (
            "LinearWarmupLR",
            {"total_num_steps": 5, "warmup_num_steps": 5},
            "warmup_num_steps: got 5; allowed: an int >=",
        ),
        (
            "TrapezoidWarmupLR",
            {"total_num_steps": 5, "warmup_num_steps": 2, "decay_num_steps": 4},
            "scheduler.params.decay_num_steps: got 4; allowed: an int >= 1, with warmup_num_steps not more than",
        ),
        ("TrapezoidWarmupLR", {"total_num_steps": 5}, "scheduler.params.decay_num_steps: got null; allowed: an int"),
        (
            "StepWarmupLR",
            {"step_size": 3, "gamma": 1.5},
            "scheduler.params.gamma: got 1.5; allowed: a number in (0, 1]",
        ),
        ("ConstantWarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps: got 2.5; allowed: an int >= 0"),
        ("ConstantWarmupLR", [3], "scheduler.params: got [3]; allowed: an object"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(name: str, params: Any, says: str) -> None:
    with pytest.raises(VPipeConfigError, match=re.escape(says)) as caught:
        lr_policy({"scheduler": {"type": name, "params": params}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ds_config", [{}, {"scheduler": {"type": "WarmupLR", "params": {}}}, {"scheduler": None}])
def test_other_schedules_are_left_to_deepspeed(ds_config: dict[str, Any]) -> None:
    assert lr_policy(ds_config) is None


def schedule(policy: LRPolicy) -> tuple[torch.optim.Optimizer, LRSchedule]:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 10.0}], lr=0.0)
    return optimizer, LRSchedule(optimizer, policy)


def test_a_schedule_scales_every_group_and_goes_on_where_it_was() -> None:
    policy = policy_of("LinearWarmupLR", total_num_steps=10, warmup_num_steps=4)
    optimizer, running = schedule(policy)
    used = []
    for _ in range(10):
        used.append([group["lr"] for group in optimizer.param_groups])
        running.step()
    assert used == [[policy.factor(n), 10 * policy.factor(n)] for n in range(1, 11)]
    _, before = schedule(policy)
    for _ in range(6):
        before.step()
    optimizer, resumed = schedule(policy)
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the groups
    resumed.load_state_dict(before.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == resumed.get_lr() == used[6]


def test_schedules_of_deepspeed_go_on_from_a_state_and_the_other_way_round() -> None:
    policy = policy_of("LinearWarmupLR", total_num_steps=10, warmup_num_steps=4)
    optimizer, ours = schedule(policy)
    theirs = WarmupLR(optimizer, warmup_max_lr=1.0, warmup_num_steps=100, warmup_type="linear")
    for _ in range(7):
        ours.step()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.last_batch_iteration == 6
    _, again = schedule(policy)
    again.load_state_dict(theirs.state_dict())
    assert again.get_lr() == ours.get_lr()
    with pytest.raises(VPipeError, match="got a state with last_epoch; allowed: last_batch_iteration"):
        again.load_state_dict({"last_epoch": 3})
    with pytest.raises(VPipeError, match="got a state with nothing; allowed: last_batch_iteration"):
        again.load_state_dict(None)
