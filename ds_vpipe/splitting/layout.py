"""A model's layout: its blocks, where in a call of them pieces begin, and the places of its parameters."""

from collections.abc import Sequence
from functools import cached_property

from torch import nn

from ds_vpipe.splitting.blocks import BlockList
from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError
from ds_vpipe.splitting.output_specs import OutputSpecs
from ds_vpipe.splitting.parameter_slots import ParameterSlot


def dummy_inputs_of(model: nn.Module) -> str:
    """The words for an example of a call that a model is given; where its class has a property, the class."""
    found = isinstance(getattr(type(model), "dummy_inputs", None), property)  # Hugging Face's has no setter
    return "the model's class dummy_inputs (type(model).dummy_inputs = ...)" if found else "the model dummy_inputs"


class Layout:
    """What a pass through a model's forward knows of the model."""

    def __init__(self, model: nn.Module, blocks: BlockList, slots: Sequence[ParameterSlot], log: AccessLog) -> None:
        self.model, self.log, self.slots = model, log, slots
        self._choice = blocks
        self.blocks = blocks.modules
        self._names = {id(block): name for block, name in zip(blocks.modules, blocks.names, strict=True)}
        parts = {id(block): {id(part) for part in block.modules()} for block in self.blocks}
        # Parameters in each block, by its id.
        self.members = {block: [slot for slot in slots if id(slot.module) in found] for block, found in parts.items()}
        self.specs = OutputSpecs(log)  # of what the blocks return
        self.inside = set[int]().union(*parts.values())  # the ``id`` of each module in the blocks
        self.outside = [slot for slot in slots if id(slot.module) not in self.inside]  # parameters outside the blocks
        self._by_name = {str(slot.meta.slot): slot for slot in reversed(slots)}
        # The blocks in the order in which they are called; None until the first dry run.
        self.sequence: list[nn.Module] | None = None
        self._as_registered = False  # for want of a call that could be tried out
        self.left_out: frozenset[int] = frozenset()  # events with which no piece shall begin
        self.single_stage = True  # one rank has all pieces
        # What writes into parameters that have no values here, and where, by name and by the piece that does.
        self.parameter_writes: dict[tuple[str, int], str] = {}

    def is_cut(self, event: int) -> bool:
        """Whether a piece begins with an event: twice a block's call for what comes before it, and one more behind."""
        cut = event >= 2 and event % 2 == 0 if self._choice.merged else event == 0 or event % 2 == 1
        return cut and event not in self.left_out

    @property
    def cuts(self) -> list[int]:
        """The events with which a piece begins, but for the first piece."""
        assert self.sequence is not None
        return [event for event in range(2 * len(self.sequence)) if self.is_cut(event)]

    @property
    def piece_names(self) -> list[str]:
        """One per piece."""
        assert self.sequence is not None
        if self._choice.merged:
            return [self.name_of(self.sequence[event // 2]) for event in (0, *self.cuts)]
        return ["front", *map(self.name_of, self.sequence), "tail"]

    def call_as_registered(self) -> None:
        """Take all blocks to be called once, in the order in which they are registered."""
        self.sequence, self._as_registered = list(self.blocks), True

    def modules_in(self, start: int, stop: int) -> set[int]:
        """The ``id`` of each module in the blocks that are called in pieces ``start`` to ``stop - 1``."""
        found, piece = set[int](), 0
        for number, block in enumerate(self.sequence or ()):
            piece += self.is_cut(2 * number)
            if start <= piece < stop:
                found.update(id(part) for part in block.modules())
            piece += self.is_cut(2 * number + 1)
        return found

    @cached_property
    def modules_outside(self) -> list[nn.Module]:
        """Those that are in no block."""
        return [module for module in self.model.modules() if id(module) not in self.inside]

    def name_of(self, block: nn.Module) -> str:
        """Name of a block in the model; of a module within one, or of another, that of its class."""
        return self._names.get(id(block), type(block).__name__)

    def slot(self, name: int | str) -> ParameterSlot:
        """Parameter by its first name."""
        return self._by_name[str(name)]

    def too_few_calls(self, found: int) -> SplitError:
        """:meth:`other_calls`, where the forward has called only so many."""
        expected = len(self.blocks if self.sequence is None else self.sequence)
        return self.other_calls(f"{self._choice.name}: forward called {found} of {expected} blocks")

    def other_calls(self, what: str) -> SplitError:
        """Error for a call in which the forward calls other blocks than ``sequence`` has."""
        if self._as_registered:
            return SplitError(
                f"{what}, allowed without an example of a call is every one once, in the order in which they are "
                f"registered; give initialize() training_data, or {dummy_inputs_of(self.model)}"
            )
        return SplitError(
            f"{what}, allowed are the same ones in the same order in every call; change the forward, or give "
            f"{dummy_inputs_of(self.model)} like the batches"
        )
