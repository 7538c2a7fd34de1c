"""What scripts do beside forward, backward and step: it means what it would mean without a pipeline, or is refused."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import loops
import numpy as np
import pytest
import torch
import toy
from test_exactness import difference
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import CaseFailed, Worlds

from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.loop.evaluation import ScriptEvaluation, digest
from ds_vpipe.engine.loop.script_loss import LossGate
from ds_vpipe.engine.loop.script_rates import ScriptRates
from ds_vpipe.engine.modules.random_states import own_random_numbers
from ds_vpipe.engine.updates.parameter_groups import fill, follow
from ds_vpipe.errors import CallOrderError, VPipeError
from ds_vpipe.splitting.split import split_in_process

STAGES, MICRO_BATCHES, ROUNDS = 2, 2, 10
SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Plain(nn.Module):
    """A user's model: ids [4, 6] and labels to a loss, without labels to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=13)
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 13)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Noisy(nn.Module):
    """A block that remembers what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(8, 8), torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.drawn = mask()
        return self.linear(hidden) * self.drawn.repeat(2)


class Moody(nn.Module):
    """A block that computes something else in evaluation, without a trace in what autograd saves."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.linear, self.checkpoints = nn.Linear(8, 8), checkpoints

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.checkpoints and self.training:
            return checkpoint(self.transform, hidden, use_reentrant=False)
        return self.transform(hidden)

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) * (2.0 if self.training else 0.5)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 13, (4, 6), generator=generator), torch.randint(0, 13, (4, 6), generator=generator)


def config(micro_batches: int = MICRO_BATCHES, **block: Any) -> dict[str, Any]:
    made = cases.config(micro_batches, SGD, {"peer_timeout_s": 30, **block}, pipeline={"stages": STAGES})
    return {**made, "train_micro_batch_size_per_gpu": 4}


def built(ds_config: dict[str, Any], **given: Any) -> tuple[Any, Plain]:
    import ds_vpipe

    torch.manual_seed(0)
    model = Plain()
    given = {name: make(model) for name, make in given.items()}
    return ds_vpipe.initialize(model=model, config=ds_config, **given)[0], model


def trained(ds_config: dict[str, Any], habit: str = "") -> dict[str, Any]:
    """Train with a habit of scripts; returns this stage's parameters."""
    engine, model = built(ds_config)
    weight = torch.zeros((), requires_grad=True)
    updates = itertools.count(1)
    if habit == "hook":
        engine.basic_optimizer.param_groups[0]["lr"] = rate(0)
        engine.basic_optimizer.register_step_post_hook(
            lambda optimizer, *_: optimizer.param_groups[0].update(lr=rate(next(updates)))
        )
    for number in range(ROUNDS):
        loss = engine(*batch(number))
        loss = loss + 0.1 * sum(p.square().sum() for p in engine.parameters()) if habit == "decay" else loss
        loss = loss * weight.exp() - weight if habit == "weighted" else loss
        if habit in ("none", "blocks") and number % MICRO_BATCHES == 0:
            drop(model, habit)
        engine.backward(loss)
        if habit == "clip":
            torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
        if habit == "replace":
            for p in engine.parameters():
                p.grad = None if p.grad is None else p.grad.clamp(-0.01, 0.01)
        if habit == "freeze":
            drop(model, "none")
        ends_batch = engine.is_gradient_accumulation_boundary()
        if habit == "rates" and ends_batch:
            for group in engine.optimizer.param_groups:
                group["lr"] = rate(engine.global_steps)
        engine.step()
        if ends_batch and habit == "zero_grad":
            model.zero_grad()
            engine.module.zero_grad(set_to_none=True)
        if ends_batch and habit in ("none", "blocks"):
            drop(model, habit)
        if number == 4 and habit == "data":
            for p in engine.parameters():
                p.data = p.data.clone()
            engine.drain()
        if number == 4 and habit in ("drain", "quiesce"):
            getattr(engine, habit)()
        if number == 4 and habit == "model.eval()":
            model.eval()
            assert engine(batch(100)[0]).shape == (4, 6, 13)
            model.train()
        if number == 4 and habit in ("evaluate", "infer", "autocast"):
            mode = {"evaluate": torch.no_grad, "infer": torch.inference_mode, "autocast": torch.no_grad}[habit]
            engine.eval()
            with mode(), torch.autocast("cpu", torch.bfloat16, enabled=habit == "autocast"):
                engine(*batch(100))
            engine.train()
    engine.drain()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def drop(model: nn.Module, habit: str) -> None:
    """Gradients, as scripts do it past the optimizer."""
    if habit == "blocks":
        for part in model.children():
            part.zero_grad()
    for p in model.parameters() if habit == "none" else ():
        p.grad = None


def rate(update: int) -> float:
    return 0.2 - 0.03 * update


def changed_in_an_empty_pipeline(ds_config: dict[str, Any], what: str) -> int:
    """Updates of a run whose weights a script replaces, or unfreezes, where the pipeline has been emptied."""
    engine, model = built(ds_config)
    frozen = list(model.blocks[1].parameters())
    for p in frozen if what == "unfrozen" else ():
        p.requires_grad_(False)
    for number in range(ROUNDS):
        engine.backward(engine(*batch(number)))
        engine.step()
        if number == (4 if what == "data in a batch" else 5):
            if what == "unfrozen":  # the evaluation empties it
                for p in frozen:
                    p.requires_grad_(True)
                engine.eval()
                engine(*batch(100))
                engine.train()
            else:
                engine.drain()
                model.state_dict()
                for p in engine.parameters():
                    p.data = p.data.clone()
    engine.drain()
    return int(engine.stashing_optimizer.latest_version)


@pytest.mark.mp
@pytest.mark.parametrize("what", ["data", "data in a batch", "unfrozen"])
@pytest.mark.parametrize("weight_sync", ["stash", "vertical"])
def test_an_empty_pipeline_is_a_place_for_changes(worlds: Worlds, what: str, weight_sync: str) -> None:
    updates = ROUNDS // MICRO_BATCHES
    found = worlds.run(STAGES, changed_in_an_empty_pipeline, config(weight_sync=weight_sync), what)
    assert found == [updates] * STAGES


