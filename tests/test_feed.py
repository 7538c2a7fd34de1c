"""Inputs and labels from the iterators of successive calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_vpipe.engine.feed import MicroBatchFeed, to_device
from ds_vpipe.errors import VPipeError

CPU = torch.device("cpu")


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
    feed = MicroBatchFeed()
    for iterator in iterators:
        feed.next_call(iterator)
    return feed


def test_calls_are_numbered_from_zero() -> None:
    feed = MicroBatchFeed()
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


def test_post_process_once_for_each_item() -> None:
    seen: list[str] = []
    feed = feed_of(iter("ab"))
    feed.post_process = lambda item: seen.append(item) or item.upper()  # type: ignore[func-returns-value]
    item = feed.read(0)
    assert item == "A"
    feed.give_back(0, item)
    assert [feed.read(0), feed.read(0)] == ["A", "B"]
    assert seen == ["a", "b"]


def test_give_back() -> None:
    feed = feed_of(iter("abc"), iter("xyz"))
    item = feed.read(0)
    feed.give_back(0, item)
    assert [feed.read(call) for call in (1, 0, 0)] == ["x", "a", "b"]


def test_give_back_falsy_items() -> None:
    feed = feed_of(iter([None, 0, 1]))
    feed.give_back(0, feed.read(0))
    assert [feed.read(0), feed.read(0), feed.read(0)] == [None, 0, 1]


def test_expect_end_takes_the_end_of_a_restarting_iterator() -> None:
    iterator = Restarting(2)
    feed = feed_of(iterator)
    assert [feed.read(0), feed.read(0)] == [0, 1]
    feed.expect_end(0)
    feed.next_call(iterator)
    assert [feed.read(1), feed.read(1)] == [0, 1]
    with pytest.raises(StopIteration):
        feed.read(1)


def test_expect_end_loses_nothing_of_an_iterator_that_goes_on() -> None:
    feed = feed_of(iter("abc"))
    assert feed.read(0) == "a"
    feed.expect_end(0)
    feed.expect_end(0)
    assert [feed.read(0), feed.read(0)] == ["b", "c"]
    MicroBatchFeed().expect_end(0)


def test_end_again_reports_an_end_that_was_met_while_reading_ahead() -> None:
    iterator = Restarting(2)
    feed = feed_of(iterator)
    assert [feed.read(0), feed.read(0)] == [0, 1]
    with pytest.raises(StopIteration):
        feed.read(0)
    feed.end_again(0)
    feed.next_call(iterator)
    with pytest.raises(StopIteration):
        feed.read(1)
    assert [feed.read(1), feed.read(1)] == [0, 1]


def test_end_again_concerns_one_iterator() -> None:
    feed = feed_of(iter("a"), iter("x"))
    feed.end_again(0)
    assert feed.read(1) == "x"
    with pytest.raises(StopIteration):
        feed.read(0)
    assert feed.read(0) == "a"
    feed.end_again(0)
    feed.forget_before(1)
    assert feed._ended == set()
    MicroBatchFeed().end_again(3)


def test_forget_before_drops_iterators_and_what_was_pushed_back() -> None:
    feed = feed_of(iter("abc"), iter("xyz"), None, iter("123"))
    feed.give_back(0, feed.read(0))
    feed.forget_before(2)  # call 2 reads from the iterator of call 1
    assert sorted(feed._iterators) == [1, 3]
    assert feed._returned == {}
    assert [feed.read(2), feed.read(3)] == ["x", "1"]
    feed.forget_before(3)
    assert sorted(feed._iterators) == [3]
    MicroBatchFeed().forget_before(5)


def test_no_iterator_on_a_stage_that_reads() -> None:
    with pytest.raises(VPipeError, match=r"^train_batch\(data_iter=None\) on a stage that reads data: pass") as error:
        feed_of(None).read(0)
    assert "\n" not in str(error.value)


def test_to_device_copies() -> None:
    mine = torch.zeros(3)
    moved = to_device((mine, [mine[1:], None]), CPU)
    assert isinstance(moved, tuple)
    assert isinstance(moved[1], tuple)
    assert moved[1][1] is None
    moved[0].add_(1)
    moved[1][0].add_(1)
    assert torch.equal(mine, torch.zeros(3))
    assert to_device(None, CPU) is None


def test_to_device_takes_no_graph_along() -> None:
    weight = torch.ones(3, requires_grad=True)
    moved = to_device(weight * 2, CPU)
    assert moved.is_leaf
    assert not moved.requires_grad


@pytest.mark.parametrize(("batch", "name"), [({"a": torch.zeros(1)}, "dict"), ((torch.zeros(1), 3), "int")])
def test_to_device_refuses(batch: Any, name: str) -> None:
    with pytest.raises(VPipeError, match=f"^micro-batch: got {name} where tensors, None and tuples or lists") as error:
        to_device(batch, CPU)
    assert "\n" not in str(error.value)
