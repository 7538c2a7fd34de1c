"""Partitions: consecutive layers per stage."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import index

from ds_vpipe.errors import Refusal, show


def bounds(counts: Sequence[int]) -> list[int]:
    """The K+1 boundaries of K stages: stage s holds layers ``bounds[s]`` to ``bounds[s + 1] - 1``."""
    return [0, *accumulate(counts)]


def uniform_partition(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by at most one. Larger ones come first, as in DeepSpeed.

    Raises:
        VPipeConfigError: there are fewer layers than stages.
    """
    check_stage_count(num_layers, num_stages)
    size, larger = divmod(num_layers, num_stages)
    return tuple(size + (stage < larger) for stage in range(num_stages))


def balanced_partition(weights: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one, whose heaviest stage is as light as possible.

    Among all such partitions it takes one with the smallest sum of squared stage weights, and among those one
    with the smallest sum of squared layer counts, so that stages which do not set the pace are even too.

    The first step is the linear partition problem, solved by bisection over the bottleneck with a greedy test
    (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004): O(n log S) for n
    layers of total weight S. The second is a dynamic program over the last cut: O(K n^2).

    Raises:
        VPipeConfigError: there are fewer layers than stages.
    """
    check_stage_count(len(weights), num_stages)
    sums, limit = bounds(weights), _bottleneck(weights, num_stages)
    # By number of layers on the stages so far: squared weights, squared counts, counts from the last stage on.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(num_stages):
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (weights_squared, counts_squared, counts) in best.items():
            for end in range(start + 1, bisect_right(sums, sums[start] + limit)):
                weight, count = sums[end] - sums[start], end - start
                found = weights_squared + weight**2, counts_squared + count**2, (count, *counts)
                extended[end] = min(found, extended.get(end, found))
        best = extended
    return best[len(weights)][2][::-1]


def resolve_partition(
    method: str | Sequence[int],
    layer_weights: Callable[[], Sequence[int]],
    layer_names: Sequence[str],
    num_stages: int,
) -> tuple[int, ...]:
    """Layers per stage by a value of ``vpipe.partition``.

    Args:
        method: ``"uniform"``, ``"parameters"``, ``"type:REGEX"``, or the counts themselves.
        layer_weights: parameters of each layer; called for ``"parameters"`` only, as counting builds the layers.
        layer_names: type name of each layer. REGEX is searched in them regardless of case, as in DeepSpeed, and
            the number of matching layers per stage is balanced.
        num_stages: K.

    Raises:
        VPipeConfigError: nothing matches REGEX, the counts do not fit, or there are fewer layers than stages.
    """
    if not isinstance(method, str):
        return checked_counts(method, len(layer_names), num_stages)
    if method == "uniform":
        return uniform_partition(len(layer_names), num_stages)
    if method == "parameters":
        return balanced_partition(layer_weights(), num_stages)
    kind, _, pattern = method.partition(":")
    if kind != "type" or not pattern:
        allowed = '"uniform", "parameters", "type:REGEX" or layer counts'
        raise Refusal("vpipe.partition", method, allowed, "use one of these").error()
    search = re.compile(pattern, re.IGNORECASE).search
    matches = [int(search(name) is not None) for name in layer_names]
    if not any(matches):
        allowed = f"a REGEX found in one of the layer types {show(sorted(set(layer_names)))}"
        reason = "no layer type matches"
        raise Refusal("vpipe.partition", method, allowed, "correct the regular expression", reason).error()
    return balanced_partition(matches, num_stages)


def check_stage_count(num_layers: int, num_stages: int) -> None:
    """Check of the number of stages against that of layers.

    Raises:
        VPipeConfigError: there are more stages than layers.
    """
    if num_layers < num_stages:
        key, reason = "number of stages, virtual ones counted", f"the model has {num_layers} layers"
        raise Refusal(key, num_stages, f"1 to {num_layers}", "use fewer stages", reason).error()


def checked_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as given.

    Raises:
        VPipeConfigError: they are not one count >= 1 per stage, or do not sum to the number of layers.
    """
    allowed = f"{num_stages} counts >= 1 that sum to {num_layers}"
    try:
        counts = tuple(map(index, counts))
    except TypeError:
        raise Refusal("vpipe.partition", counts, allowed, "write whole numbers").error() from None
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        reason = f"these are {len(counts)} counts that sum to {sum(counts)}"
        missing = num_layers - sum(counts)
        fix = f"{'add' if missing > 0 else 'remove'} {abs(missing)}" if missing else "correct the counts"
        raise Refusal("vpipe.partition", list(counts), allowed, fix, reason).error()
    return counts


def _bottleneck(costs: Sequence[int], num_stages: int) -> int:
    """Smallest limit for which ``costs`` fit on ``num_stages`` stages in order."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        stages, load = 1, 0
        for cost in costs:
            load += cost
            if load > limit:
                stages, load = stages + 1, cost
        if stages <= num_stages:
            high = limit
        else:
            low = limit + 1
    return low
