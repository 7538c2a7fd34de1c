"""States that are kept while micro-batches are in flight: a run that goes on from them is one without a failure.

Ranks end here between two calls of ``train_batch()``, at different updates; tests/chaos kills them anywhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS
from torch import nn
from worlds import Worlds

from ds_vpipe.engine.checkpoint import recovery
from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.kept_memory import KEPT, KeptMemory
from ds_vpipe.schedules.moves import Move
from ds_vpipe.schedules.one_f_one_b import version_used

pytestmark = pytest.mark.mp

SGD, ADAMW = OPTIMIZERS["SGD"][0], OPTIMIZERS["AdamW"][0]
UPDATES = 12


class Running(nn.Module):
    """Layer with a buffer that every forward pass changes, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.factor = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return (x - self.mean) * (1 + self.factor)


def specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    layers = toy.layer_specs(dropout=0.2)
    return [*layers[:2], LayerSpec(Running), *layers[2:5], LayerSpec(Running), *layers[5:]]


class Runs:
    """Attempts of a run in one process, with the supervisor's memory between them."""

    def __init__(self, ds_config: dict[str, Any], stages: int, data_end: int | None = None) -> None:
        self.memory, self._ds_config, self._stages, self._data_end = KeptMemory(), ds_config, stages, data_end
        self.losses: dict[int, str] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.recovered: int | None = None

    def attempt(self, until: int, seed: int) -> None:
        """Train from a recovery, if there is one, to an update, and leave the engine with what is in flight."""
        torch.manual_seed(seed)
        random.seed(seed)
        self.memory.connect()
        assert self.memory._its is not None
        files = [f"{name}={os.dup(file)}" for name, file in self.memory._files.items()]
        with mock.patch.dict(os.environ, {KEPT: ";".join([str(self.memory._its.fileno()), *files])}):
            engine = cases.engine(self._ds_config, self._stages, specs=specs)
        engine.recovery._prefix = "engine 1/"  # it is the first of its process where that is a new one
        if seed > 1:  # nothing but what was kept may count
            for parameter in engine.module.parameters():
                parameter.data.add_(1.0)
        self.recovered = engine.global_steps if engine.recover() else None
        iterator = self._data(engine)
        while engine.global_steps < until:
            update = engine.global_steps
            torch.rand(update + engine.stage_id)  # as a script draws between two calls
            try:
                self.losses[update] = float(engine.train_batch(iterator)).hex()
            except StopIteration:
                iterator = self._data(engine)
            self.memory.receive()
            if update % 5 == 2:
                engine.eval_batch(toy.data(10_002, 10_000), num_micro_batches=2)
            if update == 3:
                engine.quiesce()
        self.weights = cases.parameters(engine)
        self.weights |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        engine.destroy()
        cases.close_groups()

    def _data(self, engine: Any) -> Iterator[Any]:
        done, length, replica = engine.consumed_micro_batches, self._data_end, engine.grid.data_parallel_id
        if length is None:
            return toy.data(None, done, replica)
        epoch, trained = divmod(done, length - length % engine.micro_batches)
        return toy.data((epoch + 1) * length, epoch * length + trained, replica)

    def lose(self, newest: int) -> None:
        """As if this rank had ended after an earlier update."""
        for name in [name for name in self.memory._files if "/state " in name]:
            if int(name.split()[-2]) > newest:
                os.close(self.memory._files.pop(name))


def run(ds_config: dict[str, Any], stages: int, ends: Sequence[int], lost: Sequence[int], data_end: int | None) -> Any:
    """An undisturbed run, and one with attempts that end after those updates, the stages' states so many less."""
    whole = Runs(ds_config, stages, data_end)
    whole.attempt(UPDATES, seed=1)
    parts, recovered = Runs(ds_config, stages, data_end), []
    stage = torch.distributed.get_rank() * stages // torch.distributed.get_world_size()
    for seed, end in enumerate((*ends, UPDATES), 1):
        parts.attempt(end, seed)
        recovered.append(parts.recovered)
        if end < UPDATES:
            parts.lose(end - 1 - lost[stage])
    return whole.losses, whole.weights, parts.losses, parts.weights, recovered


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = {
    # ranks, M, optimizer, block, other keys, micro-batches of an epoch
    "M=1": (3, 1, SGD, {}, {}, None),
    "M=2": (3, 2, ADAMW, {}, {"gradient_clipping": 0.5}, None),
    "M=4": (2, 4, ADAMW, {"recompute_ratio": 0.5}, {}, None),
    "every third": (3, 1, ADAMW, {"recovery": {"every": 3}}, {}, None),
    "vertical": (3, 2, SGD, {"weight_sync": "vertical"}, {}, None),
    "synchronous": (2, 2, SGD, {"sync_mode": "bsp"}, {}, None),
    "deep": (2, 1, SGD, {"stage_to_depth_map": [5, 0]}, {}, None),
    "host": (2, 2, SGD, {"link": "host"}, {}, None),
    "epochs": (3, 2, ADAMW, {}, {}, 6),
    "epochs, batches left over": (3, 2, SGD, {}, {}, 7),
    "staleness": (
        3, 1, ADAMW, {"staleness": {"nadam": True, "synchronous_updates": 4}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_recovered_run_is_one_without_a_failure(worlds: Worlds, name: str) -> None:
    stages, micro_batches, optimizer, block, extra, data_end = CASES[name]
    ds_config = cases.config(
        micro_batches, optimizer, {"partition": "uniform", "recovery": {"every": 1}, **block}, **extra
    )
    behind = -(-stages // micro_batches)
    for ends, lost in (
        ([6, 6, 10], [0] * stages),
        ([5, 9], [behind, *[0] * (stages - 1)]),
        ([8], [*[0] * (stages - 1), 1]),
    ):
        for losses, weights, recovered_losses, recovered_weights, recovered in worlds.run(
            stages, run, ds_config, stages, ends, lost, data_end
        ):
            every = ds_config["vpipe"]["recovery"]["every"]
            assert recovered[0] is None
            if data_end is None:
                assert recovered[1:] == [(end - 1 - max(lost)) // every * every for end in ends]
            assert recovered_losses == losses
            assert weights.keys() == recovered_weights.keys()
            assert all(torch.equal(weights[key], recovered_weights[key]) for key in weights)
