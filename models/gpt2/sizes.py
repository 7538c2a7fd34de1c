"""A Hugging Face ``GPT2Config`` from a size name or a JSON file."""

from pathlib import Path

from transformers import GPT2Config

from ds_vpipe.errors import Refusal
from ds_vpipe.models.gpt2.architecture import GPT2
from ds_vpipe.models.weight_folder import read_config

# hidden size, blocks, attention heads, vocabulary, positions, dropout; `tiny` trains in minutes and cannot overfit
_SIZES: dict[str, tuple[int, int, int, int, int, float]] = {
    "tiny": (128, 4, 4, 2048, 256, 0.0),
    "small": (768, 12, 12, 50257, 1024, 0.1),
    "medium": (1024, 24, 16, 50257, 1024, 0.1),
    "large": (1280, 36, 20, 50257, 1024, 0.1),
    "xl": (1600, 48, 25, 50257, 1024, 0.1),
}
SIZE_NAMES = tuple(_SIZES)


def gpt2_config(name_or_path: str, vocab_size: int | None = None) -> GPT2Config:
    """The configuration of a named size, or of a ``config.json`` with ``"model_type": "gpt2"``.

    Args:
        name_or_path: one of `SIZE_NAMES`, or a path.
        vocab_size: replaces the vocabulary size.

    Raises:
        VPipeConfigError: the name is unknown, or the file cannot be read as a GPT2Config.
    """
    if name_or_path in _SIZES:
        hidden, blocks, heads, vocabulary, positions, dropout = _SIZES[name_or_path]
        config = GPT2Config(
            n_embd=hidden,
            n_layer=blocks,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=positions,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    elif Path(name_or_path).is_file():
        config = read_config(Path(name_or_path), [GPT2])[1]
    else:
        allowed = f"a size ({', '.join(SIZE_NAMES)}) or a config.json"
        raise Refusal("--gpt2-config", name_or_path, allowed, "correct the name").error()
    if vocab_size is not None:
        config.vocab_size = vocab_size
    return config
