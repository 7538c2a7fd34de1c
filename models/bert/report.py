"""What a training run tells: progress bar, log lines, a JSON-lines metrics file and a loss plot."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ds_vpipe import StageStatistics


class Report:
    """Tells of a training run, on the one rank that speaks; on the others it does nothing.

    Args:
        folder: where ``metrics.jsonl`` and ``loss.png`` go; created if missing. None on the ranks that are silent.
        total_steps: updates the run is to have.
        samples_per_step: samples in one update, over all replicas.
        every: updates between two log lines.
    """

    def __init__(self, folder: Path | None, total_steps: int, samples_per_step: int, every: int) -> None:
        self._folder = folder
        self._samples_per_step = samples_per_step
        self._every = every
        self._begin = self._since = time.monotonic()
        self._losses: list[Tensor] = []
        self._training: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._bar: tqdm[Any] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text("", encoding="utf-8")
            # Without a terminal a bar is noise in a log file; the log lines say the same.
            self._bar = tqdm(total=total_steps, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)

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

    def validation(self, step: int, loss: float) -> None:
        """Note a masked-LM loss over held-out text."""
        self._since = time.monotonic()  # validation is no training time
        self._losses.clear()
        if self._bar is None:
            return
        self._validation.append((step, loss))
        self._write({"step": step, "validation_masked_lm_loss": loss})
        self.line(f"Iteration {step}, validation loss (masked LM): {loss:.4f} nats")

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._bar is not None:
            self._bar.write(text)
            sys.stdout.flush()

    def close(self, unigram_entropy: float) -> None:
        """End the progress bar and draw ``loss.png``."""
        if self._bar is None or self._folder is None:
            return
        self._bar.close()
        if self._training or self._validation:
            plot_losses(self._folder / "loss.png", self._training, self._validation, unigram_entropy)

    def _tell(self, step: int, epoch: int, learning_rate: float, stages: Sequence[StageStatistics]) -> None:
        now = time.monotonic()
        loss = sum(value.item() for value in self._losses) / len(self._losses)
        rate = len(self._losses) * self._samples_per_step / (now - self._since)
        self._training.append((step, loss))
        self._write(
            {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "samples_per_second": rate,
                "learning_rate": learning_rate,
                "seconds": now - self._begin,
                "stages": [asdict(stage) for stage in stages],
            }
        )
        self.line(f"Epoch {epoch}, Iteration {step}, Loss: {loss:.4f}, {rate:.1f} samples/s")
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:.0f} samples/s")
        self._losses.clear()
        self._since = now

    def _write(self, record: dict[str, Any]) -> None:
        if self._folder is not None:
            with (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def plot_losses(
    path: Path, training: list[tuple[int, float]], validation: list[tuple[int, float]], unigram_entropy: float
) -> None:
    """Draw (step, loss) curves and the unigram entropy, in nats, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves the user's pyplot settings alone
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), label="training: masked LM + next sentence")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", label="validation: masked LM")
    axes.axhline(unigram_entropy, color="grey", linestyle="--", label="unigram entropy of the corpus")
    axes.set(xlabel="update", ylabel="loss (nats)", title="BERT pre-training")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
