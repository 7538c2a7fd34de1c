"""Tied weights of layers on different stages: one stage owns them, others hold copies.

Stages that update at different times cannot reduce the gradients of a tied weight together, and copies
that are updated apart drift. So the first tied stage owns the weight. Every other one sends it the
gradient of each batch, which the owner needs only after its own backward passes of that batch, and the
owner sends the weight back after each update. A copy takes the version that is known to have been made
by then, ``d`` updates behind (:func:`ds_vpipe.schedules.one_f_one_b.updates_known`), whatever has arrived earlier, so
that training does not depend on time. Copies are never updated by their own stage's optimizer: what it
does to them is overwritten.

Each pair of owner and copy has links of its own: weights may be large, and the stages between have no
use for them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.links.message import Message, Tree
from ds_vpipe.engine.links.wiring import Wiring
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.errors import VPipeError
from ds_vpipe.schedules.one_f_one_b import peer_delay, updates_known

_PREFETCH = 1


@dataclass(slots=True)
class _Linked:
    """Weights that two stages have, frozen ones included."""

    linked: list[torch.nn.Parameter]
    once_trained: set[int] = field(default_factory=set, init=False)  # identities

    def __post_init__(self) -> None:
        self.once_trained |= {id(weight) for weight in self.trained}

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Those that are trained now; a script may freeze and unfreeze some while nothing is in flight."""
        return [weight for weight in self.linked if weight.requires_grad]

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Those that are or were trained: optimizers with master weights go on writing those that a script freezes."""
        self.once_trained |= {id(weight) for weight in self.trained}
        return [weight for weight in self.linked if id(weight) in self.once_trained]

    def check(self, found: Sequence[Any], here: Sequence[Any], other: int) -> None:
        """Refuse a message of stage ``other`` about other weights than those ``here``."""
        if len(found) != len(here):
            raise VPipeError(
                f"tied weights: got {len(here)} that require gradients here and {len(found)} on stage {other}, "
                f"allowed is the same on both; set requires_grad on every stage that has the weight"
            )


@dataclass(slots=True)
class _ToCopy(_Linked):
    """Weights owned here, and the links to one stage with copies."""

    stage: int
    gradients_in: Receiver
    weights_out: Sender


@dataclass(slots=True)
class _FromOwner(_Linked):
    """Copies here of one owner's weights, with values that are due."""

    gradients_out: Sender
    weights_in: Receiver
    owner: int
    version: int = 0
    values: list[torch.Tensor] | None = None
    ahead: deque[list[torch.Tensor]] = field(default_factory=deque)


def tied_parameters(module: PipelineModule, key: str) -> list[torch.nn.Parameter]:
    """Tied parameters among those of the layers of ``key``, which this stage has."""
    if isinstance(module, SplitModule):  # a module that was split, whose layers are no TiedLayerSpec
        return _linked(module, key)
    names: list[str] = []
    for spec in module._layer_specs:
        if isinstance(spec, TiedLayerSpec) and spec.key == key:
            given = spec.tied_weight_attr
            names += [given] if isinstance(given, str) else given
    return [module._recursive_getattr(module.tied_modules[key], name) for name in dict.fromkeys(names)]


def tied_stages(module: PipelineModule) -> dict[str, tuple[int, ...]]:
    """Stages of every tied key that spans more than one, owner first; the same on all ranks."""
    stages: dict[str, set[int]] = {}
    if isinstance(module, SplitModule):
        stages = {key: {module.stage_owner(index) for index in layers} for key, layers in module.tied_layers().items()}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    return {key: tuple(sorted(found)) for key, found in sorted(stages.items()) if len(found) > 1}


