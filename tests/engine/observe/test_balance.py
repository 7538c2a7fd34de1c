"""A pipeline that measures its layers and balances itself while it trains."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.engine.modules.piece_module import TIMED
from ds_vpipe.engine.observe.layer_costs import LayerCosts
from ds_vpipe.engine.observe.layer_probe import LayerProbe
from ds_vpipe.errors import VPipeError

pytestmark = pytest.mark.mp

PART_S = 0.003  # a layer's forward pass; its backward pass takes twice as long
WIDTH, LAYERS = 8, 8
ADAMW = OPTIMIZERS["AdamW"][0]


@dataclass
class Device:
    slowness: float = 1.0


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.device = device
        time.sleep(PART_S * device.slowness)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * PART_S * ctx.device.slowness)
        return gradients[0], None


class Sleepy(nn.Module):
    def __init__(self, seed: int, device: Device) -> None:
        super().__init__()
        self.linear = toy.seeded(seed, lambda: nn.Linear(WIDTH, WIDTH))
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x + torch.tanh(self.linear(x)), self.device)


def sleepy(device: Device) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(Sleepy, 100 + number, device) for number in range(LAYERS)]


def micro_batches() -> Any:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


def balanced(
    block: dict[str, Any],
    stages: int,
    updates: int,
    slower_at: int | None = None,
    slow_stage: int = 0,
    frozen_at: int | None = None,
) -> dict[str, Any]:
    """Train from a bad split; the decisions, the splits, the seconds of layers, and the weights in the end."""
    device = Device()
    profile: Any = ()
    ds_config = cases.config(2, ADAMW, {"partition": [LAYERS - stages + 1] + [1] * (stages - 1), **block})
    engine = cases.engine(ds_config, stages, loss_fn=nn.MSELoss(), specs=lambda: sleepy(device))
    iterator, losses, splits, layers, said = micro_batches(), [], [], [], io.StringIO()
    for update in range(updates):
        if update == slower_at and engine.stage_id == slow_stage:
            device.slowness = 3.0
        if update == frozen_at:
            for number, layer in enumerate(engine.module.forward_funcs, engine.module._local_start):
                layer.requires_grad_(number >= LAYERS // 2)
        with contextlib.redirect_stdout(said):
            losses.append(float(engine.train_batch(iterator)))
        splits.append([stop - start for start, stop in pairwise(engine.module.parts)])
        if not layers and engine.balance is not None and engine.balance.decisions:
            profile = engine.balance._known.profile.layers
            layers = [(one.forward_s, one.backward_s) for one in profile]
    result = {
        "losses": losses,
        "splits": splits,
        "layers": layers,
        "profile": profile,
        "parameters": cases.parameters(engine),
        "decisions": [] if engine.balance is None else engine.balance.decisions,
        "moves": [] if engine.balance is None else engine.balance.moves,
        "said": said.getvalue().splitlines(),
    }
    cases.end(engine)
    return result


def arms(blocks: list[dict[str, Any]], stages: int, updates: int, **options: Any) -> list[dict[str, Any]]:
    return [balanced(block, stages, updates, **options) for block in blocks]


def test_a_bad_split_is_mended_and_a_slow_stage_relieved(worlds: Worlds) -> None:
    block = {"replan": {"every": 4, "threshold": 0.1}}
    first, second = worlds.run(2, balanced, block, 2, 24, slower_at=10)
    assert first["decisions"] == second["decisions"]  # every number of them
    assert first["splits"] == second["splits"]
    assert first["splits"][0] == [7, 1]
    assert first["splits"][9][0] in (3, 4, 5)  # the machine may be busy
    assert first["splits"][-1][0] < first["splits"][9][0]
    assert [move["after_s"] is None for move in first["moves"]][:-1] == [False] * (len(first["moves"]) - 1)
    assert first["moves"][0]["after_s"] < first["moves"][0]["before_s"]
    for forward, backward in first["layers"]:  # the second stage waits most of the time, which does not count
        assert PART_S < forward < 3 * PART_S
        assert 2 * PART_S < backward < 5 * PART_S


def test_layers_that_are_frozen_go_to_the_stage_with_more_of_them(worlds: Worlds) -> None:
    """Their backward passes are gone; layers move one by one, and a frozen stage has none that the optimizer trains."""
    block = {"replan": {"every": 8, "threshold": 0.1, "moves": "live"}}
    first, second = worlds.run(2, balanced, block, 2, 44, frozen_at=24)
    assert first["decisions"] == second["decisions"]
    before, after = first["splits"][23], first["splits"][-1]
    assert before[0] in (3, 4, 5)
    assert after[0] > before[0]
    assert all(one.steps for one in first["decisions"] if not one.stays), first["decisions"]
    assert all(not one.empties for one in first["decisions"])


def test_recomputation_is_not_measured_as_backward_pass(worlds: Worlds) -> None:
    block = {"replan": {"every": 4, "dry_run": True}, "recompute_ratio": 1.0}
    for report in worlds.run(2, balanced, block, 2, 6):
        for forward, backward in report["layers"]:  # else the last layer's would be eight times as long
            assert PART_S < forward < 3 * PART_S
            assert 2 * PART_S < backward < 5 * PART_S
        assert report["decisions"][0].seconds > 7 * 4 * PART_S  # the plan counts it


def test_a_dry_run_changes_nothing(worlds: Worlds) -> None:
    """Its decisions are seen whatever DeepSpeed's log level is: they are all that there is of it."""
    blocks = [{"replan": {"every": 4, "dry_run": True}}, {}]
    ranks = worlds.run(2, arms, blocks, 2, 8)
    (first, _), (second, _) = ranks
    assert first["said"] == [f"ds_vpipe: {decision.line()}" for decision in first["decisions"]]
    assert second["said"] == []
    for dry, without in ranks:
        assert dry["decisions"][0].better_partition[0] < 7
        assert dry["decisions"][0].stays == ""
        assert dry["moves"] == []
        assert dry["splits"] == without["splits"]
        assert dry["losses"] == without["losses"]
        assert all(torch.equal(dry["parameters"][name], value) for name, value in without["parameters"].items())


