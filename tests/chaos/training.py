"""Training script of the chaos runs: it resumes by itself, and does everything that a run may do in nine updates.

Usage, on every rank: ``python -m ds_vpipe.run training.py SHAPE FOLDER [EVENT]``, the event as JSON, or ``null`` for a
count of calls alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed
import torch
import toy
from events import OF_SAVES, PEER_TIMEOUT_S, Event, recorded
from torch import nn

from ds_vpipe.errors import VPipeError
from ds_vpipe.schedules.moves import Move, earliest_cut_over

UPDATES, EPOCH = 9, 5  # an epoch's end is a drain
SAVED, EVALUATED, MOVED = (2, 4, 6), (1, 4, 7), 3  # after so many updates
ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}


@dataclass(frozen=True)
class Shape:
    """A configuration to train in, and its number of ranks."""

    stages: int
    replicas: int = 1
    micro_batches: int = 2
    block: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    move: tuple[int, int, int] | None = None  # layer, from, to

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    @property
    def recovers(self) -> bool:
        """Whether it needs ``--restarts``, and goes on from states in memory."""
        return "recovery" in self.block


SHAPES = {
    "moves": Shape(3, move=(4, 1, 0)),
    "replicas": Shape(
        2, 2, 1, {"gradient_clipping_scope": "delayed_global"}, {"bf16": {"enabled": True}, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1}}, tied=True,
    ),
    "host": Shape(3, 1, 2, {"link": "host", "weight_sync": "vertical", "recompute_ratio": 0.5}),
    "recovery": Shape(3, 1, 1, {"recovery": {"every": 1}}),
}  # fmt: skip


class ChaosError(RuntimeError):
    """Stands for whatever may go wrong in a function."""


class Injector:
    """Counts this rank's calls by phase, and sets off an event, if there is one, at the call that it names."""

    def __init__(self, event: Event | None, folder: Path) -> None:
        self.calls: Counter[str] = Counter()
        self.event, self._folder = event, folder
        self._phase = self._around = "start"  # around an update, the phase that it is in
        self._delays = random.Random(event.draw if event is not None else 0)
        self._roots = tuple(str(Path(module.__file__).parent) for module in (deepspeed, sys.modules["ds_vpipe"]))  # type: ignore[arg-type]

    def begin(self, name: str) -> None:
        self._phase = name

    def before(self, action: Any) -> None:
        """As a watcher of a stage's actions."""
        if action.kind.name in ("REDUCE", "STEP"):
            self._around, self._phase = self._phase, "update"
        elif self.event is not None and self.event.kind == "delay" and action.kind.name.startswith(("SEND", "RECV")):
            time.sleep(self._delays.uniform(0, self.event.seconds))

    def after(self, action: Any) -> None:
        if action.kind.name in ("REDUCE", "STEP"):
            self._phase = self._around

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        """As Python's profile function."""
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(self._roots):
            return
        number = self.calls[self._phase]
        self.calls[self._phase] = number + 1
        if self.event is not None and (self.event.phase, self.event.call) == (self._phase, number):
            sys.setprofile(None)
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            (self._folder / "place").write_text(place)
            self._come(self.event)

    def _come(self, event: Event) -> None:
        if event.kind == "raise":
            raise ChaosError("chaos")
        if event.kind == "clock":
            time.time = lambda now=time.time, jump=1e6 * (event.draw - 0.5): now() + jump  # type: ignore[assignment, misc]
        if event.kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(30_000 * event.draw), resource.RLIM_INFINITY))
        if event.kind == "removed":
            for path in (self._folder / "checkpoints").glob(".*.unfinished"):
                shutil.rmtree(path, ignore_errors=True)
        numbers = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "stop": signal.SIGSTOP, "hang": signal.SIGSTOP}
        if event.kind in numbers:
            (self._folder / "process").write_text(str(os.getpid()))
            os.kill(os.getpid(), numbers[event.kind])

    def save(self, engine: Any, folder: str) -> None:
        """Save, once more if files could not be written."""
        try:
            engine.save_checkpoint(folder)
        except VPipeError as error:
            if self.event is None or self.event.kind not in OF_SAVES:
                raise
            print(f"[rank {os.environ['RANK']}] chaos: {error}", flush=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            engine.save_checkpoint(folder)


def train(shape: Shape, folder: Path, injector: Injector) -> dict[str, Any]:
    """Train to the end from the latest checkpoint, if there is one."""
    checkpoints = folder / "checkpoints"
    latest = checkpoints / "latest"
    begun = int(latest.read_text().removeprefix("global_step")) if latest.is_file() else 0
    partition: Any = "uniform"
    if shape.move is not None:  # a resumed run begins with the split of its checkpoint
        partition = [len(part) for part in (range(0, 4), range(4, 7), range(7, 10))]
        if begun > MOVED:
            partition = [5, 2, 3]
    torch.manual_seed(1234)
    config = {
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "gradient_accumulation_steps": shape.micro_batches,
        "optimizer": ADAMW,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **shape.extra,
        "vpipe": {"peer_timeout_s": PEER_TIMEOUT_S, "partition": partition, "staleness": "off", **shape.block},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    specs = toy.tied_specs() if shape.tied else toy.layer_specs(dropout=0.1)
    loss_fn = toy.mean_over_positions if shape.tied else nn.CrossEntropyLoss()
    net = deepspeed.pipe.PipelineModule(specs, num_stages=shape.stages, loss_fn=loss_fn, partition_method="uniform")
    engine = deepspeed.initialize(model=net, config=config)[0]
    engine.executor.watchers.append(injector)
    if begun or shape.recovers:
        injector.begin("load")
    if not engine.recover() and begun:
        engine.load_checkpoint(str(checkpoints))
    replica, losses = engine.grid.data_parallel_id, {}
    phase = "fill"
    iterator: Any = None
    while engine.global_steps < UPDATES:
        update = engine.global_steps
        if iterator is None:
            done, ahead = engine.consumed_micro_batches, EPOCH * shape.micro_batches
            iterator = toy.data(done - done % ahead + ahead, done, replica)
        drains = update % EPOCH == EPOCH - 1 or update == UPDATES - 1
        moves = shape.move is not None and update in (MOVED, MOVED + 1)
        injector.begin("drain" if drains else "move" if moves else phase)
        if shape.move is not None and update == MOVED:
            layer, source, target = shape.move
            cut_over = earliest_cut_over(engine.pipeline, source, target, update)
            engine.move_layer(Move(layer, source, target, cut_over))
        try:
            losses[update] = float(engine.train_batch(iterator)).hex()
        except StopIteration:
            iterator = None
            continue
        phase = "train"
        if update + 1 in EVALUATED:
            injector.begin("evaluation")
            engine.eval_batch(toy.data(10_000 + shape.micro_batches, 10_000, replica))
        if update + 1 in SAVED:
            injector.begin("save")
            injector.save(engine, str(checkpoints))
    injector.begin("end")
    weights = {
        name: hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in engine.module.named_parameters()
    }
    engine.destroy()
    return {"losses": losses, "weights": weights}


def main() -> None:
    _, name, folder, *given = sys.argv
    rank = os.environ["RANK"]
    Path(folder, f"begun.{os.getpid()}.{os.environ['MASTER_PORT']}").touch()
    if os.environ.get("DS_VPIPE_RESTART", "0") != "0":
        given = []
    event = recorded(json.loads(given[0])) if given and given[0] != "null" else None
    injector = Injector(event, Path(folder))
    if given and (event is None or event.rank == int(rank)):
        sys.setprofile(injector.called)
    result = train(SHAPES[name], Path(folder), injector)
    Path(folder, f"result.{rank}.json").write_text(json.dumps({**result, "calls": injector.calls}))


if __name__ == "__main__":
    main()
