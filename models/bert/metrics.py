"""Progress of a training run: bar, log lines, ``metrics.jsonl`` and ``loss.png``.

DeepSpeed's monitors (CSV, TensorBoard, W&B) get the same numbers from the engine, where the JSON asks for them.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ds_vpipe import StageStatistics
from ds_vpipe.timelines.figure import Curve, draw


class Metrics:
    """Log of a run on its first rank. The other ranks write nothing.

    Args:
        folder: of ``metrics.jsonl`` and ``loss.png``; created if missing. None on the ranks that write nothing.
        total_steps: updates the run is to have.
        samples_per_step: samples in one update, over all replicas.
        every: updates between two records. Of these about ten are printed, and none where there is a progress bar.
        done: updates that the run has had before it was resumed.
        kept: updates whose records in the folder are kept; 0 if they are of another run.
    """

    def __init__(
        self, folder: Path | None, total_steps: int, samples_per_step: int, every: int, done: int = 0, kept: int = 0
    ) -> None:
        self._folder = folder
        self._total_steps, self._samples_per_step = total_steps, samples_per_step
        self._every = every
        self._begin = self._since = time.monotonic()
        self._paused: float | None = None
        self._losses: list[Tensor] = []
        # Without a terminal a bar is noise in a log file; with one, lines are.
        silent = folder is None or not sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, initial=done, unit="update", disable=silent, dynamic_ncols=True)
        self._tenth = max(1, total_steps // 10)
        self._printed = done // self._tenth
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            before = _records(folder, kept) if kept else []
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in before), "utf-8")

    def step(
        self, step: int, epoch: int, loss: Tensor, learning_rate: float, stages: Sequence[StageStatistics] = ()
    ) -> None:
        """Add the loss of update `step` >= 1. Every few and at the last, store the mean with the latest `stages`."""
        if self._folder is None:
            return
        # Reading a loss waits for the device: keep the tensors and read them once per record.
        self._losses.append(loss.detach())
        self._bar.update()
        if step % self._every and step != self._total_steps:
            return
        now = time.monotonic()
        mean = sum(value.item() for value in self._losses) / len(self._losses)
        rate = len(self._losses) * self._samples_per_step / (now - self._since)
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "loss": mean,
                "samples_per_second": rate,
                "learning_rate": learning_rate,
                "seconds": now - self._begin,
                "stages": [asdict(stage) for stage in stages],
            }
        )
        if self._bar.disable and step // self._tenth > self._printed:
            self.line(f"Epoch {epoch}, Iteration {step}, Loss: {mean:.4f}, {rate:.1f} samples/s")
            self._printed = step // self._tenth
        self._bar.set_postfix_str(f"loss {mean:.3f}, {rate:.0f} samples/s")
        self._losses.clear()
        self._since = now

    def validation(self, step: int, result: dict[str, float]) -> None:
        """Add losses and accuracies over held-out text."""
        if self._folder is not None:
            record = {"step": step, "seconds": (self._paused or time.monotonic()) - self._begin}
            self._write(record | {f"validation_{name}": value for name, value in result.items()})
            self.line(
                f"Iteration {step}, validation loss (masked LM): {result['masked_lm_loss']:.4f} nats, accuracy: "
                f"masked LM {result['masked_lm_accuracy']:.1%}, next sentence {result['next_sentence_accuracy']:.1%}"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count as training."""
        begin = self._paused = time.monotonic()
        try:
            yield
        finally:
            length = time.monotonic() - begin
            self._begin += length
            self._since += length
            self._paused = None

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._folder is not None:
            self._bar.write(text)
            sys.stdout.flush()

    def close(self, unigram_entropy: float | None) -> None:
        """End the progress bar and draw ``loss.png``."""
        self._bar.close()
        if self._folder is not None and (records := _records(self._folder)):
            _draw(self._folder / "loss.png", records, unigram_entropy)

    def _write(self, record: dict[str, Any]) -> None:
        assert self._folder is not None
        with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _records(folder: Path, last: float = math.inf) -> list[dict[str, Any]]:
    """Records up to an update. A line that a killed run has not completed is dropped."""
    path, kept = folder / "metrics.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            kept.append(json.loads(line))
    return [record for record in kept if isinstance(record, dict) and record.get("step", math.inf) <= last]


def _draw(path: Path, records: list[dict[str, Any]], unigram_entropy: float | None) -> None:
    """Picture of losses over updates, in nats, with the unigram entropy if known."""
    curves = []
    for name, label in (
        ("loss", "training: masked LM + next sentence"),
        ("validation_masked_lm_loss", "validation: masked LM"),
    ):
        points = [(record["step"], record[name]) for record in records if name in record]
        curves += [Curve(label, points)] if points else []
    if unigram_entropy is not None:
        ends = [(record["step"], unigram_entropy) for record in (records[0], records[-1])]
        curves.append(Curve("unigram entropy of the corpus", ends, dashed=True))
    draw(path, {"BERT pre-training": curves}, "update", "loss (nats)")