class TiedWeights:
    """The tied weights of one stage; all ranks build one.

    Attributes:
        depths: warm-up depth of every stage; may change while nothing is in flight.
    """

    def __init__(
        self,
        module: PipelineModule,
        tied: Mapping[str, Sequence[int]],
        grid: Any,
        depths: Sequence[int],
        wiring: Wiring,
    ) -> None:
        stage = grid.get_stage_id()
        self.depths, self._stage = depths, stage
        self._device_copies = wiring.copies
        self._to_copies: list[_ToCopy] = []
        self._from_owners: list[_FromOwner] = []
        pairs: dict[tuple[int, int], list[str]] = {}
        for key, (owner, *others) in tied.items():
            for other in others:
                pairs.setdefault((owner, other), []).append(key)
        for (owner, other), keys in sorted(pairs.items()):
            if stage not in (owner, other):
                continue
            linked = [weight for key in keys for weight in _linked(module, key)]
            there = other if stage == owner else owner
            peer = Peer(there, grid.stage_to_global(there))
            if stage == owner:
                weights_out = wiring.sender("tied weights", peer, _PREFETCH)
                gradients_in = wiring.receiver("tied gradients", peer, _PREFETCH)
                self._to_copies.append(_ToCopy(linked, other, gradients_in, weights_out))
            else:
                weights_in = wiring.receiver("tied weights", peer, _PREFETCH)
                gradients_out = wiring.sender("tied gradients", peer, _PREFETCH)
                self._from_owners.append(_FromOwner(linked, gradients_out, weights_in, owner))
        self.weights_in = [from_owner.weights_in for from_owner in self._from_owners]  # links from the owners
        self.weights_out = [to_copy.weights_out for to_copy in self._to_copies]  # links to the copies
        self.gradients_in = [to_copy.gradients_in for to_copy in self._to_copies]  # links from the copies
        self.gradients_out = [from_owner.gradients_out for from_owner in self._from_owners]  # links to the owners

    def send_gradients(self, batch: int, taken: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> None:
        """Send the copies' gradients of ``batch`` to their owners; ``taken`` leaves nothing to update here."""
        for from_owner in self._from_owners:
            from_owner.gradients_out.send(Message.TIED, batch, tuple(map(taken, from_owner.trained)))

    def add_gradients(self, batch: int, add: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        """Add the copies' gradients of ``batch`` to the owner's."""
        for to_copy in self._to_copies:
            message = to_copy.gradients_in.receive(f"RECV_TIED_GRAD{batch}")
            to_copy.check(message.tree, to_copy.trained, to_copy.stage)
            for weight, gradient in zip(to_copy.trained, message.tree, strict=True):
                if gradient is not None:
                    add(weight, self._arrived(gradient.detach()))

    def send_weights(self, version: int, micro_batches: int, filled_from: int) -> None:
        """Send the owner's newest weights, which have had ``version`` updates."""
        for to_copy in self._to_copies:
            # The gradient of batch version - 1 has come, so the copy has made update version - 2 and what was due then.
            delay = peer_delay(self.depths[to_copy.stage], self.depths[self._stage], micro_batches)
            to_copy.weights_out.release(updates_known(version - 2, delay, micro_batches, filled_from))
            to_copy.weights_out.send(Message.TIED, version, tuple(weight.detach() for weight in to_copy.weights))

    def receive_weights(self, batch: int, micro_batches: int, filled_from: int) -> None:
        """Wait for the owners' version that is due at this stage's update ``batch``."""
        for from_owner in self._from_owners:
            delay = peer_delay(self.depths[self._stage], self.depths[from_owner.owner], micro_batches)
            self._receive(from_owner, updates_known(batch, delay, micro_batches, filled_from), f"RECV_TIED{batch}")
            from_owner.gradients_out.release(from_owner.version - 1)  # which the owner had for its update before

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Weights that other stages have too."""
        return [weight for linked in (*self._to_copies, *self._from_owners) for weight in linked.weights]

    @property
    def copied(self) -> list[torch.nn.Parameter]:
        """Weights that other stages own, which alone update them."""
        return [weight for from_owner in self._from_owners for weight in from_owner.linked]

    def refuse_written(self, written: Set[int]) -> None:
        """Refuse weights that a script has ``written`` into under micro-batches in flight, which copies would lack."""
        if any(id(weight) in written for to_copy in self._to_copies for weight in to_copy.weights):
            raise VPipeError(
                "tied weights: got values that the script has written while micro-batches are in flight, allowed is to "
                "do so in an empty pipeline, on all stages that have them; call engine.quiesce() before, on every rank"
            )

    def hold(self) -> None:
        """Keep copies of which nothing was received, before an update that changes them."""
        for from_owner in self._from_owners:
            if from_owner.values is None:
                from_owner.values = [weight.detach().clone() for weight in from_owner.weights]

    def overwrite(self) -> None:
        """Set the copies to the owner's version that was received last, or to what :meth:`hold` has kept."""
        for from_owner in self._from_owners:
            values, from_owner.values = from_owner.values, None
            for weight, value in zip(from_owner.weights, values or (), strict=False):
                weight.data.copy_(value)

    def catch_up(self, version: int) -> None:
        """Wait for the owners' ``version`` and take it. Only while nothing is in flight here."""
        for from_owner in self._from_owners:
            self._receive(from_owner, version, f"tied weights after update {version}")
        self.overwrite()

    def restart(self, version: int) -> None:
        """Continue with the present weights as ``version``; everything sent has been received."""
        for from_owner in self._from_owners:
            from_owner.version = version

    @property
    def known(self) -> dict[int, int]:
        """Version that the copies here have received last, by the stage of their owner."""
        return {from_owner.owner: from_owner.version for from_owner in self._from_owners}

    def resume(self, version: int, known: Sequence[Mapping[int, int]], point_to: Callable[[int], None]) -> None:
        """Send once more what a failure has lost: the owners' versions up to ``version`` that copies had not received.

        Args:
            version: of the newest weights, the same on all stages.
            known: :attr:`known` of every stage at that moment.
            point_to: makes the weights here refer to a version.
        """
        for to_copy in self._to_copies:
            for missing in range(known[to_copy.stage][self._stage] + 1, version + 1):
                point_to(missing)
                values = tuple(weight.detach().clone() for weight in to_copy.weights)
                to_copy.weights_out.send(Message.TIED, missing, values)
        for from_owner in self._from_owners:
            from_owner.version = known[self._stage][from_owner.owner]
            self._receive_ahead(from_owner, version)

    def flush(self) -> None:
        """Wait until everything that was sent has been received."""
        for sender in (*self.weights_out, *self.gradients_out):
            sender.flush()

    @contextmanager
    def newest(self, version: int) -> Iterator[None]:
        """Use the owners' ``version``, the newest, as copies between two batches."""
        kept = []
        for from_owner in self._from_owners:
            self._receive_ahead(from_owner, version)
            for weight, value in zip(
                from_owner.weights, from_owner.ahead[-1] if from_owner.ahead else (), strict=False
            ):
                kept.append((weight, weight.data))
                weight.data = self._arrived(value)
        try:
            yield
        finally:
            for weight, data in kept:
                weight.data = data

    def exchange(
        self, states_of: Callable[[Sequence[torch.nn.Parameter]], torch.Tensor]
    ) -> list[tuple[Any, torch.Tensor]]:
        """States of owned weights, sent to the stages with copies; only while nothing is in flight.

        Returns:
            The weights that are copies here, each owner's with their states.
        """
        for to_copy in (to_copy for to_copy in self._to_copies if to_copy.weights):  # frozen ones have no states
            # No longer than weights are: links keep buffers as long as the longest message.
            size = sum(weight.nbytes for weight in to_copy.weights)
            pieces = states_of(to_copy.weights).split(size)
            for piece in (torch.tensor(len(pieces), device="cpu"), *pieces):
                to_copy.weights_out.send(Message.TIED, 0, piece)
        found = []
        for from_owner in (from_owner for from_owner in self._from_owners if from_owner.weights):
            count = int(from_owner.weights_in.receive("states of tied weights").tree)
            pieces = tuple(from_owner.weights_in.receive("states of tied weights").tree for _ in range(count))
            found.append((from_owner.weights, torch.cat(pieces)))
        self.flush()
        return found

    def _arrived(self, tree: Tree) -> Tree:
        return tree if self._device_copies is None else self._device_copies.tree_to_device(tree)

    def _receive_ahead(self, from_owner: _FromOwner, version: int) -> None:
        while from_owner.version + len(from_owner.ahead) < version:
            from_owner.ahead.append(list(from_owner.weights_in.receive(f"tied weights after update {version}").tree))

    def _receive(self, from_owner: _FromOwner, version: int, what: str) -> None:
        while from_owner.version < version:
            values = from_owner.ahead.popleft() if from_owner.ahead else list(from_owner.weights_in.receive(what).tree)
            from_owner.check(values, from_owner.weights, from_owner.owner)
            from_owner.values = self._arrived(values)
            from_owner.version += 1


def _linked(module: PipelineModule, key: str) -> list[torch.nn.Parameter]:
    tied = module.tied_comms[key]
    return [module._recursive_getattr(tied["module"], name) for name in tied["weight_attr"]]
