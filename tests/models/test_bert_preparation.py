"""Text to rows and shards: the cache, vocabularies, restarts, and that shards hold what streaming would draw."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert import corpus, prepare, text
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.data import micro_batches
from ds_vpipe.models.bert.samples import SPECIAL_TOKENS
from ds_vpipe.models.bert.shards import ShardSamples, find_shards, open_shards
from ds_vpipe.models.bert.text import Corpus, read_corpus, read_tokenizer, text_samples

WORDS = ["the", "a", "stage", "batch", "layer", "rank", "sends", "waits", "for", "gradients", "weights", "losses"]
LENGTH, SLOTS = 24, 4


def documents(count: int = 90, sentences: int = 7) -> list[list[str]]:
    random = np.random.default_rng(0)
    return [[" ".join(random.choice(WORDS, 6)) for _ in range(sentences)] for _ in range(count)]


def text_of(documents: list[list[str]]) -> str:
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(text.CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text_of(documents()))
    return path


def vocabulary_of(path: Path, words: list[str] = WORDS) -> Path:
    path.write_text("\n".join([*SPECIAL_TOKENS, *words]) + "\n")
    return path


def made(output: Path, *arguments: str) -> int:
    shape = ["--max_seq_length", str(LENGTH), "--max_predictions_per_seq", str(SLOTS), "--shard_size", "64"]
    shape += ["--line_by_line", "--preprocessing_num_workers", "1", "--vocab_size", "300"]
    return prepare.main([*shape, "--output_dir", str(output), *arguments])


def contents(folder: Path) -> dict[str, list[list[int]]]:
    """What is in the shards, by file."""
    training, validation = find_shards(folder)
    found = {}
    for path in (*training, *validation):
        rows = ShardSamples(open_shards([path]), SLOTS, 300)
        found[path.name] = [rows.sample(index, 0)["input_ids"].tolist() for index in range(len(rows))]
    return found


def rows_of(corpus: Corpus) -> list[tuple[list[int], list[int], int]]:
    return [(row["tokens"], row["ends"], row["document"]) for row in corpus.rows]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_sentences_that_fill_a_sequence(tmp_path: Path, end: str, workers: int) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(text_of(documents(9)).replace("\n", end).encode("utf-8-sig"))
    tokenizer = read_tokenizer(vocabulary_of(tmp_path / "vocab.txt"), 300)
    corpus = read_corpus([path], LENGTH, 300, tokenizer=tokenizer, line_by_line=True, workers=workers)
    expected = []
    for number, document in enumerate(documents(9)):  # seven sentences of six words; 21 tokens fill a sequence
        tokens = [len(SPECIAL_TOKENS) + WORDS.index(word) for sentence in document for word in sentence.split()]
        expected += [(tokens[:24], [6, 12, 18, 24], number), (tokens[24:], [6, 12, 18], number)]
    assert rows_of(corpus) == expected
    assert (corpus.documents, corpus.num_tokens) == (9, 9 * 42)


def test_prose_is_cut_into_sentences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The first one is here. The second\none ends now.\n\n\n>>> code()\n\nThe third one stands alone.\n")
    corpus = read_corpus([path], 8, 300)
    whole = read_corpus([path], 64, 300)
    assert [(len(row["ends"]), row["document"]) for row in whole.rows] == [(2, 0), (1, 1), (1, 2)]
    parts = [part for row in corpus.rows for part in np.diff([0, *row["ends"]])]
    assert 1 < min(parts) <= max(parts) <= 8 - 3  # what a row of two segments has room for
    assert [t for row in corpus.rows for t in row["tokens"]] == [t for row in whole.rows for t in row["tokens"]]
    assert len(read_corpus([path], 8, 300, line_by_line=True).rows) == 4


@pytest.mark.parametrize(
    "sentences",
    [
        ["He ran.", '"Where to?" he asked.', "Nobody knew!", "(It was 1939.)", "King: e.g. to the U.S.", "|X| @home"],
        ["Ärzte sagen das oft.", "Über all das; so.", "Étienne n'est pas là…", "Il est parti."],
        ["Это предложение номер 1.", "Другое идёт следом?", "— Да.", "— Нет."],
        ["यह पहला है।", "यह दूसरा है।", "هل هذا سؤال؟", "نعم.", "هذا هو الأخير"],
        ["he ran home.", "where was she?", "nobody knew!"],
        ["ეს პირველია.", "ეს GPU მეორეა.", "სხვა რა?"],
        ["ይህ የመጀመሪያው ነው።", "ይህ ሁለተኛው ነው።", "መጨረሻ"],
    ],
)
def test_sentences_of_any_script_are_kept(sentences: list[str]) -> None:
    joined = "\n".join(sentences) if len(sentences) > 2 else "".join(sentences)
    assert text._sentences(joined, False) == sentences
    chinese = ["这是句子很短。", "第二个。", "「也是。」"]
    assert text._sentences("".join(chinese), False) == chinese


def test_blank_lines_may_hold_spaces(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" \n\nOne is here.\n \nTwo is here.\n\t\n\x0c\n\nThree is here.\n\n \n")
    assert read_corpus([path, path], 8, 300).rows["document"] == [*range(6)]
    path.write_text(" \n\n")
    with pytest.raises(VPipeConfigError, match=r"--train_file .*text\.txt: the files are empty; give text"):
        read_corpus([path], LENGTH, 300)


def test_text_that_cannot_be_read_is_named(tmp_path: Path, file: Path) -> None:
    with pytest.raises(VPipeConfigError, match=r"absent\.txt: not readable as UTF-8"):
        read_corpus([tmp_path / "absent.txt"], LENGTH, 300)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(VPipeConfigError, match=r"latin\.txt: not readable as UTF-8") as caught:
        read_corpus([file, tmp_path / "latin.txt"], LENGTH, 300)
    assert "\n" not in str(caught.value)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(VPipeConfigError, match=r"--train_file .*empty\.txt: the files are empty"):
        read_corpus([tmp_path / "empty.txt"], LENGTH, 300)
    (tmp_path / "folder").write_text("")
    with pytest.raises(VPipeConfigError, match=r"cache folder .*folder is not writable .*--cache_dir"):
        read_corpus([file], LENGTH, 300, cache=tmp_path / "folder")


def test_a_second_start_finds_its_rows_and_touches_no_network(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    first = read_corpus([file], LENGTH, 300)
    written = [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".arrow", "")]
    monkeypatch.setattr(text, "_rows", lambda *_, **__: pytest.fail("the text was tokenised again"))
    monkeypatch.setattr(text, "_sentences", lambda *_: pytest.fail("a vocabulary was made again"))
    again = read_corpus([file], LENGTH, 300)
    assert (again.digest, rows_of(again)) == (first.digest, rows_of(first))
    assert sorted(path.name.split("-")[0] for path in written) == ["generator", "rows", "tokenizer"]
    assert not [path for path in tmp_path.iterdir() if path.name not in ("cache", file.name)]


def test_names_follow_the_content(tmp_path: Path, file: Path) -> None:
    tokenizer = read_tokenizer(vocabulary_of(tmp_path / "vocab.txt"), 300)
    copy = tmp_path / "copy.txt"
    copy.write_bytes(file.read_bytes())
    before = read_corpus([file], LENGTH, 300, tokenizer=tokenizer).digest
    assert read_corpus([copy], LENGTH, 300, tokenizer=tokenizer).digest == before
    other = read_tokenizer(vocabulary_of(tmp_path / "other.txt", WORDS[:-1]), 300)
    changes = [
        read_corpus([file], LENGTH + 1, 300, tokenizer=tokenizer),
        read_corpus([file], LENGTH, 300, tokenizer=other),
        read_corpus([file], LENGTH, 300, tokenizer=tokenizer, line_by_line=True),
    ]
    copy.write_text(text_of(documents(91)))
    changes.append(read_corpus([copy], LENGTH, 300, tokenizer=tokenizer))
    assert len({before, *(corpus.digest for corpus in changes)}) == 5


def test_a_file_of_the_cache_is_complete_or_absent(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyError

    with pytest.raises(KeyError):
        text.kept(tmp_path / "entry", fail)
    assert not (tmp_path / "entry").exists()
    assert text.kept(tmp_path / "entry", lambda path: path.write_text("built") and None).read_text() == "built"
    assert text.kept(tmp_path / "entry", fail).read_text() == "built"


def test_unigram_entropy(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"tokens": [[5, 5], [6, 7]], "ends": [[2], [2]], "document": [0, 1]}, features=text._ROWS)
    corpus = Corpus(rows, read_tokenizer(vocabulary_of(tmp_path / "vocab.txt"), 300), "", 2)
    assert corpus.unigram_entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


def test_a_vocabulary_made_from_text_is_lower_cased_with_special_tokens_first(file: Path) -> None:
    tokenizer = read_corpus([file], LENGTH, 300).tokenizer
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert "".join(tokenizer.tokenize("The STAGE sends.")).replace("##", "").startswith("thestagesends")


@pytest.mark.parametrize(("extra", "lower"), [([], True), (["Paris"], False)])
def test_a_vocabulary_file(tmp_path: Path, extra: list[str], lower: bool) -> None:
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[unused0]", "the", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sta", "##ge", *extra]
    path.write_text("\n".join(tokens) + "\n")
    tokenizer = read_tokenizer(path, len(tokens))
    expected = ["the", "sta", "##ge"] if lower else ["[UNK]", "sta", "##ge"]
    tokenizer.save_pretrained(tmp_path / "saved")
    for known in (tokenizer, read_tokenizer(tmp_path / "saved", len(tokens)), read_tokenizer(tmp_path, len(tokens))):
        vocabulary = Corpus(None, known, "", 0).vocabulary
        assert list(vocabulary.special) == [0, 3, 4, 5, 6]
        assert vocabulary.ordinary.tolist() == [1, 2, *range(7, len(tokens))]
        assert np.flatnonzero(vocabulary.continues).tolist() == [8]
        assert known.tokenize("The stage") == expected


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
        read_tokenizer(tmp_path / "vocab.txt", most)


def test_samples_use_the_special_tokens_of_the_vocabulary(file: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    letters = [f"{mark}{letter}" for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary.write_text("\n".join(["[PAD]", *letters, "[UNK]", "[MASK]", "[SEP]", "[CLS]"]))
    assert made(tmp_path / "out", "--train_file", str(file), "--tokenizer_name", str(vocabulary)) == 0
    rows = ShardSamples(open_shards(find_shards(tmp_path / "out")[0]), SLOTS, 57)
    masked = 0
    for index in range(len(rows)):
        sample = rows.sample(index, 0)
        used = int(sample["input_mask"].sum())
        assert sample["input_ids"][0] == 56
        assert sample["input_ids"][used - 1] == 55
        assert (sample["input_ids"][used:] == 0).all()
        labels = sample["masked_lm_ids"][sample["masked_lm_positions"] > 0]
        assert ((labels > 0) & (labels < 53)).all()
        masked += int((sample["input_ids"] == 54).sum())
    assert masked > len(rows)


@pytest.mark.parametrize("whole", [[], ["--whole_word_masking", "--mlm_probability", "0.3"]])
def test_shards_hold_the_samples_of_streaming_in_the_order_of_streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[str]
) -> None:
    monkeypatch.setattr(corpus, "docstring_documents", documents)
    monkeypatch.setattr(text, "docstring_key", lambda: "small")
    assert made(tmp_path / "out", "--seed", "5", "--dupe_factor", "2", *whole) == 0
    shape = ["--max_seq_length", str(LENGTH), "--max_predictions_per_seq", str(SLOTS), "--seed", "5"]
    arguments = parse_arguments(["--deepspeed_config", "c", "--line_by_line", *shape, *whole])
    training, held_out = text_samples(arguments, 300)
    assert held_out is not None
    arguments.max_seq_length = 3
    with pytest.raises(VPipeConfigError, match="--max_seq_length 3: must be at least 8"):
        text_samples(arguments, 300)
    training_files, validation_files = find_shards(tmp_path / "out")
    stored = ShardSamples(open_shards(training_files), SLOTS, 300, keep_order=True)
    assert len(stored) == 2 * len(training)
    size = next(size for size in (4, 3, 5) if len(training) % size)  # a micro-batch has samples of both epochs
    streamed, read = micro_batches(training, size, 5), micro_batches(stored, size, 9)
    for one, two, _ in zip(streamed, read, range(len(stored) // size), strict=False):
        for left, right in zip((*one[0], *one[1]), (*two[0], *two[1]), strict=True):
            np.testing.assert_array_equal(left, right)
    validation = ShardSamples(open_shards(validation_files), SLOTS, 300)
    assert len(validation) == len(held_out)
    for index in range(len(validation)):
        np.testing.assert_array_equal(validation.sample(index, 0)["input_ids"], held_out.sample(index, 0)["input_ids"])
    assert len(read_tokenizer(tmp_path / "out", 300)) == training.corpus.vocabulary.size


def test_validation_files_are_held_out_and_all_else_is_not(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text_of(documents(7)))
    assert made(tmp_path / "out", "--train_file", str(file), "--validation_file", str(other), "--dupe_factor", "1") == 0
    training, validation = (open_shards(files) for files in find_shards(tmp_path / "out"))
    assert sum(shard.rows for shard in training) == 2 * 90
    assert sum(shard.rows for shard in validation) == 2 * 7


def test_processes_and_restarts_change_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    source = ["--train_file", str(file), "--tokenizer_name", str(vocabulary_of(tmp_path / "vocab.txt"))]
    assert made(one, *source) == 0
    expected = contents(one)
    assert len(expected) > 5
    written: list[str] = []
    original = prepare.write_shard

    def interrupted(path: Path, samples: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        original(path, samples)

    monkeypatch.setattr(prepare, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(two, *source)
    monkeypatch.setattr(prepare, "write_shard", original)
    assert sorted(contents(two)) == sorted(written)
    kept = {name: (two / name).stat().st_mtime_ns for name in written}
    assert made(two, *source, "--preprocessing_num_workers", "2") == 0
    assert contents(two) == expected
    assert {name: (two / name).stat().st_mtime_ns for name in written} == kept
    assert not [path.name for path in two.iterdir() if path.name.startswith(".")]
    assert (one / "preparation.json").read_text() == (two / "preparation.json").read_text()


def test_a_folder_in_which_nothing_was_made_takes_other_settings(file: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short\n")
    assert made(tmp_path / "out", "--train_file", str(tmp_path / "short.txt")) == 2
    assert made(tmp_path / "out", "--train_file", str(file)) == 0


def test_a_finished_folder_is_left_alone_and_a_lost_shard_made_again(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert made(output, "--train_file", str(file)) == 0
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert made(output, "--train_file", str(file)) == 0
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    expected = contents(output)
    find_shards(output)[0][2].unlink()
    assert made(output, "--train_file", str(file)) == 0
    assert contents(output) == expected


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--dupe_factor", "2"], "made with dupe_factor 5, now it is 2"),
        (["--seed", "1"], "made with seed 0, now it is 1"),
        (["--mlm_probability", "0.2"], "made with mlm_probability 0.15, now it is 0.2"),
        ([], "made with train_file 0"),
    ],
)
def test_a_change_is_noticed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], says: str
) -> None:
    assert made(tmp_path / "out", "--train_file", str(file)) == 0
    if not option:
        file.write_text(text_of(documents(91)))
    assert made(tmp_path / "out", "--train_file", str(file), *option) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"--output_dir {tmp_path / 'out'}: its shards were " in error
    assert says in error


def test_what_cannot_work_is_refused_in_one_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert made(tmp_path / "out", *arguments) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line

    assert "--max_seq_length 7: must be at least 8" in error("--train_file", str(file), "--max_seq_length", "7")
    assert "--vocab_size 9" in error("--train_file", str(file), "--vocab_size", "9")
    (tmp_path / "out" / "preparation.json").unlink()
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"A caf\xe9 is a place.\n")
    assert error("--train_file", str(latin)).startswith(f"error: {latin}: not readable")
    file.write_text("One document only, and no blank line.\n")
    assert "the text is too short (1 documents" in error("--train_file", str(file))
    (tmp_path / "out" / "preparation.json").unlink()
    (tmp_path / "out" / "foreign_training.hdf5").write_text("")
    assert "holds HDF5 files that are not of this command" in error("--train_file", str(file))
    for wrong in ([1], {"made_of": {}, "result": [1]}, {"made_of": {}, "result": {}}):
        (tmp_path / "out" / "preparation.json").write_text(json.dumps(wrong))
        assert "preparation.json: not readable" in error("--train_file", str(file))


def test_a_lost_process_is_said_in_one_line(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_sentences", lambda *_: os._exit(9))
    tokenizer = read_tokenizer(vocabulary_of(tmp_path / "vocab.txt"), 300)
    with pytest.raises(VPipeError, match=r"tokenising failed \(.*died.*fewer --preprocessing_num_workers"):
        read_corpus([file], LENGTH, 300, tokenizer=tokenizer, workers=2)
