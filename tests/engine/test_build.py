"""What ranks agree on before they build an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_vpipe.config.block import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine import build


@pytest.mark.parametrize(
    ("name", "mine", "other", "budget"), [("cuda", 80, 40, 36), ("cuda", 40, 80, 36), ("cpu", 9, 9, None)]
)
def test_all_ranks_plan_for_the_smallest_card(
    monkeypatch: pytest.MonkeyPatch, name: str, mine: int, other: int, budget: int | None
) -> None:
    accelerator = SimpleNamespace(device_name=lambda: name, total_memory=lambda: mine)
    monkeypatch.setattr(build, "get_accelerator", lambda: accelerator)
    consensus = SimpleNamespace(lowest=lambda value, what: min(value, int(0.9 * other)))
    found = build._devices(VPipeConfig(), DeepSpeedJson({}), 1, consensus)  # type: ignore[arg-type]
    assert (found.budget, found.host_transfers) == (budget, name == "cpu")
