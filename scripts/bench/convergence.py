"""Quality that asynchronous training costs, and that mitigations of staleness bring back.

``python scripts/bench/convergence.py`` trains a small BERT on the docstrings of the installed packages, or on
``--text``, by :class:`ds_vpipe.staleness.replay.Replay`, whose updates are the engine's bit for bit: synchronously with
each optimizer, and as an asynchronous pipeline of K stages with M = 1 and M = K and each mitigation. Every arm sees the
same samples per update. Its learning rate is found on the first seed, each trained in full: from the middle of
``--rates`` on, for as long as a neighbour is better. The other seeds are trained with that; where all seeds have been
trained with several, the best on average counts. An update of an asynchronous pipeline takes less time, so the arms of
``--longer-methods`` are trained for ``--longer`` updates too, with the rates found.

Every run is one line of ``--output``; a line that is there is not computed again, so that a run that was stopped goes
on, and one with more seeds, arms or rates adds to it. The table and the picture are made of all of that file that is of
the same model, data and schedule. ``--throughput`` takes what ``schedule.py --json`` has measured, for the time
that an arm takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_runs import (
    METHODS,
    RECOMMENDED,
    SYNCHRONOUS,
    Arm,
    Run,
    compute,
    final_loss,
    recommended,
    results,
    staleness,
    updates_to,
)
from report import Curve, draw, markdown, read_rows

from ds_vpipe.config.staleness import Staleness
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.staleness.delay_warmup import DelayWarmup

HEAD = ["arm", "updates", "rate", "seeds", "validation loss", "lowest .. highest", "gap", "gap closed"]
HEAD += ["time, of DeepSpeed's", "time to the synchronous loss"]


def arms(options: argparse.Namespace) -> list[Arm]:
    """The arms that were asked for; error feedback only where no stage is more than one update late."""
    found = [Arm(1, 1, optimizer, options.updates) for optimizer in options.synchronous]
    for stages in options.stages:
        methods = named(options.methods, stages, 1)
        found += [Arm(stages, 1, method, options.updates) for method in methods if "feedback" not in method]
        methods = named(options.methods_of_full_batches, stages, stages)
        found += [Arm(stages, stages, method, options.updates) for method in methods]
    return found


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


@dataclass(frozen=True)
class Pace:
    """Duration of asynchronous updates, in units of an update of DeepSpeed's engine.

    Attributes:
        update: for an update while it is full.
        drain: more for a drain and for being filled again, as after every batch of a synchronous pipeline.
    """

    update: float
    drain: float


def paces(path: Path | None) -> dict[tuple[int, int], Pace]:
    """Measured paces of an asynchronous pipeline of default depth, by K and M."""
    rows = [] if path is None else read_rows(path)
    rates = {
        (row["stages"], row["micro_batches"], row["arm"]): row["rate"]
        for row in rows
        if row["work"] == "emulated" and not row["link"]
    }
    found = {}
    for stages, micro_batches in sorted({(row["stages"], row["micro_batches"]) for row in rows}):
        stock, bsp, asp = (rates.get((stages, micro_batches, arm)) for arm in ("stock", "bsp", "asp"))
        if stock and bsp and asp:
            found[stages, micro_batches] = Pace(stock / asp, stock / bsp - stock / asp)
    return found


def time_of(arm: Arm, updates: float, whole: int, pace: Pace) -> float:
    """Time of an asynchronous arm's first ``updates``, of that which DeepSpeed's engine takes for ``whole``."""
    settings = Staleness.model_validate(staleness(arm.method, whole))
    warmup = DelayWarmup.of(settings, update_delay(arm.stages - 1, arm.micro_batches))
    drains, end = 0, warmup.drain_interval(0)[1]
    while end is not None and end <= updates:
        drains, end = drains + 1, warmup.drain_interval(end)[1]
    return (updates * pace.update + drains * pace.drain) / whole


def choose(rows: list[dict[str, Any]]) -> dict[Arm, list[dict[str, Any]]]:
    """The runs of every arm with the rate that most seeds have been trained with, of several the best on average.

    Arms whose first seed has not been trained yet are left out.
    """
    of_rate: dict[Arm, dict[float, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        arm = Arm(row["stages"], row["micro_batches"], row["method"], row["updates"])
        of_rate[arm][row["rate"]][row["seed"]] = row
    chosen = {}
    begun = (arm for arm, rates in of_rate.items() if any(0 in seeds for seeds in rates.values()))
    for arm in sorted(begun, key=lambda a: (a.stages, a.micro_batches, a.updates, a.method)):
        tried = [seeds for seeds in of_rate[arm].values() if 0 in seeds]
        seeds = min(tried, key=lambda seeds: (-len(seeds), statistics.mean(map(final_loss, seeds.values()))))
        chosen[arm] = [seeds[seed] for seed in sorted(seeds)]
    return chosen


def table(chosen: dict[Arm, list[dict[str, Any]]], updates: int, measured: dict[tuple[int, int], Pace]) -> list[str]:
    """Mean and spread of the final losses, the gap to synchronous, the share of it that a method closes, times."""
    losses = {arm: [final_loss(row) for row in rows] for arm, rows in chosen.items()}
    mean = {arm: statistics.mean(values) for arm, values in losses.items()}
    best = min((loss for arm, loss in mean.items() if arm.stages == 1), default=min(mean.values()))
    lines = []
    for arm, rows in chosen.items():
        plain = mean.get(Arm(arm.stages, arm.micro_batches, "none", updates), best)
        closed = f"{(plain - mean[arm]) / (plain - best):.0%}" if arm.method != "none" and plain > best else ""
        pace, time, reached_in = measured.get((arm.stages, arm.micro_batches)), "", ""
        if arm.stages > 1 and pace is not None:
            reached = [updates_to(row, best) for row in rows]
            time = f"{time_of(arm, arm.updates, updates, pace):.0%}"
            times = [time_of(arm, at, updates, pace) for at in reached if at is not None]
            reached_in = f"{statistics.mean(times):.0%}" if len(times) == len(rows) else f"{len(times)} of {len(rows)}"
        row = [arm, arm.updates, f"{rows[0]['rate']:g}", len(rows), f"{mean[arm]:.4f}"]
        row += [f"{min(losses[arm]):.4f} .. {max(losses[arm]):.4f}", f"{mean[arm] / best - 1:+.2%}"]
        lines.append([*row, closed, time, reached_in])
    return markdown(HEAD, lines)


def panels(chosen: dict[Arm, list[dict[str, Any]]]) -> dict[str, list[Curve]]:
    """Validation loss over updates, a panel per number of stages, means of the seeds."""
    curves = {}
    for arm, rows in chosen.items():
        points = zip(*(row["curve"] for row in rows), strict=True)
        means = [(seeds[0][0], statistics.mean(loss for _, loss in seeds)) for seeds in points]
        curves[arm] = Curve(f"{arm}, {arm.updates}", means, dashed=arm.stages == 1)
    stages = sorted({arm.stages for arm in chosen if arm.stages > 1}) or [1]
    return {f"K = {count}": [curve for arm, curve in curves.items() if arm.stages in (1, count)] for count in stages}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="*", default=[4, 8, 16], help="K")
    parser.add_argument("--synchronous", nargs="*", choices=SYNCHRONOUS, default=list(SYNCHRONOUS), help="optimizers")
    parser.add_argument(
        "--methods", nargs="*", choices=[*METHODS, RECOMMENDED], default=["none", RECOMMENDED], help="M = 1"
    )
    parser.add_argument(
        "--methods-of-full-batches",
        nargs="*",
        choices=[*METHODS, RECOMMENDED],
        default=[RECOMMENDED],
        help="M = K",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3],
        help="learning rates to choose from, in order",
    )
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--longer", type=int, default=3900, help="updates of the arms that are trained longer too")
    parser.add_argument("--longer-methods", nargs="*", choices=[*METHODS, RECOMMENDED], default=[], help="M = 1")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the updates in which the rate falls to 0")
    parser.add_argument("--batch", type=int, default=64, help="samples per update")
    parser.add_argument("--sequence", type=int, default=16, help="tokens per sample")
    parser.add_argument("--masked", type=float, default=0.4, help="share of the tokens that is predicted")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8, help="encoder layers")
    parser.add_argument("--hidden", type=int, default=64, help="their width")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--validation", type=int, default=1024, help="held-out samples")
    parser.add_argument("--text", type=Path, nargs="+", help="own text; default: docstrings of the installed packages")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/convergence.jsonl"))
    parser.add_argument("--throughput", type=Path, help="file of schedule.py --json")
    return parser.parse_args(words)


def main() -> None:
    """Train what is missing, print the table and draw."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.output.parent.mkdir(parents=True, exist_ok=True)

    text = "docstrings" if options.text is None else " ".join(map(str, options.text))
    setting = (
        f"{options.layers}x{options.hidden} pre-LayerNorm, vocabulary {options.vocabulary}, "
        f"{options.batch}x{options.sequence}, {options.masked:g} masked, {options.validation} held out, {text}, "
        f"{options.updates} updates, decay {options.decay:g}, validated every {options.validate_every}"
    )
    compared = arms(options)

    def run(arm: Arm, rate: float, seed: int) -> Run:
        return Run(arm.stages, arm.micro_batches, arm.method, arm.updates, rate, seed, setting)

    tried: dict[Arm, dict[float, float]] = {arm: {} for arm in compared}
    while missing := {arm: rate for arm in compared if (rate := next_rate(tried[arm], options.rates)) is not None}:
        done = compute([run(arm, rate, 0) for arm, rate in missing.items()], options)
        for arm, rate in missing.items():
            tried[arm][rate] = final_loss(done[run(arm, rate, 0)])
    best = {arm: min(losses, key=lambda rate, losses=losses: losses[rate]) for arm, losses in tried.items()}  # type: ignore[misc]
    best |= {
        Arm(arm.stages, 1, arm.method, options.longer): best[arm]
        for arm in compared
        if arm.stages > 1 and arm.micro_batches == 1 and arm.method in named(options.longer_methods, arm.stages, 1)
    }
    compute([run(arm, rate, seed) for seed in range(options.seeds) for arm, rate in best.items()], options)
    rows = [row for one, row in results(options.output).items() if one.setting == setting]
    report(choose(rows), options)


def report(chosen: dict[Arm, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Print the table, and write it and the picture beside the results."""
    measured = paces(options.throughput)
    lines = table(chosen, options.updates, measured)
    print("\n".join(lines))
    unknown = {(arm.stages, arm.micro_batches) for arm in chosen if arm.stages > 1} - measured.keys()
    for stages, micro_batches in sorted(unknown) if options.throughput else ():
        print(f"{options.throughput}: no stock, bsp and asp at K={stages} M={micro_batches}, so no times")
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    picture = options.output.with_suffix(".png")
    draw(picture, panels(chosen), "updates", "validation loss, masked LM, nats")


if __name__ == "__main__":
    main()
