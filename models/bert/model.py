"""Configuration and layers of the BERT that the command line of ``train.py`` asks for."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from deepspeed.pipe import LayerSpec
from transformers import BertConfig, BertForPreTraining

from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.sizes import bert_config
from ds_vpipe.models.hugging_face import StoredWeights, build_meta, read_config


@dataclass(frozen=True)
class Model:
    """A BERT to train.

    Attributes:
        config: of Hugging Face.
        layers: specifications for a ``PipelineModule``; no weight is read or made yet.
        description: one line for the log.
    """

    config: BertConfig
    layers: list[LayerSpec]
    description: str


def model_of(arguments: Namespace) -> Model:
    """A new BERT, or one that begins with the weights of ``--model_name_or_path``.

    Raises:
        VPipeConfigError: the configuration or the folder is wrong.
    """
    folder: Path | None = arguments.model_name_or_path
    if folder is None:
        config = bert_config(arguments.config_name, arguments.vocab_size, arguments.attn_implementation)
        if arguments.tie_word_embeddings is not None:
            config.tie_word_embeddings = arguments.tie_word_embeddings
        layers = bert_layers(config, arguments.seed)
        return Model(config, layers, f"new bert, {len(layers)} pipeline layers")
    if arguments.vocab_size is not None:
        raise VPipeConfigError(
            f"--vocab_size {arguments.vocab_size} with --model_name_or_path: the vocabulary is that of the"
            " weights; leave one of them out"
        )
    return pretrained(folder, arguments.tie_word_embeddings, arguments.seed, arguments.attn_implementation)


def pretrained(folder: Path, tied: bool | None = None, seed: int = 0, attention: str = "sdpa") -> Model:
    """The BERT in a folder of ``save_pretrained()``; each layer reads its own tensors when it is built.

    Args:
        folder: with ``config.json`` and safetensors.
        tied: whether the decoder is the word embeddings; default: as the configuration says. Without a tie the decoder
            of a tied model begins as a copy.
        seed: of weights that the folder lacks.
        attention: Hugging Face's attention implementation.

    Raises:
        VPipeConfigError: the folder cannot be read, or holds another model.
    """
    config = read_config(folder, attn_implementation=attention)
    where = f"in {folder}/config.json"
    if config.model_type != "bert":
        remedy = "train others as plain models, see docs/hugging_face.md"
        raise Refusal(f"model_type {where}", config.model_type, '"bert"', remedy).error()
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise Refusal(f"{name} {where}", True, "false", "give a model without it").error()
    if config.num_hidden_layers < 1:
        given = config.num_hidden_layers
        raise Refusal(f"num_hidden_layers {where}", given, "at least 1", "correct the file").error()
    if tied and not config.tie_word_embeddings:
        allowed = "a decoder of its own, as the model in the folder has it"
        remedy = "do not tie, or give a model that is tied"
        raise Refusal(f"tie_word_embeddings with {folder}", True, allowed, remedy).error()
    config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
    weights = StoredWeights(folder, build_meta(BertForPreTraining, config, str(folder)))
    layers = bert_layers(config, seed, weights)
    said = "; ".join(filter(None, [f"bert, {len(layers)} pipeline layers", str(weights)]))
    return Model(config, layers, f"{folder}: {said}")