def test_one_stage_has_nothing_to_balance(worlds: Worlds) -> None:
    [report] = worlds.run(1, balanced, {"replan": {"every": 2}}, 1, 5)
    assert [decision.stays for decision in report["decisions"]] == ["no split is faster"] * 2


def test_bsp_trains_the_same_while_it_balances_itself(worlds: Worlds) -> None:
    blocks = [{"sync_mode": "bsp", "replan": {"every": 4}}, {"sync_mode": "bsp"}]
    by_run = list(zip(*worlds.run(3, arms, blocks, 3, 10), strict=True))
    moved, stayed = ({name: value for r in run for name, value in r["parameters"].items()} for run in by_run)
    assert by_run[0][0]["splits"][-1] != by_run[1][0]["splits"][-1]
    assert by_run[0][0]["losses"] == by_run[1][0]["losses"]
    assert moved.keys() == stayed.keys()
    assert all(torch.equal(moved[name], stayed[name]) for name in moved)


def test_memory_is_counted_where_it_has_a_limit(worlds: Worlds) -> None:
    blocks = [{"replan": {"every": 4, "dry_run": True}, "memory_budget": budget} for budget in (10**9, 100)]
    for roomy, tight in worlds.run(2, arms, blocks, 2, 6):
        assert roomy["decisions"][0].better_partition[0] < 7
        assert "no split fits the memory" in tight["decisions"][0].stays
        assert all(one.activation_bytes > 0 for one in roomy["profile"])


class Drawing(nn.Linear):
    """A layer that draws numbers of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random() + np.random.rand())


class Looking(Drawing):
    """A layer that looks at a value, so that its bytes cannot be computed, and whose buffers every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if f"{x.sum():.2f}" == "nan":
            return x
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return self.norm(y.transpose(1, 2)).transpose(1, 2) + self.mean


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.lock = threading.Lock()


LENGTHS = (16, 4)


