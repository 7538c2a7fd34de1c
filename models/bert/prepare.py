"""Make HDF5 shards of pre-training samples from text::

    python -m ds_vpipe.models.bert.prepare --train_file wiki/*.txt --tokenizer_name vocab.txt --output_dir data/seq128

Documents are separated by blank lines, with one sentence per line (``--form lines``) or prose (``--form prose``). Every
20th document goes to validation shards. Without ``--train_file`` the text is the prose in the docstrings of the
installed packages, which the training script trains on without data of its own, and the shards hold its samples.
Start it again after an interruption: what is finished is kept.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert.corpus import default_key
from ds_vpipe.models.bert.corpus_parts import PieceTokeniser, appear, join
from ds_vpipe.models.bert.preparation import Settings, begin_output, plan_samples, write_manifest
from ds_vpipe.models.bert.raw_text import FORMS, Piece, content_digest, documents_of, pieces_of
from ds_vpipe.models.bert.sample_shape import check_shape
from ds_vpipe.models.bert.samples import split_documents
from ds_vpipe.models.bert.shards import find_shards
from ds_vpipe.models.bert.text_corpus import VOCABULARY_FILE, text_corpus
from ds_vpipe.models.bert.vocabulary import read_vocabulary, write_vocabulary
from ds_vpipe.models.bert.wordpiece import MAX_VOCABULARY, TokenCorpus, train_wordpiece
from ds_vpipe.models.bert.worker_pool import for_each
from ds_vpipe.models.command_line import Parser, positive

WORK_FOLDER = ".work"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code is 2 after an error that its message explains."""
    try:
        _run(_parse(arguments))
    except VPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m ds_vpipe.models.bert.prepare",
        description="Make HDF5 shards of BERT pre-training samples from text.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--train_file", nargs="+", type=Path, metavar="FILE", help="UTF-8, blank lines between documents"
    )
    parser.add_argument("--form", choices=FORMS, default="lines", help="of the text; default: a sentence per line")
    parser.add_argument("--tokenizer_name", type=Path, metavar="FILE", help="vocab.txt (default: made from the text)")
    parser.add_argument("--vocab_size", type=positive, default=30522, help="tokens at most; default: 30522")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="folder of the shards")
    parser.add_argument("--max_seq_length", type=positive, default=128, help="tokens per sequence; default: 128")
    parser.add_argument("--max_predictions_per_seq", type=positive, help="per sequence (default: 15 %%)")
    parser.add_argument("--dupe_factor", type=positive, default=5, help="copies with other masks; default: 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard_size", type=positive, default=16384, help="samples per shard; default: 16384")
    parser.add_argument(
        "--preprocessing_num_workers",
        type=positive,
        default=os.cpu_count() or 1,
        help="processes; default: one per core",
    )
    parsed = parser.parse_args(arguments)
    parsed.seq_length = parsed.max_seq_length
    parsed.max_predictions = check_shape(parsed.seq_length, parsed.max_predictions_per_seq)
    if parsed.seed < 0:
        raise VPipeConfigError(f"--seed {parsed.seed}: must not be negative")
    return parsed


def _run(arguments: argparse.Namespace) -> None:
    names = ("seq_length", "max_predictions", "dupe_factor", "seed", "shard_size")
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    output: Path = arguments.output_dir
    made_of = asdict(settings) | _source(arguments)
    result = begin_output(output, made_of)
    if result is None or result["shards"] != [len(files) for files in find_shards(output)]:
        work = output / WORK_FOLDER
        corpus = _docstrings(arguments) if arguments.train_file is None else _raw_text(arguments, work)
        result = _write_shards(corpus, work, output, settings, arguments.preprocessing_num_workers)
        write_manifest(output, made_of, result)
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"{output}: {result['training_samples']} training and {result['validation_samples']} validation samples of"
        f" {settings.seq_length} tokens, vocabulary {result['vocab_size']}"
    )


def _source(arguments: argparse.Namespace) -> dict[str, Any]:
    """What names the content of the text and of the vocabulary."""
    vocabulary = (
        {"vocab_size": arguments.vocab_size}
        if arguments.tokenizer_name is None
        else {"vocab": content_digest(arguments.tokenizer_name)[:16]}
    )
    if arguments.train_file is None:
        return {"docstrings": default_key(), **vocabulary}
    digests = {f"text {number}": content_digest(path)[:16] for number, path in enumerate(arguments.train_file)}
    return {**digests, "form": arguments.form, **vocabulary}


def _docstrings(arguments: argparse.Namespace) -> Path:
    """The corpus that the training script streams."""
    corpus = text_corpus(None, arguments.tokenizer_name, arguments.vocab_size, builder=True)
    shutil.copy(corpus / VOCABULARY_FILE, arguments.output_dir)
    return corpus


def _raw_text(arguments: argparse.Namespace, work: Path) -> Path:
    pieces = tuple(piece for path in arguments.train_file for piece in pieces_of(path))
    corpus = work / "corpus"
    if corpus.exists():
        return corpus
    work.mkdir(exist_ok=True)
    vocabulary = arguments.output_dir / VOCABULARY_FILE
    if not vocabulary.exists():
        _make_vocabulary(arguments, pieces, vocabulary)
    tokeniser = PieceTokeniser(pieces, arguments.form, vocabulary, work)
    for_each(tokeniser.write, tokeniser.missing(), arguments.preprocessing_num_workers, "piece")
    if not pieces:
        raise VPipeConfigError("--train_file: the files are empty; give text")
    appear(corpus, lambda folder: join([tokeniser.folder_of(number) for number in range(len(pieces))], folder))
    return corpus


def _make_vocabulary(arguments: argparse.Namespace, pieces: Iterable[Piece], path: Path) -> None:
    if arguments.tokenizer_name is not None:
        tokenizer = read_vocabulary(arguments.tokenizer_name, min(arguments.vocab_size, MAX_VOCABULARY))
    else:
        documents = (document for piece in pieces for document in documents_of(piece, arguments.form))
        try:
            tokenizer = train_wordpiece(documents, arguments.vocab_size)
        except VPipeError:  # of the text, which is read meanwhile
            raise
        except ValueError as error:
            raise VPipeConfigError(f"--vocab_size {arguments.vocab_size}: {error}") from error
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    write_vocabulary(tokenizer, unfinished)
    os.replace(unfinished, path)


def _write_shards(corpus: Path, work: Path, output: Path, settings: Settings, workers: int) -> dict[str, Any]:
    loaded = TokenCorpus.load(corpus)
    counts = {}
    for kind, documents in zip(("training", "validation"), split_documents(loaded), strict=True):
        samples = plan_samples(corpus, documents, work / kind, output, kind, settings)
        if samples is None and kind == "training":
            raise VPipeConfigError(
                f"the text is too short ({loaded.num_documents} documents, {len(loaded.tokens)} tokens): at least two"
                " documents are needed, with blank lines between them; give more --train_file"
            )
        counts[f"{kind}_samples"] = 0 if samples is None else samples.count * samples.copies
        if samples is not None:
            for_each(samples.write, samples.missing(), workers, f"{kind} shard")
    shards = [len(files) for files in find_shards(output)]
    return {**counts, "shards": shards, "unigram_entropy": loaded.unigram_entropy, "vocab_size": loaded.vocab_size}


if __name__ == "__main__":
    sys.exit(main())
