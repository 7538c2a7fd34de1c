"""The interleaved schedule in the engine: equal to DeepSpeed's bit for bit, whatever is asked of it beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from test_data_end import train_epochs
from test_exactness import difference
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
INTERLEAVED = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
TIED: dict[str, Any] = {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}
ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
BATCHES = 6


def by_name(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().clone() for name, value in engine.module.named_parameters()}


def train(ds_configs: list[dict[str, Any]], stages: int, model: dict[str, Any]) -> list[dict[str, Any]]:
    reports = []
    for number, ds_config in enumerate(ds_configs):
        ds_config["vpipe"]["link"] = ("auto", "host")[number % 2]
        torch.manual_seed(1234)
        engine = cases.engine(ds_config, stages, **model)
        replica = engine.grid.data_parallel_id
        iterator = toy.data((BATCHES + 1) * engine.micro_batches - 1, replica=replica)  # the rest is left out
        losses, evaluations, ended = [], [], False
        for number in range(BATCHES + 1):
            try:
                losses.append(float(engine.train_batch(iterator)))
            except StopIteration:
                ended = True
            if number == 2:
                evaluations.append(float(engine.eval_batch(toy.data(95, start=90), num_micro_batches=5)))
                if engine.stage.links.after and engine.stage.links.next.evaluation.payload == "host":
                    assert not engine.stage.links.next.evaluation._outgoing  # or buffers would be kept for good
        reports.append(
            {
                "parameters": by_name(engine),
                "losses": losses,
                "evaluations": evaluations,
                "ended": ended,
                "layers": len(engine.module.forward_funcs),
            }
        )
        cases.end(engine)
    return reports


@pytest.mark.parametrize(
    ("stages", "ranks", "micro_batches", "virtual", "extra", "model"),
    [
        (2, 2, 1, 2, {}, {}),
        (2, 2, 4, 3, {"gradient_clipping": 0.5}, {}),
        (4, 4, 4, 2, {}, {}),
        (3, 3, 5, 3, {}, {}),
        (2, 4, 3, 2, ZERO, {}),
        (2, 2, 2, 2, {}, TIED),
    ],
    ids=["K2 M1 v2", "K2 M4 v3", "K4 M4 v2", "K3 M5 v3", "replicas, ZeRO-1", "ties"],
)
def test_equal_to_one_part_per_stage(
    worlds: Worlds,
    stages: int,
    ranks: int,
    micro_batches: int,
    virtual: int,
    extra: dict[str, Any],
    model: dict[str, Any],
) -> None:
    blocks: list[dict[str, Any] | None] = [{"sync_mode": "bsp"}, {**INTERLEAVED, "virtual_stages": virtual}]
    # Adam makes much of gradients that are almost zero.
    exact = not model and "gradient_clipping" not in extra
    ds_configs = [cases.config(micro_batches, ADAMW if exact else SGD, block, **extra) for block in blocks]
    reports = worlds.run(ranks, train, ds_configs, stages, model)
    merged: list[dict[str, torch.Tensor]] = [{}, {}]
    for report in reports:
        for position in range(2):
            merged[position].update(report[position]["parameters"])
        # Norms and tied gradients are summed over other ranks, in another order.
        assert report[0]["losses"] == (report[1]["losses"] if exact else pytest.approx(report[1]["losses"], rel=1e-5))
        assert len(report[0]["losses"]) == BATCHES
        assert report[0]["evaluations"] == pytest.approx(report[1]["evaluations"], rel=0 if exact else 1e-5)
        assert report[0]["ended"]
        assert report[1]["ended"]
    assert merged[0].keys() == merged[1].keys()
    for name, value in merged[0].items():
        assert torch.allclose(value, merged[1][name], rtol=0, atol=0 if exact else 1e-5), name


def save_and_load(directory: str, blocks: list[dict[str, Any]], recompute: float) -> list[dict[str, torch.Tensor]]:
    """Save with the first block, load with the others and go on, each once."""
    results = []
    for position, block in enumerate(blocks):
        ds_config = cases.config(2, ADAMW, {**block, "recompute_ratio": recompute})
        engine = cases.engine(ds_config, 2)
        iterator = toy.data()
        if position:
            engine.load_checkpoint(directory)
            iterator = toy.data(start=engine.consumed_micro_batches)
        else:
            for _ in range(3):
                engine.train_batch(iterator)
            engine.save_checkpoint(directory)
        for _ in range(3):
            engine.train_batch(iterator)
        results.append(by_name(engine))
        cases.end(engine)
    return results


@pytest.mark.parametrize("first", [0, 1], ids=["one part first", "several first"])
def test_checkpoints(worlds: Worlds, tmp_path: Path, first: int) -> None:
    kinds: list[dict[str, Any]] = [{"sync_mode": "bsp"}, INTERLEAVED]
    blocks = [kinds[first], kinds[first], kinds[1 - first]]
    ranks = worlds.run(2, save_and_load, str(tmp_path), blocks, 0.5)
    wanted: dict[str, torch.Tensor] = {}
    for rank in ranks:
        wanted.update(rank[0])
    for rank in ranks:
        for position in (1, 2):
            for name, value in rank[position].items():
                assert torch.equal(value, wanted[name]), (position, name)
    assert len(list(tmp_path.glob("global_step3/layer_*"))) == 10


def test_iterator_that_starts_over(worlds: Worlds) -> None:
    """Every epoch of five leaves two micro-batches over; inputs and labels stay paired in the epochs after it."""
    found = []
    for block in ({"sync_mode": "bsp"}, INTERLEAVED):
        reports = worlds.run(2, train_epochs, cases.config(3, SGD, block), 2, 5, 3)
        assert [report["batches"] for report in reports] == [3, 3]
        found.append(cases.merged(reports))
    assert difference(found[1], found[0]) == 0


def recomputed(ds_config: dict[str, Any]) -> list[int]:
    engine = cases.engine(ds_config, 2)
    found = [segment.stop - segment.first for segment in engine.module._vpipe_segments]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1, [[2, 2], [3, 3]]), ([0.5, 1], [[1, 1], [3, 3]]), ([0.5, 0, 1, 1], [[1, 2], [0, 3]])],
    ids=["all", "of stages", "of parts"],
)
def test_ratios_of_stages_and_of_parts(worlds: Worlds, ratio: Any, expected: list[list[int]]) -> None:
    block = {**INTERLEAVED, "partition": [2, 3, 2, 3], "recompute_ratio": ratio}
    assert worlds.run(2, recomputed, cases.config(2, SGD, block)) == expected


def set_interval() -> str:
    engine = cases.engine(cases.config(2, SGD, INTERLEAVED), 2)
    engine.module.set_checkpoint_interval(0)
    with pytest.raises(VPipeConfigError) as refusal:
        engine.module.set_checkpoint_interval(1)
    engine.destroy()
    return str(refusal.value)


def test_an_interval_set_by_the_script_is_refused(worlds: Worlds) -> None:
    for line in worlds.run(2, set_interval):
        assert line.startswith("set_checkpoint_interval(): got 1, allowed is 0 next to vpipe.virtual_stages")


def long_evaluation(ds_config: dict[str, Any], count: int) -> list[float]:
    engine = cases.engine(ds_config, 2)
    losses = [float(engine.eval_batch(toy.data(count), num_micro_batches=number)) for number in (count, count // 2)]
    engine.destroy()
    return losses


def test_an_evaluation_of_any_length(worlds: Worlds) -> None:
    """Results must not pile up before a stage that still has to send its own."""
    blocks = [{"sync_mode": "bsp"}, {**INTERLEAVED, "peer_timeout_s": 20}]
    one, several = (worlds.run(2, long_evaluation, cases.config(2, SGD, block), 1501)[0] for block in blocks)
    assert one == several
