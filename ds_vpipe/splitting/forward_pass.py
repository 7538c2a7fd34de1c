"""The interpreter: one pass through a user's forward, block by block and piece by piece.

A :class:`~ds_vpipe.splitting.dry_run.DryRun` has no values anywhere and finds out what crosses the cuts; a
:class:`Run` has values in some pieces, takes what crosses into the first of them and hands on what crosses out of the
last. Both go the same way (:class:`ForwardPass`): at each block they step, at each cut a piece begins, and each place
where values are seen is given to ``at``, where the one gives values their sources and the other finds them by these.

A value is found again by its place: an argument of the first block, a result of a block's call, a result of the n-th
call of a torch function that returns tensors, in a piece outside the blocks or in a block, or a parameter. The form of
the place has to be the same: of functions the names of all that were called there until then, of blocks the nesting.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.checkpointed import followed
from ds_vpipe.splitting.layout import Layout
from ds_vpipe.splitting.meta_tensor import MetaTensor, SplitError, place, put_value

OUTSIDE = -1
Watch = Callable[[int, Any], None]
# Functions that look at values, on which the forward may then branch.
_LOOKS = frozenset(
    f"__{kind}__" for kind in ("bool", "int", "float", "index", "contains", "array")
) | {"is_nonzero", "item", "tolist", "numpy", "equal", "allclose"}  # fmt: skip


class Place(NamedTuple):
    """Place in a forward where values are seen."""

    piece: int  # that is running
    kind: str  # "argument", "result", "function" or "parameter"
    number: int  # of the block's call, or of the function's within its block or outside
    block: int = OUTSIDE  # call of the block that a function is called in, or OUTSIDE


class Source(NamedTuple):
    """Origin of one value: its place, and its index there; for a parameter, its name."""

    place: Place
    leaf: int | str


@dataclass
class Crossings:
    """Values that cross each cut in calls of one form and mode."""

    # For every piece, and behind the last, the values that it gets, in the order in which they travel.
    arriving: list[tuple[Source, ...]]
    forms: dict[Place, Any]  # of the places where those are made
    drawn: dict[Place, Any]  # function calls outside the blocks that draw random numbers, with the operation that does
    names: dict[tuple[int, int], list[str]]  # of the functions called outside the blocks, by piece
    looks: bool  # at values before the last block's end and outside: other calls of this form may go another way
    around: frozenset[int]  # numbers of the forward's own checkpointed functions that call blocks
    casts: bool  # somewhere, by an autocast for the CPU
    # First and last piece of runs whose function calls have been compared with ``names``.
    compared: set[tuple[int, int]] = field(default_factory=set, compare=False)

    def mark(self, piece: int) -> torch.Tensor:
        """Empty tensor whose shape identifies the values that arrive. Ranks compare it."""
        sources = [(*source.place, source.leaf) for source in self.arriving[piece]]
        digest = hashlib.sha256(repr(sources).encode()).digest()
        return torch.empty(1, 0, int.from_bytes(digest[:7], "big"), dtype=torch.uint8, device="cpu")


class DivergedError(BaseException):
    """End of a forward that differs from its dry run. May say where, and then what to do."""


class Finished(BaseException):
    """Early end of the user's forward, with the activations of the next stage. No error, hence no ``Exception``."""

    def __init__(self, activations: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.activations = activations


def parts_with_tensors(result: Any) -> Any:
    """What a torch function has returned, as a sequence. Empty if there is no tensor in it."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return parts if any(isinstance(part, torch.Tensor) for part in parts) else ()


def refuse_draws(by: Any) -> SplitError:
    """Refusal of random numbers that are drawn outside the blocks."""
    return SplitError(
        f"{place()}: {by} draws random numbers outside the blocks, which every stage would draw for itself; allowed "
        f"are draws inside a block, dropout of activations, and torch functions that return new tensors, in every "
        f"call alike; move them there, or into the data"
    )


class ForwardPass(TorchFunctionMode):
    """One pass through the forward. As a mode it sees the calls of torch's functions that return tensors."""

    def __init__(
        self, layout: Layout, holder: str, start: int, counted: set[tuple[int, int]] | None,
        around: Set[int] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layout, self.start = layout, start  # pieces before ``start`` have no values
        self._counted = counted  # (piece, block) where functions are counted; None: everywhere
        self.holder = holder  # who lacks them, for messages
        self.calls, self.piece = 0, 0  # calls of blocks so far, and the piece that is running
        self.block = OUTSIDE  # or the call of the block that is running
        # Of the functions called, by piece and block, where they are counted.
        self.names = defaultdict[tuple[int, int], list[str]](list)
        self._paths = defaultdict[tuple[int, int], int](int)
        self.around = around  # checkpointed functions that call blocks, by number; None, all, where that is not known
        self.checkpoints_outside, self._open = 0, list[int]()  # those so far, and those that are running
        self.looks = False  # at values outside the blocks, before the last one's end, where functions are counted
        self.refusal: SplitError | None = None  # the first one in code that has to go alike on every stage
        self._in_pack_hook = False  # a hook for saved tensors is running
        self._enabled, self._hook = torch.is_grad_enabled(), guards.saved_tensors_hook()
        self.before = guards.random_states()

    @property
    def over(self) -> bool:
        """All blocks have been called, so that the last piece is running."""
        return self.layout.sequence is not None and self.calls >= len(self.layout.sequence)

    @property
    def done(self) -> bool:
        """All blocks have returned."""
        return self.block == OUTSIDE and self.over

    def note_refusal(self, error: SplitError) -> None:
        """Note an error that is raised. In a block that is skipped, and behind all in a trial, it does no harm."""
        trial_ends = self.done and self.piece < self.start
        if self.refusal is None and (self.piece >= self.start or (self.block == OUTSIDE and not trial_ends)):
            self.refusal = error

    def refuse_caught(self) -> None:
        """Refuse a forward that has caught a refusal, and would compute something else where there are values."""
        if self.refusal is not None:
            raise SplitError(
                f"{type(self.layout.model).__name__}: its forward catches this error, and goes on in another way than "
                f"where there is a value: {self.refusal}"
            )

    def note_write(self, func: Any, name: str) -> None:
        """Note that the running piece writes into a parameter."""
        self.layout.parameter_writes.setdefault((name, self.piece), f"{place()}: {func}")

    @contextmanager
    def checkpointing(self, own_contexts: bool) -> Iterator[Iterable[nn.Module] | None]:
        """Context in which a function runs that the forward checkpoints, as :data:`.Around` has it.

        It is called as it is where blocks are called in it, which are checkpointed themselves; not with contexts of its
        own, which code between the blocks would be without.
        """
        here = self.layout.sequence is not None and self.piece >= self.start
        if self.block != OUTSIDE:
            yield self.layout.sequence[self.block].modules() if here else ()  # type: ignore[index]
            return
        outside = self.layout.modules_outside if here else ()
        if own_contexts:
            yield outside
            return
        number, self.checkpoints_outside = self.checkpoints_outside, self.checkpoints_outside + 1
        self._open.append(number)
        try:
            yield None if self.around is None or number in self.around else outside
        finally:
            self._open.pop()

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block or skip it, or end the forward."""
        if self.block != OUTSIDE or self.over:
            return block(*args, **kwargs)
        number = self._step(block)
        if self.layout.is_cut(2 * number):
            self._at_block("argument", number, (args, kwargs))
            self._next_piece((args, kwargs))
        self.block = number
        outputs = self._run_block(number, block, args, kwargs)
        self.block = OUTSIDE
        self._at_block("result", number, outputs)
        if self.layout.is_cut(2 * number + 1):
            self._next_piece(outputs)
        return outputs

    def _step(self, block: nn.Module) -> int:
        number, sequence = self.calls, self.layout.sequence
        name = self.layout.name_of(block)
        if sequence is not None and block is not sequence[number]:
            next_one = self.layout.name_of(sequence[number])
            raise self.layout.other_calls(f"{place()}: forward calls {name} where {next_one} is next")
        self.calls += 1
        # A reentrant checkpointed function switches gradients off, as a no_grad region does, where a cut may be.
        in_function = torch.is_grad_enabled() != self._enabled and guards.in_a_function()
        if in_function or guards.saved_tensors_hook() != self._hook:
            raise self._called_inside(name)
        return number

    def _called_inside(self, name: str) -> BaseException:
        """What to raise where a block is called in a function that has a backward pass of its own, or runs again."""
        return SplitError(
            f"{name}: called inside a function with its own backward, or one that is checkpointed with contexts of its "
            f"own or otherwise than by torch.utils.checkpoint.checkpoint() or deepspeed.checkpointing.checkpoint(), "
            f"allowed are blocks that are called directly; switch the model's own activation checkpointing of blocks, "
            f"or its reversible layers, off and use vpipe.recompute_ratio"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where, kwargs = (self.piece, self.block), kwargs or {}
        if self._in_pack_hook or (self._counted is not None and where not in self._counted):
            return func(*args, **kwargs)
        at = Place(self.piece, "function", len(self.names[where]), self.block)
        result = self._result(at, func, args, kwargs)
        parts = parts_with_tensors(result)
        if parts:
            self._note(where, getattr(func, "__name__", ""))
            self.at(at, parts, self._paths[where])
        elif self.block == OUTSIDE and not self.over and getattr(func, "__name__", "") in _LOOKS:
            self.looks = True
            if isinstance(result, bool):  # numbers are others in every call, and most branch on none
                self._note(where, f"{func.__name__} ({result})")
        return result

    def _note(self, where: tuple[int, int], name: str) -> None:
        self.names[where].append(name)
        self._paths[where] = hash((self._paths[where], name))

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        self.at(Place(self.piece, kind, number), *tree_flatten(value))

    def at(self, where: Place, leaves: Any, form: Any) -> None:
        """See values at a place."""
        raise NotImplementedError

    def _result(self, at: Place, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of a torch function. Random numbers of other stages are hidden."""
        raise NotImplementedError

    def _next_piece(self, value: Any) -> None:
        """A piece has ended with ``value``, and the next one begins."""
        raise NotImplementedError

    def _run_block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # no function of the forward's
        return tensor.detach()


@contextmanager
def _without(mode: TorchFunctionMode) -> Iterator[None]:
    """Inside, a mode sees nothing, and costs nothing, unless the user's code has entered another one since."""
    on_top = torch.overrides._get_current_function_mode() is mode
    with torch.overrides._pop_mode_temporarily() if on_top else nullcontext():
        yield


class Run(ForwardPass):
    """A pass with values in pieces ``start`` to ``stop - 1``.

    ``before_start`` is closed when the first of them begins; ``watch`` is as :meth:`.ForwardSplit.run` has it.
    """

    def __init__(
        self, layout: Layout, crossings: Crossings, activations: tuple[torch.Tensor, ...], start: int, stop: int,
        before_start: ExitStack, watch: Watch | None,
    ) -> None:  # fmt: skip
        self._watch = watch
        self._crossings, self._activations, self._stop = crossings, activations, stop
        self._before_start = before_start
        self._wanted: dict[Place, list[Source]] = defaultdict(list)
        for source in dict.fromkeys((*crossings.arriving[start], *crossings.arriving[stop])):  # alike in every run
            self._wanted[source.place].append(source)
        self._found: dict[Source, torch.Tensor] = {}
        places = (*self._wanted, *(at for at in crossings.drawn if at.piece < start))
        self._needed = {(at.piece, at.block) for at in places if at.kind == "function"}
        first = (start, stop) not in crossings.compared
        self._compare = first or crossings.looks
        compared = min(stop, len(crossings.arriving) - 2) if self._compare else 0  # nothing crosses behind the last
        outside = {(piece, OUTSIDE) for piece in range(compared)}
        holder = f"the stage with pieces {start} to {stop - 1}"
        super().__init__(layout, holder, start, self._needed | outside, crossings.around)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, the forward runs. Before the first piece its graphs save nothing."""
        counts = self._compare or self._needed
        seen, packs = (self, self._packing()) if counts else (nullcontext(), nullcontext())
        with followed(self.checkpointing), seen, packs, self._before_start:
            if self.start:
                self._before_start.enter_context(guards.saving_nothing())
                self._before_start.enter_context(torch.compiler.set_stance("force_eager"))
                self._hook = guards.saved_tensors_hook()
                for source in self._parameters(range(self.start)):
                    self._found[source] = self.layout.slot(source.leaf).stand_in(anew=True)
            yield

    @contextmanager
    def _packing(self) -> Iterator[None]:
        """Inside, what hooks for saved tensors call is not counted: a recomputation's are others than the first run's.

        They are called while this mode sees functions where a ``torch.autograd.Function`` of the forward saves.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if not hooks:
            yield
            return

        def pack(tensor: torch.Tensor) -> Any:
            before, self._in_pack_hook = self._in_pack_hook, True
            try:
                return hooks[0](tensor)
            finally:
                self._in_pack_hook = before

        with torch.autograd.graph.saved_tensors_hooks(pack, hooks[1]):
            self._hook = guards.saved_tensors_hook()
            yield

    def at(self, where: Place, leaves: Any, form: Any) -> None:
        """Find the values that cross."""
        for source in self._wanted.get(where, ()):
            value = leaves[source.leaf] if form == self._crossings.forms[where] else None
            if not isinstance(value, torch.Tensor) or isinstance(value, MetaTensor) != (self.piece < self.start):
                raise self._lost(source)
            self._found[source] = value

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        if (self.piece, kind, number, OUTSIDE) in self._wanted:
            super()._at_block(kind, number, value)

    def _run_block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.piece >= self.start:
            watched = self._counted is None or (self.piece, number) in self._counted
            with torch.compiler.set_stance("force_eager") if watched else _without(self):
                if self._open:
                    return checkpoint(partial(block, **kwargs), *args, use_reentrant=False)
                return block(*args, **kwargs)
        again = (self.piece, number) in self._needed
        # A block may differentiate, for which it needs what its graphs save.
        with torch.autograd.graph.saved_tensors_hooks(_detached, _detached) if self._hook else nullcontext():
            return self.layout.specs.outputs(block, args, kwargs, again, f"a result of {number}")

    def _result(self, at: Place, func: Any, args: Any, kwargs: Any) -> Any:
        if at not in self._crossings.drawn or self.piece >= self.start:
            return func(*args, **kwargs)
        with guards.untouched_generators():
            return MetaTensor.drawn(func(*args, **kwargs), self.layout.log, self._crossings.drawn[at])

    def _next_piece(self, value: Any) -> None:
        if self._compare:
            self._compare_names()
        self.piece += 1
        if self.piece == self.start:
            with torch._C.DisableTorchFunction():
                self._arrive()
        if self._watch is not None and self.piece >= self.start:
            with torch._C.DisableTorchFunction():
                self._watch(self.piece - self.start, value)
        if self.piece == self._stop:
            raise Finished(self._leaving())

    def _compare_names(self) -> None:
        """Compare the functions that the ending piece has called with the dry run's.

        The first micro-batch is compared: whatever a dry run does not see alike, as code that asks for the class of a
        tensor does, would else compute something else without a word.
        """
        found, wanted = (names.get((self.piece, OUTSIDE), []) for names in (self.names, self._crossings.names))
        for number, (one, other) in enumerate(zip_longest(found, wanted, fillvalue="nothing"), 1):
            if one != other:
                raise DivergedError(
                    f"piece {self.piece} ({self.layout.piece_names[self.piece]}): the forward calls {one} as function "
                    f"{number} outside the blocks, and {other} where parameters have no values"
                )

    def _parameters(self, pieces: range) -> list[Source]:
        """Values to be found that are parameters, which code in these pieces has taken."""
        places = [at for at in self._wanted if at.kind == "parameter" and at.piece in pieces]
        return [source for at in places for source in self._wanted[at]]

    def _leaving(self) -> tuple[torch.Tensor, ...]:
        for source in self._parameters(range(self.start, self._stop)):
            parameter = self.layout.slot(source.leaf).parameter
            assert parameter is not None
            self._found[source] = parameter
        sources = self._crossings.arriving[self._stop]
        for source in sources:
            if source not in self._found:
                raise self._lost(source)
        with torch._C.DisableTorchFunction():
            # A link carries memory, and that of a conjugate is the memory of what it is the conjugate of.
            found = [self._found[source].resolve_conj().resolve_neg() for source in sources]
        return (self._crossings.mark(self._stop), *found)

    def _called_inside(self, name: str) -> BaseException:
        return DivergedError(f"{name}: is called in a checkpointed function, and was not in the dry run")

    def _lost(self, source: Source) -> DivergedError:
        """A value that crosses is not where it was in the dry run."""
        if source.place.block == OUTSIDE or self.layout.sequence is None:
            return DivergedError()
        name = self.layout.name_of(self.layout.sequence[source.place.block])
        return DivergedError(
            f"{name} keeps a value besides what it returns, and computes it another way where its values are made up",
            "return it from the block",
        )

    def _arrive(self) -> None:
        """Put values into the places of meta tensors. From here on everything has values."""
        self._before_start.close()
        self._hook = guards.saved_tensors_hook()
        if guards.drawn_between(self.before, guards.random_states()):
            raise DivergedError if self._crossings.drawn else refuse_draws("the forward")
        sources = self._crossings.arriving[self.start]
        mark, *activations = self._activations or (None,)
        if mark is not None and mark.shape != self._crossings.mark(self.start).shape:
            raise DivergedError(
                "the stage before hands on other values, as where parameters are frozen after initialize() or on one "
                "rank only, or where the forward branches on the call's values behind that stage"
            )
        for source, activation in zip(sources, activations, strict=True):
            if source not in self._found:
                raise self._lost(source)
            put_value(self._found[source], activation)
