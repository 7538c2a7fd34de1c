"""States that are kept while micro-batches are in flight: a run that goes on from them is one without a failure.

Ranks end here between two calls of ``train_batch()``, at different updates; tests/chaos kills them anywhere.
"""

from __future__ import annotations

import os
import random
import socket
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import le
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import loops
import pytest
import torch
import toy
from deepspeed.ops.adam import FusedAdam
from test_exactness import OPTIMIZERS
from torch import nn
from torch.utils._pytree import tree_leaves
from worlds import Worlds

from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine.checkpoint import recovery
from ds_vpipe.engine.checkpoint.recovery import recovery_of
from ds_vpipe.engine.updates.optimizers import reset_of_powers
from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.kept_memory import KeptMemory, await_start, connection
from ds_vpipe.planning.devices import optimizer_bytes
from ds_vpipe.schedules.counts import kept_states
from ds_vpipe.schedules.moves import Move
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

SGD, ADAMW, FUSED = (OPTIMIZERS[name][0] for name in ("SGD", "AdamW", "FusedAdam"))
UPDATES = 12
RANDOM_RUNS = int(os.environ.get("DS_VPIPE_RANDOM_RECOVERIES", "8"))
"""How many runs are drawn at random; those of a number are always the same."""
RANDOM_FIRST = int(os.environ.get("DS_VPIPE_RANDOM_FIRST", "0"))


class Running(nn.Module):
    """Layer with a buffer that passes change, one that the script replaces, and one that is a weight's memory.

    Besides, it has extra state, a part with the first of these buffers, whose mode follows from a number, and a
    parameter that is not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("codes", torch.zeros(2048))
        self.passes = 0
        self.factor = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(toy.HIDDEN))
        self.register_buffer("again", self.gain.detach())
        self.seen, self.part = [0], nn.Identity()
        self.part.register_buffer("mean", self.mean)

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = state

    def train(self, mode: bool = True) -> Running:
        super().train(mode)
        self.part.train(mode and self.passes % 5 < 3)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain * self.again.to(x.dtype) + 0.1 * self.part.training
        if self.training:
            self.seen[0] += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
            self.codes.data.add_(x.detach().mean())  # which is not counted, as in a normalisation
            self.passes += 1
        return (x - self.part.mean) * (1 + self.factor) * self.temperature + self.codes[-1] + 0.1 * (self.passes % 3)


def specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    layers = toy.layer_specs(dropout=0.2)
    return [*layers[:2], LayerSpec(Running), *layers[2:5], LayerSpec(Running), *layers[5:]]


def started(memory: KeptMemory) -> tuple[socket.socket, dict[str, str]]:
    """The supervisor's connection to a rank, here the same process, and what that finds in its environment."""
    mine, its = connection()
    environment: dict[str, str] = {}
    memory.start(mine, "0 29500")
    await_start(its, environment)
    return mine, environment