def boundaries(ds_config: dict[str, Any]) -> list[tuple[bool, bool]]:
    """What the engine says of batches that the script ends, before and after each backward pass."""
    engine, _ = built(ds_config)
    said = []
    for number in range(10):
        engine.set_gradient_accumulation_boundary(number % 5 in (1, 3, 4))  # the last one early
        before = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(*batch(number)))
        said.append((before, engine.is_gradient_accumulation_boundary()))
        engine.step()
    engine.drain()
    return said


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_boundaries_are_what_the_script_has_said(worlds: Worlds, sync_mode: str) -> None:
    """Scripts count their steps by them."""
    wanted = [(ends, ends) for ends in (False, True, False, True, True)] * 2
    assert worlds.run(STAGES, boundaries, config(sync_mode=sync_mode)) == [wanted] * STAGES


def scheduled(ds_config: dict[str, Any], lr_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The rates of a scheduler that the engine steps."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(update) / 0.1)

    engine, model = built(ds_config, lr_scheduler=lambda _: scheduler)
    for number in range(ROUNDS):
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step(lr_kwargs)
    engine.drain()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole(worlds: Worlds, work: Callable[..., Any], *args: Any) -> dict[str, torch.Tensor]:
    found = {name: value for rank in worlds.run(STAGES, work, *args) for name, value in rank.items()}
    assert found.keys() == dict(Plain().named_parameters()).keys()
    return found


@pytest.mark.mp
def test_gradients_in_flight_are_not_dropped(worlds: Worlds) -> None:
    """Where a batch ends for the script it is in the midst of a batch on other stages."""
    wanted = whole(worlds, trained, config())
    for habit in ("zero_grad", "none", "blocks"):
        assert difference(whole(worlds, trained, config(), habit), wanted) == 0, habit


@pytest.mark.mp
def test_an_evaluation_in_any_mode_changes_no_more_than_its_drain(worlds: Worlds) -> None:
    wanted = whole(worlds, trained, config(), "evaluate")
    for habit in ("infer", "autocast", "model.eval()"):
        assert difference(whole(worlds, trained, config(), habit), wanted) == 0, habit


@pytest.mark.mp
def test_a_rest_trains_what_is_in_flight(worlds: Worlds) -> None:
    """It cannot be handed in again, as in an engine that reads its data."""
    assert difference(whole(worlds, trained, config(1), "quiesce"), whole(worlds, trained, config(1), "drain")) == 0


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rates_that_the_script_sets_are_the_batches(worlds: Worlds, micro_batches: int) -> None:
    wanted = whole(worlds, scheduled, config(micro_batches))
    assert difference(whole(worlds, trained, config(micro_batches), "rates"), wanted) == 0
    assert difference(whole(worlds, trained, config(micro_batches), "hook"), wanted) == 0


def warned_of(ds_config: dict[str, Any]) -> list[str]:
    """What is said to a script that has its own scheduler."""
    engine, _ = built(ds_config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.basic_optimizer, lambda update: 0.5**update)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(4):
            engine.backward(engine(*batch(number)))
            engine.step()
            scheduler.step()
    engine.destroy()
    return [str(warning.message) for warning in said if "lr_scheduler.step()" in str(warning.message)]


@pytest.mark.mp
def test_no_rate_is_said_to_be_skipped(worlds: Worlds) -> None:
    """The script is in order, though a stage's first update comes after the scheduler's first step."""
    assert worlds.run(STAGES, warned_of, config(1)) == [[]] * STAGES


def changed_scheduler(ds_config: dict[str, Any], comes: bool, drains: bool) -> list[float]:
    """Rates of a stage's updates where a script sets the engine's scheduler in mid-run, or removes it."""
    from torch.optim.lr_scheduler import LambdaLR

    def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda update: 0.5**update)

    engine, _ = built(ds_config, **({} if comes else {"lr_scheduler": lambda _: halving}))
    seen: list[float] = []
    engine.basic_optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    for number in range(ROUNDS):
        if number == 4 and drains:
            engine.drain()
        if number == 4:
            engine.lr_scheduler = halving(engine.basic_optimizer) if comes else None
        engine.backward(engine(*batch(number)))
        engine.step()
    engine.drain()
    return seen


@pytest.mark.mp
@pytest.mark.parametrize("comes", [True, False])
def test_a_scheduler_comes_and_goes_in_an_empty_pipeline(worlds: Worlds, comes: bool) -> None:
    """Else earlier stages would have the rates of other batches, to the end."""
    ds_config = config(1, stage_to_depth_map=[2, 0])
    late, now = worlds.run(STAGES, changed_scheduler, ds_config, comes, True)
    halved = [0.1 * 0.5**update for update in range(6)]
    assert late == now == pytest.approx([0.1] * 4 + halved if comes else [*halved[:5], *[halved[4]] * 5])
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, changed_scheduler, ds_config, comes, False)
    assert len(failed.value.errors) == STAGES
    for text in failed.value.errors.values():
        assert "engine.lr_scheduler: got another one while micro-batches are in flight" in text
        assert "\n" not in text
    synchronous = config(1, sync_mode="bsp")
    assert worlds.run(STAGES, changed_scheduler, synchronous, comes, False) == [late, late]


