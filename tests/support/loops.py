"""What a rank does in tests of scripts that loop over forward, backward and step: the toy model with a loss inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cases
import reference
import torch
import toy
from torch import nn


class Carry(nn.Module):
    """A layer of the toy model that passes the labels on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return self.layer(inputs[0]), inputs[1]


class Loss(nn.Module):
    """The last layer, and the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(inputs[0]).float(), inputs[1])


class Whole(nn.Module):
    """The toy model as scripts without pipelines have it: ``forward(tokens, labels) -> loss``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        *layers, last = (
            kind(100 + 10 * position, *([dropout] if kind is toy.Scale else []))
            for position, kind in enumerate(toy.LAYERS)
        )
        self.layers = nn.ModuleList([*(Carry(layer) for layer in layers), Loss(last)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value: Any = (tokens, labels)
        for layer in self.layers:
            value = layer(value)
        return value


def split_by_hand(whole: Whole, stages: int) -> Any:
    """A pipeline module of ``whole`` that keeps its parameters."""
    from ds_vpipe.engine.modules.split_module import CalledModule

    class Split(CalledModule):
        def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
            given = dict(zip(("tokens", "labels"), args, strict=False)) | kwargs
            return given["tokens"], given["labels"]

    return Split(list(whole.layers), num_stages=stages, partition_method="uniform")


def engine(
    ds_config: dict[str, Any],
    stages: int,
    dropout: float = 0.0,
    optimizer: Callable[[nn.Module], Any] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    parameters: Callable[[nn.Module], Any] | None = None,
) -> Any:
    """An engine as ``ds_vpipe.initialize`` gives it for :class:`Whole`; the optimizer is made of the whole model."""
    import deepspeed

    import ds_vpipe

    if "fp16" in ds_config:
        deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    whole = Whole(dropout)
    made = None if optimizer is None else optimizer(whole)
    return ds_vpipe.initialize(
        model=split_by_hand(whole, stages),
        config=ds_config,
        optimizer=made,
        lr_scheduler=None if scheduler is None else scheduler(made),
        model_parameters=None if parameters is None else parameters(whole),
    )[0]


def parameters(trained: Any) -> dict[str, torch.Tensor]:
    """This stage's parameters by layer number and name, as the reference has them."""
    return {name.replace(".layer.", "."): value for name, value in cases.parameters(trained).items()}


def rounds(trained: Any, first: int, count: int) -> list[float]:
    """Hand in ``count`` micro-batches, from number ``first`` on; the losses as this rank's script sees them."""
    losses = []
    for number in range(first, first + count):
        tokens, labels = toy.micro_batch(number, trained.grid.data_parallel_id)
        loss = trained(tokens=tokens, labels=labels)
        losses.append(loss.item())
        trained.backward(loss)
        trained.step()
    return losses


def train(ds_config: dict[str, Any], stages: int, count: int, **given: Any) -> dict[str, Any]:
    """Train ``count`` micro-batches and report."""
    trained = engine(ds_config, stages, **given)
    losses = rounds(trained, 0, count)
    trained.drain()
    report = {
        "stage": trained.stage_id,
        "parameters": parameters(trained),
        "losses": losses,
        "latest": trained.stashing_optimizer.latest_version,
        "allocated": trained.stashing_optimizer.versions.allocated,
        "steps": trained.global_steps,
    }
    trained.destroy()
    return report


def train_each(ds_configs: list[dict[str, Any]], stages: int, count: int, **given: Any) -> list[dict[str, Any]]:
    """:func:`train` for several configurations in one world."""
    reports = []
    for ds_config in ds_configs:
        reports.append(train(ds_config, stages, count, **given))
        cases.close_groups()
    return reports


@dataclass
class Replay(reference.Replay):
    """The reference, with the loss of every micro-batch."""

    each: list[float] = field(default_factory=list)

    def forward(self, j: int, batch: int, replica: int) -> Any:
        loss, leaves = super().forward(j, batch, replica)
        self.each.append(float(loss.detach()))
        return loss, leaves
