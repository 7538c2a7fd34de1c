"""Inputs and labels from the iterators of successive calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ds_vpipe.engine.execution.data import NO_DATA, MicroBatchFeed, or_no_data, own_copy, to_device
from ds_vpipe.errors import VPipeError


class Restarting:
    """Ends after each epoch and starts over when it is asked again."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == self.length:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position - 1


def feed_of(*iterators: Any) -> MicroBatchFeed:
    feed = MicroBatchFeed(None, inputs=True, labels=True)
    for iterator in iterators:
        feed.next_call(iterator)
    return feed


def test_calls_are_numbered_from_zero() -> None:
    feed = MicroBatchFeed(None, inputs=True, labels=True)
    for number in range(3):
        feed.next_call(iter(()) if number != 1 else None)
        assert feed.call == number


def test_one_iterator_over_many_calls() -> None:
    iterator = iter(range(9))
    feed = feed_of(iterator, iterator, iterator)
    assert [feed.read(call) for call in (0, 0, 1, 2, 1)] == [0, 1, 2, 3, 4]


def test_labels_come_from_the_iterator_of_the_call_that_read_the_inputs() -> None:
    feed = feed_of(iter("abc"), iter("xyz"), iter("123"))
    assert [feed.read(call) for call in (0, 1, 0, 2, 1)] == ["a", "x", "b", "1", "y"]


def test_a_call_without_an_iterator_reads_from_the_one_before() -> None:
    feed = feed_of(iter("ab"), None, iter("xy"))
    assert [feed.read(call) for call in (1, 0, 2)] == ["a", "b", "x"]


def test_the_same_iterator_after_another_one() -> None:
    first, second = iter("abc"), iter("xyz")
    feed = feed_of(first, second, first)
    assert [feed.read(call) for call in (0, 1, 2, 0)] == ["a", "x", "b", "c"]


def test_end_of_an_iterator() -> None:
    feed = feed_of(iter("a"), iter("x"))
    assert feed.read(0) == "a"
    with pytest.raises(StopIteration):
        feed.read(0)
    assert feed.read(1) == "x"


def test_batch_fn_makes_the_micro_batch() -> None:
    feed = feed_of(iter("ab"))
    taken = [feed.take(feed.read(0), lambda item: (item.upper(), item)) for _ in range(2)]
    assert taken == [("A", "a", 0), ("B", "b", 0)]


def test_batch_fn_without_an_iterator() -> None:
    feed = feed_of(NO_DATA, NO_DATA)
    assert [feed.read(call) for call in (0, 1, 1)] == [None, None, None]
    assert feed.take(feed.read(1), lambda item: (item, 5)) == (None, 5, 0)
    with pytest.raises(VPipeError, match=r"^micro-batch: got None, allowed is \(inputs, labels\); pass an"):
        feed.take(None, lambda item: item)


@pytest.mark.parametrize(("item", "name"), [({"x": 1}, "dict"), (3, "int"), ((1,), "tuple")])
def test_items_that_are_no_pairs(item: Any, name: str) -> None:
    words = rf"^micro-batch: got {name}, allowed is \(inputs, labels\); let the iterator return pairs$"
    with pytest.raises(VPipeError, match=words):
        feed_of(iter([item])).take(item, None)


def test_lists_are_no_iterators() -> None:
    for given in (None, iter([]), NO_DATA):
        assert or_no_data(given, None) is given
    with pytest.raises(VPipeError, match=r"^data_iter: got list, allowed: an iterator; pass iter\(\.\.\.\) of it"):
        or_no_data([1, 2], None)  # type: ignore[arg-type]


def ends_early(item: Any) -> Any:
    raise StopIteration


def test_batch_fn_does_not_end_the_data() -> None:
    with pytest.raises(VPipeError, match=r"^batch_fn raised StopIteration$"):
        feed_of(iter("a")).take("a", ends_early)


