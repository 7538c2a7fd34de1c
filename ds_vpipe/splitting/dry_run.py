"""A pass without any values, which finds out which piece uses what: parameters, buffers, values of earlier pieces."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.call import find_loss
from ds_vpipe.splitting.checkpointed import followed
from ds_vpipe.splitting.forward_pass import (
    OUTSIDE,
    Crossings,
    Finished,
    ForwardPass,
    Place,
    Source,
    parts_with_tensors,
    refuse_draws,
)
from ds_vpipe.splitting.guards import Where
from ds_vpipe.splitting.layout import Layout
from ds_vpipe.splitting.meta_tensor import MetaTensor, SplitError, place, written
from ds_vpipe.splitting.output_specs import MadeUpValues, storage_of
from ds_vpipe.splitting.python_state import Held

_FEW = 16  # elements of a tensor that are compared
_COLLECTIVES = {"c10d", "_c10d_functional"}  # all of torch's, and exchanges of two ranks


CallsSeen = defaultdict[int, list[tuple[Any, ...]]]
"""Calls outside the blocks by piece: names, numbers, and where values come from; or a failure."""


class DryRun(ForwardPass):
    """A pass without any values, on copies of the buffers.

    Args:
        guess: number of calls of blocks behind which values are made up; 0 if they are not.
    """

    def __init__(
        self, layout: Layout, buffers: dict[Where, torch.Tensor], guess: int, around: Set[int] | None,
        held: Callable[[], Held] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layout, "a stage without that parameter", sys.maxsize, None, around)
        self.sequence: list[nn.Module] = []  # the blocks called, in order
        self.touched: dict[str, set[int]] = {}  # the pieces that use each parameter, by name
        self.block_pieces: dict[int, int] = {}  # the piece that first calls a block with a module, by the module's id
        self.writers: dict[Where, int] = {}  # the piece that writes to a buffer
        self._written_in_blocks = set[Where]()  # buffers
        # The pieces that read a buffer, and whether outside the blocks.
        self.readers: dict[Where, set[tuple[int, bool]]] = defaultdict(set)
        # The operation that has drawn random numbers outside the blocks since the last torch function.
        self.drawn_by: Any = None
        self.cut_short = True  # the call that was given was not run to its end
        self.kept: dict[int, Held] = {}  # what is kept outside the blocks when a piece begins, as ``held`` says
        self._held = held
        self.stop: int | None = None  # piece before which the forward is ended, if it is
        # Calls, if they are compared.
        self.calls_seen: CallsSeen | None = None
        self._last_use: dict[Source, int] = {}
        self._forms: dict[Place, Any] = {}
        self._drawn: dict[Place, Any] = {}
        self._modules = {id(module): module for module in layout.model.modules()}
        self._buffers = {where: (buffer, buffer._version) for where, buffer in buffers.items()}
        self._at_last_block = self.before
        self._guess, self._tail = guess, ExitStack()
        self.casts = False  # functions are called in an autocast for the CPU
        self.with_blocks = set[int]()  # numbers of the checkpointed functions that call blocks in this run

    @property
    def done(self) -> bool:
        """All blocks have returned."""
        if self.layout.sequence is None:
            return self.block == OUTSIDE and len({id(block) for block in self.sequence}) == len(self.layout.blocks)
        return super().done

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, the forward runs."""
        self.layout.log.dry_run = self
        self.layout.log.dry_runs += 1
        try:
            with followed(self.checkpointing), self, _Operations(self), self._tail:
                self._enter(0)
                yield
            self._look_at_buffers()
        finally:
            self.layout.log.dry_run = None

    def at(self, where: Place, leaves: Any, form: Any) -> None:
        """Mark values made in this piece or call with their source here."""
        function = where.kind == "function"
        within = where.number if where.kind == "result" else OUTSIDE
        self._forms[where] = form
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, MetaTensor) and leaf.slot is None and leaf.made_in == self.piece:
                known = leaf.source.place if leaf.source is not None else None
                if known is None or (not function and (known.kind, known.block) == ("function", within)):
                    leaf.source = Source(where, position)

    def use(self, value: MetaTensor) -> None:
        """See that the running piece uses a value."""
        value.first_use = self.piece if value.first_use is None else value.first_use
        made_in = self.piece if value.made_in is None else value.made_in
        if value.slot is not None:
            self.touched.setdefault(value.slot, set()).add(made_in)
        if made_in == self.piece:
            return
        if value.slot is not None:
            value.source = Source(Place(made_in, "parameter", 0), value.slot)
        if value.source is None:
            raise SplitError(
                f"{place()}: needs {value.origin}, which piece {made_in} has made in a way that cannot be followed; "
                f"allowed are results of torch's functions and of modules; change the forward"
            )
        self._last_use[value.source] = max(self.piece, self._last_use.get(value.source, 0))

    def write(self, func: Any, target: MetaTensor) -> None:
        """Refuse a write into an earlier value that two travelling tensors share."""
        root = target if target.root is None else target.root
        known = [root, *(view() for view in root.views)]
        if sum(value is not None and value.made_in is not None and value.made_in < self.piece for value in known) > 1:
            raise SplitError(
                f"{place()}: {func} writes into {target.origin} of which an earlier piece has made a view, and does "
                f"not see it there; allowed is to compute new tensors; use the form that does not work in place"
            )

    def note_block(self, block: nn.Module) -> None:
        """Note that the running piece uses a block and all its modules."""
        self.sequence.append(block)
        for slot in self.layout.members[id(block)]:
            self.touched.setdefault(str(slot.meta.slot), set()).add(self.piece)
        for part in block.modules():
            self.block_pieces.setdefault(id(part), self.piece)

    def read(self, value: torch.Tensor) -> None:
        """See which buffers are read. A running block has copies of its own: to make them reads the buffers."""
        storage = storage_of(value)
        if storage is None or value.is_meta:
            return
        for where, (buffer, _) in self._buffers.items():
            found = storage_of(buffer)
            if found is not None and found._cdata == storage._cdata:
                self.readers[where].add((self.piece, self.block == OUTSIDE))

    def _note_call(self, name: str, values: Any) -> None:
        if self.calls_seen is not None:
            self.calls_seen[self.piece].append((name, *map(self._described, tree_leaves(values))))

    def _described(self, value: Any) -> Any:
        """What is the same in a run that computes the same."""
        if isinstance(value, MetaTensor):
            of_this_call = value.made_by == self.layout.log.dry_runs
            return of_this_call, value.slot, value.source, value.made_in
        if isinstance(value, torch.Tensor):
            few = value.numel() <= _FEW and not value.is_meta and value.layout is torch.strided
            return value.shape, value.dtype, str(value.tolist()) if few else ""
        return repr(value) if isinstance(value, (int, float, str, slice, type(None))) else type(value)

    def _result(self, at: Place, func: Any, args: Any, kwargs: Any) -> Any:
        self.casts |= torch.is_autocast_enabled("cpu")
        if self.block == OUTSIDE:
            self._note_call(getattr(func, "__name__", ""), (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except SplitError as error:
            self.note_refusal(error)
            raise
        parts = parts_with_tensors(result)
        if self.drawn_by is None or not parts:
            return result
        by, self.drawn_by = self.drawn_by, None
        if any(part is argument for part in parts for argument in tree_leaves(args)):
            self._drawn[at] = refuse_draws(by)
            return result
        self._drawn[at] = by
        behind_blocks = self.layout.sequence is not None and self.done
        return result if behind_blocks else MetaTensor.drawn(result, self.layout.log, by)

    def _run_block(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.note_block(block)
        self._note_call("block", (args, kwargs))
        outputs, _, buffers = self.layout.specs.run(block, args, kwargs)
        for where in buffers:
            self._writes(where)
        self._look_at_buffers()
        return outputs

    def _at_block(self, kind: str, number: int, value: Any) -> None:
        super()._at_block(kind, number, value)
        if kind == "result":
            self._at_last_block = guards.random_states()
            if self.done and 0 < self._guess <= len(self.sequence):  # blocks may be called again after all were
                self._tail.enter_context(MadeUpValues(self.layout.log))

    def _step(self, block: nn.Module) -> int:
        self._look_at_buffers()
        self.with_blocks.update(self._open)
        return super()._step(block)

    def _next_piece(self, value: Any) -> None:
        self._enter(self.piece + 1)

    def _enter(self, piece: int) -> None:
        self._look_at_buffers()
        if piece == self.stop:
            raise Finished(())
        if self._held is not None:
            self.kept[piece] = self._held()
        self.piece = piece
        for slot in self.layout.outside:
            slot.stand_in(anew=True)

    def _look_at_buffers(self) -> None:
        """See which buffers have been written to, but for a running block's own."""
        for where, (known, version) in self._buffers.items():
            buffer = self._modules[where[0]]._buffers.get(where[1])
            if buffer is not None and (buffer is not known or buffer._version != version):
                self._buffers[where] = buffer, buffer._version
                self._writes(where)

    def _writes(self, where: Where) -> None:
        if self.block != OUTSIDE:
            self._written_in_blocks.add(where)
        if self.writers.setdefault(where, self.piece) != self.piece:
            name = guards.buffer_name(self.layout.model, where)
            raise SplitError(
                f"{name}: is written in pieces {self.writers[where]} and {self.piece}, each of which would have its "
                f"own; allowed are buffers that one piece writes; use a module for each call"
            )

    def crossings(self, output: Any) -> Crossings:
        """The values that cross. Of the forward's output the loss travels to the last piece, in an evaluation all.

        Raises:
            SplitError: random numbers are drawn, or buffers are used, in a way that cannot be run in pieces.
        """
        last = self.piece
        drawn = {at: by for at, by in self._drawn.items() if at.piece < last}
        for refused in drawn.values():
            if isinstance(refused, SplitError):
                raise refused
        if guards.drawn_between(self.before, self._at_last_block, torch_too=False):
            raise refuse_draws("Python or numpy")
        for where, piece in self.writers.items():
            # What code outside the blocks writes into a block's buffer, later stages keep as well.
            given = where[0] in self.layout.inside and where not in self._written_in_blocks
            for reader, outside in sorted(self.readers.get(where, ())):
                if reader < piece or (piece < last and (outside or (reader > piece and not given))):
                    name = guards.buffer_name(self.layout.model, where)
                    raise SplitError(
                        f"{name}: is written in piece {piece}, whose stage alone keeps the values, and read in piece "
                        f"{reader}{', outside the blocks, which every stage runs' if outside else ''}; allowed are "
                        f"buffers that are written and read behind the last block, or in one block; let one block do "
                        f"both, or keep it as an attribute that is no buffer"
                    )
        of_training = self.layout.model.training and torch.is_grad_enabled()
        for leaf in [find_loss(output)] if of_training else tree_leaves(output):
            if isinstance(leaf, MetaTensor) and leaf.source is not None and leaf.source.place.block == OUTSIDE:
                self.use(leaf)
        uses = sorted(self._last_use.items(), key=lambda use: (use[0].place, str(use[0].leaf)))
        arriving = [tuple(s for s, used in uses if s.place.piece < piece <= used) for piece in range(last + 1)]
        forms = {s.place: self._forms.get(s.place) for s, _ in uses if s.place.kind != "parameter"}
        if any(form is None for form in forms.values()):
            raise SplitError(
                f"{type(self.layout.model).__name__}: uses a value of another call, which this stage does not have; "
                f"allowed are values of the same call; change the forward"
            )
        names = {where: names for where, names in self.names.items() if where[1] == OUTSIDE}
        around = frozenset(self.with_blocks if self.around is None else self.around)
        return Crossings([*arriving, ()], forms, drawn, names, self.looks, around, self.casts)


class _Operations(TorchDispatchMode):
    """Watch on reads of buffers, draws of random numbers outside the blocks, and collectives."""

    def __init__(self, dry_run: DryRun) -> None:
        super().__init__()
        self._dry_run = dry_run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._dry_run.layout.single_stage and func.namespace in _COLLECTIVES:
            _refuse_waiting(func, args)
        statistics = _statistics(func, args)
        torch.autograd.graph.increment_version(statistics)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        drawn = self._dry_run.block == OUTSIDE and torch.Tag.nondeterministic_seeded in func.tags
        if drawn and not any(isinstance(leaf, MetaTensor) for leaf in leaves):
            self._dry_run.drawn_by = func
        targets = {id(one) for one in (*written(func, args, kwargs), *statistics)}
        for leaf in leaves:
            if id(leaf) not in targets:
                self._dry_run.read(leaf)
        with torch._C.DisableTorchFunction():  # operations of functions such as vmap are no calls of the forward
            return func(*args, **kwargs)


def _refuse_waiting(func: Any, args: Any) -> None:
    """Refuse a collective of all ranks, for which a stage would wait for good. All ranks try the same call out."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    group: Any = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif not isinstance(group, (dist.ProcessGroup, type(None))):
        group = torch._C._distributed_c10d._resolve_process_group(group)
    # Exchanges of two ranks, which have tags, may be of one stage's ranks in the group of all.
    if group is not None and not given.keys() & {"tag", "tag_list"} and group.size() == dist.get_world_size():
        raise SplitError(
            f"{place()}: forward calls {func} for all ranks, which the other stages do not come to; allowed are groups "
            f"of ranks of one stage; leave it out, or do it in the script, with what the engine returns"
        )


def _statistics(func: Any, args: Any) -> list[torch.Tensor]:
    """Running statistics that an operation writes to, of which its schema says nothing."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    if "running_mean" not in names or not (given.get("train") is True or given.get("training") is True):
        return []
    return [v for v in (given.get("running_mean"), given.get("running_var")) if isinstance(v, torch.Tensor)]
