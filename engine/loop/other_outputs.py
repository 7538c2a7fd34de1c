"""Tensors that a forward pass returns beside its loss.

Scripts make their loss or metrics of them. The last stage has them, and says with the first loss which there are. On
others, what the script asks for by name comes as the loss does: while the pipeline is being filled, and in synchronous
training, when all stages ask for it; in a full asynchronous pipeline with the gradients, of an earlier micro-batch.
There the names are those of the first micro-batch. What nobody asks for costs nothing; scalars are always asked for, so
that a script may log them when it has made its update.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_vpipe.engine.execution.ending import Failures
from ds_vpipe.engine.links.message import Tree
from ds_vpipe.engine.links.stage_links import LossLinks
from ds_vpipe.engine.loop.script_loss import INSIDE, TENSORS, LossGate, LossTensor, not_in_training
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import CallOrderError, OutputError
from ds_vpipe.splitting.call import find_loss
from ds_vpipe.splitting.meta_tensor import MetaTensor

_Sent = tuple[Any, ...]  # an empty tensor whose shape has a number, the value, and whether it has a graph
_EARLIER = "tensor of earlier layers"
_SCRIPT_LOSS = 0  # number of the loss that a script has made of other outputs; theirs are those of their names, from 1


class OtherOutputs:
    """Outputs of the micro-batch whose loss the script has, on a stage."""

    def __init__(self, stage: Stage, links: LossLinks, failures: Failures) -> None:
        self._stage, self._links, self._failures = stage, links, failures
        self.names: tuple[str, ...] = ()  # of those in the first micro-batch
        self.asked: dict[str, None] = {}  # names that the script has asked for
        self.one_of_several = False  # whether the loss is, and neither called so nor the first
        self._first_description: list[Any] = []  # description of the first micro-batch's outputs, see _description()
        self.alike: bool | None = None  # whether all stages have been handed the same data, where that was looked at
        self._settled = False  # whether the first micro-batch is over
        self._values: dict[int, _Sent] = {}  # by number
        self._returned: Any = None  # on the last stage, by the latest forward pass
        self._waiting: Sequence[int] = ()  # on the last stage, those who wait for its loss
        self._waits = False  # for the loss of the round's own micro-batch

    def forwarded(self, waiting: Sequence[int]) -> torch.Tensor | None:
        """The last stage has run a forward pass, for whose loss the stages ``waiting`` wait.

        Returns:
            Of the first one the names, for those stages.
        """
        module: Any = self._stage.module
        self._returned = module.stage_model.take_output(with_graph=True)
        self._waiting = waiting
        if self._first_description:
            return None
        packed = torch.frombuffer(bytearray(json.dumps(_description(self._returned)), "utf-8"), dtype=torch.uint8)
        self.announced(packed)
        return packed

    def announced(self, packed: torch.Tensor | None) -> None:
        """The description of the first micro-batch's outputs has come, with its loss."""
        if packed is not None:
            self._first_description = json.loads(packed.numpy().tobytes())
            _, self.one_of_several, kinds = self._first_description
            self.names = tuple(name for name, kind in kinds.items() if kind in TENSORS)

    def put_beside(self, loss: LossTensor, gate: LossGate, micro_batch: int) -> None:
        """Let the script take others out of the loss that it is handed, and ask for scalars."""
        layout, _, kinds = self._first_description
        loss.others, loss.names = partial(self.ask, gate, micro_batch), self.names
        if layout:
            loss.kinds, loss.by_key, loss.look = kinds, layout == "keys", self._compare
        own: dict[str, Any] = {name: None for name, kind in kinds.items() if kind == "scalar"}
        for name in own:
            with suppress(OutputError):  # None now
                own[name] = self.ask(gate, micro_batch, name)
        loss.own = own

    def _compare(self) -> None:
        """Refuse other entries than the first micro-batch's, by which every stage goes."""
        if self._returned is not None and self._first_description != _description(self._returned):
            raise CallOrderError(
                "outputs: got other entries than forward() has returned in the first micro-batch, or another loss "
                "first; allowed in training are the same keys, positions, types and places of None in each; return "
                "them from the first one on, or write outputs.loss, or the name of a tensor as an attribute"
            )

    def round_ends(self) -> None:
        """The script has made its loss."""
        self._settled = True

    def round_begins(self, waits: bool) -> None:
        """Whether this stage waits for the loss of the round's own micro-batch."""
        self._waits = waits
        if waits:
            self._forget()

    def arrived(self, outputs: Iterable[_Sent]) -> None:
        """Take those of a newer micro-batch, which have come with its gradient."""
        self._values = {mark.shape[1]: (mark, *others) for mark, *others in outputs if mark is not None}

    def ask(self, gate: LossGate, micro_batch: int, name: str) -> torch.Tensor:
        """An output by its name. All stages ask for the same ones, in the same order.

        Args:
            gate: that of the loss that the script got.
            micro_batch: that of the round.
            name: the key, or attribute, in what the forward pass has returned.

        Raises:
            CallOrderError: other stages have not asked for it.
            OutputError: the forward pass has returned no tensor by this name, or it was not asked for at first.
        """
        stage, shown = self._stage, name.replace(INSIDE, ".")
        alone = stage.pipeline.synchronous or stage.pipeline.num_stages == 1
        if name not in self.names:
            if self._first_description[2].get(name) == _EARLIER:
                raise CallOrderError(not_in_training(shown, _EARLIER))  # as below
            if not self._settled or self._found(name) is None:
                raise OutputError(f"outputs.{shown}: forward() has returned no tensor by this name")
            # Else no AttributeError: the script would get the default of getattr(outputs, name, default).
            raise CallOrderError(
                f"outputs.{shown}: forward() has not returned it in the first micro-batch, allowed is what it has; "
                f"return it from the first one on"
            )
        if self._settled and not alone and name not in self.asked:
            raise CallOrderError(
                f"outputs.{shown}: asked for later than in the first micro-batch, allowed in asp is from the first one "
                f"on, on every rank; do so, or compute it in forward()"
            )
        self.asked[name], mark = None, self._number(name)
        if mark not in self._values and (stage.is_last or self._waits):
            with self._failures.aborting():
                if stage.is_last:
                    self._values[mark] = _marked(mark, self._found(name))
                    self._links.send(micro_batch, self._values[mark], self._waiting)
                else:
                    what = f"outputs.{shown}, which all ranks have to ask for,"
                    sent = stage.arrived(self._links.wait(micro_batch, what))
                    self._values[sent[0].shape[1]] = sent
        if mark not in self._values:
            raise CallOrderError(
                f"outputs.{shown}: asked for on {stage.links.me} and not on others, allowed is the same on every rank "
                f"in every micro-batch; do so, or compute it in forward()"
            )
        _, value, trained = self._values[mark]
        if value is None:
            raise OutputError(f"outputs.{shown}: forward() has returned no tensor by this name")
        value = value.detach() if trained is None else gate.gated_output(value)
        return value if alone and self.alike else value.as_subclass(OthersOutput)

    def agree_on(self, loss: torch.Tensor) -> None:
        """Give a loss made of other outputs the last stage's value.

        What else the script has put into it, such as a number of tokens, is of the round's micro-batch, and the
        outputs on an earlier stage need not be.
        """
        if self._stage.is_last or self._waits:
            if self._values:
                self._values[_SCRIPT_LOSS] = _marked(_SCRIPT_LOSS, loss.detach().clone())
        elif _SCRIPT_LOSS in self._values:
            loss.detach().copy_(self._values[_SCRIPT_LOSS][1])

    def beside(self, loss: Tree) -> Tree:
        """``loss`` and, once the script has asked for some, others, to go back with the gradient."""
        if _SCRIPT_LOSS in self._values and not self._stage.pipeline.synchronous:
            others = (_marked(self._number(name), self._found(name)) for name in self.asked)
            loss = (loss, *others, self._values[_SCRIPT_LOSS])
        self._returned = None  # whose memory the backward pass may need
        self._forget()
        return loss

    def _number(self, name: str) -> int:
        return 1 + self.names.index(name)

    def _found(self, name: str) -> torch.Tensor | None:
        value = self._returned
        for key in name.split(INSIDE):
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, (tuple, list)) and key.isdecimal():
                value = value[int(key)] if int(key) < len(value) else None
            else:
                value = getattr(value, key, None)
        return value if isinstance(value, torch.Tensor) and not isinstance(value, MetaTensor) else None

    def _forget(self) -> None:
        """All but the script's own loss, which is that of micro-batches that complete its batch too."""
        self._values = {mark: sent for mark, sent in self._values.items() if mark == _SCRIPT_LOSS}


