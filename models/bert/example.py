"""BERT pre-training for ``python -m ds_vpipe profile`` and ``forecast``: one micro-batch, or a training."""

from typing import Any

from transformers import BertConfig

from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.data import micro_batches, prepare
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.model import bert_config, model_of
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


def training(micro_batch_size: int, **options: Any) -> dict[str, Any]:
    """Layers, loss and endless micro-batches of the training script ``models/bert/train.py``.

    Args:
        micro_batch_size: samples.
        options: of the script, such as ``config_name="mini"``; true and false are for those without a value.
    """
    flags = {True: "--{}", False: "--no-{}"}
    words = [flags[v].format(name) if isinstance(v, bool) else f"--{name}={v}" for name, v in options.items()]
    arguments = parse_arguments(["--deepspeed_config", "given to the command", *words])
    model = model_of(arguments)
    samples = prepare(arguments, model.config).training
    data = micro_batches(samples, micro_batch_size, arguments.seed)
    return {"layers": model.layers, "loss_fn": PretrainingLoss(), "data": data}
