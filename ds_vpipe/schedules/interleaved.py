"""The interleaved 1F1B order: several parts of the model on every rank, as pure data.

With ``v`` parts on each of ``K`` ranks, rank ``i`` holds parts ``i, i+K, i+2K, ...``. Micro-batches go through the
model in groups of K: each rank runs a group through its first part, then through its second, and so on, so that
it can go on with the next part when the group comes round from the last rank. Filling the pipeline takes K-1
passes through parts instead of K-1 passes through stages, which are ``v`` times as long. Four micro-batches through
two ranks with two parts each (forward passes of one batch, then the whole order of a rank)::

    rank 0, parts 0 and 2   0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    rank 1, parts 1 and 3   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Every batch drains. A number of micro-batches that is no multiple of K is split into groups of at least K, as even
as possible; fewer than K are one group.

Source: section 2.2 of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), for multiples of K.
"""

from collections.abc import Iterator

from ds_vpipe.schedules.actions import Action, Kind


def group_sizes(num_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Sizes of the groups in which a batch goes through the parts. They differ by one at most."""
    rounds = max(1, micro_batches // num_stages)
    size, rest = divmod(micro_batches, rounds)
    return tuple(size + (group < rest) for group in range(rounds))


def warm_up(rank: int, num_stages: int, micro_batches: int, virtual_stages: int) -> int:
    """Forward passes through parts that ``rank`` runs ahead of its backward passes.

    A group has to pass all parts before the last one but one group, and each rank before the last adds two passes:
    one for its micro-batch on the way there, one for its gradient on the way back.
    """
    return 2 * (num_stages - 1 - rank) + (virtual_stages - 1) * group_sizes(num_stages, micro_batches)[0]


def interleaved_actions(
    batch: int, rank: int, num_stages: int, micro_batches: int, virtual_stages: int
) -> Iterator[Action]:
    """What ``rank`` computes in one batch: passes through its parts, and one update.

    It begins and ends with nothing in flight.
    """
    forward, backward = [], []
    start = batch * micro_batches
    for size in group_sizes(num_stages, micro_batches):
        for chunk in range(virtual_stages):
            group, back = range(start, start + size), virtual_stages - 1 - chunk
            forward += [Action(Kind.FORWARD, index, rank + chunk * num_stages) for index in group]
            backward += [Action(Kind.BACKWARD, index, rank + back * num_stages) for index in group]
        start += size
    ahead = min(len(forward), warm_up(rank, num_stages, micro_batches, virtual_stages))
    yield from forward[:ahead]
    for position, action in enumerate(backward, ahead):
        yield from forward[position : position + 1]
        yield action
    yield Action(Kind.REDUCE, batch)
    yield Action(Kind.STEP, batch)
