"""Base of :class:`.SplitModule`.

It is apart from it, as :mod:`.recompute` and :mod:`.partitioned`, which that module needs, have to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import PipelineModule

from ds_vpipe.splitting.stage_model import Caller, Piece, StageModel, call_now

TIMED = "_vpipe_timed"
"""Name of a module's attribute, which is a :class:`Timed` while the time of its layers is taken."""


class Timed(NamedTuple):
    """Functions that run layers and take the time."""

    layer: Callable[[int, Callable[[Any], Any], Any], Any]  # at a position of ``forward_funcs``, on a value
    # The same of a run of pieces from a position on, which :meth:`.StageModel.run` runs, on a value and with a watch.
    pieces: Callable[[int, Callable[..., Any], Any], Any]


class PieceModule(PipelineModule):
    """A pipeline module whose layers are pieces of one forward: :class:`.SplitModule`."""

    stage_model: StageModel
    forward_funcs: list[Piece]
    fwd_map: dict[str, int]

    @property
    def user_module(self) -> torch.nn.Module:
        """The user's model, which holds this stage's parameters under their own names."""
        return self.stage_model.model

    def run_several(self, start: int, stop: int, value: Any, caller: Caller = call_now) -> Any:
        """Run layers ``start`` to ``stop - 1`` of ``forward_funcs``, consecutive in the model, in one forward."""
        run = partial(
            self.stage_model.run, start=self.forward_funcs[start].index, stop=self.forward_funcs[stop - 1].index + 1,
            caller=caller if caller is call_now else partial(self._call, caller, start),
        )  # fmt: skip
        timed = vars(self).get(TIMED)
        return run(value) if timed is None else timed.pieces(start, run, value)

    def _call(self, caller: Caller, position: int, function: Callable[[Any], Any], value: Any) -> Any:
        """Call ``function`` by ``caller``, which may run it again later; only later runs are timed here."""
        again = False

        def run(value: Any) -> Any:
            nonlocal again
            timed, again = vars(self).get(TIMED) if again else None, True
            return function(value) if timed is None else timed.layer(position, function, value)

        return caller(run, value)

    def in_portions(self, portions: Sequence[tuple[int, int]]) -> Iterator[int]:
        """:meth:`.StageModel.in_portions`, of positions in ``forward_funcs``."""
        pieces = [piece.index for piece in self.forward_funcs]
        return self.stage_model.in_portions([(pieces[start], pieces[stop - 1] + 1) for start, stop in portions])

    def hold_layers(self, numbers: Sequence[int]) -> None:
        """Put these pieces into ``forward_funcs``; before :meth:`.SplitModule.release`.

        Raises:
            SplitError: this rank has no longer all pieces.
        """
        self.stage_model.keep(numbers, lambda piece: self.stage_owner(piece))
        self._register(numbers)

    def take_layers(self, numbers: Sequence[int]) -> None:
        """Put these pieces into ``forward_funcs``; after :meth:`.SplitModule.release`. New ones have no values yet."""
        self.stage_model.take(numbers)
        self._register(numbers)
        for comm in self.tied_comms.values():
            tied = self.user_module.get_parameter(comm["weight_attr"][0])
            tied.ds_pipe_replicated = self.global_rank != comm["ranks"][0]  # type: ignore[attr-defined]  # DeepSpeed's

    def _register(self, numbers: Sequence[int]) -> None:
        pieces = self.stage_model.pieces
        for number in numbers:
            self.fwd_map[str(number)] = len(self.forward_funcs)
            self.forward_funcs.append(pieces[number])
            self._modules[str(number)] = pieces[number]  # the user's module may have attributes of these names
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False
