"""Links of one stage to the other stages of its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
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

    Where every stage has several parts of the model the last stage's next one is the first.

    Attributes:
        before: the links to the previous stage, if there is one.
        after: those to the next stage, if there is one.
        training_senders: sending ends of training: of activations, then of gradients.
        copied_before: by kind of action, senders that have to have copied their tensors before it, which may overwrite
            them: a layer may write to a buffer that was an output, and so may an optimizer's hooks.
    """

    def __init__(self, grid: Any, pipeline: Pipeline, me: Peer, wiring: Wiring) -> None:
        self.before: list[NeighbourLinks[Receiver, Sender]] = []
        self.after: list[NeighbourLinks[Sender, Receiver]] = []
        self.me, self._last = me, pipeline.num_stages - 1
        stages = range(pipeline.num_stages)
        for before, after in pairwise([*stages, 0] if pipeline.virtual_stages > 1 else stages):
            if me.stage not in (before, after):
                continue
            source, target = (Peer(stage, grid.stage_to_global(stage)) for stage in (before, after))
            prefetch = posted_receives(pipeline, Link(ACTIVATIONS, before, after))
            if me.stage == after:
                self.before.append(NeighbourLinks(wiring.receiver, wiring.sender, source.rank, source, prefetch))
            else:
                self.after.append(NeighbourLinks(wiring.sender, wiring.receiver, source.rank, target, prefetch))
        activations = [link.activations for link in self.after]
        self.training_senders = [*activations, *(link.gradients for link in self.before)]
        self.copied_before = {Kind.FORWARD: self.training_senders, Kind.STEP: activations}

    @cached_property  # every message looks at it
    def previous(self) -> NeighbourLinks[Receiver, Sender]:
        """Links to the previous stage, which must exist."""
        if not self.before:
            raise PipelineProtocolError(f"{self.me} has no stage before it")
        return self.before[0]

    @cached_property
    def next(self) -> NeighbourLinks[Sender, Receiver]:
        """Links to the next stage, which must exist."""
        if not self.after:
            raise PipelineProtocolError(f"{self.me} has no stage after it")
        return self.after[0]

    @property
    def senders(self) -> list[Sender]:
        """All sending ends, those of training first."""
        evaluation = [link.evaluation for link in self.after]
        return [*self.training_senders, *evaluation, *(link.results for link in self.before)]

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
        for neighbours, source in ((self.before, self.me.stage - 1), (self.after, self.me.stage)):
            for links in neighbours if pipeline.virtual_stages == 1 else ():
                prefetch = posted_receives(pipeline, Link(ACTIVATIONS, source, source + 1))
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
        """The loss of ``micro_batch`` from the last stage, or what it has sent after that, ``what`` in messages."""
        assert self._receiver is not None
        message = self._receiver.receive(f"{what} of micro-batch {micro_batch}")
        if message.kind is not Message.LOSS or message.micro_batch != micro_batch:
            raise PipelineProtocolError(
                f"{self._me} expected {what} of micro-batch {micro_batch}, got {message.kind.name}"
                f"{message.micro_batch}: do all ranks run the same script, and ask for the same outputs?"
            )
        return message.tree
