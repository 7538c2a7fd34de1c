"""Swap of a stage's activations: what its first layers save for the backward pass is kept on the host until then.

The first ``int(ratio * n)`` of a stage's ``n`` layers, those that are recomputed left out, are run under hooks of
autograd for saved tensors. When they are done, the storages that they have saved are copied to the host and given up;
they come back when the backward pass is due. The first layers, because recomputation has the last ones, and because
they are used last in the backward pass: copies have the rest of the forward and the backward pass to hide behind.

Not moved is what stays alive anyway or is too small: weights and buffers, the stage's input, the output of the last
swapped layer, which is the stage's output or the next layer's input, and storages below :data:`SMALLEST` bytes. A
storage moves once however many tensors are saved of it, and all its tensors are views of it again.

Autograd does not look for changes in place of tensors that went through hooks. Here every tensor leaves an empty one
behind that shares its version counter, so that such a change is the error that it is without a swap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_vpipe.engine.modules.host_memory import HostMemory, host_memory
from ds_vpipe.engine.modules.saved_tensors import allowing_hooks, changed_in_place
from ds_vpipe.engine.weights.versions import WeightVersions

SMALLEST = 1 << 16
"""Bytes of the smallest storage that is moved. A link needs some microseconds for so many, the engine more for a move;
activations are larger, and statistics of normalizations smaller."""


class _Activations:
    """One storage of saved tensors, wherever it is."""

    def __init__(self, storage: torch.UntypedStorage, memory: HostMemory) -> None:
        self.storage: torch.UntypedStorage | None = storage  # on the device, until it is moved
        self._memory = memory
        self._copy: Any = None
        self._fetched: Any = None

    def move(self) -> int:
        """Copy to the host, and give up the storage. Returns its bytes."""
        storage, self.storage = self.storage, None
        if storage is None:
            return 0
        self._copy = self._memory.put(storage)
        return storage.nbytes()

    def fetch(self) -> None:
        """Start bringing it back, unless that has begun."""
        if self._copy is not None:
            self._fetched = self._memory.fetch(self._copy)
            self.free()

    def take(self) -> torch.UntypedStorage:
        """The storage that has come back."""
        self.fetch()
        return self._memory.take(self._fetched)

    def free(self) -> None:
        """Give up the copy on the host. A graph without a backward pass does so when it is dropped."""
        copy, self._copy = self._copy, None
        if copy is not None:
            self._memory.free(copy)

    __del__ = free


class _Saved:
    """A tensor saved by autograd, with the version of its values, and its storage if that may be moved."""

    def __init__(self, tensor: torch.Tensor, activations: _Activations | None) -> None:
        # Not the tensor itself, which may be the output of the node that saves it: a cycle that nothing collects.
        self._tensor = tensor if activations is None and tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._activations = activations
        if activations is not None:
            self._offset, self._shape, self._stride = tensor.storage_offset(), tensor.shape, tensor.stride()

    def leave(self) -> None:
        """Let go of the storage, and keep counting its changes in place."""
        self._tensor.data = self._tensor.new_empty(0)

    def unpack(self) -> torch.Tensor:
        """The tensor as it was saved.

        Raises:
            RuntimeError: it has been changed in place since, as autograd itself says.
        """
        tensor = self._tensor
        if tensor._version != self._version:
            raise changed_in_place(tensor, tensor.shape if self._activations is None else self._shape, self._version)
        if self._activations is None or self._activations.storage is not None:
            return tensor
        return tensor.new_empty(0).set_(self._activations.take(), self._offset, self._shape, self._stride)


class Swapped(list[_Activations]):
    """Storages that the forward pass of one micro-batch has left on the host; the last are needed first."""

    def fetch(self) -> None:
        """Start bringing them back, in the order in which the backward pass uses them."""
        while self:  # autograd alone keeps them from now on, each until it has been used
            self.pop().fetch()


class Swap:
    """Swapped activations of one stage."""

    def __init__(self, device: torch.device) -> None:
        self.bytes_moved = 0  # to the host, since the start
        self._device = device
        self._memory: HostMemory | None = None
        self._swapped: Swapped | None = None  # of the forward pass to come
        self._versions: WeightVersions | None = None
        self._stays: frozenset[int] = frozenset()  # storages of weights and buffers

    def begin(self, module: torch.nn.Module, versions: WeightVersions) -> Swapped:
        """Arm the swap for the next forward pass. The result holds what it moves.

        ``versions`` are others, if weights have been put on other memory.
        """
        if versions is not self._versions:
            self._versions = versions
            self._stays = frozenset(_storages([*module.parameters(), *module.buffers()]))
        self._swapped = Swapped()
        return self._swapped

    def run(self, layers: Callable[[Any], Any], inputs: Any) -> Any:
        """Run ``layers``. After a :meth:`begin`, move what they save."""
        swapped, self._swapped = self._swapped, None
        if swapped is None:
            return layers(inputs)
        if self._memory is None:
            self._memory = host_memory(self._device)
        memory, stays = self._memory, self._stays | _storages(tree_leaves(inputs))
        found: dict[int, tuple[_Activations, list[_Saved]]] = {}

        def pack(tensor: torch.Tensor) -> _Saved:
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == self._device
            # More than a view of a storage; zeros of forward-mode differentiation have one without values.
            if not plain or tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor():
                return _Saved(tensor, None)
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST or storage._cdata in stays or tensor.is_conj() or tensor.is_neg():
                return _Saved(tensor, None)
            activations, saved = found.setdefault(storage._cdata, (_Activations(storage, memory), []))
            saved.append(_Saved(tensor, activations))
            return saved[-1]

        with allowing_hooks("vpipe.swap_ratio"), torch.autograd.graph.saved_tensors_hooks(pack, _Saved.unpack):
            outputs = layers(inputs)
        for key in _storages(tree_leaves(outputs)):
            found.pop(key, None)
        for activations, saved in found.values():
            for tensor in saved:
                tensor.leave()
            self.bytes_moved += activations.move()
            swapped.append(activations)
        found.clear()  # which the graph refers to, through pack(), as long as any of its nodes
        return outputs


def _storages(values: Iterable[Any]) -> set[int]:
    """Keys of the storages of all tensors among ``values``."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    return {tensor.untyped_storage()._cdata for tensor in tensors}