class Runs:
    """Attempts of a run in one process, with the supervisor's memory between them."""

    def __init__(self, ds_config: dict[str, Any], stages: int, data_end: int | None, tied: bool) -> None:
        # In fp16 a CPU has no cross-entropy.
        self._model = {"specs": specs, "loss_fn": toy.float_cross_entropy if "fp16" in ds_config else None}
        self._model["seed_layers"] = ds_config["gradient_accumulation_steps"] == 4  # by the count of passes
        if tied:
            self._model = {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}
        self.memory, self._ds_config, self._stages, self._data_end = KeptMemory(), ds_config, stages, data_end
        self.losses: dict[int, str] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.recovered: int | None = None
        self.before: dict[int, list[torch.Tensor]] = {}  # what a script would see when it calls train_batch()
        self.recovered_to: list[torch.Tensor] = []  # and when it has recovered
        self.kept = [0, 0]  # most states and versions
        self.sizes: list[tuple[int, float]] = []  # bytes of an optimizer's state and of weights, and those planned

    @contextmanager
    def engine(self, seed: int) -> Iterator[Any]:
        """A new attempt's engine, which is left with what is in flight."""
        torch.manual_seed(1)
        random.seed(1)
        self._rank, environment = started(self.memory)
        with mock.patch.dict(os.environ, environment):
            engine = cases.engine(self._ds_config, self._stages, **self._model)
        engine.recovery._prefix = "engine 1/"  # it is the first of its process where that is a new one
        self._first = torch.get_rng_state(), random.getstate(), cases.parameters(engine)
        torch.manual_seed(seed)  # from the second on nothing but what was kept may count
        random.seed(seed)
        for parameter in engine.module.parameters():
            parameter.data.add_(seed - 1)
        yield engine
        self.receive()
        cases.end(engine)

    def receive(self) -> None:
        """Take what the rank has handed over."""
        self.memory.receive(self._rank)

    def attempt(self, until: int, seed: int) -> None:
        """Train from a recovery, if there is one, to an update."""
        with self.engine(seed) as engine:
            self._train(engine, until, seed)

    def _train(self, engine: Any, until: int, seed: int) -> None:
        self.recovered = engine.global_steps if engine.recover() else None
        if self.recovered is None:  # the run begins anew, as at first
            torch.set_rng_state(self._first[0])
            random.setstate(self._first[1])
            for name, parameter in engine.module.named_parameters():
                parameter.data.copy_(self._first[2][name if name[0].isdigit() else f"other.{name}"])
        self.recovered_to = self._seen(engine)
        running = [layer for layer in engine.module.forward_funcs if isinstance(layer, Running)]
        iterator = self._data(engine)
        while engine.global_steps < until:
            update = engine.global_steps
            torch.rand(update + engine.stage_id)  # as a script draws between two calls
            for layer in running:
                layer.temperature = torch.tensor(1 + 0.01 * update)
            self.before[update] = self._seen(engine)
            try:
                self.losses[update] = float(engine.train_batch(iterator)).hex()
            except StopIteration:
                iterator = self._data(engine)
                for group in engine.optimizer.param_groups:  # an end of an epoch, which is to come once
                    group["lr"] *= 0.8
                self.receive()
                assert not any(f"/state {update} " in name for name in self.memory._files)
            self.receive()
            depth = engine.depth if engine.vpipe_config.weight_sync == "stash" else engine.pipeline.depths[0]
            assert engine.stashing_optimizer.num_versions <= 1 - (-depth // engine.micro_batches)
            most = kept_states(engine.pipeline, engine.stage_id, engine.vpipe_config.recovery.every)
            kept = [sum(f"/{kind} " in name for name in self.memory._files) for kind in ("state", "weights")]
            self.kept = [max(pair) for pair in zip(self.kept, kept, strict=True)]
            if seed == 1:  # after a restart those of the attempt before are there too, until new ones replace them
                assert all(map(le, kept, most)), (kept, most)
            if update % 5 == 2 and engine.global_steps > update:
                engine.eval_batch(toy.data(10_002, 10_000), num_micro_batches=2)
            if update == 3 and engine.global_steps > update:
                engine.quiesce()
                for layer in running:
                    layer.factor.data.mul_(0.9)
        self.weights = cases.parameters(engine)
        self.weights |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        states = filter(torch.is_tensor, tree_leaves(engine.optimizer.state_dict()))
        self.weights |= {f"state {number}": state.clone() for number, state in enumerate(states)}
        scaling = engine.stage.loss_scaling
        numbers = [engine.skipped_steps, engine.micro_steps, *([] if scaling is None else scaling.state().values())]
        self.weights["seen"] = torch.tensor([layer.seen for layer in running])
        self.weights["numbers"] = torch.tensor(numbers, dtype=torch.float64)
        trained = sum(p.nbytes for p in engine.stage_parameters if p.requires_grad)
        held = optimizer_bytes(DeepSpeedJson(self._ds_config), engine.dp_world_size).held
        self.sizes = [(self._size("state"), float(trained * held)), (self._size("weights"), trained)]

    def _seen(self, engine: Any) -> list[torch.Tensor]:
        """Random state, newest buffers and numbers."""
        running = [layer for layer in engine.module.forward_funcs if isinstance(layer, Running)]
        numbers = [number for layer in running for number in (layer.seen[0], layer.passes)]
        return [torch.get_rng_state(), *map(torch.clone, engine.module.buffers()), torch.tensor(numbers)]

    def _data(self, engine: Any) -> Iterator[Any]:
        done, length, replica = engine.consumed_micro_batches, self._data_end, engine.grid.data_parallel_id
        if length is None:
            return toy.data(None, done, replica)
        epoch, trained = divmod(done, length - length % engine.micro_batches)
        return toy.data((epoch + 1) * length, epoch * length + trained, replica)

    def _size(self, kind: str) -> int:
        """Bytes of an optimizer's tensors in the latest state, or of the latest weights."""
        name = [name for name in self.memory._files if f"/{kind} " in name][-1]
        with os.fdopen(os.dup(self.memory._files[name]), "rb") as file:
            file.seek(0)
            content = torch.load(file, weights_only=False)
        tensors = filter(torch.is_tensor, tree_leaves(content["optimizer"] if kind == "state" else content))
        return sum(
            {storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}.values()
        )

    def lose(self, states: int) -> None:
        """As if this rank had ended before it kept its last states."""
        kept = [name for name in self.memory._files if "/state " in name]  # in the order in which it did
        for name in kept[len(kept) - states :]:
            os.close(self.memory._files.pop(name))


def run(
    ds_config: dict[str, Any],
    stages: int,
    failures: Sequence[tuple[Sequence[int], Sequence[int]]],
    data_end: int | None,
    tied: bool,
) -> Any:
    """An undisturbed run, and some with attempts that end after those updates, the stages' states so many less."""
    whole = Runs(ds_config, stages, data_end, tied)
    whole.attempt(UPDATES, seed=1)
    found = []
    stage = torch.distributed.get_rank() * stages // torch.distributed.get_world_size()
    for ends, lost in failures:
        parts, recovered = Runs(ds_config, stages, data_end, tied), []
        for seed, end in enumerate((*ends, UPDATES), 1):
            with mock.patch.object(recovery.logger, "warning") as warning:
                parts.attempt(end, seed)
            assert not [call for call in warning.call_args_list if "another output" in call.args[0]]
            recovered.append(parts.recovered)
            if parts.recovered is not None:
                assert all(map(torch.equal, parts.recovered_to, whole.before[parts.recovered]))
            if end < UPDATES:
                parts.lose(lost[stage])
        found.append((parts.losses, parts.weights, recovered))
    return whole.losses, whole.weights, whole.sizes, found


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = {
    # stages, M, optimizer, block, other keys, micro-batches of an epoch
    "M=1": (3, 1, SGD, {}, {}, None),
    "M=4": (2, 4, ADAMW, {"recompute_ratio": 0.5}, {"gradient_clipping": 0.5}, None),
    "every third": (3, 1, ADAMW, {"recovery": {"every": 3}}, {}, None),
    "vertical": (3, 2, SGD, {"weight_sync": "vertical"}, {}, None),
    "synchronous": (2, 2, SGD, {"sync_mode": "bsp"}, {}, None),
    "deep": (2, 1, SGD, {"stage_to_depth_map": [5, 0]}, {}, None),
    "host": (2, 2, SGD, {"link": "host"}, {}, None),
    "epochs": (3, 2, ADAMW, {}, {}, 6),
    "epochs, batches left over": (3, 2, SGD, {}, {}, 7),
    "epochs, deep": (2, 2, SGD, {"stage_to_depth_map": [4, 0]}, {}, 7),
    "epochs, synchronous": (2, 2, ADAMW, {"sync_mode": "bsp"}, {}, 7),
    "epochs, one stage": (1, 2, SGD, {}, {}, 6),
    "replicas": (2, 2, ADAMW, {}, {}, None),
    "tied": (3, 1, ADAMW, {}, {}, None),
    "tied, epochs": (3, 2, SGD, {}, {}, 6),
    "tied, vertical": (3, 2, SGD, {"weight_sync": "vertical"}, {}, None),
    "tied, drains": (3, 1, SGD, {"staleness": {"synchronous_updates": 4}}, {}, None),
    "vertical, drains": (3, 2, SGD, {"weight_sync": "vertical", "staleness": {"synchronous_updates": 4}}, {}, None),
    "tied, synchronous": (3, 2, SGD, {"sync_mode": "bsp"}, {}, None),
    "staleness": (
        3, 1, ADAMW, {"staleness": {"nadam": True, "synchronous_updates": 4}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, None,
    ),
    "synchronous, M=1": (3, 1, SGD, {"sync_mode": "bsp"}, {}, None),
}  # fmt: skip
BF16, ZERO_1 = {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}}
WRAPPED: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = {
    "bf16, ZeRO-1": (3, 2, FUSED, {"recompute_ratio": 0.5}, {**BF16, **ZERO_1, "gradient_clipping": 0.5}, None),
    "bf16, ZeRO-1, replicas": (2, 2, ADAMW, {}, {**BF16, **ZERO_1}, 7),
    "bf16, ZeRO-1, adds in fp32": (
        2, 2, ADAMW, {}, {**BF16, **ZERO_1, "data_types": {"grad_accum_dtype": "fp32"}}, None,
    ),
    "tied, bf16, ZeRO-1": (3, 1, SGD, {}, {**BF16, **ZERO_1}, None),
    "bf16, ZeRO-1, offloaded": (
        2, 2, FUSED, {},
        {**BF16, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, None,
    ),
    "fp32, ZeRO-1": (2, 1, ADAMW, {}, ZERO_1, None),
    "bf16": (3, 2, FUSED, {"weight_sync": "vertical"}, BF16, None),
    "fp16": (3, 1, FUSED, {}, FP16, 5),
    "fp16, unfused": (3, 2, ADAMW, {}, FP16, None),
    "fp16, ZeRO-1, replicas": (2, 1, ADAMW, {"stage_to_depth_map": [3, 0]}, {**FP16, **ZERO_1}, None),
    "fp16, synchronous": (2, 2, ADAMW, {"sync_mode": "bsp"}, FP16, None),
}  # fmt: skip
"""Optimizers in wrappers of DeepSpeed's, with master weights and with parts of states."""


@pytest.mark.parametrize("name", WRAPPED)
def test_states_of_wrapped_optimizers(worlds: Worlds, name: str) -> None:
    """With fp16 some updates are skipped, on one stage and not on another, and others know it later."""
    stages, micro_batches, optimizer, block, extra, data_end = WRAPPED[name]
    ds_config = cases.config(
        micro_batches, optimizer, {"partition": "uniform", "recovery": {"every": 1}, **block}, **extra
    )
    ranks, lost = stages * (1 + name.endswith("replicas")), [2, 0, 1][:stages]
    for losses, weights, sizes, [(recovered_losses, recovered_weights, recovered)] in worlds.run(
        ranks, run, ds_config, stages, [([3, 5, 8], lost)], data_end, name.startswith("tied")
    ):
        assert recovered[0] is None
        assert recovered_losses == losses
        assert weights.keys() == recovered_weights.keys()
        assert [key for key in weights if not torch.equal(weights[key], recovered_weights[key])] == []
        assert all(planned <= kept <= 1.02 * planned for kept, planned in sizes), sizes  # more by gaps and counts


def seconds_beside_copies(ds_config: dict[str, Any]) -> float:
    runs = Runs(ds_config, 1, None, tied=False)
    taken = recovery.Recovery._pass_state

    def slow(self: recovery.Recovery) -> Any:
        time.sleep(0.2)
        return taken(self)

    with runs.engine(1) as engine, mock.patch.object(recovery.Recovery, "_pass_state", slow):
        for _ in range(2):
            engine.train_batch(toy.data())
        return float(engine.statistics()[0].forward_s)


def test_what_is_kept_before_a_pass_is_no_part_of_its_seconds(worlds: Worlds) -> None:
    [seconds] = worlds.run(1, seconds_beside_copies, cases.config(1, SGD, {"recovery": {"every": 1}}))
    assert seconds < 0.2


def test_powers_within_another_optimizer() -> None:
    """Muon has DeepSpeed's Adam for what is no matrix, and within a wrapper."""
    fused = FusedAdam([nn.Parameter(torch.ones(1))])
    for optimizer in (fused, Namespace(aux_optimizer=fused)):
        reset = reset_of_powers(Namespace(optimizer=Namespace(optimizer=optimizer), basic_optimizer=None))
        assert isinstance(reset.__self__, FusedAdam)
        assert reset.__self__ is not fused
    assert reset_of_powers(Namespace(optimizer=None, basic_optimizer=Namespace(aux_optimizer=None)))() is None
    with mock.patch("ds_vpipe.engine.updates.optimizers.get_accelerator") as accelerator:
        accelerator().device_name.return_value = "cuda"  # whose kernels take no tensors of the host
        assert reset_of_powers(Namespace(optimizer=None, basic_optimizer=fused))() is None


@pytest.mark.parametrize("name", CASES)
def test_a_recovered_run_is_one_without_a_failure(worlds: Worlds, name: str) -> None:
    stages, micro_batches, optimizer, block, extra, data_end = CASES[name]
    ds_config = cases.config(
        micro_batches, optimizer, {"partition": "uniform", "recovery": {"every": 1}, **block}, **extra
    )
    every = ds_config["vpipe"]["recovery"]["every"]
    apart = 1 if "sync_mode" in block else -(-stages // micro_batches)
    behind, ranks = -(-apart // every), stages * (1 + name.endswith("replicas"))
    failures = [
        ([6, 6, 10], [0, 0, 0]),
        ([5, 9], [behind, 0, 0]),
        ([5, 8], [0, *([1] if stages == 2 else [0, 1])]),
        ([4, 7], [0, 1, 0]),
    ]
    if name not in ("every third", "replicas", "synchronous, M=1"):  # which no other case is like
        failures = failures[list(CASES).index(name) % 4 :: 4]  # in turns: more are drawn at random below
    for losses, weights, _, found in worlds.run(
        ranks, run, ds_config, stages, failures, data_end, name.startswith("tied")
    ):
        for (ends, lost), (recovered_losses, recovered_weights, recovered) in zip(failures, found, strict=True):
            assert recovered[0] is None
            if data_end is None:
                assert recovered[1:] == [((end - 1) // every - max(lost[:stages])) * every for end in ends]
            assert recovered_losses == losses
            assert weights.keys() == recovered_weights.keys()
            assert all(torch.equal(weights[key], recovered_weights[key]) for key in weights)


def most_kept(every: int, micro_batches: int) -> Any:
    ds_config = cases.config(micro_batches, SGD, {"partition": "uniform", "recovery": {"every": every}})
    whole = Runs(ds_config, 3, None, tied=False)
    whole.attempt(20, seed=1)
    return whole.kept


@pytest.mark.parametrize(
    ("every", "micro_batches", "states", "versions"),
    [(1, 1, 5, [7, 6, 5]), (2, 1, 4, [9, 8, 4]), (4, 1, 3, [11, 7, 3]), (1, 2, 4, [5, 5, 4])],
)
def test_states_and_versions_that_are_kept(
    worlds: Worlds, every: int, micro_batches: int, states: int, versions: list[int]
) -> None:
    pipeline = Pipeline("asp", 3, micro_batches)
    kept = worlds.run(3, most_kept, every, micro_batches)
    assert [kept_states(pipeline, stage, every) for stage in range(3)] == [(states, most) for most in versions]
    assert [found[0] for found in kept] == [states] * 3
    assert all(most - 1 <= found[1] <= most for found, most in zip(kept, versions, strict=True))


def drawn(number: int) -> tuple[int, tuple[Any, ...]]:
    """Ranks, and arguments of :func:`run`."""
    draw = random.Random(number)
    stages, micro_batches = draw.choice([1, 2, 2, 3, 3, 4]), draw.randint(1, 5)
    block: dict[str, Any] = {"partition": "uniform", "recovery": {"every": draw.choice([1, 1, 2, 3])}}
    if draw.random() < 0.2:
        block["sync_mode"] = "bsp"
    else:
        block["weight_sync"] = draw.choice(["stash", "stash", "vertical"])
        if draw.random() < 0.5:
            block["stage_to_depth_map"] = [*sorted((draw.randint(0, 7) for _ in range(stages - 1)), reverse=True), 0]
        if draw.random() < 0.3:
            block["staleness"] = {"synchronous_updates": draw.randint(1, 6)}
    block |= {"recompute_ratio": draw.choice([0, 0, 0.5]), "link": draw.choice(["auto", "auto", "host"])}
    data_end = draw.choice([None, draw.randint(micro_batches, 6 * micro_batches + 3)])
    ends = sorted(draw.sample(range(1, UPDATES), draw.randint(1, 3)))
    lost = [0] * stages
    lost[draw.randrange(stages)] = draw.randint(0, 1)
    tied = stages > 1 and draw.random() < 0.4
    optimizer, extra = draw.choice([SGD, ADAMW]), {"gradient_clipping": draw.choice([0.0, 0.5])}
    ranks = stages * draw.choice([1, 1, 1, 2 if stages < 3 else 1])
    extra |= draw.choice([{}, {}, BF16 | ZERO_1, BF16 | ZERO_1, BF16, FP16, FP16 | ZERO_1, ZERO_1])
    ds_config = cases.config(micro_batches, optimizer, block, **extra)
    return ranks, (ds_config, stages, [(ends, lost)], data_end, tied)


@pytest.mark.parametrize("number", range(RANDOM_FIRST, RANDOM_FIRST + RANDOM_RUNS))
def test_recoveries_drawn_at_random(worlds: Worlds, number: int) -> None:
    ranks, arguments = drawn(number)
    for losses, weights, _, [(recovered_losses, recovered_weights, recovered)] in worlds.run(ranks, run, *arguments):
        assert recovered_losses == losses, (arguments, recovered)
        assert all(torch.equal(weights[key], recovered_weights[key]) for key in weights), (arguments, recovered)


def refusals() -> list[str]:
    (_supervisor, environment), said = started(KeptMemory()), []
    ds_config = cases.config(2, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    with pytest.raises(VPipeConfigError) as refusal:
        cases.engine(ds_config, 2)
    said.append(str(refusal.value))
    with mock.patch.dict(os.environ, environment):
        engine = cases.engine(ds_config, 2)
        with pytest.raises(VPipeConfigError) as refusal:
            loops.engine(cases.config(2, SGD, ds_config["vpipe"]), 2)
    said.append(str(refusal.value))
    # As if initialize() had been given training_data, which begins anew in a new process.
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(engine, "training_dataloader", object()),
        pytest.raises(VPipeConfigError) as refusal,
    ):
        recovery_of(engine, engine.stage, 1)
    said.append(str(refusal.value))
    assert not engine.recover()
    engine.train_batch(toy.data())
    for kind, call in (
        (VPipeConfigError, lambda: engine.move_layer(Move(4, 0, 1, 6))),
        (VPipeConfigError, lambda: engine.repartition([4, 6])),
        (VPipeError, engine.recover),
    ):
        with pytest.raises(kind) as refusal:
            call()
        said.append(str(refusal.value))
    engine.destroy()
    return said


def test_what_is_not_recovered_is_refused(worlds: Worlds) -> None:
    for said in worlds.run(2, refusals):
        assert said == [
            "vpipe.recovery.every: got 1; nothing outlives this rank; allowed: 0 here; start with "
            "ds_vpipe.run --restarts N, or write 0",
            "vpipe.recovery.every: got 1; the module is called micro-batch by micro-batch; allowed: 0 here; write 0, "
            "or call train_batch()",
            "vpipe.recovery.every: got 1; training_data would begin anew; allowed: 0 here; pass an iterator to "
            "train_batch(), or write 0",
            'move_layer(): got "layer 4 from stage 0 to 1 at micro-batch 6"; states are those of one split; '
            "allowed: no such call next to vpipe.recovery; remove one of the two",
            "repartition(): got [4, 6]; states are those of one split; allowed: no such call next to vpipe.recovery; "
            "remove one of the two",
            "recover(): got an engine whose count of updates is 1, allowed is 0; call it before train_batch() and "
            "load_checkpoint()",
        ]


class Codebook(nn.Linear):
    """Layer whose forward passes change a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        self.code = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.code.data.mul_(0.99)
        return super().forward(x) * self.code


def codebook_specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    layers = toy.layer_specs()
    return [*layers[:2], LayerSpec(Codebook), *layers[2:]]


def changed_by_passes() -> str:
    runs = Runs(cases.config(1, SGD, {"partition": "uniform", "recovery": {"every": 1}}), 2, None, tied=False)
    runs._model = {"specs": codebook_specs}
    runs.attempt(4, seed=1)
    with pytest.raises(VPipeError) as refusal:
        runs.attempt(6, seed=2)
    return str(refusal.value)


def test_frozen_parameters_that_passes_change_end_a_recovery(worlds: Worlds) -> None:
    for line in worlds.run(2, changed_by_passes):
        assert "got layers whose forward passes change parameters that are not trained" in line


class Listed(nn.Linear):
    """Layer whose outputs depend on a list that no state has."""

    def __init__(self) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        self.passes = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes[0] += 1
        return super().forward(x) + self.passes[0]


def listed_specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    layers = toy.layer_specs()
    return [*layers[:2], LayerSpec(Listed), *layers[2:]]


def other_outputs() -> list[list[str]]:
    """Warnings of a recovery with such a layer, and of one with other data."""
    found, data = [], toy.data
    for specs, later in ((listed_specs, data), (toy.layer_specs, lambda *_: data(None, 1000))):
        runs = Runs(cases.config(1, SGD, {"partition": "uniform", "recovery": {"every": 1}}), 3, None, tied=False)
        runs._model = {"specs": specs}
        runs.attempt(4, seed=1)
        with mock.patch.object(recovery.logger, "warning") as warning, mock.patch("toy.data", later):
            runs.attempt(6, seed=2)
        found.append([call.args[0] for call in warning.call_args_list if "another output" in call.args[0]])
    return found


def test_passes_that_give_another_output_when_they_run_again_are_warned_of(worlds: Worlds) -> None:
    for number, said in enumerate(worlds.run(3, other_outputs)):
        for lines in said:  # the last stage has no pass that runs again
            assert len(lines) == (number < 2)
            assert all(f"on stage {number} (rank {number}) F3 gave another output" in line for line in lines), lines


class Counted:
    """Iterator that knows how often it was asked."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items, self.asked = items, 0

    def __next__(self) -> Any:
        self.asked += 1
        return next(self.items)


def asked_after_a_recovery() -> int:
    """How often a stage has asked its iterator in the first call after a recovery."""
    data, ds_config = toy.data, cases.config(1, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    runs = Runs(ds_config, 3, None, tied=False)
    runs.attempt(7, seed=1)
    counted: list[Counted] = []
    with mock.patch("toy.data", lambda *args: counted.append(Counted(data(*args))) or counted[-1]):
        runs.attempt(7, seed=2)
    return counted[0].asked


def test_first_and_last_stage_read_as_far_after_a_recovery(worlds: Worlds) -> None:
    first, _, last = worlds.run(3, asked_after_a_recovery)
    assert first == last == 3


def test_sums_of_outputs() -> None:
    """Of views of every kind; equal values have equal sums."""
    values = torch.arange(600.0).view(2, 3, 100)
    for one in (values[:, :, 1:].transpose(1, 2), values[:, :, 1:], values.bfloat16()[..., 3:], values > 5):
        assert recovery._sum(one) == recovery._sum(one.clone(memory_format=torch.contiguous_format))
        assert recovery._sum(one) != recovery._sum(one.flip(0))
    complex_values = torch.complex(values, -values)
    assert recovery._sum(complex_values.conj()) == recovery._sum(torch.complex(values, values))
    assert recovery._sum(complex_values.conj().imag) == recovery._sum(values)
    assert isinstance(recovery._sum(torch.zeros(0)) + recovery._sum(torch.tensor(1.0)), int)


def train_on(engine: Any, iterator: Iterator[Any]) -> None:
    for _ in range(3):
        engine.train_batch(iterator)


def without_memory() -> list[str]:
    """No memory is left for the state of one stage; then a data end before every batch."""
    runs, said = Runs(cases.config(2, SGD, {"partition": "uniform", "recovery": {"every": 1}}), 2, None, tied=False), []
    with runs.engine(1) as engine:
        iterator = toy.data()
        engine.train_batch(iterator)
        full = mock.patch("os.memfd_create", side_effect=OSError(28, "No space left on device"))
        with full if engine.stage_id == 1 else nullcontext(), pytest.raises(VPipeError) as refusal:
            train_on(engine, iterator)
        said.append(str(refusal.value))
    with runs.engine(1) as engine, mock.patch.object(recovery.logger, "warning") as warning:
        for number in range(5):
            engine.train_batch(toy.data(2 * number + 2, 2 * number))
            runs.receive()
        said += [call.args[0] for call in warning.call_args_list if "recovery" in call.args[0]]
    return said


def test_what_cannot_be_kept_is_said(worlds: Worlds) -> None:
    first, second = worlds.run(2, without_memory)
    line = "vpipe.recovery.every: got 1, but stage 1 (rank 1) could not keep its state of update 1 ([Errno 28] No space"
    assert second[0].startswith(line)
    assert line in first[0]
    assert first[1].startswith("ds_vpipe: recovery: 3 states in a row have not been kept, because data ended there")
    assert len(first) == 2
    assert len(second) == 1


def other_sizes() -> list[int | None]:
    ds_config = cases.config(2, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    runs = Runs(ds_config, 2, None, tied=False)
    runs.attempt(3, seed=1)
    found = []
    bf16, fp32 = BF16 | ZERO_1, {"bf16": {"enabled": False}}
    for seed, changed in enumerate(({"gradient_accumulation_steps": 4}, {"optimizer": ADAMW}, bf16, fp32, {}), 2):
        ds_config |= changed
        runs.attempt(seed + 2, seed)
        found.append(runs.recovered)
    return found


def test_states_of_other_sizes_are_not_taken(worlds: Worlds) -> None:
    assert worlds.run(2, other_sizes) == 2 * [[None, None, None, None, 6]]


def larger_batches(runs: Runs, engine: Any, iterator: Iterator[Any], kept: int) -> list[str]:
    """Losses after the pipeline has been emptied, where so many states are kept, and again for larger batches."""
    torch.rand(1)  # as before every batch
    engine.quiesce()
    runs.receive()
    losses = [float(engine.train_batch(iterator)).hex() for _ in range(3)]
    runs.receive()
    assert sum("/state 4 " in name for name in runs.memory._files) == kept
    engine.set_train_batch_size(2 * engine.train_batch_size())
    for _ in range(6):
        losses.append(float(engine.train_batch(iterator)).hex())
        assert engine.stashing_optimizer.num_versions <= 1 - (-engine.depth // 2)
    return losses


def go_back(engine: Any, folder: str, updates: int) -> Iterator[Any]:
    """Train, go back to a checkpoint after three updates, and make some more; the data that follow."""
    iterator = toy.data()
    for update in range(9):
        engine.train_batch(iterator)
        if update == 2:
            engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    iterator = toy.data(None, 3)
    for _ in range(updates):
        torch.rand(1)
        engine.train_batch(iterator)
    return iterator


def from_elsewhere(folder: str) -> list[Any]:
    """Go back to a checkpoint, fail, recover, and take larger batches from then on; the same without the failure."""
    ds_config = cases.config(1, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    runs, found = Runs(ds_config, 3, None, tied=False), []
    with runs.engine(1) as engine:
        iterator = go_back(engine, folder, 0)
        runs.receive()
        found.append(len(runs.memory._files))
        for _ in range(2):
            torch.rand(1)
            engine.train_batch(iterator)
    with runs.engine(2) as engine:
        found += [engine.recover(), engine.global_steps]
        losses = larger_batches(runs, engine, toy.data(None, engine.consumed_micro_batches), kept=2)
    runs = Runs(ds_config, 3, None, tied=False)
    with runs.engine(1) as engine:
        found.append(larger_batches(runs, engine, go_back(engine, folder, 1), kept=1) == losses)
    return found


def test_a_checkpoint_that_was_loaded_counts(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(3, from_elsewhere, str(tmp_path)) == 3 * [[0, True, 4, True]]


def frozen_since() -> tuple[bool, list[str]]:
    """A script that trains less after a failure: whether it recovers, and what it is told."""
    ds_config = cases.config(1, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    runs = Runs(ds_config, 2, None, tied=False)
    with runs.engine(1) as engine:
        iterator = toy.data()
        for _ in range(3):
            engine.train_batch(iterator)
    with runs.engine(2) as engine, mock.patch.object(recovery.logger, "warning") as warning:
        if engine.stage_id == 1:
            engine.module.forward_funcs[-1].requires_grad_(False)
        recovered = engine.recover()
    return recovered, [call.args[0] for call in warning.call_args_list]


def test_states_of_other_parameters_do_not_fit(worlds: Worlds) -> None:
    (first, said), other = worlds.run(2, frozen_since)
    assert not first
    assert other == (False, [])
    assert len(said) == 1
    assert "no state fits, that of update 2 had other parameters" in said[0]


def late_at_an_end() -> int | None:
    """The second stage ends in the call in which the data end, when the first has begun the next."""
    ds_config = cases.config(2, SGD, {"partition": "uniform", "recovery": {"every": 1}, "sync_mode": "bsp"})
    runs = Runs(ds_config, 2, None, tied=False)
    with runs.engine(1) as engine:
        iterator = toy.data(6)
        for _ in range(3):
            engine.train_batch(iterator)
        if engine.stage_id == 1:
            engine.recovery.withdraw = runs.receive
        with pytest.raises(StopIteration):
            engine.train_batch(iterator)
        kept = {name: os.dup(file) for name, file in runs.memory._files.items()}
        engine.train_batch(toy.data(None, 6))
    if engine.stage_id == 1:
        runs.memory._files = kept
    with runs.engine(2) as engine:
        return engine.global_steps if engine.recover() else None


def test_states_before_and_after_an_end_of_data_are_not_mixed(worlds: Worlds) -> None:
    assert worlds.run(2, late_at_an_end) == [2, 2]


def iterators_that_are_left() -> tuple[Any, ...]:
    """An iterator for every epoch, in which the script asks for no more batches than there are."""
    ds_config = cases.config(2, SGD, {"partition": "uniform", "recovery": {"every": 1}})
    whole, parts, recovered = Runs(ds_config, 2, None, tied=False), Runs(ds_config, 2, None, tied=False), []
    for runs, ends in ((whole, (9,)), (parts, (3, 5, 7, 9))):
        for seed, end in enumerate(ends, 1):
            with runs.engine(seed) as engine:
                recovered.append(engine.recover() and engine.global_steps)
                iterator = None
                while engine.global_steps < end:
                    update, done = engine.global_steps, engine.consumed_micro_batches
                    if update % 3 == 0 or iterator is None:
                        iterator = toy.data(done - done % 6 + 6, done)
                    runs.losses[update] = float(engine.train_batch(iterator)).hex()
                    runs.receive()
    return whole.losses, parts.losses, recovered


def test_iterators_that_are_left_before_they_have_ended(worlds: Worlds) -> None:
    for whole, parts, recovered in worlds.run(2, iterators_that_are_left):
        assert whole == parts
        assert recovered == [False, False, 2, 4, 5]  # none of update 6, at which an iterator ends
