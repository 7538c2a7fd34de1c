"""Failures end every rank soon, and every rank says which stage failed or was waited for."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import loops
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS
from torch import distributed as dist
from torch import nn
from worlds import Outcome, Worlds

from ds_vpipe.engine.links.wiring import Wiring

pytestmark = pytest.mark.mp

STAGES = 4
LIMIT_S = 30


def train_until(event: str, at: int, timeout_s: float, link: str = cases.LINK) -> str:
    """Train; stage 2 fails at its ``at``-th forward pass in the way that ``event`` names."""
    block = {"partition": "uniform", "peer_timeout_s": timeout_s, "link": link}
    trained = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], block), STAGES)
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == at and event == "raise":
            raise ValueError("boom\nand more")
        if count == at and event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == at and event == "stop":
            timer = threading.Timer(12, os.kill, (os.getpid(), signal.SIGKILL))  # do not outlive the test
            timer.start()
            time.sleep(100)

    if trained.stage_id == 2:
        trained.module.forward_funcs[0].register_forward_pre_hook(fail)
    iterator = toy.data()
    for _ in range(50):
        trained.train_batch(iterator)
    return "trained"


def failed(outcomes: list[Outcome], rank: int) -> str:
    outcome = outcomes[rank]
    assert not outcome.good
    assert outcome.seconds < LIMIT_S, f"rank {rank} took {outcome.seconds:.0f} s"
    return outcome.text


@pytest.mark.parametrize(("at", "link"), [(1, cases.LINK), (6, cases.LINK), (6, "ipc"), (6, "nccl")])
def test_layer_that_raises(doomed: Worlds, at: int, link: str) -> None:
    outcomes = doomed.outcomes(STAGES, train_until, "raise", at, 60, link)
    assert failed(outcomes, 2) == "ValueError: boom\nand more"
    for rank in (0, 1, 3):
        text = failed(outcomes, rank)
        assert text.startswith(f"PipelinePeerError: stage {rank} (rank {rank}) stopped "), text
        assert f"stage 2 (rank 2) failed in F{at - 1}: ValueError: boom and more" in text
        assert "\n" not in text


def built(link: str) -> None:
    """Make links; stage 1 fails at its first sending end, when others wait for it."""
    block = {"partition": "uniform", "peer_timeout_s": 60, "link": link}
    boom = mock.patch.object(Wiring, "sender", side_effect=ValueError("boom\nand more"))
    with boom if dist.get_rank() == 1 else nullcontext():
        cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], block), STAGES)


@pytest.mark.parametrize("link", ["auto", "host", "ipc", "nccl"])
def test_links_that_one_stage_cannot_make(doomed: Worlds, link: str) -> None:
    outcomes = doomed.outcomes(STAGES, built, link)
    assert failed(outcomes, 1) == "ValueError: boom\nand more"
    for rank in (0, 2, 3):
        text = failed(outcomes, rank)
        assert "stage 1 (rank 1) failed while it made its links: ValueError: boom and more" in text, text
        assert text.startswith(f"PipelinePeerError: stage {rank} (rank {rank}) stopped waiting for "), text
        assert "\n" not in text


@pytest.mark.parametrize("link", [cases.LINK, "ipc", "nccl"])
def test_rank_that_is_killed(doomed: Worlds, link: str) -> None:
    outcomes = doomed.outcomes(STAGES, train_until, "kill", 6, 60, link)
    assert failed(outcomes, 2) == "died"
    noticed = r"stage (1 \(rank 1\) waited for RECV_GRAD|3 \(rank 3\) waited for RECV_ACT)\d+ from stage 2 \(rank 2\): "
    waits = {0: "RECV_GRAD", 1: "RECV_GRAD", 3: "RECV_ACT"}
    for rank, wait in waits.items():  # the first neighbour to notice lets all others know
        text = failed(outcomes, rank)
        # What it waited for, or the pass before which it read the news, beside who is gone.
        at = rf"(waited for {wait}\d+ from |stopped waiting for {wait}\d+ from |stopped at \w+: )"
        assert re.match(rf"PipelinePeerError: stage {rank} \(rank {rank}\) {at}", text), text
        assert re.search(noticed + r"it is gone \(connection closed\)", text), text
        assert "\n" not in text


@pytest.mark.parametrize("link", [cases.LINK, "ipc", "nccl"])
def test_rank_that_hangs(doomed: Worlds, link: str) -> None:
    outcomes = doomed.outcomes(STAGES, train_until, "stop", 6, 3, link)
    waits = {0: "RECV_GRAD[0-9]+ from stage 1", 1: "RECV_GRAD[0-9]+ from stage 2", 3: "RECV_ACT[0-9]+ from stage 2"}
    for rank, wait in waits.items():
        text = failed(outcomes, rank)
        begin = rf"PipelinePeerError: stage {rank} \(rank {rank}\) (waited|stopped waiting) for {wait} "
        assert re.match(begin, text), text  # whoever looks at all logs finds the one that nobody hears of
        # All run into the limit at about the same time, and the first of them lets the others know.
        assert re.search(r"from stage [12] \(rank [12]\): nothing came within 3 s", text), text
        assert "peer_timeout_s" in text
        assert "\n" not in text


def train_beside_a_replica(at: int) -> str:
    """Train two replicas of two stages; a rank fails, catches its error and stays alive until the others have ended."""
    import torch.distributed as dist

    texts = []
    for doomed in (True, False):
        trained = cases.engine(cases.config(2, OPTIMIZERS["SGD"][0], {"peer_timeout_s": 100}), 2)
        fails = doomed and (trained.stage_id, trained.grid.data_parallel_id) == (1, 0)
        count = 0

        def fail(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise ValueError("boom\nand more")

        if fails:
            trained.module.forward_funcs[0].register_forward_pre_hook(fail)
        iterator = toy.data(replica=trained.grid.data_parallel_id)
        text = "trained"
        try:
            for _ in range(6):
                trained.train_batch(iterator)
        except (RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
        texts.append(text)
        dist.distributed_c10d._get_default_store().add(f"ended {doomed}", 1)
        while fails and dist.distributed_c10d._get_default_store().add(f"ended {doomed}", 0) < 4:
            time.sleep(0.02)
        trained.destroy()
        del trained
    return "\n---\n".join(texts)


def test_failure_ends_other_replicas_too_and_a_second_engine_trains(worlds: Worlds) -> None:
    at = 6
    outcomes = worlds.outcomes(4, train_beside_a_replica, at)
    assert all(outcome.good for outcome in outcomes), [outcome.details for outcome in outcomes]
    assert max(outcome.seconds for outcome in outcomes) < LIMIT_S
    texts = [outcome.value.split("\n---\n") for outcome in outcomes]
    assert [second for _, second in texts] == ["trained"] * 4
    assert texts[2][0] == "ValueError: boom\nand more"
    for rank in (0, 1, 3):
        text = texts[rank][0]
        assert text.startswith(f"PipelinePeerError: stage {rank // 2} (rank {rank}) stopped "), text
        assert f"stage 1 (rank 2) failed in F{at - 1}: ValueError: boom and more" in text
        assert "\n" not in text


def stop_iteration(where: str) -> str:
    """The line with which a run of two stages ends, in the second of which something raises StopIteration."""
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"peer_timeout_s": 40})
    trained = (loops if where == "evaluated call" else cases).engine(ds_config, 2)

    count = 0

    def stop(*_: Any) -> None:
        nonlocal count
        count += 1
        if where != "backward" or count == 2:  # the batch's last
            raise StopIteration

    if trained.is_last_stage():
        if where == "update":
            trained.basic_optimizer.register_step_pre_hook(stop)
        elif where == "backward":
            trained.module.forward_funcs[0].register_full_backward_hook(stop)
        elif where == "evaluated call":
            loops.at_first_layer(trained, stop)
        else:
            trained.module.forward_funcs[0].register_forward_pre_hook(stop)
    text = "trained"
    try:
        if where == "evaluated call":
            trained.eval()
            trained(*toy.micro_batch(0))
        elif where == "eval_batch()":
            trained.eval_batch(toy.data())
        else:
            iterator = toy.data()
            for _ in range(3):
                trained.train_batch(iterator)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert trained.statistics() == [] or where == "update"  # no batch has been trained
    trained.destroy()
    return text


@pytest.mark.parametrize("where", ["forward", "backward", "update", "eval_batch()", "evaluated call"])
def test_stop_iteration_of_a_layer_or_an_optimizer_is_a_failure(worlds: Worlds, where: str) -> None:
    """It does not look like the end of the data, which other stages would wait for."""
    outcomes = worlds.outcomes(2, stop_iteration, where)
    first, second = (outcome.value for outcome in outcomes)
    assert second.startswith("VPipeError: "), second
    assert second.endswith(" raised StopIteration"), second
    assert first.startswith("PipelinePeerError: stage 0 (rank 0) "), first
    assert first.endswith(" raised StopIteration"), first


def line_of(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def calls_after_destroy(folder: str) -> dict[str, str]:
    """The line of every call after ``destroy()``, of both ways to train."""
    lines = {}
    trained = cases.engine(cases.config(1, OPTIMIZERS["SGD"][0], {}), 2)
    iterator = toy.data()
    for _ in range(3):
        trained.train_batch(iterator)
    trained.destroy()
    before = cases.parameters(trained)
    calls: dict[str, Callable[[], object]] = {
        "train_batch()": lambda: trained.train_batch(iterator),
        "eval_batch()": lambda: trained.eval_batch(toy.data()),
        "save_checkpoint()": lambda: trained.save_checkpoint(folder),
        "load_checkpoint()": lambda: trained.load_checkpoint(folder),
        "set_depths()": lambda: trained.set_depths([2, 0]),
        "repartition()": lambda: trained.repartition([4, 6]),
        "quiesce()": trained.quiesce,
    }
    lines |= {name: line_of(call) for name, call in calls.items()}
    assert all(torch.equal(value, before[name]) for name, value in cases.parameters(trained).items())
    trained.destroy()
    looped = loops.engine(cases.config(1, OPTIMIZERS["SGD"][0], {}), 2)
    for number in range(3):
        loss = looped(*toy.micro_batch(number))
        looped.backward(loss)
        looped.step()
    looped.destroy()
    lines["engine(...)"] = line_of(lambda: looped(*toy.micro_batch(3)))
    lines["drain()"] = line_of(looped.drain)
    looped.destroy()
    return lines


def test_calls_after_destroy_are_refused_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    """The last stage would update and return a loss, and the first fail in the middle."""
    for lines in worlds.run(2, calls_after_destroy, str(tmp_path / "checkpoint")):
        for call, line in lines.items():
            assert line.startswith(f"VPipeError: {call}: called after destroy(), allowed is before it; build "), line
    assert not (tmp_path / "checkpoint").exists()


def calls_within(folder: str) -> list[str]:
    """The lines of runs in whose midst a call comes, as that of a signal's handler; it comes on one rank or on all."""
    lines = []

    def at(count: int, call: Callable[[], object]) -> Callable[..., None]:
        passes = itertools.count(1)

        def hook(*_: Any) -> None:
            if next(passes) == count:
                call()

        return hook

    def data(call: Callable[[], object]) -> Iterator[Any]:
        for number, item in enumerate(toy.data()):
            if number == 4:
                call()
            yield item

    for where in ("layer", "data", "drain", "evaluation", "evaluation data", "loop", "evaluated call", "destroyed"):
        ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"peer_timeout_s": 20})
        trained = (loops if where in ("loop", "evaluated call") else cases).engine(ds_config, 2)
        layer = trained.module.forward_funcs[0]

        def save(trained: Any = trained) -> None:
            trained.save_checkpoint(folder)

        def run(trained: Any = trained, where: str = where, layer: Any = layer, save: Any = save) -> None:
            first = trained.is_first_stage()
            if where in ("layer", "evaluation", "loop", "evaluated call") and first:
                hook = at(1 if where.startswith("eval") else 5, save)
                if where in ("loop", "evaluated call"):
                    loops.at_first_layer(trained, hook)
                else:
                    layer.register_forward_pre_hook(hook)
            if where == "destroyed" and first:
                layer.register_forward_pre_hook(at(5, trained.destroy))
            if where.startswith("evaluation"):
                own = data(lambda: trained.set_depths([1, 0])) if where == "evaluation data" and first else toy.data()
                trained.eval_batch(own, num_micro_batches=6)
                return
            if where in ("loop", "evaluated call"):
                trained.train(where == "loop")
                for number in range(8):
                    loss = trained(*toy.micro_batch(number))
                    if where == "loop":
                        trained.backward(loss)
                        trained.step()
                return
            iterator = toy.data(5) if where == "drain" else toy.data()
            if where == "data" and first:
                iterator = data(lambda: trained.eval_batch(toy.data()))
            if where == "drain":
                watcher = SimpleNamespace(before=lambda action: str(action) == "B3" and save(), after=lambda _: None)
                trained.executor.watchers.append(watcher)
            for _ in range(5):
                trained.train_batch(iterator)

        lines.append(line_of(run))
        trained.destroy()
    return lines


