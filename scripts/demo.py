"""The same BERT on the same text, trained by DeepSpeed's pipeline engine and by ours in turns: speed and loss.

Both engines live in the same processes, one per stage, and train by turns of some updates, so that whatever else the
machine does slows both down. Model, initial weights, text, order of the samples, optimizer, learning rates, clipping
and layers per stage are the same; nothing is emulated. Each engine has the same seconds of training in all, so the
faster one makes more updates of the same size.
"""

import argparse
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import distributed

import ds_vpipe
from ds_vpipe.commands.argument_types import count
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.data import TrainingData, micro_batches_of, prepare_on_readers
from ds_vpipe.models.bert.loss import PretrainingLoss, validate
from ds_vpipe.models.bert.model import Model, model_of
from ds_vpipe.models.start import exit_code, silence, start_process_group
from ds_vpipe.staleness.soap import SOAP
from ds_vpipe.tables import aligned
from ds_vpipe.timelines.figure import Curve, draw
from ds_vpipe.timelines.merge import merge, read_recordings
from ds_vpipe.timelines.report import html_report
from ds_vpipe.timelines.timeline import Timeline

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "ds_configs" / "bert_tiny_cpu.json"
STOCK, OURS = "DeepSpeed", "ds_vpipe"
SECONDS = 100  # of training by each engine
SAMPLES = 32  # of a micro-batch
TEXT = ["--max_seq_length", "32", "--mlm_probability", "0.3"]  # learned sooner than longer sequences and fewer masks
TURN = 10  # updates
VALIDATIONS = 10
RECORDED = 20  # updates of a timeline
MOVING, LOOK = 45, 20  # of one in which layers move, and from one look at the balance to the next

Make = Callable[[dict[str, Any] | None], tuple[Any, PretrainingLoss]]


@dataclass
class Run:
    """One engine's training."""

    name: str
    engine: Any
    loss: PretrainingLoss
    batches: Any
    seconds: float = 0.0
    losses: list[tuple[float, float]] = field(default_factory=list)  # seconds of training, loss over held-out text

    def turn(self) -> None:
        """Train some updates and count the time of the slowest rank, the same number on all."""
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(TURN):
            self.engine.train_batch(self.batches)
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        distributed.all_reduce(took, op=distributed.ReduceOp.MAX)
        self.seconds += float(took)

    def validate(self, data: TrainingData) -> None:
        """Add the loss over held-out text, of masked words alone. Its time does not count."""
        self.losses.append((self.seconds, validate(self.engine, self.loss, data.held_out)["masked_lm_loss"]))

    @property
    def rate(self) -> float:
        """Micro-batches per second."""
        return float(self.engine.global_steps * self.engine.micro_batches / self.seconds)

    def reaches(self, level: float) -> float | None:
        """Seconds until the loss comes down to a level, linearly between validations. None if it does not."""
        for (earlier, above), (later, below) in pairwise(self.losses):
            if above > level >= below:
                return earlier + (later - earlier) * (above - level) / (above - below)
        return None


