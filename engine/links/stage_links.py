"""The links of one stage to the stages before and after it, for training and for evaluation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ds_vpipe.engine.links.groups import Group, Groups
from ds_vpipe.engine.links.link import Channel, Peer
from ds_vpipe.engine.links.receiver import Receiver
from ds_vpipe.engine.links.send_thread import Courier
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.dry_run import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.pipeline import Pipeline

_EVAL_PREFETCH = 2


class Neighbours:
    """Senders and receivers; None where there is no neighbour.

    Args:
        grid: DeepSpeed's process grid.
        pipeline: its schedule, which says how many receives are posted ahead on a link. Where every stage has several
            parts of the model the last stage's next one is the first.
        groups: makes the two groups of each two neighbours, forward and backward.
        device: where the stage computes.

    Attributes:
        courier: sends and posts receives.
    """

    def __init__(self, grid: Any, pipeline: Pipeline, groups: Groups, device: torch.device) -> None:
        ring = pipeline.virtual_stages > 1
        stage, last = grid.get_stage_id(), grid.pipe_parallel_size - 1
        pin = device.type == "cuda"
        run = self.courier = Courier(device)
        self.activations_in: Receiver | None = None
        self.gradients_out: Sender | None = None
        self.eval_in: Receiver | None = None
        self.eval_loss_out: Sender | None = None
        self.activations_out: Sender | None = None
        self.gradients_in: Receiver | None = None
        self.eval_out: Sender | None = None
        self.eval_loss_in: Receiver | None = None

        me = self.me = groups.me
        ranks = [grid.stage_to_global(number) for number in range(last + 1)]
        pairs: dict[tuple[int, int], tuple[Group, Group]] = {}
        for before, after in pairwise([*ranks, ranks[0]] if ring else ranks):
            if me.rank in (before, after):
                of = (before, after)
                pairs[of] = (groups.of(f"forward from {before}", of), groups.of(f"backward to {before}", of))
        if stage > 0 or ring:
            before = (stage - 1) % (last + 1)
            peer = Peer(before, ranks[before])
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, before, stage))
            forward, backward = pairs[peer.rank, me.rank]
            self.activations_in = Receiver(forward, peer, prefetch, pin=pin, runner=run)
            self.gradients_out = Sender(backward, peer, prefetch, pin=pin, runner=run)
            self.eval_in = Receiver(forward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin)
            self.eval_loss_out = Sender(backward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin)
        if stage < last or ring:
            after = (stage + 1) % (last + 1)
            peer = Peer(after, ranks[after])
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, stage, after))
            forward, backward = pairs[me.rank, peer.rank]
            self.activations_out = Sender(forward, peer, prefetch, pin=pin, runner=run)
            self.gradients_in = Receiver(backward, peer, prefetch, pin=pin, runner=run)
            self.eval_out = Sender(forward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin)
            self.eval_loss_in = Receiver(backward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin)

    def wait_for_copies(self, kind: Kind) -> None:
        """Wait until an action of ``kind`` may change tensors that were sent.

        A layer may write to a buffer that was an output; an output may be a weight, a gradient never is.
        """
        if kind in (Kind.FORWARD, Kind.STEP) and self.activations_out is not None:
            self.activations_out.copied()
        if kind is Kind.FORWARD and self.gradients_out is not None:
            self.gradients_out.copied()

    @property
    def senders(self) -> list[Sender]:
        """All sending ends."""
        candidates = (self.activations_out, self.gradients_out, self.eval_out, self.eval_loss_out)
        return [sender for sender in candidates if sender is not None]


def links_by_kind(neighbours: Neighbours, ties: TiedWeights | None) -> dict[Kind, list[Sender | Receiver]]:
    """The links that an action of each kind uses."""
    n = neighbours
    links: dict[Kind, list[Sender | Receiver | None]] = {
        Kind.SEND_ACT: [n.activations_out],
        Kind.RECV_ACT: [n.activations_in],
        Kind.SEND_GRAD: [n.gradients_out],
        Kind.RECV_GRAD: [n.gradients_in],
        Kind.DROP_GRAD: [n.gradients_in],
        Kind.SEND_NEWS: [n.gradients_out],
        Kind.RECV_NEWS: [n.gradients_in],
        Kind.SEND_TIED: [*(ties.weights_out if ties else ())],
        Kind.RECV_TIED: [*(ties.weights_in if ties else ())],
        Kind.SEND_TIED_GRAD: [*(ties.gradients_out if ties else ())],
        Kind.RECV_TIED_GRAD: [*(ties.gradients_in if ties else ())],
    }
    return {kind: [link for link in found if link is not None] for kind, found in links.items()}
