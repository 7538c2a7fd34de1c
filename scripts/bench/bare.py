"""A pipeline of processes and sockets without an engine: what the machine itself costs."""

import os
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def neighbours(rank: int, stages: int) -> tuple[Any, Any]:
    """Connections to the processes of the previous and the next stage, None where there is none."""
    names = [f"\0bare-{os.environ['MASTER_PORT']}-{stage}" for stage in range(stages)]
    listener = Listener(names[rank], "AF_UNIX")
    dist.barrier()
    previous = Client(names[rank - 1], "AF_UNIX") if rank > 0 else None
    following = listener.accept() if rank < stages - 1 else None
    listener.close()
    return previous, following


def bare_trainer(
    module: nn.Module, update: Callable[[], None], batch: tuple[torch.Tensor, torch.Tensor], micro_batches: int
) -> Callable[[], None]:
    """Asp's passes and updates at its default depths, of as many stages as there are ranks.

    Args:
        module: the stage's layers, whose outputs have the inputs' shape.
        update: an update by the gradients of a batch, which drops them.
        batch: inputs and labels of every micro-batch.
        micro_batches: M.
    """
    rank, stages = dist.get_rank(), dist.get_world_size()
    previous, following = neighbours(rank, stages)
    data, labels = batch
    in_flight: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def received(connection: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(connection.recv_bytes()), dtype=data.dtype).view_as(data)

    def forward() -> None:
        value = received(previous).requires_grad_() if previous else data.clone()
        output = module(value)
        in_flight.append((value, output if following else nn.functional.mse_loss(output, labels)))
        if following:
            following.send_bytes(output.detach().numpy())

    def train() -> None:
        for _ in range(micro_batches):
            while len(in_flight) < stages - rank:
                forward()
            value, output = in_flight.popleft()
            torch.autograd.backward(output, received(following) if following else None)
            if previous:
                previous.send_bytes(value.grad.numpy())
        update()

    return train
