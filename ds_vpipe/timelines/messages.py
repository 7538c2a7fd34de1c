"""Which receive of a timeline belongs to which send.

Part p sends an activation that part p+1 receives and a gradient that part p-1 receives; both carry the micro-batch
they belong to. So a message is known by the receiving part, its kind and its micro-batch, and as the first or a later
one of these: where the data end inside a batch, its numbers are given again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ds_vpipe.timelines.timeline import Span

_RECEIVED_AS = {"SEND_ACT": ("RECV_ACT", 1), "SEND_GRAD": ("RECV_GRAD", -1)}
_ARRIVES_AS = {"RECV_ACT": "RECV_ACT", "RECV_GRAD": "RECV_GRAD", "DROP_GRAD": "RECV_GRAD"}
_NEEDED_BY = {"F": "RECV_ACT", "B": "RECV_GRAD"}
_RECEIVE, _WAIT, _PASS = range(3)
_Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or a gradient on its way.

    Attributes:
        send: Span of the send.
        receive: What is known of its arrival: the span of the receive, else that of waiting for it, else that of the
            pass that needs it.
        exact: ``receive`` is a receive or a wait, so that the message is there when it ends and not much earlier.
    """

    send: Span
    receive: Span
    exact: bool


def messages(spans: Iterable[Span]) -> Iterator[Message]:
    """Pair the sends of activations and gradients among ``spans`` with their arrivals.

    Sends whose other end is not among the spans are left out, as are other messages (tied weights, news).
    """
    arrivals: dict[_Key, list[list[Span]]] = defaultdict(lambda: [[], [], []])
    sends: dict[_Key, list[Span]] = defaultdict(list)
    for span in spans:
        name = span.name
        if name.kind in _RECEIVED_AS and not name.waiting:
            kind, step = _RECEIVED_AS[name.kind]
            sends[span.part + step, kind, name.index].append(span)
        elif name.kind in _ARRIVES_AS:
            arrivals[span.part, _ARRIVES_AS[name.kind], name.index][_WAIT if name.waiting else _RECEIVE].append(span)
        elif name.kind in _NEEDED_BY and not name.waiting:
            arrivals[span.part, _NEEDED_BY[name.kind], name.index][_PASS].append(span)
    for key, sent in sends.items():
        for number, send in enumerate(sent):
            found = ((rating, there[number]) for rating, there in enumerate(arrivals[key]) if number < len(there))
            for rating, receive in islice(found, 1):
                yield Message(send, receive, rating != _PASS)
