"""Pre-training samples: sentence pairs with dynamic masking, or random tokens.

Every sample is a pure function of (seed, epoch, index). The first pipeline stage needs its inputs and the last stage
its labels; both compute the whole sample for themselves, and nothing but activations crosses the network.

Pairs and masks follow Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", section 3.1 and
appendix A.1-A.2: half of the second segments are random; 15 % of the tokens are predicted, of which 80 % are replaced
by [MASK], 10 % by a random token and 10 % kept. The masks are drawn anew in every epoch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_vpipe.models.bert.sample import IGNORED_LABEL, Ints, Order, Sample, shuffled
from ds_vpipe.models.bert.vocabulary import SpecialTokens
from ds_vpipe.models.bert.wordpiece import TokenCorpus

MASKED_SHARE = 0.15
HELD_OUT_EVERY = 20  # every 20th document, 5 % of the corpus, is for validation
_SPECIAL_IN_PAIR = 3  # [CLS] a [SEP] b [SEP]


@dataclass(frozen=True)
class Spans:
    """What becomes a sample: n runs of sentences that just fill a sequence, in the order of their documents.

    Attributes:
        sentences: int64 [n, 2], where each begins and ends.
        documents: int64 [n], the document of each.
    """

    sentences: Ints
    documents: Ints


class PairSamples:
    """Sentence pairs out of some documents of a tokenised corpus.

    Each document is cut into spans of sentences that just fill a sequence; a span is one sample. It is split at a
    random sentence boundary (a span of one sentence: in its middle), and in half of the cases its second part is
    replaced by the beginning of a random sentence of another document.

    Args:
        corpus: the tokenised corpus.
        spans: of at least two documents; see `spans_of`.
        sequence_length: S, special tokens included.
        max_predictions: P, at most so many tokens of a sequence are predicted.
        seed: of everything random.
        masked_share: of the tokens, to be predicted.

    Raises:
        ValueError: fewer than two documents with text.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        spans: Spans,
        sequence_length: int,
        max_predictions: int,
        seed: int,
        masked_share: float = MASKED_SHARE,
    ) -> None:
        self._corpus = corpus
        self._masked_share = masked_share
        self._length = sequence_length
        self._budget = sequence_length - _SPECIAL_IN_PAIR
        self._max_predictions = max_predictions
        self._seed = seed
        self._ordinary = corpus.special.ordinary(corpus.vocab_size)
        self._spans, self._span_documents = spans.sentences, spans.documents
        if len(spans.documents) == 0 or spans.documents[0] == spans.documents[-1]:
            raise ValueError(
                "at least two documents with text are needed, because half of the pairs join two documents"
            )

    def __len__(self) -> int:
        return len(self._spans)

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample number `index` as it looks in `epoch`."""
        random = np.random.default_rng((self._seed, epoch, index))
        first, second, next_sentence_label = self._pair(index, random)
        first_length, second_length = _fit(len(first), len(second), self._budget)
        # The first segment loses its beginning and the second its end: what stays is what meets at the boundary.
        first, second = first[len(first) - first_length :], second[:second_length]
        special = self._corpus.special
        tokens = np.concatenate([[special.cls], first, [special.sep], second, [special.sep]]).astype(np.int64)
        segments = np.zeros(len(tokens), dtype=np.int64)
        segments[len(first) + 2 :] = 1
        candidates = np.flatnonzero((tokens != special.cls) & (tokens != special.sep))
        return _masked(
            tokens, segments, candidates, next_sentence_label, self._length, self._max_predictions,
            special, self._ordinary, random, self._masked_share,
        )  # fmt: skip

    def order(self, seed: int, epoch: int) -> Order:
        """The order in which an epoch takes the samples: each index once."""
        return shuffled(len(self), seed, epoch)

    def _pair(self, index: int, random: np.random.Generator) -> tuple[NDArray[np.uint16], NDArray[np.uint16], int]:
        start, stop = self._spans[index]
        starts, tokens = self._corpus.sentence_starts, self._corpus.tokens
        if stop - start > 1:
            cut = starts[random.integers(start + 1, stop)]
        else:
            cut = (starts[start] + starts[stop]) // 2
        first, second = tokens[starts[start] : cut], tokens[cut : starts[stop]]
        if random.random() < 0.5:
            return first, second, 0
        while True:
            other = int(random.integers(len(self._spans)))
            if self._span_documents[other] != self._span_documents[index]:
                break
        sentence = random.integers(*self._spans[other])
        return first, tokens[starts[sentence] : starts[sentence] + len(second)], 1


class RandomSamples:
    """Sequences of uniformly random tokens, for measuring speed without any text.

    Args:
        count: number of samples.
        vocab_size: tokens are drawn from 0 to this, special ones left out.
        sequence_length: S.
        max_predictions: P.
        seed: of everything random.
    """

    def __init__(self, count: int, vocab_size: int, sequence_length: int, max_predictions: int, seed: int) -> None:
        self._count = count
        self._special = SpecialTokens()
        self._ordinary = self._special.ordinary(vocab_size)
        self._length = sequence_length
        self._max_predictions = max_predictions
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample number `index` as it looks in `epoch`."""
        random = np.random.default_rng((self._seed, epoch, index))
        tokens = self._ordinary[random.integers(len(self._ordinary), size=self._length)]
        half = self._length // 2
        tokens[[0, half, -1]] = self._special.cls, self._special.sep, self._special.sep
        segments = (np.arange(self._length) > half).astype(np.int64)
        candidates = np.setdiff1d(np.arange(self._length), [0, half, self._length - 1])
        return _masked(
            tokens, segments, candidates, int(random.integers(2)), self._length, self._max_predictions,
            self._special, self._ordinary, random,
        )  # fmt: skip

    def order(self, seed: int, epoch: int) -> Order:
        """The order in which an epoch takes the samples: each index once."""
        return shuffled(len(self), seed, epoch)


