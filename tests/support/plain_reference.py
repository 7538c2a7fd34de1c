"""Runs a script of ``plain_scripts`` in this process, with the reference of asynchronous updates as its engine.

The whole model is called once per micro-batch, with the weights of the version that every stage's rule names. There is
no pipeline, no piece of a model and no schedule in it.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import reference
import torch
from torch import nn
from torch.func import functional_call

Place = reference.Place
Groups = list[dict[str, Any]]


def flat(name: str) -> str:
    """A parameter's name without dots, which names in a module may not have."""
    return name.replace(".", "/")


class Held(nn.Module):
    """The parameters of one stage."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(flat(name), nn.Parameter(value.detach().clone()))


class ScriptReplay(reference.Replay):
    """The reference, with the whole model's call in the place of the layers' one after the other.

    Attributes:
        model: the script's.
        stage_of: stages of its parameters, by name.
        copies: stages of tied weights' further names.
        micro_batches: M.
        clip: a stage's largest norm of gradients.
        make_optimizer: of the named parameters of a stage.
        places: where each parameter is, by name.
        calls: arguments of every micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_of: Mapping[str, int],
        copies: Mapping[str, int],
        micro_batches: int,
        clip: float,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    ) -> None:
        self.model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        first = {id(p): name for name, p in reversed(list(named.items()))}
        owners = {name: first[id(p)] for name, p in named.items()}
        stages = max(stage_of.values()) + 1
        held: list[dict[str, torch.Tensor]] = [{} for _ in range(stages)]
        self.places: dict[str, Place] = {}
        ties = []
        for name, owner in owners.items():
            if name in copies:
                ties.append([(stage_of[owner], flat(owner)), (copies[name], flat(name))])
                held[copies[name]][name] = named[name]
                self.places[name] = (copies[name], flat(name))
            else:
                held[stage_of[owner]][owner] = named[name]
                self.places[name] = (stage_of[owner], flat(owner))
        layers = [Held(parameters) for parameters in held]
        names = {id(p): name for layer in layers for name, p in layer.named_parameters()}
        super().__init__(
            counts=[1] * stages,
            depths=[stages - 1 - stage for stage in range(stages)],
            micro_batches=micro_batches,
            clip=clip,
            make_optimizer=lambda parameters: make_optimizer([(names[id(p)], p) for p in parameters]),
            layers=layers,
            ties=ties,
        )

    def forward(self, j: int, batch: int, replica: int) -> tuple[torch.Tensor, dict[Place, torch.Tensor]]:
        leaves: dict[Place, torch.Tensor] = {}
        for stage, depth in enumerate(self.depths):
            version = max(self.refill(j), j - depth) // self.micro_batches
            leaves |= {(stage, n): w.clone().requires_grad_() for n, w in self.history[version][stage].items()}
        args, kwargs = self.calls[j]
        weights = {name: leaves[place] for name, place in self.places.items()}
        output = functional_call(self.model, weights, args, kwargs, tie_weights=False)
        return loss_of(output), leaves

    def named(self) -> dict[str, torch.Tensor]:
        """The newest parameters, by the names that the script's model has for them."""
        return {name: self.history[-1][stage][held] for name, (stage, held) in self.places.items()}


def loss_of(output: Any) -> torch.Tensor:
    """What a script differentiates of what its model returns."""
    return output if isinstance(output, torch.Tensor) else output["loss"]


class Engine:
    """What ``deepspeed.initialize`` returns to the script: records calls, and has the replay train whole batches."""

    def __init__(self, model: nn.Module, replay: ScriptReplay) -> None:
        self.model = self.module = model
        self.replay = replay
        self.device, self.global_steps, self.micro_steps = torch.device("cpu"), 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.replay.calls.append((args, kwargs))
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.replay.micro_batches == 0

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.replay.train(self.global_steps)
            self.global_steps += 1
        self.micro_steps += 1

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.replay.optimizers[0].param_groups]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """All stages end what has been handed in, so that the pipeline is empty afterwards."""
        self.replay.refills = (*self.replay.refills, self.micro_steps)
        self.replay.refresh_copies(self.global_steps - 1)


def run(
    script: Path,
    stage_of: Mapping[str, int],
    copies: Mapping[str, int],
    micro_batches: int,
    clip: float,
    optimizer: Callable[[Groups], torch.optim.Optimizer],
    options: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Run ``script``; returns the parameters that its training ends with.

    Args:
        script: which hands a plain module to ``deepspeed.initialize``.
        stage_of: stages of the model's parameters, by name.
        copies: stages of tied weights' further names.
        micro_batches: M.
        clip: the JSON's ``gradient_clipping``.
        optimizer: made of a stage's groups, where the script passes none.
        options: arguments of the script.
    """
    made: list[Engine] = []

    def initialize(args: Any, model: nn.Module, model_parameters: Any = None, **given: Any) -> Any:
        whole = given.get("optimizer")
        groups = listed_groups(whole.param_groups if whole is not None else model_parameters)
        names = {id(p): flat(name) for name, p in model.named_parameters()}
        group_of = {names[id(p)]: position for position, group in enumerate(groups) for p in group["params"]}

        def of_stage(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            here: Groups = [{**group, "params": []} for group in groups]
            for name, parameter in named:
                here[group_of[name]]["params"].append(parameter)
            return optimizer(here) if whole is None else scheduled(whole, here, given["lr_scheduler"])

        replay = ScriptReplay(model, stage_of, copies, micro_batches, clip, of_stage)
        made.append(Engine(model, replay))
        return made[0], None, None, None

    with tempfile.TemporaryDirectory() as folder:  # for the model that the script writes in the end
        arguments = [str(script), "--output", str(Path(folder, "output")), *options]
        with mock.patch.object(deepspeed, "initialize", initialize), mock.patch.object(sys, "argv", arguments):
            runpy.run_path(str(script), run_name="__main__")
    return made[0].replay.named()


def listed_groups(given: Any) -> Groups:
    """Parameter groups from what an optimizer may be given."""
    given = list(given)
    return [dict(group) for group in given] if isinstance(given[0], dict) else [{"params": given}]


def scheduled(whole: torch.optim.Optimizer, groups: Groups, scheduler: Any) -> torch.optim.Optimizer:
    """An optimizer of the script's kind for one stage, with the rates of the script's scheduler."""
    settings = [{k: v for k, v in group.items() if k not in ("lr", "initial_lr")} for group in groups]
    rate = groups[0]["initial_lr"]
    mine = type(whole)(settings, lr=rate)  # type: ignore[call-arg]
    step, taken = mine.step, itertools.count()

    def at_its_rate(*args: Any) -> None:
        update = next(taken)
        for group, factor in zip(mine.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(update)
        step(*args)

    mine.step = at_its_rate  # type: ignore[method-assign, assignment]
    return mine