class Counting(nn.Module):
    """A block with statistics, random numbers and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.dropout(self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2))


def ended_early(ds_config: dict[str, Any], passes: int) -> tuple[list[list[int]], bool, tuple[Any, ...]]:
    """Counters of a stage's blocks, whether a batch that ends early has drawn from the script's random state, and what
    the engine has counted."""
    import ds_vpipe

    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList([Counting() for _ in range(4)])
    engine = ds_vpipe.initialize(model=model, config=ds_config)[0]
    drew, casts = False, list[bool]()
    for block in model.blocks:
        block.register_forward_hook(lambda *_: casts.append(torch.is_autocast_enabled("cpu")))
    for number in range(passes):
        engine.set_gradient_accumulation_boundary(number == passes - 1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*batch(number))
        engine.backward(loss)
        before = torch.get_rng_state()
        with torch.inference_mode():
            engine.step()
        drew = drew or not torch.equal(before, torch.get_rng_state())
    counted = engine.global_steps, engine.global_samples, engine.micro_steps, engine.was_step_applied()
    engine.drain()
    assert all(casts)
    counts = [[block.calls, int(block.norm.num_batches_tracked)] for block in model.blocks]
    return [found for found in counts if found[1]], drew, counted


@pytest.mark.mp
@pytest.mark.parametrize(("stages", "recompute"), [(1, 0.0), (2, 0.0), (2, 1.0)])
def test_what_completes_a_batch_leaves_nothing_behind(worlds: Worlds, stages: int, recompute: float) -> None:
    """Its passes are no passes of the script's."""
    ds_config = {**config(4, recompute_ratio=recompute), "pipeline": {"stages": stages}}
    for counts, drew, counted in worlds.run(stages, ended_early, ds_config, 2):
        assert counted == (1, 16, 4, True)  # DeepSpeed's engine counts a batch
        assert counts == [[2, 2]] * (4 // stages)
        assert not drew


class Hooking(Plain):
    """Registers hooks in its first forward, as Hugging Face's models do that collect what blocks make."""

    ready = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready = True
            for module in (*self.blocks, self.head):
                module.register_forward_hook(lambda _module, _given, found: found * 1.25)
        return super().forward(tokens, labels)


def with_hooks(blocks: list[dict[str, Any]]) -> list[list[float]]:
    import ds_vpipe

    found = []
    for block in blocks:
        torch.manual_seed(0)
        engine = ds_vpipe.initialize(model=Hooking(), config=config(1, **block))[0]
        losses = []
        for number in range(5):
            losses.append(float(loss := engine(*batch(number))))
            engine.backward(loss)
            engine.step()
        engine.destroy()
        found.append(losses)
    return found


@pytest.mark.mp
def test_hooks_of_a_first_forward_are_there_once(worlds: Worlds) -> None:
    """However often that is run again: a flag, which says that they are there, is as the forward pass has found it."""
    shares = ({}, {"recompute_ratio": 0.5}, {"recompute_ratio": 1.0}, {"swap_ratio": 0.5})
    kept, *others = worlds.run(
        STAGES, with_hooks, [{"sync_mode": mode, **share} for mode in ("bsp", "asp") for share in shares]
    )[0]
    assert others[:3] == [kept] * 3
    assert others[4:] == [others[3]] * 3


def asked(ds_config: dict[str, Any], folder: str) -> tuple[list[bool], bool, bool]:
    """Whether steps were applied; and whether weights that the engine gives, and is given, are the model's."""
    engine, model = built(ds_config)
    said = [engine.was_step_applied()]
    for number in range(5):
        engine.backward(engine(*batch(number)))
        engine.step()
        said.append(engine.was_step_applied())
    engine.backward(engine(*batch(5)))
    engine.step()
    engine.save_checkpoint(folder, "first")
    given = {name: value.clone() for name, value in engine.module_state_dict().items()}
    same = all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    engine.load_module_state_dict({"module": {name: value + 1 for name, value in given.items()}})
    moved = all(torch.equal(value, given[name] + 1) for name, value in model.state_dict().items())
    engine.load_checkpoint(folder, "first")
    back = all(torch.equal(value, given[name]) for name, value in engine.module_state_dict().items())
    engine.destroy()
    return said, same and moved and back, len(given) == 11


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_what_deepspeeds_engine_of_a_whole_model_answers(worlds: Worlds, tmp_path: Path, sync_mode: str) -> None:
    for said, same, whole_model in worlds.run(STAGES, asked, config(sync_mode=sync_mode), str(tmp_path)):
        assert said == [False, False, True, False, True, False]
        assert same
        assert whole_model


def after_the_engine(stages: int) -> list[float]:
    """Norms of gradients of a script that goes on with its model and its optimizer by itself."""
    import ds_vpipe

    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ds_config = {**config(1), "pipeline": {"stages": stages}}
    engine = ds_vpipe.initialize(
        model=model, config={k: v for k, v in ds_config.items() if k != "optimizer"}, optimizer=optimizer
    )[0]
    for number in range(2):
        engine.backward(engine(*batch(number)))
        engine.step()
    engine.destroy()
    norms = []
    for zero_grad in (optimizer.zero_grad, model.zero_grad, optimizer.zero_grad):
        zero_grad()
        model(*batch(9)).backward()
        norms.append(float(model.head.weight.grad.norm()))
    return norms


@pytest.mark.mp
def test_gradients_are_the_scripts_again_after_the_engine(worlds: Worlds) -> None:
    (norms,) = worlds.run(1, after_the_engine, 1)
    assert norms == [norms[0]] * 3


def handed_in(how: str, engine: Any) -> None:
    """Three epochs of five micro-batches, two of which make a batch, or what has the same effect."""
    for epoch in range(3):
        if how == "begun anew":  # as BEiT's and InternVideo's loops do
            engine.zero_grad()
            engine.micro_steps = 0
        elif how in ("begun anew and dropped", "joined"):  # its gradient counts in the next batch, if not dropped
            engine.micro_steps = 0
            assert not engine.is_gradient_accumulation_boundary()
        elif how == "not there":
            engine.drain()
        for number in range(4 if how == "not there" else 5):
            loss = engine(*batch(5 * epoch + number))
            if how == "dropped before backward()" or (how == "begun anew and dropped" and number == 0):
                engine.optimizer.zero_grad()
            engine.backward(loss * 0 if how == "of no weight" and (5 * epoch + number) % 2 == 0 else loss)
            engine.step()
            if how == "dropped after step()":
                engine.zero_grad()


class WholeEngine:
    """DeepSpeed's engine of a whole model, as far as :func:`handed_in` asks for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.micro_steps = model, 0
        self.optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
        self.zero_grad = self.optimizer.zero_grad

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        return self.model(*given)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / MICRO_BATCHES).backward()

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % MICRO_BATCHES == 0

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % MICRO_BATCHES == 0:
            self.optimizer.step()
            self.zero_grad()


def left_over(ds_config: dict[str, Any], how: str) -> dict[str, torch.Tensor]:
    """Weights of this stage after :func:`handed_in`."""
    engine, model = built(ds_config)
    handed_in(how, engine)
    engine.drain()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.numel()}


@pytest.mark.mp
@pytest.mark.parametrize(
    ("how", "in_asp"),
    [
        ("begun anew", "not there"),
        ("begun anew and dropped", "not there"),
        ("dropped before backward()", "of no weight"),
        ("dropped after step()", "of no weight"),
        ("joined", ""),
    ],
)
def test_a_batch_that_is_not_complete_may_be_dropped(worlds: Worlds, how: str, in_asp: str) -> None:
    """In bsp as without a pipeline, and in asp as with other data or losses that have the same effect."""
    wanted = {}
    for case in (how, ""):
        torch.manual_seed(0)
        handed_in(case, WholeEngine(model := Plain()))
        wanted[case] = dict(model.named_parameters())

    def found(sync_mode: str, how: str) -> dict[str, torch.Tensor]:
        parts = worlds.run(STAGES, left_over, config(sync_mode=sync_mode), how)
        return {name: value for part in parts for name, value in part.items()}

    synchronous = found("bsp", how)
    assert difference(synchronous, wanted[how]) < 1e-6 < difference(synchronous, wanted[""])
    if in_asp:
        assert difference(found("asp", how), found("asp", in_asp)) == 0


def in_a_batch(ds_config: dict[str, Any], early: bool) -> list[str]:
    """What is said of a script that changes counts and gradients in the middle of a batch of three micro-batches."""
    engine, model = built(ds_config)
    engine.backward(engine(*batch(0)))
    engine.step()
    said = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(CallOrderError) as error:
            call()
        said.append(str(error.value))

    engine.micro_steps = 5
    refused(lambda: engine(*batch(1)))
    engine.micro_steps = 1
    engine.backward(engine(*batch(1)))
    engine.micro_steps = 0
    refused(engine.step)
    engine.micro_steps = 1
    if early:
        engine.zero_grad()
        engine.set_gradient_accumulation_boundary(True)
    else:
        engine.step()
        engine.backward(engine(*batch(2)))
        engine.zero_grad()
    refused(engine.step)
    engine.step()
    for number in (3, 4):
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*batch(number)))
        engine.step()
    drop(model, "none")
    refused(lambda: engine(*batch(5)))
    return said


@pytest.mark.mp
def test_what_leaves_nothing_to_update_or_half_a_batch_is_refused(worlds: Worlds) -> None:
    for early in (False, True):
        for of_count, of_step, of_drop, of_none in worlds.run(STAGES, in_a_batch, config(3), early):
            assert of_count.startswith("engine.micro_steps: got 5 after 1 of a batch's 3 micro-batches, allowed is")
            assert of_step.startswith("engine.micro_steps: got 0 between engine(...) and step(), allowed is")
            assert of_drop.startswith("zero_grad(): called between backward() and step() of a batch's last")
            assert of_none.startswith("engine(...): got gradients that were changed after backward(), allowed are")


@pytest.mark.mp
def test_arguments_of_a_scheduler_would_be_those_of_another_batch(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, scheduled, config(), {"epoch": 1})
    assert len(failed.value.errors) == STAGES
    for text in failed.value.errors.values():
        assert 'step(lr_kwargs): got {"epoch": 1}; the update that is due is that of an earlier batch' in text


@pytest.mark.mp
@pytest.mark.parametrize(
    ("habit", "line"),
    [
        (
            "clip",
            'step(): got gradients that were changed after backward(), .* "gradient_clipping" in the DeepSpeed JSON',
        ),
        ("replace", "step(): got gradients that were changed after backward(), .* in the DeepSpeed JSON"),
        ("freeze", "step(): got gradients that were changed after backward(), .* in the DeepSpeed JSON"),
        ("data", "p.data = values: got parameters that were put on other memory .* on every rank"),
        ("weighted", "backward(loss): got a loss with terms made of parameters, .* or use weight_decay"),
        ("decay", "backward(loss): got a loss with terms made of parameters, .* or use weight_decay"),
    ],
)
def test_what_one_stage_cannot_do_alone_is_refused(worlds: Worlds, habit: str, line: str) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, trained, config(), habit)
    start, _, end = line.partition(" .* ")
    assert any(start in text and end in text and "\n" not in text for text in failed.value.errors.values())


def hooked(ds_config: dict[str, Any]) -> tuple[list[Any], str]:
    """A weight of both stages after a drain, and the line of a hook on it that comes between two rounds."""
    import ds_vpipe

    model = Plain()
    model.head.weight = model.embedding.weight
    engine = ds_vpipe.initialize(model=model, config=ds_config)[0]
    for number in range(6):
        engine.backward(engine(*batch(number)))
        engine.step()
    engine.drain()
    tied = (model.embedding if engine.stage_id == 0 else model.head).weight
    found = tied.tolist()
    tied.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return found, _error(lambda: engine(*batch(6)))


@pytest.mark.mp
def test_hooks_on_gradients_that_stages_have_parts_of_are_refused_at_any_time(worlds: Worlds) -> None:
    (first, _), (last, _) = ranks = worlds.run(STAGES, hooked, config())
    assert first == last, "copies are equal to their owner's after a drain"
    for _, line in ranks:
        assert "weight: has a hook on its gradient and is used on stages 0, 1, each of which has only a part" in line


def own_states(ds_config: dict[str, Any], folder: str) -> tuple[str, str]:
    """Lines of loading an optimizer's states: those of the rank itself, and those that the first rank has written."""
    engine, _ = built(ds_config)
    file = f"{folder}/optimizer.pt"
    for number in range(4):
        engine.backward(engine(*batch(number)))
        engine.step()
    engine.drain()
    mine = engine.optimizer.state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save(mine, file)
    torch.distributed.barrier()
    lines = []
    for states in (mine, torch.load(file, weights_only=False)):
        try:
            engine.optimizer.load_state_dict(states)
            lines.append("")
        except VPipeError as error:
            lines.append(str(error))
    return lines[0], lines[1]


@pytest.mark.mp
@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}])
def test_states_of_another_stages_optimizer_are_refused(worlds: Worlds, tmp_path: Path, extra: dict[str, Any]) -> None:
    """As a script has them that saves on one rank alone; of equal layers torch would take them."""
    first, second = worlds.run(STAGES, own_states, {**config(), **extra}, str(tmp_path))
    assert first == ("", "")
    assert second[0] == ""
    assert second[1].startswith("optimizer.load_state_dict(): got the states of stage 0 of layers [")
    assert "allowed on stage 1 of layers [" in second[1]


