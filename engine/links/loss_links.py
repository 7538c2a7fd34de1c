"""How the loss of a micro-batch comes back to a script on every stage that loops over calls of the engine.

Once the pipeline is full it comes with the gradient of its micro-batch, stage by stage, and costs nothing. While the
pipeline is being filled there are no gradients: then the last stage sends it to every stage that waits, on a link for
that alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ds_vpipe.engine.links.groups import Groups
from ds_vpipe.engine.links.link import Peer
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.receiver import Receiver
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.errors import PipelineProtocolError

_PREFETCH = 2
_UNDER_WAY = 8  # losses that a stage may not have received yet; it asks for each in the round in which it is sent


class LossLinks:
    """Links from the last stage of a pipeline to all others.

    Args:
        grid: DeepSpeed's process grid.
        groups: makes a group of each two ranks.
        device: where the stage computes.

    Attributes:
        senders: on the last stage, by the stage at the other end.
    """

    def __init__(self, grid: Any, groups: Groups, device: torch.device) -> None:
        last = grid.pipe_parallel_size - 1
        ranks = [grid.stage_to_global(stage) for stage in range(last + 1)]
        self._me = groups.me
        self.senders: dict[int, Sender] = {}
        self._receiver: Receiver | None = None
        for stage, rank in enumerate(ranks[:-1]):
            pair = (rank, ranks[last])
            if groups.me.stage == last:
                group = groups.of("losses", pair)
                self.senders[stage] = Sender(group, Peer(stage, rank), _PREFETCH, pin=device.type == "cuda")
            elif groups.me.stage == stage:
                self._receiver = Receiver(groups.of("losses", pair), Peer(last, ranks[last]), _PREFETCH)

    def send(self, micro_batch: int, loss: torch.Tensor, stages: Iterable[int]) -> None:
        """Start sending the loss of ``micro_batch``, a tensor without dimensions, to ``stages``."""
        for stage in stages:
            self.senders[stage].send(Message.LOSS, micro_batch, loss)
            self.senders[stage].keep_latest(_UNDER_WAY)

    def wait(self, micro_batch: int) -> torch.Tensor:
        """The loss of ``micro_batch`` from the last stage.

        Raises:
            PipelinePeerError: a stage failed, is lost, or did not answer in time.
        """
        assert self._receiver is not None
        message = self._receiver.receive(f"the loss of micro-batch {micro_batch}")
        if message.kind is not Message.LOSS or message.micro_batch != micro_batch:
            raise PipelineProtocolError(
                f"{self._me} expected the loss of micro-batch {micro_batch}, got {message.kind.name}"
                f"{message.micro_batch}: do all ranks run the same script with the same configuration?"
            )
        loss: torch.Tensor = message.tree
        return loss
