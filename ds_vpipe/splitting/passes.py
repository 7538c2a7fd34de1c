"""Passes through a user's forward, block by block: one tries it out without values, others run some pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from ds_vpipe.splitting.absent import Absent, SplitError, place
from ds_vpipe.splitting.call import CallForm
from ds_vpipe.splitting.gates import Finished, Surroundings
from ds_vpipe.splitting.slots import Slot

if TYPE_CHECKING:
    from ds_vpipe.splitting.forward_route import ForwardRoute


class Pass:
    """One pass through the forward, block by block."""

    def __init__(self, route: ForwardRoute, form: CallForm) -> None:
        self.route, self.form, self.next = route, form, 0
        self._surroundings = Surroundings()

    def step(self, index: int) -> None:
        if index != self.next:
            what = "again" if index < self.next else f"before {self.route.name(self.next)}"
            raise SplitError(
                f"{place()}: forward calls {self.route.name(index)} {what}, allowed are blocks that are called once "
                f"each, in order; change the forward"
            )
        self.next += 1
        self._surroundings.check(self.route.name(index))


class Trial(Pass):
    """A pass without parameters that finds out what belongs where.

    Attributes:
        handed: for every piece, where in its tree of outputs there are absent values; for the first, among the first
            block's arguments.
        inside: a block is running.
    """

    def __init__(self, route: ForwardRoute, form: CallForm) -> None:
        super().__init__(route, form)
        self.handed: list[list[str]] = []
        self.inside = False

    @property
    def done(self) -> bool:
        return self.next == len(self.route.piece_names) - 2 and not self.inside

    def block(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.step(index)
        ledger = self.route.ledger
        if index == 0:
            args, kwargs = self._hand_on((args, kwargs), "the input of the first block")
            if not self.handed[0]:
                raise SplitError(
                    f"{self.route.name(0)}: none of its arguments comes from a parameter before it; allowed are blocks "
                    f"behind an embedding or another layer; change the forward"
                )
        ledger.piece, self.inside = index + 1, True
        outputs = self._hand_on(block(*args, **kwargs), f"the output of block {index}")
        ledger.piece, self.inside = index + 2, False
        return outputs

    def _hand_on(self, tree: Any, name: str) -> Any:
        pairs, spec = tree_flatten_with_path(tree)
        self.handed.append([str(path) for path, leaf in pairs if isinstance(leaf, Absent)])
        return tree_unflatten([leaf.handed_on(name) if isinstance(leaf, Absent) else leaf for _, leaf in pairs], spec)


class Run(Pass):
    """A pass through some pieces."""

    def __init__(
        self, route: ForwardRoute, form: CallForm, activations: tuple[torch.Tensor, ...], start: int, stop: int
    ) -> None:
        super().__init__(route, form)
        self._activations, self._start, self._stop = activations, start, stop
        self.arriving: list[Slot] = []

    def block(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.step(index)
        piece = index + 1
        if index == 0 and self._stop == 1:
            raise Finished(self._leaving((args, kwargs), 0))
        if index == 0 and self._start == 1:
            args, kwargs = self._replaced((args, kwargs))
        if piece < self._start:
            outputs = self.route.outlines.outputs(index, block, args, kwargs)
            return self._replaced(outputs) if piece == self._start - 1 else outputs
        outputs = block(*args, **kwargs)
        if piece == self._stop - 1:
            raise Finished(self._leaving(outputs, piece))
        return outputs

    def _leaving(self, tree: Any, piece: int) -> tuple[torch.Tensor, ...]:
        leaves = {str(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}
        places = self.route.handed(self.form, piece)
        if not all(isinstance(leaves.get(path), torch.Tensor) for path in places):
            raise SplitError(
                f"{self.route.piece_names[piece]}: returned another structure than when it was tried out, allowed is "
                f"the same in every call; change the forward"
            )
        return tuple(leaves[path] for path in places)

    def _replaced(self, tree: Any) -> Any:
        """``tree`` with the activations in the places of what is absent; from here on everything is real."""
        leaves, spec = tree_flatten(tree)
        places = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Absent)]
        if len(places) != len(self._activations):
            raise SplitError(
                f"{self.route.name(max(0, self._start - 2))}: got {len(self._activations)} activations from the stage "
                f"before, allowed are {len(places)} as in this rank's own call; make the same call on every rank, and "
                f"have blocks return tensors only (use_cache=False)"
            )
        for position, activation in zip(places, self._activations, strict=True):
            leaves[position] = activation
        for slot in self.arriving:
            slot.show()
        self.route.ledger.strict = True
        return tree_unflatten(leaves, spec)


class NoDraws(TorchDispatchMode):
    """Refuses random numbers that are drawn outside the blocks, before the last one has ended, and on no activation."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self._trial.inside and not self._trial.done:
            values = tree_leaves((args, kwargs))
            if not any(isinstance(value, Absent) for value in values):
                raise SplitError(
                    f"{place()}: {func} draws random numbers outside the blocks, which every stage would draw for "
                    f"itself; allowed are draws inside a block and dropout of activations; move them there, or into "
                    "the data"
                )
        return func(*args, **(kwargs or {}))