def outputs(ds_config: dict[str, Any]) -> dict[str, Any]:
    """What a script gets of the engine and its module without labels."""
    import ds_vpipe

    with mock.patch("ds_vpipe.engine.engine.outlive_backend_threads") as outlive:
        engine, model = built(ds_config)
    engine.eval()
    with torch.inference_mode():
        output, own = engine(batch(0)[0]), engine(*batch(engine.stage_id))
        by_itself = model(*batch(engine.stage_id))
    return {
        "output": output.clone(),
        "own": own.item(),
        "outlives": outlive.called,
        "vocabulary": engine.module.config.vocab_size,
        "names": list(engine.module.state_dict()),
        "parameters": [name for name, _ in engine.named_parameters()],
        "whole": list(model.state_dict()),
        "called": _error(lambda: engine.module(*batch(0))),
        "by itself": by_itself.item(),
        "in training": _error(lambda: model.train()(*batch(0))),
        "copy": _error(lambda: copy.deepcopy(model).eval()(*batch(0))),
        "split again": _error(lambda: split_in_process(model, STAGES)),
        "made again": _error(lambda: ds_vpipe.initialize(model=engine.module, config=config())),
        "unknown": _error(lambda: engine.module.nothing),
    }


def _error(call: Callable[[], Any]) -> str:
    with pytest.raises((AttributeError, LookupError, RuntimeError, ValueError)) as raised:
        call()
    return str(raised.value)


