"""A model run piece by piece through the user's own forward.

Pieces begin where a block is called or where one returns. A run of pieces ``start`` to ``stop - 1`` calls the user's
forward with the call's own arguments: until the activations are put in, parameters have no values and blocks are
skipped; after the run's last piece the forward is ended. What depends only on the arguments, such as attention masks,
is therefore computed on each stage. Any other value that a later piece uses travels from the piece that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.block_proxy import BlockProxies, Finished
from ds_vpipe.splitting.blocks import BlockList
from ds_vpipe.splitting.call import Call, CallForm
from ds_vpipe.splitting.crossings import Crossings
from ds_vpipe.splitting.forward_pass import DivergedError, DryRun, Run
from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError, ValueNeededError
from ds_vpipe.splitting.output_specs import OutputSpecs, RetryError, Where, own_buffers, own_numbers
from ds_vpipe.splitting.parameter_slots import ParameterSlot

Mode = tuple[int, bool, bool]


class ForwardSplit:
    """Split of a model's forward into pieces.

    Args:
        model: the user's, with all its parameters.
        blocks: between which it may be split.
        slots: its parameters.
        log: of the slots' meta tensors.

    Attributes:
        specs: of what the blocks return.
        outside: parameters outside the blocks.
        sequence: the blocks in the order in which they are called; None until the first dry run.
        piece_names: one per piece.
        pieces_of: the pieces that use each parameter, by name.
        buffer_piece: the piece of each buffer, by ``id`` of its module and its name there.
        writers: the piece that writes to a buffer, as seen in the last dry run.
        cut_short: the last dry run's own call was not run to the end.
        running: the model's forward is called here, and not by somebody else.
    """

    def __init__(self, model: nn.Module, blocks: BlockList, slots: Sequence[ParameterSlot], log: AccessLog) -> None:
        self.model, self.log = model, log
        self._choice, self._slots = blocks, slots
        self.blocks = blocks.modules
        self._names = {id(block): name for block, name in zip(blocks.modules, blocks.names, strict=True)}
        self._proxies = BlockProxies(model, self.blocks)
        parts = {id(block): {id(part) for part in block.modules()} for block in self.blocks}
        self._members = {block: [slot for slot in slots if id(slot.module) in found] for block, found in parts.items()}
        self.specs = OutputSpecs(log, self._members)
        self._inside = set().union(*parts.values())
        self.outside = [slot for slot in slots if id(slot.module) not in self._inside]
        self._modules = {id(module): module for module in model.modules()}
        self._by_name = {str(slot.meta.slot): slot for slot in reversed(slots)}
        self.sequence: list[nn.Module] | None = None
        self._cuts: frozenset[int] | None = None
        self._crossings: dict[Mode, Crossings] = {}
        self._layouts: dict[tuple[int, int], tuple[list[ParameterSlot], list[ParameterSlot]]] = {}
        self.cut_short = self.running = False
        self.piece_names: list[str] = []
        self.pieces_of: dict[str, tuple[int, ...]] = {}
        self.buffer_piece: dict[Where, int] = {}
        self._buffers: dict[int, int] = {}
        self.writers: dict[Where, int] = {}
        self._ever_written: dict[Where, int] = {}

    # Where pieces begin

    def is_cut(self, event: int) -> bool:
        """Whether a piece begins with an event: twice a block's call for what comes before it, and one more behind."""
        if self._cuts is not None:
            return event in self._cuts
        return event >= 2 and event % 2 == 0 if self._choice.merged else event == 0 or event % 2 == 1

    def name_of(self, block: nn.Module) -> str:
        """Name of a block in the model."""
        return self._names[id(block)]

    def slot(self, name: int | str) -> ParameterSlot:
        """Parameter by its first name."""
        return self._by_name[str(name)]

    def split_at_all(self, sequence: Sequence[nn.Module]) -> None:
        """Settle the order in which blocks are called, with all cuts."""
        self.sequence = list(sequence)
        self._cut([event for event in range(2 * len(sequence)) if self.is_cut(event)])

    def thin(self, pieces: int) -> bool:
        """Leave cuts out that more than the least number of values cross, if so many pieces remain without them.

        Returns:
            Some have been left out, so that all crossings are gone.
        """
        assert self._cuts is not None
        arriving, cuts = next(iter(self._crossings.values())).arriving, sorted(self._cuts)
        counts = [len(sources) for sources in arriving[1:-1]]
        for least in sorted(set(counts)):
            kept = [cut for cut, count in zip(cuts, counts, strict=True) if count <= least]
            if len(kept) + 1 >= pieces:
                if len(kept) == len(cuts):
                    return False
                self._cut(kept)
                self._crossings.clear()
                return True
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
        """Give every parameter to the pieces that use it, or else by where it is registered.

        If nothing is known, parameters of the modules around the blocks themselves belong to both ends.
        """
        assert self.sequence is not None
        if not touched:
            blocks = {id(block) for block in self.blocks}
            around = {id(m) for m in self.model.modules() if blocks & {id(part) for part in m.modules()}} - self._inside
            touched = self.log.touched = {}
            for piece, block in enumerate(self.sequence, 1):
                self.note_block(block, piece)
            for slot in self.outside:
                if id(slot.module) in around:
                    touched[str(slot.meta.slot)] = {0, len(self.piece_names) - 1}
        order = {id(part): position for position, part in enumerate(self.model.modules())}
        first, last = min(order[id(block)] for block in self.blocks), len(self.piece_names) - 1
        by_place = {module: 0 if position < first else last for module, position in order.items()}
        for slot in self._slots:
            used = touched.get(str(slot.meta.slot), ())
            self.pieces_of[slot.name] = tuple(sorted(used)) or (by_place[id(slot.module)],)
        for module in self.model.modules():
            for key in module._buffers:
                piece = self._buffers.get(id(module), by_place[id(module)])
                self.buffer_piece[id(module), key] = self.writers.get((id(module), key), piece)

    def note_block(self, block: nn.Module, piece: int) -> None:
        """See that a block with all that belongs to it is used in a piece."""
        for slot in self._members[id(block)]:
            self.log.touched.setdefault(str(slot.meta.slot), set()).add(piece)
        for part in block.modules():
            self._buffers.setdefault(id(part), piece)

    def forget_layout(self) -> None:
        """See that other parameters are here, or other pieces use them."""
        self._layouts.clear()

    # Passes

    def mode(self, form: CallForm) -> Mode:
        """Identifies a dry run: the forward may ask whether it trains, and whether there are gradients."""
        return form.fingerprint, self.model.training, torch.is_grad_enabled()

    def known(self, form: CallForm) -> bool:
        """Whether such a call has been tried out in this mode."""
        return self.mode(form) in self._crossings

    def try_out(self, form: CallForm, call: Call, *, to_the_end: bool = True) -> dict[str, set[int]]:
        """Run a call without any parameter and return which pieces use which parameters.

        Args:
            form: of the call.
            call: positional and keyword arguments.
            to_the_end: else the forward may fail once the last block has run, as a loss does whose labels are made up;
                what it has used by then is returned.

        Raises:
            SplitError: the pieces cannot be run one after the other; says why.
        """
        as_given: Call = tree_map_only(torch.Tensor, torch.Tensor.clone, call)
        guess, again = False, False
        while True:
            try:
                dry, output = self._try(
                    tree_map_only(torch.Tensor, torch.Tensor.clone, as_given) if again else call, to_the_end, guess
                )
            except RetryError:
                again = True
                continue
            if dry is not None:
                break
            guess = again = True  # what comes after the last block may look at values, as no other piece follows
        self.cut_short |= again
        if not dry.sequence or (self.sequence is not None and len(dry.sequence) < len(self.sequence)):
            raise self._too_few_calls(len(dry.sequence))
        if self.sequence is None:
            self.split_at_all(dry.sequence)
        self._crossings[self.mode(form)] = dry.crossings(output)
        return self.log.touched

    def _try(self, call: Call, to_the_end: bool, guess: bool) -> tuple[DryRun | None, Any]:
        """A dry run, and what the forward returned; None if the end of the forward looks at values."""
        output = None
        self.log.strict, self.log.touched, self.log.last_use = False, {}, {}
        self.log.holder = "a stage without that parameter"
        self.cut_short = True
        with ExitStack() as around:
            around.enter_context(guards.untouched_generators())
            around.enter_context(guards.saving_nothing())
            around.enter_context(own_numbers(self.model))
            around.enter_context(self._noting_modules())
            dry = DryRun(self, around.enter_context(own_buffers(self.model)), guess)
            around.enter_context(self._interpreted(dry, self._slots))
            try:
                dry.begin()
                output = self.model(*call[0], **call[1])
                self.cut_short = False
            except ValueNeededError:
                if not dry.done:
                    raise
                if not guess:
                    return None, None
            except SplitError:
                raise
            except Exception:
                if not dry.done or (to_the_end and not guess):
                    raise
            finally:
                dry.end()
        self.writers = dry.writers
        self._ever_written |= dry.writers
        return dry, output

    def _too_few_calls(self, found: int) -> SplitError:
        expected = len(self.blocks if self.sequence is None else self.sequence)
        return SplitError(
            f"{self._choice.name}: forward called {found} of {expected} blocks; allowed is a forward that "
            f"calls the same ones in the same order in every call; change the forward"
        )

    def run(
        self, form: CallForm, call: Call, activations: tuple[torch.Tensor, ...], start: int, stop: int, holder: str
    ) -> tuple[torch.Tensor, ...] | Any:
        """Run pieces ``start`` to ``stop - 1`` of a call that has been tried out.

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
            DivergedError: it does not go as it did when such a call was tried out; no number has been drawn.
        """
        self.log.holder, self.log.strict = holder, start == 0
        crossings = self._crossings[self.mode(form)]
        if (start, stop) not in self._layouts:
            self._layouts[start, stop] = self._parameters_of(start, stop)
        hidden, arriving = self._layouts[start, stop]
        copies = ExitStack()
        written = {where for where in self._ever_written if where[0] not in self._inside}
        if start and written:
            copies.enter_context(own_buffers(self.model, written))
        run = Run(self, crossings, activations, start, stop, arriving, copies.close)
        kept = [(module, key, buffer, buffer.clone()) for module, key, buffer in self._statistics(start, stop)]
        with copies, self._interpreted(run, hidden):
            run.begin()
            try:
                output = self.model(*call[0], **call[1])
            except Finished as finished:
                crossings.compared.add((start, stop))
                return finished.activations
            except (DivergedError, RetryError) as error:
                guards.restore(run.before)
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    for module, key, buffer, before in kept:
                        module._buffers[key] = buffer.copy_(before)
                raise DivergedError(*error.args) from None
            finally:
                run.end()
                self.log.strict = False
        if not run.over or stop != len(self.piece_names):
            raise self._too_few_calls(run.calls)
        crossings.compared.add((start, stop))
        return output

    def _statistics(self, start: int, stop: int) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Buffers that a run writes to, which a forward that is run again would do twice."""
        written = [w for w, piece in self._ever_written.items() if start <= piece < stop]
        found = ((self._modules[module], key, self._modules[module]._buffers.get(key)) for module, key in written)
        return [(module, key, buffer) for module, key, buffer in found if buffer is not None]

    def _parameters_of(self, start: int, stop: int) -> tuple[list[ParameterSlot], list[ParameterSlot]]:
        """Slots to be hidden at first, and those of them that the run has once its first piece begins."""
        hidden, arriving = [], []
        for slot in self._slots:
            pieces = self.pieces_of[slot.name]
            here = slot.parameter is not None and any(start <= piece < stop for piece in pieces)
            if not here or (start and (id(slot.module) not in self._inside or pieces[0] < start)):
                hidden.append(slot)
                if here:
                    arriving.append(slot)
        return hidden, arriving

    @contextmanager
    def _interpreted(self, handler: DryRun | Run, hidden: Sequence[ParameterSlot]) -> Iterator[None]:
        """Inside, the model's forward goes to ``handler``, without parameters in ``hidden``."""
        for slot in hidden:
            if slot.follow():
                self.specs.forget()
            slot.stand_in()
        self.running = True
        try:
            with self._proxies.installed(handler.call), ExitStack() as modes:
                for mode in (handler.functions, handler.draws):
                    if mode is not None:
                        modes.enter_context(mode)
                yield
        finally:
            self.running = False
            for slot in hidden:
                slot.rest()

    @contextmanager
    def _noting_modules(self) -> Iterator[None]:
        """Note in which piece modules with buffers are called."""

        def note(module: nn.Module, _: Any) -> None:
            if self.log.piece is not None:
                self._buffers[id(module)] = self.log.piece

        outside = [module for module in self.model.modules() if module._buffers and id(module) not in self._inside]
        handles = [module.register_forward_pre_hook(note) for module in outside]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
