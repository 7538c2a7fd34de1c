"""The command line of ``train.py``, with the names of Hugging Face's ``run_mlm.py``.

What the DeepSpeed JSON says is not repeated here: an argument of ``TrainingArguments`` that has its place there is
refused with that place. Words of a name may be joined by dashes or underscores.
"""

import argparse
from pathlib import Path
from typing import Any

import deepspeed

from ds_vpipe.commands.argument_types import checked, count
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.model import ATTENTION_IMPLEMENTATIONS, SIZE_NAMES
from ds_vpipe.models.bert.samples import MLM_PROBABILITY, check_shape
from ds_vpipe.models.start import Parser

SEQ_LENGTH = 64
SAVE_STRATEGIES = ("no", "epoch", "steps")
CHECKPOINTS = "checkpoints"  # in the output folder

seed = checked(int, lambda value: 0 <= value < 2**32, "a whole number >= 0 and less than 2^32")
probability = checked(float, lambda value: 0 < value < 1, "a number greater than 0 and less than 1")

_IN_THE_JSON = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": "scheduler.type",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "logging_steps": "steps_per_print",
    "fp16": "fp16.enabled",
    "bf16": "bf16.enabled",
}


class _InTheJson(argparse.Action):
    """An argument that the DeepSpeed JSON stands for."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise VPipeConfigError(f"{option_string}: belongs to the DeepSpeed JSON; set {self.const} there")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line (of this process if `arguments` is None).

    Raises:
        VPipeConfigError: an argument is unknown, missing or out of range.
    """
    parser = Parser(description="Pre-train a BERT with an asynchronous pipeline.", allow_abbrev=False)
    deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")

    model = parser.add_argument_group("model")
    model.add_argument("--config_name", default="tiny", help=f"{', '.join(SIZE_NAMES)}, or a BertConfig JSON file")
    model.add_argument("--vocab_size", type=count, help="replaces the configuration's vocabulary size")
    model.add_argument("--attn_implementation", choices=ATTENTION_IMPLEMENTATIONS, default="sdpa")
    folder = "begin with the weights of a folder that save_pretrained() has written, or of a folder of checkpoints"
    model.add_argument("--model_name_or_path", type=Path, metavar="DIR", help=folder)
    tie = "the decoder is the word embeddings; default: as the weights or the configuration have it"
    model.add_argument("--tie_word_embeddings", action=argparse.BooleanOptionalAction, help=tie)
    model.add_argument("--num_stages", type=count, help="pipeline stages (default: one per rank)")

    data = parser.add_argument_group("data (default: the prose in the docstrings of installed packages)")
    add_text_arguments(data)
    shards = "HDF5 shards: files below DIR with 'training' in their names"
    data.add_argument("--data_dir", type=Path, metavar="DIR", help=shards)
    data.add_argument("--synthetic", action="store_true", help="random tokens, to measure speed")
    length = f"tokens per sequence (default: {SEQ_LENGTH}, or what the shards have)"
    data.add_argument("--max_seq_length", type=count, help=length)
    most = "predicted tokens per sequence at most (default: --mlm_probability of them, or what the shards have)"
    data.add_argument("--max_predictions_per_seq", type=count, help=most)
    data.add_argument("--keep_order", action="store_true", help="take the samples of shards as they are stored")

    training = parser.add_argument_group("training")
    training.add_argument("--num_train_epochs", type=count, default=3, help="default: 3")
    updates = "optimizer updates, in place of epochs; a resumed run's earlier ones count"
    training.add_argument("--max_steps", type=count, help=updates)
    training.add_argument("--eval_steps", type=count, metavar="N", help="validate after every N updates, too")
    training.add_argument("--seed", type=seed, default=0)

    output = parser.add_argument_group("output")
    folder = f"metrics, loss plot, record of the run and {CHECKPOINTS}/ (default: %(default)s)"
    output.add_argument("--output_dir", type=Path, default=Path("runs/bert"), metavar="DIR", help=folder)
    when = "when to save, beside the end of the run: epoch ends, --save_steps, or not at all (default)"
    output.add_argument("--save_strategy", choices=SAVE_STRATEGIES, default="no", help=when)
    output.add_argument("--save_steps", type=count, metavar="N", default=500, help="default: 500")
    resume = "go on exactly from the latest checkpoint in DIR (default: that of --output_dir)"
    output.add_argument("--resume_from_checkpoint", nargs="?", type=Path, const=Path(), metavar="DIR", help=resume)

    for name, place in _IN_THE_JSON.items():
        parser.add_argument(f"--{name}", nargs="?", const=place, action=_InTheJson, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    _check(parsed)
    return parsed


def add_text_arguments(parser: Any) -> None:
    """Arguments of text and its masking. ``parser`` may be a group of one."""
    files = {"nargs": "+", "type": Path, "metavar": "FILE"}
    parser.add_argument("--train_file", **files, help="own text, UTF-8, blank lines between documents")
    parser.add_argument("--validation_file", **files, help="default: every 20th document of the text")
    lines = "every line is a sentence (default: sentences are found, and all are kept)"
    parser.add_argument("--line_by_line", action="store_true", help=lines)
    vocabulary = "vocab.txt, or a folder with a tokenizer (default: a vocabulary made from the text)"
    parser.add_argument("--tokenizer_name", type=Path, metavar="PATH", help=vocabulary)
    cache = "for tokenised text (default: $DS_VPIPE_CACHE, ~/.cache/ds_vpipe)"
    parser.add_argument("--cache_dir", type=Path, metavar="DIR", help=cache)
    share = f"share of predicted tokens; default: {MLM_PROBABILITY}"
    parser.add_argument("--mlm_probability", type=probability, metavar="P", help=share)
    words = "predict all pieces of a word together, or none"
    parser.add_argument("--whole_word_masking", action="store_true", help=words)


def check_masking(parsed: argparse.Namespace) -> None:
    """Check the arguments of text and set defaults that depend on others.

    Raises:
        VPipeConfigError: one is out of range, or without the argument that it belongs to.
    """
    if parsed.validation_file and not parsed.train_file:
        raise VPipeConfigError("--validation_file is for own text: give --train_file too, or leave it out")
    if parsed.mlm_probability is None:
        parsed.mlm_probability = MLM_PROBABILITY
    parsed.max_predictions_per_seq = check_shape(
        parsed.max_seq_length, parsed.max_predictions_per_seq, parsed.mlm_probability
    )


def _check(parsed: argparse.Namespace) -> None:
    if parsed.deepspeed_config is None:
        raise VPipeConfigError(
            "--deepspeed_config is missing: give a DeepSpeed JSON file, e.g. ds_configs/bert_tiny_cpu.json"
        )
    sources = {"--train_file": parsed.train_file, "--data_dir": parsed.data_dir, "--synthetic": parsed.synthetic}
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise VPipeConfigError(f"{' and '.join(given)} exclude each other: give one of them")
    parsed.initial_checkpoint = None
    if parsed.model_name_or_path and (parsed.model_name_or_path / "latest").is_file():
        parsed.initial_checkpoint, parsed.model_name_or_path = parsed.model_name_or_path, None
    of_text = ["tokenizer_name", "validation_file", "line_by_line", "whole_word_masking"]
    where = "--synthetic"
    if parsed.data_dir:
        of_text.append("mlm_probability")
        where = "--data_dir, whose masks are made by prepare"
    for name in of_text if parsed.data_dir or parsed.synthetic else ():
        if getattr(parsed, name):
            raise VPipeConfigError(f"--{name} is for text: leave it out with {where}")
    if parsed.model_name_or_path and not (parsed.tokenizer_name or parsed.data_dir or parsed.synthetic):
        parsed.tokenizer_name = parsed.model_name_or_path
        # A folder that is not there is refused with the model.
        names = {path.name for path in parsed.model_name_or_path.glob("*")}
        if names and names.isdisjoint({"tokenizer.json", "vocab.txt"}):
            raise VPipeConfigError(
                f"--model_name_or_path {parsed.model_name_or_path}: it has no tokenizer.json or vocab.txt, and a"
                " vocabulary made from the text has other numbers than its weights know; give --tokenizer_name, or"
                " --data_dir with shards of its vocabulary"
            )
    if parsed.keep_order and not parsed.data_dir:
        raise VPipeConfigError("--keep_order is for shards: give their folder with --data_dir, or leave it out")
    if parsed.data_dir is None:
        parsed.max_seq_length = parsed.max_seq_length or SEQ_LENGTH
        check_masking(parsed)
    elif parsed.max_seq_length is not None and parsed.max_predictions_per_seq is not None:
        check_shape(parsed.max_seq_length, parsed.max_predictions_per_seq)
    resumed, own = parsed.resume_from_checkpoint, parsed.output_dir / CHECKPOINTS
    if resumed is not None and (resumed == Path() or resumed.resolve() == own.resolve()):
        parsed.resume_from_checkpoint = own
    elif resumed is not None and parsed.initial_checkpoint:
        raise VPipeConfigError(
            f"--resume_from_checkpoint and --model_name_or_path {parsed.initial_checkpoint} exclude each other: the one"
            " goes on with all of a run, the other begins a new one with its weights; give the one without a folder"
        )
