"""What a rank does in tests of scripts that loop over forward, backward and step: the toy model with a loss inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def split(ds_config: dict[str, Any], stages: int) -> dict[str, Any]:
    """A JSON whose partition counts :class:`Whole`'s layers, for its pieces: one before them and one after them too."""
    from ds_vpipe.partition import uniform_partition

    block = ds_config["vpipe"]
    counts = block.get("partition")
    if counts == "uniform":
        counts = uniform_partition(len(toy.LAYERS), stages)
    if isinstance(counts, (list, tuple)):
        first, *others = counts
        *others, last = [first + 1, *others]
        block = {**block, "partition": [*others, last + 1]}
    return {**ds_config, "vpipe": block, "pipeline": {"stages": stages}}


def by_identity(parameters: Iterable[nn.Parameter]) -> Callable[[Iterable[Any]], list[Any]]:
    """Selection of those among ``parameters``."""
    owned = {id(parameter) for parameter in parameters}
    return lambda given: [parameter for parameter in given if id(parameter) in owned]


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
        model=whole,
        config=split(ds_config, stages),
        optimizer=made,
        lr_scheduler=None if scheduler is None else scheduler(made),
        model_parameters=None if parameters is None else parameters(whole),
    )[0]


def at_first_layer(trained: Any, call: Callable[[], object]) -> None:
    """Let the stage's first layer call something in every pass, but not where the model's first call is tried out."""
    from ds_vpipe.schedules.actions import Action

    layer = next(layer for layer in trained.module.layers if list(layer.parameters()))

    def hook(*_: Any) -> None:
        if isinstance(trained.stage.action, Action):
            call()

    layer.register_forward_pre_hook(hook)


def parameters(trained: Any) -> dict[str, torch.Tensor]:
    """This stage's parameters by layer number and name, as the reference has them."""
    found = cases.parameters(trained).items()
    return {name.partition("layers.")[2].replace(".layer.", ".", 1): value for name, value in found}


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
