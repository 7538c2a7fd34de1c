"""Any past update of a recorded run, done again.

That shows its state, and where its numbers went wrong. The run is to have "record": FOLDER in its vpipe block. Its
script is started again with as many processes, goes on from the last of the run's checkpoints before the update that it
loads by load_checkpoint(), or begins at the beginning, and ends after the update. Every loss on the way is compared
with the recorded one, bit for bit; the first that differs ends the replay. The script's own checkpoints are not
written, other files of its own are.

--find nan names the first value that is not finite, with update, micro-batch, stage, layer and weight version; without
--to at the first such loss. --find loss-jump prints the norms of all layers in the batch of the first loss that is a
factor above the median of 50 before it, and in the batch before.

examples:
  python -m ds_vpipe replay runs/1 --to 12345 --state debug
  python -m ds_vpipe replay runs/1 --find nan
  python -m ds_vpipe replay runs/1 --find loss-jump --factor 1.5
  python -m ds_vpipe replay runs/1 --to 300 --arguments="--resume"

exit status: 0 replayed, 1 a loss differs, or a process has failed, 2 the record or the command line is wrong
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_vpipe.commands.argument_types import checked, count, formed, whole
from ds_vpipe.commands.arguments import Answer
from ds_vpipe.errors import Refusal, VPipeError
from ds_vpipe.faults import Fault, by_growth, first_fault
from ds_vpipe.run_record import OF_LAUNCHERS, RunRecord, differences, first_jump, first_not_finite, machine
from ds_vpipe.tables import aligned

_GRACE_S = 60.0  # for the others, after a rank has failed; their own limits are in the block
_SHOWN = 20  # layers

Plan = dict[str, Any]
"""What the ranks are to do; :class:`ds_vpipe.engine.observe.history.RecordedReplay` reads it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RUN", help='folder that "record" in the vpipe block names')
    parser.add_argument("--to", type=count, metavar="UPDATE", help="the last update; default: what --find finds")
    parser.add_argument("--from", type=whole, dest="latest", metavar="UPDATE", help="begin there or before")
    parser.add_argument("--find", choices=("nan", "loss-jump"), help="what to look for on the way")
    factor = checked(float, lambda value: 1 < value <= 1e9, "a number above 1")
    parser.add_argument("--factor", type=factor, metavar="X", help="of a loss that jumps; default 2")
    parser.add_argument("--state", metavar="FOLDER", help="write a checkpoint of the state after the update")
    more = "for the script, as one word after a sign of equality"
    words = formed(shlex.split, "words with their quotes closed")
    parser.add_argument("--arguments", type=words, default=[], metavar="WORDS", help=f"more arguments {more}")


def run(arguments: argparse.Namespace) -> Answer:
    record = RunRecord.read(arguments.record)
    plan = plan_of(arguments, record)
    doubts = differences(plan["start"]["machine"], machine("cuda" if torch.cuda.is_available() else "cpu"), ["threads"])
    if doubts:
        print(f"ds_vpipe: losses may differ: {'; '.join(doubts)}", file=sys.stderr, flush=True)
    while True:
        reports = launch(plan, arguments.arguments)
        earlier = earlier_start(plan, reports)
        if earlier is None:
            return answer(plan, reports)
        plan["latest"] = earlier


def plan_of(arguments: argparse.Namespace, record: RunRecord) -> Plan:
    """What the ranks are to do.

    Raises:
        VPipeConfigError: nothing like that has been recorded.
    """
    to, find, last = arguments.to, arguments.find, max(record.losses, default=0)
    if arguments.factor is not None and (find != "loss-jump" or to is not None):
        allowed = "the option with --find loss-jump and without --to"
        raise Refusal("--factor", arguments.factor, allowed, "leave it out", "no jump is looked for").error()
    if to is None and find is not None:
        to = first_not_finite(record.losses) if find == "nan" else first_jump(record.losses, arguments.factor or 2.0)
        if to is None:
            reason = f"none of the {len(record.losses)} recorded losses is one"
            raise Refusal("--find", find, "nan or loss-jump", "name an update by --to", reason).error()
    if to is None or to not in record.losses:
        allowed = f"an update whose loss is recorded, up to {last}"
        raise Refusal("--to", to, allowed, "name one, or what to --find").error()
    latest = to - 2 if find == "loss-jump" else to - 1  # an update at least is to be done, or the batch before too
    latest = max(0, latest) if arguments.latest is None else min(latest, arguments.latest)
    folder = Path(arguments.record).resolve()
    state = None if arguments.state is None else os.path.abspath(arguments.state)
    if state is not None and (record.has_saved_in(state) or Path(state).is_relative_to(folder)):
        reason = "the run's own files are there"
        raise Refusal("--state", arguments.state, "a folder of its own", "name another one", reason).error()
    return {
        "record": str(folder),
        "start": record.start_of(to),
        "to": to,
        "latest": latest,
        "find": find,
        "state": state,
        "out": str(folder / "replay"),
    }


