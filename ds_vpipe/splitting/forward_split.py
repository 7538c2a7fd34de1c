"""A model run piece by piece through the user's own forward.

Pieces begin where a block is called or where one returns. A run of pieces ``start`` to ``stop - 1`` calls the user's
forward with the call's own arguments: until the activations are put in, parameters have no values and blocks are
skipped; after the run's last piece the forward is ended. What depends only on the arguments, such as attention masks,
is therefore computed on each stage. Any other value that a later piece uses travels from the piece that makes it.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.blocks import BlockList
from ds_vpipe.splitting.call import Call, CallForm
from ds_vpipe.splitting.dry_run import CallsSeen, DryRun
from ds_vpipe.splitting.forward_pass import Crossings, DivergedError, Finished, ForwardPass, Run, Watch
from ds_vpipe.splitting.guards import Where
from ds_vpipe.splitting.kept_state import refuse_kept
from ds_vpipe.splitting.layout import Layout
from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError, ValueNeededError, place_of
from ds_vpipe.splitting.module_numbers import ModuleNumbers
from ds_vpipe.splitting.output_specs import RetryError
from ds_vpipe.splitting.parameter_slots import ParameterSlot
from ds_vpipe.splitting.python_state import Held, PythonState, hooks_since, registrations, remove_hooks

Mode = tuple[int, bool, bool, Any]
_MOST_WAYS = 32
_set_class = object.__dict__["__class__"].__set__  # also where a class has a ``__class__`` of its own


class ForwardSplit:
    """Split of a model's forward into pieces."""

    def __init__(self, model: nn.Module, blocks: BlockList, slots: Sequence[ParameterSlot], log: AccessLog) -> None:
        self.model, self.layout = model, Layout(model, blocks, slots, log)
        self._intercepting = {own: self._intercepting_class(own) for own in map(type, self.layout.blocks)}
        self._modules = {id(module): module for module in model.modules()}
        self._encoders = [module for module in self._modules.values() if isinstance(module, nn.TransformerEncoder)]
        self._crossings: dict[Mode, list[Crossings]] = {}  # of all ways that calls have gone, the last one first
        self.buffer_piece: dict[Where, int] = {}  # the piece of each buffer
        self._ever_written: dict[Where, int] = {}
        self._python_state = PythonState(model.modules())  # of the last dry run
        self.numbers = ModuleNumbers(model.modules())  # those, too, that dry runs have made
        self._of_one_call = set[int]()  # dicts, by ``id``, in which a forward registers hooks that it removes

    def drop_wide_cuts(self, pieces: int) -> bool:
        """Leave out cuts that many values cross, if ``pieces`` remain.

        Returns:
            Some have been left out, so that all crossings are gone.
        """
        arriving, cuts = next(iter(self._crossings.values()))[0].arriving, self.layout.cuts
        counts = [len(sources) for sources in arriving[1:-1]]
        for least in sorted(set(counts)):
            wide = frozenset(cut for cut, count in zip(cuts, counts, strict=True) if count > least)
            if len(cuts) - len(wide) + 1 >= pieces:
                self.layout.left_out = wide
                if wide:
                    self._crossings.clear()
                return bool(wide)
        return False

    # Which piece has what

    def assign(self, dry: DryRun | None) -> None:
        """Assign parameters and buffers to pieces, by use or by registration.

        If nothing is known, parameters of the modules around the blocks themselves belong to both ends.
        """
        last, blocks = len(self.layout.piece_names) - 1, {id(block) for block in self.layout.blocks}
        if dry is None:
            dry = DryRun(self.layout, {}, False, None)
            for dry.piece, block in enumerate(self.layout.sequence or (), 1):
                dry.note_block(block)
            for slot in self.layout.outside:
                if blocks & {id(part) for part in slot.module.modules()}:
                    dry.touched[str(slot.meta.slot)] = {0, last}
        order = {id(part): position for position, part in enumerate(self.model.modules())}
        first = min(order[block] for block in blocks)
        by_place = {module: 0 if position < first else last for module, position in order.items()}
        for slot in self.layout.slots:
            used = dry.touched.get(str(slot.meta.slot), ())
            slot.pieces = tuple(sorted(used)) or (by_place[id(slot.module)],)
        for module in self.model.modules():
            for key in module._buffers:
                where = id(module), key
                readers = [piece for piece, outside in dry.readers.get(where, ()) if outside]
                home = dry.block_pieces.get(id(module), max(readers, default=by_place[id(module)]))
                self.buffer_piece[where] = dry.writers.get(where, home)

    # Passes

    def mode(self, form: CallForm) -> Mode:
        """Key of the trials: form, training mode, gradients, autocast. Calls with one key share their ways."""
        return form.trial, self.model.training, torch.is_grad_enabled(), guards.autocast()

    def try_out(self, form: CallForm, call: Call, *, to_the_end: bool = True) -> DryRun:
        """Dry run of a call: which values cross, and which pieces use what.

        If not ``to_the_end``, the forward may fail behind the last block, as a loss does whose labels are made up.

        Raises:
            SplitError: the pieces cannot be run one after the other; says why.
        """
        given: Call = call
        as_given: Call = tree_map_only(torch.Tensor, torch.Tensor.clone, call)
        guess, around = 0, None
        while True:
            try:
                dry, output = self._dry_run(given, to_the_end, guess, around)
                if around is None:  # the run before has called all functions that are checkpointed as they are
                    around = frozenset(dry.with_blocks)
                    if len(around) < dry.checkpoints_outside:
                        raise RetryError
                break
            except RetryError as retry:
                guess = guess or retry.behind_calls
                given = tree_map_only(torch.Tensor, torch.Tensor.clone, as_given)
        dry.cut_short |= given is not call
        dry.looks |= form.varies
        if not dry.sequence or (self.layout.sequence is not None and len(dry.sequence) < len(self.layout.sequence)):
            raise self.layout.too_few_calls(len(dry.sequence))
        if self.layout.sequence is None:
            self.layout.sequence = dry.sequence
        found, known = dry.crossings(output), self._crossings.setdefault(self.mode(form), [])
        if found in known:
            found = known[known.index(found)]  # whose runs have been compared
        self.prefer(form, found)
        del known[_MOST_WAYS:]
        return dry

    def ways(self, form: CallForm, start: int = 0, activations: Sequence[Any] = ()) -> list[Crossings]:
        """Crossings of the ways that calls have gone which have been tried out, the last one first.

        With several only those with which piece ``start - 1`` can have handed on these activations.
        """
        known = self._crossings[self.mode(form)]
        if len(known) == 1 or not activations:
            return known[:]
        return [way for way in known if way.mark(start).shape == activations[0].shape]

    def prefer(self, form: CallForm, way: Crossings) -> None:
        """Order of the known ways: this one first."""
        known = self._crossings[self.mode(form)]
        if not known or known[0] is not way:
            known[:] = [way, *(other for other in known if other is not way)]

    @guards.put_back_settings()
    def _dry_run(self, call: Call, to_the_end: bool, guess: int, around: Set[int] | None) -> tuple[DryRun, Any]:
        """A dry run, and what the forward returned."""
        output = None
        self._python_state = PythonState(self.model.modules(), self._python_state)
        first_hook = RemovableHandle.next_id
        remove_hooks = partial(self._python_state.remove_hooks, first_hook)
        with (
            guards.untouched_generators(),
            guards.saving_nothing(),
            warnings.catch_warnings(),
            self._python_state.untouched(),
            registrations() as registered,
            guards.own_buffers(self.model) as buffers,
        ):
            warnings.simplefilter("ignore")  # of shapes that are made up, or to be said of a micro-batch
            warnings.filterwarnings("default", "ds_vpipe: ")
            dry = DryRun(self.layout, buffers, guess, around, self.held)
            forward = vars(self.model).get("forward")
            with self._interpreted(dry, self.layout.slots), dry.going_on():
                try:
                    output = self._forward(call)
                    dry.refuse_caught()
                    if vars(self.model).get("forward") is not forward:
                        raise SplitError(
                            f"{type(self.model).__name__}: got a forward that puts another one in its place, as that "
                            f"of Lightning's Trainer does, which calls training_step() once and logs what most stages "
                            f"do not have, allowed is one that may be called several times; call the model itself in a "
                            f"loop, as with Fabric"
                        )
                    dry.cut_short = False
                except ValueNeededError as error:
                    if not dry.done:
                        raise
                    if not guess:  # what comes after the last block may look at values, as no other piece follows
                        raise RetryError(behind_calls=len(dry.sequence)) from error
                except SplitError:
                    raise
                except Exception as error:
                    dry.refuse_caught()
                    if "data is not allocated" in str(error):  # torch's words for a tensor without values
                        raise SplitError(
                            f"{place_of(error)}: calls something that reads memory without telling torch, as recurrent "
                            f"layers do with a packed sequence, and tensors without values have none; allowed are "
                            f"torch's other functions, and numpy(); pad, and pass lengths as a mask"
                        ) from error
                    if not dry.done or (to_the_end and not guess):
                        raise
            if not dry.cut_short:
                kept = {id(store) for store, *_ in hooks_since(self.model.modules(), first_hook)}
                self._of_one_call |= registered - kept
                rerun = partial(self._rerun, call, (buffers, guess, around))
                refuse_kept(self.model, dry.kept, self.held, remove_hooks, rerun)
            self.numbers.find()
        self._ever_written |= dry.writers
        return dry, output

    def _forward(self, call: Call) -> Any:
        """Output of the model's forward, not compiled as a whole, which would compile the interpreter too."""
        model = self.model if self.model._compiled_call_impl is None else self.model._call_impl
        try:
            return model(*call[0], **call[1])
        except RuntimeError as error:
            if "set_stance" not in str(error):
                raise
            raise SplitError(
                f"{type(self.model).__name__}: got a compiled module or function around blocks, allowed are compiled "
                f"blocks; leave that out, and call engine.compile() after initialize()"
            ) from None

    def held(self) -> Held:
        """What the model's attributes hold outside the blocks."""
        return self._python_state.held(self.layout.inside)

    @guards.put_back_settings()
    def _rerun(self, call: Call, options: tuple[Any, ...], stop: int | None = None) -> CallsSeen:
        """What another dry run of a call calls, from what the model's attributes hold now, before piece ``stop``."""
        dry, seen = DryRun(self.layout, *options), CallsSeen(list)
        dry.calls_seen, dry.stop = seen, stop
        try:
            with (
                suppress(Finished),
                guards.untouched_generators(),
                self._interpreted(dry, self.layout.slots),
                dry.going_on(),
            ):
                self._forward(call)
        except Exception as error:
            seen[dry.piece].append((type(error).__name__,))
        return seen

    @guards.put_back_settings()
    def run(
        self, crossings: Crossings, call: Call, activations: tuple[torch.Tensor, ...], start: int, stop: int,
        watch: Watch | None = None, run_before: Collection[int] = (), called_again: Collection[int] = (),
    ) -> tuple[torch.Tensor, ...] | Any:  # fmt: skip
        """Run pieces ``start`` to ``stop - 1`` of a call that goes the way of ``crossings``.

        Takes what piece ``start - 1`` handed on, and returns what piece ``stop - 1`` hands on, or the forward's output.
        ``watch`` is called where the first of the pieces begins and where each ends, with their number so far and the
        value that the last one ends with. What modules with the ``id``s ``run_before`` remember is as before
        afterwards: their blocks have been run for this call, and are skipped here. Blocks of those in ``called_again``
        have been run, too, and are called here.

        Raises:
            SplitError: the forward needs something that this run does not have, or cannot put it back.
            DivergedError: it goes another way; no number has been drawn.
        """
        attributes = self._python_state.read()  # a forward that is run again would count twice, and these, too
        statistics = []
        for (module, key), piece in self._ever_written.items():
            buffer = self._modules[module]._buffers.get(key)
            if buffer is not None and start <= piece < stop:
                statistics.append((self._modules[module], key, buffer, buffer.clone()))
        hidden, before_start = self._hidden(start, stop)
        run = Run(self.layout, crossings, activations, start, stop, before_start, watch)
        if called_again:
            before_start.callback(self._refuse_grown, run, called_again, attributes)
        written = {where for where in self._ever_written if where[0] not in self.layout.inside}
        if start and written:
            before_start.enter_context(guards.own_buffers(self.model, written))
        try:
            with self._interpreted(run, hidden, crossings.casts), run.going_on():
                output = self._forward(call)
                run.refuse_caught()
        except Finished as finished:
            run.refuse_caught()
            crossings.compared.add((start, stop))
            self._remove_hooks(attributes.next_hook)
            self._put_back_in(run_before, attributes)
            return finished.activations
        except (Exception, DivergedError, RetryError) as error:
            failed = isinstance(error, Exception)  # while blocks are skipped, if they have new settings
            if failed and (run.piece >= start or isinstance(error, SplitError)):
                raise
            guards.restore(run.before)
            self._python_state.put_back(attributes)
            with torch.no_grad():
                for owner, key, buffer, value in statistics:
                    owner._buffers[key] = buffer.copy_(value)
            raise DivergedError(*(() if failed else error.args)) from None
        if not run.over or stop != len(self.layout.piece_names):
            raise self.layout.too_few_calls(run.calls)
        crossings.compared.add((start, stop))
        self._put_back_in(run_before, attributes)
        if watch is not None:
            watch(stop - start, output)
        return output

    def _remove_hooks(self, first: int) -> None:
        """Remove those hooks since ``first`` that the forward removes at its end."""
        found = hooks_since(self.model.modules(), first) if self._of_one_call else []
        remove_hooks([held for held in found if id(held[0]) in self._of_one_call], first)

    def _put_back_in(self, modules: Collection[int], attributes: Any) -> None:
        large = self._python_state.put_back_in(modules, attributes) if modules else None
        if large is not None:
            raise SplitError(
                f"{self.layout.name_of(large[0])}.{large[1]}: changes in every call and has "
                f"more than 1,000 entries, allowed are fewer where only a part of a stage is recomputed or swapped; "
                f"remove old ones, or write 0 or 1 for the stage's ratio"
            )

    def _refuse_grown(self, run: Run, modules: Collection[int], attributes: Any) -> None:
        """Refuse what the calls of a block that are skipped have changed, since they have done so in another run."""
        changed = self._python_state.changed_in(modules, attributes)
        if changed is not None and run.piece == run.start:
            raise SplitError(
                f"{self.layout.name_of(changed[0])}.{changed[1]}: changes in every call of a block that a call of the "
                f"model makes more than once, allowed are blocks without where a part of a stage is recomputed or "
                f"swapped; write 0 or 1 for the stage's ratio, or let the block return it"
            )

    def _hidden(self, start: int, stop: int) -> tuple[list[ParameterSlot], ExitStack]:
        """Slots hidden at first, and a stack that restores those of the run."""
        hidden, before_start, run = [], ExitStack(), set(range(start, stop))
        for slot in self.layout.slots:
            here = slot.parameter is not None and not run.isdisjoint(slot.pieces)
            if not here or (start and (id(slot.module) not in self.layout.inside or slot.pieces[0] < start)):
                hidden.append(slot)
                if here:
                    before_start.callback(slot.restore)
        return hidden, before_start

    @contextmanager
    def _interpreted(
        self, handler: ForwardPass, hidden: Sequence[ParameterSlot], casts: bool = False
    ) -> Iterator[None]:  # fmt: skip
        """Inside, blocks call ``handler``, and the model lacks the parameters ``hidden``. ``casts``: it uses autocast.

        A block that differentiates in its forward may have pieces recomputed there: then another pass is in here
        already, and finds everything as it was.
        """
        outer, found = self.layout.log.forward_pass, [slot.module._parameters.get(slot.key) for slot in hidden]
        for slot in hidden:
            if slot.follow():
                self.layout.specs.forget()
            slot.stand_in()
        nesting = [encoder for encoder in self._encoders if vars(encoder).get("use_nested_tensor")]
        for encoder in nesting:  # in evaluation, of padded values
            encoder.use_nested_tensor = False
        fast = torch.backends.mha.get_fastpath_enabled()
        if casts or torch.is_autocast_enabled("cpu"):  # torch's layers give other dtypes on it than the trial has had
            torch.backends.mha.set_fastpath_enabled(False)
        self.layout.log.forward_pass = handler
        classes = [(block, type(block)) for block in self.layout.blocks]
        try:
            for block, own in classes:
                _set_class(block, self._intercepting.get(own, own))  # some intercept already
            yield
        finally:
            for block, own in classes:
                _set_class(block, own)
            self.layout.log.forward_pass = outer
            torch.backends.mha.set_fastpath_enabled(fast)
            for encoder in nesting:
                encoder.use_nested_tensor = True
            for slot, before in zip(hidden, found, strict=True):
                slot.restore() if outer is None else slot.put(before)

    def _intercepting_class(self, own: type[nn.Module]) -> type[nn.Module]:
        """Class of blocks while the forward runs. Their calls go to the handler.

        It is made as ``torch.nn.utils.parametrize`` makes classes. A block that runs is of its own class again.
        """

        def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _set_class(block, own)
            try:
                return self.layout.log.forward_pass.call(block, args, kwargs)
            finally:
                _set_class(block, made)

        with patch.object(own, "__init_subclass__", classmethod(lambda *_, **__: None)):  # it may list subclasses
            # The property is for code that asks for the class.
            made = type(own.__name__, (own,), {"__class__": property(lambda _: own)})
        made.__call__ = made.forward = call  # type: ignore[method-assign,attr-defined]
        return made
