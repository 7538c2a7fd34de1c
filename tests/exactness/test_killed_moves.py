"""A stage that is killed at an action of a live move: the run resumes with the old split or the new one, exactly.

The suite kills each end of a move at one of its messages. With ``DS_VPIPE_KILLS=messages`` both are killed before and
after every one of every move, with ``all`` also at everything around the first cut-over and at instants of a save, and
a table is printed (``pytest -s``). A kill takes four seconds, two of which the others give all ranks to read why they
end: ``DS_VPIPE_KILLS="all 3/16"`` is the third of sixteen parts.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from shutil import rmtree
from typing import Any

import cases
import numpy as np
import pytest
from test_live_balance import DEPTHS, SIZE, STAGES, config, replayed, train
from test_live_moves import difference
from worlds import Worlds

from ds_vpipe.schedules.moves import Move
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

KILLS, *SHARE = os.environ.get("DS_VPIPE_KILLS", "").split() or [""]
PART, PARTS = map(int, SHARE[0].split("/")) if SHARE else (1, 1)
PIPELINE = Pipeline("asp", STAGES, SIZE, DEPTHS)
UPDATES, LONGEST_S = 21, 50.0  # no wait has ended at its limit of 60 s, however busy the machine is
STARTS = {"down": (8, 1, 1), "up": (1, 1, 8)}
SAVES = {"between moves": (3, 9, 14), "in moves": (3, 8, 12)}


@dataclass
class Kill:
    """A stage and its action before or after which it is killed, or in a save after so many seconds."""

    stage: int
    number: int
    what: str
    after: bool = False
    delay: float | None = None


@dataclass
class Watcher:
    """Actions of this stage, at one of which it may be killed."""

    kill: Kill | None = None
    actions: list[str] = field(default_factory=list)

    def before(self, action: Any) -> None:
        self.actions.append(str(action))
        self._end(after=False)

    def after(self, action: Any) -> None:
        self._end(after=True)

    def _end(self, after: bool) -> None:
        kill = self.kill
        if kill is not None and kill.delay is None and (kill.number, kill.after) == (len(self.actions), after):
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(self, number: int) -> None:
        """A save begins."""
        if self.kill is not None and self.kill.delay is not None and self.kill.number == number:
            threading.Timer(self.kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def run(start: tuple[int, ...], saves: tuple[int, ...], folder: str, kill: Kill | None = None) -> dict[str, Any]:
    """Train with checkpoints while layers move, until a stage is killed."""
    mine = kill is not None and int(os.environ["RANK"]) == kill.stage
    watcher = Watcher(kill if mine else None)
    random.seed(0)  # checkpoints have these states
    np.random.seed(0)
    ds_config = config(stage_to_depth_map=list(DEPTHS), partition=list(start))
    report = train(ds_config, UPDATES, seed=None, saves=saves, folder=folder, watcher=watcher)
    return {**report, "actions": watcher.actions}


def digest(checkpoint: Path) -> str:
    """Digest of a checkpoint's files and their names."""
    found = hashlib.sha256()
    for file in sorted(checkpoint.rglob("*")):
        found.update(str(file.relative_to(checkpoint)).encode() + (file.read_bytes() if file.is_file() else b""))
    return found.hexdigest()


def split_after(start: Sequence[int], moves: Sequence[Move]) -> list[int]:
    split = list(start)
    for move in moves:
        split[move.source] -= 1
        split[move.target] += 1
    return split


def resumed(worlds: Worlds, start: tuple[int, ...], saves: tuple[int, ...], moves: list[Move], folder: Path) -> str:
    """Resume from a folder, train on and compare with the replay; the split with which it went on."""
    saved = int((folder / "latest").read_text().removeprefix("global_step"))
    begun = [move for move in moves if move.has_begun(PIPELINE, saved * SIZE)]
    block = {"stage_to_depth_map": list(DEPTHS), "partition": list(start), "replan": {"every": 100}}
    reports = worlds.run(STAGES, train, config(**block), saved + 5, seed=None, load=True, folder=str(folder))
    assert all(report["splits"][-1] == split_after(start, begun) for report in reports)
    drains = tuple(save for save in saves if save <= saved)
    undisturbed = replayed(saved + 5, begun, drains, start).parameters()
    assert difference(cases.merged(reports), undisturbed) == 0
    return f"{split_after(start, begun)} at update {saved}"


