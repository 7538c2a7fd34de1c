"""Where micro-batches come from: the iterators that the user passes to ``train_batch()``.

The first stage reads ahead of the last by the pipeline's depth. Inputs and labels stay together because every
activation carries the number of the call whose iterator its micro-batch was read from, and the last stage takes the
label from the iterator that it was given in that same call, by the ``batch_fn`` of that call. With the last label of a
batch it also reads as many as the first stage has read by then, since a loader may go by what the script does between
two calls. With a ``batch_fn``, whose items may be anything, it reads one when it needs one.

An iterator may refill its buffers when it is asked again, so what is kept is a copy. A rank may have no
iterator: with tensor slices one rank of a slice reads, and ``batch_fn`` makes of None what that one sends.
"""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.errors import VPipeError

Item = Any  # what an iterator gives: (inputs, labels), or what batch_fn makes that of
BatchFn = Callable[[Item], Item]

_COMPARED = 1024  # elements of a tensor of labels
_KEPT = 256  # functions of calls: more than the stages can be apart
NO_DATA: Iterator[Item] = itertools.repeat(None)
"""Iterator of a rank that has none, for ``batch_fn``."""


class MicroBatch(NamedTuple):
    """A stage's own copies of what it uses of an item."""

    inputs: Any  # None on stages that use none
    labels: Any  # likewise
    labels_sum: int  # checksum of the item's labels, also where they are not used; 0 if there is none


@dataclass(eq=False)
class EndOfData(Exception):  # noqa: N818 - no error: like StopIteration
    """The first stage has no more micro-batches, so the rest of the current batch is planned anew."""

    limit: int  # no micro-batch from here on belongs to a complete batch
    read: int  # the first stage has sent micro-batches up to here all the same
    call: int  # number of the train_batch() call in which the first stage found out
    unlabelled: int = 0  # micro-batches that the first stage has read and sent to nobody
    asked: bool = True  # the first stage has asked its iterator for one more, and the last one has yet to do the same