@pytest.mark.mp
def test_the_module_is_the_users_but_for_other_stages(worlds: Worlds) -> None:
    first, last = worlds.run(STAGES, outputs, config())
    torch.manual_seed(0)
    plain = Plain()
    for number, rank in enumerate((first, last)):
        torch.testing.assert_close(rank["output"], plain(batch(0)[0]).detach())
        assert rank["own"] == pytest.approx(plain(*batch(number)).item()), "the loss of this rank's micro-batch"
        assert rank["vocabulary"] == 13
        assert rank["outlives"]
        assert rank["names"] == rank["whole"] == list(Plain().state_dict())
        assert rank["called"].startswith("engine.module(...): a stage has only a part of the model")
        assert rank["by itself"] == rank["own"], "Trainer evaluates so"
        assert rank["in training"].startswith("Plain(...): called itself, and this rank has only one stage of it")
        assert rank["copy"] == rank["in training"], "its weights are others"
        assert rank["split again"].startswith("model: got a Plain of which an earlier initialize() has left one stage")
        assert rank["made again"] == rank["split again"]
        assert "nothing" in rank["unknown"]
    assert sorted(first["parameters"] + last["parameters"]) == sorted(f"module.{name}" for name in first["whole"])


def warned(ds_config: dict[str, Any], apart: int) -> list[str]:
    """What is said of two rounds in which the ranks' data are ``apart``."""
    engine, _ = built(ds_config)
    with mock.patch("ds_vpipe.engine.loop.engine.logger") as logger:
        for number in range(2):
            loss = engine(*batch(number + apart * engine.stage_id))
            engine.backward(loss)
            engine.step()
    engine.drain()
    return [call.args[0] for call in logger.warning.call_args_list]


@pytest.mark.mp
def test_stages_that_are_handed_different_data_are_noticed(worlds: Worlds) -> None:
    assert worlds.run(STAGES, warned, config(), 0) == [[], []]
    (line,), nothing = worlds.run(STAGES, warned, config(), 1)
    assert nothing == []
    assert "the 2 stages of a pipeline were handed different micro-batches; those of the first stage's rank" in line
    assert "num_replicas=engine.dp_world_size" in line
    assert "\n" not in line


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def order() -> torch.Tensor:
    """What scripts shuffle by."""
    shuffled = random.sample(range(50), 50)
    return torch.cat([torch.randperm(50), torch.tensor(shuffled), torch.tensor(np.random.permutation(50))])


def mask() -> torch.Tensor:
    return torch.cat([torch.rand(2), torch.tensor([random.random()]), torch.tensor([np.random.rand()])])


def drawn(ds_config: dict[str, Any], stages: int, seed: int) -> dict[str, Any]:
    """What the blocks and the script draw in some rounds; the script seeds anew in between."""
    import ds_vpipe

    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList([Noisy() for _ in range(4)])
    engine = ds_vpipe.initialize(model=model, config={**ds_config, "pipeline": {"stages": stages}})[0]
    own = [block for block in model.blocks if isinstance(block.linear.weight, nn.Parameter)]
    rounds, orders, evaluated = [], [], []
    seed_all(3)
    for number in range(4):
        if number == 3:
            seed_all(seed)
        loss = engine(*batch(number))
        rounds.append([block.drawn for block in own])
        engine.backward(loss)
        engine.step()
        orders.append(order())
    for _ in range(2):
        with torch.no_grad():
            engine(*batch(0))  # in training mode
        evaluated.append([block.drawn for block in own])
    orders.append(order())
    cases.end(engine)
    return {"rounds": rounds, "orders": orders, "evaluated": evaluated}


