#!/usr/bin/env python
"""What asynchronous training costs in quality, and what mitigations of staleness bring back.

``python scripts/bench_convergence.py`` trains a small BERT on the docstrings of the installed packages, or on
``--text``, by :class:`ds_vpipe.replay.Replay`, whose updates are the engine's bit for bit: synchronously with each
optimizer, and as an asynchronous pipeline of K stages with M = 1 and M = K and each mitigation. Every arm sees the same
samples per update. Its learning rate is the best of some on the first seed, each trained in full, and the other seeds
are trained with that. Asynchronous arms go on for some updates, which shows when they come to the synchronous loss.

Every run is one line of ``--output``; a line that is there is not computed again, so that a run that was stopped goes
on, and one with more seeds, arms or rates adds to it. The table and the picture are made of that file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "nadam": {"nadam": True},
    "feedback": {"error_feedback": True},
    "prediction": {"weight_prediction": True},
    "rescheduling": {"lr_rescheduling": {"num_steps": 500}},
    "nadam+feedback": {"nadam": True, "error_feedback": True},
    "nadam+prediction": {"nadam": True, "weight_prediction": True},
    "nadam+rescheduling": {"nadam": True, "lr_rescheduling": {"num_steps": 500}},
}
SYNCHRONOUS = ("adamw", "nadam")
WARM_UP = 100


@dataclass(frozen=True)
class Arm:
    """What is compared. ``stages`` 1 is synchronous, with ``method`` an optimizer; else ``method`` is a mitigation."""

    stages: int
    micro_batches: int
    method: str

    def __str__(self) -> str:
        return (
            f"K={self.stages} M={self.micro_batches} {self.method}" if self.stages > 1 else f"synchronous {self.method}"
        )


@dataclass(frozen=True)
class Run:
    """One training: its key in the file of results."""

    stages: int
    micro_batches: int
    method: str
    rate: float
    seed: int
    updates: int
    setting: str


def train(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Train and validate; returns the run with its curve of (updates, validation loss) and its seconds."""
    import torch
    from torch.nn.functional import cross_entropy

    from ds_vpipe.lr_policies import ConstantWarmupLR
    from ds_vpipe.models.bert.batches import MicroBatches
    from ds_vpipe.models.bert.layers import bert_layers
    from ds_vpipe.models.bert.sample import IGNORED_LABEL
    from ds_vpipe.models.bert.sizes import bert_config
    from ds_vpipe.partition import uniform_partition
    from ds_vpipe.replay import Replay

    torch.set_num_threads(1)
    begin = time.monotonic()
    config = bert_config("tiny", options.vocabulary)
    config.num_hidden_layers = options.layers
    config.hidden_size, config.intermediate_size = options.hidden, 4 * options.hidden
    training, held_out = samples(config.vocab_size, run.seed, options)
    batches = MicroBatches(training, options.batch // run.micro_batches, replica=0, replicas=1, seed=run.seed)
    validation = MicroBatches(held_out, options.batch, replica=0, replicas=1, seed=0, shuffle=False)
    torch.manual_seed(run.seed)
    layers = [spec.build() for spec in bert_layers(config, seed=run.seed)]

    def loss(outputs: Any, labels: Any) -> torch.Tensor:
        return cross_entropy(outputs[0].flatten(0, 1), labels[0].flatten(), ignore_index=IGNORED_LABEL)

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if run.stages == 1 and run.method == "nadam":
            return torch.optim.NAdam(
                parameters, run.rate, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True
            )
        return torch.optim.AdamW(parameters, run.rate, weight_decay=0.01)

    replay = Replay(
        layers,
        uniform_partition(len(layers), run.stages),
        run.micro_batches,
        optimizer,
        loss,
        staleness=METHODS[run.method] if run.stages > 1 else None,
        clip=1.0,
        factor=ConstantWarmupLR(warmup_num_steps=WARM_UP).factor,
    )
    stream = batches.range(0, run.updates * run.micro_batches)
    curve = []
    for update in range(1, run.updates + 1):
        replay.train_batch(stream)
        if update % options.validate_every == 0 or update == run.updates:
            curve.append((update, replay.evaluate(validation.range(0, options.validation // options.batch))))
    return {**asdict(run), "curve": curve, "seconds": time.monotonic() - begin}


def samples(vocabulary: int, seed: int, options: argparse.Namespace) -> Any:
    """Samples to train on and held-out ones."""
    from ds_vpipe.models.bert.samples import PairSamples, spans_of, split_documents
    from ds_vpipe.models.bert.text_corpus import text_corpus
    from ds_vpipe.models.bert.wordpiece import TokenCorpus

    corpus = TokenCorpus.load(text_corpus(options.text, None, vocabulary, builder=True))
    length = options.sequence
    predictions = max(1, int(options.masked * length))
    return [
        PairSamples(corpus, spans_of(corpus, documents, length), length, predictions, seeds, options.masked)
        for documents, seeds in zip(split_documents(corpus), (seed, 0), strict=True)
    ]


def results(path: Path) -> dict[Run, dict[str, Any]]:
    """What has been computed already."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {Run(**{name: row[name] for name in Run.__dataclass_fields__}): row for row in rows}


def compute(runs: Iterable[Run], options: argparse.Namespace) -> dict[Run, dict[str, Any]]:
    """Train what is missing, several at a time, and return everything."""
    known = results(options.output)
    missing = [run for run in runs if run not in known]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=4) as pool:
        for row in pool.imap_unordered(_train, [(run, options) for run in missing]):
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['curve'][-1][1]:.4f}  {row['seconds']:5.0f} s  {_key(row)}", flush=True)
    return results(options.output)


def _train(job: tuple[Run, argparse.Namespace]) -> dict[str, Any]:
    return train(*job)


def _key(row: dict[str, Any]) -> str:
    arm = Arm(row["stages"], row["micro_batches"], row["method"])
    return f"{arm}, rate {row['rate']:g}, seed {row['seed']}, {row['updates']} updates"


def arms(options: argparse.Namespace) -> list[Arm]:
    """The arms that were asked for; error feedback only where no stage is more than one update late."""
    found = [Arm(1, 1, optimizer) for optimizer in SYNCHRONOUS]
    for stages in options.stages:
        found += [Arm(stages, 1, method) for method in options.methods if "feedback" not in method]
        found += [Arm(stages, stages, method) for method in options.methods_of_full_batches]
    return found


def loss_at(row: dict[str, Any], update: int) -> float:
    """The validation loss of a run after an update that was validated."""
    return dict(map(tuple, row["curve"]))[update]


def updates_to(row: dict[str, Any], loss: float) -> float | None:
    """After how many updates a run has come to a loss, linearly between validations; None if it never has."""
    before = (0, math.inf)
    for update, found in row["curve"]:
        if found <= loss:
            share = (before[1] - loss) / (before[1] - found) if math.isfinite(before[1]) else 1.0
            return before[0] + share * (update - before[0])
        before = (update, found)
    return None


def table(chosen: dict[Arm, list[dict[str, Any]]], updates: int) -> list[str]:
    """Mean and spread of the losses after ``updates``, the gap to synchronous, the share of it that a method closes."""
    losses = {arm: [loss_at(row, updates) for row in rows] for arm, rows in chosen.items()}
    mean = {arm: statistics.mean(values) for arm, values in losses.items()}
    best = min(loss for arm, loss in mean.items() if arm.stages == 1)
    lines = [
        "| arm | rate | validation loss | lowest .. highest | gap | gap closed | updates to the synchronous loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, rows in chosen.items():
        plain = mean.get(Arm(arm.stages, arm.micro_batches, "none"), best)
        closed = f"{(plain - mean[arm]) / (plain - best):.0%}" if arm.method != "none" and plain > best else ""
        reached = [updates_to(row, best) for row in rows]
        when = "" if arm.stages == 1 else "not by every seed"
        if None not in reached and arm.stages > 1:
            when = f"{statistics.mean(reached):.0f}"  # type: ignore[type-var]
        lines.append(
            f"| {arm} | {rows[0]['rate']:g} | {mean[arm]:.4f} | {min(losses[arm]):.4f} .. {max(losses[arm]):.4f} | "
            f"{mean[arm] / best - 1:+.2%} | {closed} | {when} |"
        )
    return lines


def draw(chosen: dict[Arm, list[dict[str, Any]]], path: Path) -> None:
    """Validation loss over updates, one panel per number of stages, mean of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = sorted({arm.stages for arm in chosen if arm.stages > 1})
    figure = Figure(figsize=(5 * len(stages), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, count in zip(figure.subplots(1, len(stages), sharey=True, squeeze=False)[0], stages, strict=True):
        for arm, rows in chosen.items():
            if arm.stages in (1, count):
                updates = [update for update, _ in rows[0]["curve"]]
                means = [statistics.mean(loss_at(row, update) for row in rows) for update in updates]
                axes.plot(updates, means, "--" if arm.stages == 1 else "-", label=str(arm))
        axes.set_title(f"K = {count}")
        axes.set_xlabel("updates")
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("validation loss, masked LM, nats")
    figure.savefig(path)


def main() -> None:
    """Parse the command line, train what is missing, print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 16], help="K")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["none", "nadam", "prediction"], help="M = 1")
    parser.add_argument(
        "--methods-of-full-batches", nargs="*", choices=METHODS, default=["none", "nadam", "feedback"], help="M = K"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3], help="learning rates to choose from")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--more", type=int, default=400, help="updates of asynchronous arms beyond --updates")
    parser.add_argument("--batch", type=int, default=64, help="samples per update")
    parser.add_argument("--sequence", type=int, default=16, help="tokens per sample")
    parser.add_argument("--masked", type=float, default=0.4, help="share of the tokens that is predicted")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8, help="encoder layers")
    parser.add_argument("--hidden", type=int, default=64, help="their width")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--validation", type=int, default=512, help="held-out samples")
    parser.add_argument("--text", type=Path, nargs="+", help="own text; default: docstrings of the installed packages")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/convergence.jsonl"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.output.parent.mkdir(parents=True, exist_ok=True)

    text = "docstrings" if options.text is None else " ".join(map(str, options.text))
    setting = (
        f"{options.layers}x{options.hidden}, vocabulary {options.vocabulary}, {options.batch}x{options.sequence}, "
        f"{options.masked:g} masked, {text}"
    )
    compared = arms(options)

    def run(arm: Arm, rate: float, seed: int) -> Run:
        updates = options.updates + (options.more if arm.stages > 1 else 0)
        return Run(arm.stages, arm.micro_batches, arm.method, rate, seed, updates, setting)

    tuned = compute([run(arm, rate, 0) for arm in compared for rate in options.rates], options)
    final = []
    for arm in compared:
        rate = min(options.rates, key=lambda rate, arm=arm: loss_at(tuned[run(arm, rate, 0)], options.updates))  # type: ignore[misc]
        final.append([run(arm, rate, seed) for seed in range(options.seeds)])
    done = compute([one for runs in final for one in runs], options)
    chosen = {arm: [done[one] for one in runs] for arm, runs in zip(compared, final, strict=True)}
    report(chosen, options)


def report(chosen: dict[Arm, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Print the table, and write it and the picture beside the results."""
    lines = table(chosen, options.updates)
    print("\n".join(lines))
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(chosen, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
