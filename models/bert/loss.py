"""The pre-training loss: masked-LM plus next-sentence cross-entropy."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_vpipe.models.bert.sample import IGNORED_LABEL


class PretrainingLoss:
    """Cross-entropy of the masked tokens plus cross-entropy of the next-sentence label, both in nats.

    The loss function of the pipeline. A validation wants the masked-LM part alone, which has a scale of its own (the
    unigram entropy of the corpus); it evaluates inside `masked_lm_only`.
    """

    def __init__(self) -> None:
        self._next_sentence = True

    def __call__(self, outputs: tuple[Tensor, Tensor | None], labels: tuple[Tensor, Tensor]) -> Tensor:
        """Mean loss of one micro-batch, a scalar in float32.

        Args:
            outputs: masked-LM logits [B, P, V] and next-sentence logits [B, 2], None for models without.
            labels: masked-LM labels int64 [B, P], `IGNORED_LABEL` in unused slots, at least one slot used; and
                next-sentence labels int64 [B], 0 where the second segment continues the first, 1 where it is random.
        """
        masked_lm_logits, next_sentence_logits = outputs
        masked_lm_labels, next_sentence_labels = labels
        loss = cross_entropy(
            masked_lm_logits.flatten(0, 1).float(), masked_lm_labels.flatten(), ignore_index=IGNORED_LABEL
        )
        if self._next_sentence and next_sentence_logits is not None:
            loss = loss + cross_entropy(next_sentence_logits.float(), next_sentence_labels)
        return loss

    @contextmanager
    def masked_lm_only(self) -> Iterator[None]:
        """Inside, the loss is the masked-LM part alone."""
        self._next_sentence = False
        try:
            yield
        finally:
            self._next_sentence = True