def of_several_lengths(block: dict[str, Any], loss: Any = None) -> dict[str, Any]:
    """Train with two lengths in turn, the last of which before every look is the shorter one."""
    from deepspeed.pipe import LayerSpec

    specs = [LayerSpec(kind) for kind in (Drawing, Drawing, Looking, Looking)]
    torch.manual_seed(1)
    engine = cases.engine(cases.config(1, ADAMW, block), 2, loss_fn=loss or nn.MSELoss(), specs=lambda: specs)
    generator = torch.Generator().manual_seed(5)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    batches = ([torch.randn(2, n, WIDTH, generator=generator) for _ in range(2)] for n in itertools.cycle(LENGTHS))
    losses = [float(engine.train_batch(batches)) for _ in range(8)]
    report = {
        "losses": losses,
        "profile": None if engine.balance is None else engine.balance._known.profile.layers,
        "state": {name: value.clone() for name, value in engine.module.state_dict().items()},
        "drawn": (random.random(), np.random.rand()),
    }
    engine.destroy()
    cases.close_groups()
    return report


def runs_of_several_lengths(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [of_several_lengths(block) for block in blocks]


def test_looks_at_memory_change_nothing_and_count_the_longest_micro_batch_and_the_loss(worlds: Worlds) -> None:
    blocks: list[dict[str, Any]] = [{"replan": {"every": 2, "dry_run": True}, "memory_budget": 10**9}, {}]
    longest = 4 * 2 * LENGTHS[0] * WIDTH
    for looked, without in worlds.run(2, runs_of_several_lengths, blocks):
        assert looked["losses"] == without["losses"]
        assert looked["drawn"] == without["drawn"]
        assert all(torch.equal(looked["state"][name], value) for name, value in without["state"].items())
        drawing, _, looking, last = looked["profile"]
        assert [one.boundary_bytes for one in (drawing, looking, last)] == [longest] * 3
        assert last.activation_bytes >= looking.activation_bytes + 2 * longest  # outputs and labels, for the loss


class Strict(nn.MSELoss):
    """A loss that cannot be copied, and does not take labels that nobody has given."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not (labels < 0).any():
            raise ValueError("labels of no batch")
        return super().forward(outputs, labels)


def with_other_losses() -> tuple[list[float], list[list[float]]]:
    """What a loss that is a function has seen, and the losses of all runs."""
    seen: list[float] = []

    def kept(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = nn.functional.mse_loss(outputs, labels)
        seen.append(float(found))
        return found

    block = {"replan": {"every": 2, "dry_run": True}, "memory_budget": 10**9}
    return seen, [of_several_lengths(block, loss)["losses"] for loss in (None, kept, Strict())]


def test_looks_do_not_run_the_losses_of_a_script(worlds: Worlds) -> None:
    (nothing, runs), (seen, _) = worlds.run(2, with_other_losses)
    assert runs[0] == runs[1] == runs[2]
    assert not nothing
    assert seen == runs[1]


def refused(block: dict[str, Any], extra: dict[str, Any], specs: Callable[[], list[Any]] | None = None) -> None:
    cases.engine(cases.config(2, ADAMW, block, **extra), 2, specs=specs)


def locked() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Locked)]


@pytest.mark.parametrize(
    ("block", "extra", "specs", "line"),
    [
        ({"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}, {}, None, "vpipe.replan.every: got 5"),
        ({}, {"pipeline": {"activation_checkpoint_interval": 1}}, None, "activation_checkpoint_interval: got 1"),
        ({"swap_ratio": 0.5}, {}, None, "vpipe.replan.every: got 5; swap_ratio is above 0"),
        ({"memory_budget": 10**9}, {}, locked, "layer: got \"Locked\"; TypeError: cannot pickle '_thread.lock'"),
        ({}, {}, toy.tied_specs, "layer 2 is tied ('scale'), allowed are ties of the first and the last layer"),
    ],
)
def test_what_cannot_move_is_refused_at_start(
    worlds: Worlds, block: dict[str, Any], extra: dict[str, Any], specs: Any, line: str
) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, refused, {"replan": {"every": 5}, **block}, extra, specs)
    assert [line in error for error in failed.value.errors.values()] == [True, True]


def resumed_splits(folder: str) -> list[Any]:
    """Split and recompute ratio of runs that resume from one that moved layers, by how they differ from it."""

    def begin(partition: list[int], load: bool = True, **replan: Any) -> Any:
        block = {"partition": partition, "replan": {"every": 100, **replan}}
        engine = cases.engine(cases.config(2, ADAMW, block), 2, loss_fn=nn.MSELoss(), specs=lambda: sleepy(Device()))
        engine.balance.chooses_ratio = True
        if load:
            engine.load_checkpoint(folder)
        return engine

    def end(engine: Any) -> list[Any]:
        found = [*engine.pipeline.partition, *engine.pipeline.recompute_ratio]
        engine.train_batch(micro_batches())
        cases.end(engine)
        return found

    engine = begin([7, 1], load=False)
    engine.repartition([5, 3], [0.0, 1.0])
    engine.save_checkpoint(folder)
    end(engine)
    found = [end(begin([7, 1])), end(begin([6, 2])), end(begin([7, 1], dry_run=True))]
    engine = begin([7, 1], load=False)
    engine.repartition([5, 3])  # the same split, but not the same ratio
    engine.load_checkpoint(folder)
    return [*found, end(engine)]


def test_a_resume_follows_the_checkpoint_where_the_json_asks_for_what_it_asked_for(
    worlds: Worlds, tmp_path: Path
) -> None:
    went_on, changed, dry, with_ratio = worlds.run(2, resumed_splits, str(tmp_path))[0]
    assert went_on == [5, 3, 0.0, 1.0]
    assert changed == [6, 2, 0.0, 0.0]
    assert dry == [7, 1, 0.0, 0.0]
    assert with_ratio == [5, 3, 0.0, 1.0]


class Plain(nn.Module):
    """A script's own model; in the middle two layers may be one, or a weight have a hook."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        layers = [Sleepy(100 + number, Device()) for number in range(LAYERS - 2)]
        if own == "tie":
            layers[3].linear = layers[2].linear
        if own == "hook":
            layers[3].linear.weight.register_hook(torch.zeros_like)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def plain_module(block: dict[str, Any], updates: int = 0, own: str = "") -> dict[str, Any]:
    """Train a plain model, whose first stage has all layers at first."""
    import ds_vpipe

    ds_config = cases.config(2, ADAMW, {"partition": [LAYERS - 1, 1], "replan": {"every": 4}, **block})
    engine = ds_vpipe.initialize(model=(model := Plain(own)), config=ds_config)[0]
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: None)  # which every rank has
    iterator, splits, losses = micro_batches(), [], []
    for micro_batch, (x, y) in zip(range(2 * updates), iterator, strict=False):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if micro_batch % 2:
            splits.append([stop - start for start, stop in pairwise(engine.module.parts)])
    engine.drain()
    report = {
        "splits": splits,
        "losses": losses,
        "state": engine.full_state_dict(),
        "decisions": [] if engine.balance is None else engine.balance.decisions,
        "layers": [] if engine.balance is None else engine.balance._known.profile.layers,
    }
    cases.end(engine)
    return report


