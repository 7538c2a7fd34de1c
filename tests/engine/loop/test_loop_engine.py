"""What a looping script may do besides training: evaluate, save, resume, count, compute with its loss, call wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import loops
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from test_loop_exactness import replayed
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.errors import CallOrderError

pytestmark = pytest.mark.mp

SGD, ADAMW = OPTIMIZERS["SGD"][0], OPTIMIZERS["AdamW"][0]
PLAIN_ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
BLOCK = {"partition": [4, 3, 3]}


def evaluate(engine: Any, number: int) -> float:
    tokens, labels = toy.micro_batch(number)
    engine.eval()
    with torch.no_grad():
        loss = engine(tokens, labels=labels)
    engine.train()
    assert not loss.requires_grad
    return float(loss)


def rest_in_between(folder: str, ds_config: dict[str, Any]) -> dict[str, Any]:
    engine = loops.engine(ds_config, 3)
    loops.rounds(engine, 0, 7)
    evaluated = [evaluate(engine, 100), evaluate(engine, 101)]
    loops.rounds(engine, 7, 6)
    engine.save_checkpoint(folder)
    loops.rounds(engine, 13, 3)
    engine.drain()
    engine.drain()
    return {"evaluated": evaluated, "parameters": loops.parameters(engine), "steps": engine.global_steps}


def test_evaluation_and_saving_are_drains(worlds: Worlds, tmp_path: Path) -> None:
    """In the middle of batches too. The reference knows of them only where the pipeline was empty."""
    reports = worlds.run(3, rest_in_between, str(tmp_path), cases.config(2, SGD, BLOCK))
    wanted = replayed(3, 2, "SGD", counts=(4, 3, 3), refills=(0, 7, 13))
    assert difference(cases.merged(reports), wanted.parameters()) == 0
    assert difference(replayed(3, 2, "SGD", counts=(4, 3, 3)).parameters(), wanted.parameters()) > 0
    whole = loops.Whole()
    after_three = {f"layers.{name.replace('.', '.layer.', 1)}": w for name, w in wanted.parameters(3).items()}
    whole.load_state_dict(after_three)
    losses = [whole(*toy.micro_batch(number)).item() for number in (100, 101)]
    for report in reports:
        assert report["evaluated"] == pytest.approx(losses, rel=1e-6)
        assert report["steps"] == 8


def with_dropout(ds_config: dict[str, Any], rest: str) -> dict[str, Any]:
    engine = loops.engine(ds_config, 3, dropout=0.2)
    loops.rounds(engine, 0, 5)
    if rest == "evaluate":
        state = torch.get_rng_state(), random.getstate()
        with torch.no_grad():
            engine(*toy.micro_batch(50))  # in training mode, with dropout
        evaluate(engine, 50)
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1] == random.getstate()
    else:
        engine.drain()
    loops.rounds(engine, 5, 7)
    engine.drain()
    return {"parameters": loops.parameters(engine)}


def test_evaluation_changes_nothing_but_the_drain(worlds: Worlds) -> None:
    drained, evaluated = (
        cases.merged(worlds.run(3, with_dropout, cases.config(2, SGD, BLOCK), rest)) for rest in ("drain", "evaluate")
    )
    assert difference(evaluated, drained) == 0


class Merging(nn.Linear):
    """A layer with a low-rank part that is one with its frozen weight while it is evaluated, as loralib's."""

    def __init__(self, seed: int) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("a", (toy.HIDDEN, 2)), ("b", (2, toy.HIDDEN))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / 3))
        self.weight.requires_grad_(False)
        nn.init.eye_(self.weight)

    def train(self, mode: bool = True) -> Merging:
        if mode is not self.training:
            self.weight.data += (self.a @ self.b).data * (1 if self.training else -1)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x @ (self.a @ self.b).T if self.training else 0
        return torch.tanh(super().forward(x) + added)


class Merges(nn.Module):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Merging(seed) for seed in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - labels).square().mean()