def launch(plan: Plan, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the script on all ranks, and return what they report.

    Raises:
        VPipeError: a rank has failed, or has ended before the update.
    """
    out = Path(plan["out"])
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    statuses = run_ranks(plan, more)
    reports = [_report(out / f"rank{rank:03d}.json") for rank in range(len(statuses))]
    done = all(report.get("reached") is not None for report in reports)
    if not done and not any(report.get("fault") or report.get("difference") for report in reports):
        failed = next((rank for rank, status in enumerate(statuses) if status), 0)
        lines = (out / f"rank{failed:03d}.log").read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise VPipeError(
            f"replay to update {plan['to']}: rank {failed} ended with status {statuses[failed]} before it, and said: "
            f"{said}; see {out}/rank*.log"
        )
    return reports


def run_ranks(plan: Plan, more: Sequence[str]) -> list[int | None]:
    """Run the script on all ranks; their exit status, None for one that did not end after another had failed."""
    start, out = plan["start"], Path(plan["out"])
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes: list[subprocess.Popen[bytes]] = []
    limit = float("inf")
    here = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(start["ranks"]):
            with (out / f"rank{rank:03d}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *_words(start["command"], rank), *more],
                        cwd=start["folder"],
                        env=here | _variables(start, rank, port) | {"DS_VPIPE_REPLAY": str(out / "plan.json")},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        while True:
            statuses = [process.poll() for process in processes]
            if None not in statuses or time.monotonic() > limit:
                return statuses
            if any(statuses):
                limit = min(limit, time.monotonic() + _GRACE_S)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    """End this process with its ranks."""
    sys.exit(128 + number)


def _words(command: Sequence[str], rank: int) -> list[str]:
    """The recorded command of the first rank, without its interpreter, for another rank."""
    return [f"--local_rank={rank}" if word.startswith("--local_rank=") else word for word in command[1:]]


def _variables(start: Mapping[str, Any], rank: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": start["ranks"], "LOCAL_WORLD_SIZE": start["ranks"]}
    ranks |= {"LOCAL_SIZE": start["ranks"], "MASTER_PORT": port, "OMP_NUM_THREADS": start["machine"]["threads"]}
    return {**start["environment"], **{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "127.0.0.1"}


def _report(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _faults(reports: Sequence[Mapping[str, Any]]) -> list[Fault]:
    return [Fault(**report["fault"]) for report in reports if report.get("fault")]


def earlier_start(plan: Plan, reports: Sequence[Mapping[str, Any]]) -> int | None:
    """Where to begin once more, if the state that the replay began with was not finite."""
    fault, began = first_fault(_faults(reports)), reports[0].get("began")
    if fault is None or not fault.begins or not began or began > plan["latest"]:  # the last: it cannot begin earlier
        return None
    return int(began) - 1


def answer(plan: Plan, reports: Sequence[Mapping[str, Any]]) -> Answer:
    """What the ranks have found, in words."""
    differs = next((report for report in reports if report.get("difference")), None)
    if differs is not None:
        return Answer(lambda: {"difference": differs["difference"]}, lambda: str(differs["line"]), 1)
    began, loaded, reached = (reports[0].get(name) for name in ("began", "loaded", "reached"))
    fault = first_fault(_faults(reports))
    rows = by_growth(report.get("norms", []) for report in reports)
    lines = [f"the script has ended by itself before update {plan['to']}; see {plan['out']}/rank*.log"]
    if reached is not None:
        since = f"from update {began}, checkpoint {loaded}" if loaded else f"from update {began}"
        lines = [f"replayed to update {reached} {since}: {reached - began} losses are the recorded ones, bit for bit"]
    if plan["find"] == "nan":
        lines.append("all values are finite" if fault is None else f"first value that is not finite: {fault.line()}")
    if plan["find"] == "loss-jump":
        lines.append(aligned([_row(row, plan["to"]) for row in rows[:_SHOWN]]))
    if plan["state"] is not None and reached is not None:
        lines.append(f"state after update {reached}: {plan['state']}")
    found = {"to": plan["to"], "began": began, "loaded": loaded, "reached": reached, "norms": rows}
    return Answer(
        lambda: {**found, "state": plan["state"], "fault": None if fault is None else asdict(fault)},
        lambda: "\n".join(lines),
        0 if reached is not None else 1,
    )


def _row(row: Mapping[str, Any], to: int) -> dict[str, object]:
    """Norms of a layer, by what they are of."""
    norms = {
        f"{name} {update}": f"{value:.4g}"
        for name in ("activation", "gradient")
        for update, value in zip((to - 1, to), row[name], strict=True)
    }
    return {**{name: row[name] for name in ("layer", "name", "stage")}, **norms, "growth": f"{row['growth']:.3g}"}
