"""Which of Hugging Face's attention implementations pipeline layers use."""

from transformers import PreTrainedConfig

DEFAULT_ATTENTION = "sdpa"


def choose_attention(config: PreTrainedConfig) -> None:
    """Set the default where ``config`` names none.

    Hugging Face's models do so when they are built. Their layers do not: built alone they attend without any mask.
    """
    if config._attn_implementation is None:
        config._attn_implementation = DEFAULT_ATTENTION
