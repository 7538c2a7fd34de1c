"""Where the values of one version of a stage's weights lie in memory, and the views that parameters take on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.dlpack import from_dlpack

_SMALL_BYTES = 1 << 14
_ALIGNMENT = 256  # bytes; kernels are chosen by it


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that refers to the weights, with its place in its storage: the same in every version."""

    tensor: torch.Tensor
    storage: int  # position among the version's storages
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> Alias:
        """The place that ``tensor`` has now."""
        return cls(tensor, storage, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """The same view on another version's storage."""
        view = torch.empty(0, dtype=self.tensor.dtype, device=flat.device)
        view.set_(flat.untyped_storage(), self.offset, self.size, self.stride)
        return view


@dataclass(frozen=True, slots=True)
class Storage:
    """What a storage holds: how many elements of which kind, and where."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A new one."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)


class Weights:
    """One version's storages, with the views that parameters and other aliases take on them.

    Args:
        flats: the storages.
        blocks: the memory that they lie in, which is what a copy has to copy.
        aliases: everything that refers to them, the parameters first.
        num_parameters: how many those are.
    """

    def __init__(
        self,
        flats: Sequence[torch.Tensor],
        blocks: Sequence[torch.Tensor],
        aliases: Sequence[Alias],
        num_parameters: int,
    ) -> None:
        self.flats, self.blocks = list(flats), list(blocks)
        views = [alias.on(self.flats[alias.storage]) for alias in aliases]
        self.parameter_views = views[:num_parameters]
        self.other_views = views[num_parameters:]


class Layout:
    """How forks lay the weights out: small storages side by side in one block of memory, so that they are one copy.

    Each is a storage of its own all the same, as long as its tensor: whoever writes a parameter to a file writes no
    other, and libraries that look for shared weights find none.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position, storage in enumerate(storages):
            if 0 < storage.numel * storage.dtype.itemsize <= _SMALL_BYTES:
                kinds.setdefault((storage.dtype, storage.device), []).append(position)
        self._storages = storages
        self._side_by_side = [positions for positions in kinds.values() if len(positions) > 1]

    @property
    def joins(self) -> bool:
        """Some storages lie side by side, which those that were found do not."""
        return bool(self._side_by_side)

    def empty(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """New ``flats`` and ``blocks`` of a version."""
        flats: dict[int, torch.Tensor] = {}
        blocks = []
        for positions in self._side_by_side:
            storages = [self._storages[position] for position in positions]
            step = _ALIGNMENT // storages[0].dtype.itemsize
            lengths = [-(-storage.numel // step) * step for storage in storages]
            block = replace(storages[0], numel=sum(lengths)).empty()
            parts = zip(positions, storages, block.split(lengths), strict=True)
            # Whatever comes by DLPack is a storage of its own. It keeps the block alive.
            flats |= {position: from_dlpack(part[: storage.numel]) for position, storage, part in parts}
            blocks.append(block)
        for position in sorted(set(range(len(self._storages))) - flats.keys()):
            flats[position] = self._storages[position].empty()
            blocks.append(flats[position])
        return [flats[position] for position in range(len(flats))], blocks