def plain_modules(blocks: list[dict[str, Any]], updates: int) -> list[dict[str, Any]]:
    return [plain_module(block, updates) for block in blocks]


def test_plain_modules_balance_themselves(worlds: Worlds) -> None:
    bsp = {"sync_mode": "bsp"}
    blocks = [bsp, {**bsp, "replan": {"every": 0}}, {"recompute_ratio": 0.5, "replan": {"every": 4, "moves": "live"}}]
    (moved, stayed, recomputed), others = worlds.run(2, plain_modules, blocks, 20)
    for report, other in zip((moved, recomputed), (others[0], others[2]), strict=True):
        assert report["decisions"] == other["decisions"]
        assert report["splits"][0] == [7, 1]
        assert report["splits"][-1][0] in (3, 4, 5)
        for position, layer in enumerate(report["layers"]):  # front, layers and tail
            # A busy machine shows as a slower stage, which leaves its layers less than they slept.
            sleeps = PART_S if 0 < position < LAYERS - 1 else 0
            assert sleeps / 2 <= layer.forward_s < sleeps + 9 * PART_S, position
            assert sleeps / 2 <= layer.backward_s < 2 * sleeps + 9 * PART_S, position
    assert moved["losses"] == stayed["losses"]
    assert all(torch.equal(moved["state"][name], value) for name, value in stayed["state"].items())
    assert "in an empty pipeline: the module is a SplitModule" in recomputed["decisions"][0].line()


