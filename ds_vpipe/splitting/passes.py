"""Passes through a user's forward, block by block: one tries it out without values, others run some pieces.

Both find a value again by its :class:`~ds_vpipe.splitting.absent.Key`: an argument or a result of a block's call, or
a result of the n-th call of a torch function that returns tensors, in a piece outside the blocks or in a block. The
names of all functions called there until then have to be the same, so that a forward that takes another way is noticed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ds_vpipe.splitting import generators
from ds_vpipe.splitting.absent import Absent, Key, Ledger, SplitError, place, written
from ds_vpipe.splitting.gates import Finished, Surroundings, saving_nothing
from ds_vpipe.splitting.outlines import Guesses, Where
from ds_vpipe.splitting.slots import Slot

if TYPE_CHECKING:
    from ds_vpipe.splitting.forward_route import ForwardRoute

Place = tuple[int, int, int]
OUTSIDE = -1
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class OtherWayError(BaseException):
    """Ends a forward that does not go the way that it went when a call of its form was tried out; may say where."""


@dataclass
class Plan:
    """What is known of calls of one form.

    Attributes:
        crossing: for every piece the values that it gets from the piece before, in the order in which they travel.
        paths: of function calls (piece, scope, number) whose results travel, what all names until then come to.
        specs: forms of the trees of arguments and results of blocks, by kind and call.
        names: of all functions called, by piece and block's call.
        drawn: function calls outside the blocks that draw random numbers.
        compared: first and last piece of runs whose function calls have been compared with ``names``.
    """

    crossing: list[tuple[Key, ...]]
    paths: dict[Place, int] = field(default_factory=dict)
    specs: dict[tuple[str, int], TreeSpec] = field(default_factory=dict)
    names: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    drawn: frozenset[Place] = frozenset()
    compared: set[tuple[int, int]] = field(default_factory=set)
    _wanted: dict[tuple[int, int], Wanted] = field(default_factory=dict)

    def mark(self, piece: int) -> torch.Tensor:
        """An empty tensor whose shape says which values cross to a piece, as a rank with another plan has others."""
        digest = hashlib.sha256(repr([tuple(key) for key in self.crossing[piece]]).encode()).digest()
        return torch.empty(1, 0, int.from_bytes(digest[:7], "big"), dtype=torch.uint8)

    def wanted(self, start: int, stop: int) -> Wanted:
        """The values to look out for while pieces ``start`` to ``stop - 1`` are run."""
        if (start, stop) not in self._wanted:
            self._wanted[start, stop] = Wanted(
                {*self.crossing[start], *self.crossing[stop]}, [at for at in self.drawn if at[0] < start]
            )
        return self._wanted[start, stop]


class Wanted:
    """Where values come from that one run has to find.

    Args:
        keys: of the values.
        drawn: function calls before the run's pieces that draw random numbers.

    Attributes:
        arguments: of blocks' calls, by call.
        results: of blocks' calls, by call.
        functions: results of function calls, by place.
        scopes: places without numbers where function calls have to be counted.
        parameters: keys of parameters.
    """

    def __init__(self, keys: Iterable[Key], drawn: Iterable[Place]) -> None:
        self.arguments: dict[int, list[Key]] = defaultdict(list)
        self.results: dict[int, list[Key]] = defaultdict(list)
        self.functions: dict[Place, list[Key]] = defaultdict(list)
        self.parameters: list[Key] = []
        for key in keys:
            if key.kind == "argument":
                self.arguments[key.number].append(key)
            elif key.kind == "result":
                self.results[key.number].append(key)
            elif key.kind == "function":
                self.functions[key.piece, key.scope, key.number].append(key)
            else:
                self.parameters.append(key)
        self.scopes = {(piece, scope) for piece, scope, _ in (*self.functions, *drawn)}


class Functions(TorchFunctionMode):
    """Numbers the calls of torch's functions that return tensors, in each piece and in each block's call.

    Args:
        seen: gets the place of each call, what the names until then come to, the arguments and the result, which it
            may replace.
        scopes: (piece, scope) where calls are numbered; everywhere if None.

    Attributes:
        names: of the functions called, by piece and block's call.
    """

    def __init__(self, seen: Callable[[Place, int, Any, Any], Any], scopes: set[tuple[int, int]] | None = None) -> None:
        super().__init__()
        self._seen, self._scopes = seen, scopes
        self._counts: dict[tuple[int, int], int] = defaultdict(int)
        self._paths: dict[tuple[int, int], int] = defaultdict(int)
        self.names: dict[tuple[int, int], list[str]] = defaultdict(list)
        self.move(0)

    def move(self, piece: int, scope: int = OUTSIDE) -> None:
        """Say which piece is running, and which block's call."""
        self._where = piece, scope
        self._on = self._scopes is None or self._where in self._scopes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._on or not any(isinstance(leaf, torch.Tensor) for leaf in _parts(result)):
            return result
        where, number, name = self._where, self._counts[self._where], getattr(func, "__name__", "")
        self._counts[where] += 1
        self._paths[where] = hash((self._paths[where], name))
        self.names[where].append(name)
        return self._seen((*where, number), self._paths[where], args, result)


