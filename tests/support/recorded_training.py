"""Training script of the tests of records and replays: it resumes by itself where there is a checkpoint.

Usage, on every rank: ``recorded_training.py SHAPE FOLDER UPDATES [FAULT]``, the fault as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import toy
from torch import nn

import ds_vpipe
from ds_vpipe.schedules.moves import Move, earliest_cut_over

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}
SOAP = {"type": "SOAP", "params": {"lr": 3e-3}}


@dataclass(frozen=True)
class Shape:
    """A configuration to train in."""

    stages: int
    replicas: int = 1
    micro_batches: int = 2
    block: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    saved: tuple[int, ...] = (3, 6)
    moves: tuple[tuple[int, int, int, int], ...] = ()  # update, layer, from, to
    interval: int = 0  # layers of a block that DeepSpeed recomputes
    loader: bool = False  # DeepSpeed reads the data, from their beginning in each process
    looks: bool = False  # at the balance, with seconds that are made up anew in each process

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


SHAPES = {
    "plain": Shape(2),
    "dropout": Shape(3, block={"stage_to_depth_map": [3, 1, 0]}),
    "ties": Shape(2, 2, block={"gradient_clipping_scope": "delayed_global"}, tied=True,
                  extra={"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}),
    "nadam": Shape(3, micro_batches=1, block={"staleness": {"nadam": True}, "recompute_ratio": 0.5}),
    "soap": Shape(3, micro_batches=1, block={"weight_sync": "vertical"}, extra={"optimizer": SOAP}),
    "live": Shape(3, block={"replan": {"every": 2, "moves": "live"}, "partition": [8, 1, 1]}, looks=True),
    "drain": Shape(3, block={"replan": {"every": 2}, "partition": [8, 1, 1]}, looks=True),
    "depths": Shape(3, block={"stage_to_depth_map": "auto", "replan": {"every": 2, "max_staleness": 3}}, looks=True),
    "blocks": Shape(2, interval=3),
    "loader": Shape(2, loader=True),
    "bsp": Shape(2, block={"sync_mode": "bsp"}),
    "moved": Shape(2, micro_batches=1, block={"stage_to_depth_map": [3, 0], "staleness": "off"}, moves=((2, 4, 0, 1),)),
    "loop": Shape(2, extra={"pipeline": {"stages": 2}}),
}  # fmt: skip


class Whole(nn.Module):
    """The layers as a plain module, whose script calls forward, backward and step."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [toy.Embed, *[toy.Scale] * 6, toy.Pool]
        self.layers = nn.ModuleList(kind(100 + 10 * at) for at, kind in enumerate(kinds))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return nn.functional.cross_entropy(tokens, labels)