class MicroBatchFeed:
    """Reader of items, one per micro-batch, from the iterators of successive ``train_batch()`` calls.

    Args:
        copies: bring micro-batches to the stage's accelerator.
        inputs: whether the stage uses a micro-batch's inputs.
        labels: likewise.
        all_have: whether all ranks of the stage pass True. Of a tensor slice one may read for all, and what the others
            have of its micro-batches goes with its iterator.
    """

    def __init__(
        self, copies: DeviceCopies | None, *, inputs: bool, labels: bool, all_have: Callable[[bool], bool] = bool
    ) -> None:
        self._copies, self._uses, self.all_have = copies, (inputs, labels), all_have
        self.call = -1  # number of the current train_batch() call, from 0
        self._iterators: dict[int, Iterator[Item]] = {}  # by the first call that used each
        self._batch_fns: dict[int, BatchFn | None] = {-1: None}  # likewise
        self._ended: set[int] = set()  # iterators whose end was met ahead, of which the next read() tells
        self._read_ahead: defaultdict[int, deque[Item]] = defaultdict(deque)  # read from an iterator, but not used yet
        self._in_front: deque[tuple[int, MicroBatch | None]] = deque()  # to be admitted before others are read
        self.calls_admitted_again: list[int] = []  # calls in which the first stage has read what it admits again
        # After a checkpoint was loaded: micro-batches in front are dropped unless the next call passes this iterator.
        self._iterator_of_front: Iterator[Item] | None = None

    def next_call(self, iterator: Iterator[Item] | None, batch_fn: BatchFn | None = None) -> None:
        """The next ``train_batch()`` call begins; it reads from ``iterator`` (None: nothing to read here)."""
        self.call += 1
        if self._batch_fns[max(self._batch_fns)] is not batch_fn:
            self._batch_fns[self.call] = batch_fn
            for number in sorted(self._batch_fns)[:-_KEPT]:  # a script may make another one for every call
                del self._batch_fns[number]
        if self._iterator_of_front is not None and not self.all_have(iterator is self._iterator_of_front):
            self._in_front.clear()
            self.calls_admitted_again = []
        self._iterator_of_front = None
        if iterator is None:
            return
        if self._iterators.get(max(self._iterators, default=0)) is not iterator:
            self._iterators[self.call] = iterator

    def reads(self, iterator: Iterator[Item] | None) -> bool:
        """Whether micro-batches of training come from ``iterator``."""
        return any(iterator is known for known in self._iterators.values())

    def forget_before(self, call: int) -> None:
        """No micro-batch that was read before ``call`` will be asked for again."""
        for number in [n for n in self._iterators if n < (self._source(call) or 0)]:
            del self._iterators[number]
            self._read_ahead.pop(number, None)
            self._ended.discard(number)

    def read(self, call: int) -> Item:
        """The next item of the iterator that was current in ``call``.

        Raises:
            StopIteration: it has ended.
            VPipeError: there was no iterator.
        """
        source = self._source(call)
        if source is None:
            raise VPipeError(
                "train_batch(data_iter=None) on a stage that reads data: pass an iterator of (inputs, labels), or "
                "training_data to initialize(), on the first and last stage; None is for ranks of a tensor slice whose "
                "data come from a batch_fn, given to set_batch_fn()"
            )
        if self._read_ahead[source]:
            return self._read_ahead[source].popleft()
        if source in self._ended:
            self._ended.remove(source)
            raise StopIteration
        return next(self._iterators[source])

    def batch_fn(self, call: int) -> BatchFn | None:
        """The function that was current in ``call``."""
        earlier = [number for number in self._batch_fns if number <= call]
        return self._batch_fns[max(earlier, default=min(self._batch_fns))]

    @property
    def has_batch_fn(self) -> bool:
        """Whether a function makes micro-batches of items, maybe together with other ranks."""
        return any(self._batch_fns.values())

    def take(self, item: Item, batch_fn: BatchFn | None) -> MicroBatch:
        """This stage's own copies of what it uses of an item; ``batch_fn`` may exchange data with the slice's ranks.

        Raises:
            VPipeError: it is no pair, or ``batch_fn`` raised StopIteration.
        """
        if batch_fn is not None:
            try:
                item = batch_fn(item)
            except StopIteration as error:
                raise VPipeError("batch_fn raised StopIteration") from error
        if item is None:
            raise VPipeError(
                "micro-batch: got None, allowed is (inputs, labels); pass an iterator of those, or let the function "
                "given to set_batch_fn() return them for None"
            )
        try:
            used = [item[at] if used else None for at, used in enumerate(self._uses)]
        except (TypeError, LookupError) as error:
            given = type(item).__name__
            raise VPipeError(
                f"micro-batch: got {given}, allowed is (inputs, labels); let the iterator return pairs"
            ) from error
        inputs, labels = (own_copy(part, self._copies) for part in used)
        return MicroBatch(inputs, labels, _sum_of_labels(item) if batch_fn is None else 0)

    def put_in_front(self, items: Iterable[tuple[int, MicroBatch | None]]) -> None:
        """Put ``(call, micro-batch)`` pairs that were taken before all that is to be read; None is a data end."""
        self._in_front.extendleft(reversed(list(items)))

    def next_in_front(self) -> tuple[int, MicroBatch | None] | None:
        """The next of those pairs, or None if there are none."""
        return self._in_front.popleft() if self._in_front else None

    def calls_in_front(self) -> list[int]:
        """Calls in which those pairs were read."""
        return [call for call, _ in self._in_front]

    def catch_up(self, calls: Iterable[int]) -> None:
        """Ask every iterator as often as the first stage has; ``calls`` has the call of each micro-batch.

        So the iterators of the two stages are at the same position, even if these micro-batches are then dropped.
        """
        for source, times in Counter(self._source(call) for call in calls).items():
            while source is not None and len(self._read_ahead[source]) < times:
                if source in self._ended:
                    return  # the first stage has read nothing after that
                try:
                    self._read_ahead[source].append(self.used_copy(next(self._iterators[source])))
                except StopIteration:
                    self._ended.add(source)

    def used_copy(self, item: Item) -> Item:
        """A copy of what the stage will use of an item."""
        if not self.has_batch_fn:
            with suppress(TypeError, LookupError):  # no pair, of which the script is told when it is taken
                item = tuple(item[at] if used else None for at, used in enumerate(self._uses))
        return own_copy(item)

    def start_over(self) -> None:
        """Training goes on from a checkpoint: what was read ahead counts only if the same iterator is used on."""
        if self._in_front or self.calls_admitted_again:
            self._iterator_of_front = self._iterators.get(self._source(self.call) or 0)

    def give_back(self, call: int, item: Item) -> None:
        """Undo the last :meth:`read` of ``call``."""
        source = self._source(call)
        if source is not None:
            self._read_ahead[source].appendleft(own_copy(item))

    def repeat_end(self, call: int) -> None:
        """Let the next :meth:`read` of ``call``'s iterator report its end once more, without asking it.

        An iterator that starts over after its end would otherwise hide an end that was met while reading ahead.
        """
        source = self._source(call)
        if source is not None:
            self._ended.add(source)

    def has_ended(self, call: int) -> bool:
        """Whether :meth:`repeat_end` answers the next :meth:`read` of ``call``."""
        return self._source(call) in self._ended

    def read_past_end(self, call: int) -> None:
        """Ask the iterator of ``call`` for one more item, as the first stage has, which met its end.

        An iterator may start over after that; asking keeps the one here at the same position. One that
        has more to give loses nothing.
        """
        source = self._source(call)
        if source is None or self._read_ahead[source]:
            return
        with suppress(StopIteration):
            self._read_ahead[source].append(own_copy(self.read(call)))

    def _source(self, call: int) -> int | None:
        return max((number for number in self._iterators if number <= call), default=None)


