"""The links between ranks, and a dry run of programs over them: does anybody wait for ever?

A link carries activations or gradients from one rank to a neighbour, in order. The engine starts a send and goes on;
the transfer itself is a rendezvous, which happens once the other end has posted a receive for it. The other end
keeps a fixed number of receives posted, so that a message may move before its program asks for it.

The dry run is stricter: a rank stands still in a send until a receive is posted for it. That is the right model of
sends that are completed lazily, for three reasons. More room never makes a program wait for ever that did not, so that
what passes here cannot hang in the engine. It bounds what is under way on a link by the receives posted. And
it holds for backends whose sends keep a stream busy until they are matched. Sends that block until their receive is
reached, with none posted ahead, would be another thing: in every 1F1B order two neighbours come to send to each
other, an activation against a gradient, and would wait for ever. Only gpipe stands that.

Programs are sequences without a choice and links have one sender and one receiver, a Kahn process network. How far each
rank comes therefore does not depend on who is faster, and one dry run decides for all timings (Kahn, "The
semantics of a simple language for parallel programming", 1974).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.interleaved import group_sizes
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs

ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Link(NamedTuple):
    """One direction between two neighbouring ranks. News of updates travels among the gradients."""

    channel: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.channel} from rank {self.source} to rank {self.target}"


def send_link(kind: Kind, rank: int, num_ranks: int) -> Link | None:
    """The link that an action of ``rank`` sends on, or None if it sends nothing between neighbours."""
    if kind is Kind.SEND_ACT:
        return Link(ACTIVATIONS, rank, (rank + 1) % num_ranks)
    if kind is Kind.SEND_GRAD or kind is Kind.SEND_NEWS:
        return Link(GRADIENTS, rank, (rank - 1) % num_ranks)
    return None


def receive_link(kind: Kind, rank: int, num_ranks: int) -> Link | None:
    """The link that an action of ``rank`` receives on, or None."""
    if kind is Kind.RECV_ACT:
        return Link(ACTIVATIONS, (rank - 1) % num_ranks, rank)
    if kind in (Kind.RECV_GRAD, Kind.DROP_GRAD, Kind.RECV_NEWS):
        return Link(GRADIENTS, (rank + 1) % num_ranks, rank)
    return None


def link_ends(of: Callable[[Kind, int, int], Link | None], rank: int, num_ranks: int) -> dict[Kind, Link]:
    """:func:`send_link` or :func:`receive_link` of all kinds of action that have one."""
    found = ((kind, of(kind, rank, num_ranks)) for kind in Kind)
    return {kind: link for kind, link in found if link is not None}


_RECEIVED_AS = {Kind.SEND_ACT: Kind.RECV_ACT, Kind.SEND_GRAD: Kind.RECV_GRAD, Kind.SEND_NEWS: Kind.RECV_NEWS}
_PARTS_ON = {Kind.SEND_ACT: 1, Kind.SEND_GRAD: -1, Kind.SEND_NEWS: 0}


def received_as(sent: Action) -> Action:
    """The action that receives what ``sent`` sends, to use it."""
    part = None if sent.part is None else sent.part + _PARTS_ON[sent.kind]
    return Action(_RECEIVED_AS[sent.kind], sent.index, part)


def meets(sent: Action, received: Action) -> bool:
    """Whether ``received`` receives what ``sent`` sends, to use it or to drop it."""
    used = replace(received, kind=Kind.RECV_GRAD) if received.kind is Kind.DROP_GRAD else received
    return used == received_as(sent)


def posted_receives(pipeline: Pipeline, link: Link) -> int:
    """Receives that the target of ``link`` keeps posted, so that nobody waits for ever and one message is to spare.

    In a 1F1B order the earlier of two ranks is ahead by the difference of their depths. In the interleaved one the
    groups set it: a group larger than the number of ranks comes round before its first micro-batch is wanted.
    """
    if pipeline.schedule == "interleaved":
        largest = group_sizes(pipeline.num_stages, pipeline.micro_batches)[0]
        return max(0, largest - pipeline.num_stages) + 2
    earlier, later = sorted((link.source, link.target))
    return pipeline.depths[earlier] - pipeline.depths[later] + 1


class _Messages:
    """State of one link in the dry run.

    Attributes:
        slots: for each message sent, the time slot in which it was.
        received: messages received.
        posted: receives kept posted.
        wanted: the receiver stands at a receive, so that at least one is posted.
    """

    __slots__ = ("posted", "received", "slots", "wanted")

    def __init__(self, posted: int) -> None:
        self.slots: list[int] = []
        self.received = 0
        self.posted = posted
        self.wanted = False


@dataclass(frozen=True)
class DryRun:
    """How far each rank comes.

    Attributes:
        positions: of each rank, the position in its program at which it stands for ever, or the program's length.
        slots: of each rank, when each action is done at the earliest, in forward or backward passes of equal length.
    """

    positions: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


def dry_run(programs: Programs, posted: Callable[[Link], int]) -> DryRun:
    """Carry out all programs until no rank can go on; ``posted`` gives the receives kept posted on a link.

    Time is linear in the number of actions.
    """
    num_ranks = len(programs)
    links: dict[Link, _Messages] = {}
    positions = [0] * num_ranks
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    runnable = list(range(num_ranks - 1, -1, -1))

    outgoing: list[dict[Kind, tuple[_Messages, int]]] = []
    incoming: list[dict[Kind, tuple[_Messages, int]]] = []
    for rank in range(num_ranks):
        out_links, in_links = link_ends(send_link, rank, num_ranks), link_ends(receive_link, rank, num_ranks)
        for link in (*out_links.values(), *in_links.values()):
            if link not in links:
                links[link] = _Messages(posted(link))
        outgoing.append({kind: (links[link], link.target) for kind, link in out_links.items()})
        incoming.append({kind: (links[link], link.source) for kind, link in in_links.items()})
    while runnable:
        rank = runnable.pop()
        program, out, into, done = programs[rank], outgoing[rank], incoming[rank], slots[rank]
        slot = done[-1] if done else 0
        woken = set()
        for position in range(positions[rank], len(program)):
            kind = program[position].kind
            if kind is Kind.FORWARD or kind is Kind.BACKWARD:
                slot += 1
            elif (sending := out.get(kind)) is not None:
                messages, other = sending
                if len(messages.slots) - messages.received >= (messages.posted or messages.wanted):
                    break
                messages.slots.append(slot)
                woken.add(other)
            elif (receiving := into.get(kind)) is not None:
                messages, other = receiving
                if messages.received == len(messages.slots):
                    if not (messages.wanted or messages.posted):
                        woken.add(other)
                    messages.wanted = True
                    break
                slot = max(slot, messages.slots[messages.received])
                messages.received += 1
                messages.wanted = False
                woken.add(other)
            done.append(slot)
        positions[rank] = len(done)
        runnable.extend(woken.difference(runnable))
    return DryRun(tuple(positions), tuple(tuple(done) for done in slots))
