"""Links of one stage to the other stages of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.host_link import Channel
from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.links.message import Message, Tree
from ds_vpipe.engine.links.wiring import Wiring
from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.dry_run import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.pipeline import Pipeline

_EVAL_PREFETCH = 2
_LOSS_PREFETCH = 2
_LOSSES_UNDER_WAY = 8  # that a stage may not have received yet; it asks for each in the round in which it is sent

Down = TypeVar("Down")
Up = TypeVar("Up")


class NeighbourLinks(Generic[Down, Up]):
    """Links to one neighbour: this stage's ends of those forward and backward, for training and evaluation."""

    def __init__(
        self, down: Callable[..., Down], up: Callable[..., Up], source: int, peer: Peer, prefetch: int
    ) -> None:
        forward, backward = f"forward from {source}", f"backward to {source}"
        self.activations: Down = down(forward, peer, prefetch, threaded=True)
        self.gradients: Up = up(backward, peer, prefetch, threaded=True)
        self.evaluation: Down = down(forward, peer, _EVAL_PREFETCH, Channel.EVALUATION)
        self.results: Up = up(backward, peer, _EVAL_PREFETCH, Channel.EVALUATION)


class StageLinks:
    """Links to the neighbouring stages.

    Args:
        grid: DeepSpeed's process grid.
        pipeline: its schedule, with the number of receives posted ahead on a link. Where every stage has several
            parts of the model the last stage's next one is the first.
        me: this stage.
        wiring: makes the links.

    Attributes:
        me: this stage.
    """

    def __init__(self, grid: Any, pipeline: Pipeline, me: Peer, wiring: Wiring) -> None:
        self._previous: NeighbourLinks[Receiver, Sender] | None = None
        self._next: NeighbourLinks[Sender, Receiver] | None = None
        self.me, self._last = me, pipeline.num_stages - 1
        stages = range(pipeline.num_stages)
        for before, after in pairwise([*stages, 0] if pipeline.virtual_stages > 1 else stages):
            if me.stage not in (before, after):
                continue
            source, target = (Peer(stage, grid.stage_to_global(stage)) for stage in (before, after))
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, before, after))
            if me.stage == after:
                self._previous = NeighbourLinks(wiring.receiver, wiring.sender, source.rank, source, prefetch)
            else:
                self._next = NeighbourLinks(wiring.sender, wiring.receiver, source.rank, target, prefetch)

    @property
    def has_previous(self) -> bool:
        """Whether there is a stage before this one."""
        return self._previous is not None

    @property
    def has_next(self) -> bool:
        """Whether there is a stage after this one."""
        return self._next is not None

    @property
    def previous(self) -> NeighbourLinks[Receiver, Sender]:
        """Links to the previous stage, which must exist."""
        if self._previous is None:
            raise PipelineProtocolError(f"{self.me} has no stage before it")
        return self._previous

    @property
    def next(self) -> NeighbourLinks[Sender, Receiver]:
        """Links to the next stage, which must exist."""
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
        """Wait until an action of ``kind`` may change sent tensors.

        A layer may write to a buffer that was an output, and so may hooks of an optimizer.
        """
        if self._next is not None and kind in (Kind.FORWARD, Kind.STEP):
            self._next.activations.copied()
        if self._previous is not None and kind is Kind.FORWARD:
            self._previous.gradients.copied()

    def from_last_stage(self, tree: Tree) -> Tree:
        """The last stage's ``tree`` on every stage, neighbour by neighbour."""
        if self.me.stage < self._last:
            tree = self.next.results.receive("the result of an evaluation").tree
        if self.me.stage > 0:
            self.previous.results.send(Message.EVAL, 0, tree)
            self.previous.results.flush()
        return tree

    def of_all_stages(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Tensors of all stages of the pipeline, in order, on each of them; ``what`` is the name of the wait.

        By links, on which a stage that fails says so, and not by a collective.
        """
        known = () if self.me.stage == 0 else self.previous.evaluation.receive(what).tree
        known = (*known, mine)
        if self.me.stage < self._last:
            self.next.evaluation.send(Message.EVAL, 0, known)
            self.next.evaluation.flush()
        return list(self.from_last_stage(known))

    def keep_posted(self, pipeline: Pipeline) -> None:
        """Let messages be under way as other depths need them; only while none is."""
        for links, before in ((self._previous, self.me.stage - 1), (self._next, self.me.stage)):
            if links is not None and pipeline.virtual_stages == 1:
                prefetch = posted_receives(pipeline, Link(ACTIVATIONS, before, before + 1))
                links.activations.keep_posted(prefetch)
                links.gradients.keep_posted(prefetch)

    def flush(self) -> None:
        """Wait for receipt of all training messages."""
        for sender in self.training_senders:
            sender.flush()


class LossLinks:
    """Links for losses from the last stage to all others.

    For scripts that loop over calls of the engine. Once the pipeline is full the loss of a micro-batch comes with its
    gradient, stage by stage, and costs nothing. While it is being filled there are no gradients: then the last stage
    sends losses to every stage that waits.

    Args:
        grid: DeepSpeed's process grid.
        me: this stage.
        wiring: makes the links.

    Attributes:
        senders: on the last stage, by the stage at the other end.
    """

    def __init__(self, grid: Any, me: Peer, wiring: Wiring) -> None:
        *others, last = (Peer(stage, grid.stage_to_global(stage)) for stage in range(grid.pipe_parallel_size))
        self._me = me
        self.senders: dict[int, Sender] = {}
        self._receiver: Receiver | None = None
        for peer in others:
            if me.stage == last.stage:
                self.senders[peer.stage] = wiring.sender("losses", peer, _LOSS_PREFETCH, small=True)
            elif me.stage == peer.stage:
                self._receiver = wiring.receiver("losses", last, _LOSS_PREFETCH, small=True)

    def send(self, micro_batch: int, loss: Tree, stages: Iterable[int]) -> None:
        """Start sending the loss of a micro-batch, or other outputs of it, to ``stages``."""
        for stage in stages:
            self.senders[stage].send(Message.LOSS, micro_batch, loss)
            self.senders[stage].throttle(_LOSSES_UNDER_WAY)

    def wait(self, micro_batch: int, what: str = "the loss") -> Tree:
        """The loss of ``micro_batch`` from the last stage, or what it has sent after that, ``what`` in messages.

        Raises:
            PipelinePeerError: a stage failed, is lost, or did not answer in time.
        """
        assert self._receiver is not None
        message = self._receiver.receive(f"{what} of micro-batch {micro_batch}")
        if message.kind is not Message.LOSS or message.micro_batch != micro_batch:
            raise PipelineProtocolError(
                f"{self._me} expected {what} of micro-batch {micro_batch}, got {message.kind.name}"
                f"{message.micro_batch}: do all ranks run the same script, and ask for the same outputs?"
            )
        return message.tree