def _sum_of_labels(item: Item) -> int:
    """Checksum of the beginnings of all plain tensors among the labels."""
    total, labels = 0, item[1] if isinstance(item, (tuple, list)) and len(item) == 2 else None
    for leaf in tree_leaves(labels):
        plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_quantized
        if plain and leaf.device.type == "cpu" and not leaf.is_nested:
            begin = leaf.detach()
            if begin.numel() > _COMPARED and begin.dim():  # else it may be copied whole
                begin = begin[: 1 + _COMPARED * len(begin) // begin.numel()]
            begin = begin.flatten()[:_COMPARED].contiguous().resolve_conj().resolve_neg()
            total = crc32(begin.view(torch.uint8).numpy().tobytes(), total)
    return total


def or_no_data(iterator: Iterator[Item] | None, batch_fn: Callable[..., Any] | None) -> Iterator[Item] | None:
    """An iterator, also where the script gives none but a ``batch_fn`` that makes micro-batches of None."""
    if iterator is not None and not hasattr(iterator, "__next__"):
        # Such as a list, of which every call would read the first micro-batches.
        given, fix = type(iterator).__name__, "pass iter(...) of it, the same one in every call"
        raise VPipeError(f"data_iter: got {given}, allowed: an iterator; {fix}")
    return NO_DATA if iterator is None and batch_fn is not None else iterator


def own_copy(tree: Any, copies: DeviceCopies | None = None) -> Any:
    """A tree whose tensors and NumPy arrays nobody else writes into; page-locked if ``copies`` will read them."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if copies is not None and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            return copies.host_copy(leaf)
        return leaf.clone()

    return copied(tree) if isinstance(tree, (torch.Tensor, NoneType)) else tree_map(copied, tree)  # which takes longer


def to_device(value: Any, copies: DeviceCopies | None, *, copy: bool = False) -> Any:
    """A micro-batch's inputs where the stage computes: tensors in tuples or lists become tensors in tuples.

    With ``copy`` they stay what they are, whatever layers do in place.

    Raises:
        VPipeError: the inputs hold something else.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if copies is not None and value.device.type == "cpu":
            return copies.to_device(value)
        return value.to("cpu" if copies is None else copies.accelerator.device, copy=copy)
    if isinstance(value, (tuple, list)):
        return tuple(to_device(item, copies, copy=copy) for item in value)
    raise VPipeError(
        f"micro-batch: got {type(value).__name__} where tensors, None and tuples or lists of them are allowed; "
        f"let the iterator return (inputs, labels) made of those"
    )


def labels_to_device(value: Any, copies: DeviceCopies | None) -> Any:
    """Like :func:`to_device` for what only the loss function sees: whatever is no tensor stays what it is."""
    if isinstance(value, (tuple, list)):
        return tuple(labels_to_device(item, copies) for item in value)
    return to_device(value, copies) if isinstance(value, torch.Tensor) else value
