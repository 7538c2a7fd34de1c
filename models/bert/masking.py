"""Samples of masked-language modelling: tokens to predict, chosen one by one or by whole words.

After Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", appendix A.1: 15 % of the tokens are
predicted, of which 80 % are replaced by [MASK], 10 % by a random token and 10 % kept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_vpipe.errors import VPipeConfigError

IGNORED_LABEL = -100
MLM_PROBABILITY = 0.15
SHORTEST_SEQUENCE = 8
SPECIAL_IN_PAIR = 3  # [CLS] a [SEP] b [SEP]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """Token numbers of a tokenizer.

    Attributes:
        size: number of tokens.
        pad: number of the padding token.
        cls: number of the token that begins a sequence.
        sep: number of the token that ends a segment.
        mask: number of the token that replaces predicted ones.
        ordinary: int64, numbers of all tokens that are not special, ascending.
        continues: bool [size], true for word pieces that continue a word; empty if unknown.
    """

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: Ints
    continues: NDArray[np.bool_]

    @classmethod
    def numbered(cls, size: int) -> "Vocabulary":
        """Vocabulary without text: `SPECIAL_TOKENS` first, every token a word."""
        ordinary = np.arange(len(SPECIAL_TOKENS), size)
        return cls(size, 0, 2, 3, 4, ordinary, np.zeros(size, dtype=bool))


@dataclass(frozen=True)
class Sample:
    """One sequence of length S with P prediction slots.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S], 0 for the first segment and 1 for the second.
        padding_mask: bool [S], true where there is a token.
        masked_positions: int64 [P], 0 in unused slots.
        masked_lm_labels: int64 [P], `IGNORED_LABEL` in unused slots; at least one slot is used.
        next_sentence_label: 0 if the second segment continues the first, 1 if it is random.
    """

    input_ids: Ints
    token_type_ids: Ints
    padding_mask: NDArray[np.bool_]
    masked_positions: Ints
    masked_lm_labels: Ints
    next_sentence_label: int


@dataclass(frozen=True)
class Masking:
    """Rule that turns two segments into a sample.

    Attributes:
        vocabulary: of the tokens.
        length: S, tokens of a sample, special ones included.
        slots: P, most tokens of a sample that are predicted.
        probability: share of the tokens that are predicted.
        whole_words: whether the pieces of a word are predicted together.
    """

    vocabulary: Vocabulary
    length: int
    slots: int
    probability: float = MLM_PROBABILITY
    whole_words: bool = False

    def sample(self, first: Ints, second: Ints, next_sentence_label: int, random: np.random.Generator) -> Sample:
        """[CLS] first [SEP] second [SEP], masked and padded; the segments fit into the length."""
        vocabulary = self.vocabulary
        tokens = np.concatenate([[vocabulary.cls], first, [vocabulary.sep], second, [vocabulary.sep]]).astype(np.int64)
        used = len(tokens)
        candidates = np.concatenate([np.arange(1, len(first) + 1), np.arange(len(first) + 2, used - 1)])
        places = np.arange(self.length)
        positions = self._positions(tokens, candidates, random)
        count = len(positions)
        fate = random.random(count)
        other = vocabulary.ordinary[random.integers(len(vocabulary.ordinary), size=count)]
        input_ids = _padded(tokens, self.length, vocabulary.pad)
        input_ids[positions] = np.where(fate < 0.8, vocabulary.mask, np.where(fate < 0.9, other, tokens[positions]))
        return Sample(
            input_ids,
            ((places > len(first) + 1) & (places < used)).astype(np.int64),
            places < used,
            _padded(positions, self.slots, 0),
            _padded(tokens[positions], self.slots, IGNORED_LABEL),
            next_sentence_label,
        )

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


class RandomSamples:
    """Sequences of uniformly random tokens, for measuring speed.

    Args:
        count: number of samples.
        masking: of the samples.
        seed: of everything random.
    """

    def __init__(self, count: int, masking: Masking, seed: int) -> None:
        self._count = count
        self._masking = masking
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample `index` as seen in `epoch`."""
        random = np.random.default_rng((self._seed, epoch, index))
        ordinary, budget = self._masking.vocabulary.ordinary, self._masking.length - SPECIAL_IN_PAIR
        tokens = ordinary[random.integers(len(ordinary), size=budget)]
        return self._masking.sample(tokens[: budget // 2], tokens[budget // 2 :], int(random.integers(2)), random)

    def order(self, seed: int, epoch: int) -> Ints:
        """Order of an epoch: every index once."""
        return shuffled(len(self), seed, epoch)


def shuffled(count: int, seed: int, epoch: int) -> Ints:
    """The indices 0 .. count - 1 in an order drawn for the epoch: int64 [count]."""
    return np.random.default_rng((seed, epoch)).permutation(count)


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


def _padded(values: Ints, length: int, filler: int) -> Ints:
    padded = np.full(length, filler, dtype=np.int64)
    padded[: len(values)] = values
    return padded