def different(draws: list[torch.Tensor]) -> bool:
    """No number of one is a number of another."""
    return len({number for draw in draws for number in draw.tolist()}) == sum(len(draw) for draw in draws)


@pytest.mark.mp
def test_stages_draw_numbers_of_their_own(worlds: Worlds) -> None:
    """With one seed on all ranks: no two masks are alike, and what the script draws is alike everywhere."""
    first, last = worlds.run(STAGES, drawn, config(partition=[4, 2]), 2, 5)
    assert [len(draws) for draws in (first["rounds"][0], last["rounds"][0])] == [3, 1]
    for number in range(4):
        assert different(first["rounds"][number] + last["rounds"][number])
    assert different([draws[0] for draws in first["rounds"]])
    assert different([draw for draws in first["evaluated"] + last["evaluated"] for draw in draws])
    assert all(torch.equal(*pair) for pair in zip(first["orders"], last["orders"], strict=True))
    again, reseeded = (worlds.run(STAGES, drawn, config(partition=[4, 2]), 2, seed)[0] for seed in (5, 6))
    for number in range(4):
        assert torch.equal(again["rounds"][number][0], first["rounds"][number][0])
        assert torch.equal(reseeded["rounds"][number][0], first["rounds"][number][0]) == (number < 3)


def test_own_numbers_follow_from_the_scripts_states_and_the_place() -> None:
    """Python's of its own, those of torch and NumPy of torch's: a script may seed torch alone."""

    def numbers(seed: int, python_seed: int, place: int) -> tuple[float, ...]:
        torch.manual_seed(seed)
        random.seed(python_seed)
        with own_random_numbers(torch.device("cpu"), place):
            return float(torch.rand(1)), random.random(), float(np.random.rand())

    kept = torch.get_rng_state(), random.getstate()
    same, of_torch, of_python, elsewhere = (numbers(*of) for of in ((1, 2, 3), (4, 2, 3), (1, 4, 3), (1, 2, 4)))
    assert same == numbers(1, 2, 3)
    assert [a != b for a, b in zip(of_torch, same, strict=True)] == [True, False, True]
    assert [a != b for a, b in zip(of_python, same, strict=True)] == [False, True, False]
    assert all(a != b for a, b in zip(elsewhere, same, strict=True))
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])


@pytest.mark.mp
def test_without_other_stages_the_numbers_are_the_scripts(worlds: Worlds) -> None:
    (alone,) = worlds.run(1, drawn, config(), 1, 5)
    seed_all(3)
    for number in range(4):
        if number == 3:
            seed_all(5)
        assert all(torch.equal(found, mask()) for found in alone["rounds"][number])
        assert torch.equal(alone["orders"][number], order())
    for masks in alone["evaluated"]:
        assert all(torch.equal(found, mask()) for found in masks)


@pytest.mark.mp
def test_recomputation_with_dropout_is_exact(worlds: Worlds) -> None:
    blocks = [{"partition": [4, 3, 3], "recompute_ratio": ratio} for ratio in (0, 1)]
    configs = [cases.config(2, SGD, block) for block in blocks]
    plain, recomputed = zip(*worlds.run(3, loops.train_each, configs, 3, 8, dropout=0.3), strict=True)
    without = worlds.run(3, loops.train, configs[0], 3, 8)
    assert difference(cases.merged(recomputed), cases.merged(plain)) == 0
    assert difference(cases.merged(without), cases.merged(plain)) > 0


def test_a_loss_alone_answers_for_the_outputs() -> None:
    """As scripts take it out of what their model returns; what else that is has a remedy in place of torch's errors."""
    loss = LossGate().gated(torch.tensor(2.0))
    assert loss.loss is loss[0] is loss["loss"] is loss
    assert "loss" in loss
    assert "logits" not in loss
    assert not hasattr(loss, "logits")

    def unpack() -> None:
        _loss, _logits = loss

    takes: list[Callable[[], Any]] = [
        unpack, lambda: loss[1:], lambda: loss[:2], lambda: loss[1], lambda: loss[-1], lambda: loss["logits"],
        lambda: loss.logits,
    ]  # fmt: skip
    for take in takes:
        assert "in training a pipeline gives the loss alone" in _error(take)
        assert "in evaluation every rank gets everything" in _error(take)


def test_values_on_their_way_to_another_rank() -> None:
    value = {"loss": torch.tensor(1.5), "rest": (batch(0), None, "text")}
    found = from_bytes(as_bytes(value), torch.device("cpu"))
    assert (found["loss"], found["rest"][1:]) == (1.5, (None, "text"))
    assert torch.equal(found["rest"][0][0], batch(0)[0])


def test_tensors_of_one_message_are_copied_without_it() -> None:
    """Such as a mask and indices that the last stage returns as they have come."""
    message = torch.arange(4096, dtype=torch.uint8)
    mask, order = message[:64].view(torch.float32).data, message[64:128].view(torch.int64).data
    value = {"mask": mask, "order": order, "masks": mask.expand(3, 16), "some": order[::2]}
    copied = as_bytes(value)
    assert len(copied) < len(message)
    for name, tensor in from_bytes(copied, torch.device("cpu")).items():
        assert torch.equal(tensor, value[name]), name
        assert tensor.stride() == value[name].stride(), name


