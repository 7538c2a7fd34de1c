"""What a stage keeps of a micro-batch between its forward and its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_vpipe.engine.execution.batch_loss import BatchLoss
from ds_vpipe.engine.execution.report import BatchReport
from ds_vpipe.engine.links.message import Tree, leaves
from ds_vpipe.schedules.one_f_one_b import Progress


class _Entry(torch.autograd.Function):
    """Hands a received tensor to the stage so that the first layer may work in place on it.

    Autograd forbids that on a leaf; a copy would do too, at the price of a second stage input in memory
    for every micro-batch in flight.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, as_made: bool) -> torch.Tensor:
        ctx.leaf = leaf if as_made else None
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if ctx.leaf is None:
            return gradients[0], None
        ctx.leaf.grad = gradients[0]
        return None, None


@dataclass(slots=True)
class Flight:
    """One micro-batch in flight at one stage.

    Attributes:
        call: number of the ``train_batch()`` call whose iterator it was read from.
        inputs: what the stage's first layer gets.
        labels: what the loss function gets, on the last stage.
        outputs: tensors that a gradient will arrive for.
        gradients: those gradients, once received; None where the next stage did not use a tensor.
        loss: on the last stage.
        told: the loss on its way to the first stage, where every micro-batch's is told and not a batch's mean alone.
        taken: the stage's own copy of it, on the first stage of a pipeline that may have to admit it again.
    """

    call: int
    inputs: Tree = None
    labels: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    loss: torch.Tensor | None = None
    told: torch.Tensor | None = None
    taken: Any = None

    def enter(self, as_made: bool = False) -> Tree:
        """The inputs as the stage's first layer gets them.

        Args:
            as_made: gradients of the inputs keep the strides that autograd gives them, as in a model that is not cut;
                else they get those of the inputs, as DeepSpeed's do.
        """
        return _enter(self.inputs, as_made)

    def keep_outputs(self, outputs: Tree) -> None:
        """Remember the outputs that take part in the backward pass."""
        self.outputs = [leaf for leaf in leaves(outputs) if leaf is not None and leaf.requires_grad]

    def input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs that require one, in order."""
        return tuple(leaf.grad for leaf in leaves(self.inputs) if leaf is not None and leaf.requires_grad)


class DataEnd(NamedTuple):
    """End of the data that the first stage has met, until the pipeline is filled again.

    Attributes:
        call: number of the ``train_batch()`` call in which it was met.
        left_over: micro-batches of an incomplete batch before it, each with the call that it was read in.
    """

    call: int
    left_over: list[tuple[int, Any]]


@dataclass(slots=True)
class StageState:
    """What changes at a stage from instruction to instruction.

    It is kept apart from the engine, which is a ``torch.nn.Module`` and slow to set attributes on.

    Attributes:
        progress: micro-batches forwarded and completed.
        flights: micro-batches in flight, by number; by part too, where the stage has several.
        doing: the instruction being carried out, for messages.
        sending: output of the latest forward pass, until it has been handed to the next stage.
        batch_loss: adds up the current batch's losses, on the last stage.
        report: the current batch's losses and more, once known here.
        data_end: the end of the data, once known here and until the pipeline is filled again.
        failure: why training cannot go on, or None.
    """

    progress: Progress = field(default_factory=Progress)
    flights: dict[int, Flight] = field(default_factory=dict)
    doing: object = "start"
    sending: Tree = None
    batch_loss: BatchLoss | None = None
    report: BatchReport | None = None
    data_end: DataEnd | None = None
    failure: str | None = None


def _enter(tree: Tree, as_made: bool) -> Tree:
    if isinstance(tree, torch.Tensor):
        return _Entry.apply(tree, as_made) if tree.requires_grad else tree
    if isinstance(tree, (tuple, list)):
        return type(tree)(_enter(item, as_made) for item in tree)
    return tree
