"""Loops around DeepSpeed's pipeline engine as programs for fine-tuning write them: qlora-pipe, diffusion-pipe."""

from __future__ import annotations

import collections
import csv
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from worlds import Worlds

pytestmark = pytest.mark.mp

M, BATCHES, COUNTS = 2, 6, [4, 6]
EVALUATED = 3  # micro-batches


def weighted_batch(index: int, replica: int = 0) -> tuple[torch.Tensor, Any]:
    """Samples of which some count more, as ones with more tokens do."""
    tokens, labels = toy.micro_batch(index, replica)
    return tokens, (labels, torch.tensor([0.5 + index % 3, 1.0]))


def weighted_loss(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
    kinds, weights = labels
    return (nn.functional.cross_entropy(outputs.float(), kinds, reduction="none") * weights).sum() / 2


def several_losses(outputs: torch.Tensor, labels: Any) -> Any:
    """What is trained, the loss of every sample, and how often the model is right."""
    right = (outputs.argmax(-1) == labels[0]).float().mean()
    return weighted_loss(outputs, labels), nn.functional.cross_entropy(outputs, labels[0], reduction="none"), right


def data(replica: int = 0, start: int = 0) -> Iterator[Any]:
    return (weighted_batch(index, replica) for index in itertools.count(start))


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    schedules = [LinearLR(optimizer, start_factor=0.25, total_iters=3), ConstantLR(optimizer, factor=1.0)]
    return SequentialLR(optimizer, schedules, milestones=[3])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


RATES = [0.075, 0.15, 0.225, 0.3, 0.3, 0.3]


def replay(replicas: int = 1, refills: tuple[int, ...] = (0,)) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters and losses of the asynchronous run on two stages."""

    def with_rates(parameters: Any) -> torch.optim.Optimizer:
        optimizer, rates = sgd(parameters), iter(RATES)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=next(rates)))
        return optimizer

    return reference.replay(
        COUNTS,
        (1, 0),
        M,
        BATCHES,
        with_rates,
        replicas=replicas,
        refills=refills,
        criterion=weighted_loss,
        micro_batch=weighted_batch,
    )


def module_of(loss_fn: Any, **kwargs: Any) -> Any:
    """A module of a subclass that splits the model itself, and recomputes by a function of torch's."""
    from deepspeed.pipe import PipelineModule

    class SplitByHand(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            assert method == "by hand"
            self.parts = [0, *itertools.accumulate(COUNTS)]
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    return SplitByHand(
        toy.layer_specs(),
        loss_fn=loss_fn,
        partition_method="by hand",
        activation_checkpoint_interval=1,
        checkpointable_layers=["Scale", "Attend"],
        activation_checkpoint_func=partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        **kwargs,
    )


def ds_config(vpipe: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    found = cases.config(M, {}, vpipe, **extra)
    del found["optimizer"]
    return found


def built_late(vpipe: dict[str, Any] | None, **extra: Any) -> Any:
    """An engine that gets its optimizer and its schedule after ``initialize()``."""
    import ds_vpipe

    net = module_of(weighted_loss, num_stages=2)
    trained_parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine = ds_vpipe.initialize(model=net, config=ds_config(vpipe, **extra))[0]
    engine._configure_optimizer(sgd, iter(trained_parameters))
    engine.lr_scheduler = warmed_up(engine.optimizer)
    engine.communication_data_type = torch.float32
    ends = [engine.grid.pp_group[0], engine.grid.pp_group[-1]]
    engine.first_last_stage_group = torch.distributed.new_group(ranks=ends)
    return engine


class SharedLoader:
    """Loader whose first rank reads for the last one, in a collective of the two: they have to ask together."""

    def __init__(self, engine: Any) -> None:
        self.group, self.ranks = engine.first_last_stage_group, engine.grid.pp_group
        self.items = data() if engine.is_first_stage() else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        read = [None if self.items is None else next(self.items)]
        torch.distributed.broadcast_object_list(read, src=self.ranks[0], group=self.group)
        return read[0]


def read_before(engine: Any, items: Iterator[Any], count: int) -> Any:
    """An iterator over micro-batches that have been read, on the stages that use them."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter([next(items) for _ in range(count)])


def fine_tune(vpipe: dict[str, Any] | None, folder: Path, one_iterator: bool) -> dict[str, Any]:
    """A loop that reads every batch before it is trained, from an iterator for each or for all; and saves half-way."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "monitor"}
    engine = built_late(vpipe, csv_monitor=monitor)
    loader = SharedLoader(engine)
    queue: collections.deque[Any] = collections.deque()
    items, ahead = iter(queue.popleft, None), engine.pipeline.depths[0] if one_iterator else 0
    losses, evaluated, rates, seen = [], [], [], []
    for step in range(BATCHES):
        engine.reset_activation_shape()
        if one_iterator:
            queue.extend(next(loader) for _ in range(engine.micro_batches + ahead))
            ahead = 0
        losses.append(engine.train_batch(items if one_iterator else read_before(engine, loader, M)).item())
        rates.append(engine.optimizer.param_groups[0]["lr"])
        if engine.is_last_stage():
            each = [float(loss) for loss in engine.fwd_outputs]
            seen.append((each, float(engine.total_loss)))
        if step % 2 == 0:
            engine.reset_activation_shape()
            others = read_before(engine, data(start=900 + step), EVALUATED)
            evaluated.append(engine.eval_batch(others, num_micro_batches=EVALUATED).item())
        if step == BATCHES // 2 - 1:
            position = getattr(engine, "consumed_micro_batches", (step + 1) * M)
            state = {"step": step, "position": position}
            engine.save_checkpoint(folder, client_state=state, save_latest=True, exclude_frozen_parameters=True)
    report = {"losses": losses, "parameters": cases.parameters(engine), "evaluated": evaluated, "rates": rates}
    report |= {"seen": seen, "stage": engine.stage_id, "group": engine.grid.pp_group}
    cases.end(engine)
    return report


def resume(vpipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    engine = built_late(vpipe)
    path, state = engine.load_checkpoint(folder, load_module_strict=False, load_lr_scheduler_states=True)
    assert path is not None
    items = data(start=state["position"])
    losses = [engine.train_batch(items).item() for _ in range(state["step"] + 1, BATCHES)]
    report = {"losses": losses, "parameters": cases.parameters(engine)}
    cases.end(engine)
    return report


def built_at_once(vpipe: dict[str, Any], **extra: Any) -> Any:
    import ds_vpipe

    net = module_of(weighted_loss, num_stages=2)
    given = {"optimizer": sgd, "lr_scheduler": warmed_up}
    return ds_vpipe.initialize(model=net, config=ds_config(vpipe, **extra), **given)[0]


def mitigated(build: Callable[..., Any]) -> dict[str, Any]:
    block = {"staleness": {"synchronous_updates": 2}, "stage_to_depth_map": [4, 0]}
    engine = build(block, gradient_clipping=0.2)
    items = itertools.islice(data(), BATCHES * M + 1)
    losses = [float(engine.train_batch(items)) for _ in range(BATCHES)]
    with pytest.raises(StopIteration):
        engine.train_batch(items)
    report = {"losses": losses, "parameters": cases.parameters(engine)}
    cases.end(engine)
    return report


def fine_tune_in_all_ways(folder: Path) -> dict[str, Any]:
    asp: dict[str, Any] = {"sync_mode": "asp"}
    reports = {
        "stock": fine_tune(None, folder / "stock", one_iterator=False),
        "bsp": fine_tune({"sync_mode": "bsp"}, folder / "bsp", one_iterator=False),
        "asp": fine_tune(asp, folder / "asp", one_iterator=True),
        "emptied": fine_tune(asp, folder / "emptied", one_iterator=False),
    }
    reports |= {"late": mitigated(built_late), "at once": mitigated(built_at_once)}
    return {**reports, "resumed": resume(asp, folder / "asp")}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the monitor has been told: steps and values by name, without those that only our engine has."""
    found = {}
    for path in (folder / "monitor").glob("*.csv"):
        with path.open() as file:
            found[path.stem] = [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]
    return {name: rows for name, rows in found.items() if not name.startswith("Train_Pipeline")}


def test_optimizer_after_initialize_and_batches_read_before(worlds: Worlds, tmp_path: Path) -> None:
    """Synchronous: as DeepSpeed's; asynchronous: as the replay, and with an iterator for each batch as synchronous.

    Monitors get what DeepSpeed's engine tells them, and statistics of stages.
    """
    ranks = worlds.run(2, fine_tune_in_all_ways, tmp_path)
    wanted, losses = replay(refills=(0, BATCHES // 2 * M))  # the save empties the pipeline
    for rank in ranks:
        stock, asp = rank["stock"], rank["asp"]
        for name in ("bsp", "emptied"):
            for key in ("losses", "evaluated", "rates", "seen", "group"):
                assert rank[name][key] == stock[key], (name, key)
            assert all(torch.equal(value, rank[name]["parameters"][at]) for at, value in stock["parameters"].items())
        assert asp["losses"] == pytest.approx(losses, abs=1e-6)
        assert asp["rates"] == stock["rates"] == pytest.approx([*RATES[1:], RATES[-1]])
        assert asp["losses"] != stock["losses"]
        for name, value in asp["parameters"].items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)
        for (each, total), mean in zip(asp["seen"], asp["losses"], strict=bool(asp["stage"])):
            assert sum(each) == pytest.approx(total)
            assert total / M == pytest.approx(mean)
        assert rank["resumed"]["losses"] == asp["losses"][BATCHES // 2 :]
        assert rank["late"]["losses"] == rank["at once"]["losses"]
        for name, other in (("asp", "resumed"), ("late", "at once")):
            for at, value in rank[name]["parameters"].items():
                assert torch.equal(value, rank[other]["parameters"][at]), (name, at)
    told = {way: events(tmp_path / way) for way in ("stock", "bsp", "asp")}
    samples = [M * toy.MICRO_BATCH * (step + 1) for step in range(BATCHES)]
    assert {f"Train_Samples_{name}" for name in ("train_loss", "eval_loss", "lr")} <= told["stock"].keys()
    for name, rows in told["stock"].items():
        assert told["bsp"][name] == rows, name
        assert [step for step, _ in told["asp"][name]] == [step for step, _ in rows], name
    for name, key in (("train_loss", "losses"), ("eval_loss", "evaluated"), ("lr", "rates")):
        steps = samples[::2] if name == "eval_loss" else samples
        assert told["asp"][f"Train_Samples_{name}"] == list(zip(steps, ranks[0]["asp"][key], strict=True)), name


def by_name(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with groups by names that a script has put on its parameters."""
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.original_name.endswith("bias")].append(parameter)
    return sgd([{"params": group} for group in groups.values()])


def train_last_stage(vpipe: dict[str, Any] | None, folder: Path, start: int = 0) -> dict[str, Any]:
    import ds_vpipe

    net = module_of(weighted_loss, num_stages=2)
    for name, parameter in net.named_parameters():
        parameter.original_name = name  # type: ignore[attr-defined]
        parameter.requires_grad_(net.stage_id == 1)
    if net.stage_id == 0:  # DeepSpeed's engine fails without a gradient to send
        net.forward_funcs[0].register_forward_hook(lambda layer, given, output: output.requires_grad_())
    engine = ds_vpipe.initialize(model=net, config=ds_config(vpipe))[0]
    engine._configure_optimizer(by_name, [p for p in net.parameters() if p.requires_grad])
    engine.lr_scheduler = warmed_up(engine.optimizer)
    if start:
        assert engine.load_checkpoint(folder, load_module_strict=False)[0] is not None
    losses, items = [], data(start=start * M)
    for step in range(start, BATCHES):
        losses.append(engine.train_batch(items).item())
        if step == BATCHES // 2 - 1:
            engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    report = {"losses": losses, "parameters": cases.parameters(engine)}
    cases.end(engine)
    return report


def train_last_stage_in_all_ways(folder: Path) -> dict[str, Any]:
    blocks: dict[str, Any] = {"stock": None, "bsp": {"sync_mode": "bsp"}, "asp": {}}
    reports = {name: train_last_stage(block, folder / name) for name, block in blocks.items()}
    half = BATCHES // 2
    return reports | {f"{name} resumed": train_last_stage(blocks[name], folder / name, half) for name in ("bsp", "asp")}


def test_a_function_finds_names_on_parameters_where_a_stage_has_nothing_to_train(
    worlds: Worlds, tmp_path: Path
) -> None:
    """As diffusion-pipe's, for adapters; the last stage has no delay, so that asp is bsp here."""
    for rank in worlds.run(2, train_last_stage_in_all_ways, tmp_path):
        stock = rank["stock"]
        assert stock["losses"][0] != stock["losses"][-1]
        for name in ("bsp", "asp", "bsp resumed", "asp resumed"):
            assert rank[name]["losses"] == stock["losses"][-len(rank[name]["losses"]) :], name
            assert all(torch.equal(value, rank[name]["parameters"][at]) for at, value in stock["parameters"].items())


# An engine of the script's own, and ranks in another order


def engine_of_script(base: type) -> type:
    """A class with a ``train_batch()`` and an ``eval_batch()`` of its own, which returns all losses of all replicas."""
    from deepspeed.runtime.pipe import schedule

    class Trainer(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.note = note

        def train_batch(self) -> Any:
            self.reset_activation_shape()
            self.module.train()
            self.total_loss, self._compute_loss = None, True
            self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
            return self.all_losses()

        def eval_batch(self, data_iter: Any) -> Any:
            self.module.eval()
            self._compute_loss = True
            before = self.data_iterator
            self.set_dataiterator(data_iter)
            torch.distributed.barrier()
            with torch.no_grad():
                self._exec_schedule(schedule.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id))
            self.set_dataiterator(before)
            return self.all_losses()

        def all_losses(self) -> list[list[Any]]:
            """Of every replica: what the loss function has returned for every micro-batch."""
            mine = None
            if self.is_last_stage():
                mine = [[o] if isinstance(o, torch.Tensor) else list(o) for o in self.fwd_outputs]
            found = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(found, mine)
            return [losses for losses in found if losses is not None]

    return Trainer


def built_by_script(kind: type, net: Any, vpipe: dict[str, Any] | None) -> Any:
    """An engine of that class, built without ``initialize()``."""
    from deepspeed.runtime.config import DeepSpeedConfig

    timed = vpipe is not None  # DeepSpeed alone starts a timer twice
    content, mpu = ds_config(vpipe, wall_clock_breakdown=timed, steps_per_print=10), net.mpu()
    return kind(
        args=None,
        model=net,
        mpu=mpu,
        config=content,
        config_class=DeepSpeedConfig(content, mpu),
        optimizer=sgd,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        note="of the script",
    )


class Loader:
    def __init__(self, replica: int) -> None:
        self.replica = replica

    def __iter__(self) -> Iterator[Any]:
        return data(self.replica)


def consume(train_batch: Callable[[], Any]) -> None:
    while True:
        train_batch()


def train_with(base: type, loss_fn: Any, vpipe: dict[str, Any] | None) -> dict[str, Any]:
    """Two stages of two replicas; neighbours in a pipeline have neighbouring ranks."""
    from deepspeed.runtime.pipe.topology import ProcessTopology

    net = module_of(loss_fn, topology=ProcessTopology(axes=["data", "pipe"], dims=[2, 2]))
    del net._grid.dp_groups, net._grid.pipe_groups  # a grid of the script's class, as CoLLiE's, never had them
    engine = built_by_script(engine_of_script(base), net, vpipe)
    engine.lr_scheduler = warmed_up(engine.optimizer)
    engine.set_dataloader(Loader(engine.grid.get_data_parallel_rank()))
    losses, evaluated = [], []
    for step in range(BATCHES):
        losses.append(engine.train_batch())
        if step == 2:
            engine.micro_batches = EVALUATED
            evaluated = engine.eval_batch(data(engine.grid.get_data_parallel_rank(), start=900))
            engine.micro_batches = M
    report = {"losses": losses, "evaluated": evaluated, "parameters": cases.parameters(engine)}
    report |= {"place": (engine.stage_id, engine.grid.get_data_parallel_rank()), "note": engine.note}
    report["timed"] = getattr(engine.timers.log, "keywords", {}).get("ranks")
    if vpipe is not None:  # with DeepSpeed stages in between would wait
        engine.set_dataiterator(iter(()))
        with pytest.raises(StopIteration):
            consume(engine.train_batch)
    cases.end(engine)
    return report


def train_with_each() -> dict[str, Any]:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    import ds_vpipe

    bsp, asp = {"sync_mode": "bsp"}, {"sync_mode": "asp"}
    return {
        "stock": train_with(PipelineEngine, weighted_loss, None),
        "bsp": train_with(ds_vpipe.VPipeEngine, several_losses, bsp),
        "asp": train_with(ds_vpipe.VPipeEngine, several_losses, asp),
    }


def means(batches: list[Any]) -> list[float]:
    """Of the losses that are trained."""
    flat = [[float(losses[0]) for replica in batch for losses in replica] for batch in batches]
    return [sum(losses) / len(losses) for losses in flat]


def test_an_engine_of_the_script_with_several_losses_and_ranks_in_another_order(worlds: Worlds) -> None:
    ranks = worlds.run(4, train_with_each)
    wanted, losses = replay(replicas=2)
    for number, rank in enumerate(ranks):
        stock, bsp, asp = rank["stock"], rank["bsp"], rank["asp"]
        assert stock["place"] == bsp["place"] == asp["place"] == (number % 2, number // 2)
        assert asp["note"] == "of the script"
        assert asp["timed"] == [0, 1], "the first pipeline's"
        assert means(bsp["losses"]) == means(stock["losses"])
        assert means([bsp["evaluated"]]) == means([stock["evaluated"]])
        assert [len(replica) for replica in asp["evaluated"]] == [EVALUATED] * 2
        assert all(torch.equal(value, bsp["parameters"][at]) for at, value in stock["parameters"].items())
        assert means(asp["losses"]) == pytest.approx(losses, abs=1e-6)
        for name, value in asp["parameters"].items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)
        trained, of_samples, right = asp["losses"][0][0][0]
        assert of_samples.shape == (toy.MICRO_BATCH,)
        assert 0 <= float(right) <= 1
        weights = weighted_batch(0)[1][1]
        assert float((of_samples * weights).sum() / 2) == pytest.approx(float(trained))


def told_of_several_losses(folder: Path) -> float:
    """The first one of an evaluation's losses, of which a monitor is told."""
    import ds_vpipe

    monitor = {"enabled": True, "output_path": str(folder), "job_name": "monitor"}
    net, content = module_of(several_losses, num_stages=2), ds_config({}, csv_monitor=monitor)
    engine = ds_vpipe.initialize(model=net, config=content, optimizer=sgd)[0]
    first, (_, _, right) = engine.eval_batch(data()), engine.eval_batch(data(), return_logits=True)[0]
    assert right == first[2]
    cases.end(engine)
    return float(first[0])


def test_a_monitor_is_told_of_the_first_of_several_losses(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(2, told_of_several_losses, tmp_path)
    assert ranks[0] == ranks[1]
    assert events(tmp_path)["Train_Samples_eval_loss"] == [(0, ranks[0]), (0, ranks[0])]


def evaluated_without_losses(folder: Path) -> Any:
    import ds_vpipe

    monitor = {"enabled": True, "output_path": str(folder), "job_name": "monitor"}
    net, content = module_of(lambda *_: (None,), num_stages=2), ds_config({}, csv_monitor=monitor)
    engine = ds_vpipe.initialize(model=net, config=content, optimizer=sgd)[0]
    result = engine.eval_batch(data())
    cases.end(engine)
    return result


def test_a_monitor_is_told_nothing_of_an_evaluation_without_losses(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, evaluated_without_losses, tmp_path) == [(None,)] * 2
    assert "Train_Samples_eval_loss" not in events(tmp_path)


def evaluated_with_failure() -> tuple[str, str]:
    """What ends an evaluation of the script's own on every rank, of which one has failed, and one after that."""
    import ds_vpipe

    failing = False

    def loss(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        if failing:
            raise ValueError("no such label")
        return weighted_loss(outputs, labels)

    engine = built_by_script(engine_of_script(ds_vpipe.VPipeEngine), module_of(loss, num_stages=2), {})
    engine.set_dataiterator(data())
    engine.train_batch()
    failing = True
    lines = []
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            engine.eval_batch(data(start=900))
        lines.append(f"{type(raised.value).__name__}: {raised.value}")
    cases.end(engine)
    return lines[0], lines[1]


def test_a_rank_that_fails_in_an_evaluation_of_the_script_ends_all(worlds: Worlds) -> None:
    """The others meet it before the script goes on, which would wait in a collective of its own."""
    begin = time.monotonic()
    first, last = worlds.run(2, evaluated_with_failure)
    assert time.monotonic() - begin < 30
    reason = "stage 1 (rank 1) failed in evaluation: ValueError: no such label"
    assert last[0] == "ValueError: no such label"
    assert first[0] == f"PipelinePeerError: stage 0 (rank 0) stopped waiting for all ranks to evaluate: {reason}"
    assert first[1] == last[1] == f"VPipeError: evaluation after a failure: {reason}; restart from a checkpoint"


# Text that a pipeline generates, as GPT-NeoX does it


class ComputingArguments:
    """Arguments that compute the configuration every time they are asked for it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        return {**self._content}


def built_for_generation(vpipe: dict[str, Any] | None) -> Any:
    """An engine that will not train: its optimizer has one of the stage's parameters."""
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam([next(iter(net.parameters()))], lr=0.0)
    arguments = ComputingArguments(ds_config(vpipe))
    engine = ds_vpipe.initialize(args=arguments, model=net, optimizer=optimizer)[0]
    engine.set_batch_fn(lambda item: (item["text"][:, :-1], item["text"][:, -1] % toy.CLASSES))
    return engine


def generate(vpipe: dict[str, Any] | None, folder: Path) -> tuple[torch.Tensor, list[Any]]:
    """A text that grows by what the last stage chooses, and the logits, which only that stage has."""
    engine = built_for_generation(vpipe)
    without = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    assert engine.load_checkpoint(folder, load_module_only=True, **without)[0] is not None
    engine.eval()
    text, found = toy.micro_batch(0)[0], []
    for _ in range(4):
        engine.micro_batches, before = 1, engine.micro_batches
        engine.first_output_send, engine.pipe_recv_buf = True, None  # so that DeepSpeed sends the new shape
        padded = nn.functional.pad(text, (0, 1))
        with torch.no_grad():
            _, logits = engine.eval_batch(iter([{"text": padded}]), return_logits=True)
        engine.micro_batches = before
        chosen = torch.zeros(len(text), dtype=torch.long) if logits is None else logits.argmax(-1)
        last = engine.grid.stage_to_global(engine.num_stages - 1)
        torch.distributed.broadcast(chosen, last, group=engine.grid.get_pipe_parallel_group())
        text = torch.cat([text, chosen[:, None]], dim=1)
        found.append(logits)
    cases.end(engine)
    return text, found


def generate_in_all_ways(folder: Path) -> dict[str, Any]:
    engine = cases.engine(cases.config(M, {"type": "SGD", "params": {"lr": 0.3}}, {}), 2)
    items = toy.data()
    for _ in range(2):
        engine.train_batch(items)
    engine.save_checkpoint(folder)
    cases.end(engine)
    return {str(vpipe): generate(vpipe, folder) for vpipe in (None, {"sync_mode": "bsp"}, {"sync_mode": "asp"})}


def test_a_pipeline_generates_text_as_deepspeeds(worlds: Worlds, tmp_path: Path) -> None:
    """One micro-batch whose shape changes in every call, with weights of an asynchronous run."""
    for rank, reports in enumerate(worlds.run(2, generate_in_all_ways, tmp_path)):
        text, logits = reports.pop("None")
        assert text.shape[1] == toy.SEQUENCE + 4
        for ours, found in reports.values():
            assert torch.equal(ours, text)
            pairs = list(zip(found, logits, strict=True))
            assert all(torch.equal(*pair) for pair in pairs) if rank else not any(one for pair in pairs for one in pair)


# Refusals


def refused(train: Callable[[], Any]) -> str:
    """The line in which every rank refuses it, before anything is trained."""
    from ds_vpipe.errors import VPipeError

    try:
        train()
    except VPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cases.close_groups()
    return "not refused"


def own_forward(engine: Any, buffer_id: int) -> None:
    """What a script does in the place of DeepSpeed's forward pass."""


@functools.wraps(PipelineEngine._exec_forward_pass)
def wrapping_forward(engine: Any, buffer_id: int) -> None:
    """Likewise, under the name of DeepSpeed's."""


def refusals() -> dict[str, str]:
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    import ds_vpipe
    from ds_vpipe.run import blocks_are_read

    class TwoForwardPasses(schedule.TrainSchedule):
        """With outputs of a frozen model beside those that are trained."""

    class WithReference(engine_of_script(ds_vpipe.VPipeEngine)):  # type: ignore[misc]
        def train_batch(self) -> None:
            self._exec_schedule(TwoForwardPasses(self.micro_batches, self.num_stages, self.stage_id))

    def with_method(method: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PipelineEngine._INSTRUCTION_MAP, schedule.ForwardPass, method)
            built_late({})

    def with_another_number() -> None:
        engine = built_late({})
        engine.micro_batches = M + 1
        engine.train_batch(data())

    def with_schedule() -> None:
        built_by_script(WithReference, module_of(weighted_loss, num_stages=2), {}).train_batch()

    def without_optimizer() -> None:
        net, content = module_of(weighted_loss, num_stages=2), ds_config({}, bf16={"enabled": True})
        ds_vpipe.initialize(model=net, config=content)[0].train_batch(data())

    def in_run() -> None:
        with blocks_are_read():
            built_by_script(engine_of_script(PipelineEngine), module_of(weighted_loss, num_stages=2), {})

    return {
        "method": refused(lambda: with_method(own_forward)),
        "wrapped": refused(lambda: with_method(wrapping_forward)),
        "in run": refused(in_run),
        "number": refused(with_another_number),
        "schedule": refused(with_schedule),
        "none": refused(without_optimizer),
        "bf16": refused(lambda: built_late({}, bf16={"enabled": True})),
        "moved": refused(lambda: built_late({"partition": [5, 5]})),
    }


def test_what_is_not_carried_out_is_refused(worlds: Worlds) -> None:
    """On every rank, in one line."""
    first, second = worlds.run(2, refusals)
    assert first == second
    assert first["method"].startswith("VPipeConfigError: _INSTRUCTION_MAP[ForwardPass]: got own_forward of test_pip")
    line = "VPipeConfigError: _INSTRUCTION_MAP[ForwardPass]: got PipelineEngine._exec_forward_pass of test_pip"
    assert first["wrapped"].startswith(line)
    assert first["number"].startswith("VPipeError: engine.micro_batches: got 3 in training, allowed is 2")
    assert first["schedule"].startswith("VPipeConfigError: _exec_schedule(): got a refusals.<locals>.TwoForwardPasses")
    late = "VPipeConfigError: _configure_optimizer() after initialize(): got an optimizer"
    for name, reason in {"bf16": "fp16 or bf16", "moved": "parameters that their stage does not have"}.items():
        assert first[name].startswith(f"{late} with {reason}")
    assert first["in run"].startswith("VPipeConfigError: vpipe: got a block for a engine_of_script.<locals>.Trainer")
    assert first["none"].startswith("VPipeConfigError: optimizer: got none")
    assert all("\n" not in line for line in first.values())
