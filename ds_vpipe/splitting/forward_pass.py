"""The interpreter: one pass through a user's forward, block by block and piece by piece.

A :class:`DryRun` has no values anywhere and finds out what crosses; a :class:`Run` has values in some pieces, takes
what crosses into the first of them and hands on what crosses out of the last. Both go the same way
(:class:`ForwardPass`): at each block they step, at each cut a piece begins, and each place where values are seen is
given to :meth:`ForwardPass.at`, where the one gives values their sources and the other finds values by their sources.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.block_proxy import Finished
from ds_vpipe.splitting.crossings import OUTSIDE, Crossings, Place, Source
from ds_vpipe.splitting.meta_tensor import MetaTensor, SplitError, place, put_value, written
from ds_vpipe.splitting.output_specs import MadeUpValues, Where
from ds_vpipe.splitting.parameter_slots import ParameterSlot

if TYPE_CHECKING:
    from ds_vpipe.splitting.forward_split import ForwardSplit


class DivergedError(BaseException):
    """End of a forward that does not go the way that it went in the dry run; may say where."""


class FunctionCalls(TorchFunctionMode):
    """Counter of the calls of torch's functions that return tensors, in each piece and in each block's call.

    Args:
        seen: gets the place of a call, a hash of all names until then, arguments and result, which it may replace.
        scopes: pieces and blocks in which calls are counted; everywhere if None.
    """

    def __init__(self, seen: Callable[[Place, int, Any, Any], Any], scopes: set[tuple[int, int]] | None) -> None:
        super().__init__()
        self._seen, self._scopes = seen, scopes
        self._paths: dict[tuple[int, int], int] = defaultdict(int)
        self.names: dict[tuple[int, int], list[str]] = defaultdict(list)
        self.move(0)

    def move(self, piece: int, block: int = OUTSIDE) -> None:
        """Say which piece is running, and which block's call."""
        self._where = piece, block
        self._on = self._scopes is None or self._where in self._scopes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._on or not any(isinstance(leaf, torch.Tensor) for leaf in _parts(result)):
            return result
        (piece, block), name, names = self._where, getattr(func, "__name__", ""), self.names[self._where]
        self._paths[self._where] = path = hash((self._paths[self._where], name))
        names.append(name)
        return self._seen(Place(piece, "function", len(names) - 1, block), path, args, result)


def _parts(result: Any) -> Any:
    return result if isinstance(result, (tuple, list)) else (result,)


