"""Quality that asynchronous training costs, and that mitigations of staleness bring back.

``python scripts/bench/convergence.py`` trains a small BERT on the docstrings of the installed packages, or on
``--text``, by :class:`ds_vpipe.staleness.replay.Replay`, whose updates are the engine's bit for bit: synchronously with
each optimizer, and as an asynchronous pipeline of K stages with M = 1, M = K / 2 and M = K and each method. Every arm
sees the same samples per update. Its learning rate is found on the first seed, each trained in full: from the middle of
``--rates`` on, for as long as a neighbour is better. The other seeds are trained with that; where all seeds have been
trained with several, the best on average counts. An update of an asynchronous pipeline takes less time, so a method of
``--methods`` may be trained for more updates than the others: ``soap@3450``.

Every run is one line of ``--output``; a line that is there is not computed again, so that a run that was stopped goes
on, and one with more seeds, arms or rates adds to it. The table is made of all of that file that is of the same model,
data and schedule; ``convergence_summary.py`` makes the table and the picture of the document. ``--throughput`` takes
what ``schedule.py --json`` has measured, for the time that an arm takes.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from common import PRELOADED, Row, add_row, markdown, parser_of, read_rows
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch.nn.functional import cross_entropy
from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm as before

from ds_vpipe.config.staleness import Auto, Staleness
from ds_vpipe.lr_policies import LRPolicy
from ds_vpipe.models.bert.data import IGNORED_LABEL, micro_batches
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.model import bert_config
from ds_vpipe.models.bert.samples import Masking
from ds_vpipe.models.bert.text import Corpus, PairSamples, read_corpus, read_tokenizer
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.simulation.forecast import Pace
from ds_vpipe.staleness.automatic import choose_staleness, of_length
from ds_vpipe.staleness.replay import Replay
from ds_vpipe.staleness.soap import SOAP

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "nadam": {"nadam": True},
    "soap": {},
    "muon": {},
    "nadam+unstashed": {"nadam": True},
    "sync20%": {"synchronous_updates": 0.2},
    "soap+sync5%": {"synchronous_updates": 0.05},
    "nadam+sync5%": {"nadam": True, "synchronous_updates": 0.05},
    "nadam+sync5%+warmup20%": {"nadam": True, "synchronous_updates": 0.05, "delay_warmup_updates": 0.2},
    "nadam+sync5%+warmup40%": {"nadam": True, "synchronous_updates": 0.05, "delay_warmup_updates": 0.4},
    "nadam+sync20%": {"nadam": True, "synchronous_updates": 0.2},
    "nadam+sync20%+warmup20%": {"nadam": True, "synchronous_updates": 0.2, "delay_warmup_updates": 0.2},
    "nadam+sync20%+warmup40%": {"nadam": True, "synchronous_updates": 0.2, "delay_warmup_updates": 0.4},
}
"""The ``"staleness"`` of a block; of counts of updates the share of those of synchronous training. All train with AdamW
but ``soap`` and ``muon``, which are optimizers; ``unstashed`` is ``"weight_sync": "none"``."""

RECOMMENDED = "recommended"  # stands for the method that docs/convergence.md recommends, recommended()

SYNCHRONOUS = ("adamw", "nadam", "soap", "muon")
USUAL = SYNCHRONOUS[:2]  # of which the better one's loss is what a time is taken to
WARM_UP, DECAY = 100, 0.3  # updates in which the rate climbs, share of them in which it falls to 0
HIDDEN = 64
SEQUENCE, MASKED = 16, 0.4  # tokens per sample, share of them that is predicted
POSITIONS = 4  # deviations of other weights
HEAD = ["arm", "updates", "rate", "seeds", "validation loss", "lowest .. highest", "gap", "gap closed"]
HEAD += ["time, of DeepSpeed's", "time to the synchronous loss"]


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
class Run(Arm):
    """One training: its key in the file of results."""

    rate: float
    seed: int
    setting: str

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.updates} updates, rate {self.rate:g}, seed {self.seed}"


def recommended(stages: int, micro_batches: int) -> str:
    """The method of ``"staleness": "auto"`` with AdamW in a run of known length."""
    updates = 1000
    chosen = choose_staleness(Auto(), Pipeline("asp", stages, micro_batches), "AdamW", updates).settings
    return next(name for name in METHODS if Staleness.model_validate(staleness(name, updates)) == chosen)


def staleness(method: str, updates: int) -> dict[str, Any]:
    """The ``"staleness"`` object, where synchronous training takes so many ``updates``."""
    return of_length(METHODS[method], updates)


def arms(options: argparse.Namespace) -> list[Arm]:
    """The arms that were asked for."""
    found = [Arm(1, 1, optimizer, options.updates) for optimizer in options.synchronous]
    for stages in options.stages:
        for asked, updates in options.methods:
            (method,) = named([asked], stages, 1)
            found.append(Arm(stages, 1, method, updates or options.updates))
        of_sizes = {stages // 2: options.methods_of_half_batches, stages: options.methods_of_full_batches}
        for size, methods in of_sizes.items():
            found += [Arm(stages, size, method, options.updates) for method in named(methods, stages, size)]
    return list(dict.fromkeys(found))


def named(methods: list[str], stages: int, micro_batches: int) -> list[str]:
    """Methods with the recommended one under its own name."""
    chosen = (recommended(stages, micro_batches) if method == RECOMMENDED else method for method in methods)
    return list(dict.fromkeys(chosen))


def next_rate(losses: dict[float, float], rates: list[float]) -> float | None:
    """Rate to try after those with ``losses``; None if the best has no better neighbour."""
    if not losses:
        return rates[len(rates) // 2]
    best = rates.index(min(losses, key=lambda rate: losses[rate]))
    neighbours = [rates[at] for at in (best - 1, best + 1) if 0 <= at < len(rates)]
    return next((rate for rate in neighbours if rate not in losses), None)


def model(options: argparse.Namespace, seed: int) -> list[Any]:
    """A small BERT in the pipeline's layers.

    LayerNorm comes before the sub-layers, and positions begin as sinusoids (Vaswani et al., Attention Is All You Need,
    2017, section 3.5) a few times as large as other weights. Both shorten the time in which a model of this size
    knows nothing but the frequencies of tokens.
    """
    config = bert_config("tiny", options.vocabulary)
    config.num_hidden_layers = options.layers
    config.hidden_size, config.intermediate_size = HIDDEN, 4 * HIDDEN
    config.tie_word_embeddings = False  # a replay has no ties
    layers = [_with_norm_before(spec.build(), config) for spec in bert_layers(config, seed)]
    layers[-1].norm = torch.nn.LayerNorm(HIDDEN, eps=config.layer_norm_eps)
    layers[-1].register_forward_pre_hook(lambda heads, args: ((heads.norm(args[0][0]), *args[0][1:]),))
    weight = layers[0].embeddings.position_embeddings.weight
    position = torch.arange(weight.size(0)).unsqueeze(1)
    angle = position * torch.exp(torch.arange(0, weight.size(1), 2) * (-math.log(1e4) / weight.size(1)))
    waves = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)
    weight.data.copy_(POSITIONS * config.initializer_range * math.sqrt(2) * waves)
    return layers


def _with_norm_before(layer: Any, config: Any) -> Any:
    """A layer of BERT whose sub-layers normalise what they get and not what they return (Xiong et al., ICML 2020)."""
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


def corpus_of(options: argparse.Namespace) -> Corpus:
    """The text in tokens."""
    tokenizer = None if options.tokenizer is None else read_tokenizer(options.tokenizer, options.vocabulary)
    return read_corpus(options.text, SEQUENCE, options.vocabulary, tokenizer=tokenizer)


def train(run: Run, options: argparse.Namespace) -> Row:
    """Train and validate; returns the run with its curve of (updates, validation loss) and its seconds."""
    torch.set_num_threads(1)
    begin = time.monotonic()
    corpus = corpus_of(options)
    masking = Masking(corpus.vocabulary, SEQUENCE, max(1, int(MASKED * SEQUENCE)), MASKED)
    training, held_out = (
        PairSamples(corpus, rows, masking, seed) for rows, seed in zip(corpus.split(), (run.seed, 0), strict=True)
    )
    layers = model(options, run.seed)

    def loss(outputs: Any, labels: Any) -> torch.Tensor:
        return cross_entropy(outputs[0].flatten(0, 1), labels[0].flatten(), ignore_index=IGNORED_LABEL)

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if run.method.startswith("soap"):
            return SOAP(parameters, run.rate)
        if run.method == "muon":
            return muon(parameters, run.rate, layers)
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
        weight_sync="none" if "unstashed" in run.method else "stash",
        staleness=staleness(run.method, options.updates) if run.stages > 1 else None,
        clip=1.0,
        factor=LRPolicy(
            "TrapezoidWarmupLR",
            warmup_num_steps=min(WARM_UP, run.updates // 2),
            total_num_steps=run.updates,
            decay_num_steps=max(1, round(DECAY * run.updates)),
        ).factor,
    )
    endless = micro_batches(training, options.batch // run.micro_batches, run.seed)
    stream = islice(endless, run.updates * run.micro_batches)
    curve = []
    for update in range(1, run.updates + 1):
        replay.train_batch(stream)
        if update % options.validate_every == 0 or update == run.updates:
            validation = micro_batches(held_out, options.batch, None)
            curve.append((update, replay.evaluate(islice(validation, options.validation // options.batch))))
    return {**asdict(run), "curve": curve, "seconds": time.monotonic() - begin}


def muon(parameters: list[torch.nn.Parameter], rate: float, layers: list[torch.nn.Module]) -> torch.optim.Optimizer:
    """Muon as DeepSpeed builds it, with ten times the rate of its Adam: 0.02 next to 2e-3."""
    names = {id(parameter): name for layer in layers for name, parameter in layer.named_parameters()}
    matrices = [p for p in parameters if p.dim() > 1 and "embed" not in names[id(p)].lower()]
    others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "use_muon": True, "lr": 10 * rate},
        {"params": others, "use_muon": False, "lr": rate},
    ]
    return MuonWithAuxAdam([{**group, "weight_decay": 0.01} for group in groups if group["params"]])


def results(path: Path) -> dict[Run, Row]:
    """Runs that have been computed already."""
    return {Run(**{field.name: row[field.name] for field in fields(Run)}): row for row in read_rows(path)}


def compute(runs: Iterable[Run], options: argparse.Namespace) -> dict[Run, Row]:
    """Train what is missing, several at a time, and return everything."""
    known = results(options.output)
    missing = [run for run in dict.fromkeys(runs) if run not in known]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "ds_vpipe.models.bert.layers"])
    running: dict[Connection, Run] = {}
    while missing or running:
        while missing and len(running) < options.processes:
            run = missing.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=work, args=(theirs, run, options), daemon=True).start()
            theirs.close()
            running[ours] = run
        for finished in wait(running):
            run = running.pop(finished)
            try:
                row = finished.recv()
            except EOFError:
                raise SystemExit(
                    f"{run}: its process ended without a result, allowed is one that the system lets live (memory?); "
                    f"start again, perhaps with fewer --processes: what {options.output} has is not computed again"
                ) from None
            add_row(row, options.output)
            print(f"{row['curve'][-1][1]:.4f}  {row['seconds']:5.0f} s  {run}", flush=True)
    return results(options.output)


def work(result: Connection, run: Run, options: argparse.Namespace) -> None:
    """What a process does: one run."""
    result.send(train(run, options))


def final_loss(row: Row) -> float:
    """The validation loss at the end of a run, infinite if it has diverged."""
    loss = float(row["curve"][-1][1])
    return loss if math.isfinite(loss) else math.inf


def updates_to(row: Row, loss: float) -> float | None:
    """After how many updates a run has come to a loss, linearly between validations; None if it never has."""
    last = (0, math.inf)
    for update, found in row["curve"]:
        if found <= loss:
            share = (last[1] - loss) / (last[1] - found) if math.isfinite(last[1]) else 1.0
            return last[0] + share * (update - last[0])
        last = (update, found)
    return None


def paces(path: Path | None) -> dict[tuple[int, int], Pace]:
    """Measured paces of an asynchronous pipeline of default depth, by K and M."""
    rates: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for row in [] if path is None else read_rows(path):
        if row["work"] == "emulated" and not row["link"]:
            rates[row["stages"], row["micro_batches"]][row["arm"]] = row["rate"]
    return {
        size: Pace(found["stock"] / found["asp"], found["stock"] / found["bsp"] - found["stock"] / found["asp"])
        for size, found in sorted(rates.items())
        if {"stock", "bsp", "asp"} <= found.keys()
    }


def time_of(arm: Arm, updates: float, whole: int, pace: Pace) -> float:
    """Time of an asynchronous arm's first ``updates``, of that which DeepSpeed's engine takes for ``whole``."""
    settings = Staleness.model_validate(staleness(arm.method, whole))
    return pace.time(updates, settings, update_delay(arm.stages - 1, arm.micro_batches)) / whole


def choose(rows: list[Row]) -> dict[Arm, list[Row]]:
    """The runs of every arm with the rate that most seeds have been trained with, of several the best on average.

    Arms whose first seed has not been trained yet are left out.
    """
    of_rate: dict[Arm, dict[float, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        arm = Arm(row["stages"], row["micro_batches"], row["method"], row["updates"])
        of_rate[arm][row["rate"]][row["seed"]] = row
    chosen = {}
    for arm in sorted(of_rate, key=lambda a: (a.stages, a.micro_batches, a.updates, a.method)):
        tried = [seeds for seeds in of_rate[arm].values() if 0 in seeds]
        if tried:
            seeds = min(tried, key=lambda seeds: (-len(seeds), statistics.mean(map(final_loss, seeds.values()))))
            chosen[arm] = [seeds[seed] for seed in sorted(seeds)]
    return chosen


def table(chosen: dict[Arm, list[Row]], updates: int, measured: dict[tuple[int, int], Pace]) -> str:
    """Mean and spread of the final losses, the gap to synchronous, the share of it that a method closes, times.

    The gap is to the best synchronous arm, the time to the loss of the better one of AdamW and NAdam.
    """
    losses = {arm: [final_loss(row) for row in rows] for arm, rows in chosen.items()}
    mean = {arm: statistics.mean(values) for arm, values in losses.items()}
    best = min((loss for arm, loss in mean.items() if arm.stages == 1), default=min(mean.values()))
    usual = min((loss for arm, loss in mean.items() if arm.stages == 1 and arm.method in USUAL), default=best)
    lines = []
    for arm, rows in chosen.items():
        plain = mean.get(Arm(arm.stages, arm.micro_batches, "none", updates), best)
        closed = f"{(plain - mean[arm]) / (plain - best):.0%}" if arm.method != "none" and plain > best else ""
        pace, taken, reached_in = measured.get((arm.stages, arm.micro_batches)), "", ""
        if arm.stages > 1 and pace is not None:
            reached = [updates_to(row, usual) for row in rows]
            taken = f"{time_of(arm, arm.updates, updates, pace):.0%}"
            times = [time_of(arm, at, updates, pace) for at in reached if at is not None]
            reached_in = f"{statistics.mean(times):.0%}" if len(times) == len(rows) else f"{len(times)} of {len(rows)}"
        row = [arm, arm.updates, f"{rows[0]['rate']:g}", len(rows), f"{mean[arm]:.4f}"]
        row += [f"{min(losses[arm]):.4f} .. {max(losses[arm]):.4f}", f"{mean[arm] / best - 1:+.2%}"]
        lines.append([*row, closed, taken, reached_in])
    return markdown(HEAD, lines)


def with_updates(word: str) -> tuple[str, int]:
    """A method and for how many updates it is trained, 0 for those of all: ``"soap@3450"``."""
    method, _, updates = word.partition("@")
    if method not in (*METHODS, RECOMMENDED) or not (updates or "1").isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r}: allowed are {', '.join((*METHODS, RECOMMENDED))}, also with @3900")
    return method, int(updates or 0)


parser = parser_of(__doc__)
methods = {"nargs": "*", "choices": [*METHODS, RECOMMENDED]}
parser.add_argument("--stages", type=int, nargs="*", default=[4, 8, 16], help="K")
parser.add_argument("--synchronous", nargs="*", choices=SYNCHRONOUS, default=["adamw", "nadam"], help="optimizers")
usual = [("none", 0), (RECOMMENDED, 0)]
parser.add_argument("--methods", nargs="*", type=with_updates, default=usual, help="M = 1, METHOD or METHOD@UPDATES")
parser.add_argument("--methods-of-half-batches", **methods, default=[], help="M = K / 2")
parser.add_argument("--methods-of-full-batches", **methods, default=[RECOMMENDED], help="M = K")
parser.add_argument("--seeds", type=int, default=3)
rates = [7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3]
parser.add_argument("--rates", type=float, nargs="+", default=rates, help="to choose from, in order")
parser.add_argument("--updates", type=int, default=3000)
parser.add_argument("--batch", type=int, default=64, help="samples per update")
parser.add_argument("--layers", type=int, default=8, help="encoder layers")
parser.add_argument("--vocabulary", type=int, default=512)
parser.add_argument("--validate-every", type=int, default=100)
parser.add_argument("--validation", type=int, default=1024, help="held-out samples")
parser.add_argument("--text", type=Path, nargs="+", help="own text; default: docstrings of the installed packages")
parser.add_argument("--tokenizer", type=Path, help="vocab.txt; default: made from the text, ties by chance")
parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
parser.add_argument("--output", type=Path, default=Path("runs/convergence.jsonl"))
parser.add_argument("--throughput", type=Path, help="file of schedule.py --json")
parse = parser.parse_args


def main() -> None:
    """Train what is missing, print and write the table."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    text = "docstrings" if options.text is None else " ".join(map(str, options.text))
    # Another machine may have other docstrings, and a tokenizer of its own.
    digest = corpus_of(options).digest[:8]
    setting = (
        f"{options.layers}x{HIDDEN} pre-LayerNorm, vocabulary {options.vocabulary}, {options.batch}x{SEQUENCE}, "
        f"{MASKED:g} masked, {options.validation} held out, {text} {digest}, "
        f"{options.updates} updates, decay {DECAY:g}, validated every {options.validate_every}"
    )
    compared = arms(options)

    def run(arm: Arm, rate: float, seed: int) -> Run:
        return Run(**asdict(arm), rate=rate, seed=seed, setting=setting)

    tried: dict[Arm, dict[float, float]] = {arm: {} for arm in compared}
    while missing := {arm: rate for arm in compared if (rate := next_rate(tried[arm], options.rates)) is not None}:
        done = compute([run(arm, rate, 0) for arm, rate in missing.items()], options)
        for arm, rate in missing.items():
            tried[arm][rate] = final_loss(done[run(arm, rate, 0)])
    best = {arm: min(losses, key=lambda rate, losses=losses: losses[rate]) for arm, losses in tried.items()}  # type: ignore[misc]
    compute([run(arm, rate, seed) for seed in range(options.seeds) for arm, rate in best.items()], options)
    chosen = choose([row for one, row in results(options.output).items() if one.setting == setting])

    measured = paces(options.throughput)
    lines = table(chosen, options.updates, measured)
    print(lines)
    unknown = {(arm.stages, arm.micro_batches) for arm in chosen if arm.stages > 1} - measured.keys()
    for stages, size in sorted(unknown) if options.throughput else ():
        print(f"{options.throughput}: no stock, bsp and asp at K={stages} M={size}, so no times")
    options.output.with_suffix(".md").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
