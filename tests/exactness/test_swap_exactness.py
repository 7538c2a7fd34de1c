"""Activations on the host: training is the same bit for bit, whatever share of them and whatever is recomputed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from split_models import bert, tokens
from worlds import CaseFailed, Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
TIED: dict[str, Any] = {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
GPIPE = {"sync_mode": "bsp", "schedule": "gpipe"}
INTERLEAVED = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
BATCHES = 7


def train(ds_configs: list[dict[str, Any]], stages: int, folder: str = "", **module: Any) -> list[dict[str, Any]]:
    """Train with each configuration; evaluates, ends the data in a batch, and saves if there is a folder."""
    from ds_vpipe.engine.modules import swap

    reports = []
    with mock.patch.object(swap, "SMALLEST", 1):
        for ds_config in ds_configs:
            torch.manual_seed(1234)
            engine = cases.engine(ds_config, stages, **module)
            size, replica = engine.micro_batches, engine.grid.data_parallel_id
            first, second = toy.data(4 * size + size // 2, replica=replica), toy.data(replica=replica)
            losses = []
            for batch in range(BATCHES):
                losses.append(float(engine.train_batch(first if batch < 4 else second)))
                if batch == 2:
                    losses.append(float(engine.eval_batch(toy.data(start=90))))
                if batch == 5 and folder:
                    engine.save_checkpoint(folder)
            moved = 0 if engine.stage.swap is None else engine.stage.swap.bytes_moved
            reports.append({"losses": losses, "parameters": cases.parameters(engine), "moved": moved})
            cases.end(engine)
    return reports


def same(worlds: Worlds, ranks: int, stages: int, configs: list[dict[str, Any]], *args: Any, **module: Any) -> Any:
    """Train with ``configs``, which have to give the bits of the first; returns bytes that each rank has moved."""
    reports = worlds.run(ranks, train, configs, stages, *args, **module)
    for rank, (plain, *others) in enumerate(reports):
        assert plain["moved"] == 0
        for ds_config, other in zip(configs[1:], others, strict=True):
            where = f"rank {rank}, {ds_config['vpipe']}"
            assert other["losses"] == plain["losses"], where
            assert other["parameters"].keys() == plain["parameters"].keys()
            for name, value in plain["parameters"].items():
                assert torch.equal(other["parameters"][name], value), (where, name)
    return [[report["moved"] for report in rank] for rank in reports]


@pytest.mark.parametrize(("micro_batches", "sync"), [(1, "stash"), (4, "vertical")])
def test_shares_and_recomputation(worlds: Worlds, tmp_path: Path, micro_batches: int, sync: str) -> None:
    block = {"partition": "uniform", "weight_sync": sync, "stage_to_depth_map": [4, 3, 1, 0]}
    shares = [(0, 0), (0.5, 0), (0.7, 0), (1, 0), (0.7, 0.5), (1, 0.5), (1, 1)]
    configs = [
        cases.config(micro_batches, ADAMW, {**block, "swap_ratio": share, "recompute_ratio": ratio})
        for share, ratio in shares
    ]
    moved = same(worlds, 4, 4, configs, str(tmp_path), dropout=0.3)
    for stage, (_, *some) in enumerate(moved):
        if stage == 3:  # one in flight: its backward pass comes next
            assert not any(some)
            continue
        by_share = dict(zip(shares[1:], some, strict=True))
        assert 0 <= by_share[0.5, 0] <= by_share[0.7, 0] < by_share[1, 0]
        assert by_share[1, 0.5] < by_share[1, 0]
        assert by_share[1, 1] == 0, "what is recomputed is not saved"


@pytest.mark.parametrize(
    ("stages", "ranks", "micro_batches", "block", "extra", "module"),
    [
        (2, 2, 4, {"sync_mode": "bsp"}, {}, {"dropout": 0.3}),
        (2, 2, 3, GPIPE, {}, {"dropout": 0.3}),
        (2, 2, 4, INTERLEAVED, {}, {"dropout": 0.3}),
        (3, 3, 1, {"stage_to_depth_map": [4, 2, 0]}, {}, TIED),
        (2, 4, 2, {}, {**BF16, "gradient_clipping": 0.5}, {}),
        (2, 2, 1, {"weight_sync": "none"}, {}, {}),
    ],
    ids=["1f1b", "gpipe", "interleaved", "ties", "replicas, bf16, ZeRO-1", "newest weights"],
)
def test_other_pipelines(
    worlds: Worlds,
    stages: int,
    ranks: int,
    micro_batches: int,
    block: dict[str, Any],
    extra: dict[str, Any],
    module: dict[str, Any],
) -> None:
    again = 0 if block.get("weight_sync") == "none" else 0.4  # recomputation would see the newest weights
    configs = [
        cases.config(micro_batches, ADAMW, {"partition": "uniform", **block, **ratios}, **extra)
        for ratios in ({}, {"swap_ratio": 0.6}, {"swap_ratio": 1, "recompute_ratio": again})
    ]
    assert all(same(worlds, ranks, stages, configs, **module)[0][1:])


def train_with_a_place_freed_early(ds_configs: list[dict[str, Any]], stages: int) -> Any:
    from ds_vpipe.engine.modules import host_memory

    put = host_memory._File.put

    def free_early(self: Any, storage: torch.UntypedStorage) -> Any:
        block = put(self, storage)
        self.free(block)
        return block

    with mock.patch.object(host_memory._File, "put", free_early):
        return train(ds_configs, stages)


def train_with_another_micro_batch(ds_configs: list[dict[str, Any]], stages: int) -> Any:
    from ds_vpipe.engine.modules import host_memory

    blocks: list[Any] = []
    put = host_memory._File.put

    def mix_up(self: Any, storage: torch.UntypedStorage) -> Any:
        blocks.append(put(self, storage))
        return next((block for block in blocks if block.size == blocks[-1].size), None)

    with (
        mock.patch.object(host_memory._File, "put", mix_up),
        mock.patch.object(host_memory._File, "free", return_value=None),
    ):
        return train(ds_configs, stages)


@pytest.mark.parametrize("wrong", [train_with_a_place_freed_early, train_with_another_micro_batch])
def test_comparison_would_notice_values_of_another_micro_batch(worlds: Worlds, wrong: Any) -> None:
    configs = [cases.config(1, ADAMW, {"partition": "uniform", "swap_ratio": share}) for share in (0, 1)]
    plain, other = worlds.run(3, wrong, configs, 3)[0]
    assert any(not torch.equal(other["parameters"][name], value) for name, value in plain["parameters"].items())


def train_on_an_accelerator(ds_configs: list[dict[str, Any]], stages: int, missing: str = "") -> Any:
    """Train on a simulated one; without one of its calls, if that is named."""
    from simulated_device import SimulatedAccelerator, SimulatedStream

    from ds_vpipe.engine.modules import host_memory, swap

    accelerator = SimulatedAccelerator(torch.distributed.get_rank())
    kind = SimulatedStream if missing == "wait_event" else SimulatedAccelerator
    with (
        mock.patch.object(swap, "host_memory", return_value=host_memory.PageLocked(accelerator)),
        mock.patch.object(kind, missing, return_value=None) if missing else nullcontext(),
    ):
        reports = train(ds_configs, stages, dropout=0.3)
    accelerator.end()
    assert not accelerator.host_waits
    assert (accelerator.num_copies > 0) == any(report["moved"] for report in reports)
    return reports


@pytest.mark.parametrize(("micro_batches", "block"), [(1, {}), (4, {"sync_mode": "bsp"}), (4, INTERLEAVED)])
def test_an_accelerator_copies_beside_the_computation(
    worlds: Worlds, micro_batches: int, block: dict[str, Any]
) -> None:
    configs = [
        cases.config(micro_batches, ADAMW, {"partition": "uniform", "swap_ratio": share, **block}) for share in (0, 1)
    ]
    for plain, swapped in worlds.run(3 if not block else 2, train_on_an_accelerator, configs, 3 if not block else 2):
        assert swapped["losses"] == plain["losses"]
        for name, value in plain["parameters"].items():
            assert torch.equal(swapped["parameters"][name], value), name


@pytest.mark.parametrize("missing", ["wait_event", "used_on"])
def test_an_accelerator_needs_every_wait(worlds: Worlds, missing: str) -> None:
    configs = [cases.config(1, ADAMW, {"partition": "uniform", "swap_ratio": 1})]
    with pytest.raises(CaseFailed, match="Misuse"):
        worlds.run(2, train_on_an_accelerator, configs, 2, missing)


def loop(share: float, layers: list[int]) -> dict[str, Any]:
    """A plain Hugging Face model, split by itself, in a loop."""
    import ds_vpipe
    from ds_vpipe.engine.modules import swap

    torch.manual_seed(1234)
    block = {"partition": layers, "swap_ratio": share, "recompute_ratio": [0.5, 0]}
    ds_config = cases.config(1, ADAMW, block, pipeline={"stages": 2})
    ds_config["train_micro_batch_size_per_gpu"] = 3
    with mock.patch.object(swap, "SMALLEST", 1):
        engine = ds_vpipe.initialize(model=bert(dropout=0.1), config=ds_config)[0]
        losses = []
        for index in range(6):
            labels = {"labels": tokens(200 + index), "next_sentence_label": tokens(index, 2, (3,), 0)}
            loss = engine(input_ids=tokens(100 + index), **labels)
            losses.append(str(float(loss)))  # of which some are not known yet
            engine.backward(loss)
            engine.step()
        engine.drain()
    moved = 0 if engine.stage.swap is None else engine.stage.swap.bytes_moved
    found = {name: value.detach().clone() for name, value in engine.module.user_module.named_parameters()}
    engine.destroy()
    return {"losses": losses, "parameters": found, "moved": moved}


def test_a_plain_model_that_is_split(worlds: Worlds) -> None:
    plain, swapped = (worlds.run(2, loop, share, [3, 3]) for share in (0.0, 1.0))
    assert swapped[0]["moved"] > plain[0]["moved"] == 0
    for one, other in zip(plain, swapped, strict=True):
        assert one["losses"] == other["losses"]
        for name, value in one["parameters"].items():
            assert torch.equal(other["parameters"][name], value), name
