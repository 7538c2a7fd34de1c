"""Weight versions of one stage: memory that is exchanged under the parameters' storages.

Autograd keeps references to parameters and to views of them from a forward pass to its backward pass.
Both see the right weights if the parameters' storages hold the version of the forward pass again while
the backward pass runs. So every parameter keeps its storage, and pointing to a version exchanges the
memory below it. Whatever else shares the storage sees the same: flat buffers of ZeRO-1 and of the
mixed-precision wrappers, their partitions and fragments, views that a script has made.

An update that would overwrite a version in flight is preceded by a fork, which copies it to memory of
its own. There may be hundreds of small weights, so those of a version lie side by side in one block,
which is copied by one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

_ALIGNMENT = 512  # bytes, as allocators have it


@dataclass(slots=True)
class _Weights:
    """Storages of all weights in one version.

    Attributes:
        storages: of the weights.
        block: memory that they lie side by side in.
        addresses: theirs in the block.
    """

    storages: Sequence[torch.UntypedStorage]
    block: torch.Tensor
    addresses: list[int]

    @classmethod
    def like(cls, storages: Sequence[torch.UntypedStorage]) -> _Weights:
        """Storages of the same sizes in a new block."""
        ends = list(accumulate((-(-s.nbytes() // _ALIGNMENT) * _ALIGNMENT for s in storages), initial=0))
        device = storages[0].device if storages else None
        block = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        whole = block.untyped_storage()
        slices = [whole[start : start + s.nbytes()] for start, s in zip(ends, storages, strict=False)]
        return cls(slices, block, [s.data_ptr() for s in slices])

    def is_in_block(self) -> bool:
        """Whether the storages are where they were put; ``share_memory()`` moves them."""
        return [storage.data_ptr() for storage in self.storages] == self.addresses

    def exchange(self, other: _Weights) -> None:
        """Exchange the memory of all storages with that of ``other``'s."""
        for storage, others in zip(self.storages, other.storages, strict=True):
            storage._swap_data_ptr_(others)  # type: ignore[attr-defined]  # missing in torch's stubs
        self.block, other.block = other.block, self.block
        self.addresses, other.addresses = other.addresses, self.addresses


class WeightVersions:
    """Live versions of trainable weights by number of updates.

    Args:
        parameters: the stage's parameters; those that do not require gradients never change and are left alone.
        version: number of updates that the parameters have had already.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], version: int = 0) -> None:
        found = [parameter.untyped_storage() for parameter in parameters if parameter.requires_grad]
        by_address = {storage.data_ptr(): storage for storage in found if storage.data_ptr()}
        self._own = _Weights(list(by_address.values()), torch.empty(0), [])
        self._latest = self._pointed = version
        self._held: dict[int, _Weights] = {}  # versions that the parameters do not point to
        self._spare: list[_Weights] = []

    @property
    def latest(self) -> int:
        """Number of updates that the newest weights have had."""
        return self._latest

    @property
    def pointed(self) -> int:
        """The version that parameters point to now."""
        return self._pointed

    @property
    def alive(self) -> tuple[int, ...]:
        """Versions held in memory of their own, oldest first; the last is the newest."""
        return tuple(sorted({*self._held, self._pointed}))

    @property
    def allocated(self) -> int:
        """Sets of storages in memory: those alive and the spare ones."""
        return 1 + len(self._held) + len(self._spare)

    def point_to(self, version: int) -> None:
        """Make the parameters refer to ``version``, which must be alive."""
        if version != self._pointed:
            held = self._held.pop(version)
            self._own.exchange(held)
            self._held[self._pointed] = held
            self._pointed = version

    def point_to_newest(self) -> None:
        """Make the parameters refer to the newest weights."""
        self.point_to(self._latest)

    def fork(self) -> None:
        """Point to the newest weights for an update, and copy them for the version that it leaves behind."""
        self.point_to_newest()
        if not self._own.is_in_block():  # the first time
            moved = _Weights.like(self._own.storages)
            for target, source in zip(moved.storages, self._own.storages, strict=True):
                target.copy_(source)
            self._own.exchange(moved)
        copied = self._spare.pop() if self._spare else _Weights.like(self._own.storages)
        copied.block.copy_(self._own.block)
        self._held[self._latest] = copied

    def advance(self) -> None:
        """Count an update of the newest weights. Without a :meth:`fork` before it, the previous version is gone."""
        self._latest += 1
        self._pointed = self._latest

    def keep_only(self, versions: set[int]) -> None:
        """Recycle all versions but ``versions`` and the newest; parameters never point to one that is recycled."""
        if self._pointed not in versions:
            self.point_to_newest()
        for version in [v for v in self._held if v not in versions and v != self._latest]:
            self._spare.append(self._held.pop(version))
