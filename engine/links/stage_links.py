"""The links of one stage to the stages before and after it, for training and for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ds_vpipe.engine.links.groups import Group, Groups
from ds_vpipe.engine.links.link import Channel, Peer
from ds_vpipe.engine.links.receiver import Receiver
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.dry_run import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.pipeline import Pipeline

_EVAL_PREFETCH = 2


@dataclass(frozen=True, slots=True)
class PreviousLinks:
    """Links to the previous stage: training, then evaluation."""

    activations: Receiver
    gradients: Sender
    evaluation: Receiver
    results: Sender


@dataclass(frozen=True, slots=True)
class NextLinks:
    """Links to the next stage: training, then evaluation."""

    activations: Sender
    gradients: Receiver
    evaluation: Sender
    results: Receiver


class StageLinks:
    """Links to the neighbouring stages.

    Args:
        grid: DeepSpeed's process grid.
        pipeline: its schedule, which says how many receives are posted ahead on a link. Where every stage has several
            parts of the model the last stage's next one is the first.
        groups: makes the two groups of each two neighbours, forward and backward.
        device: where the stage computes.

    Attributes:
        me: this stage.
        send_thread: sends and posts receives.
    """

    def __init__(self, grid: Any, pipeline: Pipeline, groups: Groups, device: torch.device) -> None:
        ring = pipeline.virtual_stages > 1
        stages, pin = pipeline.num_stages, device.type == "cuda"
        thread = self.send_thread = SendThread(device)
        self._previous: PreviousLinks | None = None
        self._next: NextLinks | None = None

        me = self.me = groups.me
        ranks = [grid.stage_to_global(number) for number in range(stages)]
        pairs: dict[tuple[int, int], tuple[Group, Group]] = {}
        for before, after in pairwise([*ranks, ranks[0]] if ring else ranks):
            if me.rank in (before, after):
                of = (before, after)
                pairs[of] = (groups.of(f"forward from {before}", of), groups.of(f"backward to {before}", of))
        if me.stage > 0 or ring:
            before = (me.stage - 1) % stages
            peer = Peer(before, ranks[before])
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, before, me.stage))
            forward, backward = pairs[peer.rank, me.rank]
            self._previous = PreviousLinks(
                Receiver(forward, peer, prefetch, pin=pin, runner=thread),
                Sender(backward, peer, prefetch, pin=pin, runner=thread),
                Receiver(forward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin),
                Sender(backward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin),
            )
        if me.stage < stages - 1 or ring:
            after = (me.stage + 1) % stages
            peer = Peer(after, ranks[after])
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, me.stage, after))
            forward, backward = pairs[me.rank, peer.rank]
            self._next = NextLinks(
                Sender(forward, peer, prefetch, pin=pin, runner=thread),
                Receiver(backward, peer, prefetch, pin=pin, runner=thread),
                Sender(forward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin),
                Receiver(backward, peer, _EVAL_PREFETCH, Channel.EVALUATION, pin),
            )

    @property
    def has_previous(self) -> bool:
        """Whether there is a stage before this one."""
        return self._previous is not None

    @property
    def has_next(self) -> bool:
        """Whether there is a stage after this one."""
        return self._next is not None

    @property
    def previous(self) -> PreviousLinks:
        """Links to the previous stage.

        Raises:
            PipelineProtocolError: there is none.
        """
        if self._previous is None:
            raise PipelineProtocolError(f"{self.me} has no stage before it")
        return self._previous

    @property
    def next(self) -> NextLinks:
        """Links to the next stage.

        Raises:
            PipelineProtocolError: there is none.
        """
        if self._next is None:
            raise PipelineProtocolError(f"{self.me} has no stage after it")
        return self._next

    @property
    def senders(self) -> list[Sender]:
        """All sending ends, those of training first."""
        training = self.training_senders
        training += [self._next.evaluation] if self._next else []
        return [*training, self._previous.results] if self._previous else training

    @property
    def training_senders(self) -> list[Sender]:
        """Sending ends of training: of activations, then of gradients."""
        activations = [self._next.activations] if self._next else []
        return [*activations, self._previous.gradients] if self._previous else activations

    def wait_for_copies(self, kind: Kind) -> None:
        """Wait until an action of ``kind`` may change tensors that were sent.

        A layer may write to a buffer that was an output; an output may be a weight, a gradient never is.
        """
        if self._next is not None and kind in (Kind.FORWARD, Kind.STEP):
            self._next.activations.copied()
        if self._previous is not None and kind is Kind.FORWARD:
            self._previous.gradients.copied()

    def flush(self) -> None:
        """Wait until all training messages that were sent have been received."""
        for sender in self.training_senders:
            sender.flush()
