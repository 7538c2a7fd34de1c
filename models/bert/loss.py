"""The pre-training loss, masked-LM plus next-sentence cross-entropy, and validation by it.

Validation evaluates the newest weights on the same held-out samples every time, between two batches of training and
without a trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy

import ds_vpipe
from ds_vpipe.models.bert.data import IGNORED_LABEL, MicroBatch, micro_batches_of
from ds_vpipe.models.bert.samples import Samples

VALIDATION_SAMPLES = 1024  # at most, in whole micro-batches of all replicas: enough for two digits of the loss


class PretrainingLoss:
    """Cross-entropy of the masked tokens plus cross-entropy of the next-sentence label, both in nats.

    The loss function of the pipeline. A validation wants more than one number of the outputs, which only the last
    stage has; it evaluates inside `measuring`, and the numbers come back the way of the loss.
    """

    def __init__(self) -> None:
        self._measuring = False

    def __call__(self, outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
        """Mean loss of one micro-batch, a scalar in float32.

        Inside `measuring` float32 [5], fit to be averaged over micro-batches of one size: mean masked-LM loss and mean
        next-sentence loss in nats, number of masked tokens that are predicted and number of masked tokens, share of the
        next-sentence labels that are predicted.

        Args:
            outputs: masked-LM logits [B, P, V] and next-sentence logits [B, 2].
            labels: masked-LM labels int64 [B, P], `IGNORED_LABEL` in unused slots, at least one slot used; and
                next-sentence labels int64 [B], 0 where the second segment continues the first, 1 where it is random.
        """
        (logits, next_logits), (tokens, next_labels) = outputs, labels
        masked_lm = cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), ignore_index=IGNORED_LABEL)
        next_sentence = cross_entropy(next_logits.float(), next_labels)
        if not self._measuring:
            return masked_lm + next_sentence
        hits = (logits.argmax(-1) == tokens).sum()  # no token has the number IGNORED_LABEL
        next_hits = (next_logits.argmax(-1) == next_labels).float().mean()
        return torch.stack([masked_lm, next_sentence, hits, (tokens != IGNORED_LABEL).sum(), next_hits])

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, the loss function measures."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False


def validate(engine: Any, loss: PretrainingLoss, held_out: Samples) -> dict[str, float]:
    """Losses in nats and accuracies in [0, 1] over held-out samples. All ranks call this and get the means.

    Args:
        engine: DeepSpeed's pipeline engine or ours, with `loss` as its loss function.
        loss: of the pipeline.
        held_out: samples, at least a micro-batch for every replica.

    Raises:
        PipelinePeerError: another stage failed, is lost, or did not answer in time.
    """
    smallest = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
    number = max(1, min(len(held_out), VALIDATION_SAMPLES) // smallest)
    batches = micro_batches_of(engine, held_out, None, number)
    monitored, engine.monitor.enabled = engine.monitor.enabled, False  # the engine would write their mean
    try:
        with loss.measuring():
            means = _evaluate(engine, batches, number)
    finally:
        engine.monitor.enabled = monitored
    masked_lm, next_sentence, hits, masked, next_hits = means.tolist()
    result = {
        "masked_lm_loss": masked_lm,
        "next_sentence_loss": next_sentence,
        "masked_lm_accuracy": hits / masked,
        "next_sentence_accuracy": next_hits,
    }
    if engine.global_rank == 0 and engine.monitor.enabled:
        events = {"Train/Samples/eval_loss": masked_lm}
        events |= {f"Validation/Samples/{name}": value for name, value in result.items()}
        engine.monitor.write_events([(name, value, engine.global_samples) for name, value in events.items()])
    return result


def _evaluate(engine: Any, batches: Iterator[MicroBatch] | None, number: int) -> Tensor:
    if isinstance(engine, ds_vpipe.VPipeEngine):
        return engine.eval_batch(batches, num_micro_batches=number)
    # DeepSpeed's own engine hands single numbers to the other stages only: the same broadcast, of all of them.
    engine.total_loss = None  # that of training, to which it would add these; every batch begins with None
    result = engine.eval_batch(batches, bcast_loss=False, num_micro_batches=number)
    if not engine.is_last_stage():
        result = Tensor([0.0] * 5).to(engine.device)
    last = engine.grid.stage_to_global(engine.num_stages - 1)
    distributed.broadcast(result, src=last, group=engine.mpu.get_pipe_parallel_group())
    return result
