"""Actions of a pipeline stage.

An :class:`Action` is a kind and an index. The same actions are executed by the engine, checked and
drawn without processes, and named in logs and errors, so their text form is part of the interface:
``F7`` is the forward pass of micro-batch 7, ``SEND_GRAD7`` sends the gradient of its input to the
previous stage, ``STEP3`` is the optimizer update of batch 3. Where a rank holds several parts of the model
the number of the part comes first: ``5F7`` is the forward pass of micro-batch 7 through part 5.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

_TEXT = re.compile(r"(0|[1-9][0-9]*)?([A-Z_]+?)(0|[1-9][0-9]*)")


class Category(enum.Enum):
    """Categories of work, in the order of legends and tables. The value is the word for users."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    LOAD = "reading"
    TRANSFER = "transfer"
    WAIT = "wait"

    @property
    def busy(self) -> bool:
        """Whether it occupies the device. Transfers and waiting leave that free."""
        return self not in (Category.TRANSFER, Category.WAIT)


class Kind(enum.Enum):
    """The kinds of action. The value is the text form without the index."""

    __hash__ = object.__hash__  # members are unique, and checks and simulations look up hundreds of thousands

    LOAD = "LOAD"  # read micro-batch: inputs on the first stage, labels on the last
    RECV_ACT = "RECV_ACT"
    FORWARD = "F"
    SEND_ACT = "SEND_ACT"
    RECV_GRAD = "RECV_GRAD"
    BACKWARD = "B"
    SEND_GRAD = "SEND_GRAD"
    DROP_GRAD = "DROP_GRAD"  # receive and ignore a gradient of an incomplete batch, at the end of the data
    REDUCE = "REDUCE"  # average a batch's gradients over the stage's data-parallel replicas
    STEP = "STEP"  # one optimizer update of this stage
    SEND_TIED_GRAD = "SEND_TIED_GRAD"  # gradients of tied weights, from a copy to their owner
    RECV_TIED_GRAD = "RECV_TIED_GRAD"
    SEND_TIED = "SEND_TIED"  # tied weights, from their owner to the copies
    RECV_TIED = "RECV_TIED"
    SEND_PEERS = "SEND_PEERS"  # overflows and norms of updates, to the previous stage
    RECV_PEERS = "RECV_PEERS"
    # A layer after this many updates, with its optimizer state, and its gradient of a batch, to the stage that it moves
    # to: down to the next one among the activations, or up to the previous one among the gradients.
    SEND_LAYER_DOWN = "SEND_LAYER_DOWN"
    RECV_LAYER_DOWN = "RECV_LAYER_DOWN"
    SEND_LAYER_GRAD_DOWN = "SEND_LAYER_GRAD_DOWN"
    RECV_LAYER_GRAD_DOWN = "RECV_LAYER_GRAD_DOWN"
    SEND_LAYER_UP = "SEND_LAYER_UP"
    RECV_LAYER_UP = "RECV_LAYER_UP"
    SEND_LAYER_GRAD_UP = "SEND_LAYER_GRAD_UP"
    RECV_LAYER_GRAD_UP = "RECV_LAYER_GRAD_UP"
    STEP_LAYER = "STEP_LAYER"  # one optimizer update of that layer alone, whose gradient has come late

    @property
    def category(self) -> Category:
        """Category of work for summaries and pictures; receiving is waiting."""
        return _CATEGORIES[self]

    @property
    def per_batch(self) -> bool:
        """Whether the index of the action counts batches, and not micro-batches."""
        return self not in _PER_MICRO_BATCH


_CATEGORIES = {
    **{kind: Category.TRANSFER if kind.name.startswith("SEND_") else Category.WAIT for kind in Kind},
    Kind.LOAD: Category.LOAD,
    Kind.FORWARD: Category.FORWARD,
    Kind.BACKWARD: Category.BACKWARD,
    Kind.REDUCE: Category.UPDATE,
    Kind.STEP: Category.UPDATE,
    Kind.STEP_LAYER: Category.UPDATE,
}
_PER_MICRO_BATCH = frozenset(list(Kind)[: list(Kind).index(Kind.REDUCE)])


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage.

    ``index`` counts micro-batches from 0, and batches for the kinds from REDUCE on (:attr:`Kind.per_batch`). Which
    layer moves follows from the batch: one moves at a time.

    ``part`` is the part of the model that a pass or a transfer belongs to, or None where the rank holds only one.
    """

    kind: Kind
    index: int
    part: int | None = None

    def __str__(self) -> str:
        return f"{'' if self.part is None else self.part}{self.kind.value}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str()``.

        Raises:
            ValueError: ``text`` is not the text form of an action.
        """
        match = _TEXT.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            part, kind, index = match.groups()
            return cls(Kind(kind), int(index), None if part is None else int(part))
        except ValueError:
            allowed = ", ".join(f"{kind.value}0" for kind in Kind)
            raise ValueError(
                f"action {text!r}: expected a kind and an index, such as {allowed}, after a part or none"
            ) from None
