"""Which receive of a timeline belongs to which send.

Part p sends an activation that part p+1 receives and a gradient that part p-1 receives; both carry the micro-batch
they belong to. So a message is known by the receiving part, its kind and its micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ds_vpipe.timeline import Span, action_name

_RECEIVED_AS = {"SEND_ACT": ("RECV_ACT", 1), "SEND_GRAD": ("RECV_GRAD", -1)}
_RECEIVES = frozenset(kind for kind, _ in _RECEIVED_AS.values())


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or a gradient on its way: the spans of both its ends."""

    send: Span
    receive: Span


def messages(spans: Iterable[Span]) -> Iterator[Message]:
    """Pair the sends of activations and gradients among ``spans`` with their receives.

    The receive is the ``RECV_...`` span, or the ``WAITRECV_...`` span where only that is known. Sends without a
    receive are left out, as are other messages (tied weights, news), and all but the first of equal ones.
    """
    receives: dict[tuple[int, str, int], Span] = {}
    sends: dict[tuple[int, str, int], Span] = {}
    for span in spans:
        name = action_name(span.action)
        if name.kind in _RECEIVES:
            key = (span.part, name.kind, name.index)
            if key not in receives or (action_name(receives[key].action).waiting and not name.waiting):
                receives[key] = span
        elif name.kind in _RECEIVED_AS and not name.waiting:
            kind, step = _RECEIVED_AS[name.kind]
            sends.setdefault((span.part + step, kind, name.index), span)
    for key, send in sends.items():
        if key in receives:
            yield Message(send, receives[key])
