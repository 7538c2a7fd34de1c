"""A model run piece by piece through the user's own forward.

Pieces begin where a block is called or where one returns. A run of pieces ``start`` to ``stop - 1`` calls the user's
forward with the call's own arguments: until the activations are put in, parameters are absent and blocks are skipped;
after the run's last piece the forward is ended. What depends only on the arguments, such as attention masks, is
therefore computed on each stage. Any other value that a later piece uses travels from the piece that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_vpipe.splitting import generators
from ds_vpipe.splitting.absent import Ledger, SplitError, ValueNeededError
from ds_vpipe.splitting.blocks import Blocks
from ds_vpipe.splitting.call import CallForm
from ds_vpipe.splitting.gates import Finished, Gates, saving_nothing
from ds_vpipe.splitting.outlines import AgainError, Outlines, Where, own_buffers, own_numbers
from ds_vpipe.splitting.passes import OtherWayError, Plan, Run, Trial
from ds_vpipe.splitting.slots import Slot

Call = tuple[tuple[Any, ...], dict[str, Any]]
Mode = tuple[int, bool, bool]


class ForwardRoute:
    """Runs pieces of a model through its forward.

    Args:
        model: the user's, with all its parameters.
        blocks: between which it may be split.
        slots: its parameters.
        ledger: of the slots' absent values.

    Attributes:
        model: the user's.
        blocks: between which it may be split.
        ledger: of the slots' absent values.
        outlines: of what the blocks return.
        outside: parameters outside the blocks.
        sequence: the blocks in the order in which they are called; None until the first trial.
        piece_names: one per piece.
        pieces_of: the pieces that use each slot, by name.
        buffer_piece: the piece of each buffer, by ``id`` of its module and its name there.
        writers: the piece that writes to a buffer, as seen in the last trial.
        cut_short: the last trial's own call was not run to the end.
        running: the model's forward is called here, and not by somebody else.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, slots: Sequence[Slot], ledger: Ledger) -> None:
        self.model, self.ledger = model, ledger
        self._choice, self._slots = blocks, slots
        self.blocks = blocks.modules
        self._names = {id(block): name for block, name in zip(blocks.modules, blocks.names, strict=True)}
        self._gates = Gates(model, self.blocks)
        parts = {id(block): {id(part) for part in block.modules()} for block in self.blocks}
        members = {block: [slot for slot in slots if id(slot.module) in found] for block, found in parts.items()}
        self._members = members
        self.outlines = Outlines(ledger, members)
        self._inside = set().union(*parts.values())
        self.outside = [slot for slot in slots if id(slot.module) not in self._inside]
        self._modules = {id(module): module for module in model.modules()}
        self._by_name = {str(slot.absent.slot): slot for slot in reversed(slots)}
        self.sequence: list[nn.Module] | None = None
        self._cuts: frozenset[int] | None = None
        self._plans: dict[Mode, Plan] = {}
        self.cut_short = self.running = False
        self.piece_names: list[str] = []
        self.pieces_of: dict[str, tuple[int, ...]] = {}
        self.buffer_piece: dict[tuple[int, str], int] = {}
        self._buffers: dict[int, int] = {}
        self._written: set[Where] = set()
        self.writers: dict[Where, int] = {}
        self._ever_written: dict[Where, int] = {}

    # Where pieces begin

    def is_cut(self, event: int) -> bool:
        """Whether a piece begins with an event: twice a block's call for what comes before it, and one more behind."""
        if self._cuts is not None:
            return event in self._cuts
        return event >= 2 and event % 2 == 0 if self._choice.merged else event == 0 or event % 2 == 1

    def name_of(self, block: nn.Module) -> str:
        """A block's name in the model."""
        return self._names[id(block)]

    def slot(self, name: int | str) -> Slot:
        """A parameter by its first name."""
        return self._by_name[str(name)]

    def split_at_all(self, sequence: Sequence[nn.Module]) -> None:
        """Settle the order in which blocks are called, with all cuts."""
        self.sequence = list(sequence)
        self._cut([event for event in range(2 * len(sequence)) if self.is_cut(event)])

    def thin(self, pieces: int) -> bool:
        """Leave cuts out that more than the least number of values cross, if so many pieces remain without them.

        Returns:
            Some have been left out, so that all plans are gone.
        """
        assert self._cuts is not None
        plan, cuts = next(iter(self._plans.values())), sorted(self._cuts)
        counts = [len(crossing) for crossing in plan.crossing[1:-1]]
        for least in sorted(set(counts)):
            kept = [cut for cut, count in zip(cuts, counts, strict=True) if count <= least]
            if len(kept) + 1 >= pieces and len(kept) < len(cuts):
                self._cut(kept)
                self._plans.clear()
                return True
            if len(kept) + 1 >= pieces:
                break
        return False

    def _cut(self, events: Sequence[int]) -> None:
        assert self.sequence is not None
        self._cuts = frozenset(events)
        if self._choice.merged:
            starts = [0, *(event // 2 for event in events)]
            self.piece_names = [self.name_of(self.sequence[call]) for call in starts]
        else:
            self.piece_names = ["front", *map(self.name_of, self.sequence), "tail"]

    # Which piece has what

    def assign(self, touched: dict[str, set[int]]) -> None:
        """Give every slot to the pieces that use it, or else by where it is registered.

        If nothing is known, parameters of the modules around the blocks themselves belong to both ends.
        """
        assert self.sequence is not None
        blocks = {id(block) for block in self.blocks}
        around = {id(m) for m in self.model.modules() if blocks & {id(part) for part in m.modules()}} - self._inside
        if not touched:
            touched = {}
            for piece, block in enumerate(self.sequence, 1):
                for slot in self._members[id(block)]:
                    touched.setdefault(str(slot.absent.slot), set()).add(piece)
                for part in block.modules():
                    self._buffers.setdefault(id(part), piece)
            for slot in self.outside:
                if id(slot.module) in around:
                    touched[str(slot.absent.slot)] = {0, len(self.piece_names) - 1}
        for slot in self._slots:
            used = touched.get(str(slot.absent.slot), ())
            self.pieces_of[slot.name] = tuple(sorted(used)) or (self._by_place(slot.module),)
        for module in self.model.modules():
            for key in module._buffers:
                piece = self._buffers.get(id(module), self._by_place(module))
                self.buffer_piece[id(module), key] = self.writers.get((id(module), key), piece)

    def _by_place(self, module: nn.Module) -> int:
        order = {id(part): position for position, part in enumerate(self.model.modules())}
        first = min(order[id(block)] for block in self.blocks)
        return 0 if order[id(module)] < first else len(self.piece_names) - 1

    def note_block(self, block: nn.Module, piece: int) -> None:
        """In a trial, see that a block with all that belongs to it is used in a piece."""
        for slot in self._members[id(block)]:
            self.ledger.touched.setdefault(str(slot.absent.slot), set()).add(piece)
        for part in block.modules():
            self._buffers.setdefault(id(part), piece)

    # Passes

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
        as_given = _copy(call)
        guess, again = False, False
        while True:
            try:
                trial, output = self._try(_copy(as_given) if again else call, to_the_end, guess)
            except AgainError:
                again = True
                continue
            if trial is not None:
                break
            guess = again = True  # what comes after the last block may look at values, as no other piece follows
        self.cut_short |= again
        if not trial.sequence or (self.sequence is not None and len(trial.sequence) < len(self.sequence)):
            raise self._too_few_calls(len(trial.sequence))
        if self.sequence is None:
            self.split_at_all(trial.sequence)
        self._plans[self.mode(form)] = trial.plan(output)
        return self.ledger.touched

    def _try(self, call: Call, to_the_end: bool, guess: bool) -> tuple[Trial | None, Any]:
        """A trial, and what the forward returned; None if the end of the forward looks at values."""
        output = None
        self.ledger.strict, self.ledger.touched, self.ledger.last_use = False, {}, {}
        self.ledger.holder = "a stage without that parameter"
        self.cut_short = True
        with ExitStack() as around:
            around.enter_context(generators.untouched_generators())
            around.enter_context(saving_nothing())
            around.enter_context(own_numbers(self.model))
            around.enter_context(self._standing_in(self._slots))
            around.enter_context(self._noting_modules())
            around.enter_context(self._running())
            trial = Trial(self, around.enter_context(own_buffers(self.model)), guess)
            around.enter_context(self._gates.closed(trial))
            around.enter_context(trial.functions)
            around.enter_context(trial.draws)
            try:
                trial.enter(0)
                output = self.model(*call[0], **call[1])
                self.cut_short = False
            except ValueNeededError:
                if not trial.done:
                    raise
                if not guess:
                    return None, None
            except SplitError:
                raise
            except Exception:
                if not trial.done or (to_the_end and not guess):
                    raise
            finally:
                trial.end()
        self.writers = trial.writers
        self._ever_written |= trial.writers
        self._written |= {where for where in trial.writers if where[0] not in self._inside}
        return trial, output

    def _too_few_calls(self, found: int) -> SplitError:
        expected = len(self.blocks if self.sequence is None else self.sequence)
        return SplitError(
            f"{self._choice.name}: forward called {found} of {expected} blocks; allowed is a forward that "
            f"calls the same ones in the same order in every call; change the forward"
        )

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
            OtherWayError: it does not go as it did when a call of this form was tried out; no number has been drawn.
        """
        self.ledger.holder, self.ledger.strict = holder, start == 0
        plan = self._plans[self.mode(form)]
        hidden, arriving = self._parameters_of(start, stop)
        copies = ExitStack()
        if start and self._written:
            copies.enter_context(own_buffers(self.model, self._written))
        run = Run(self, plan, activations, start, stop, arriving, copies.close)
        kept = [(module, key, buffer, buffer.clone()) for module, key, buffer in self._statistics(start, stop)]
        with copies, ExitStack() as around:
            for context in (self._standing_in(hidden), self._gates.closed(run), self._running(), *run.modes()):
                around.enter_context(context)
            run.begin()
            try:
                output = self.model(*call[0], **call[1])
            except Finished as finished:
                plan.compared.add((start, stop))
                return finished.activations
            except (OtherWayError, AgainError) as error:
                generators.restore(run.before)
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    for module, key, buffer, before in kept:
                        module._buffers[key] = buffer.copy_(before)
                raise OtherWayError(*error.args) from None
            finally:
                run.end()
                self.ledger.strict = False
        if not run.done or stop != len(self.piece_names):
            raise self._too_few_calls(run.calls)
        plan.compared.add((start, stop))
        return output

    def _statistics(self, start: int, stop: int) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Buffers that a run writes to, which a forward that is run again would do twice."""
        written = [
            (self._modules[where[0]], where[1]) for where, at in self._ever_written.items() if start <= at < stop
        ]
        found = ((module, key, module._buffers.get(key)) for module, key in written)
        return [(module, key, buffer) for module, key, buffer in found if buffer is not None]

    def mode(self, form: CallForm) -> Mode:
        """What a trial is for: the forward may ask whether it trains, and whether there are gradients."""
        return form.fingerprint, self.model.training, torch.is_grad_enabled()

    def _parameters_of(self, start: int, stop: int) -> tuple[list[Slot], list[Slot]]:
        """Slots to be hidden at first, and those of them that the run has once its first piece begins."""
        hidden, arriving = [], []
        for slot in self._slots:
            pieces = self.pieces_of[slot.name]
            here = slot.parameter is not None and any(start <= piece < stop for piece in pieces)
            if slot.parameter is None:
                hidden.append(slot)
            elif not here or (start and (id(slot.module) not in self._inside or pieces[0] < start)):
                hidden.append(slot)
                if here:
                    arriving.append(slot)
        return hidden, arriving

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.running = True
        try:
            yield
        finally:
            self.running = False

    @contextmanager
    def _standing_in(self, hidden: Sequence[Slot]) -> Iterator[None]:
        """Hide parameters from the forward; afterwards all slots are as at rest."""
        for slot in hidden:
            if slot.follow():
                self.outlines.forget()
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
            if self.ledger.piece is not None:
                self._buffers[id(module)] = self.ledger.piece

        handles = [
            module.register_forward_pre_hook(note)
            for module in self.model.modules()
            if module._buffers and id(module) not in self._inside
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copy(call: Call) -> Call:
    copied: Call = tree_map_only(torch.Tensor, torch.Tensor.clone, call)
    return copied
