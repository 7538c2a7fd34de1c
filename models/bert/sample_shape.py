"""Sizes of samples, as the command lines of this package take them."""

from ds_vpipe.errors import VPipeConfigError

SHORTEST_SEQUENCE = 8
MASKED_PERCENT = 15
_SPECIAL_IN_PAIR = 3


def check_shape(seq_length: int, max_predictions: int | None) -> int:
    """The prediction slots of a sequence of so many tokens: those given, or 15 % of it.

    Raises:
        VPipeConfigError: the sequence is too short, or too short for so many predictions.
    """
    if seq_length < SHORTEST_SEQUENCE:
        raise VPipeConfigError(f"--max_seq_length {seq_length}: must be at least {SHORTEST_SEQUENCE}")
    slots = -(-MASKED_PERCENT * seq_length // 100) if max_predictions is None else max_predictions
    if slots > seq_length - _SPECIAL_IN_PAIR:
        raise VPipeConfigError(
            f"--max_predictions_per_seq {slots}: at most --max_seq_length - {_SPECIAL_IN_PAIR} ="
            f" {seq_length - _SPECIAL_IN_PAIR} tokens of a sequence can be predicted"
        )
    return slots
