"""The loss of a causal language model."""

from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED_LABEL = -100


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it.

    Args:
        logits: [B, S, V]; those at position i predict token i + 1.
        labels: int64 [B, S], the tokens themselves; `IGNORED_LABEL` where nothing is to be predicted.
    """
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