def merge(evaluates: bool) -> list[torch.Tensor]:
    """Frozen weights after some rounds with evaluations between them."""
    import ds_vpipe

    ds_config = cases.config(1, SGD, {})
    engine = ds_vpipe.initialize(model=Merges(), config={**ds_config, "pipeline": {"stages": 2}})[0]
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        x, labels = (torch.randn(toy.MICRO_BATCH, toy.HIDDEN, generator=generator) for _ in range(2))
        engine.backward(engine(x, labels=labels))
        engine.step()
        if number % 3 == 1 and evaluates:
            engine.eval()
            with torch.no_grad():
                engine(x, labels=labels)
            engine.train()
    engine.drain()
    found = [p.detach().clone() for name, p in engine.module.named_parameters() if name.endswith("weight")]
    cases.end(engine)
    return found


def test_layers_that_merge_weights_while_they_are_evaluated(worlds: Worlds) -> None:
    """The pipeline drains before the mode changes, or what is taken back would not be what was added."""
    for weights in worlds.run(2, merge, True):
        for weight in weights:
            assert float((weight - torch.eye(toy.HIDDEN)).abs().max()) < 1e-5


def resume(folder: str, ds_config: dict[str, Any], at: int) -> dict[str, Any]:
    """Save after ``at`` rounds and go on; go on from the checkpoint in a new engine."""
    engine = loops.engine(ds_config, 3, dropout=0.2)
    loops.rounds(engine, 0, at)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    losses = loops.rounds(engine, at, 8)
    engine.drain()
    went_on = loops.parameters(engine), engine.get_lr(), engine.global_steps, losses
    cases.end(engine)
    engine = loops.engine(ds_config, 3, dropout=0.2)
    path, client_state = engine.load_checkpoint(folder)
    counts = engine.global_steps, engine.global_samples, engine.consumed_micro_batches
    events: list[Any] = []
    engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend)

    def go_on() -> tuple[dict[str, torch.Tensor], list[float], int, list[float]]:
        losses = loops.rounds(engine, engine.consumed_micro_batches, at + 8 - engine.consumed_micro_batches)
        engine.drain()
        return loops.parameters(engine), engine.get_lr(), engine.global_steps, losses

    resumed = go_on()
    first, events[:] = list(events), []
    loops.rounds(engine, at + 8, 1)  # a batch that is forgotten
    engine.load_checkpoint(folder)
    resumed_again = go_on()
    assert events == first
    return {
        "folder": Path(path).parent.name,
        "epoch": client_state["epoch"],
        "counts": counts,
        "went_on": went_on,
        "resumed": [resumed, resumed_again],
    }


SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}}


def test_resumed_training_is_the_same(worlds: Worlds, tmp_path: Path) -> None:
    for report in worlds.run(3, resume, str(tmp_path), cases.config(2, ADAMW, BLOCK, **SCHEDULE), 6):
        assert (report["folder"], report["epoch"]) == ("global_step3", 3)
        assert report["counts"] == (3, 3 * 2 * toy.MICRO_BATCH, 6)
        wanted, *others_wanted = report["went_on"]
        for parameters, *others in report["resumed"]:
            assert difference(parameters, wanted) == 0
            assert others == others_wanted


def test_checkpoint_in_the_middle_of_a_batch(worlds: Worlds, tmp_path: Path) -> None:
    """It holds complete batches; going on keeps the batch's gradients, resuming begins it again."""
    for report in worlds.run(3, resume, str(tmp_path), cases.config(4, ADAMW, BLOCK), 6):
        assert report["counts"] == (1, 4 * toy.MICRO_BATCH, 4)
        first, again = report["resumed"]
        assert report["went_on"][2] == first[2] == again[2] == 3
        assert difference(first[0], again[0]) == 0


def count(ds_config: dict[str, Any]) -> list[Any]:
    engine = loops.engine(ds_config, 3)
    seen = []

    def look() -> None:
        seen.append(
            (
                engine.micro_steps,
                engine.global_steps,
                engine.global_samples,
                engine.is_gradient_accumulation_boundary(),
            )
        )

    for number in range(7):
        look()
        loss = engine(*toy.micro_batch(number))
        look()
        engine.backward(loss)
        look()
        engine.step()
        look()
    return seen