def test_outputs_that_cannot_be_copied_are_refused() -> None:
    stage = SimpleNamespace(pipeline=SimpleNamespace(num_stages=2), is_last=True)
    last: Any = SimpleNamespace(_stage=stage, _engine=SimpleNamespace(evaluation=None))
    with pytest.raises(VPipeError, match=r"^evaluation: forward returned a dict that cannot be copied to the other .*"):
        ScriptEvaluation._everywhere(last, {"loss": torch.ones(()), "call": lambda: None})

    class NoTextError(Exception):
        def __str__(self) -> str:
            raise self

    class NotPickled:
        def __reduce__(self) -> Any:
            raise NoTextError

    with pytest.raises(VPipeError, match=r"returned a NotPickled .* \(NoTextError: its text cannot be shown\); "):
        ScriptEvaluation._everywhere(last, NotPickled())


def test_digests_are_of_types_shapes_and_values() -> None:
    half = torch.arange(6, dtype=torch.bfloat16)
    trees = [
        (half,), (half, None), (half.view(2, 3),), (half.view(2, 3).t(),), (half + 1,), (half.float(),), half[:0],
        half[:0].view(2, 0), None,
    ]  # fmt: skip
    assert len({bytes(digest(tree).tolist()) for tree in trees}) == len(trees)
    assert torch.equal(digest((half.view(2, 3).t(),)), digest((half.view(2, 3).t().contiguous(),)))


def test_names_in_groups_follow_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
    follow(optimizer, loops.by_identity(model[1].parameters()))
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    follow(optimizer, loops.by_identity(model[0].parameters()))
    fill(optimizer, lambda: nn.Parameter(torch.zeros(1)), each_group=False)
    assert len(optimizer.param_groups[0]["param_names"]) == len(optimizer.param_groups[0]["params"]) == 1


def test_rates_wait_for_their_batch() -> None:
    rates, groups = ScriptRates(), [{"lr": 1.0, "params": []}]
    for value in (1.0, 2.0):
        groups[0]["lr"] = value
        rates.queue(groups)
    groups[0]["lr"] = 3.0
    seen = []
    for _ in range(3):
        with rates.of_next_update(groups):
            seen.append(groups[0]["lr"])
    assert seen == [1.0, 2.0, 3.0]
    assert math.isclose(groups[0]["lr"], 3.0)
    rates.queue(groups)
    rates.forget()
    groups[0]["lr"] = 4.0
    with rates.of_next_update(groups):
        assert groups[0]["lr"] == 4.0
    rates.queue(groups)
    groups.append({"lr": 5.0, "params": []})  # of layers that have been frozen so far
    with rates.of_next_update(groups):
        assert [group["lr"] for group in groups] == [4.0, 5.0]


def test_groups_that_a_batch_in_flight_has_stay() -> None:
    rates, groups = ScriptRates(), [{"lr": 1.0, "params": []}, {"lr": 2.0, "params": []}]
    rates.queue(groups)
    with pytest.raises(CallOrderError, match="got 1 parameter groups while a batch with 2 is in flight"):
        rates.of_next_update(groups[1:]).__enter__()


def test_rates_that_an_update_writes_hold_for_the_next() -> None:
    """As a scheduler in a hook of the optimizer's does, unless the script has written since."""
    rates, groups, seen = ScriptRates(), [{"lr": 8.0, "momentum": 0.5, "params": []}], []
    for value in (8.0, 8.0, 3.0, 3.0):
        groups[0]["lr"] = value
        rates.queue(groups)
    for _ in range(4):
        with rates.of_next_update(groups):
            seen.append((groups[0]["lr"], groups[0]["momentum"]))
            groups[0]["lr"] /= 2
            groups[0]["momentum"] += 0.1
    assert seen == [pytest.approx(pair) for pair in ((8.0, 0.5), (4.0, 0.6), (3.0, 0.7), (1.5, 0.8))]
    assert groups[0] == {"lr": 0.75, "momentum": pytest.approx(0.9), "params": []}


def test_rates_in_tensors_wait_for_their_batch() -> None:
    """Schedulers write into them; the script, the optimizer and compiled updates know the tensors."""
    rate, beta = torch.tensor(1.0), torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    (group,), rates, seen = optimizer.param_groups, ScriptRates(), []
    group["betas"] = (beta, 0.9)
    optimizer.step()
    for _ in range(3):
        rates.queue([group])
        scheduler.step()
        beta.mul_(0.5)
    for _ in range(4):
        with rates.of_next_update([group]):
            seen.append((float(group["lr"]), float(group["betas"][0])))
    assert seen == [(1.0, 0.5), (0.5, 0.25), (0.25, 0.125), (0.125, 0.0625)]
    assert group["lr"] is rate
    assert group["betas"][0] is beta


def evaluated_in_flight(ds_config: dict[str, Any], checkpoints: bool) -> dict[str, Any]:
    """Train with an evaluation in between, before which micro-batches are in flight; one block is never trained."""
    import ds_vpipe

    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList([Moody(checkpoints) for _ in range(4)])
    engine = ds_vpipe.initialize(model=model, config=ds_config)[0]
    for number in range(ROUNDS):
        model.blocks[1].eval()
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        if number % 3 == 2:
            engine.eval()
            with torch.no_grad():
                engine(*batch(100))
            assert not any(block.training for block in model.blocks)
            engine.train()
    engine.drain()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    cases.end(engine)
    return found


@pytest.mark.mp
def test_what_is_run_again_after_eval_is_run_as_in_training(worlds: Worlds) -> None:
    """The backward passes in flight come in the evaluation, when the script has set its mode."""
    ways = [(config(1), False), (config(1), True), (config(1, recompute_ratio=1), False)]
    wanted, *found = (dict(ChainMap(*worlds.run(STAGES, evaluated_in_flight, *way))) for way in ways)
    for way, weights in zip(ways[1:], found, strict=True):
        assert difference(weights, wanted) == 0, way


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).relu()


