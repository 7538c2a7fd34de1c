"""One micro-batch of BERT pre-training, for ``python -m ds_vpipe profile``."""

from typing import Any

from transformers import BertConfig

from ds_vpipe.models.bert.data import micro_batches
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.model import bert_config
from ds_vpipe.models.bert.samples import Masking, RandomSamples, Vocabulary


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
    return example(bert_config(size), micro_batch_size, sequence_length, max_predictions)


def example(config: BertConfig, micro_batch_size: int, sequence_length: int, max_predictions: int) -> dict[str, Any]:
    """The same for a configuration."""
    masking = Masking(Vocabulary.numbered(config.vocab_size), sequence_length, max_predictions)
    samples = RandomSamples(micro_batch_size, masking, seed=0)
    inputs, labels = next(micro_batches(samples, micro_batch_size, seed=0))
    return {"layers": bert_layers(config), "inputs": inputs, "loss_fn": PretrainingLoss(), "labels": labels}
