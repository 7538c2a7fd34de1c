"""Configuration and pipeline layers, as the command line of a training script asks for them."""

from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.architecture import Architecture
from ds_vpipe.models.attention import DEFAULT_ATTENTION
from ds_vpipe.models.pretrained import from_pretrained


@dataclass(frozen=True)
class Model:
    """What to train.

    Attributes:
        config: of Hugging Face.
        layers: specifications for a ``PipelineModule``.
        description: one line for the log.
    """

    config: Any
    layers: list[Any]
    description: str


def add_weight_arguments(parser: Any) -> None:
    """The options of :func:`model_of`; ``parser`` may be a group of one."""
    parser.add_argument(
        "--model_name_or_path",
        type=Path,
        metavar="DIR",
        help="begin with the weights of a folder that Hugging Face's save_pretrained() has written",
    )
    parser.add_argument(
        "--tie_word_embeddings",
        action=BooleanOptionalAction,
        help="the decoder is the word embeddings; default: as the weights or the kind of model have it",
    )


def model_of(arguments: Namespace, architectures: Sequence[Architecture], new: Callable[[], Any], tied: bool) -> Model:
    """A new model, or one that begins with the weights of ``--model_name_or_path``; no weight is read or made yet.

    Args:
        arguments: of the script: those of :func:`add_weight_arguments`, ``vocab_size``, ``seed`` and maybe
            ``attn_implementation``.
        architectures: what the folder may hold; the first is that of a new model.
        new: makes the configuration of a new model.
        tied: whether its decoder is tied unless the command line says.

    Raises:
        VPipeConfigError: the configuration or the folder is wrong.
    """
    if arguments.model_name_or_path is None:
        config = new()
        config.tie_word_embeddings = tied if arguments.tie_word_embeddings is None else arguments.tie_word_embeddings
        layers = architectures[0].layers(config, arguments.seed, config.tie_word_embeddings)
        return Model(config, layers, f"new {architectures[0].model_type}, {len(layers)} pipeline layers")
    if arguments.vocab_size is not None:
        raise VPipeConfigError(
            f"--vocab_size {arguments.vocab_size} with --model_name_or_path: the vocabulary is that of the"
            " weights; leave one of them out"
        )
    found = from_pretrained(
        arguments.model_name_or_path,
        architectures,
        tied=arguments.tie_word_embeddings,
        seed=arguments.seed,
        attention=getattr(arguments, "attn_implementation", DEFAULT_ATTENTION),
    )
    return Model(found.config, found.layers, f"{arguments.model_name_or_path}: {found}")
