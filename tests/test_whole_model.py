"""How many stages a plain module is split into."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vpipe.engine.whole_model import num_stages
from ds_vpipe.errors import VPipeConfigError


@pytest.mark.parametrize(
    ("ds_config", "block", "stages"),
    [
        ({"pipeline": {"stages": 2}}, {}, 2),
        ({"pipeline": {"stages": 4}}, {"partition": [1, 2, 3, 4]}, 4),
        ({}, {"partition": [3, 4]}, 2),
        ({"pipeline": {"stages": "auto"}}, {"partition": [3, 4]}, 2),
    ],
)
def test_stages(ds_config: dict[str, Any], block: dict[str, Any], stages: int) -> None:
    assert num_stages(ds_config, block, 4) == stages


@pytest.mark.parametrize(
    ("ds_config", "block", "line"),
    [
        ({}, {}, r'^pipeline\.stages: got null; .*add "pipeline": \{"stages": 4\}, or a list'),
        ({}, {"partition": "uniform"}, r"^pipeline\.stages: got null"),
        ({"pipeline": {"stages": 3}}, {}, r"^pipeline\.stages: got 3; allowed: .* divides the 4 ranks"),
        ({"pipeline": {"stages": "two"}}, {}, r'^pipeline\.stages: got "two"; allowed'),
        ({}, {"partition": [1, 2, 3]}, r"^vpipe\.partition: got 3; allowed"),
    ],
)
def test_refused(ds_config: dict[str, Any], block: dict[str, Any], line: str) -> None:
    with pytest.raises(VPipeConfigError, match=line):
        num_stages(ds_config, block, 4)
