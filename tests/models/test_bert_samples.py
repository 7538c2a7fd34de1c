"""Sentence pairs, masks of tokens and of whole words, and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from ds_vpipe.models.bert.data import IGNORED_LABEL, MicroBatch, micro_batches
from ds_vpipe.models.bert.samples import (
    SPECIAL_TOKENS,
    Masking,
    RandomSamples,
    Sample,
    Samples,
    Vocabulary,
    check_shape,
)
from ds_vpipe.models.bert.text import _ROWS, Corpus, PairSamples, _fit

PAD, UNKNOWN, CLS, SEP, MASK = range(5)

LENGTH, SLOTS = 32, 5
VOCABULARY = 600
DOCUMENTS, TOKENS_PER_DOCUMENT = 40, 99


class NumberedCorpus(Corpus):
    """Every token occurs once in order, so that a sample shows where its segments come from."""

    @property
    def vocabulary(self) -> Vocabulary:  # type: ignore[override]
        return Vocabulary.numbered(DOCUMENTS * TOKENS_PER_DOCUMENT + len(SPECIAL_TOKENS))


def numbered_corpus() -> Corpus:
    """Documents of three rows of 33 tokens in three sentences."""
    rows: dict[str, list[Any]] = {"tokens": [], "ends": [], "document": []}
    for number in range(3 * DOCUMENTS):
        begin = 33 * number + len(SPECIAL_TOKENS)
        rows["tokens"].append(np.arange(begin, begin + 33, dtype=np.uint16))
        rows["ends"].append([4, 20, 33])
        rows["document"].append(number // 3)
    return NumberedCorpus(Dataset.from_dict(rows, features=_ROWS), None, "numbered", DOCUMENTS)


def masking(**changes: Any) -> Masking:
    settings = {"vocabulary": numbered_corpus().vocabulary, "length": LENGTH, "slots": SLOTS} | changes
    return Masking(**settings)


def pairs(seed: int = 0) -> PairSamples:
    return PairSamples(numbered_corpus(), np.arange(3 * DOCUMENTS), masking(), seed)


def random_samples(count: int, seed: int = 0, slots: int = SLOTS) -> RandomSamples:
    return RandomSamples(count, masking(vocabulary=Vocabulary.numbered(VOCABULARY), slots=slots), seed)


def original(sample: Sample) -> list[int]:
    tokens = sample["input_ids"].copy()
    positions = predicted(sample)
    tokens[positions] = sample["masked_lm_ids"][: len(positions)]
    return tokens[sample["input_mask"] == 1].tolist()


def predicted(sample: Sample) -> np.ndarray[Any, Any]:
    """Positions in the slots that are used."""
    positions = sample["masked_lm_positions"]
    return positions[positions > 0]


def segments(sample: Sample) -> tuple[list[int], list[int]]:
    tokens = original(sample)
    first_end = tokens.index(SEP)
    assert tokens[0] == CLS
    assert tokens[-1] == SEP
    assert sample["segment_ids"][: len(tokens)].tolist() == [0] * (first_end + 1) + [1] * (len(tokens) - first_end - 1)
    return tokens[1:first_end], tokens[first_end + 1 : -1]


def test_half_of_the_second_segments_continue_the_first_one() -> None:
    samples = pairs()
    labels = []
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=0)
        first, second = segments(sample)
        assert first
        assert second
        same = (first[0] - 5) // TOKENS_PER_DOCUMENT == (second[0] - 5) // TOKENS_PER_DOCUMENT
        assert same == (sample["next_sentence_labels"] == 0)
        if same:
            assert first + second == list(range(first[0], second[-1] + 1))
        labels.append(sample["next_sentence_labels"])
    assert len(labels) > 100
    assert 0.35 < np.mean(labels) < 0.65


def test_masks() -> None:
    samples = pairs()
    fates = {"mask": 0, "kept": 0, "random": 0}
    for epoch in range(10):
        for index in range(len(samples)):
            sample = samples.sample(index, epoch)
            count = len(predicted(sample))
            candidates = int(sample["input_mask"].sum()) - 3
            assert count == min(SLOTS, max(1, round(0.15 * candidates)))
            assert sample["masked_lm_ids"][count:].tolist() == [0] * (SLOTS - count)
            assert sample["masked_lm_positions"][count:].tolist() == [0] * (SLOTS - count)
            assert (sample["input_ids"][sample["input_mask"] == 0] == PAD).all()
            positions, labels = sample["masked_lm_positions"][:count], sample["masked_lm_ids"][:count]
            assert len(set(positions.tolist())) == count
            assert not np.isin(labels, [CLS, SEP, PAD]).any()
            for token, label in zip(sample["input_ids"][positions], labels, strict=True):
                fates["mask" if token == MASK else "kept" if token == label else "random"] += 1
    total = sum(fates.values())
    assert total > 2000
    assert fates["mask"] / total == pytest.approx(0.8, abs=0.04)
    assert fates["random"] / total == pytest.approx(0.1, abs=0.03)


WORDS = 300


def words_of_pieces() -> tuple[Vocabulary, np.ndarray[Any, Any], list[list[int]]]:
    """A vocabulary, a text of words of one to four pieces, and the places of each word's pieces in it."""
    continues = np.zeros(VOCABULARY, dtype=bool)
    continues[VOCABULARY // 2 :] = True
    numbered = Vocabulary.numbered(VOCABULARY)
    vocabulary = Vocabulary(numbered.special, continues)
    random = np.random.default_rng(0)
    tokens: list[int] = []
    words = []
    for _ in range(WORDS):
        more = int(random.choice(4, p=[0.6, 0.2, 0.15, 0.05]))
        words.append(list(range(len(tokens), len(tokens) + 1 + more)))
        tokens += [
            int(random.integers(5, VOCABULARY // 2)),
            *random.integers(VOCABULARY // 2, VOCABULARY, more).tolist(),
        ]
    return vocabulary, np.array(tokens), words


def test_whole_words_are_masked_together_or_not_at_all() -> None:
    vocabulary, tokens, words = words_of_pieces()
    cut = words[120][0]
    length = len(tokens) + 3
    rule = Masking(vocabulary, length, slots=length - 3, probability=0.15, whole_words=True)
    rounds, masked, pieces = 200, 0, 0
    for seed in range(rounds):
        sample = rule.sample(tokens[:cut], tokens[cut:], 0, np.random.default_rng(seed))
        found = {int(place) - (1 if place <= cut else 2) for place in predicted(sample)}
        for word in words:
            assert set(word) <= found or not set(word) & found
            masked += set(word) <= found
        pieces += len(found)
    assert pieces / rounds == pytest.approx(0.15 * len(tokens), rel=0.02)
    assert masked / rounds == pytest.approx(0.15 * WORDS, rel=0.05)


def test_without_whole_words_pieces_are_masked_apart() -> None:
    vocabulary, tokens, words = words_of_pieces()
    sample = Masking(vocabulary, len(tokens) + 3, 99).sample(tokens[:50], tokens[50:], 0, np.random.default_rng(0))
    found = {int(place) - (1 if place <= 50 else 2) for place in sample["masked_lm_positions"]}
    assert any(set(word) & found and not set(word) <= found for word in words)


def test_a_sample_of_one_long_word_has_a_prediction() -> None:
    vocabulary, _, _ = words_of_pieces()
    word = np.array([7, *range(VOCABULARY - 8, VOCABULARY)])
    rule = Masking(vocabulary, LENGTH, slots=4, whole_words=True)
    sample = rule.sample(word[:5], word[5:], 0, np.random.default_rng(0))  # cut in the middle of the word
    assert sample["masked_lm_positions"].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize(("probability", "slots"), [(0.15, 20), (0.3, 39), (0.01, 2)])
def test_the_share_of_predictions_decides_their_slots(probability: float, slots: int) -> None:
    assert check_shape(128, None, probability) == slots
    count = max(1, round(probability * 125))
    rule = masking(length=128, slots=slots, probability=probability)
    sample = rule.sample(np.arange(5, 65), np.arange(65, 130), 0, np.random.default_rng(0))
    assert len(predicted(sample)) == count


@pytest.mark.parametrize("kind", ["pairs", "random"])
def test_samples_depend_on_seed_epoch_and_index_alone(kind: str) -> None:
    def make(seed: int) -> Samples:
        return pairs(seed) if kind == "pairs" else random_samples(50, seed)

    def same(one: Sample, two: Sample) -> bool:
        return bool((one["input_ids"] == two["input_ids"]).all())

    one, two = make(1), make(1)
    for _ in range(3):
        one.sample(0, 0)
    assert same(one.sample(7, 2), two.sample(7, 2))
    assert not same(one.sample(7, 2), one.sample(7, 3))
    assert not same(one.sample(7, 2), make(2).sample(7, 2))
    assert not same(one.sample(7, 2), one.sample(8, 2))


def test_random_samples_fill_their_shapes() -> None:
    sample = random_samples(4).sample(0, 0)
    assert sample["input_mask"].all()
    assert len(predicted(sample)) == 4  # 15 % of 29 tokens, of 5 slots
    assert min(original(sample)[1:2] + sample["masked_lm_ids"].tolist()[:-1]) >= len(SPECIAL_TOKENS)
    first, second = segments(sample)
    assert len(first) + len(second) == LENGTH - 3


@pytest.mark.parametrize(
    ("first", "second", "budget", "expected"),
    [(5, 6, 20, (5, 6)), (30, 6, 20, (14, 6)), (6, 30, 20, (6, 14)), (30, 30, 20, (10, 10)), (31, 30, 21, (11, 10))],
)
def test_the_longer_segment_is_cut_first(first: int, second: int, budget: int, expected: tuple[int, int]) -> None:
    assert _fit(first, second, budget) == expected


def test_one_document_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two documents"):
        PairSamples(numbered_corpus(), np.array([3, 4]), masking(), 0)


def test_held_out_documents_are_apart() -> None:
    training, held_out = numbered_corpus().split(20)
    assert held_out.tolist() == [57, 58, 59, 117, 118, 119]
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(3 * DOCUMENTS))


def labels_in(batches: Iterable[MicroBatch]) -> list[tuple[int, ...]]:
    return [tuple(row) for _, (labels, _) in batches for row in labels.tolist()]


def test_replicas_are_disjoint_and_every_epoch_has_every_sample_once() -> None:
    samples = pairs()
    count = len(samples)
    assert count % 21  # so that a micro-batch has samples of two epochs
    replicas = [micro_batches(samples, 7, 1, replica=replica, replicas=3) for replica in range(3)]
    rounds = islice(zip(*replicas, strict=True), -(-2 * count // 21))
    seen = labels_in(batch for found in rounds for batch in found)
    for epoch in range(2):
        expected = [samples.sample(index, epoch) for index in range(count)]
        labels = [np.where(one["masked_lm_positions"], one["masked_lm_ids"], IGNORED_LABEL) for one in expected]
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == sorted(tuple(row.tolist()) for row in labels)
    assert seen[:count] != seen[count : 2 * count]


def test_a_run_goes_on_at_its_sample_with_another_size_and_number_of_replicas() -> None:
    samples = pairs()
    count = len(samples) + 20  # into the second epoch
    alone = labels_in(islice(micro_batches(samples, 1, 1), count))
    begin = count - 13
    replicas = [micro_batches(samples, 3, 1, begin, replica, 2) for replica in range(2)]
    two = islice(zip(*replicas, strict=True), 2)
    assert labels_in(batch for found in two for batch in found) == alone[begin : begin + 12]


def test_a_micro_batch_is_the_same_whoever_asks_and_whenever() -> None:
    samples = pairs()
    number = len(samples) // 8 + 3  # in the second epoch
    in_order = list(islice(micro_batches(samples, 4, 1, replicas=2), number + 1))
    torch.testing.assert_close(in_order[number], next(micro_batches(pairs(), 4, 1, 8 * number, replicas=2)))
    assert not torch.equal(in_order[number][0][0], in_order[3][0][0])


def test_micro_batch_shapes_and_types() -> None:
    (ids, types, mask, positions), (labels, next_sentence) = next(micro_batches(pairs(), 4, 1))
    assert ids.shape == types.shape == mask.shape == (4, LENGTH)
    assert positions.shape == labels.shape == (4, SLOTS)
    assert next_sentence.shape == (4,)
    assert {ids.dtype, types.dtype, positions.dtype, labels.dtype, next_sentence.dtype} == {torch.int64}
    assert mask.dtype == torch.bool


def test_validation_batches_repeat_without_change() -> None:
    samples = pairs()
    first, second = (next(micro_batches(samples, 4, None, begin)) for begin in (8, 8 + len(samples)))
    torch.testing.assert_close(first, second)
