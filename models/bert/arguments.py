"""The command line of ``train.py``."""

import argparse
from pathlib import Path
from typing import NoReturn

import deepspeed

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.sizes import ATTENTION_IMPLEMENTATIONS, SIZE_NAMES
from ds_vpipe.models.model import add_weight_arguments


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as exceptions, so that each rank prints one line and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise VPipeConfigError(f"{message}; see --help")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line (of this process if `arguments` is None).

    Raises:
        VPipeConfigError: an argument is unknown, missing or out of range.
    """
    parser = _Parser(description="Pre-train a BERT with an asynchronous pipeline.", allow_abbrev=False)
    deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")

    model = parser.add_argument_group("model")
    model.add_argument("--bert-config", default="tiny", help=f"{', '.join(SIZE_NAMES)}, or a BertConfig JSON file")
    model.add_argument("--vocab-size", type=_positive, help="replaces the configuration's vocabulary size")
    model.add_argument("--attention", choices=ATTENTION_IMPLEMENTATIONS, default="sdpa")
    add_weight_arguments(model)
    model.add_argument("--stages", type=_positive, help="pipeline stages (default: one per rank)")

    data = parser.add_argument_group("data (default: the prose in the docstrings of installed packages)")
    data.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="own text, UTF-8, blank lines between paragraphs"
    )
    data.add_argument("--synthetic", action="store_true", help="random tokens, to measure speed")
    data.add_argument("--seq-length", type=_positive, default=64, help="tokens per sequence")
    data.add_argument("--max-predictions", type=_positive, help="predicted tokens per sequence (default: 15 %%)")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=_positive, default=3, help="default: 3")
    training.add_argument("--steps", type=_positive, help="optimizer updates, instead of --epochs")
    training.add_argument("--max-seconds", type=float, help="stop after so many seconds of training")
    training.add_argument("--validate-every", type=_positive, metavar="N", help="validate after every N updates, too")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--output", type=Path, default=Path("runs/bert"), help="folder for metrics and loss plot")

    parsed = parser.parse_args(arguments)
    _check(parsed)
    return parsed


def _check(parsed: argparse.Namespace) -> None:
    if parsed.deepspeed_config is None:
        raise VPipeConfigError(
            "--deepspeed_config is missing: give a DeepSpeed JSON file, e.g. ds_configs/bert_tiny_cpu.json"
        )
    if parsed.text and parsed.synthetic:
        raise VPipeConfigError("--text and --synthetic exclude each other: give one of them")
    if parsed.seq_length < 8:
        raise VPipeConfigError(f"--seq-length {parsed.seq_length}: must be at least 8")
    if parsed.max_predictions is None:
        parsed.max_predictions = -(-15 * parsed.seq_length // 100)
    if parsed.max_predictions > parsed.seq_length - 3:
        raise VPipeConfigError(
            f"--max-predictions {parsed.max_predictions}: at most --seq-length - 3 = {parsed.seq_length - 3} tokens of"
            " a sequence can be predicted"
        )
    if parsed.max_seconds is not None and parsed.max_seconds <= 0:
        raise VPipeConfigError(f"--max-seconds {parsed.max_seconds}: must be greater than 0")
    if parsed.seed < 0:
        raise VPipeConfigError(f"--seed {parsed.seed}: must not be negative")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
