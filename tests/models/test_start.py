"""What a training script prints while it starts."""

from __future__ import annotations

import pytest
from deepspeed.utils import logger

from ds_vpipe.models.start import silence


def test_only_deepspeeds_lines_are_kept_back(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    try:
        with silence():
            print("stage=0 layers=3")
            print("ds_vpipe: planned from p.json\nstage  layers", flush=True)
            logger.warning("Attempting to get learning rate from scheduler before it has started")
            logger.warning("ds_vpipe: optimizer SGD: gradients are late")
            logger.error("broken")
        print("after")
        logger.warning("after")
    finally:
        logger.removeHandler(caplog.handler)
    assert capsys.readouterr().out.splitlines()[:2] == ["ds_vpipe: planned from p.json", "stage  layers"]
    assert caplog.messages == ["ds_vpipe: optimizer SGD: gradients are late", "broken", "after"]
