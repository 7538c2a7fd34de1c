"""Ranks killed and stopped at any moment: the others end in one line, nothing is left, and the run resumes exactly.

The long form is ``scripts/chaos.sh``, which draws its events from a seed.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import Attempt, complaints
from events import FEW, Event

ROOT = Path(__file__).resolve().parents[2]
KILLED = Event("kill", 1, "train", 100)
LINE = "[rank 0] ds_vpipe: stage 0 (rank 0) waited for RECV_GRAD3 from stage 1 (rank 1): it is gone\n"
ENDED = Attempt(statuses={0: 1, 1: -9}, logs={0: f"a log line\n{LINE}", 1: ""}, place="executor.py:61 carry_out")

RESTARTED = replace(
    ENDED, statuses={0: 0, 1: 0}, results={0: {}, 1: {}},
    logs={0: f"{LINE}[rank 0] ds_vpipe: rank 1 ended by SIGKILL; restart 1 of 1\n", 1: ""},
)  # fmt: skip


@pytest.mark.mp
def test_few_events(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "chaos.sh"), "--few", "--folder", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    restarted = sum(row[5:] == (True,) for row in FEW)
    counted = f"{len(FEW)} events, {restarted} of them with --restarts, 0 that did not come, 0 wrong"
    assert done.stdout.splitlines()[-2] == counted, done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 went on from states in memory"), done.stdout


@pytest.mark.parametrize(
    ("event", "found", "complaint"),
    [
        (KILLED, ENDED, ""),
        (KILLED, replace(ENDED, statuses={0: 0, 1: -9}), "rank 0 ended as if nothing had come"),
        (KILLED, replace(ENDED, statuses={0: -6, 1: -9}), "rank 0 ended by signal 6"),
        (KILLED, replace(ENDED, logs={0: "Traceback ...\n", 1: ""}), "rank 0 says 0 lines that name "),
        (KILLED, replace(ENDED, logs={0: 2 * LINE, 1: ""}), "rank 0 says 2 lines that name "),
        (KILLED, replace(ENDED, ended_by_launcher=[0]), "rank 0 had not ended "),
        (KILLED, replace(ENDED, left=["memory"]), "left behind: memory"),
        (replace(KILLED, restarted=True), RESTARTED, ""),
        (replace(KILLED, restarted=True), replace(RESTARTED, logs={0: LINE, 1: ""}), "rank 0 says [] of restarts"),
        (replace(KILLED, restarted=True), replace(RESTARTED, statuses={0: 0, 1: 1}), "rank 1 ended with 1 where"),
        (replace(KILLED, kind="stop"), ENDED, "rank 0 ended with 1 where training goes on"),
    ],
)
def test_what_is_wrong_is_said(event: Event, found: Attempt, complaint: str) -> None:
    said = list(complaints(event, found))
    assert [text[: len(complaint)] for text in said[:1]] == ([complaint] if complaint else [])
