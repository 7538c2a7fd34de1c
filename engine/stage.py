"""State of one rank of a pipeline: its layers, links, weights, progress, and micro-batches in flight."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger

from ds_vpipe.config.staleness import Staleness
from ds_vpipe.engine.execution.batch_loss import BatchLoss, BatchReport
from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.links.consensus import Consensus
from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Groups
from ds_vpipe.engine.links.link import Sender
from ds_vpipe.engine.links.message import Tree, leaves, map_tree
from ds_vpipe.engine.links.stage_links import StageLinks
from ds_vpipe.engine.links.wiring import Wiring
from ds_vpipe.engine.modules.built_layers import Built
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.modules.swap import Swap, Swapped
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.peer_updates import PeerUpdates
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.delay_warmup import NO_WARMUP, DelayWarmup

UNDER_WAY = (
    "while {} is under way, allowed is between two batches; let a signal handler or a layer set a flag that the script "
    "looks at there"
)
DESTROYED = (
    "after destroy(), allowed is before it; build another engine by initialize(), or another Trainer, whose train() "
    "ends its engine"
)
_DRAINS_IN_A_ROW = 3

Key = tuple[int, int]
"""Micro-batch and part of the model; the part is the stage's number if the stage has only one."""


class _Entry(torch.autograd.Function):
    """Identity function that lets the first layer change its input in place.

    Autograd forbids that for a leaf, such as a received tensor. A copy of it would cost the memory of a second stage
    input for every micro-batch in flight.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, keep_strides: bool) -> torch.Tensor:
        ctx.leaf = leaf if keep_strides else None
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if ctx.leaf is None:
            return gradients[0], None
        ctx.leaf.grad = gradients[0]
        return None, None


@dataclass(slots=True)
class InFlight:
    """One micro-batch in flight at one stage."""

    call: int  # number of the train_batch() call whose iterator it was read from
    inputs: Tree = None  # input of the stage's first layer
    labels: Any = None  # second argument of the loss function, on the last stage
    output: Tree = None  # output of the forward pass, until it is sent
    outputs: list[torch.Tensor] = field(default_factory=list)  # output tensors that will get a gradient
    # Those gradients, once received; None for a tensor that the next stage did not use.
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    loss: torch.Tensor | None = None  # on the last stage
    # Loss to be sent back to the first stage, for scripts that get the loss of every micro-batch, and other outputs.
    script_loss: Tree = None
    swapped: Swapped | None = None  # activations on the host, until they are brought back
    needed: Sequence[torch.Tensor] = ()  # inputs whose gradients the previous stage needs
    labels_sum: int = 0  # checksum of the labels on the first and the last stage; 0 where it is not known
    micro_batch: Any = None  # copy of it, on the first stage if it may have to be admitted again

    def enter(self, keep_strides: bool = False) -> Tree:
        """The inputs as the stage's first layer gets them.

        With ``keep_strides`` their gradients keep the strides of an uncut model, else they get those of the inputs.
        """
        # Noted before the layers run, which may ask for gradients of other inputs: those are not sent.
        self.needed = [leaf for leaf in leaves(self.inputs) if leaf is not None and leaf.requires_grad]
        return map_tree(lambda leaf: _Entry.apply(leaf, keep_strides) if leaf.requires_grad else leaf, self.inputs)

    def keep_output(self, output: Tree) -> None:
        """Keep the output until it is sent, and its tensors with gradients until the backward pass."""
        self.output = output
        self.outputs = [leaf for leaf in leaves(output) if leaf is not None and leaf.requires_grad]

    def keep_input_gradients(self, copies: Callable[[torch.Tensor | None], torch.Tensor | None]) -> None:
        """Keep what ``copies`` makes of the gradients of the inputs until they are sent."""
        for leaf in self.needed:
            if (own := copies(leaf.grad)) is not leaf.grad:
                leaf.grad = own

    def input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs that require one, in order."""
        return tuple(leaf.grad for leaf in self.needed)


