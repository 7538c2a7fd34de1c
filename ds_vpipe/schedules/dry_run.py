"""The links between ranks, and a dry run of programs over them: does anybody wait for ever?

A link carries activations or gradients from one rank to a neighbour, in order. The engine starts a send and goes on;
the transfer itself is a rendezvous, which happens once the other end has posted a receive for it. The other end
keeps a fixed number of receives posted, so that a message may move before its program asks for it.

The dry run is stricter: a rank stands still in a send until a receive is posted for it. That is the right model of
sends that are completed lazily, for three reasons. More room never makes a program wait for ever that did not, so that
what passes here cannot hang in the engine. It bounds what is under way on a link by the receives posted. And
it holds for backends whose sends keep a stream busy until they are matched.

Programs are sequences without a choice and links have one sender and one receiver, a Kahn process network. How far each
rank comes therefore does not depend on who is faster, and one dry run decides for all timings (Kahn, "The
semantics of a simple language for parallel programming", 1974).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.interleaved import group_sizes
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs

ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Link(NamedTuple):
    """One direction between two neighbouring ranks.

    Overflows and norms of updates, and layers that move to the previous rank, travel among the gradients; layers that
    move to the next one among the activations.
    """

    channel: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.channel} from rank {self.source} to rank {self.target}"


# Channel and place of the neighbour, and for what is sent the action that receives it and by how much its part differs.
_SENDS = {
    Kind.SEND_ACT: (ACTIVATIONS, 1, Kind.RECV_ACT, 1),
    Kind.SEND_GRAD: (GRADIENTS, -1, Kind.RECV_GRAD, -1),
    Kind.SEND_PEERS: (GRADIENTS, -1, Kind.RECV_PEERS, 0),
    Kind.SEND_LAYER_DOWN: (ACTIVATIONS, 1, Kind.RECV_LAYER_DOWN, 0),
    Kind.SEND_LAYER_GRAD_DOWN: (ACTIVATIONS, 1, Kind.RECV_LAYER_GRAD_DOWN, 0),
    Kind.SEND_LAYER_UP: (GRADIENTS, -1, Kind.RECV_LAYER_UP, 0),
    Kind.SEND_LAYER_GRAD_UP: (GRADIENTS, -1, Kind.RECV_LAYER_GRAD_UP, 0),
}
_RECEIVES = {received: (channel, -side) for channel, side, received, _ in _SENDS.values()}
_RECEIVES[Kind.DROP_GRAD] = _RECEIVES[Kind.RECV_GRAD]


def send_link(kind: Kind, rank: int, num_ranks: int) -> Link | None:
    """The link that an action of ``rank`` sends on, if any."""
    if kind not in _SENDS:
        return None
    channel, side, _, _ = _SENDS[kind]
    return Link(channel, rank, (rank + side) % num_ranks)


def receive_link(kind: Kind, rank: int, num_ranks: int) -> Link | None:
    """The link that an action of ``rank`` receives on, or None."""
    if kind not in _RECEIVES:
        return None
    channel, side = _RECEIVES[kind]
    return Link(channel, (rank + side) % num_ranks, rank)


def link_ends(of: Callable[[Kind, int, int], Link | None], rank: int, num_ranks: int) -> dict[Kind, Link]:
    """:func:`send_link` or :func:`receive_link` of all kinds of action that have one."""
    found = ((kind, of(kind, rank, num_ranks)) for kind in Kind)
    return {kind: link for kind, link in found if link is not None}


def received_as(sent: Action) -> Action:
    """The action that receives what ``sent`` sends, to use it."""
    _, _, kind, parts = _SENDS[sent.kind]
    return Action(kind, sent.index, None if sent.part is None else sent.part + parts)


def meets(sent: Action, received: Action) -> bool:
    """Whether ``received`` receives what ``sent`` sends, to use it or to drop it."""
    expected = received_as(sent)
    kind = Kind.RECV_GRAD if received.kind is Kind.DROP_GRAD else received.kind
    return (kind, received.index, received.part) == (expected.kind, expected.index, expected.part)


def posted_receives(pipeline: Pipeline, link: Link) -> int:
    """Posted receives of a link's target: no dead-lock, and one to spare.

    In a 1F1B order the earlier of two ranks is ahead by the difference of their depths. In the interleaved one the
    groups set it: a group larger than the number of ranks comes round before its first micro-batch is wanted.
    """
    if pipeline.schedule == "interleaved":
        largest = group_sizes(pipeline.num_stages, pipeline.micro_batches)[0]
        return max(0, largest - pipeline.num_stages) + 2
    earlier, later = sorted((link.source, link.target))
    return pipeline.depths[earlier] - pipeline.depths[later] + 1


@dataclass(slots=True)
class Messages:
    """State of one link in the dry run."""

    posted: int  # receives kept posted, at least one
    received: int = 0
    sent: list[tuple[int, Action]] = field(default_factory=list)  # with positions in the sender's program


@dataclass(frozen=True)
class DryRun:
    """How far each rank comes."""

    positions: tuple[int, ...]  # in its program, at which it stands for ever, or the program's length
    links: dict[Link, Messages]


def dry_run(programs: Programs, posted: Callable[[Link], int]) -> DryRun:
    """Carry out all programs until no rank can go on. ``posted`` gives the receives kept posted on a link, 1 or more.

    A rank whose next message is not the one that it is about to receive stands there. Time is linear in the number of
    actions.
    """
    num_ranks = len(programs)
    links: dict[Link, Messages] = {}
    positions = [0] * num_ranks
    runnable = list(range(num_ranks - 1, -1, -1))
    outgoing: list[dict[Kind, tuple[Messages, int]]] = []
    incoming: list[dict[Kind, tuple[Messages, int]]] = []
    for rank in range(num_ranks):
        out_links, in_links = link_ends(send_link, rank, num_ranks), link_ends(receive_link, rank, num_ranks)
        for link in (*out_links.values(), *in_links.values()):
            if link not in links:
                links[link] = Messages(posted(link))
        outgoing.append({kind: (links[link], link.target) for kind, link in out_links.items()})
        incoming.append({kind: (links[link], link.source) for kind, link in in_links.items()})
    while runnable:
        rank = runnable.pop()
        program, out, into = programs[rank], outgoing[rank], incoming[rank]
        woken = set()
        while positions[rank] < len(program):
            action = program[positions[rank]]
            if (sending := out.get(action.kind)) is not None:
                messages, other = sending
                if len(messages.sent) - messages.received >= messages.posted:
                    break
                messages.sent.append((positions[rank], action))
                woken.add(other)
            elif (receiving := into.get(action.kind)) is not None:
                messages, other = receiving
                if messages.received == len(messages.sent):
                    break
                if not meets(messages.sent[messages.received][1], action):
                    break
                messages.received += 1
                woken.add(other)
            positions[rank] += 1
        runnable.extend(woken)  # again where one waits there already: it finds nothing to do then
    return DryRun(tuple(positions), links)
