"""What a training run tells: progress bar, log lines, a JSON-lines metrics file and a loss plot."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ds_vpipe import StageStatistics
from ds_vpipe.models.bert.epoch_clock import EpochClock
from ds_vpipe.models.bert.validation import ValidationResult


class Report:
    """Tells of a training run, on the one rank that speaks; on the others it does nothing.

    Args:
        folder: where ``metrics.jsonl`` and ``loss.png`` go; created if missing. None on the ranks that are silent.
        total_steps: updates the run is to have.
        samples_per_step: samples in one update, over all replicas.
        every: updates between two log lines.
        steps_per_epoch: updates in an epoch, not necessarily a whole number.
        done: updates that the run has had before it was resumed.
    """

    def __init__(
        self,
        folder: Path | None,
        total_steps: int,
        samples_per_step: int,
        every: int,
        steps_per_epoch: float,
        done: int = 0,
    ) -> None:
        self._folder = folder
        self._clock = EpochClock(steps_per_epoch)
        self._samples_per_step = samples_per_step
        self._every = every
        self._begin = self._since = time.monotonic()
        self._losses: list[Tensor] = []
        self._training: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._bar: tqdm[Any] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._take_up(folder / "metrics.jsonl", done)
            # Without a terminal a bar is noise in a log file; the log lines say the same.
            self._bar = tqdm(
                total=total_steps, initial=done, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
            )

    def step(
        self, step: int, epoch: int, loss: Tensor, learning_rate: float, stages: Sequence[StageStatistics] = ()
    ) -> None:
        """Note the loss of one update, numbered from 1; every few updates print and store their mean.

        ``stages`` are the records of the update's batch; those of the last one are stored.
        """
        if self._bar is None:
            return
        # Reading a loss waits for the device: keep the tensors and read them once per line.
        self._losses.append(loss.detach())
        self._bar.update()
        if step % self._every == 0:
            self._tell(step, epoch, learning_rate, stages)

    def validation(self, step: int, result: ValidationResult) -> None:
        """Note losses and accuracies over held-out text."""
        if self._bar is None:
            return
        self._validation.append((step, result.masked_lm_loss))
        self._write({"step": step} | {f"validation_{name}": value for name, value in result.values().items()})
        self.line(
            f"Iteration {step}, validation loss (masked LM): {result.masked_lm_loss:.4f} nats,"
            f" accuracy: {result.accuracies}"
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What is done inside is no training: its time does not count."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - begin

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._bar is not None:
            self._bar.write(text)
            sys.stdout.flush()

    def close(self, unigram_entropy: float | None) -> None:
        """End the progress bar and draw ``loss.png``."""
        if self._bar is None or self._folder is None:
            return
        self._bar.close()
        if self._training or self._validation:
            plot_losses(self._folder / "loss.png", self._training, self._validation, unigram_entropy)

    def _tell(self, step: int, epoch: int, learning_rate: float, stages: Sequence[StageStatistics]) -> None:
        now = time.monotonic()
        losses = [value.item() for value in self._losses]
        loss, seconds = sum(losses) / len(losses), now - self._since
        rate = len(losses) * self._samples_per_step / seconds
        self._clock.add(epoch, len(losses), seconds, losses)
        self._training.append((step, loss))
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "samples_per_second": rate,
                "learning_rate": learning_rate,
                "seconds": now - self._begin,
                "epoch_hours": self._clock.epoch_hours,
                "stages": [asdict(stage) for stage in stages],
            }
        )
        self.line(f"Epoch {epoch}, Iteration {step}, Loss: {loss:.4f}, {rate:.1f} samples/s")
        peaks = [stage.peak_memory_bytes for stage in stages]
        memory = (peaks[0], max(peaks)) if peaks else None
        self.line(self._clock.line(0, step, seconds / len(losses), loss, memory))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} samples/s")
        self._losses.clear()
        self._since = now

    def _take_up(self, path: Path, done: int) -> None:
        """Keep what a resumed run wrote up to its checkpoint, and draw it too."""
        records = []
        if done and path.is_file():
            records = [record for line in path.read_text(encoding="utf-8").splitlines() if (record := _read(line))]
        kept = [record for record in records if record["step"] <= done]
        path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        for record in kept:
            if "loss" in record:
                self._training.append((record["step"], record["loss"]))
            else:
                self._validation.append((record["step"], record["validation_masked_lm_loss"]))

    def _write(self, record: dict[str, Any]) -> None:
        if self._folder is not None:
            with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _read(line: str) -> dict[str, Any] | None:
    """A record, None for the rest of one that a killed run has not written to its end."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def plot_losses(
    path: Path, training: list[tuple[int, float]], validation: list[tuple[int, float]], unigram_entropy: float | None
) -> None:
    """Draw (step, loss) curves and the unigram entropy if it is known, in nats, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves the user's pyplot settings alone
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), label="training: masked LM + next sentence")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", label="validation: masked LM")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="grey", linestyle="--", label="unigram entropy of the corpus")
    axes.set(xlabel="update", ylabel="loss (nats)", title="BERT pre-training")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
