"""Ranks that train by other settings, or have other models, than rank 0: refused on all at the start, in one line."""

from __future__ import annotations

import copy
import time
from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import CaseFailed, Worlds

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


class Plain(nn.Module):
    """A model of ids and labels that can be made unlike on a rank."""

    def __init__(self, blocks: int = 4, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks)])
        self.head = nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def started(ds_configs: list[dict[str, Any]]) -> list[float]:
    """Losses of two updates of the toy pipeline by this rank's own JSON."""
    engine, data = cases.engine(ds_configs[torch.distributed.get_rank()], 2), toy.data()
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    cases.end(engine)
    return losses


def plain_started(ds_config: dict[str, Any], unlike: dict[str, Any] | None) -> None:
    """An engine of a plain model that is another one on rank 1."""
    import ds_vpipe

    first = torch.distributed.get_rank() == 0
    model = Plain() if first else nn.Linear(8, 8) if unlike is None else Plain(**unlike)
    ds_vpipe.initialize(model=model, config=ds_config)[0].destroy()


def with_values(**values: Any) -> dict[str, Any]:
    """A JSON with values by path, whose dots are written as two underscores."""
    made = copy.deepcopy(cases.config(2, ADAM, {"peer_timeout_s": 30}))
    for path, value in values.items():
        *objects, key = path.split("__")
        place = made
        for name in objects:
            place = place.setdefault(name, {})
        place[key] = value
    return made


@pytest.mark.mp
@pytest.mark.parametrize(
    ("unlike", "line"),
    [
        (
            {"optimizer__params__lr": 0.1},
            "optimizer.params.lr: got 0.1 on rank 1 and 0.01 on rank 0; allowed: the same",
        ),
        ({"optimizer__type": "SGD"}, 'optimizer.type: got "SGD" on rank 1 and "AdamW" on rank 0'),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: got 4 on rank 1 and 2 on rank 0"),
        ({"zero_optimization__stage": 1}, "zero_optimization.stage: got 1 on rank 1 and nothing on rank 0"),
        ({"vpipe__stage_to_depth_map": [2, 0]}, "vpipe.stage_to_depth_map: got [2, 0] on rank 1 and nothing on rank 0"),
        ({"vpipe__partition": [3, 7]}, "vpipe.partition: got [3, 7] on rank 1 and nothing on rank 0"),
        ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op: got "sum" on rank 1 and nothing on rank 0'),
        ({"vpipe__sync_mode": "bsp"}, 'vpipe.sync_mode: got "bsp" on rank 1 and nothing on rank 0'),
    ],
)
def test_another_json_on_a_rank_is_refused(worlds: Worlds, unlike: dict[str, Any], line: str) -> None:
    """It would train a mixture of both, or wait for what does not come."""
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, started, [with_values(), with_values(**unlike)])
    assert len(failed.value.errors) == 2
    for text in failed.value.errors.values():
        assert line in text
        assert text.endswith("start all ranks with one DeepSpeed JSON and one model")


@pytest.mark.mp
def test_what_does_not_train_may_be_one_ranks_own(worlds: Worlds, tmp_path: Any) -> None:
    """Logs, folders, limits, keys of the script, and the file in which a split is."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "one"}
    for name in ("ours", "theirs"):
        (tmp_path / f"{name}.json").write_text('{"partition": [5, 5]}', encoding="utf-8")
    theirs = with_values(vpipe__partition=str(tmp_path / "theirs.json"))
    ours = with_values(vpipe__partition=str(tmp_path / "ours.json"), vpipe__peer_timeout_s=31, seed=42)
    ours |= {"csv_monitor": monitor, "steps_per_print": 1}
    first, second = worlds.run(2, started, [ours, theirs])
    assert first == second


def plain_late(ds_config: dict[str, Any]) -> None:
    """An engine of a plain model that rank 1 comes to later than any wait of the engine's lasts."""
    import ds_vpipe

    model = Plain()
    if torch.distributed.get_rank() == 1:
        time.sleep(5)
    ds_vpipe.initialize(model=model, config=ds_config)[0].destroy()


@pytest.mark.mp
def test_a_plain_model_waits_for_ranks_as_torch_does(worlds: Worlds) -> None:
    """One may prepare the data for all, which come to ``initialize()`` before it."""
    worlds.run(2, plain_late, {**with_values(vpipe__peer_timeout_s=3), "pipeline": {"stages": 2}})


@pytest.mark.mp
@pytest.mark.parametrize(
    ("unlike", "line"),
    [
        ({"blocks": 6}, "trained values of the model's pieces: got ["),
        ({"frozen": True}, "trained values of the model's pieces: got ["),
        ({"tied": True}, "digest of its parameters: got "),
        (None, "cannot split its model: "),
    ],
)
def test_another_model_on_a_rank_is_refused(worlds: Worlds, unlike: dict[str, Any] | None, line: str) -> None:
    """Before any collective of DeepSpeed's, which would have no limit of ours."""
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, plain_started, {**with_values(), "pipeline": {"stages": 2}}, unlike)
    errors = failed.value.errors
    assert len(errors) == 2
    assert line in errors[0]
    assert (line in errors[1]) is (unlike is not None)
