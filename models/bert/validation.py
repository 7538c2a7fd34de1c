"""Validation: losses and accuracies over held-out samples, between two batches of training and without a trace."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed

import ds_vpipe
from ds_vpipe.models.bert.data import MicroBatch, MicroBatches
from ds_vpipe.models.bert.loss import PretrainingLoss

VALIDATION_SAMPLES = 1024  # enough for two digits of the loss


@dataclass(frozen=True)
class ValidationResult:
    """Means over the held-out samples.

    Attributes:
        masked_lm_loss: in nats.
        next_sentence_loss: in nats; None for models without.
        masked_lm_accuracy: share of the masked tokens that are predicted, in [0, 1].
        next_sentence_accuracy: share of the pairs that are told apart, in [0, 1]; None for models without.
    """

    masked_lm_loss: float
    next_sentence_loss: float | None
    masked_lm_accuracy: float
    next_sentence_accuracy: float | None

    @property
    def accuracies(self) -> str:
        """The accuracies in words."""
        masked_lm = f"masked LM {self.masked_lm_accuracy:.1%}"
        if self.next_sentence_accuracy is None:
            return masked_lm
        return f"{masked_lm}, next sentence {self.next_sentence_accuracy:.1%}"

    def values(self) -> dict[str, float]:
        """The means that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Validation:
    """Evaluates the newest weights on the same held-out samples every time.

    Args:
        engine: DeepSpeed's pipeline engine or ours, with `loss` as its loss function.
        loss: of the pipeline.
        batches: held-out micro-batches, not shuffled.
        samples: how many held-out samples there are.
    """

    def __init__(self, engine: Any, loss: PretrainingLoss, batches: MicroBatches, samples: int) -> None:
        self._engine = engine
        self._loss = loss
        self._batches = batches
        self._rounds = max(1, min(samples, VALIDATION_SAMPLES) // engine.train_batch_size())

    def run(self) -> ValidationResult:
        """Evaluate; all ranks call this and get the result.

        Raises:
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        engine = self._engine
        reads = engine.is_first_stage() or engine.is_last_stage()
        iterator = self._batches.range(0, self._rounds * engine.micro_batches) if reads else None
        monitored, engine.monitor.enabled = engine.monitor.enabled, False  # the engine would write their mean
        try:
            with self._loss.measuring():
                totals = sum(self._evaluate(iterator).double() for _ in range(self._rounds))
        finally:
            engine.monitor.enabled = monitored
        assert isinstance(totals, Tensor)
        masked_lm, next_sentence, hits, masked, next_hits = (totals / self._rounds).tolist()
        paired = not math.isnan(next_hits)
        result = ValidationResult(
            masked_lm, next_sentence if paired else None, hits / masked, next_hits if paired else None
        )
        self._monitor(result)
        return result

    def _evaluate(self, iterator: Iterator[MicroBatch] | None) -> Tensor:
        engine = self._engine
        if isinstance(engine, ds_vpipe.VPipeEngine):
            return engine.eval_batch(iterator)
        # DeepSpeed's own engine hands single numbers to the other stages only: the same broadcast, of all of them.
        engine.total_loss = None  # that of training, to which it would add these; every batch begins with None
        result = engine.eval_batch(iterator, bcast_loss=False)
        if not engine.is_last_stage():
            result = Tensor([0.0] * 5).to(engine.device)
        last = engine.grid.stage_to_global(engine.num_stages - 1)
        distributed.broadcast(result, src=last, group=engine.mpu.get_pipe_parallel_group())
        return result

    def _monitor(self, result: ValidationResult) -> None:
        engine = self._engine
        if engine.global_rank == 0 and engine.monitor.enabled:
            values = {"Train/Samples/eval_loss": result.masked_lm_loss} | {
                f"Validation/Samples/{name}": value for name, value in result.values().items()
            }
            engine.monitor.write_events([(name, value, engine.global_samples) for name, value in values.items()])
