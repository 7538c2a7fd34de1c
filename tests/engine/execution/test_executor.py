"""The executor's methods, with everything around them replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_vpipe.engine.execution.executor import Executor
from ds_vpipe.schedules.actions import Kind


def test_what_is_being_sent_is_copied_before_a_backward_pass_changes_versions() -> None:
    """An output may be a weight, which is read while it is being sent."""
    calls: list[Any] = []

    def load_old_params(key: tuple[int, int]) -> None:
        calls.append(key)
        raise InterruptedError

    stage = SimpleNamespace(
        in_flight={(3, 0): None},
        loss_scaling=None,
        links=SimpleNamespace(wait_for_copies=calls.append),
        weights=SimpleNamespace(load_old_params=load_old_params),
    )
    executor: Any = SimpleNamespace(_stage=stage)
    with pytest.raises(InterruptedError):
        Executor.backward(executor, 3, 0)
    assert calls == [Kind.STEP, (3, 0)]