class DrainWatch:
    """Count of batches in a row after each of which the pipeline was emptied."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks  # this rank is the one that warns
        self._latest, self._row = -2, 0
        self.warned = False

    def emptied(self, cause: str, remedy: str, batches: int, again: int) -> None:
        """The pipeline is emptied before or in batch ``batches``, though more is to come.

        Args:
            cause: the call that needs it, or what has ended.
            remedy: what the user can do.
            batches: number of the batch, from 0.
            again: forward passes of all stages that are thrown away for it.
        """
        if batches != self._latest:
            self._row = self._row + 1 if batches == self._latest + 1 else 1
            self._latest = batches
        if self._row < _DRAINS_IN_A_ROW or self.warned:
            return
        self.warned = True
        cost = f"{again} forward passes are thrown away and run again" if again else "it fills and drains"
        if self._speaks:
            logger.warning(
                f"ds_vpipe: {cause} has emptied the pipeline in {_DRAINS_IN_A_ROW} batches in a row: {cost} in every "
                f"such batch, in which stages wait for each other as in a synchronous pipeline; {remedy}"
            )


class KnownEnd(NamedTuple):
    """End of the data that a stage knows of, until the pipeline is filled again."""

    call: int  # number of the train_batch() call whose iterator has ended
    # Micro-batches of the incomplete batch before the end, each with the call in which it was read.
    left_over: list[tuple[int, Any]]


@dataclass(slots=True)
class Stage:
    """One rank's share of a pipeline."""

    pipeline: Pipeline  # schedule and sizes; replaced where sizes change
    first_partition: tuple[int, ...]  # layers of every stage when the engine was built
    number: int  # index of the stage, from 0
    exchanges_by_rank: tuple[Exchanges, ...]  # messages around updates, of every stage
    module: PipelineModule  # layers of the stage
    built: dict[int, Built]  # layers by number, as they were when this stage had them first
    device: torch.device  # device of the layers
    copies: DeviceCopies | None  # copies to and from that device; None on the CPU
    groups: Groups  # process groups, with the failures of other ranks
    consensus: Consensus  # decisions that hold on all replicas of the stage, all ranks of the pipeline, or all ranks
    wiring: Wiring  # makes the links
    links: StageLinks  # links to the neighbouring stages
    ties: TiedWeights  # weights tied to other stages; in an asynchronous pipeline only
    feed: MicroBatchFeed  # micro-batches from the script's iterators
    weights: WeightStashingOptimizer  # weight versions, around the optimizer
    loss_scaling: LossScaling | None  # with fp16, else None
    # Overflows and norms of other stages, in an asynchronous pipeline that needs them, else None.
    peers: PeerUpdates | None
    staleness: Staleness | None  # mitigations of late gradients in use
    delay_warmup: DelayWarmup  # intervals between drains
    random_states: RandomStates  # those that recomputation and evaluation restore
    swap: Swap | None  # moves activations to the host, if the block asks for it
    drains: DrainWatch  # count of batches in which the pipeline is emptied, for a warning
    batch_loss: Callable[[], BatchLoss]  # makes the sum of a new batch's losses, on the last stage
    may_withdraw: bool  # whether micro-batches in flight may be withdrawn, and admitted again later
    script_senders: Sequence[Sender] = ()  # links on which the last stage sends losses to scripts
    progress: Progress = field(default_factory=Progress)  # micro-batches forwarded and completed
    # After a recovery, the first micro-batch that was not in flight in the state: those before it use older versions.
    first_after_recovery: int = 0
    # Micro-batches between their forward and backward passes.
    in_flight: dict[Key, InFlight] = field(default_factory=dict)
    action: object = "start"  # the current action, for error messages
    labels_sum: int = 0  # of the current batch's backward passes
    losses: BatchLoss | None = None  # sum of the current batch's losses, on the last stage
    report: BatchReport | None = None  # losses and statistics of the current batch, once this stage has them
    # End of the data, once this stage knows of it and until the pipeline is filled again.
    data_end: KnownEnd | None = None
    failure: str | None = None  # why training cannot go on, or None
    closed: str = ""  # when no call may begin: within a batch or an evaluation, or after destroy(); for error messages
    half_loaded: bool = False  # weights and states may be of different checkpoints, as loading has failed

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Block in which no call may begin."""
        self.closed = UNDER_WAY
        try:
            yield
        finally:
            self.closed = ""

    @property
    def exchanges(self) -> Exchanges:
        """Messages of this stage around its updates."""
        return self.exchanges_by_rank[self.number]

    @property
    def is_first(self) -> bool:
        """Whether it reads inputs."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it reads labels and computes the loss."""
        return self.number == self.pipeline.num_stages - 1

    @property
    def asynchronous(self) -> bool:
        """Whether stages update without waiting for each other."""
        return not self.pipeline.synchronous

    @property
    def is_drained_between(self) -> bool:
        """Whether drains between batches are planned: after each in bsp, after some with a delay warm-up."""
        return self.pipeline.synchronous or self.delay_warmup != NO_WARMUP

    @property
    def senders(self) -> list[Sender]:
        """All senders of the stage; a failure is sent on each."""
        return [*self.links.senders, *self.ties.weights_out, *self.ties.gradients_out, *self.script_senders]

    def arrived(self, tree: Tree) -> Tree:
        """Received tensors where the stage computes; on the CPU they are there already."""
        return tree if self.copies is None else self.copies.tree_to_device(tree)

    def batch_ended_by(self, action: Action) -> int | None:
        """Batch that the backward pass ``action`` ended here; None if it ended none, or has failed."""
        if self.report is None or self.progress.completed <= action.index:
            return None
        batch, rest = divmod(action.index + 1, self.pipeline.micro_batches)
        return None if rest or self.key(action)[1] != self.number else batch - 1

    def key(self, action: Action) -> Key:
        """Key of an action's micro-batch in :attr:`in_flight`."""
        return action.index, self.number if action.part is None else action.part
