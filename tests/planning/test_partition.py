"""Layer counts per stage: known cases, and optimality against brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.partition import balanced_partition, bounds, resolve_partition, uniform_partition


def all_partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(end - start for start, end in pairwise(edges))


def stage_weights(weights: Sequence[int], counts: Sequence[int]) -> list[int]:
    edges = bounds(counts)
    return [sum(weights[start:end]) for start, end in pairwise(edges)]


def test_bounds() -> None:
    assert bounds([12, 13, 13, 11]) == [0, 12, 25, 38, 49]
    assert bounds([3]) == [0, 3]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (49, 4, (13, 12, 12, 12)), (3, 3, (1, 1, 1)), (5, 1, (5,))],
)
def test_uniform(num_layers: int, num_stages: int, counts: tuple[int, ...]) -> None:
    assert uniform_partition(num_layers, num_stages) == counts


@pytest.mark.parametrize(
    ("weights", "num_stages", "counts"),
    [
        ([1, 1, 1, 1], 2, (2, 2)),
        ([1] * 8, 3, (3, 3, 2)),
        ([10, 1, 1, 1, 1], 2, (1, 4)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, (5, 2, 2)),
        ([0, 0, 0, 0], 2, (2, 2)),
        ([0, 0, 9], 3, (1, 1, 1)),
        ([9, 1, 1, 1, 1, 1, 1], 3, (1, 3, 3)),
        ([1, 0, 0, 0, 0, 1], 2, (3, 3)),
    ],
)
def test_balanced(weights: list[int], num_stages: int, counts: tuple[int, ...]) -> None:
    assert balanced_partition(weights, num_stages) == counts


@given(
    weights=st.lists(st.integers(0, 20) | st.integers(0, 10**12), min_size=1, max_size=9),
    data=st.data(),
)
def test_balanced_is_optimal(weights: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    counts = balanced_partition(weights, num_stages)
    assert len(counts) == num_stages
    assert min(counts) >= 1
    assert sum(counts) == len(weights)
    best = min(max(stage_weights(weights, other)) for other in all_partitions(len(weights), num_stages))
    assert max(stage_weights(weights, counts)) == best


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_balanced_evens_out_the_other_stages(weights: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))

    def cost(counts: tuple[int, ...]) -> tuple[int, int, int]:
        loads = stage_weights(weights, counts)
        return max(loads), sum(load**2 for load in loads), sum(count**2 for count in counts)

    best = min(cost(other) for other in all_partitions(len(weights), num_stages))
    assert cost(balanced_partition(weights, num_stages)) == best


def test_balanced_handles_many_layers() -> None:
    counts = balanced_partition([1 + index % 7 for index in range(600)], 32)
    assert len(counts) == 32
    assert sum(counts) == 600


@pytest.mark.parametrize("partition", [lambda: uniform_partition(3, 4), lambda: balanced_partition([1, 1, 1], 4)])
def test_fewer_layers_than_stages(partition: object) -> None:
    with pytest.raises(VPipeConfigError, match="got 4; the model has 3 layers; allowed: 1 to 3"):
        partition()  # type: ignore[operator]


NAMES = ["Embedding", "BertBlock", "BertBlock", "BertBlock", "BertBlock", "Head"]


def never() -> list[int]:
    raise AssertionError("layers are counted for nothing")


def test_resolve_partition() -> None:
    assert resolve_partition("uniform", never, NAMES, 3) == (2, 2, 2)
    assert resolve_partition("parameters", lambda: [4, 1, 1, 1, 1, 4], NAMES, 3) == (1, 4, 1)
    assert resolve_partition("type:bertblock", never, NAMES, 2) == (3, 3)
    assert resolve_partition("type:(?:Embed|Head)", never, NAMES, 2) == (3, 3)
    assert resolve_partition((1, 5), never, NAMES, 2) == (1, 5)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("type:Conv", ['"type:Conv"', "no layer type matches", '"BertBlock", "Embedding", "Head"']),
        ("best", ['"best"', '"parameters"']),
        ((1, 4), ["[1, 4]", "sum to 5", "sum to 6"]),
        ((2, 2, 2), ["[2, 2, 2]", "3 counts", "2 counts"]),
        ((6, 0), ["[6, 0]", ">= 1"]),
    ],
)
def test_resolve_partition_refuses(method: str | tuple[int, ...], parts: list[str]) -> None:
    with pytest.raises(VPipeConfigError) as error:
        resolve_partition(method, never, NAMES, 2)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("vpipe.partition: got ")
    assert [part for part in parts if part not in message] == []
