"""Split models in the engine: two stages train as the whole model does, and save its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cases
import deepspeed
import pytest
import torch
from split_models import CASES, GRAPHS, LAYOUT_INPUT, Layouts, Noted, bert, built, gpt2, pass_through, tokens
from test_exactness import OPTIMIZERS, adamw, difference
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from worlds import CaseFailed, Worlds

import ds_vpipe
from ds_vpipe import export
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine.build import prepare
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.modules.recompute import layer_numbers
from ds_vpipe.engine.modules.split_module import SplitModule, stages_in
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.initialization import deepspeed_initialize
from ds_vpipe.splitting.split import split_in_process

UPDATES = 5
ADAMW = OPTIMIZERS["AdamW"][0]
BF16 = {"extra": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}}


def model(kind: str, tied: bool) -> nn.Module:
    return GRAPHS[kind][0]() if kind in GRAPHS else bert(tie_word_embeddings=tied)


def call(kind: str, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kind in GRAPHS:
        generator = torch.Generator().manual_seed(index)
        return (torch.randn(3, 12, generator=generator),), {"y": tokens(index, 5, (3,), 0)}
    kwargs = CASES["BertForPreTraining"][2]
    return (), {**kwargs, "input_ids": tokens(100 + index), "labels": tokens(200 + index)}


def train(kind: str, tied: bool, partition: Any, settings: dict[str, Any], folder: str | None, meta: bool) -> Any:
    if meta:
        with torch.device("meta"):
            whole = model(kind, tied)
    else:
        whole = model(kind, tied)
    split = SplitModule(split_in_process(whole, 2, call(kind, 0) if kind in GRAPHS else None), 2, "uniform")
    extra = settings.pop("extra", {})
    ds_config = cases.config(1, ADAMW, {"partition": partition, **settings}, **extra)
    ds_config["train_micro_batch_size_per_gpu"] = 3
    # initialize() gives the engine for loops; the pieces have to work in the other one as well.
    prepared = prepare(split, DeepSpeedJson(ds_config), VPipeConfig.parse(ds_config["vpipe"]), None, None)
    given = {"model": split, "model_parameters": prepared.model_parameters, "config": ds_config}
    with patch.object(deepspeed, "PipelineEngine", partial(VPipeEngine, prepared=prepared)):
        engine = deepspeed_initialize()(**given)[0]
    held = sum(p.numel() for p in engine.module.parameters()), any(p.is_meta for p in split.user_module.parameters())
    if folder is not None and meta:
        engine.load_checkpoint(folder)

    split.stage_model.pack(*call(kind, 0))  # a rank that reads no data has to know the form of the calls too

    def data() -> Iterator[Any]:
        index = 0
        while True:
            yield split.stage_model.pack(*call(kind, index)), ()
            index += 1

    iterator = data()
    losses = [] if meta else [float(engine.train_batch(iterator)) for _ in range(UPDATES)]
    if folder is not None and not meta:
        engine.save_checkpoint(folder)
    found = {name: p.detach().clone() for name, p in split.user_module.named_parameters(remove_duplicate=False)}
    engine.destroy()
    return {"parameters": found, "losses": losses, "held": held}


def whole_run(kind: str, tied: bool, depths: dict[str, int] | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """The whole model in one process; ``depths`` says how many updates old each parameter is that a pass uses."""
    net = model(kind, tied)
    names = dict(net.named_parameters())
    optimizer = adamw(list(names.values()))
    versions = [{n: p.detach().clone() for n, p in names.items()}]
    losses = []
    for index in range(UPDATES):
        for name, parameter in names.items():
            delay = (depths or {}).get(name, 0)
            parameter.data = versions[max(0, index - delay)][name].clone()
        args, kwargs = call(kind, index)
        output = net(*args, **kwargs)
        optimizer.zero_grad()
        output["loss"].backward()
        losses.append(output["loss"].item())
        for name, parameter in names.items():
            parameter.data = versions[-1][name].clone()
            if parameter.grad is None:  # as DeepSpeed does, for its reduction over replicas
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        versions.append({n: p.detach().clone() for n, p in names.items()})
    return dict(net.state_dict()), losses


def merged(ranks: list[Any]) -> dict[str, Tensor]:
    return {name: value for rank in ranks for name, value in rank["parameters"].items()}


@pytest.mark.mp
@pytest.mark.parametrize(("kind", "tied", "ratio"), [("bert", True, 0.5), ("perceptron", False, 0)])
def test_synchronous_training_is_the_whole_models(
    worlds: Worlds, tmp_path: Path, kind: str, tied: bool, ratio: float
) -> None:
    partition = [2, 3] if kind in GRAPHS else [2, 4]
    settings = {"sync_mode": "bsp", "recompute_ratio": ratio}
    ranks = worlds.run(2, train, kind, tied, partition, settings, str(tmp_path), False)
    wanted, losses = whole_run(kind, tied)
    found = merged(ranks)
    assert found.keys() <= wanted.keys()
    assert difference(found, {name: wanted[name] for name in found}) <= 1e-5
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-5)
    saved: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("*/layer_*-model_states.pt")):
        saved |= torch.load(file, weights_only=True)
    assert saved.keys() == wanted.keys()
    assert difference(saved, wanted) <= 1e-5
    everything = sum(p.numel() for p in model(kind, tied).parameters())
    assert all(rank["held"][0] < everything for rank in ranks)
    if kind == "bert":  # a model that never had values takes them from the checkpoint
        again = worlds.run(2, train, kind, tied, partition, settings, str(tmp_path), True)
        assert difference(merged(again), found) == 0
        assert [rank["held"] for rank in again] == [(rank["held"][0], False) for rank in ranks]


def strides_seen(sync_mode: str, way: str) -> tuple[list[Any], list[Any]]:
    """Strides of this stage's values and their gradients, in the last of two rounds."""
    import ds_vpipe

    settings = {"partition": [2, 2, 2], "sync_mode": sync_mode, "recompute_ratio": 0.5}
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], settings, pipeline={"stages": 3})
    engine = ds_vpipe.initialize(model=built(lambda: Layouts(way)), config=ds_config)[0]
    for _ in range(2):
        engine.backward(engine(LAYOUT_INPUT))
        engine.step()
    engine.drain()
    engine.destroy()
    count = (1, 2, 1)[engine.stage_id]
    return Noted.values[-count:], Noted.gradients[-count:]