def test_what_is_taken_is_the_stages_own() -> None:
    buffers = torch.zeros(2), {"a": torch.zeros(2), "b": [np.zeros(2), "name"]}
    inputs, labels, _ = feed_of(None).take(buffers, None)
    buffers[0].fill_(1)
    buffers[1]["a"].fill_(1)
    buffers[1]["b"][0][:] = 1
    assert torch.equal(inputs, torch.zeros(2))
    assert torch.equal(labels["a"], torch.zeros(2))
    assert labels["b"][0].tolist() == [0, 0]
    assert labels["b"][1] == "name"
    last = MicroBatchFeed(None, inputs=False, labels=True).take(buffers, None)
    assert last[0] is None
    assert last[1]["a"].tolist() == [1, 1]


def test_sums_of_labels() -> None:
    feed = feed_of(None)
    first, *others = (
        feed.take((None, labels), None).labels_sum
        for labels in (
            torch.arange(3),
            [torch.arange(3), "name"],
            torch.tensor([[0, 9], [1, 9], [2, 9]])[:, 0],
            torch.arange(1, 4),
            None,
            3,
            torch.ones(2).to_sparse(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        )
    )
    assert [other == first for other in others] == [True, True] + [False] * 6
    assert others[3:] == [0] * 5
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    unusual = [torch.tensor(True), torch.zeros(0), conjugated, torch.ones(2).bfloat16()]
    assert feed.take((None, unusual), None).labels_sum != 0
    assert feed.take((None, unusual), lambda item: item).labels_sum == 0  # it may have drawn random numbers


def test_nothing_is_read_after_an_end() -> None:
    later = iter("bc")
    feed = feed_of(iter("a"), later)
    feed.catch_up([0, 0, 1])
    assert (feed.read(0), next(later)) == ("a", "b")
    feed.catch_up([0, 1])
    assert next(later) == "c"


class Refilled:
    """Item that is no tuple, and that its iterator fills again."""

    def __init__(self) -> None:
        self.values = torch.zeros(2)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.values[at]

    def __next__(self) -> Refilled:
        self.values += 1
        return self


def test_what_is_read_ahead_is_the_stages_own() -> None:
    feed = MicroBatchFeed(None, inputs=False, labels=True)
    feed.next_call(Refilled())  # type: ignore[arg-type]
    feed.catch_up([0, 0])
    assert [float(feed.take(feed.read(0), None).labels) for _ in range(2)] == [1, 2]


def test_what_is_read_ahead_is_whole_for_the_function_of_its_call() -> None:
    """The script may have taken it back since."""
    feed = MicroBatchFeed(None, inputs=False, labels=True)
    iterator = iter([(1, 2), (3, 4), (5, 6)])
    feed.next_call(iterator, batch_fn=lambda item: (None, sum(item)))
    feed.next_call(iterator)
    feed.catch_up([0, 0, 1])
    assert [feed.take(feed.read(call), feed.batch_fn(call)).labels for call in (0, 0, 1)] == [3, 7, 6]


@pytest.mark.parametrize("keep", ["give_back", "read_past_end"])
def test_what_is_pushed_back_is_the_stages_own(keep: str) -> None:
    buffer = torch.zeros(1)
    feed = feed_of(iter([buffer]))
    feed.give_back(0, feed.read(0)) if keep == "give_back" else feed.read_past_end(0)
    buffer.fill_(1)
    assert feed.read(0).item() == 0


def test_give_back() -> None:
    feed = feed_of(iter("abc"), iter("xyz"))
    item = feed.read(0)
    feed.give_back(0, item)
    assert [feed.read(call) for call in (1, 0, 0)] == ["x", "a", "b"]


def test_give_back_falsy_items() -> None:
    feed = feed_of(iter([None, 0, 1]))
    feed.give_back(0, feed.read(0))
    assert [feed.read(0), feed.read(0), feed.read(0)] == [None, 0, 1]


def test_read_past_end_takes_the_end_of_a_restarting_iterator() -> None:
    iterator = Restarting(2)
    feed = feed_of(iterator)
    assert [feed.read(0), feed.read(0)] == [0, 1]
    feed.read_past_end(0)
    feed.next_call(iterator)
    assert [feed.read(1), feed.read(1)] == [0, 1]
    with pytest.raises(StopIteration):
        feed.read(1)


def test_read_past_end_loses_nothing_of_an_iterator_that_goes_on() -> None:
    feed = feed_of(iter("abc"))
    assert feed.read(0) == "a"
    feed.read_past_end(0)
    feed.read_past_end(0)
    assert [feed.read(0), feed.read(0)] == ["b", "c"]
    feed_of().read_past_end(0)


def test_catch_up_reads_once_what_the_first_stage_has_read() -> None:
    iterator = Restarting(2)
    feed = feed_of(iterator, iter("xyz"))
    for _ in range(2):
        feed.catch_up([0, 0, 0, 1])
    assert [feed.read(0), feed.read(0), feed.read(1)] == [0, 1, "x"]
    feed.read_past_end(0)
    assert next(iterator) == 0, "the end was met in between, once"
    assert [feed.read(1), feed.read(1)] == ["y", "z"]


def test_repeat_end_reports_an_end_that_was_met_while_reading_ahead() -> None:
    iterator = Restarting(2)
    feed = feed_of(iterator)
    assert [feed.read(0), feed.read(0)] == [0, 1]
    with pytest.raises(StopIteration):
        feed.read(0)
    feed.repeat_end(0)
    feed.next_call(iterator)
    with pytest.raises(StopIteration):
        feed.read(1)
    assert [feed.read(1), feed.read(1)] == [0, 1]


def test_repeat_end_concerns_one_iterator() -> None:
    feed = feed_of(iter("a"), iter("x"))
    feed.repeat_end(0)
    assert feed.read(1) == "x"
    with pytest.raises(StopIteration):
        feed.read(0)
    assert feed.read(0) == "a"
    feed.repeat_end(0)
    feed.forget_before(1)
    assert feed._ended == set()
    feed_of().repeat_end(3)


def test_forget_before_drops_iterators_and_what_was_pushed_back() -> None:
    feed = feed_of(iter("abc"), iter("xyz"), None, iter("123"))
    feed.give_back(0, feed.read(0))
    feed.forget_before(2)  # call 2 reads from the iterator of call 1
    assert sorted(feed._iterators) == [1, 3]
    assert feed._read_ahead == {}
    assert [feed.read(2), feed.read(3)] == ["x", "1"]
    feed.forget_before(3)
    assert sorted(feed._iterators) == [3]
    feed_of().forget_before(5)


def test_no_iterator_on_a_stage_that_reads() -> None:
    with pytest.raises(VPipeError, match=r"^train_batch\(data_iter=None\) on a stage that reads data: pass") as error:
        feed_of(None).read(0)
    assert "\n" not in str(error.value)


def test_to_device_copies_what_is_kept() -> None:
    mine = torch.zeros(3)
    moved = to_device((mine, [mine[1:], None]), None, copy=True)
    assert isinstance(moved, tuple)
    assert isinstance(moved[1], tuple)
    assert moved[1][1] is None
    moved[0].add_(1)
    moved[1][0].add_(1)
    assert torch.equal(mine, torch.zeros(3))
    assert to_device(None, None) is None
    assert to_device(mine, None) is mine


def test_copies_take_no_graph_along() -> None:
    weight = torch.ones(3, requires_grad=True)
    copy = own_copy(weight * 2)
    assert copy.is_leaf
    assert not copy.requires_grad


@pytest.mark.parametrize(("batch", "name"), [({"a": torch.zeros(1)}, "dict"), ((torch.zeros(1), 3), "int")])
def test_to_device_refuses(batch: Any, name: str) -> None:
    with pytest.raises(VPipeError, match=f"^micro-batch: got {name} where tensors, None and tuples or lists") as error:
        to_device(batch, None)
    assert "\n" not in str(error.value)