def test_counts_are_the_scripts_on_all_ranks(worlds: Worlds) -> None:
    micro_batches = 2
    samples = toy.MICRO_BATCH * micro_batches
    wanted = []
    for number in range(7):
        before, after = (
            (n, n // micro_batches, n // micro_batches * samples, (n + 1) % micro_batches == 0)
            for n in (number, number + 1)
        )
        wanted += [before, before, before, after]
    for seen in worlds.run(3, count, cases.config(micro_batches, SGD, BLOCK)):
        assert seen == wanted


def monitored(ds_config: dict[str, Any]) -> list[Any]:
    engine = loops.engine(ds_config, 3)
    events: list[Any] = []
    if engine.is_first_stage():
        engine.monitor = SimpleNamespace(enabled=True, write_events=events.extend)
    loops.rounds(engine, 0, 7)
    return [(samples, value) for name, value, samples in events if name == "Train/Samples/train_loss"]


def test_monitors_are_told_of_the_stages_own_updates(worlds: Worlds) -> None:
    """Stage 0 has run its backward passes of micro-batches 0 to 4 by then."""
    wanted = replayed(3, 2, "SGD", counts=(4, 3, 3)).losses
    events, *others = worlds.run(3, monitored, cases.config(2, SGD, BLOCK))
    assert [samples for samples, _ in events] == [2 * toy.MICRO_BATCH, 4 * toy.MICRO_BATCH]
    assert [value for _, value in events] == pytest.approx(wanted[:2], rel=1e-6)
    assert others == [[], []]


def misuse(ds_config: dict[str, Any]) -> dict[str, Any]:
    engine = loops.engine(ds_config, 3)
    lines = []

    def refused(call: Callable[[], Any]) -> None:
        try:
            call()
        except CallOrderError as error:
            lines.append(str(error))
        else:
            lines.append("nothing")

    batch = toy.micro_batch(3)
    refused(lambda: engine.backward(torch.ones((), requires_grad=True) * 1))
    refused(engine.step)
    loops.rounds(engine, 0, 3)
    loss = engine(*batch)
    for call in (
        lambda: engine(*batch),
        engine.step,
        loss.backward,
        lambda: engine.backward(loss.detach()),
        lambda: engine.backward(loss, retain_graph=True),
        lambda: engine.save_checkpoint("nowhere"),
        lambda: evaluate(engine, 0),
    ):
        refused(call)
        engine.train()
    engine.backward(loss)
    refused(lambda: engine.backward(loss))
    refused(lambda: engine(*batch))
    engine.step()
    refused(engine.step)
    engine.eval()
    evaluated = engine(*batch)
    refused(lambda: engine.backward(evaluated))
    engine.train()
    refused(lambda: engine.train_batch(iter([])))
    refused(lambda: engine.eval_batch(iter([])))
    for number in range(4, 16):  # as Accelerate does it
        ends_batch = number % 2 == 1
        engine.set_gradient_accumulation_boundary(not ends_batch)
        loss = engine(*toy.micro_batch(number)) / 2
        if number < 6 and ends_batch:
            refused(lambda loss=loss: engine.backward(loss))
        engine.set_gradient_accumulation_boundary(ends_batch)
        assert engine.backward(loss, scale_wrt_gas=False) == loss
        if ends_batch or number == 4:
            engine.step()
    refused(engine.step)
    engine.drain()
    return {"lines": lines, "parameters": loops.parameters(engine)}


def unscaled(ds_config: dict[str, Any], multiplied: bool) -> dict[str, Any]:
    """Training with losses that are not divided by the two accumulation steps, or are multiplied by them before."""
    engine = loops.engine(ds_config, 2)
    for number in range(4):
        loss = engine(*toy.micro_batch(number))
        engine.backward(loss * 2 if multiplied else loss, scale_wrt_gas=multiplied)
        engine.step()
    engine.drain()
    return {"parameters": loops.parameters(engine)}


def test_scale_wrt_gas_counts_for_any_loss(worlds: Worlds) -> None:
    ds_config = cases.config(2, SGD, {"partition": [5, 5]})
    own, multiplied = (cases.merged(worlds.run(2, unscaled, ds_config, arm)) for arm in (False, True))
    assert difference(own, multiplied) == 0


def test_wrong_calls_are_refused_and_change_nothing(worlds: Worlds) -> None:
    reports = worlds.run(3, misuse, cases.config(2, SGD, BLOCK))
    wanted = replayed(3, 2, "SGD", counts=(4, 3, 3), refills=(0, 4))
    assert difference(cases.merged(reports), wanted.parameters()) == 0
    begins = [
        "backward(): called where engine(...) is due",
        "step(): called twice in a row",
        "engine(...): called twice in a row",
        "step(): called where backward() is due",
        "loss.backward(): called on what engine(...) returned",
        "backward(loss): got a tensor without a graph",
        "backward(retain_graph): got True",
        "save_checkpoint(): called where backward() is due",
        "evaluation: called where backward() is due",
        "backward(): called twice in a row",
        "engine(...): called where step() is due",
        "step(): called twice in a row",
        "backward(loss): got a tensor without a graph",
        "train_batch(): ",
        "eval_batch(): ",
        "set_gradient_accumulation_boundary(False): the micro-batch in backward() is number 2 of 2 of its batch",
        "step(): called twice in a row",
    ]
    for report in reports:
        assert len(report["lines"]) == len(begins)
        for line, begin in zip(report["lines"], begins, strict=True):
            assert line.startswith(begin), line
            assert "\n" not in line


def habits(ds_config: dict[str, Any]) -> dict[str, Any]:
    """A script that scales its loss, clears gradients, and waits for the others between its calls."""
    engine = loops.engine(ds_config, 3)
    for number in range(16):
        tokens, labels = toy.micro_batch(number if engine.is_first_stage() else 999)
        loss = engine(*(tokens, labels) if number % 2 else (tokens,), **({} if number % 2 else {"labels": labels}))
        assert f"{loss:.1f}" == f"{loss.item():.1f}"
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        engine.backward((loss * 3).mean() / 6)
        torch.distributed.barrier()
        engine.step()
        torch.distributed.barrier()
        if number % 2:
            engine.zero_grad()
            engine.optimizer.zero_grad()
    engine.drain()
    return {"parameters": loops.parameters(engine)}


@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_habits_of_scripts(worlds: Worlds, sync_mode: str) -> None:
    """Half the loss is half the learning rate; inputs and labels are the first stage's."""
    block = {**BLOCK, "sync_mode": sync_mode}
    reports = worlds.run(3, habits, cases.config(2, {"type": "SGD", "params": {"lr": 0.2}}, block))
    depths = {"depths": (0, 0, 0)} if sync_mode == "bsp" else {}
    wanted = replayed(3, 2, "SGD", counts=(4, 3, 3), **depths)
    assert difference(cases.merged(reports), wanted.parameters()) < 1e-5


def foreign_loss(ds_config: dict[str, Any]) -> None:
    engine = loops.engine(ds_config, 2)
    engine(*toy.micro_batch(0))
    engine.backward(torch.ones((), requires_grad=True) * 1)
    engine.step()
    engine.drain()


def test_loss_of_something_else_is_refused(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, foreign_loss, cases.config(1, SGD, {"peer_timeout_s": 20}))
    for text in failed.value.errors.values():
        assert text.startswith("CallOrderError: backward(loss): got a loss with terms made of parameters")


def uneven(ds_config: dict[str, Any], rounds: list[int]) -> None:
    engine = loops.engine(ds_config, 3)
    loops.rounds(engine, 0, rounds[engine.stage_id])
    engine.save_checkpoint("nowhere")


@pytest.mark.parametrize("rounds", [[5, 6, 6], [6, 5, 5], [5, 5, 6], [6, 6, 5]])
def test_ranks_that_run_different_numbers_of_rounds(worlds: Worlds, rounds: list[int]) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(3, uneven, cases.config(2, SGD, {**BLOCK, "peer_timeout_s": 20}), rounds)
    assert len(failed.value.errors) == 3
    for text in failed.value.errors.values():
        assert "every rank has to run the same number of rounds before it" in text


def fail_while_filling(ds_config: dict[str, Any]) -> None:
    engine = loops.engine(ds_config, 3)
    if engine.stage_id == 1:
        loops.at_first_layer(engine, lambda: 1 // 0)
    try:
        loops.rounds(engine, 0, 1)
    finally:
        with pytest.raises(RuntimeError, match=r"^engine\(\.\.\.\) after a failure"):
            loops.rounds(engine, 0, 1)


def test_failure_reaches_those_that_wait_for_a_loss(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(3, fail_while_filling, cases.config(2, SGD, {**BLOCK, "peer_timeout_s": 20}))
    errors = failed.value.errors
    assert errors[1].startswith("ZeroDivisionError")
    for rank in (0, 2):
        assert "stage 1 (rank 1) failed in F0: ZeroDivisionError" in errors[rank]
    assert "waiting for the loss of micro-batch 0 from stage 2" in errors[0]


def grouped(whole: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms without decay, and a group that is on the first stage alone."""
    named = dict(whole.named_parameters())
    words = [p for name, p in named.items() if "embedding" in name]
    plain = [p for name, p in named.items() if p.dim() == 1]
    rest = [p for name, p in named.items() if p.dim() > 1 and "embedding" not in name]
    return [
        {"params": words, "lr": 3e-2, "weight_decay": 0.0},
        {"params": plain, "weight_decay": 0.0},
        {"params": rest, "weight_decay": 0.5},
    ]


def grouped_adamw(whole: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(grouped(whole), lr=3e-3)


def lambdas(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 1 / (t + 1), lambda t: 0.9**t, lambda t: 1.0])


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    from deepspeed.runtime.lr_schedules import WarmupLR

    return WarmupLR(optimizer, warmup_min_lr=[0.0] * 3, warmup_max_lr=[3e-2, 3e-3, 1e-3], warmup_num_steps=5)


def stepped_alone(micro_batches: int, rounds: int, scheduler: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """The same optimizer and scheduler in one process."""
    whole = loops.Whole()
    optimizer = grouped_adamw(whole)
    schedule = scheduler(optimizer)
    for number in range(rounds):
        (whole(*toy.micro_batch(number)) / micro_batches).backward()
        if (number + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    named = whole.named_parameters()
    return {name.removeprefix("layers.").replace(".layer.", "."): value.detach() for name, value in named}


@pytest.mark.parametrize("scheduler", [lambdas, warm_up], ids=["LambdaLR", "WarmupLR"])
def test_optimizer_and_scheduler_objects_follow_their_parameters(worlds: Worlds, scheduler: Any) -> None:
    config = cases.config(2, SGD, {**BLOCK, "sync_mode": "bsp"})
    del config["optimizer"]
    reports = worlds.run(3, loops.train, config, 3, 12, optimizer=grouped_adamw, scheduler=scheduler)
    wanted = stepped_alone(2, 12, scheduler)
    assert difference(cases.merged(reports), wanted) <= 1e-5


def test_groups_for_an_optimizer_of_the_json(worlds: Worlds) -> None:
    config = cases.config(
        2, {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}, {**BLOCK, "sync_mode": "bsp"}
    )
    reports = worlds.run(3, loops.train, config, 3, 12, parameters=grouped)
    wanted = stepped_alone(2, 12, lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0))
    assert difference(cases.merged(reports), wanted) <= 1e-5


def test_optimizer_object_with_zero_1_and_replicas(worlds: Worlds) -> None:
    """Two pipelines of two stages; the same as groups for the JSON's optimizer."""
    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    with_object = cases.config(2, ADAMW, {"partition": "uniform"}, **extra)
    with_groups = {**with_object, "optimizer": PLAIN_ADAMW}
    del with_object["optimizer"]
    of_object = worlds.run(4, loops.train, with_object, 2, 8, optimizer=grouped_adamw)
    of_groups = worlds.run(4, loops.train, with_groups, 2, 8, parameters=grouped)
    for mine, theirs in zip(of_object, of_groups, strict=True):
        assert difference(mine["parameters"], theirs["parameters"]) == 0
        assert mine["latest"] == 4


def muon(whole: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in whole.parameters() if p.dim() == 2], lr=0.02)


def grouped_muon(whole: nn.Module) -> torch.optim.Optimizer:
    words, _, rest = grouped(whole)
    return torch.optim.Muon([{"params": words["params"]}, {"params": rest["params"]}], lr=0.02)


def test_groups_of_matrices_that_a_stage_has_nothing_of(worlds: Worlds) -> None:
    """Muon takes nothing but matrices, and in half precision every group has a gradient."""
    config = cases.config(2, {}, {"partition": "uniform"}, bf16={"enabled": True})
    del config["optimizer"]
    made = [worlds.run(2, loops.train, config, 2, 8, optimizer=optimizer) for optimizer in (muon, grouped_muon)]
    for mine, theirs in zip(*made, strict=True):
        assert difference(mine["parameters"], theirs["parameters"]) == 0
        assert mine["losses"][0] != mine["losses"][-1]


def plain_module(ds_config: dict[str, Any], count: int) -> dict[str, Any]:
    """As scripts do it: the module, an iterator over its parameters, and DeepSpeed's loader for the data."""
    import ds_vpipe

    whole = loops.Whole()
    data = [toy.micro_batch(number // 2) for number in range(2 * count)]
    samples = [(tokens[number % 2], labels[number % 2]) for number, (tokens, labels) in enumerate(data)]
    engine, optimizer, loader, _ = ds_vpipe.initialize(
        model=whole,
        model_parameters=(p for p in whole.parameters() if p.requires_grad),
        training_data=samples,
        config=ds_config,
    )
    loader.num_local_io_workers = 0  # workers of tests have no children
    losses = []
    for batch in loader:
        loss = engine(*batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.drain()
    assert optimizer is engine.optimizer
    assert len(losses) == count
    assert {id(p) for p in engine.parameters()} <= {id(p) for p in whole.parameters()}
    return {"parameters": loops.parameters(engine)}


def test_plain_module_through_initialize(worlds: Worlds) -> None:
    config = cases.config(2, SGD, {"sync_mode": "bsp"}, pipeline={"stages": 2})
    reports = worlds.run(2, plain_module, config, 8)
    assert sum(len(report["parameters"]) for report in reports) == len(list(loops.Whole().parameters()))


def beside_a_whole_model(ds_config: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A pipeline, and an engine of DeepSpeed's own on every rank, as a reference model has it."""
    import ds_vpipe

    engine = loops.engine(ds_config, 2)
    whole = loops.Whole()
    reference, *_ = ds_vpipe.initialize(model=whole, config=theirs)
    reference.eval()
    evaluated = []
    for number in range(3):
        loops.rounds(engine, number, 1)
        with torch.no_grad():
            evaluated.append(float(reference(*toy.micro_batch(torch.distributed.get_rank()))))
    assert reference.dp_world_size == 2
    assert engine.dp_world_size == 1
    engine.drain()
    return {"parameters": loops.parameters(engine), "evaluated": evaluated}


def test_a_whole_model_beside_the_pipeline(worlds: Worlds) -> None:
    """It ended in DeepSpeed's AttributeError, which took the stages for slices of that model."""
    ours, theirs = cases.config(1, SGD, {"partition": [5, 5]}), cases.config(1, SGD, None)
    del theirs["optimizer"]
    reports = worlds.run(2, beside_a_whole_model, ours, theirs)
    alone = worlds.run(2, loops.train, ours, 2, 3)
    assert difference(cases.merged(reports), cases.merged(alone)) == 0
    for rank, report in enumerate(reports):
        assert report["evaluated"] == 3 * [loops.Whole()(*toy.micro_batch(rank)).item()]
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, beside_a_whole_model, ours, cases.config(1, SGD, None))
    assert len(failed.value.errors) == 2
    for text in failed.value.errors.values():
        assert text.startswith("VPipeConfigError: initialize(): got an optimizer in the JSON for a Whole without a")


def test_refusals_at_start(worlds: Worlds) -> None:
    for stage in (2, 3):
        with pytest.raises(CaseFailed) as failed:
            worlds.run(2, loops.train, cases.config(1, SGD, {}, zero_optimization={"stage": stage}), 2, 1)
        for text in failed.value.errors.values():
            assert text.startswith(f"VPipeConfigError: zero_optimization.stage: got {stage}; ")
            assert text.endswith("; use stage 1")
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, loops.train, cases.config(1, SGD, {}, train_batch_size=3 * toy.MICRO_BATCH), 2, 1)
    for text in failed.value.errors.values():
        assert text.startswith("VPipeConfigError: train_batch_size: got ")
        assert "; 2 ranks in 2 stages are 1 replica; allowed: " in text
    interleaved = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, loops.train, cases.config(2, SGD, interleaved), 2, 1)
    for text in failed.value.errors.values():
        assert text.startswith('VPipeConfigError: vpipe.schedule: got "interleaved" for a module that is called')
