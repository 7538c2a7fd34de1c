"""1F1B order of one stage, asynchronous or synchronous.

Stage ``s`` runs ``F(0) .. F(W-1)``, then for ``i = 0, 1, 2, ...`` the pair ``F(i+W), B(i)``, and after
the last backward pass of each batch of ``M`` micro-batches one update. ``W`` is the stage's warm-up
depth. With three stages, depths 2, 1, 0 and ``M = 1`` (updates are not drawn)::

    stage 0   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 1      F0 F1 B0 F2 B1 F3 B2 ...
    stage 2         F0 B0 F1 B1 F2 B2 ...

The order does not depend on timing. It depends on ``limit``, the first micro-batch that has no forward
pass. An asynchronous pipeline has no limit until its data end; a synchronous one has a limit at the end
of every batch, which makes it drain there. They differ in nothing else.

Source: the 1F1B order and weight stashing of PipeDream (Narayanan et al., SOSP 2019, sections 3.2 and
3.3), with gradient accumulation over M micro-batches as in PipeDream-2BW (ICML 2021).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ds_vpipe.schedules.actions import Action, Kind


def default_depths(num_stages: int) -> tuple[int, ...]:
    """Default warm-up depth of each stage, K-1-s: the least that keeps all busy if transfers cost nothing."""
    return tuple(num_stages - 1 - stage for stage in range(num_stages))


def version_used(micro_batch: int, depth: int, micro_batches: int, filled_from: int = 0) -> int:
    """Weight version of ``F(micro_batch)``: the stage's updates before that pass.

    ``depth`` is the stage's warm-up depth ``W``, or with vertical sync that of stage 0. ``filled_from`` is the first
    micro-batch that was admitted after the pipeline last drained.
    """
    return max(filled_from, micro_batch - depth) // micro_batches


def peer_delay(depth: int, depth_there: int, micro_batches: int) -> int:
    """Delay in updates of values that an earlier stage sends along.

    A later stage has them without waiting. When it, of depth ``W``, completes ``B(i)``, it has run ``F(i + W)``. The
    earlier one, of depth ``W'`` (``depth_there``), had completed ``B(i + W - W' - 1)`` before it sent that activation.
    """
    return -(-(depth_there - depth + 1) // micro_batches)


def updates_known(batch: int, delay: int, micro_batches: int, filled_from: int = 0) -> int:
    """Updates of an earlier stage that are known in update ``batch``.

    ``delay`` is the :func:`peer_delay` of the two stages. At ``filled_from``, the first micro-batch that was admitted
    after the pipeline last drained, all earlier updates were known.
    """
    return max(filled_from // micro_batches, batch + 1 - delay)


def update_delay(depth: int, micro_batches: int) -> int:
    """Updates by which a gradient is late at most, in a pipeline that runs undisturbed: ceil(W / M)."""
    return -(-depth // micro_batches)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Messages of a stage around its updates, besides activations and gradients."""

    owns_tied: bool = False  # other stages hold copies of weights that this stage updates
    has_copies: bool = False  # this stage holds copies of weights that another stage updates
    peers: bool = False  # every stage sends overflows and norms of its updates to the previous stage


def exchanges_by_rank(
    num_stages: int, tied: Iterable[Sequence[int]] = (), peers: bool = False
) -> tuple[Exchanges, ...]:
    """Messages of every stage around its updates. ``tied`` has the stages of each tied weight, the owner first."""
    owners = {owner for owner, *_ in tied}
    copies = {copy for _, *others in tied for copy in others}
    return tuple(Exchanges(stage in owners, stage in copies, peers) for stage in range(num_stages))


class Progress(NamedTuple):
    """Progress of one stage, in micro-batches since the start of training."""

    forwarded: int = 0  # forward passes run; the next one is F(forwarded)
    completed: int = 0  # backward passes run; the next one is B(completed)
    limit: int | None = None  # first micro-batch that has no forward pass; None while the data are not known to end
    filled_from: int = 0  # first micro-batch admitted after the pipeline last drained
    # Micro-batches from the limit on whose gradients the next stage sends nevertheless, because it ran their backward
    # passes before it knew the limit.
    owed: range = range(0)
    end: int | None = None  # first micro-batch that was asked for and was not there, once the stage knows of it

    @property
    def drained(self) -> bool:
        """True if nothing is in flight on this stage."""
        return self.forwarded == self.completed


def compute_actions(progress: Progress, depth: int, micro_batches: int) -> Iterator[Action]:
    """Rest of a stage's current batch: forward passes, backward passes, one update.

    Ends before the first backward pass whose micro-batch has no forward pass. Only there the owed gradients are
    received and dropped: the next stage may send them as late as in its next ``train_batch()`` call.
    """
    batch = progress.completed // micro_batches
    forwarded = progress.forwarded
    limit = progress.limit
    for micro_batch in range(progress.completed, (batch + 1) * micro_batches):
        ahead = micro_batch + depth + 1
        for admitted in range(forwarded, ahead if limit is None else min(ahead, limit)):
            yield Action(Kind.FORWARD, admitted)
        forwarded = max(forwarded, ahead if limit is None else min(ahead, limit))
        if micro_batch >= forwarded:
            for dropped in progress.owed:
                yield Action(Kind.DROP_GRAD, dropped)
            return
        yield Action(Kind.BACKWARD, micro_batch)
    yield Action(Kind.REDUCE, batch)
    yield Action(Kind.STEP, batch)


def with_communication(
    actions: Iterable[Action], stage: int, num_stages: int, exchanges: Exchanges = Exchanges(), virtual_stages: int = 1
) -> Iterator[Action]:
    """Actions of a stage, with data reading and transfers added.

    The first stage reads inputs, the last stage labels; activations and gradients go from stage to stage. Gradients of
    tied weights go to their owner before its reduction, new weights to the copies after its update.

    With ``virtual_stages`` parts of the model on each of ``num_stages`` ranks, ``stage`` is the rank. Neighbouring
    parts are on different ranks.
    """
    orders = _orders(stage, num_stages, exchanges, virtual_stages)
    for action in actions:
        order = orders[stage if action.part is None else action.part]
        for kind in order.get(action.kind, (action.kind,)):
            yield action if kind is action.kind else Action(kind, action.index, action.part)


@cache
def _orders(
    stage: int, num_stages: int, exchanges: Exchanges, virtual_stages: int
) -> dict[int, dict[Kind, list[Kind]]]:
    """Of each part of a stage, what comes before and after each computation, in order."""
    last = num_stages * virtual_stages - 1
    copies, owner, peers = exchanges.has_copies, exchanges.owns_tied, exchanges.peers
    orders = {}
    for part in range(stage, last + 1, num_stages):
        previous, following = part > 0, part < last
        due = (
            {Kind.RECV_ACT: previous, Kind.LOAD: part in (0, last), Kind.FORWARD: True, Kind.SEND_ACT: following},
            {Kind.RECV_GRAD: following, Kind.BACKWARD: True, Kind.SEND_GRAD: previous},
            {Kind.SEND_TIED_GRAD: copies, Kind.RECV_TIED_GRAD: owner, Kind.REDUCE: True},
            {
                Kind.RECV_TIED: copies,
                Kind.RECV_PEERS: peers and stage < num_stages - 1,
                Kind.STEP: True,
                Kind.SEND_TIED: owner,
                Kind.SEND_PEERS: peers and stage > 0,
            },
        )
        wanted = ([kind for kind, here in row.items() if here] for row in due)
        orders[part] = dict(zip((Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE, Kind.STEP), wanted, strict=True))
    return orders
