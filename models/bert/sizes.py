"""A Hugging Face ``BertConfig`` from a size name or a JSON file."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError

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


def pad_vocabulary(size: int) -> int:
    """Round a vocabulary size up to a multiple of 8 (30522 -> 30528), which suits the matrix units of GPUs."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def bert_config(name_or_path: str, vocab_size: int | None = None, attention: str = "sdpa") -> BertConfig:
    """The configuration of a named size or of a Hugging Face ``config.json``.

    Args:
        name_or_path: one of `SIZE_NAMES`, or the path of a JSON file with ``BertConfig`` fields.
        vocab_size: replaces the vocabulary size of the configuration.
        attention: Hugging Face's attention implementation, ``"sdpa"`` or ``"eager"``.

    Returns:
        A configuration whose ``vocab_size`` is padded to a multiple of 8.

    Raises:
        VPipeConfigError: the name is unknown, or the file cannot be read as a BertConfig.
    """
    if attention not in ATTENTION_IMPLEMENTATIONS:
        raise VPipeConfigError(
            f"attention implementation '{attention}' is unknown: use {' or '.join(ATTENTION_IMPLEMENTATIONS)}"
        )
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
        fields = _read_fields(name_or_path)
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    try:
        config = BertConfig.from_dict({**fields, "attn_implementation": attention})
    except (TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise VPipeConfigError(f"--config_name {name_or_path}: not a BertConfig: {reason}") from error
    if config.is_decoder or config.add_cross_attention:
        raise VPipeConfigError(f"--config_name {name_or_path}: is_decoder and add_cross_attention must be false")
    if config.num_hidden_layers < 1 or config.hidden_size % config.num_attention_heads:
        raise VPipeConfigError(
            f"--config_name {name_or_path}: num_hidden_layers must be at least 1 and hidden_size a multiple of"
            f" num_attention_heads; got {config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}"
        )
    config.vocab_size = pad_vocabulary(config.vocab_size)
    return config


def num_pipeline_layers(config: BertConfig) -> int:
    """``2L + 1`` pipeline layers for L encoder layers: 9 for tiny, 49 for BERT-Large, 97 for 48 encoder layers."""
    return 2 * int(config.num_hidden_layers) + 1


def _read_fields(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise VPipeConfigError(
            f"--config_name {path}: neither a size ({', '.join(SIZE_NAMES)}) nor an existing JSON file"
        )
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise VPipeConfigError(f"--config_name {path}: not readable as JSON: {error}") from error
    if not isinstance(fields, dict) or "hidden_size" not in fields:
        raise VPipeConfigError(
            f"--config_name {path}: must be a JSON object with the fields of BertConfig (hidden_size, ...)"
        )
    return fields
