"""Watchers of layers in a replay."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp


def norms_of(size: int) -> list[dict[str, Any]]:
    """Sums of squares of updates 5 and 6, after a change of the micro-batches per batch from 2 to ``size``."""
    from ds_vpipe.engine.observe.layer_watch import NormWatch

    engine = cases.engine(cases.config(2, {"type": "SGD", "params": {"lr": 0.0}}, {}), 2)
    watch = NormWatch(engine.stage, 5)
    engine.executor.watchers.append(watch)
    data = itertools.repeat(toy.micro_batch(0))
    for update in range(6):
        if update == 3:
            engine.set_train_batch_size(size * toy.MICRO_BATCH)
        engine.train_batch(data)
    engine.destroy()
    return watch.rows()


def test_norms_are_of_both_batches_after_a_change_of_their_size(worlds: Worlds) -> None:
    """With the same data and no changes, three micro-batches have three times the squares of one."""
    one, three = ([*itertools.chain(*worlds.run(2, norms_of, size))] for size in (1, 3))
    assert len(one) == len(three) == 10
    for row, larger in zip(one, three, strict=True):
        assert larger["activation"] == pytest.approx([3 * square for square in row["activation"]], rel=1e-4)
        assert min(row["activation"]) > 0
        assert row["activation"][0] == pytest.approx(row["activation"][1], rel=1e-4)