class Keeping(nn.Module):
    """A block that keeps what its model reads behind the last one."""

    def __init__(self, model: Compiled) -> None:
        super().__init__()
        self.linear, self.models = nn.Linear(4, 4), [model]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(self.linear(inputs))
        self.models[0].kept = output.mean()
        return output


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.kept = Front(), torch.zeros(())
        self.blocks = nn.ModuleList([Keeping(self) for _ in range(4)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.front(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean() + self.kept


def compiled(block: dict[str, Any], which: str) -> tuple[int, int, list[float], dict[str, torch.Tensor]]:
    """Graphs compiled, warnings, losses and weights, where a script compiles ``which``."""
    import ds_vpipe

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if which != "again":
        torch._dynamo.reset()
    torch.manual_seed(0)
    whole = Compiled()
    for module in {"front": [whole.front], "blocks": whole.blocks, "model": [whole]}.get(which, ()):
        module.compile(backend=backend)
    with mock.patch("ds_vpipe.engine.modules.split_module.log_dist") as log:
        ds_config = cases.config(1, SGD, block, pipeline={"stages": STAGES})
        engine = ds_vpipe.initialize(model=whole, config=ds_config)[0]
    if which in ("engine", "again"):
        engine.compile(backend=backend if which == "engine" else "aot_eager")
    losses = []
    for number in range(7):
        engine.train(number < 6)
        loss = engine(torch.full((toy.MICRO_BATCH, 4), 0.1 * number))
        losses.append(loss.item())
        if number < 6:
            engine.backward(loss)
            engine.step()
    engine.drain()
    weights = {name: value.clone() for name, value in cases.parameters(engine).items()}
    engine.destroy()
    return len(graphs), log.call_count, losses, weights


@pytest.mark.mp
@pytest.mark.parametrize("block", [{}, {"sync_mode": "bsp"}, {"recompute_ratio": 0.5}], ids=str)
def test_blocks_are_compiled_and_the_interpreter_is_not(worlds: Worlds, block: dict[str, Any]) -> None:
    ways = ("", "front", "blocks", "model", "engine", "again")
    found = {which: worlds.run(STAGES, compiled, block, which) for which in ways}
    for which, ranks in found.items():
        for rank, (one, other) in enumerate(zip(ranks, found[""], strict=True)):
            (graphs, warnings, losses, weights), (_, _, plain_losses, plain) = one, other
            assert (graphs > 0) == (which in ("blocks", "engine") or (which == "front" and rank == 0)), which
            assert warnings == (which == "model"), which
            assert losses[:-1] == plain_losses[:-1], which
            assert losses[-1] == pytest.approx(plain_losses[-1], rel=1e-6), which  # torch evaluates graphs otherwise
            assert difference(weights, plain) == 0, which


class Halved(nn.Module):
    """A model of 16 bits that is given inputs of 32, and hands on numbers that 16 bits cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        large = inputs = self.blocks[0](inputs)
        large = large.float() + 1e5
        for block in self.blocks[1:]:
            inputs = torch.tanh(block(inputs)) + (large / 1e6).to(inputs.dtype)
        return inputs.float().mean()


def cast_by_deepspeed(block: dict[str, Any] | None) -> list[float]:
    from deepspeed.accelerator import get_accelerator

    import ds_vpipe

    get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    torch.manual_seed(0)
    extra: dict[str, Any] = {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1.0}}
    extra |= {} if block is None else {"pipeline": {"stages": STAGES}}
    ds_config = cases.config(1, SGD, block, **extra)
    model = Halved()
    engine = ds_vpipe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)[0]
    losses = []
    for number in range(4):
        losses.append(engine(torch.full((toy.MICRO_BATCH, 4), 0.1 * number)))
        engine.backward(losses[-1])
        engine.step()
    engine.eval()
    losses.append(engine(torch.ones(toy.MICRO_BATCH, 4)))
    engine.destroy()
    return [loss.item() for loss in losses]


@pytest.mark.mp
def test_deepspeed_casts_what_the_script_hands_in_and_nothing_between_stages(worlds: Worlds) -> None:
    (stock,) = worlds.run(1, cast_by_deepspeed, None)
    for losses in worlds.run(STAGES, cast_by_deepspeed, {"sync_mode": "bsp"}):
        assert losses == stock


def asked_of_the_engine(mode: str) -> tuple[int, bool, float, tuple[int, int], int, str]:
    """What DeepSpeed's timer has counted, the optimizer's rate, sizes before and after a change, updates, a refusal."""
    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    ds_config = cases.config(2, SGD, {"sync_mode": mode}, **extra)
    engine = loops.engine(ds_config, 2)
    loops.rounds(engine, 0, 8)
    timer = engine.tput_timer
    counted, quick = timer.global_step_count, timer.avg_samples_per_sec() > 0
    rate = engine.defaults["lr"]
    loops.rounds(engine, 8, 1)
    engine.set_train_micro_batch_size(toy.MICRO_BATCH)
    with pytest.raises(CallOrderError) as midst:
        engine.set_train_micro_batch_size(1)
    loops.rounds(engine, 9, 1)
    before = engine.train_batch_size()
    engine.set_train_micro_batch_size(1)
    after = engine.train_batch_size()
    assert (timer.batch_size, timer.config.synchronized) == (after, False)
    loops.rounds(engine, 10, 2)
    engine.drain()
    updates = engine.stashing_optimizer.latest_version
    engine.set_train_batch_size(5)
    assert timer.batch_size == 5
    loops.rounds(engine, 12, 4)
    engine.drain()
    assert engine.stashing_optimizer.latest_version == updates  # the new batch lacks a micro-batch
    engine.destroy()
    return counted, quick, rate, (before, after), updates, str(midst.value)


@pytest.mark.mp
@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_what_a_script_may_ask_and_set(worlds: Worlds, mode: str) -> None:
    for counted, quick, rate, sizes, updates, midst in worlds.run(2, asked_of_the_engine, mode):
        assert (counted, quick, rate) == (4, True, 0.1)
        assert sizes == (2 * toy.MICRO_BATCH, 2)
        assert updates == 6
        assert midst.startswith("set_train_micro_batch_size(1): called after 1 of a batch's 2 micro-batches")
