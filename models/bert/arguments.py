"""The command line of ``train.py``."""

import argparse
from pathlib import Path

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.sample_shape import check_shape
from ds_vpipe.models.bert.sizes import ATTENTION_IMPLEMENTATIONS, SIZE_NAMES
from ds_vpipe.models.command_line import positive
from ds_vpipe.models.model import add_weight_arguments
from ds_vpipe.models.start import training_parser

SEQ_LENGTH = 64


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line (of this process if `arguments` is None).

    Raises:
        VPipeConfigError: an argument is unknown, missing or out of range.
    """
    parser = training_parser("Pre-train a BERT with an asynchronous pipeline.")

    model = parser.add_argument_group("model")
    model.add_argument("--bert-config", default="tiny", help=f"{', '.join(SIZE_NAMES)}, or a BertConfig JSON file")
    model.add_argument("--vocab-size", type=positive, help="replaces the configuration's vocabulary size")
    model.add_argument("--attention", choices=ATTENTION_IMPLEMENTATIONS, default="sdpa")
    add_weight_arguments(model)
    model.add_argument("--stages", type=positive, help="pipeline stages (default: one per rank)")

    data = parser.add_argument_group("data (default: the prose in the docstrings of installed packages)")
    data.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="own text, UTF-8, blank lines between paragraphs"
    )
    data.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="HDF5 shards: files below DIR with 'training' in their names"
    )
    data.add_argument("--synthetic", action="store_true", help="random tokens, to measure speed")
    data.add_argument(
        "--vocab", type=Path, metavar="FILE", help="vocab.txt for the text (default: a vocabulary made from the text)"
    )
    data.add_argument(
        "--seq-length", type=positive, help=f"tokens per sequence (default: {SEQ_LENGTH}, or what the shards have)"
    )
    data.add_argument(
        "--max-predictions",
        type=positive,
        help="predicted tokens per sequence (default: 15 %%, or what the shards have)",
    )
    data.add_argument(
        "--keep-order", action="store_true", help="take the samples of shards in the order in which they are stored"
    )

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive, default=3, help="default: 3")
    training.add_argument(
        "--steps", type=positive, help="optimizer updates, instead of --epochs; a resumed run's earlier ones count"
    )
    training.add_argument("--max-seconds", type=float, help="stop after so many seconds of training")
    training.add_argument("--validate-every", type=positive, metavar="N", help="validate after every N updates, too")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--output", type=Path, default=Path("runs/bert"), help="folder for metrics and loss plot")

    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="save there: after every epoch, and at the end"
    )
    checkpoints.add_argument("--checkpoint-every", type=positive, metavar="N", help="save after every N updates, too")
    checkpoints.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint in --checkpoint-dir, exactly"
    )
    checkpoints.add_argument(
        "--initialise-from",
        type=Path,
        metavar="DIR",
        help="begin with the weights of the latest checkpoint there and with nothing else of it (phase 2)",
    )

    parsed = parser.parse_args(arguments)
    _check(parsed)
    return parsed


def _check(parsed: argparse.Namespace) -> None:
    if parsed.deepspeed_config is None:
        raise VPipeConfigError(
            "--deepspeed_config is missing: give a DeepSpeed JSON file, e.g. ds_configs/bert_tiny_cpu.json"
        )
    sources = {"--text": parsed.text, "--data-dir": parsed.data_dir, "--synthetic": parsed.synthetic}
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise VPipeConfigError(f"{' and '.join(given)} exclude each other: give one of them")
    if parsed.vocab and (parsed.data_dir or parsed.synthetic):
        raise VPipeConfigError(f"--vocab {parsed.vocab}: only text has a vocabulary; leave it out with {given[0]}")
    if parsed.from_pretrained and not (parsed.vocab or parsed.data_dir or parsed.synthetic):
        parsed.vocab = parsed.from_pretrained / "vocab.txt"
        if not parsed.vocab.is_file():
            raise VPipeConfigError(
                f"--from-pretrained {parsed.from_pretrained}: it has no vocab.txt, and a vocabulary made from the text"
                " has other numbers than its weights know; give --vocab, or --data-dir with shards of its vocabulary"
            )
    if parsed.keep_order and not parsed.data_dir:
        raise VPipeConfigError("--keep-order is for shards: give their folder with --data-dir, or leave it out")
    if parsed.data_dir is None and parsed.seq_length is None:
        parsed.seq_length = SEQ_LENGTH
    if parsed.seq_length is not None and (parsed.data_dir is None or parsed.max_predictions is not None):
        parsed.max_predictions = check_shape(parsed.seq_length, parsed.max_predictions)
    if parsed.max_seconds is not None and parsed.max_seconds <= 0:
        raise VPipeConfigError(f"--max-seconds {parsed.max_seconds}: must be greater than 0")
    if parsed.seed < 0:
        raise VPipeConfigError(f"--seed {parsed.seed}: must not be negative")
    for name, value in (("--checkpoint-every", parsed.checkpoint_every), ("--resume", parsed.resume)):
        if value and parsed.checkpoint_dir is None:
            raise VPipeConfigError(f"{name} needs the folder of the checkpoints: give --checkpoint-dir")
    if parsed.resume and parsed.initialise_from:
        raise VPipeConfigError(
            "--resume and --initialise-from exclude each other: --resume goes on with all of a run,"
            " --initialise-from begins another one with its weights"
        )