def split_documents(corpus: TokenCorpus, every: int = HELD_OUT_EVERY) -> tuple[Ints, Ints]:
    """Training and held-out document numbers: every `every`-th document is held out."""
    numbers = np.arange(corpus.num_documents)
    held_out = numbers % every == every - 1
    return numbers[~held_out], numbers[held_out]


def spans_of(corpus: TokenCorpus, documents: Ints, sequence_length: int) -> Spans:
    """The documents cut into the shortest runs of sentences that fill a sequence, special tokens counted.

    Args:
        corpus: the tokenised corpus.
        documents: int64, the numbers of the documents to use, ascending.
        sequence_length: S, special tokens included.
    """
    budget = sequence_length - _SPECIAL_IN_PAIR
    spans: list[tuple[int, int]] = []
    owners: list[int] = []
    starts = np.asarray(corpus.sentence_starts)
    for document in documents.tolist():
        sentence, end = corpus.document_starts[document : document + 2].tolist()
        while sentence < end:
            stop = min(int(np.searchsorted(starts, starts[sentence] + budget)), end)
            if starts[stop] - starts[sentence] >= 2:  # a token for each segment
                spans.append((sentence, stop))
                owners.append(document)
            sentence = stop
    return Spans(np.array(spans, dtype=np.int64).reshape(-1, 2), np.array(owners, dtype=np.int64))


def _fit(first: int, second: int, budget: int) -> tuple[int, int]:
    """Lengths cut to `budget` in total, the longer segment first."""
    excess = max(0, first + second - budget)
    from_longer = min(excess, abs(first - second))
    rest = excess - from_longer
    if first > second:
        return first - from_longer - rest // 2, second - (rest - rest // 2)
    return first - rest // 2, second - from_longer - (rest - rest // 2)


def _masked(
    tokens: Ints, segments: Ints, candidates: Ints, next_sentence_label: int, length: int, max_predictions: int,
    special: SpecialTokens, ordinary: Ints, random: np.random.Generator, share: float = MASKED_SHARE,
) -> Sample:  # fmt: skip
    """Mask some candidates and pad everything to its full length."""
    count = min(max_predictions, max(1, round(share * len(candidates))))
    positions = np.sort(random.choice(candidates, size=count, replace=False))
    fate = random.random(count)
    replaced = np.where(fate < 0.8, special.mask, ordinary[random.integers(len(ordinary), size=count)])
    input_ids = np.full(length, special.pad, dtype=np.int64)
    input_ids[: len(tokens)] = tokens
    input_ids[positions] = np.where(fate < 0.9, replaced, tokens[positions])
    token_type_ids = np.zeros(length, dtype=np.int64)
    token_type_ids[: len(tokens)] = segments
    masked_positions = np.zeros(max_predictions, dtype=np.int64)
    masked_positions[:count] = positions
    labels = np.full(max_predictions, IGNORED_LABEL, dtype=np.int64)
    labels[:count] = tokens[positions]
    return Sample(
        input_ids, token_type_ids, np.arange(length) < len(tokens), masked_positions, labels, next_sentence_label
    )
