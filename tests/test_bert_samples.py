"""Vocabulary, tokenised corpus, sentence pairs, masks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_vpipe.models.bert.batches import MicroBatch, MicroBatches
from ds_vpipe.models.bert.sample import IGNORED_LABEL, Sample, Samples
from ds_vpipe.models.bert.samples import PairSamples, RandomSamples, _fit, spans_of, split_documents
from ds_vpipe.models.bert.vocabulary import SPECIAL_TOKENS
from ds_vpipe.models.bert.wordpiece import TokenCorpus, tokenise, train_wordpiece

PAD, UNKNOWN, CLS, SEP, MASK = range(5)

LENGTH, SLOTS = 32, 5
VOCABULARY = 600


def numbered_corpus(documents: int = 40, sentences: int = 12) -> TokenCorpus:
    """Every token occurs once in order, so that a sample tells where its segments come from."""
    lengths = np.tile([4, 9, 6, 13], documents * sentences // 4)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = (np.arange(starts[-1]) + len(SPECIAL_TOKENS)).astype(np.uint16)
    document_starts = np.arange(documents + 1) * sentences
    return TokenCorpus(tokens, starts, document_starts, vocab_size=int(starts[-1]) + len(SPECIAL_TOKENS))


def pairs(seed: int = 0, length: int = LENGTH) -> PairSamples:
    corpus = numbered_corpus()
    return PairSamples(corpus, spans_of(corpus, np.arange(40), length), length, SLOTS, seed)


def original(sample: Sample) -> list[int]:
    tokens = sample.input_ids.copy()
    used = sample.masked_lm_labels != IGNORED_LABEL
    tokens[sample.masked_positions[used]] = sample.masked_lm_labels[used]
    return tokens[sample.padding_mask].tolist()


def segments(sample: Sample) -> tuple[list[int], list[int]]:
    tokens = original(sample)
    first_end = tokens.index(SEP)
    assert tokens[0] == CLS
    assert tokens[-1] == SEP
    assert sample.token_type_ids[: len(tokens)].tolist() == [0] * (first_end + 1) + [1] * (len(tokens) - first_end - 1)
    return tokens[1:first_end], tokens[first_end + 1 : -1]


def test_vocabulary_and_tokens(tmp_path: Path) -> None:
    documents = [["The cat sat on the mat.", "the dog sat"], ["A dog and a cat."]]
    tokenizer = train_wordpiece(documents, 256)
    assert [tokenizer.id_to_token(number) for number in range(5)] == list(SPECIAL_TOKENS)
    corpus = tokenise(documents, tokenizer)
    words = [str(tokenizer.id_to_token(int(token))) for token in corpus.tokens]
    assert "".join(words).replace("##", "") == "thecatsatonthemat.thedogsatadogandacat."
    assert corpus.document_starts.tolist() == [0, 2, 3]
    assert corpus.sentence_starts[-1] == len(corpus.tokens)
    corpus.save(tmp_path / "corpus")
    loaded = TokenCorpus.load(tmp_path / "corpus")
    assert loaded.tokens.tolist() == corpus.tokens.tolist()
    assert (loaded.vocab_size, loaded.num_documents) == (tokenizer.get_vocab_size(), 2)


def test_unigram_entropy() -> None:
    corpus = TokenCorpus(np.array([5, 5, 6, 7], dtype=np.uint16), np.array([0, 4]), np.array([0, 1]), 8)
    assert corpus.unigram_entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


def test_half_of_the_second_segments_continue_the_first_one() -> None:
    samples = pairs()
    tokens_per_document = len(numbered_corpus().tokens) // 40
    labels = []
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=0)
        first, second = segments(sample)
        assert first
        assert second
        same = (first[0] - 5) // tokens_per_document == (second[0] - 5) // tokens_per_document
        assert same == (sample.next_sentence_label == 0)
        if same:
            assert first + second == list(range(first[0], second[-1] + 1))
        labels.append(sample.next_sentence_label)
    assert len(labels) > 100
    assert 0.35 < np.mean(labels) < 0.65


def test_masks() -> None:
    samples = pairs()
    fates = {"mask": 0, "kept": 0, "random": 0}
    for epoch in range(10):
        for index in range(len(samples)):
            sample = samples.sample(index, epoch)
            count = int((sample.masked_lm_labels != IGNORED_LABEL).sum())
            candidates = int(sample.padding_mask.sum()) - 3
            assert count == min(SLOTS, max(1, round(0.15 * candidates)))
            assert sample.masked_lm_labels[count:].tolist() == [IGNORED_LABEL] * (SLOTS - count)
            assert sample.masked_positions[count:].tolist() == [0] * (SLOTS - count)
            assert (sample.input_ids[~sample.padding_mask] == PAD).all()
            positions, labels = sample.masked_positions[:count], sample.masked_lm_labels[:count]
            assert len(set(positions.tolist())) == count
            assert not np.isin(labels, [CLS, SEP, PAD]).any()
            for token, label in zip(sample.input_ids[positions], labels, strict=True):
                fates["mask" if token == MASK else "kept" if token == label else "random"] += 1
    total = sum(fates.values())
    assert total > 2000
    assert fates["mask"] / total == pytest.approx(0.8, abs=0.04)
    assert fates["random"] / total == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("kind", ["pairs", "random"])
def test_samples_depend_on_seed_epoch_and_index_alone(kind: str) -> None:
    def make(seed: int) -> Samples:
        return pairs(seed) if kind == "pairs" else RandomSamples(50, VOCABULARY, LENGTH, SLOTS, seed)

    def same(one: Sample, two: Sample) -> bool:
        return bool((one.input_ids == two.input_ids).all())

    one, two = make(1), make(1)
    for _ in range(3):
        one.sample(0, 0)
    assert same(one.sample(7, 2), two.sample(7, 2))
    assert not same(one.sample(7, 2), one.sample(7, 3))
    assert not same(one.sample(7, 2), make(2).sample(7, 2))
    assert not same(one.sample(7, 2), one.sample(8, 2))


def test_random_samples_fill_their_shapes() -> None:
    sample = RandomSamples(4, VOCABULARY, LENGTH, SLOTS, 0).sample(0, 0)
    assert sample.padding_mask.all()
    assert sample.masked_lm_labels.tolist()[-1] == IGNORED_LABEL  # 15 % of 29 tokens are 4, of 5 slots
    assert min(original(sample)[1:2] + sample.masked_lm_labels.tolist()[:-1]) >= len(SPECIAL_TOKENS)
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
        PairSamples(numbered_corpus(), spans_of(numbered_corpus(), np.array([3]), LENGTH), LENGTH, SLOTS, 0)


def test_held_out_documents_are_apart() -> None:
    training, held_out = split_documents(numbered_corpus(), 20)
    assert held_out.tolist() == [19, 39]
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(40))


def labels_in(batches: Iterable[MicroBatch]) -> list[tuple[int, ...]]:
    return [tuple(row) for _, (labels, _) in batches for row in labels.tolist()]


def test_replicas_are_disjoint_and_every_epoch_has_every_sample_once() -> None:
    samples = pairs()
    count = len(samples)
    assert count % 21  # so that a micro-batch has samples of two epochs
    replicas = [MicroBatches(samples, 7, replica, 3, seed=1) for replica in range(3)]
    rounds = zip(*(batches.range(0, -(-2 * count // 21)) for batches in replicas), strict=True)
    seen = labels_in(batch for found in rounds for batch in found)
    for epoch in range(2):
        expected = sorted(tuple(samples.sample(index, epoch).masked_lm_labels.tolist()) for index in range(count))
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == expected
    assert seen[:count] != seen[count : 2 * count]


def test_a_run_goes_on_at_its_sample_with_another_size_and_number_of_replicas() -> None:
    samples = pairs()
    count = len(samples) + 20  # into the second epoch
    alone = labels_in(MicroBatches(samples, 1, 0, 1, seed=1).range(0, count))
    begin = count - 13
    replicas = [MicroBatches(samples, 3, replica, 2, seed=1) for replica in range(2)]
    two = zip(*(batches.after(begin, 2) for batches in replicas), strict=True)
    assert labels_in(batch for found in two for batch in found) == alone[begin : begin + 12]


def test_a_micro_batch_is_the_same_whoever_asks_and_whenever() -> None:
    one, two = (MicroBatches(pairs(), 4, 0, 2, seed=1) for _ in range(2))
    number = one.epoch_samples // 8 + 3  # in the second epoch
    in_order = list(one.range(0, number + 1))[number]
    torch.testing.assert_close(in_order, two[number])
    assert not torch.equal(in_order[0][0], one[3][0][0])


def test_micro_batch_shapes_and_types() -> None:
    (ids, types, mask, positions), (labels, next_sentence) = MicroBatches(pairs(), 4, 0, 1, seed=1)[0]
    assert ids.shape == types.shape == mask.shape == (4, LENGTH)
    assert positions.shape == labels.shape == (4, SLOTS)
    assert next_sentence.shape == (4,)
    assert {ids.dtype, types.dtype, positions.dtype, labels.dtype, next_sentence.dtype} == {torch.int64}
    assert mask.dtype == torch.bool


def test_validation_batches_repeat_without_change() -> None:
    batches = MicroBatches(pairs(), 4, 0, 1, seed=1, shuffle=False)
    torch.testing.assert_close(batches[2], batches[2 + batches.epoch_samples])


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="10 samples are too few for 3 replicas of micro-batch size 4"):
        MicroBatches(RandomSamples(10, VOCABULARY, LENGTH, SLOTS, 0), 4, 0, 3, seed=0)
