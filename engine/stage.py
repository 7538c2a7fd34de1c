"""State of one rank of a pipeline: its layers, links, weights and progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import PipelineModule

from ds_vpipe.engine.execution.batch_loss import BatchLoss, BatchReport
from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.execution.drain_watch import DrainWatch, PauseWatch
from ds_vpipe.engine.execution.in_flight import InFlight, Key
from ds_vpipe.engine.links.consensus import Consensus
from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Groups
from ds_vpipe.engine.links.link import Sender
from ds_vpipe.engine.links.message import Tree
from ds_vpipe.engine.links.stage_links import StageLinks
from ds_vpipe.engine.links.wiring import Wiring
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.modules.swap import Swap
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.peer_updates import PeerUpdates
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress, update_delays
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.delay_warmup import NO_WARMUP, DelayWarmup
from ds_vpipe.staleness.mitigation import StalenessMitigation


class DataEnd(NamedTuple):
    """End of the data, known to a stage until the pipeline is filled again."""

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
    # Mitigation of staleness, on stages with a delay if the block asks for it, else None.
    mitigation: StalenessMitigation | None
    delay_warmup: DelayWarmup  # intervals between drains
    random_states: RandomStates  # those that recomputation and evaluation restore
    swap: Swap | None  # moves activations to the host, if the block asks for it
    drains: DrainWatch  # count of batches in which the pipeline is emptied, for a warning
    pauses: PauseWatch  # count of batches after which the script lets it wait, likewise
    batch_loss: Callable[[], BatchLoss]  # makes the sum of a new batch's losses, on the last stage
    sets_back: bool  # whether micro-batches in flight may be withdrawn, and admitted again later
    script_senders: Sequence[Sender] = ()  # links on which the last stage sends losses to scripts
    progress: Progress = field(default_factory=Progress)  # micro-batches forwarded and completed
    # Micro-batches between their forward and backward passes.
    in_flight: dict[Key, InFlight] = field(default_factory=dict)
    action: object = "start"  # the current action, for error messages
    losses: BatchLoss | None = None  # sum of the current batch's losses, on the last stage
    report: BatchReport | None = None  # losses and statistics of the current batch, once this stage has them
    # End of the data, once this stage knows of it and until the pipeline is filled again.
    data_end: DataEnd | None = None
    failure: str | None = None  # why training cannot go on, or None
    half_loaded: bool = False  # weights and states may be of different checkpoints, as loading has failed

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
        """Whether the pipeline is emptied between two batches before the data end."""
        return self.pipeline.synchronous or self.delay_warmup != NO_WARMUP

    @property
    def senders(self) -> list[Sender]:
        """All senders of the stage; a failure is sent on each."""
        return [*self.links.senders, *self.ties.weights_out, *self.ties.gradients_out, *self.script_senders]

    def arrived(self, tree: Tree) -> Tree:
        """Received tensors where the stage computes; on the CPU they are there already."""
        return tree if self.copies is None else self.copies.tree_to_device(tree)

    def key(self, action: Action) -> Key:
        """Key of an action's micro-batch in :attr:`in_flight`."""
        return action.index, self.number if action.part is None else action.part

    def delays(self, micro_batches: int | None = None) -> tuple[int, ...]:
        """Delay of every stage in updates, by default with this pipeline's micro-batches per batch."""
        pipeline = self.pipeline
        return update_delays(pipeline.depths, micro_batches or pipeline.micro_batches, pipeline.vertical)