@pytest.mark.mp
@pytest.mark.parametrize(("sync_mode", "way"), [("bsp", "gaps"), ("asp", "transposed"), ("asp", "expanded")])
def test_values_and_gradients_keep_their_strides(worlds: Worlds, sync_mode: str, way: str) -> None:
    Noted.values.clear()
    Noted.gradients.clear()
    pass_through(built(lambda: Layouts(way)), (LAYOUT_INPUT,), {})
    values, gradients = Noted.values, Noted.gradients[::-1]
    ranks = worlds.run(3, strides_seen, sync_mode, way)
    assert [rank[0] for rank in ranks] == [values[:1], values[1:3], values[3:]]
    assert [rank[1][::-1] for rank in ranks] == [gradients[:1], gradients[1:3], gradients[3:]]


@pytest.mark.mp
def test_two_parts_on_every_stage(worlds: Worlds) -> None:
    settings = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2, "extra": {}}
    ranks = worlds.run(2, train, "bert", True, [1, 2, 1, 2], settings, None, False)
    wanted, losses = whole_run("bert", True)
    assert "bert.encoder.layer.2.output.dense.weight" in ranks[0]["parameters"]
    assert difference(merged(ranks), {name: wanted[name] for name in merged(ranks)}) <= 1e-5
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.mp
def test_asynchronous_training_uses_the_versions_of_the_schedule(worlds: Worlds) -> None:
    ranks = worlds.run(2, train, "bert", False, [3, 3], {}, None, False)
    first_stage = dict.fromkeys(ranks[0]["parameters"], 1)
    wanted, losses = whole_run("bert", False, first_stage)
    assert difference(merged(ranks), {name: wanted[name] for name in merged(ranks)}) <= 1e-5
    assert ranks[1]["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.mp
def test_bf16_with_zero_1(worlds: Worlds, tmp_path: Path) -> None:
    """Tied weights, asynchronously; what is absent has the type of what is there, or masks would not fit. The
    checkpoint becomes one file that the model loads as it loads its own."""
    ranks = worlds.run(2, train, "bert", True, "type:BertLayer", BF16, str(tmp_path), False)
    output = tmp_path / "model.pt"
    assert export.main([str(tmp_path), str(output)]) == 0
    exported = torch.load(output)
    assert {value.dtype for value in exported.values() if value.is_floating_point()} == {torch.float32}
    first, again = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert exported[first].data_ptr() == exported[again].data_ptr()
    whole = model("bert", True)
    whole.load_state_dict(exported)
    for name, value in merged(ranks).items():
        assert torch.equal(whole.state_dict()[name].bfloat16(), value), name
    assert export.main([str(tmp_path), str(output), "--names", "layers"]) == 0
    assert f"0.{first}" in torch.load(output)
    assert {value.dtype for value in merged(ranks).values()} == {torch.bfloat16}
    _, losses = whole_run("bert", True)
    assert ranks[0]["losses"] == pytest.approx(losses, rel=0.1)


class CountingBlock(nn.Module):
    """A block that counts its calls in an attribute and in a buffer, which its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("steps", torch.zeros(2048))  # larger than what is always copied

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        return x + torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls + 0.01 * self.steps[0])


class Counting(nn.Module):
    """Counts in the model, with ``late`` in what only a call makes an attribute of its own, and in its blocks."""

    calls = 0

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.calls = nn.Embedding(83, 8), nn.Linear(8, 3), 0
        self.blocks = nn.ModuleList([CountingBlock() for _ in range(4)])
        if late:
            del vars(self)["calls"]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels) * (1 + 0.1 * self.calls)


def counted_call(index: int) -> tuple[Tensor, Tensor]:
    return tokens(index), tokens(100 + index, 3, (3,), 0)


class KeepingBlock(nn.Module):
    """Keeps one entry of each call in a list, a dict, a set, an object and a tensor, and computes with them."""

    class Kept:
        calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), KeepingBlock.Kept()
        self.seen, self.by, self.some = list[float](), {"calls": 0}, set[int]()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0.5)
        self.by["calls"] += 1
        self.some.add(len(self.seen))
        self.kept.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        count = len(self.seen) + self.by["calls"] + max(self.some) + self.kept.calls
        return x + torch.tanh(self.linear(x + self.mean)) * (1 + 0.02 * count)


class Keeping(nn.Module):
    """Its third block, and the others with ``all_blocks``, keep something of every call."""

    def __init__(self, all_blocks: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(83, 8), nn.Linear(8, 3)
        keeps = (all_blocks, all_blocks, True, all_blocks)
        self.blocks = nn.ModuleList([KeepingBlock() if keep else CountingBlock() for keep in keeps])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


COUNTED: dict[str, dict[str, Any]] = {
    "half recomputed": {"recompute_ratio": 0.5},
    "half swapped": {"swap_ratio": 0.5},
    "interval": {"interval": 1},
    "moved": {"moves": {2: [2, 4], 4: [4, 2]}},
}


KEPT = {"half swapped": True, "half recomputed": False}
"""Whether all blocks keep something: what runs again keeps it once more."""


def counted(make: Callable[..., nn.Module], ways: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Losses and weights of a model that counts, by way in which its pieces are run, with arguments to make it."""
    found = {}
    for way, arguments in ways.items():
        given = COUNTED[way]
        settings = {"partition": [3, 3], "sync_mode": "bsp", **given}
        moves, interval = settings.pop("moves", {}), settings.pop("interval", 0)
        pipeline = {"stages": 2, "activation_checkpoint_interval": interval}
        ds_config = cases.config(2, OPTIMIZERS["SGD"][0], settings, pipeline=pipeline)
        ds_config["train_micro_batch_size_per_gpu"] = 3
        engine = ds_vpipe.initialize(model=built(partial(make, *arguments)), config=ds_config)[0]
        losses = []
        for index in range(6):
            if index in moves:
                engine.repartition(moves[index])
            losses.append(loss := engine(*counted_call(index)))
            engine.backward(loss)
            engine.step()
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        found[way] = [float(loss.detach()) for loss in losses], state
        cases.end(engine)
    return found


@pytest.mark.mp
@pytest.mark.parametrize("late", [False, True])
def test_what_a_stage_runs_in_portions_or_gets_counts_each_micro_batch_once(worlds: Worlds, late: bool) -> None:
    ways: dict[str, tuple[Any, ...]] = dict.fromkeys(COUNTED, (late,))
    losses, state = counted_whole(built(partial(Counting, late)))
    for report in worlds.run(2, counted, Counting, ways):
        assert_alike(report, dict.fromkeys(ways, (losses, state)))


@pytest.mark.mp
def test_what_blocks_keep_of_each_call_they_keep_once_where_a_stage_runs_in_portions(worlds: Worlds) -> None:
    ways: dict[str, tuple[Any, ...]] = {way: (keep,) for way, keep in KEPT.items()}
    wanted = {way: counted_whole(built(partial(Keeping, keep))) for way, keep in KEPT.items()}
    for report in worlds.run(2, counted, Keeping, ways):
        assert_alike(report, wanted)


def keeping_much() -> nn.Module:
    net = Keeping(False)
    net.blocks[2].seen = [0.5] * 1001
    return net


@pytest.mark.mp
def test_blocks_that_keep_too_much_to_put_it_back_are_refused_in_one_line(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, counted, keeping_much, {"half recomputed": ()})
    line = "SplitError: blocks.2.seen: changes in every call and has more than 1,000 entries, allowed are fewer where"
    assert failed.value.errors[1].startswith(line)
    assert "\n" not in failed.value.errors[1]


def counted_whole(net: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a model that one process trains."""
    optimizer = OPTIMIZERS["SGD"][1](list(net.parameters()))
    wanted = []
    for index in range(6):
        loss = net(*counted_call(index))
        wanted.append(float(loss.detach()))
        (loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return wanted, net.state_dict()


def assert_alike(report: dict[str, Any], wanted: dict[str, tuple[list[float], dict[str, Tensor]]]) -> None:
    for way, (losses, state) in report.items():
        assert losses == pytest.approx(wanted[way][0], abs=1e-5), way
        assert difference(state, wanted[way][1]) <= 1e-5, way


def test_number_of_stages() -> None:
    assert stages_in({"pipeline": {"stages": 4}}, [1, 1]) == 4
    assert stages_in({}, [3, 2, 1]) == 3
    assert stages_in({}, [3, 2, 1, 1], 2) == 2
    for ds_config in ({}, {"pipeline": {"stages": 0}}, {"pipeline": {"stages": True}}):
        with pytest.raises(VPipeConfigError, match=r'pipeline\.stages.*write "pipeline": {"stages": 4}'):
            stages_in(ds_config, "uniform")


def test_layer_numbers_are_not_looked_up_in_the_users_model() -> None:
    """Attributes that the module itself has not are the user's model's, which may have any name."""
    split: Any = SplitModule.__new__(SplitModule)
    nn.Module.__init__(split)
    split.__dict__["stage_model"] = SimpleNamespace(model=SimpleNamespace(numbers=7))
    split._local_start, split.forward_funcs = 2, [print, print]
    assert split.numbers == 7
    assert list(layer_numbers(split)) == [2, 3]


def test_compiled_models_are_refused() -> None:
    with pytest.raises(VPipeConfigError, match=r"torch\.compile"):
        ds_vpipe.initialize(
            model=torch.compile(bert()), config={**cases.config(1, ADAMW, {}), "pipeline": {"stages": 2}}
        )


def generated(samples: bool) -> tuple[list[int], list[int]]:
    """Tokens of the whole model and of the pipeline."""
    found = []
    for model in (gpt2(), gpt2()):
        if found:
            config = {**cases.config(1, ADAMW, {}), "pipeline": {"stages": 2}}
            engine = ds_vpipe.initialize(model=model, config=config)[0]
        torch.manual_seed(3)
        options = {"use_cache": False} if found else {}
        prompt = tokens(1, 50, (2, 4), 1)
        found.append(
            model.eval().generate(prompt, max_new_tokens=5, do_sample=samples, pad_token_id=0, **options).tolist()
        )
    cases.end(engine)
    return found[0], found[1]


@pytest.mark.mp
@pytest.mark.parametrize("samples", [True, False])
def test_a_split_model_generates_as_the_whole_one(worlds: Worlds, samples: bool) -> None:
    for wanted, found in worlds.run(2, generated, samples):
        assert found == wanted


def with_divided_parameters(kind: str) -> str:
    """What a script is told whose model has parts of its parameters on each rank."""
    linear = patch.object(nn.functional, "linear", nn.functional.linear)  # zero.Init() leaves its own there
    with linear, deepspeed.zero.Init(enabled=kind == "zero.Init"):
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "fully_shard":
        model = fully_shard(model)
    elif kind == "FullyShardedDataParallel":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(VPipeConfigError) as refused:
        ds_vpipe.initialize(model=model, config={**cases.config(1, ADAMW, {}), "pipeline": {"stages": 2}})
    return str(refused.value)


@pytest.mark.mp
@pytest.mark.parametrize("kind", ["zero.Init", "fully_shard", "FullyShardedDataParallel"])
def test_models_whose_parameters_are_divided_are_refused(worlds: Worlds, kind: str) -> None:
    lines = worlds.run(2, with_divided_parameters, kind)
    assert all("that is divided among ranks, as by deepspeed.zero.Init() or FSDP" in line for line in lines), lines


def test_a_grid_of_the_scripts_own_is_refused() -> None:
    with pytest.raises(VPipeConfigError, match=r"^initialize\(mpu\): got a SimpleNamespace, allowed .* ask engine.mpu"):
        ds_vpipe.initialize(model=nn.Linear(2, 2), config=cases.config(1, ADAMW, {}), mpu=SimpleNamespace())