@pytest.mark.parametrize(
    ("block", "own", "line"),
    [
        ({}, "hook", "layers.3.linear.weight has hooks, which would stay behind, allowed are hooks of modules"),
        ({}, "tie", "layers.2.linear.weight is used in pieces [3, 4], allowed are weights shared by the first and"),
        ({"memory_budget": 10**6}, "", "got 4 for a plain module with 1000000 bytes of memory per stage"),
    ],
)
def test_plain_modules_that_cannot_move_are_refused_at_start(
    worlds: Worlds, block: dict[str, Any], own: str, line: str
) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, plain_module, block, own=own)
    assert [line in error for error in failed.value.errors.values()] == [True, True]


def doubled(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def changed_layer(change: str) -> None:
    """Move a layer that only its stage has changed."""
    engine = cases.engine(cases.config(1, ADAMW, {"partition": [6, 4]}), 2)
    iterator = toy.data()
    engine.train_batch(iterator)
    if engine.stage_id == 0 and change == "buffer":
        engine.module.forward_funcs[5].register_buffer("added", torch.zeros(1))
    elif engine.stage_id == 0:
        engine.module.forward_funcs[5].register_forward_hook(doubled)
    engine.repartition([5, 5])


@pytest.mark.parametrize("change", ["buffer", "hook"])
def test_a_layer_that_cannot_be_built_elsewhere_ends_all_ranks_with_one_line(worlds: Worlds, change: str) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, changed_layer, change)
    assert [error.count("\n") for error in failed.value.errors.values()] == [0, 0]
    assert ["layer 5 (Attend), but it was changed" in error for error in failed.value.errors.values()] == [True, True]


def other_counts() -> list[str]:
    """Lines of calls with another split, or other recompute ratios, on each rank."""
    lines = []
    for calls in ((([5, 5],), ([4, 6],)), (([6, 4], [0, 1]), ([6, 4], [1, 1]))):
        engine = cases.engine(cases.config(1, ADAMW, {"partition": [6, 4]}), 2)
        with pytest.raises(VPipeError) as error:
            engine.repartition(*calls[engine.stage_id])
        lines.append(str(error.value))
        cases.end(engine)
    return lines


def test_another_split_on_another_rank_is_refused(worlds: Worlds) -> None:
    for lines in worlds.run(2, other_counts):
        assert ["pass the same on every rank" in line for line in lines] == [True, True]


@pytest.mark.parametrize("to", [torch.Tensor.to_dense, torch.Tensor.to_sparse])
def test_a_profile_has_the_type_of_its_weights(to: Any) -> None:
    layer: Any = nn.Linear(WIDTH, WIDTH).bfloat16()
    module: Any = nn.Module()
    probe = LayerProbe(torch.device("cpu"))
    module._local_start, module.forward_funcs = 0, [layer]
    probe.begin(module, 0, True, None)
    output = vars(module)[TIMED].layer(0, layer, to(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    probe.end(module, 0, True)
    probe.begin(module, 0, False, None)
    output.sum().backward()
    probe.end(module, 0, False)
    stage: Any = SimpleNamespace(module=module, is_last=True, asynchronous=False, device=torch.device("cpu"))
    engine: Any = SimpleNamespace(train_micro_batch_size_per_gpu=lambda: 1)
    profile = LayerCosts(engine, stage, probe, sized=False).profile()
    assert profile is not None
    assert (profile.dtype, profile.input_bytes) == ("bfloat16", 2 * WIDTH)
