"""A model with a chain of blocks, run piece by piece through the user's own forward.

Pieces are the code before the first block, each block, and the code after the last one; code between two blocks
belongs to the later one. A run of pieces ``start`` to ``stop - 1`` calls the user's forward with the call's own
arguments: until the activations are put in, parameters are absent and blocks are skipped; after the last block of the
run the forward is ended. What depends only on the arguments, such as attention masks, is therefore computed on each
stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.absent import Ledger, SplitError
from ds_vpipe.splitting.call import CallForm
from ds_vpipe.splitting.chain import Chain
from ds_vpipe.splitting.gates import Finished, Outlines, gated
from ds_vpipe.splitting.passes import NoDraws, Run, Trial
from ds_vpipe.splitting.slots import Slot

Call = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardRoute:
    """Runs pieces of a model through its forward.

    Args:
        model: the user's, with all its parameters.
        chain: its blocks.
        slots: its parameters.
        ledger: of the slots' absent values.

    Attributes:
        piece_names: one per piece.
        pieces_of: the pieces that use each slot, by name.
        buffer_piece: the piece of each buffer, by ``id`` of its module and its name there.
        cut_short: the last trial ended before the forward did.
        running: the model's forward is called here, and not by somebody else.
    """

    def __init__(self, model: nn.Module, chain: Chain, slots: Sequence[Slot], ledger: Ledger) -> None:
        self._model, self._chain, self._slots, self._ledger = model, chain, slots, ledger
        self.piece_names = ["front", *chain.names(), "tail"]
        self._outlines = Outlines()
        self.cut_short = self.running = False
        self._handed: dict[tuple[int, bool], list[list[str]]] = {}
        inside = {id(m): i + 1 for i, block in enumerate(chain.blocks) for m in block.modules()}
        self._inside = inside
        self._outside = [slot for slot in slots if id(slot.module) not in inside]
        order = [id(module) for module in model.modules()]
        self._first_block = order.index(id(chain.blocks[0]))
        self._position = {module: position for position, module in enumerate(order)}
        self.pieces_of: dict[str, tuple[int, ...]] = {}
        self.buffer_piece: dict[tuple[int, str], int] = {}
        self.assign({})

    def assign(self, touched: dict[str, set[int]]) -> None:
        """Give every slot to the pieces that use it, or else by where it is registered.

        If nothing is known, parameters of the modules around the blocks themselves belong to both ends.
        """
        around = {id(m) for m in self._model.modules() if any(p is self._chain.container for p in m.modules())}
        for slot in self._slots:
            own = self._by_place(slot.module)
            used = set(touched.get(str(slot.absent.slot), ()))
            if id(slot.module) in self._inside:
                used.add(own)
            if not touched and id(slot.module) in around and id(slot.module) not in self._inside:
                used = {0, len(self.piece_names) - 1}
            self.pieces_of[slot.name] = tuple(sorted(used)) or (own,)
        for module in self._model.modules():
            for key in module._buffers:
                self.buffer_piece.setdefault((id(module), key), self._by_place(module))

    def _by_place(self, module: nn.Module) -> int:
        last = len(self.piece_names) - 1
        return self._inside.get(id(module), 0 if self._position[id(module)] < self._first_block else last)

    def try_out(self, form: CallForm, call: Call, *, to_the_end: bool = True) -> dict[str, set[int]]:
        """Run a call without any parameter and return which pieces use which slots.

        Args:
            form: of the call.
            call: positional and keyword arguments.
            to_the_end: else the forward may fail once the last block has run, as a loss does whose labels are made up;
                what it has used by then is returned.

        Raises:
            SplitError: the pieces cannot be run one after the other; says why.
        """
        state = random.getstate()
        self.cut_short = True
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._standing_in(()), self._noting_modules():
            trial = Trial(self, form)
            self._ledger.piece, self._ledger.strict, self._ledger.touched = 0, False, {}
            self._ledger.holder = "a stage without that parameter"
            try:
                with gated(self._chain, trial), NoDraws(trial), self._running():
                    self._model(*call[0], **call[1])
                self.cut_short = False
            except SplitError as error:
                # What comes after the last block is not run in pieces, so it may look at values.
                if not trial.done or "looks at the value" not in str(error):
                    raise
            except Exception:
                if to_the_end or not trial.done:
                    raise
            finally:
                self._ledger.piece = None
        if not trial.done:
            raise SplitError(
                f"{self._chain.name}: forward called {trial.next} of {len(self._chain.keys)} blocks; allowed is a "
                f"forward that calls each once, in order; change the forward"
            )
        if random.getstate() != state:
            raise SplitError(
                "forward: Python's random numbers are drawn outside the blocks, which every stage would draw for "
                "itself; allowed are draws inside a block; move them there, or into the data"
            )
        self._handed[form.fingerprint, self._model.training] = trial.handed
        return self._ledger.touched

    def run(
        self, form: CallForm, call: Call, activations: tuple[torch.Tensor, ...], start: int, stop: int, holder: str
    ) -> tuple[torch.Tensor, ...] | Any:
        """Run pieces ``start`` to ``stop - 1``.

        Args:
            form: of the call.
            call: positional and keyword arguments.
            activations: what piece ``start - 1`` handed on; empty for piece 0.
            start: first piece.
            stop: behind the last piece.
            holder: the stage, for messages.

        Returns:
            What piece ``stop - 1`` hands on; if it is the last piece, what the forward returned.

        Raises:
            SplitError: the forward needs something that this run does not have.
        """
        self._ledger.holder, self._ledger.strict = holder, start == 0
        run = Run(self, form, activations, start, stop)
        used = [slot for slot in self._outside if any(start <= p < stop for p in self.pieces_of[slot.name])]
        run.arriving = used
        with self._standing_in(used if start == 0 else ()), gated(self._chain, run), self._running():
            try:
                output = self._model(*call[0], **call[1])
            except Finished as finished:
                return finished.activations
            finally:
                self._ledger.strict = False
        if run.next != len(self._chain.keys) or stop != len(self.piece_names):
            raise SplitError(
                f"{self._chain.name}: forward called {run.next} of {len(self._chain.keys)} blocks; allowed is a "
                f"forward that calls each once, in order, in every call; change the forward"
            )
        return output

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def handed(self, form: CallForm, piece: int) -> list[str]:
        """Where in the first block's arguments, or in a block's outputs, what ``piece`` hands on is."""
        known = self._handed.get((form.fingerprint, self._model.training))
        return (known or self._handed[form.fingerprint, not self._model.training])[piece]

    @contextmanager
    def _standing_in(self, shown: Sequence[Slot]) -> Iterator[None]:
        """Show parameters outside the blocks only if they are in ``shown``; afterwards all slots are as at rest."""
        known = {id(slot) for slot in shown}
        hidden = [slot for slot in self._slots if slot.parameter is None]
        hidden += [slot for slot in self._outside if slot.parameter is not None and id(slot) not in known]
        for slot in hidden:
            slot.stand_in()
        try:
            yield
        finally:
            for slot in hidden:
                if slot.parameter is None:
                    slot.hide()
                else:
                    slot.show()

    @contextmanager
    def _noting_modules(self) -> Iterator[None]:
        """Note in which piece modules with buffers are called."""

        def note(module: nn.Module, _: Any) -> None:
            if self._ledger.piece is not None and id(module) not in self._inside:
                self.buffer_piece.update({(id(module), key): self._ledger.piece for key in module._buffers})

        handles = [
            module.register_forward_pre_hook(note)
            for module in self._model.modules()
            if module._buffers and id(module) not in self._inside
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def name(self, index: int) -> str:
        """A block's name."""
        return self.piece_names[index + 1]

    @property
    def outlines(self) -> Outlines:
        """Of the blocks."""
        return self._outlines

    @property
    def ledger(self) -> Ledger:
        """Of the absent values."""
        return self._ledger