class Draws(TorchDispatchMode):
    """Watch for random numbers that are drawn without an activation among the arguments.

    Args:
        read: gets the tensors that operations outside the blocks read.

    Attributes:
        by: the operation that has drawn some since this was set to None.
        on: it is looked for.
    """

    def __init__(self, read: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._read = read
        self.by: Any = None
        self.on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        drawn = self.on and torch.Tag.nondeterministic_seeded in func.tags
        if drawn and not any(isinstance(leaf, MetaTensor) for leaf in leaves):
            self.by = func
        statistics = _statistics(func, args)
        torch.autograd.graph.increment_version(statistics)
        if self._read is not None and self.on:
            targets = [written(func, args, kwargs), *statistics]
            for leaf in leaves:
                if not any(leaf is target for target in targets):
                    self._read(leaf)
        with torch._C.DisableTorchFunction():  # operations of functions such as vmap are no calls of the forward
            return func(*args, **kwargs)


def _statistics(func: Any, args: Any) -> list[torch.Tensor]:
    """Running statistics that an operation writes to, of which its schema says nothing."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if "running_mean" not in names or not (given.get("train") is True or given.get("training") is True):
        return []
    return [v for v in (given.get("running_mean"), given.get("running_var")) if isinstance(v, torch.Tensor)]


def _refuse_draws(by: Any) -> SplitError:
    return SplitError(
        f"{place()}: {by} draws random numbers outside the blocks, which every stage would draw for itself; allowed "
        f"are draws inside a block, dropout of activations, and torch functions that return new tensors, in every "
        f"call alike; move them there, or into the data"
    )


class ForwardPass:
    """One pass through the forward.

    Attributes:
        calls: of blocks so far.
        piece: that is running.
        inside: a block is running.
        functions: to be entered around the forward, as ``draws`` inside of it; None if not needed.
    """

    functions: FunctionCalls | None
    draws: Draws | None

    def __init__(self, split: ForwardSplit) -> None:
        self.split = split
        self.calls, self.piece, self.inside = 0, 0, False
        self.guard, self.before = guards.GradModeGuard(), guards.random_states()

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block or skip it, or end the forward."""
        if self.inside or self.over:
            return block(*args, **kwargs)
        number = self._step(block)
        if self.split.is_cut(2 * number):
            self._at_block("argument", number, (args, kwargs))
            self._next_piece()
        self._move(number)
        outputs = self._block(number, block, args, kwargs)
        self._move(OUTSIDE)
        self._at_block("result", number, outputs)
        if self.split.is_cut(2 * number + 1):
            self._next_piece()
        return outputs

    @property
    def over(self) -> bool:
        """All blocks have been called, so that the last piece is running."""
        return self.split.sequence is not None and self.calls >= len(self.split.sequence)

    def at(self, place: Place, leaves: Any, form: Any) -> None:
        """See values at a place."""
        raise NotImplementedError

    def _step(self, block: nn.Module) -> int:
        number, sequence = self.calls, self.split.sequence
        name = self.split.name_of(block)
        if sequence is not None and block is not sequence[number]:
            raise SplitError(
                f"{place()}: forward calls {name} where it called {self.split.name_of(sequence[number])} when it was "
                f"tried out, allowed are the same blocks in the same order in every call; change the forward"
            )
        self.calls += 1
        self.guard.check(name)
        return number

    def _move(self, block: int) -> None:
        self.inside = block != OUTSIDE
        if self.functions is not None:
            self.functions.move(self.piece, block)
        if self.draws is not None:
            self.draws.on = not self.inside

    def _called(self, at: Place, path: int, args: Any, result: Any) -> Any:
        """See a torch function return tensors."""
        if self.draws is not None and self.draws.by is not None:
            by, self.draws.by = self.draws.by, None
            if self._is_hidden(at, by, args, result):
                result = tree_map_only(torch.Tensor, lambda value: MetaTensor.drawn(value, self.split.log, by), result)
        self.at(at, _parts(result), path)
        return result

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        self.at(Place(self.piece, kind, number), *tree_flatten(value))

    def _is_hidden(self, at: Place, by: Any, args: Any, result: Any) -> bool:
        raise NotImplementedError

    def _next_piece(self) -> None:
        raise NotImplementedError

    def _block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class DryRun(ForwardPass):
    """A pass without any values that finds out what belongs where.

    Args:
        split: whose model.
        buffers: copies, which the model has meanwhile.
        guess: give meta tensors made-up values once all blocks have been called.

    Attributes:
        sequence: the blocks called, in order.
        writers: the piece that writes to a buffer.
    """

    def __init__(self, split: ForwardSplit, buffers: dict[Where, torch.Tensor], guess: bool) -> None:
        super().__init__(split)
        self.sequence: list[nn.Module] = []
        self.functions: FunctionCalls = FunctionCalls(self._called, None)
        self.draws: Draws = Draws(self._reads)
        self._forms: dict[Place, Any] = {}
        self._drawn: dict[Place, SplitError | None] = {}
        self.writers: dict[Where, int] = {}
        self._buffers = buffers
        self._modules = {id(module): module for module in split.model.modules()}
        self._readers: dict[Where, set[int]] = defaultdict(set)
        self._versions = {where: buffer._version for where, buffer in buffers.items()}
        self._at_last_block = self.before
        self._tail = ExitStack()
        self._guess = guess

    @property
    def done(self) -> bool:
        """All blocks have returned."""
        if self.split.sequence is None:
            return not self.inside and len({id(block) for block in self.sequence}) == len(self.split.blocks)
        return not self.inside and self.over

    def begin(self) -> None:
        """See the forward begin."""
        self._enter(0)

    def end(self) -> None:
        """See the forward end."""
        self._tail.close()
        self._look_at_buffers()
        self.split.log.piece = None

    def at(self, place: Place, leaves: Any, form: Any) -> None:
        """Give values that were made in this piece, or in this call, the source that they have here."""
        function = place.kind == "function"
        within = place.number if place.kind == "result" else OUTSIDE
        self._forms[place] = form
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, MetaTensor) and leaf.slot is None and leaf.made_in == self.piece:
                known = leaf.source.place if leaf.source is not None else None
                if known is None or (not function and (known.kind, known.block) == ("function", within)):
                    leaf.source = Source(place, position)

    def _block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.sequence.append(block)
        self.split.note_block(block, self.piece)
        outputs, written_to = self.split.specs.dry_run(block, args, kwargs)
        for where in written_to:
            self._writes(where)
        return outputs

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        super()._at_block(kind, number, value)
        if kind == "result":
            self._at_last_block = guards.random_states()
            if self._guess and self.done:
                self._tail.enter_context(MadeUpValues(self.split.log, None))

    def _next_piece(self) -> None:
        self._enter(self.piece + 1)

    def _enter(self, piece: int) -> None:
        self._look_at_buffers()
        self.piece = self.split.log.piece = piece
        self.functions.move(piece)
        for slot in self.split.outside:
            slot.stand_in(anew=True)

    def _look_at_buffers(self) -> None:
        """See which buffers outside the blocks have been written to."""
        for where, known in self._buffers.items():
            buffer = self._modules[where[0]]._buffers.get(where[1])
            if buffer is not None and (buffer is not known or buffer._version != self._versions[where]):
                self._buffers[where], self._versions[where] = buffer, buffer._version
                self._writes(where)

    def _reads(self, value: torch.Tensor) -> None:
        """See which buffers are read outside the blocks."""
        if isinstance(value, MetaTensor) or value.is_meta:
            return
        storage = value.untyped_storage()._cdata
        for where, buffer in self._buffers.items():
            if not isinstance(buffer, MetaTensor) and buffer.untyped_storage()._cdata == storage:
                self._readers[where].add(self.piece)

    def _writes(self, where: Where) -> None:
        if self.writers.setdefault(where, self.piece) != self.piece:
            raise SplitError(
                f"buffer {where[1]}: is written in pieces {self.writers[where]} and {self.piece}, each of which would "
                f"have its own; allowed are buffers that one piece writes; use a module for each call"
            )

    def _is_hidden(self, at: Place, by: Any, args: Any, result: Any) -> bool:
        given = tree_leaves(args)
        in_place = any(part is argument for part in _parts(result) for argument in given)
        self._drawn[at] = _refuse_draws(by) if in_place else None
        return not in_place and not (self.done and self.split.sequence is not None)

    def crossings(self, output: Any) -> Crossings:
        """What was found.

        Args:
            output: of the forward. Its values travel to the last piece if it is an evaluation.

        Raises:
            SplitError: random numbers are drawn, or buffers are used, in a way that cannot be run in pieces.
        """
        last, log = self.piece, self.split.log
        drawn = {at: refused for at, refused in self._drawn.items() if at.piece < last}
        for refused in drawn.values():
            if refused is not None:
                raise refused
        if guards.drawn_between(self.before, self._at_last_block, torch_too=False):
            raise _refuse_draws("Python or numpy")
        for where, piece in self.writers.items():
            readers = self._readers.get(where)
            if readers and (piece < last or min(readers) < piece):
                raise SplitError(
                    f"buffer {where[1]}: is written in piece {piece} and read outside the blocks in piece "
                    f"{min(readers)}, whose stage may have an older value; allowed are buffers that are written and "
                    f"read behind the last block, or in one block; pass the value as an argument of the call"
                )
        if not self.split.model.training:
            log.piece = last
            for leaf in tree_leaves(output):
                if isinstance(leaf, MetaTensor) and leaf.source is not None and leaf.source.place.block == OUTSIDE:
                    log.use(leaf)
            log.piece = None
        uses = sorted(log.last_use.items(), key=lambda use: (use[0].place, str(use[0].leaf)))
        arriving = [tuple(s for s, used in uses if s.place.piece < piece <= used) for piece in range(last + 1)]
        forms = {s.place: self._forms.get(s.place) for s, _ in uses if s.place.kind != "parameter"}
        if any(form is None for form in forms.values()):
            raise SplitError(
                f"{type(self.split.model).__name__}: uses a value of another call, which this stage does not have; "
                f"allowed are values of the same call; change the forward"
            )
        names = {where: names for where, names in self.functions.names.items() if where[1] == OUTSIDE}
        return Crossings([*arriving, ()], forms, frozenset(drawn), names)


