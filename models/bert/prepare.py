"""Make HDF5 shards of pre-training samples from text::

    python -m ds_vpipe.models.bert.prepare --train_file wiki/*.txt --tokenizer_name vocab.txt --output_dir data/seq128

The text is that of the training script, and the shards hold its samples: copy e of the text holds those of epoch e in
their order. Shards are finished one by one, each is a function of the settings alone, and the manifest says what they
were made of: start it again after an interruption and it makes those that are missing; it is refused where something
has changed.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ds_vpipe.commands.argument_types import count
from ds_vpipe.errors import VPipeConfigError, VPipeError, show
from ds_vpipe.models.bert.arguments import add_text_arguments, check_masking, seed
from ds_vpipe.models.bert.corpus import docstring_key
from ds_vpipe.models.bert.samples import Samples, digest_of
from ds_vpipe.models.bert.shards import MANIFEST, SUFFIXES, find_shards, read_manifest, write_shard
from ds_vpipe.models.start import Parser, exit_code
from ds_vpipe.whole_file import whole_file

# Arguments that samples do not depend on, or whose content counts and not their name.
_NOT_SETTINGS = {"cache_dir", "output_dir", "preprocessing_num_workers", "tokenizer_name", "vocab_size"}
_TEXTS = ("train_file", "validation_file")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. The exit code is 2 after an error that its message explains."""
    return exit_code(lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m ds_vpipe.models.bert.prepare",
        description="Make HDF5 shards of BERT pre-training samples from text.",
        allow_abbrev=False,
    )
    add_text_arguments(parser)
    parser.add_argument("--vocab_size", type=count, default=30522, help="tokens at most; default: 30522")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder of the shards")
    parser.add_argument("--max_seq_length", type=count, default=128, help="tokens per sequence; default: 128")
    parser.add_argument("--max_predictions_per_seq", type=count, help="default: the share that is predicted")
    parser.add_argument("--dupe_factor", type=count, default=5, help="copies with other masks; default: 5")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--shard_size", type=count, default=16384, help="samples per shard; default: 16384")
    cores = os.cpu_count() or 1
    parser.add_argument("--preprocessing_num_workers", type=count, default=cores, help="default: one per core")
    parsed = parser.parse_args(arguments)
    check_masking(parsed)
    return parsed


def _run(arguments: argparse.Namespace) -> None:
    from ds_vpipe.models.bert.text import text_samples  # takes seconds to import

    output: Path = arguments.output_dir
    made_of = _made_of(arguments)
    result = _begin(output, made_of)
    if result is None or result["shards"] != [len(files) for files in find_shards(output)]:
        # A vocabulary that an interrupted run has made decides, for another one would differ.
        tokenizer = output if (output / "tokenizer.json").is_file() else arguments.tokenizer_name
        workers = arguments.preprocessing_num_workers
        training, held_out = text_samples(arguments, arguments.vocab_size, tokenizer, workers)
        corpus = training.corpus
        corpus.tokenizer.save_pretrained(output)
        count = len(training) * arguments.dupe_factor
        _write_shards(arguments, "training", training, count, arguments.seed)
        if held_out is not None:
            _write_shards(arguments, "validation", held_out, len(held_out), None)
        result = {
            "training_samples": count,
            "validation_samples": len(held_out or ()),
            "shards": [len(files) for files in find_shards(output)],
            "unigram_entropy": corpus.unigram_entropy,
            "vocab_size": corpus.vocabulary.size,
        }
        _write_manifest(output, made_of, result)
    print(
        f"{output}: {result['training_samples']} training and {result['validation_samples']} validation samples of"
        f" {arguments.max_seq_length} tokens, vocabulary {result['vocab_size']}"
    )


def _made_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of the shards, and names for the content of the text and of the vocabulary."""
    from ds_vpipe.models.bert.text import content_digest, read_tokenizer

    made_of = {name: value for name, value in vars(arguments).items() if name not in {*_NOT_SETTINGS, *_TEXTS}}
    if not arguments.train_file:
        made_of["docstrings"] = docstring_key()
    for name in _TEXTS:
        for number, path in enumerate(getattr(arguments, name) or ()):
            made_of[f"{name} {number}"] = content_digest(path)[:16]
    if arguments.tokenizer_name is None:
        return {**made_of, "vocab_size": arguments.vocab_size}
    tokenizer = read_tokenizer(arguments.tokenizer_name, arguments.vocab_size)
    return {**made_of, "tokenizer": digest_of([tokenizer.backend_tokenizer.to_str()])}


def _begin(output: Path, made_of: dict[str, Any]) -> dict[str, Any] | None:
    """Begin or go on with a folder of shards. Its manifest's result if the folder is complete."""
    before = read_manifest(output)
    if before is None or [path.name for path in output.iterdir()] == [MANIFEST]:  # nothing has been made of it
        try:
            output.mkdir(parents=True, exist_ok=True)
            if any(path.suffix in SUFFIXES for path in output.iterdir()):
                raise VPipeConfigError(
                    f"--output_dir {output}: holds HDF5 files that are not of this command; choose another folder"
                )
            _write_manifest(output, made_of, None)
        except OSError as error:
            raise VPipeConfigError(f"--output_dir {output}: not writable: {error}") from error
        return None
    for key in sorted({*before["made_of"], *made_of}):
        old, new = before["made_of"].get(key), made_of.get(key)
        if old != new:
            raise VPipeConfigError(
                f"--output_dir {output}: its shards were made with {key} {show(old)}, now it is {show(new)}; choose"
                " another folder, or remove this one"
            )
    return before["result"]


def _write_manifest(folder: Path, made_of: dict[str, Any], result: dict[str, Any] | None) -> None:
    """Replace the manifest. ``result`` is None until all shards are there."""
    with whole_file(folder / MANIFEST, several=True) as part:
        part.write_text(json.dumps({"made_of": made_of, "result": result}, indent=2) + "\n", encoding="utf-8")


def _write_shards(arguments: argparse.Namespace, kind: str, samples: Samples, count: int, seed: int | None) -> None:
    """Write the missing shards of training or validation, shared among processes."""
    from datasets import Dataset

    output, size = arguments.output_dir, arguments.shard_size
    begins = {str(output / f"part_{begin // size:06d}_{kind}.hdf5"): begin for begin in range(0, count, size)}
    missing = {path: begin for path, begin in begins.items() if not os.path.exists(path)}
    workers = min(arguments.preprocessing_num_workers, len(missing))

    def write(row: dict[str, Any]) -> None:
        drawn = samples.between(row["begin"], min(row["begin"] + size, count), seed)
        write_shard(Path(row["path"]), list(drawn))

    try:
        Dataset.from_dict({"path": list(missing), "begin": list(missing.values())}).map(
            write,
            num_proc=workers if workers > 1 else None,
            keep_in_memory=True,
            new_fingerprint=kind,
            desc=f"{kind} shards",
        )
    except VPipeError:
        raise
    except RuntimeError as error:
        raise VPipeError(
            f"a process that made shards has ended ({error}): start again with fewer --preprocessing_num_workers;"
            " finished shards are kept"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