def _parts(result: Any) -> Any:
    return result if isinstance(result, (tuple, list)) else (result,)


def _hidden(result: Any, ledger: Ledger, func: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda value: Absent.drawn(value, ledger, func), result)


class Draws(TorchDispatchMode):
    """Notices random numbers that are drawn without an activation among the arguments.

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
        drawn = self.on and torch.Tag.nondeterministic_seeded in func.tags
        if drawn and not any(isinstance(value, Absent) for value in tree_leaves((args, kwargs))):
            self.by = func
        statistics = _statistics(func, args)
        torch.autograd.graph.increment_version(statistics)
        if self._read is not None and self.on:
            targets = [written(func, args, kwargs), *statistics]
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not any(leaf is target for target in targets):
                    self._read(leaf)
        return func(*args, **kwargs)


def _statistics(func: Any, args: Any) -> list[torch.Tensor]:
    """Running statistics that an operation writes to, of which its schema says nothing."""
    names = [argument.name for argument in func._schema.arguments]
    if "running_mean" not in names or not any(
        argument is True for name, argument in zip(names, args, strict=False) if name in ("train", "training")
    ):
        return []
    given = (args[names.index(name)] for name in ("running_mean", "running_var"))
    return [value for value in given if isinstance(value, torch.Tensor)]


def _refuse_draws(by: Any) -> SplitError:
    return SplitError(
        f"{place()}: {by} draws random numbers outside the blocks, which every stage would draw for itself; allowed "
        f"are draws inside a block, dropout of activations, and torch functions that return new tensors, in every "
        f"call alike; move them there, or into the data"
    )


class Pass:
    """One pass through the forward, block by block.

    Attributes:
        calls: of blocks so far.
        piece: that is running.
        inside: a block is running.
    """

    def __init__(self, route: ForwardRoute) -> None:
        self.route = route
        self.calls, self.piece, self.inside = 0, 0, False
        self._surroundings, self.before = Surroundings(), generators.states()

    def step(self, block: nn.Module) -> int:
        """The number of a block's call.

        Raises:
            SplitError: it is another block's turn, or there can be no boundary here.
        """
        number, sequence = self.calls, self.route.sequence
        name = self.route.name_of(block)
        if sequence is not None and block is not sequence[number]:
            raise SplitError(
                f"{place()}: forward calls {name} where it called {self.route.name_of(sequence[number])} when it was "
                f"tried out, allowed are the same blocks in the same order in every call; change the forward"
            )
        self.calls += 1
        self._surroundings.check(name)
        return number

    @property
    def done(self) -> bool:
        """All blocks have been called, so that what comes is the last piece."""
        return not self.inside and self.route.sequence is not None and self.calls >= len(self.route.sequence)


class Trial(Pass):
    """A pass without parameters that finds out what belongs where.

    Args:
        route: whose model.
        buffers: copies, which the model has during the trial.
        guess: give absent values made-up ones once all blocks have been called.

    Attributes:
        sequence: the blocks called, in order.
        functions: to be entered around the forward.
        draws: to be entered inside of ``functions``.
        writers: the piece that writes to a buffer.
    """

    def __init__(self, route: ForwardRoute, buffers: dict[Where, torch.Tensor], guess: bool) -> None:
        super().__init__(route)
        self.sequence: list[nn.Module] = []
        self.functions, self.draws = Functions(self._seen), Draws(self._reads)
        self._paths: dict[Place, int] = {}
        self._specs: dict[tuple[str, int], TreeSpec] = {}
        self._drawn: dict[Place, SplitError | None] = {}
        self.writers: dict[Where, int] = {}
        self._buffers = buffers
        self._modules = {id(module): module for module in route.model.modules()}
        self._readers: dict[Where, set[int]] = defaultdict(set)
        self._versions = {where: buffer._version for where, buffer in buffers.items()}
        self._at_last_block = self.before
        self._tail = ExitStack()
        self._guess = guess

    @property
    def done(self) -> bool:
        if self.route.sequence is None:
            return not self.inside and len({id(block) for block in self.sequence}) == len(self.route.blocks)
        return super().done

    def enter(self, piece: int) -> None:
        """See a piece begin."""
        self._look_at_buffers()
        self.piece = self.route.ledger.piece = piece
        self.functions.move(piece)
        for slot in self.route.outside:
            slot.stand_in(anew=True)

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block and give names to what goes in and comes out."""
        if self.inside or (self.route.sequence is not None and self.done):
            return block(*args, **kwargs)
        number = self.step(block)
        self.sequence.append(block)
        if self.route.is_cut(2 * number):
            leaves, self._specs["argument", number] = tree_flatten((args, kwargs))
            self._name(leaves, "argument", number, OUTSIDE)
            self.enter(self.piece + 1)
        self.route.note_block(block, self.piece)
        self.inside, self.draws.on = True, False
        self.functions.move(self.piece, number)
        outputs, spec, written = self.route.outlines.trial(block, args, kwargs)
        self.functions.move(self.piece)
        self.inside, self.draws.on = False, True
        for where in written:
            self._writes(where)
        self._name(outputs, "result", number, number)
        self._specs["result", number] = spec
        if self.route.is_cut(2 * number + 1):
            self.enter(self.piece + 1)
        self._at_last_block = generators.states()
        if self._guess and self.done:
            self._tail.enter_context(Guesses(self.route.ledger, None))
        return tree_unflatten(outputs, spec)

    def end(self) -> None:
        """See the forward end."""
        self._tail.close()
        self._look_at_buffers()
        self.route.ledger.piece = None

    def _name(self, leaves: list[Any], kind: str, number: int, scope: int) -> None:
        """Let values that were made in this piece, or in this call, be known by where they are here."""
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Absent) or leaf.slot is not None or leaf.made_in != self.piece:
                continue
            if leaf.key is None or (leaf.key.kind, leaf.key.scope) == ("function", scope):
                leaf.key = Key(self.piece, kind, number, OUTSIDE, position)

    def _look_at_buffers(self) -> None:
        """See which buffers outside the blocks have been written to."""
        for where, known in self._buffers.items():
            buffer = self._modules[where[0]]._buffers.get(where[1])
            if buffer is not None and (buffer is not known or buffer._version != self._versions[where]):
                self._buffers[where], self._versions[where] = buffer, buffer._version
                self._writes(where)

    def _reads(self, value: torch.Tensor) -> None:
        """See which buffers are read outside the blocks."""
        if isinstance(value, Absent) or value.is_meta:
            return
        storage = value.untyped_storage()._cdata
        for where, buffer in self._buffers.items():
            if not isinstance(buffer, Absent) and buffer.untyped_storage()._cdata == storage:
                self._readers[where].add(self.piece)

    def _writes(self, where: Where) -> None:
        if self.writers.setdefault(where, self.piece) != self.piece:
            raise SplitError(
                f"buffer {where[1]}: is written in pieces {self.writers[where]} and {self.piece}, each of which would "
                f"have its own; allowed are buffers that one piece writes; use a module for each call"
            )

    def _seen(self, where: Place, path: int, args: Any, result: Any) -> Any:
        if self.draws.by is not None:
            by, self.draws.by = self.draws.by, None
            given = tree_leaves(args)
            in_place = any(part is argument for part in _parts(result) for argument in given)
            self._drawn[where] = _refuse_draws(by) if in_place else None
            if not self.done or self.route.sequence is None:
                result = result if in_place else _hidden(result, self.route.ledger, by)
        for position, part in enumerate(_parts(result)):
            if isinstance(part, Absent) and part.key is None and part.slot is None and part.made_in == self.piece:
                part.key = Key(where[0], "function", where[2], where[1], position)
                self._paths[where] = path
        return result

    def plan(self, output: Any) -> Plan:
        """What was found.

        Args:
            output: of the forward. Its values travel to the last piece if it is an evaluation.

        Raises:
            SplitError: random numbers are drawn in a way that cannot be run in pieces.
        """
        last, ledger = self.piece, self.route.ledger
        drawn = {where: refused for where, refused in self._drawn.items() if where[0] < last}
        refused = next((refused for refused in drawn.values() if refused is not None), None)
        if refused is not None:
            raise refused
        if not generators.alike((None, None, *self.before[2:]), (None, None, *self._at_last_block[2:])):
            raise _refuse_draws("Python or numpy")
        for where, piece in self.writers.items():
            readers = self._readers.get(where)
            if readers and (piece < last or min(readers) < piece):
                raise SplitError(
                    f"buffer {where[1]}: is written in piece {piece} and read outside the blocks in piece "
                    f"{min(readers)}, whose stage may have an older value; allowed are buffers that are written and "
                    f"read behind the last block, or in one block; pass the value as an argument of the call"
                )
        if not self.route.model.training:
            ledger.piece = last
            for leaf in tree_leaves(output):
                if isinstance(leaf, Absent) and leaf.key is not None and leaf.key.scope == OUTSIDE:
                    ledger.use(leaf)
            ledger.piece = None
        uses = sorted(ledger.last_use.items(), key=lambda use: (*use[0][:4], str(use[0].leaf)))
        crossing = [tuple(key for key, used in uses if key.piece < piece <= used) for piece in range(last + 1)]
        places = {(key.piece, key.scope, key.number) for key, _ in uses if key.kind == "function"}
        if not places <= self._paths.keys():
            raise SplitError(
                f"{type(self.route.model).__name__}: uses a value of another call, which this stage does not have; "
                f"allowed are values of the same call; change the forward"
            )
        return Plan(
            [*crossing, ()],
            {where: self._paths[where] for where in places},
            self._specs,
            {where: names for where, names in self.functions.names.items() if where[1] == OUTSIDE},
            frozenset(drawn),
        )