class Run(ForwardPass):
    """A pass with values in pieces ``start`` to ``stop - 1``.

    Args:
        split: whose pieces.
        crossings: of the call's form and mode.
        activations: from the piece before.
        start: first piece.
        stop: behind the last piece.
        arriving: parameters that the model has from the first piece on.
        arrived: called when that begins.
    """

    def __init__(
        self,
        split: ForwardSplit,
        crossings: Crossings,
        activations: tuple[torch.Tensor, ...],
        start: int,
        stop: int,
        arriving: list[ParameterSlot],
        arrived: Callable[[], object],
    ) -> None:
        super().__init__(split)
        self._crossings, self._activations, self._start, self._stop = crossings, activations, start, stop
        self._arriving, self._arrived = arriving, arrived
        self._wanted = crossings.wanted(start, stop)
        self._found: dict[Source, torch.Tensor] = {}
        self._compare = (start, stop) not in crossings.compared
        scopes = None if self._compare else self._wanted.scopes
        self.functions = FunctionCalls(self._called, scopes) if scopes or self._compare else None
        self.draws = Draws() if start and crossings.drawn else None
        self._before_start = ExitStack()

    def begin(self) -> None:
        """See the forward begin."""
        if self._start:
            self._before_start.enter_context(guards.saving_nothing())
            self.guard.move()
            for source in self._wanted.parameters():
                if source.place.piece < self._start:
                    self._found[source] = self.split.slot(source.leaf).stand_in(anew=True)

    def end(self) -> None:
        """See the forward end, or the first piece begin."""
        self._before_start.close()

    def at(self, place: Place, leaves: Any, form: Any) -> None:
        """Find the values that cross."""
        for source in self._wanted.sources.get(place, ()):
            if form != self._crossings.forms[place]:
                raise DivergedError
            value = leaves[source.leaf]
            if not isinstance(value, torch.Tensor) or isinstance(value, MetaTensor) != (self.piece < self._start):
                raise DivergedError
            self._found[source] = value

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        if (self.piece, kind, number, OUTSIDE) in self._wanted.sources:
            super()._at_block(kind, number, value)

    def _block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.piece >= self._start:
            return block(*args, **kwargs)
        again = (self.piece, number) in self._wanted.scopes
        return self.split.specs.outputs(block, args, kwargs, again, f"a result of {number}")

    def _move(self, block: int) -> None:
        super()._move(block)
        if self.draws is not None:
            self.draws.on = not self.inside and self.piece < self._start

    def _is_hidden(self, at: Place, by: Any, args: Any, result: Any) -> bool:
        if at not in self._crossings.drawn:
            raise DivergedError
        return True

    def _next_piece(self) -> None:
        if self._compare:
            self._compare_names()
        self.piece += 1
        if self.piece == self._stop:
            raise Finished(self._leaving())
        if self.piece == self._start:
            with torch._C.DisableTorchFunction():
                self._arrive()
        self._move(OUTSIDE)

    def _compare_names(self) -> None:
        """See that the piece that ends has called the functions outside the blocks that it called without values.

        The first micro-batch is compared: whatever a dry run does not see alike, as code that asks for the class of a
        tensor does, would else compute something else without a word.
        """
        assert self.functions is not None
        found, wanted = (
            names.get((self.piece, OUTSIDE), []) for names in (self.functions.names, self._crossings.names)
        )
        for number, (one, other) in enumerate(zip_longest(found, wanted, fillvalue="nothing"), 1):
            if one != other:
                raise DivergedError(
                    f"piece {self.piece} ({self.split.piece_names[self.piece]}): the forward calls {one} as function "
                    f"{number} outside the blocks, and {other} where parameters have no values"
                )

    def _leaving(self) -> tuple[torch.Tensor, ...]:
        for source in self._wanted.parameters():
            if self._start <= source.place.piece < self._stop:
                parameter = self.split.slot(source.leaf).parameter
                assert parameter is not None
                self._found[source] = parameter
        sources = self._crossings.arriving[self._stop]
        if not all(source in self._found for source in sources):
            raise DivergedError
        return (self._crossings.mark(self._stop), *(self._found[source] for source in sources))

    def _arrive(self) -> None:
        """Put values into the places of meta tensors; from here on everything has values."""
        self.end()
        self.guard.move()
        if self._crossings.drawn:
            guards.restore(self.before)
        elif guards.drawn_between(self.before, guards.random_states()):
            raise _refuse_draws("the forward")
        sources = self._crossings.arriving[self._start]
        mark, *activations = self._activations or (None,)
        if len(sources) != len(activations):
            raise SplitError(
                f"{self.split.piece_names[self._start]}: got {len(activations)} activations from the stage "
                f"before, allowed are {len(sources)} as in this rank's own call; make the same call on every rank"
            )
        if mark is not None and mark.shape != self._crossings.mark(self._start).shape:
            raise DivergedError(
                "the stage before hands on other values, as where parameters are frozen after initialize() or on one "
                "rank only"
            )
        for source, activation in zip(sources, activations, strict=True):
            if source not in self._found:
                raise DivergedError
            put_value(self._found[source], activation)
        for slot in self._arriving:
            slot.show()
        self._arrived()
        self.split.log.strict = True
