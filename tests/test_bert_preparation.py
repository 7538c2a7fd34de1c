"""Raw text to shards: documents, vocabulary files, restarts, and that shards hold what streaming would draw."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert import prepare, text_corpus
from ds_vpipe.models.bert.batches import MicroBatches
from ds_vpipe.models.bert.cache import CACHE_VARIABLE
from ds_vpipe.models.bert.corpus_parts import PieceTokeniser, join
from ds_vpipe.models.bert.raw_text import Piece, documents_of, pieces_of
from ds_vpipe.models.bert.sample import IGNORED_LABEL
from ds_vpipe.models.bert.samples import PairSamples, spans_of, split_documents
from ds_vpipe.models.bert.shard_samples import ShardSamples, open_shards
from ds_vpipe.models.bert.shards import find_shards
from ds_vpipe.models.bert.vocabulary import (
    SPECIAL_TOKENS,
    SpecialTokens,
    read_vocabulary,
    special_tokens,
    write_vocabulary,
)
from ds_vpipe.models.bert.wordpiece import TokenCorpus, tokenise, train_wordpiece

WORDS = ["the", "a", "stage", "batch", "layer", "rank", "sends", "waits", "for", "gradients", "weights", "losses"]
LENGTH, SLOTS = 24, 4


def documents(count: int = 90, sentences: int = 7) -> list[list[str]]:
    random = np.random.default_rng(0)
    return [[" ".join(random.choice(WORDS, 6)) for _ in range(sentences)] for _ in range(count)]


def text_of(documents: list[list[str]]) -> str:
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text_of(documents()))
    return path


def made(output: Path, *arguments: str) -> int:
    shape = ["--max_seq_length", str(LENGTH), "--max_predictions_per_seq", str(SLOTS), "--shard_size", "64"]
    return prepare.main(
        [*shape, "--output_dir", str(output), "--preprocessing_num_workers", "1", "--vocab_size", "300", *arguments]
    )


def contents(folder: Path) -> dict[str, list[list[int]]]:
    """What is in the shards, by file."""
    training, validation = find_shards(folder)
    found = {}
    for path in (*training, *validation):
        rows = ShardSamples(open_shards([path]), SLOTS, 300)
        found[path.name] = [rows.sample(index, 0).input_ids.tolist() for index in range(len(rows))]
    return found


@pytest.mark.parametrize("size", [1, 40, 333, 10**6])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_pieces_hold_all_documents_whole(tmp_path: Path, size: int, end: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(text_of(documents(9)).replace("\n", end).encode("utf-8-sig"))
    pieces = pieces_of(path, size)
    assert len(pieces) == {1: 9, 40: 9, 333: 5, 10**6: 1}[size]
    assert [document for piece in pieces for document in documents_of(piece, "lines")] == documents(9)


def test_prose_is_cut_into_sentences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The first one is here. The second\none ends now.\n\n\n>>> code()\n\nThe third one stands alone.\n")
    (piece,) = pieces_of(path)
    assert list(documents_of(piece, "prose")) == [
        ["The first one is here.", "The second one ends now."],
        ["The third one stands alone."],
    ]
    assert len(list(documents_of(piece, "lines"))) == 3


def test_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match=r"--train_file .*absent\.txt: not readable"):
        pieces_of(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(VPipeConfigError, match=r"--train_file .*latin\.txt: not readable as UTF-8"):
        list(documents_of(Piece(tmp_path / "latin.txt", 0, 4), "lines"))
    (tmp_path / "empty.txt").write_text("")
    assert pieces_of(tmp_path / "empty.txt") == []


def test_joined_pieces_are_the_corpus_in_one(text: Path, tmp_path: Path) -> None:
    tokenizer = train_wordpiece(documents(), 300)  # once: the trainer breaks ties by chance
    whole = tokenise(documents(), tokenizer)
    vocabulary = tmp_path / "vocab.txt"
    write_vocabulary(tokenizer, vocabulary)
    pieces = tuple(pieces_of(text, 500))
    tokeniser = PieceTokeniser(pieces, "lines", vocabulary, tmp_path)
    for number in tokeniser.missing():
        tokeniser.write(number)
    assert tokeniser.missing() == []
    join([tokeniser.folder_of(number) for number in range(len(pieces))], tmp_path / "joined")
    joined = TokenCorpus.load(tmp_path / "joined")
    for name in ("tokens", "sentence_starts", "document_starts"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), err_msg=name)
        assert getattr(joined, name).dtype == getattr(whole, name).dtype
    assert (joined.vocab_size, joined.special) == (whole.vocab_size, whole.special)


@pytest.mark.parametrize(("extra", "lower"), [([], True), (["Paris"], False)])
def test_a_vocabulary_file(tmp_path: Path, extra: list[str], lower: bool) -> None:
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[unused0]", "the", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sta", "##ge", *extra]
    path.write_text("\n".join(tokens) + "\n")
    tokenizer = read_vocabulary(path, len(tokens))
    assert special_tokens(tokenizer) == SpecialTokens(pad=0, unknown=3, cls=4, sep=5, mask=6)
    assert SpecialTokens(0, 3, 4, 5, 6).ordinary(9).tolist() == [1, 2, 7, 8]
    expected = ["the", "sta", "##ge"] if lower else ["[UNK]", "sta", "##ge"]
    assert tokenizer.encode("The stage", add_special_tokens=False).tokens == expected
    write_vocabulary(tokenizer, tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("tokens", "most", "says"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]"], 9, "[MASK] is missing"),
        ([*SPECIAL_TOKENS, "a", "b", "a"], 9, "'a' is there twice"),
        ([*SPECIAL_TOKENS, "a", "b"], 6, "7 tokens, at most 6 are allowed; see --vocab_size"),
    ],
)
def test_a_wrong_vocabulary_is_refused(tmp_path: Path, tokens: list[str], most: int, says: str) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    with pytest.raises(VPipeConfigError, match=re.escape(says)):
        read_vocabulary(tmp_path / "vocab.txt", most)


def test_samples_use_the_special_tokens_of_the_vocabulary(text: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    letters = [f"{mark}{letter}" for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary.write_text("\n".join(["[PAD]", *letters, "[UNK]", "[MASK]", "[SEP]", "[CLS]"]))
    assert made(tmp_path / "out", "--train_file", str(text), "--tokenizer_name", str(vocabulary)) == 0
    rows = ShardSamples(open_shards(find_shards(tmp_path / "out")[0]), SLOTS, 57)
    masked = 0
    for index in range(len(rows)):
        sample = rows.sample(index, 0)
        used = int(sample.padding_mask.sum())
        assert sample.input_ids[0] == 56
        assert sample.input_ids[used - 1] == 55
        assert (sample.input_ids[used:] == 0).all()
        labels = sample.masked_lm_labels[sample.masked_lm_labels != IGNORED_LABEL]
        assert ((labels > 0) & (labels < 53)).all()
        masked += int((sample.input_ids == 54).sum())
    assert masked > len(rows)


@pytest.fixture
def small_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], TokenCorpus]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(text_corpus, "default_documents", documents)
    monkeypatch.setattr(text_corpus, "default_key", lambda: "small")
    return lambda: TokenCorpus.load(text_corpus.text_corpus(None, None, 300, builder=True))


def test_streamed_text_may_have_a_vocabulary_of_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", *WORDS, "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    text.write_text(" ".join(f"{sentence.capitalize()} extra." for document in documents() for sentence in document))
    folder = text_corpus.text_corpus([text], vocabulary, 300, builder=True)
    corpus = TokenCorpus.load(folder)
    assert corpus.special == SpecialTokens(pad=0, unknown=13, cls=14, sep=15, mask=16)
    assert [corpus.vocab_size, corpus.num_documents > 5, corpus.tokens.max()] == [17, True, 13]
    assert (folder / "vocab.txt").read_text().split() == vocabulary.read_text().split()
    assert text_corpus.text_corpus([text], None, 300, builder=True) != folder


def test_shards_hold_the_samples_of_streaming_in_the_order_of_streaming(
    small_docstrings: Callable[[], TokenCorpus], tmp_path: Path
) -> None:
    assert made(tmp_path / "out", "--seed", "5", "--dupe_factor", "2") == 0
    corpus = small_docstrings()
    training, held_out = (
        PairSamples(corpus, spans_of(corpus, numbers, LENGTH), LENGTH, SLOTS, seed=5)
        for numbers in split_documents(corpus)
    )
    training_files, validation_files = find_shards(tmp_path / "out")
    stored = ShardSamples(open_shards(training_files), SLOTS, 300, keep_order=True)
    assert len(stored) == 2 * len(training)
    size = next(size for size in (4, 3, 5) if len(training) % size)  # a micro-batch has samples of both epochs
    streamed, read = MicroBatches(training, size, 0, 1, seed=5), MicroBatches(stored, size, 0, 1, seed=9)
    for number in range(len(stored) // size):
        one, two = streamed[number], read[number]
        for left, right in zip((*one[0], *one[1]), (*two[0], *two[1]), strict=True):
            np.testing.assert_array_equal(left, right)
    validation = ShardSamples(open_shards(validation_files), SLOTS, 300)
    assert len(validation) == len(held_out)
    for index in range(len(validation)):
        np.testing.assert_array_equal(validation.sample(index, 0).input_ids, held_out.sample(index, 0).input_ids)
    assert (tmp_path / "out" / "vocab.txt").read_text().startswith("[PAD]\n[UNK]\n")


def test_processes_and_restarts_change_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    vocabulary = tmp_path / "vocab.txt"
    write_vocabulary(train_wordpiece(documents(), 300), vocabulary)
    source = ["--train_file", str(text), "--tokenizer_name", str(vocabulary)]
    assert made(one, *source) == 0
    expected = contents(one)
    assert len(expected) > 5
    written: list[str] = []
    original = prepare.plan_samples.__globals__["write_shard"]

    def interrupted(path: Path, samples: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        original(path, samples)

    monkeypatch.setitem(prepare.plan_samples.__globals__, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(two, *source)
    monkeypatch.undo()
    assert sorted(contents(two)) == sorted(written)
    kept = {name: (two / name).stat().st_mtime_ns for name in written}
    assert made(two, *source, "--preprocessing_num_workers", "2") == 0
    assert contents(two) == expected
    assert {name: (two / name).stat().st_mtime_ns for name in written} == kept
    assert not (two / prepare.WORK_FOLDER).exists()
    assert not [path.name for path in two.iterdir() if path.name.startswith(".")]
    assert (one / "preparation.json").read_text() == (two / "preparation.json").read_text()


def test_a_finished_folder_is_left_alone_and_a_lost_shard_made_again(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert made(output, "--train_file", str(text)) == 0
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert made(output, "--train_file", str(text)) == 0
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    expected = contents(output)
    find_shards(output)[0][2].unlink()
    assert made(output, "--train_file", str(text)) == 0
    assert contents(output) == expected


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--dupe_factor", "2"], "made with dupe_factor 5, now it is 2"),
        (["--seed", "1"], "made with seed 0, now it is 1"),
        (["--form", "prose"], 'made with form "lines", now it is "prose"'),
        ([], "made with text 0"),
    ],
)
def test_a_change_is_noticed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], says: str
) -> None:
    assert made(tmp_path / "out", "--train_file", str(text)) == 0
    if not option:
        text.write_text(text_of(documents(91)))
    assert made(tmp_path / "out", "--train_file", str(text), *option) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"--output_dir {tmp_path / 'out'}: its shards were " in error
    assert says in error


def test_what_cannot_work_is_refused_in_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert made(tmp_path / "out", *arguments) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line

    assert "--max_seq_length 7: must be at least 8" in error("--train_file", str(text), "--max_seq_length", "7")
    assert "--vocab_size 9" in error("--train_file", str(text), "--vocab_size", "9")
    (tmp_path / "out" / "preparation.json").unlink()
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"A caf\xe9 is a place.\n")
    assert error("--train_file", str(latin)).startswith(f"error: --train_file {latin}: not readable")
    (tmp_path / "out" / "preparation.json").unlink()
    text.write_text("One document only, and no blank line.\n")
    assert "the text is too short (1 documents" in error("--train_file", str(text))
    (tmp_path / "out" / "preparation.json").unlink()
    (tmp_path / "out" / "foreign_training.hdf5").write_text("")
    assert "holds HDF5 files that are not of this command" in error("--train_file", str(text))
    for wrong in ([1], {"made_of": {}, "result": [1]}, {"made_of": {}, "result": {}}):
        (tmp_path / "out" / "preparation.json").write_text(json.dumps(wrong))
        assert "preparation.json: not readable" in error("--train_file", str(text))