def maker(model: Model, stages: int) -> Make:
    """A function that makes an engine from a "vpipe" block, DeepSpeed's own without one."""

    def make(block: dict[str, Any] | None) -> tuple[Any, PretrainingLoss]:
        config = json.loads(CONFIG.read_text(encoding="utf-8"))
        config |= {"train_micro_batch_size_per_gpu": SAMPLES, "steps_per_print": 10**9}
        del config["vpipe"]
        if block is not None:
            config["vpipe"] = block
        loss = PretrainingLoss()
        with silence():
            module = PipelineModule(model.layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
            # DeepSpeed does not know the name "SOAP": it gets the same optimizer, made by hand.
            optimizer = SOAP(module.parameters(), **config.pop("optimizer")["params"]) if block is None else None
            return ds_vpipe.initialize(model=module, config=config, optimizer=optimizer)[0], loss

    return make


def train(make: Make, data: TrainingData, seconds: int, say: Callable[[str], None]) -> list[Run]:
    """Train with both engines, whichever has had less time next."""
    runs = []
    for name, block in ((STOCK, None), (OURS, {})):
        engine, loss = make(block)
        runs.append(Run(name, engine, loss, micro_batches_of(engine, data.training, 0, 10**9)))
    say("Seconds of training for each engine, its updates, loss of masked words in held-out text (nats):")
    for run in runs:
        run.validate(data)
    validations = min(VALIDATIONS, seconds)
    for number in range(1, validations + 1):
        mark = number * seconds / validations
        while (behind := min(runs, key=lambda run: run.seconds)).seconds < mark:
            behind.turn()
        for run in runs:
            run.validate(data)
        found = (f"{run.name} {run.engine.global_steps:6} {run.losses[-1][1]:7.3f}" for run in runs)
        say(f"{mark:7.0f} s     {'     '.join(found)}")
    return runs


def compare(runs: list[Run], entropy: float | None, folder: Path) -> None:
    """Print speeds and losses, and draw the losses over time."""
    stock, ours = runs
    (took, target), reached = stock.losses[-1], ours.reaches(stock.losses[-1][1])
    rows = [
        {
            "": run.name,
            "micro-batches/s": f"{run.rate:.1f}",
            "updates": run.engine.global_steps,
            "seconds": f"{run.seconds:.1f}",
            "loss": f"{run.losses[-1][1]:.3f}",
            f"loss {target:.3f} after": "not reached" if at is None else f"{at:.1f} s",
        }
        for run, at in ((stock, took), (ours, reached))
    ]
    print(aligned(rows))
    print(f"{OURS} trains {ours.rate / stock.rate:.2f} times as many micro-batches per second", end="")
    print("." if reached is None else f", and comes to {STOCK}'s final loss in {reached / took:.0%} of its time.")
    end = max(took, ours.seconds)
    curves = [Curve(run.name, run.losses, bold=run is ours) for run in runs]
    curves.append(Curve(f"final loss of {STOCK}", [(0, target), (end, target)], dashed=True))
    if entropy is not None:
        print(f"Unigram entropy of the text, what a model without context comes to: {entropy:.3f} nats")
        curves.append(Curve("unigram entropy of the text", [(0, entropy), (end, entropy)], dashed=True))
    title = f"The same BERT on the same text, {stock.engine.num_stages} stages"
    draw(folder / "loss.png", {title: curves}, "seconds of training", "loss of masked words (nats)")


def timeline(
    make: Make, data: TrainingData, folder: Path, title: str, block: dict[str, Any], updates: int = RECORDED
) -> Timeline | None:
    """Recording of a few updates with a "vpipe" block; None but on the first rank."""
    shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()
    engine, _ = make({**block, "timeline": {"enabled": True, "path": str(folder)}})
    batches = micro_batches_of(engine, data.training, 0, updates)
    for _ in range(updates):
        engine.train_batch(batches)
    engine.destroy()  # writes the recording
    distributed.barrier()
    return replace(merge(read_recordings(folder)), title=title) if distributed.get_rank() == 0 else None


def work() -> None:
    """One stage of both engines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=count, default=SECONDS, help=f"of training by each (default: {SECONDS})")
    parser.add_argument("--synthetic", action="store_true", help="random tokens in place of text")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    options = parser.parse_args()
    rank, stages = start_process_group()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    folder = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--deepspeed_config", str(CONFIG), *TEXT, *(["--synthetic"] if options.synthetic else [])]
    arguments = parse_arguments(words)
    model = model_of(arguments)
    # DeepSpeed's reduction of tied weights, in a run of which no user could change it.
    warnings.filterwarnings("ignore", "c10d::broadcast_", UserWarning)
    say(
        f"{model.description}, on {stages} stages with an update per micro-batch, by {STOCK}'s pipeline engine and by "
        f"{OURS}\nBoth have {OURS}'s optimizer SOAP at the same rates: only the pipeline differs"
    )
    if (cores := len(os.sched_getaffinity(0))) < stages:
        say(f"{stages} stages share {cores} cores: neither engine shows the speed that it has on as many devices")
    say("Preparing the text, docstrings of installed packages (kept in a cache for the next run) ...")
    data = prepare_on_readers(arguments, model.config, stages)
    say(data.description)
    make = maker(model, stages)
    runs = train(make, data, options.seconds, say)
    if rank == 0:
        print()
        compare(runs, data.unigram_entropy, folder)
    say("\nRecording timelines of both schedules, and of layers that move ...")
    of_stock = f"{STOCK}'s schedule, which {OURS} follows in bsp"
    uneven = [len(model.layers) - stages + 1] + [1] * (stages - 1)
    replan = {"partition": uneven, "replan": {"every": LOOK}}
    timelines = [
        timeline(make, data, folder / "timelines" / name, *what)
        for name, *what in (
            ("bsp", of_stock, {"sync_mode": "bsp"}),
            ("asp", OURS, {}),
            ("replan", f'{OURS} from the split {uneven}, with "replan"', replan, MOVING),
        )
    ]
    if rank == 0:
        (folder / "report.html").write_text(html_report([t for t in timelines if t], f"{STOCK} and {OURS}"), "utf-8")
    say(f"loss over time: {folder / 'loss.png'}\ntimelines of both, and of layers that move: {folder / 'report.html'}")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(exit_code(work))