def planted(net: Any, engine: Any, fault: dict[str, Any]) -> None:
    """Let a layer of this stage go wrong in one micro-batch, which its own count of forward passes names."""
    stage, kind = engine.stage, fault["kind"]
    if kind == "weight":
        return
    number, position = fault["layer"], fault["micro_batch"]
    if isinstance(net, Whole):
        layer = net.layers[number]
    elif net._local_start <= number < net._local_stop:
        layer = net.forward_funcs[number - net._local_start]
    else:
        return

    def now() -> bool:
        kind_of_action = getattr(getattr(stage.action, "kind", None), "name", "")
        return layer.training and kind_of_action == "FORWARD" and stage.action.index == position

    def wrong(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    def before(module: nn.Module, given: Any) -> None:
        if now() and kind == "input hook":
            given[0].register_hook(wrong)

    def after(module: nn.Module, given: Any, output: torch.Tensor) -> Any:
        if now() and kind == "output":
            return output * float("nan")
        if now() and kind == "scale":
            return output * 1000
        if now() and kind == "output hook":
            output.register_hook(wrong)
        return output

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    if kind == "parameter hook":
        weight = next(layer.parameters())
        weight.register_hook(lambda g: wrong(g) if getattr(stage.action, "index", None) == position else g)


def data(engine: Any, fault: dict[str, Any]) -> Any:
    """Micro-batches from where training is, one of them with a sample that is none."""
    at = engine.consumed_micro_batches
    for tokens, labels in toy.data(None, at, engine.grid.data_parallel_id):
        if fault.get("floats"):
            tokens = torch.nn.functional.one_hot(tokens, toy.HIDDEN + 3).float()[..., : toy.HIDDEN]
        if fault.get("kind") == "data" and at == fault["micro_batch"]:
            tokens[0, 0, 0] = float("nan")
        yield tokens, labels
        at += 1


def made_up(engine: Any) -> None:
    """Seconds that differ from run to run, as measured ones do, but say that layers or depths should change."""
    draw = random.SystemRandom()
    follows = engine.balance.depths is not None

    def seconds(*_: Any) -> tuple[float, float]:
        slowness = 1.0 if follows else draw.choice((1.0, 2.0, 4.0))
        return 0.1 * slowness, 0.2 * slowness

    def passes() -> list[tuple[float, float]]:
        return [(1e-6 * draw.lognormvariate(0, 0.5), 2e-6 * draw.lognormvariate(0, 0.5)) for _ in range(10)]

    engine.balance._probe.seconds = seconds
    if follows:
        engine.balance._costs.passes = passes


def train(name: str, folder: Path, updates: int, fault: dict[str, Any]) -> list[str]:
    """Train from the latest checkpoint, if there is one, to the end, and save there."""
    shape, checkpoints = SHAPES[name], folder / "checkpoints"
    torch.manual_seed(1234)
    config = {
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "gradient_accumulation_steps": shape.micro_batches,
        "optimizer": ADAMW,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **shape.extra,
        "vpipe": {"peer_timeout_s": 30.0, "record": str(folder / "record"), **shape.block},
    }
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    specs = toy.tied_specs() if shape.tied else toy.layer_specs(dropout=0.1)
    if fault.get("floats"):
        specs = specs[1:]
    loss_fn = toy.mean_over_positions if shape.tied else nn.CrossEntropyLoss()
    net: Any = Whole()
    if name != "loop":
        net = deepspeed.pipe.PipelineModule(
            specs,
            num_stages=shape.stages,
            loss_fn=loss_fn,
            partition_method="uniform",
            activation_checkpoint_interval=shape.interval,
        )
    samples = [sample for micro_batch in toy.data(30) for sample in zip(*micro_batch, strict=True)]
    engine = ds_vpipe.initialize(model=net, config=config, training_data=samples if shape.loader else None)[0]
    if fault:
        planted(net, engine, fault)
    if shape.looks:
        made_up(engine)
    if checkpoints.exists():
        engine.load_checkpoint(str(checkpoints))
    iterator, losses = None if shape.loader else data(engine, fault), []
    while engine.global_steps < updates:
        if fault.get("kind") == "weight" and engine.global_steps == fault["update"]:
            for name, parameter in net.named_parameters():
                if name.startswith(f"{fault['layer']}."):
                    parameter.data.view(-1)[0] = float("inf")
        for move in shape.moves:
            if move[0] == engine.global_steps:
                engine.move_layer(Move(*move[1:], earliest_cut_over(engine.pipeline, *move[2:], move[0])))
        losses.append(batch(engine, net, iterator).hex())
        if engine.global_steps in shape.saved and engine.global_steps < updates:
            engine.save_checkpoint(str(checkpoints))
    engine.save_checkpoint(str(folder / "end"), tag="state")
    engine.destroy()
    return losses


def batch(engine: Any, net: Any, iterator: Any) -> float:
    """One update; the mean loss, or what the loop sees of it."""
    if not isinstance(net, Whole):
        return float(engine.train_batch(iterator))
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(*next(iterator))
        engine.backward(loss)
        engine.step()
    return float(loss)


def main() -> None:
    _, name, folder, updates, *fault = (word for word in sys.argv if not word.startswith("--local_rank"))
    train(name, Path(folder), int(updates), json.loads(fault[0]) if fault else {})


if __name__ == "__main__":
    main()
