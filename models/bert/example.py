"""One micro-batch of BERT pre-training, for ``python -m ds_vpipe profile``."""

from typing import Any

from ds_vpipe.models.bert.data import MicroBatches
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.masking import Masking, RandomSamples, Vocabulary
from ds_vpipe.models.bert.sizes import bert_config


def pretraining(
    micro_batch_size: int, size: str = "large", sequence_length: int = 128, max_predictions: int = 20
) -> dict[str, Any]:
    """Layers, a micro-batch of random tokens, loss and labels.

    Args:
        micro_batch_size: samples.
        size: as `--config_name` of the training script: `"tiny"`, `"base"`, `"large"` ... or the path of a JSON file.
        sequence_length: tokens per sample.
        max_predictions: masked tokens per sample.
    """
    config = bert_config(size)
    masking = Masking(Vocabulary.numbered(config.vocab_size), sequence_length, max_predictions)
    samples = RandomSamples(micro_batch_size, masking, seed=0)
    inputs, labels = MicroBatches(samples, micro_batch_size, 0, 1, seed=0)[0]
    return {"layers": bert_layers(config), "inputs": inputs, "loss_fn": PretrainingLoss(), "labels": labels}