def _marked(number: int, value: torch.Tensor | None) -> _Sent:
    mark = torch.empty(0, number, dtype=torch.uint8, device="cpu")
    return mark, value, mark if value is not None and value.requires_grad else None


def _description(returned: Any) -> list[Any]:
    """Keys or positions, whether the loss stands for several, and what each entry is, as JSON has it."""
    layout = "keys" if isinstance(returned, Mapping) else "positions" if isinstance(returned, (tuple, list)) else ""
    loss = find_loss(returned)
    kinds = {name: "loss" if value is loss else _kind(value) for name, value in _entries(returned)}
    trained = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    several = sum(leaf.dim() == 0 and leaf is not loss for leaf in trained) > 0
    known = kinds.get("loss") == "loss" or (layout == "positions" and returned[0] is loss)
    return [layout, bool(layout) and several and not known, kinds]


def _entries(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of what a forward has returned, and what is in them, by name."""
    if isinstance(value, (tuple, list)):
        found: Mapping[Any, Any] = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        found = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for key, entry in found.items():
        yield f"{before}{key}", entry
        if type(entry) in (dict, tuple, list):
            yield from _entries(entry, f"{before}{key}{INSIDE}")


def _kind(value: Any) -> str:
    if isinstance(value, MetaTensor):
        return _EARLIER
    if isinstance(value, torch.Tensor):
        return "tensor" if value.dim() else "scalar"
    return type(value).__name__ if value is not None else "None"


class OthersOutput(torch.Tensor):
    """Output that need not be of the script's micro-batch.

    In asynchronous training it may be of another round, and where stages are handed different data it is of the first
    one's. Sums and means of it are ordinary numbers, as the loss is. Together with tensors of the script it would give
    wrong numbers, and is refused: on all stages, also where it is of the same micro-batch.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # as LossTensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch does, of such tensors and numbers alone."""
        with torch._C.DisableTorchFunctionSubclass():
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
            if given and (function in _VALUES or not all(isinstance(leaf, cls) for leaf in given)):
                raise CallOrderError(
                    f"outputs: got {getattr(function, '__name__', function)}() of a tensor that forward() has returned "
                    f"in training and of other values, allowed in asp, and where ranks are handed different data, are "
                    f"sums, means and functions of such tensors alone, as they may be of another micro-batch; write "
                    f'"bsp" for vpipe.sync_mode and hand all ranks the same, or compute it in forward()'
                )
            result = function(*args, **(kwargs or {}))
            return tree_map_only(torch.Tensor, lambda made: made.as_subclass(cls) if made.dim() else made, result)


_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
