"""Configuration and layers of the BERT that a command line asks for: a named size, a JSON file, or a folder."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.pipe import LayerSpec
from transformers import BertConfig, BertForPreTraining

from ds_vpipe.errors import Refusal, VPipeConfigError, read_json
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.hugging_face import StoredWeights, build_meta, read_config

VOCABULARY_MULTIPLE = 8
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

# hidden size, encoder layers, attention heads, vocabulary, dropout. `tiny` has four encoder layers instead of the two
# of Google's BERT-Tiny, so that four pipeline stages have work, and no dropout, because it is trained for minutes and
# cannot overfit; `large-48l` is BERT-Large with twice the encoder layers.
_SIZES: dict[str, tuple[int, int, int, int, float]] = {
    "tiny": (128, 4, 2, 2048, 0.0),
    "mini": (256, 4, 4, 8192, 0.1),
    "base": (768, 12, 12, 30522, 0.1),
    "large": (1024, 24, 16, 30522, 0.1),
    "large-48l": (1024, 48, 16, 30522, 0.1),
}
SIZE_NAMES = tuple(_SIZES)


@dataclass(frozen=True)
class Model:
    """A BERT to train."""

    config: BertConfig  # of Hugging Face
    layers: list[LayerSpec]  # specifications for a PipelineModule; no weight is read or made yet
    description: str  # one line for the log


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
        taken = arguments.initial_checkpoint or arguments.resume_from_checkpoint
        begin = "new bert" if taken is None else f"bert with the weights of {taken}"
        return Model(config, layers, f"{begin}, {len(layers)} pipeline layers")
    if arguments.vocab_size is not None:
        raise VPipeConfigError(
            f"--vocab_size {arguments.vocab_size} with --model_name_or_path: the vocabulary is that of the"
            " weights; leave one of them out"
        )
    return pretrained(folder, arguments.tie_word_embeddings, arguments.seed, arguments.attn_implementation)


def pretrained(folder: Path, tied: bool | None = None, seed: int = 0, attention: str = "sdpa") -> Model:
    """The BERT in a folder of ``save_pretrained()``. Each layer reads its own tensors when it is built.

    Args:
        folder: with ``config.json`` and safetensors.
        tied: whether the decoder is the word embeddings; default: as the configuration says. Without a tie the decoder
            of a tied model begins as a copy.
        seed: of weights that the folder lacks.
        attention: one of `ATTENTION_IMPLEMENTATIONS`.

    Raises:
        VPipeConfigError: the folder cannot be read, or holds another model.
    """
    config = read_config(folder, attn_implementation=attention)
    where = f"in {folder}/config.json"
    if config.model_type != "bert":
        remedy = "train others as plain models, see docs/hugging_face.md"
        raise Refusal(f"model_type {where}", config.model_type, '"bert"', remedy).error()
    _check_encoder(config, where)
    if tied and not config.tie_word_embeddings:
        allowed = "a decoder of its own, as the model in the folder has it"
        remedy = "do not tie, or give a model that is tied"
        raise Refusal(f"tie_word_embeddings with {folder}", True, allowed, remedy).error()
    config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
    weights = StoredWeights(folder, build_meta(BertForPreTraining, config, str(folder)))
    layers = bert_layers(config, seed, weights)
    said = "; ".join(filter(None, [f"bert, {len(layers)} pipeline layers", str(weights)]))
    return Model(config, layers, f"{folder}: {said}")


def bert_config(name_or_path: str, vocab_size: int | None = None, attention: str = "sdpa") -> BertConfig:
    """The configuration of one of `SIZE_NAMES` or of a Hugging Face ``config.json``.

    Its vocabulary, or ``vocab_size`` in its place, is padded to a multiple of 8.

    Raises:
        VPipeConfigError: the name is unknown, or the file cannot be read as a BertConfig.
    """
    if name_or_path in _SIZES:
        hidden, layers, heads, vocabulary, dropout = _SIZES[name_or_path]
        fields: dict[str, Any] = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
            "vocab_size": vocabulary,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }
    else:
        allowed = "a JSON file with the fields of BertConfig (hidden_size, ...)"
        fix = f"name one, or a size: {', '.join(SIZE_NAMES)}"
        fields = read_json(name_or_path, "--config_name", allowed, fix)
        if "hidden_size" not in fields:
            raise Refusal("--config_name", name_or_path, allowed, fix, "it has no hidden_size").error()
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    fields["attn_implementation"] = attention
    built: Any = build_meta(lambda given: BertForPreTraining(BertConfig.from_dict(given)), fields, name_or_path)
    config = built.config
    _check_encoder(config, f"in --config_name {name_or_path}")
    # 30522 -> 30528, which suits the matrix units of GPUs.
    config.vocab_size = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config


def _check_encoder(config: BertConfig, where: str) -> None:
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise Refusal(f"{name} {where}", True, "false", "give a model without it").error()
    for name in ("num_hidden_layers", "num_attention_heads"):
        if (number := getattr(config, name)) < 1:
            raise Refusal(f"{name} {where}", number, "at least 1", "correct the file").error()
