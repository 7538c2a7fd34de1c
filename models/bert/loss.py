"""The pre-training loss, masked-LM plus next-sentence cross-entropy, and what validation measures beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_vpipe.models.bert.masking import IGNORED_LABEL


class PretrainingLoss:
    """Cross-entropy of the masked tokens plus cross-entropy of the next-sentence label, both in nats.

    The loss function of the pipeline. A validation wants more than one number of the outputs, which only the last
    stage has; it evaluates inside `measuring`, and the numbers come back the way of the loss.
    """

    def __init__(self) -> None:
        self._measuring = False

    def __call__(self, outputs: tuple[Tensor, Tensor | None], labels: tuple[Tensor, Tensor]) -> Tensor:
        """Mean loss of one micro-batch, a scalar in float32; inside `measuring` what `measures` returns.

        Args:
            outputs: masked-LM logits [B, P, V] and next-sentence logits [B, 2], None for models without.
            labels: masked-LM labels int64 [B, P], `IGNORED_LABEL` in unused slots, at least one slot used; and
                next-sentence labels int64 [B], 0 where the second segment continues the first, 1 where it is random.
        """
        if self._measuring:
            return measures(outputs, labels)
        masked_lm, next_sentence = _losses(outputs, labels)
        return masked_lm if next_sentence is None else masked_lm + next_sentence

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, the loss function measures."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False


def measures(outputs: tuple[Tensor, Tensor | None], labels: tuple[Tensor, Tensor]) -> Tensor:
    """What is told of a micro-batch, float32 [5], fit to be averaged over micro-batches of one size.

    Mean masked-LM loss and mean next-sentence loss in nats, number of masked tokens that are predicted and number of
    masked tokens, share of the next-sentence labels that are predicted. Models without next-sentence logits have NaN
    for what there is none of.
    """
    masked_lm, next_sentence = _losses(outputs, labels)
    masked_lm_labels, next_sentence_labels = labels
    used = masked_lm_labels != IGNORED_LABEL
    hits = (outputs[0].argmax(-1) == masked_lm_labels) & used
    next_hits = absent = torch.full_like(masked_lm, torch.nan)
    if outputs[1] is not None:
        next_hits = (outputs[1].argmax(-1) == next_sentence_labels).float().mean()
    return torch.stack(
        [masked_lm, absent if next_sentence is None else next_sentence, hits.sum(), used.sum(), next_hits]
    )


def _losses(outputs: tuple[Tensor, Tensor | None], labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    masked_lm_logits, next_sentence_logits = outputs
    masked_lm_labels, next_sentence_labels = labels
    masked_lm = cross_entropy(
        masked_lm_logits.flatten(0, 1).float(), masked_lm_labels.flatten(), ignore_index=IGNORED_LABEL
    )
    if next_sentence_logits is None:
        return masked_lm, None
    return masked_lm, cross_entropy(next_sentence_logits.float(), next_sentence_labels)