def kills(actions: Sequence[Sequence[str]], moves: Sequence[Move]) -> Iterator[Kill]:
    """Before and after every action of a move; for all, before others of both ends of the first one, and in a save.

    Between two actions nothing happens: the end of one is the beginning of the next.
    """
    first, last = moves[0], UPDATES - 1 - DEPTHS[0] // SIZE  # from there on a stage may have ended
    around = range(first.first_version(PIPELINE), first.micro_batch // SIZE)
    for stage, found in enumerate(actions):
        updates, instants, is_all = 0, dict[int, Kill](), KILLS == "all" and stage in (first.source, first.target)
        for number, action in enumerate(found, 1):
            updates += action.startswith("STEP") and "LAYER" not in action
            if updates >= last:
                break
            if "LAYER" in action or (is_all and updates in around):
                instants.setdefault(number, Kill(stage, number, action))
            if "LAYER" in action:
                instants[number + 1] = Kill(stage, number, action, after=True)
        yield from instants.values()
        if is_all:
            yield from (Kill(stage, 1, "in the second save", delay=delay / 125) for delay in range(10))


def some(found: Iterator[Kill], move: Move) -> list[Kill]:
    """The first message of a move as it has left, and the last action for one at the other stage."""
    messages = [kill for kill in found if "LAYER" in kill.what]
    source = [kill for kill in messages if kill.stage == move.source and kill.after]
    target = [kill for kill in messages if kill.stage == move.target and not kill.after]
    return [source[0], target[-1]]


@pytest.mark.parametrize("saves", SAVES if KILLS else ["in moves"])
@pytest.mark.parametrize("direction", STARTS)
def test_a_kill_while_layers_move_leaves_the_old_split_or_the_new_one(
    worlds: Worlds, doomed: Worlds, tmp_path: Path, direction: str, saves: str
) -> None:
    start, whole = STARTS[direction], tmp_path / "whole"
    # In fresh processes, as the others: pickles depend on which equal strings are one object.
    ranks = doomed.run(STAGES, run, start, SAVES[saves], str(whole))
    doomed.close()
    moves = [move for _, move in ranks[0]["steps"]]
    every = kills([rank["actions"] for rank in ranks], moves)
    table: dict[tuple[int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    splits: dict[str, str] = {}  # by checkpoint
    longest = 0.0
    for kill in islice(every, PART - 1, None, PARTS) if KILLS else some(every, moves[0]):
        folder = tmp_path / "killed"
        outcomes = doomed.outcomes(STAGES, run, start, SAVES[saves], str(folder), kill)
        lines = [outcome.text for outcome in outcomes]
        assert lines.pop(kill.stage) == "died", kill
        # A wait for all ranks does not know which one it is, and one of DeepSpeed's in a save not whether.
        known = f"(stage {kill.stage} |: one of ranks 0, 1, 2 is gone|in save_checkpoint.* one is gone or did not come)"
        assert all(re.match(f"PipelinePeerError: .*{known}", line) for line in lines), (kill, lines)
        longest = max(longest, *(outcome.seconds for outcome in outcomes))
        found = (folder / "latest").read_text()
        assert digest(folder / found) == digest(whole / found), kill
        if found not in splits:
            splits[found] = resumed(worlds, start, SAVES[saves], moves, folder)
        kind = kill.what.rstrip("0123456789") + (" sent or received" if kill.after else "")
        table[kill.stage, kind][splits[found]] += 1
        rmtree(folder)
    assert longest < LONGEST_S
    assert PARTS > 1 or len(splits) > 1
    number = sum(sum(counts.values()) for counts in table.values())
    print(f"\n{direction}, saves {saves} {SAVES[saves]}: {number} kills, longest run {longest:.1f} s")
    for (stage, kind), counts in sorted(table.items()):
        print(f"stage {stage} {kind:40}", ", ".join(f"{count} x {split}" for split, count in sorted(counts.items())))