def test_calls_in_the_midst_of_a_batch_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    """They would find the stages at different micro-batches. A signal's handler or a layer may make them."""
    first, second = worlds.run(2, calls_within, str(tmp_path / "checkpoint"))
    calls = [
        "save_checkpoint()",
        "eval_batch()",
        *["save_checkpoint()"] * 2,
        "set_depths()",
        *["save_checkpoint()"] * 2,
        "destroy()",
    ]
    actions = ["F4", "LOAD4", "B3", "F0", "evaluation", "F4", "F0", "F4"]
    for call, action, line, other in zip(calls, actions, first, second, strict=True):
        said = f"VPipeError: {call}: called while {action} is under way, allowed is between two batches; let a signal "
        assert said in line, line
        assert said in other or other.endswith("evaluation data: another rank has failed to read"), other
        assert "\n" not in line + other
    assert not (tmp_path / "checkpoint").exists()


WRONG = [
    ({"sync_mode": "async"}, "vpipe.sync_mode"),
    ({"syncmode": "asp"}, "vpipe.syncmode"),
    ({"schedule": "gpipe"}, "vpipe.schedule"),
    ({"virtual_stages": 2}, "vpipe.virtual_stages"),
    ({"weight_sync": "stashing"}, "vpipe.weight_sync"),
    ({"weight_sync": "stash", "sync_mode": "bsp"}, "vpipe.weight_sync"),
    ({"partition": [5, 6]}, "vpipe.partition"),
    ({"partition": [4, 3, 3]}, "vpipe.partition"),
    ({"partition": [10, 0]}, "vpipe.partition"),
    ({"partition": "[5, 5]"}, "vpipe.partition"),
    ({"partition": "profile"}, "vpipe.profile"),
    ({"partition": "type:Nothing"}, "vpipe.partition"),
    ({"partition": "type:("}, "vpipe.partition"),
    ({"partition": "missing.json"}, "vpipe.partition"),
    ({"recompute_ratio": 1.3}, "vpipe.recompute_ratio"),
    ({"recompute_ratio": [0, -0.1]}, "vpipe.recompute_ratio"),
    ({"recompute_ratio": [0, 0, 0]}, "vpipe.recompute_ratio"),
    ({"recompute_ratio": "auto"}, "vpipe.profile"),
    ({"stage_to_depth_map": [0, 1]}, "vpipe.stage_to_depth_map"),
    ({"stage_to_depth_map": [2, 1]}, "vpipe.stage_to_depth_map"),
    ({"stage_to_depth_map": [1, 0, 0]}, "vpipe.stage_to_depth_map"),
    ({"stage_to_depth_map": "auto"}, "vpipe.profile"),
    ({"gradient_clipping_scope": "global"}, "vpipe.gradient_clipping_scope"),
    ({"peer_timeout_s": 0}, "vpipe.peer_timeout_s"),
    ({"timeline": {"enabled": 1}}, "vpipe.timeline"),
    ({"timeline": True}, "vpipe.timeline"),
    ("asp", "vpipe"),
]
WRONG_ELSEWHERE = [
    ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, "zero_optimization.stage"),
    ({"amp": {"enabled": True}}, "amp"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype",
    ),
    ({"amp": {"enabled": True}}, "amp.enabled"),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
    ({"wall_clock_breakdown": True, "steps_per_print": None}, "steps_per_print"),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        "activation_checkpointing.contiguous_memory_optimization",
    ),
]


def refusals() -> list[str]:
    import deepspeed

    import ds_vpipe

    module = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
    lines = []
    for block, extra in [*((b, {}) for b, _ in WRONG), *(({}, e) for e, _ in WRONG_ELSEWHERE)]:
        ds_config = {**cases.config(1, OPTIMIZERS["SGD"][0], None, **extra), "vpipe": block}
        try:
            ds_vpipe.initialize(model=module, config=ds_config)
        except ds_vpipe.VPipeConfigError as error:
            lines.append(str(error))
        else:
            lines.append("accepted")
    return lines


def test_wrong_configurations_are_refused_in_one_line_on_every_rank(worlds: Worlds) -> None:
    ranks = worlds.run(2, refusals)
    for position, (_, key) in enumerate([*WRONG, *WRONG_ELSEWHERE]):
        for lines in ranks:
            line = lines[position]
            assert key in line, line
            assert "\n" not in line
            assert "got " in line, line
            assert "allowed" in line, line
    assert len(ranks[0]) >= 25
