#!/usr/bin/env python
"""Pause of a run of which a rank is killed, with states in host memory and with checkpoints.

``python scripts/bench/restarts.py`` trains stages of emulated layers under ``ds_vpipe.run --restarts`` and kills
one rank after another. Printed are medians of the seconds from a kill until training is further than it was: with
``recovery``, whose next ranks have imported everything before, and with a checkpoint every 20 updates, from whose last
the run goes on in new processes; and the memory of such a next rank.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import markdown, parser_of

STAGE_MS, SAVE_EVERY = 20.0, 20
LIMIT_S = 180.0  # of every wait


def train(folder: Path, stages: int, recovers: bool) -> None:
    """A rank, which leaves its process and the time of every update in the folder."""
    import deepspeed
    import torch
    from common import BATCH, WIDTH, Emulated, ds_config, engine_for
    from deepspeed.pipe import LayerSpec

    deepspeed.init_distributed("gloo")
    layers = [LayerSpec(Emulated, STAGE_MS) for _ in range(stages)]
    engine = engine_for(layers, stages, ds_config(1, {"recovery": {"every": int(recovers)}, "staleness": "off"}))
    if not (recovers and engine.recover()) and (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    (folder / f"process {engine.global_rank}").write_text(str(os.getpid()))
    batch = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    data = iter(lambda: batch, None)
    with (folder / f"updates {engine.global_rank}").open("a") as updates:
        while True:  # until it is ended
            engine.train_batch(data)
            print(os.environ["DS_VPIPE_RESTART"], engine.global_steps, time.time(), file=updates, flush=True)
            if not recovers and engine.global_steps % SAVE_EVERY == 0:
                engine.save_checkpoint(str(folder))


def updates(folder: Path, attempt: int) -> list[tuple[int, float]]:
    """Updates of the first stage in an attempt, each with its time."""
    path = folder / "updates 0"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(int(update), float(at)) for of, update, at in words if int(of) == attempt]


def pauses(recovers: bool, options: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Seconds from each kill until there is a new update, and the updates that were trained again."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    draw, found, again = random.Random(0), list[float](), list[int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "WORLD_SIZE": str(options.stages), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"LOCAL_SIZE": str(options.stages), "MASTER_PORT": str(port)}
        words = ["--restarts", str(options.kills), __file__, "--stages", str(options.stages), "--rank-of", name]
        words += ["--recovers"] * recovers
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "ds_vpipe.run", *words],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(options.stages)
        ]
        try:
            last, end = 0, 0.0
            for attempt in range(options.kills + 1):
                since = time.time()
                while not any(update > last for update, _ in updates(folder, attempt)):
                    ended = [number for number, rank in enumerate(ranks) if rank.poll() is not None]
                    if ended or time.time() > since + LIMIT_S:
                        why = f"ranks {ended} ended" if ended else f"it has taken {LIMIT_S:g} s"
                        raise SystemExit(f"attempt {attempt}: no update after {last}: {why}")
                    time.sleep(0.01)
                if attempt:
                    done = updates(folder, attempt)
                    found.append(next(at for update, at in done if update > last) - end)
                    again.append(last - done[0][0] + 1)
                if attempt < options.kills:
                    time.sleep(options.seconds)
                    process, end = int((folder / f"process {draw.randrange(options.stages)}").read_text()), time.time()
                    os.kill(process, signal.SIGKILL)
                    time.sleep(0.2)  # in which the others come to their end
                    last = updates(folder, attempt)[-1][0]
        finally:
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.wait()
    return found, again


def of_spare() -> dict[str, int]:
    """MB of a process that has imported what a spare does: ``Rss``, and what it shares with nobody."""
    program = "from ds_vpipe.run import _import; _import(); print(open('/proc/self/smaps_rollup').read())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in said.splitlines() if line.endswith(" kB")]
    return {name.rstrip(":"): round(int(kilobytes) / 1024) for name, kilobytes, _ in words}


def main() -> None:
    """Measure both and print a table."""
    options = parse()
    if options.rank_of is not None:
        return train(options.rank_of, options.stages, options.recovers)
    rows = []
    for name, recovers in (("states in host memory", True), (f"a checkpoint every {SAVE_EVERY} updates", False)):
        found, again = pauses(recovers, options)
        spread = f"{min(found):.1f} to {max(found):.1f}"
        rows.append((name, len(found), f"{statistics.median(found):.1f}", spread, f"{statistics.median(again):g}"))
    spare = of_spare()
    print(f"a spare: {spare['Rss']} MB of host memory, {spare['Private_Clean'] + spare['Private_Dirty']} its own")
    print(markdown(["what is kept", "kills", "seconds", "lowest to highest", "updates again"], rows))
    return None


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=3)
parser.add_argument("--kills", type=int, default=7)
parser.add_argument("--seconds", type=float, default=15.0, help="of training before each kill")
parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
parser.add_argument("--recovers", action="store_true", help=argparse.SUPPRESS)
parse = parser.parse_args

if __name__ == "__main__":
    main()
