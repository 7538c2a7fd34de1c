"""Samples of masked-language modelling: tokens to predict, chosen one by one or by whole words.

A sample is a row in the layout of :mod:`ds_vpipe.models.bert.shards`, and a pure function of (seed, epoch, index).

After Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", appendix A.1: 15 % of the tokens are
predicted, of which 80 % are replaced by [MASK], 10 % by a random token and 10 % kept.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_vpipe.errors import VPipeConfigError

MLM_PROBABILITY = 0.15
SHORTEST_SEQUENCE = 8
SPECIAL_IN_PAIR = 3  # [CLS] a [SEP] b [SEP]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Ints = NDArray[np.int64]
Sample = dict[str, Ints]


@dataclass(frozen=True)
class Vocabulary:
    """Token numbers of a tokenizer."""

    special: Sequence[int]  # numbers of `SPECIAL_TOKENS`
    continues: NDArray[np.bool_]  # bool [vocabulary], true for word pieces that continue a word

    @classmethod
    def numbered(cls, size: int) -> "Vocabulary":
        """Vocabulary without text: `SPECIAL_TOKENS` first, every token a word."""
        return cls(range(len(SPECIAL_TOKENS)), np.zeros(size, dtype=bool))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.continues)

    @cached_property
    def ordinary(self) -> Ints:
        """Numbers of all tokens that are not special, ascending."""
        return np.setdiff1d(np.arange(self.size), self.special)


@dataclass(frozen=True)
class Masking:
    """Rule that turns two segments into a sample."""

    vocabulary: Vocabulary
    length: int  # S, tokens of a sample, special ones included
    slots: int  # P, most tokens of a sample that are predicted
    probability: float = MLM_PROBABILITY  # share of the tokens that are predicted
    whole_words: bool = False  # whether the pieces of a word are predicted together

    def sample(self, first: Ints, second: Ints, next_sentence_label: int, random: np.random.Generator) -> Sample:
        """[CLS] first [SEP] second [SEP], masked and padded. The segments fit into the length."""
        pad, _, start, end, mask = self.vocabulary.special
        ordinary = self.vocabulary.ordinary
        tokens = np.concatenate([[start], first, [end], second, [end]]).astype(np.int64)
        used = len(tokens)
        candidates = np.concatenate([np.arange(1, len(first) + 1), np.arange(len(first) + 2, used - 1)])
        places = np.arange(self.length)
        positions = self._positions(tokens, candidates, random)
        count = len(positions)
        fate = random.random(count)
        other = ordinary[random.integers(len(ordinary), size=count)]
        input_ids = _padded(tokens, self.length, pad)
        input_ids[positions] = np.where(fate < 0.8, mask, np.where(fate < 0.9, other, tokens[positions]))
        return {
            "input_ids": input_ids,
            "input_mask": (places < used).astype(np.int64),
            "segment_ids": ((places > len(first) + 1) & (places < used)).astype(np.int64),
            "masked_lm_positions": _padded(positions, self.slots),
            "masked_lm_ids": _padded(tokens[positions], self.slots),
            "next_sentence_labels": np.array(next_sentence_label),
        }

    def _positions(self, tokens: Ints, candidates: Ints, random: np.random.Generator) -> Ints:
        """Positions to predict, ascending."""
        count = min(self.slots, max(1, round(self.probability * len(candidates))))
        if not self.whole_words:
            return np.sort(random.choice(candidates, size=count, replace=False))
        # A segment may have lost the beginning of its first word: pieces after a special token begin one, too.
        begins = ~self.vocabulary.continues[tokens[candidates]] | (np.diff(candidates, prepend=-1) > 1)
        words = np.split(candidates, np.flatnonzero(begins[1:]) + 1)
        chosen: list[int] = []
        for number in random.permutation(len(words)):
            if len(chosen) + len(words[number]) <= count:
                chosen.extend(words[number])
            if len(chosen) == count:
                break
        if not chosen:  # every word has more pieces than are to be predicted, and a sample needs one
            chosen.extend(min(words, key=len)[: self.slots])
        return np.sort(np.array(chosen, dtype=np.int64))


class Samples:
    """Finite set of samples that differ from epoch to epoch. This base is for ranks that need its size alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample `index` as seen in `epoch`."""
        raise NotImplementedError(f"sample {index} of epoch {epoch}: this rank reads no data")

    def index(self, position: int, seed: int, epoch: int) -> int:
        """Index of the sample at a position of an epoch."""
        return int(shuffled(len(self), seed, epoch)[position])

    def between(self, begin: int, end: int, seed: int | None) -> Iterator[Sample]:
        """Samples `begin` .. `end` - 1 of a run: all of epoch 0 in its order, all of epoch 1 in another, and so on.

        Args:
            begin: first sample.
            end: one past the last sample.
            seed: of the orders; None for validation, which always takes epoch 0 by its indices.
        """
        for number in range(begin, end):
            epoch, position = divmod(number, len(self))
            yield self.sample(position, 0) if seed is None else self.sample(self.index(position, seed, epoch), epoch)


class RandomSamples(Samples):
    """Sequences of uniformly random tokens, for measuring speed."""

    def __init__(self, count: int, masking: Masking, seed: int) -> None:
        super().__init__(count)
        self._masking = masking
        self._seed = seed

    def sample(self, index: int, epoch: int) -> Sample:
        random = np.random.default_rng((self._seed, epoch, index))
        ordinary, budget = self._masking.vocabulary.ordinary, self._masking.length - SPECIAL_IN_PAIR
        tokens = ordinary[random.integers(len(ordinary), size=budget)]
        return self._masking.sample(tokens[: budget // 2], tokens[budget // 2 :], int(random.integers(2)), random)


@lru_cache(maxsize=2)  # of the blocks of shards, and of the rows of one
def shuffled(count: int, *seed: int) -> Ints:
    """The indices 0 .. count - 1 in an order drawn from `seed`: int64 [count]."""
    return np.random.default_rng(seed).permutation(count)


def check_shape(length: int, slots: int | None, probability: float = MLM_PROBABILITY) -> int:
    """Prediction slots of a sequence: those given, or `probability` of its tokens.

    Raises:
        VPipeConfigError: the sequence is too short, or too short for so many predictions.
    """
    if length < SHORTEST_SEQUENCE:
        raise VPipeConfigError(f"--max_seq_length {length}: must be at least {SHORTEST_SEQUENCE}")
    most = length - SPECIAL_IN_PAIR
    slots = min(most, int(np.ceil(round(probability * length, 6)))) if slots is None else slots
    if slots > most:
        raise VPipeConfigError(
            f"--max_predictions_per_seq {slots}: at most --max_seq_length - {SPECIAL_IN_PAIR} = {most} tokens of a"
            " sequence can be predicted"
        )
    return slots


def digest_of(parts: Iterable[Any]) -> str:
    """Short name of some values."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _padded(values: Ints, length: int, filler: int = 0) -> Ints:
    padded = np.full(length, filler, dtype=np.int64)
    padded[: len(values)] = values
    return padded
