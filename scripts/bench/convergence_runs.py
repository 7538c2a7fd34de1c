"""Trainings that ``convergence.py`` compares: arms, runs, and the file of all results."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import add_row, read_rows

from ds_vpipe.schedules.one_f_one_b import update_delay

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "nadam": {"nadam": True},
    "feedback": {"error_feedback": True},
    "rescheduling": {"lr_rescheduling": {"num_steps": 500}},
    "nadam+feedback": {"nadam": True, "error_feedback": True},
    "nadam+rescheduling": {"nadam": True, "lr_rescheduling": {"num_steps": 500}},
    "sync20%": {"synchronous_updates": 0.2},
    "nadam+sync20%": {"nadam": True, "synchronous_updates": 0.2},
    "nadam+sync40%": {"nadam": True, "synchronous_updates": 0.4},
    "nadam+sync20%+warmup60%": {"nadam": True, "synchronous_updates": 0.2, "delay_warmup_updates": 0.6},
    "nadam+sync20%+warmup20%": {"nadam": True, "synchronous_updates": 0.2, "delay_warmup_updates": 0.2},
    "nadam+sync20%+warmup40%": {"nadam": True, "synchronous_updates": 0.2, "delay_warmup_updates": 0.4},
}
"""The ``"staleness"`` of a block; of counts of updates the share of those of synchronous training."""

RECOMMENDED = "recommended"
"""Stands for the method that docs/convergence.md recommends, :func:`recommended`."""

SYNCHRONOUS = ("adamw", "nadam")
WARM_UP = 100
POSITIONS = 4  # deviations of other weights


@dataclass(frozen=True)
class Arm:
    """One way to train. ``stages`` 1 is synchronous, with ``method`` an optimizer; else ``method`` is a mitigation."""

    stages: int
    micro_batches: int
    method: str
    updates: int

    def __str__(self) -> str:
        if self.stages == 1:
            return f"synchronous {self.method}"
        return f"K={self.stages} M={self.micro_batches} {self.method}"


@dataclass(frozen=True)
class Run:
    """One training: its key in the file of results."""

    stages: int
    micro_batches: int
    method: str
    updates: int
    rate: float
    seed: int
    setting: str

    @property
    def arm(self) -> Arm:
        """The way to train."""
        return Arm(self.stages, self.micro_batches, self.method, self.updates)

    def __str__(self) -> str:
        return f"{self.arm}, {self.updates} updates, rate {self.rate:g}, seed {self.seed}"


def recommended(stages: int, micro_batches: int) -> str:
    """Method to begin with: the more updates late gradients are, the longer their delay grows."""
    delay = update_delay(stages - 1, micro_batches)
    if delay <= 1:
        return "nadam"
    return "nadam+sync20%" + ("" if delay <= 3 else "+warmup20%" if delay <= 7 else "+warmup40%")


def staleness(method: str, updates: int) -> dict[str, Any]:
    """The ``"staleness"`` object, where synchronous training takes so many ``updates``."""
    shares = ("synchronous_updates", "delay_warmup_updates")
    return {key: round(value * updates) if key in shares else value for key, value in METHODS[method].items()}


def model(options: argparse.Namespace, seed: int) -> list[Any]:
    """A small BERT in the pipeline's layers.

    LayerNorm comes before the sub-layers, and positions begin as sinusoids (Vaswani et al., Attention Is All You Need,
    2017, section 3.5) a few times as large as other weights. Both shorten the time in which a model of this size
    knows nothing but the frequencies of tokens.
    """
    import torch

    from ds_vpipe.models.bert.layers import bert_layers
    from ds_vpipe.models.bert.model import bert_config

    config = bert_config("tiny", options.vocabulary)
    config.num_hidden_layers = options.layers
    config.hidden_size, config.intermediate_size = options.hidden, 4 * options.hidden
    config.tie_word_embeddings = False  # a replay has no ties
    layers = [_with_norm_before(spec.build(), config) for spec in bert_layers(config, seed)]
    layers[-1].norm = torch.nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    layers[-1].register_forward_pre_hook(lambda heads, args: ((heads.norm(args[0][0]), *args[0][1:]),))
    weight = layers[0].embeddings.position_embeddings.weight
    position = torch.arange(weight.size(0)).unsqueeze(1)
    angle = position * torch.exp(torch.arange(0, weight.size(1), 2) * (-math.log(1e4) / weight.size(1)))
    waves = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)
    weight.data.copy_(POSITIONS * config.initializer_range * math.sqrt(2) * waves)
    return layers


def _with_norm_before(layer: Any, config: Any) -> Any:
    """A layer of BERT whose sub-layers normalise what they get and not what they return (Xiong et al., ICML 2020)."""
    from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm as before

    kinds = {
        "attention": before.RobertaPreLayerNormAttention,
        "intermediate": before.RobertaPreLayerNormIntermediate,
        "output": before.RobertaPreLayerNormOutput,
    }
    for name, kind in kinds.items():
        if hasattr(layer, name):
            other = kind(config)
            other.load_state_dict(getattr(layer, name).state_dict(), strict=False)  # but for the norms
            setattr(layer, name, other)
    return layer


def samples(seed: int, options: argparse.Namespace) -> Any:
    """Samples to train on and held-out ones."""
    from ds_vpipe.models.bert.samples import Masking
    from ds_vpipe.models.bert.text import PairSamples, read_corpus

    corpus = read_corpus(options.text, options.sequence, options.vocabulary)
    predictions = max(1, int(options.masked * options.sequence))
    masking = Masking(corpus.vocabulary, options.sequence, predictions, options.masked)
    return [PairSamples(corpus, rows, masking, seeds) for rows, seeds in zip(corpus.split(), (seed, 0), strict=True)]


def train(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Train and validate; returns the run with its curve of (updates, validation loss) and its seconds."""
    import torch
    from torch.nn.functional import cross_entropy

    from ds_vpipe.lr_policies import LRPolicy
    from ds_vpipe.models.bert.data import MicroBatches
    from ds_vpipe.models.bert.samples import IGNORED_LABEL
    from ds_vpipe.partition import uniform_partition
    from ds_vpipe.staleness.replay import Replay

    torch.set_num_threads(1)
    begin = time.monotonic()
    training, held_out = samples(run.seed, options)
    batches = MicroBatches(training, options.batch // run.micro_batches, replica=0, replicas=1, seed=run.seed)
    validation = MicroBatches(held_out, options.batch, replica=0, replicas=1, seed=0, shuffle=False)
    layers = model(options, run.seed)

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
        staleness=staleness(run.method, options.updates) if run.stages > 1 else None,
        clip=1.0,
        factor=LRPolicy(
            "TrapezoidWarmupLR",
            warmup_num_steps=min(WARM_UP, run.updates // 2),
            total_num_steps=run.updates,
            decay_num_steps=max(1, round(options.decay * run.updates)),
        ).factor,
    )
    stream = batches.range(0, run.updates * run.micro_batches)
    curve = []
    for update in range(1, run.updates + 1):
        replay.train_batch(stream)
        if update % options.validate_every == 0 or update == run.updates:
            curve.append((update, replay.evaluate(validation.range(0, options.validation // options.batch))))
    return {**asdict(run), "curve": curve, "seconds": time.monotonic() - begin}


def results(path: Path) -> dict[Run, dict[str, Any]]:
    """Runs that have been computed already."""
    return {Run(**{name: row[name] for name in Run.__dataclass_fields__}): row for row in read_rows(path)}


def compute(runs: Iterable[Run], options: argparse.Namespace) -> dict[Run, dict[str, Any]]:
    """Train what is missing, several at a time, and return everything."""
    known = results(options.output)
    missing = [run for run in dict.fromkeys(runs) if run not in known]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=4) as pool:
        for row in pool.imap_unordered(_train, [(run, options) for run in missing]):
            add_row(row, options.output)
            (run,) = (run for run in missing if asdict(run).items() <= row.items())
            print(f"{row['curve'][-1][1]:.4f}  {row['seconds']:5.0f} s  {run}", flush=True)
    return results(options.output)


def _train(job: tuple[Run, argparse.Namespace]) -> dict[str, Any]:
    return train(*job)


def final_loss(row: dict[str, Any]) -> float:
    """The validation loss at the end of a run, infinite if it has diverged."""
    loss = float(row["curve"][-1][1])
    return loss if math.isfinite(loss) else math.inf


def updates_to(row: dict[str, Any], loss: float) -> float | None:
    """After how many updates a run has come to a loss, linearly between validations; None if it never has."""
    before = (0, math.inf)
    for update, found in row["curve"]:
        if found <= loss:
            share = (before[1] - loss) / (before[1] - found) if math.isfinite(before[1]) else 1.0
            return before[0] + share * (update - before[0])
        before = (update, found)
    return None