class Run(Pass):
    """A pass through some pieces.

    Args:
        route: whose pieces.
        plan: of the call's form.
        activations: from the piece before.
        start: first piece.
        stop: behind the last piece.
        arriving: parameters that the model has from the first piece on.
        arrived: called when that begins.
    """

    def __init__(
        self,
        route: ForwardRoute,
        plan: Plan,
        activations: tuple[torch.Tensor, ...],
        start: int,
        stop: int,
        arriving: list[Slot],
        arrived: Callable[[], object],
    ) -> None:
        super().__init__(route)
        self._plan, self._activations, self._start, self._stop = plan, activations, start, stop
        self._before_start = ExitStack()
        self._arriving, self._arrived = arriving, arrived
        self._wanted = plan.wanted(start, stop)
        self._found: dict[Key, torch.Tensor] = {}
        self._compare = (start, stop) not in plan.compared
        scopes = None if self._compare else self._wanted.scopes
        self.functions = Functions(self._seen, scopes) if scopes or self._compare else None
        self.draws = Draws() if start and plan.drawn else None

    def modes(self) -> list[Any]:
        """To be entered around the forward."""
        return [mode for mode in (self.functions, self.draws) if mode is not None]

    def begin(self) -> None:
        """See the forward begin."""
        if self._start:
            self._before_start.enter_context(saving_nothing())
            self._surroundings.move()
            for key in self._wanted.parameters:
                if key.piece < self._start:
                    self._found[key] = self.route.slot(key.leaf).stand_in(anew=True)

    def end(self) -> None:
        """See the forward end, or the first piece begin."""
        self._before_start.close()

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block or skip it, or end the forward."""
        if self.inside or self.done:
            return block(*args, **kwargs)
        number = self.step(block)
        if self.route.is_cut(2 * number):
            if number in self._wanted.arguments:
                self._find(self._wanted.arguments[number], *tree_flatten((args, kwargs)))
            self._next_piece()
        self._move(number)
        if self.piece < self._start:
            again = (self.piece, number) in self._wanted.scopes
            leaves, spec = self.route.outlines.outputs(block, args, kwargs, again, f"a result of {number}")
            outputs = tree_unflatten(leaves, spec)
        else:
            leaves, outputs = None, block(*args, **kwargs)
        self._move(OUTSIDE)
        if number in self._wanted.results:
            if leaves is None:
                leaves, spec = tree_flatten(outputs)
            self._find(self._wanted.results[number], leaves, spec)
        if self.route.is_cut(2 * number + 1):
            self._next_piece()
        return outputs

    def _move(self, scope: int) -> None:
        self.inside = scope != OUTSIDE
        if self.functions is not None:
            self.functions.move(self.piece, scope)
        if self.draws is not None:
            self.draws.on = not self.inside and self.piece < self._start

    def _find(self, keys: list[Key], leaves: list[Any], spec: TreeSpec) -> None:
        if spec != self._plan.specs[keys[0].kind, keys[0].number]:
            raise OtherWayError
        for key in keys:
            self._keep(key, leaves[key.leaf])  # type: ignore[index]

    def _seen(self, where: Place, path: int, args: Any, result: Any) -> Any:
        if self.draws is not None and self.draws.by is not None:
            by, self.draws.by = self.draws.by, None
            if where not in self._plan.drawn:
                raise OtherWayError
            result = _hidden(result, self.route.ledger, by)
        for key in self._wanted.functions.get(where, ()):
            if path != self._plan.paths[where]:
                raise OtherWayError
            self._keep(key, _parts(result)[key.leaf])
        return result

    def _keep(self, key: Key, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or isinstance(value, Absent) != (self.piece < self._start):
            raise OtherWayError
        self._found[key] = value

    def _next_piece(self) -> None:
        if self._compare:
            self._compare_names()
        self.piece += 1
        if self.piece == self._stop:
            raise Finished(self._leaving())
        if self.piece == self._start:
            with torch._C.DisableTorchFunction():
                self._arrive()
        if self.functions is not None:
            self.functions.move(self.piece)

    def _compare_names(self) -> None:
        """See that the piece that ends has called the functions outside the blocks that it called without values.

        The first micro-batch is compared: whatever a trial does not see alike, as code that asks for the class of a
        tensor does, would else compute something else without a word.
        """
        assert self.functions is not None
        found, wanted = (names.get((self.piece, OUTSIDE), []) for names in (self.functions.names, self._plan.names))
        for number, (one, other) in enumerate(zip_longest(found, wanted, fillvalue="nothing"), 1):
            if one != other:
                name = self.route.piece_names[self.piece]
                raise OtherWayError(
                    f"piece {self.piece} ({name}): the forward calls {one} as function {number} outside the blocks, "
                    f"and {other} where parameters have no values"
                )

    def _leaving(self) -> tuple[torch.Tensor, ...]:
        for key in self._wanted.parameters:
            if self._start <= key.piece < self._stop:
                parameter = self.route.slot(key.leaf).parameter
                assert parameter is not None
                self._found[key] = parameter
        keys = self._plan.crossing[self._stop]
        if not all(key in self._found for key in keys):
            raise OtherWayError
        return (self._plan.mark(self._stop), *(self._found[key] for key in keys))

    def _arrive(self) -> None:
        """Put real values into the places of absent ones; from here on everything is real."""
        self.end()
        self._surroundings.move()
        if self._plan.drawn:
            generators.restore(self.before)
        elif not generators.alike(self.before, generators.states()):
            raise _refuse_draws("the forward")
        keys = self._plan.crossing[self._start]
        mark, *activations = self._activations or (None,)
        if len(keys) != len(activations):
            raise SplitError(
                f"{self.route.piece_names[self._start]}: got {len(activations)} activations from the stage "
                f"before, allowed are {len(keys)} as in this rank's own call; make the same call on every rank"
            )
        if mark is not None and mark.shape != self._plan.mark(self._start).shape:
            raise OtherWayError(
                "the stage before hands on other values, as where parameters are frozen after initialize() or on one "
                "rank only"
            )
        for key, activation in zip(keys, activations, strict=True):
            if key not in self._found:
                raise OtherWayError
            _replace(self._found[key], activation)
        for slot in self._arriving:
            slot.show()
        self._arrived()
        self.route.ledger.strict = True


def _replace(absent: torch.Tensor, value: torch.Tensor) -> None:
    """Make the tensor that all code knows as ``absent`` a view of ``value`` that may be written to."""
    if (absent.shape, absent.dtype) != (value.shape, value.dtype):
        raise SplitError(
            f"{absent!r}: got a value of shape {list(value.shape)} and {value.dtype} from the stage before; allowed "
            f"are shapes and types that follow from those of the call's arguments; change the forward"
        )
    if absent.requires_grad != value.requires_grad:
        raise SplitError(
            f"{absent!r}: got a value with requires_grad={value.requires_grad} from the stage before, allowed is "
            f"{absent.requires_grad}, as when the model was split; freeze parameters before initialize(), on every rank"
        )
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        alias = value.view_as(value)
    # What torch.utils.swap_tensors does, but that graphs of what is absent may go on to refer to the old tensor.
    alias.__class__, absent.__class__ = absent.__class__, alias.__class__
    alias.__dict__, absent.__dict__ = absent.__dict__, alias.__dict__
    torch._C._swap_tensor_impl(absent, alias)
