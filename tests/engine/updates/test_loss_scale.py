"""The loss scale of one stage."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ds_vpipe.engine.updates.loss_scale import LossScaling


def test_a_loss_in_half_precision_is_scaled_in_fp32() -> None:
    """In its own it would be infinite in every batch."""
    scaling = LossScaling(SimpleNamespace(loss_scale=2.0**20, _update_scale=None))
    assert scaling.apply(torch.tensor(1.5).half()).item() == 1.5 * 2**20
