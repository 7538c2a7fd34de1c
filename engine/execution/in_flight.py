"""Record of a micro-batch between its forward and backward passes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_vpipe.engine.links.message import Tree, leaves, map_tree
from ds_vpipe.engine.modules.swap import Swapped

Key = tuple[int, int]
"""Micro-batch and part of the model; the part is the stage's number if the stage has only one."""


class _Entry(torch.autograd.Function):
    """Identity function that lets the first layer change its input in place.

    Autograd forbids that for a leaf, such as a received tensor. A copy of it would cost the memory of a second stage
    input for every micro-batch in flight.
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
    # Loss to be sent back to the first stage, for scripts that get the loss of every micro-batch.
    script_loss: torch.Tensor | None = None
    swapped: Swapped | None = None  # activations on the host, until they are brought back
    taken: Any = None  # copy of the micro-batch, on the first stage if it may have to be admitted again

    def enter(self, as_made: bool = False) -> Tree:
        """The inputs as the stage's first layer gets them.

        With ``as_made`` their gradients keep the strides that autograd gives them, as in a model that is not cut; else
        they get those of the inputs, as DeepSpeed's do.
        """
        return map_tree(lambda leaf: _Entry.apply(leaf, as_made) if leaf.requires_grad else leaf, self.inputs)

    def keep_output(self, output: Tree) -> None:
        """Keep the output until it is sent, and its tensors with gradients until the backward pass."""
        self.output = output
        self.outputs = [leaf for leaf in leaves(output) if leaf is not None and leaf.requires_grad]

    def keep_input_gradients(self, copies: Callable[[torch.Tensor | None], torch.Tensor | None]) -> None:
        """Keep what ``copies`` makes of the gradients of the inputs until they are sent."""
        for leaf in leaves(self.inputs):
            if leaf is not None and leaf.requires_grad:
                leaf.grad = copies(leaf.grad)

    def input_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs that require one, in order."""
        return tuple(leaf.grad for leaf in leaves(self.inputs) if leaf is not None and leaf.requires_grad)
