"""Weight versions of one stage: memory that is exchanged below the parameters' storages.

Autograd keeps references to parameters and to views of them from a forward pass to its backward pass.
Both see the right weights if the parameters' storages hold the version of the forward pass again while
the backward pass runs. So every parameter keeps its storage, and pointing to a version exchanges the
memory below it. Whatever else shares the storage sees the same: flat buffers of ZeRO-1 and of the
mixed-precision wrappers, their partitions and fragments, views that a script has made.

An update that would overwrite a version in flight is preceded by a fork: the values are copied to memory
of their own, and the update is made in place. So the newest weights stay in the memory in which the
parameters were built. What knows an address and no storage, such as a numpy array or a process that shares
the memory, sees the newest weights at any time, as without versions, and no memory is freed under it.

Nothing that shares a weight's storage may be read later as a value of its version: whoever keeps or sends
such a tensor copies it while the version is pointed to (:meth:`WeightVersions.unshared`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from functools import cache
from itertools import accumulate
from operator import is_
from typing import Any

import torch

_BUILT_IN = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # from torch 2.12 on
_ALIGNMENT = 64  # of torch's own memory, on which the order of sums in a matrix product may depend
_EXCHANGE = """
void exchange(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  for (size_t i = 0; i < ours.size(); ++i) {
    auto* left = ours[i].storage().unsafeGetStorageImpl();
    auto* right = theirs[i].storage().unsafeGetStorageImpl();
    right->set_data_ptr_noswap(left->set_data_ptr(std::move(right->mutable_data_ptr())));
  }
}
"""


@cache
def _built_exchange() -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]:
    """Exchange of the memory below the storages of two lists of tensors, pair by pair.

    The first run of an environment builds it within a minute.
    """
    from torch.utils.cpp_extension import load_inline

    found: Any = load_inline("ds_vpipe_exchange", _EXCHANGE, functions="exchange")
    return found.exchange


class _Weights:
    """Storages of all weights in one version.

    Args:
        storages: of the weights.
        block: memory of all of them, one behind the other, each at the next aligned address; None: each has its own.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], block: torch.Tensor | None = None) -> None:
        self.storages = storages
        words = torch.int64 if all(storage.nbytes() % 8 == 0 for storage in storages) else torch.uint8
        self._contents = [torch.empty(0, dtype=words, device=s.device).set_(s) for s in storages]
        self._block = None if block is None else block.view(words)
        self._built = None if _BUILT_IN else _built_exchange()
        # The contents with the gaps of a block between them, which one call copies into a block.
        gaps = [-storage.nbytes() % _ALIGNMENT for storage in storages]
        self._spaced = [
            part
            for content, gap in zip(self._contents, gaps, strict=True)
            for part in ((content, content.new_zeros(gap // content.itemsize)) if gap else (content,))
        ]

    def like(self) -> _Weights:
        """Storages of the same sizes in new memory: on the CPU in a block, to which hundreds are copied in one call."""
        if any(storage.device.type != "cpu" for storage in self.storages):
            return _Weights([torch.UntypedStorage(s.nbytes(), device=s.device) for s in self.storages])
        sizes = [storage.nbytes() for storage in self.storages]
        places = list(accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0))
        block = torch.empty(places[-1], dtype=torch.uint8, device="cpu")
        parts = [block.numpy()[start : start + size] for start, size in zip(places, sizes, strict=False)]
        return _Weights([torch.from_numpy(part).untyped_storage() for part in parts], block)

    def copy_from(self, other: _Weights) -> None:
        """Copy the contents of all storages."""
        if self._contents and self._block is not None:
            torch.cat(other._spaced, out=self._block)
        elif self._contents:
            torch._foreach_copy_(self._contents, other._contents)

    def without(self, gone: Set[int]) -> _Weights:
        """Those storages whose position is not in ``gone``."""
        return _Weights([storage for position, storage in enumerate(self.storages) if position not in gone])

    def exchange(self, other: _Weights) -> None:
        """Exchange the memory of all storages with that of ``other``'s."""
        self._block, other._block = other._block, self._block
        if self._built is not None:
            self._built(self._contents, other._contents)
            return
        swap = torch.UntypedStorage._swap_data_ptr_  # type: ignore[attr-defined]  # missing in torch's stubs
        deque(map(swap, self.storages, other.storages), maxlen=0)  # without a line of Python for each


class WeightVersions:
    """Live versions of trainable weights by number of updates.

    Args:
        parameters: the stage's parameters; those that do not require gradients never change and are left alone.
        version: number of updates that the parameters have had already.

    Attributes:
        trained: the parameters that have versions.
        latest: number of updates that the newest weights have had.
        pointed: the version that parameters point to now.
        in_flight: version that the forward pass of each micro-batch in flight has used.
        keep_from: oldest version that later forward passes use, if any but the newest.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], version: int = 0) -> None:
        self.trained = tuple({id(p): p for p in parameters if p.requires_grad}.values())
        # By storage, not by address: two storages may lie in the same memory, and each is read through its own.
        self._under = list(map(torch.Tensor.untyped_storage, self.trained))
        self._views = [parameter.data for parameter in self.trained]  # what they are on their storages
        self._found = {storage._cdata: storage for storage in self._under}
        # Storages of the parameters, below which memory is exchanged.
        self._own = _Weights(list(self._found.values()))
        self.latest = self.pointed = version
        self.in_flight: dict[Hashable, int] = {}
        self.keep_from: int | None = None
        self._held: dict[int, _Weights] = {}  # versions that the parameters do not point to
        self._spare: list[_Weights] = []

    @property
    def alive(self) -> tuple[int, ...]:
        """Versions held in memory of their own, oldest first; the last is the newest."""
        return tuple(sorted({*self._held, self.pointed}))

    @property
    def allocated(self) -> int:
        """Sets of storages in memory: those alive and the spare ones."""
        return 1 + len(self._held) + len(self._spare)

    def point_to(self, version: int) -> None:
        """Make the parameters refer to ``version``, which must be alive."""
        if version != self.pointed:
            held = self._held.pop(version)
            self._own.exchange(held)
            torch.clear_autocast_cache()  # of casts by parameter, within a script's autocast
            self._held[self.pointed], self.pointed = held, version

    def point_to_newest(self) -> None:
        """Make the parameters refer to the newest weights."""
        self.point_to(self.latest)

    def fork(self) -> None:
        """Point to the newest weights for an update, and copy them for the version that it leaves behind."""
        self.point_to_newest()
        copied = self._spare.pop() if self._spare else self._own.like()
        copied.copy_from(self._own)
        self._held[self.latest] = copied

    def advance(self) -> None:
        """Count an update of the newest weights. Without a :meth:`fork` before it, the previous version is gone."""
        self.latest += 1
        self.pointed = self.latest
        torch.clear_autocast_cache()

    def begin_update(self) -> None:
        """Point to the newest weights for an update, after a copy of them if anything uses them."""
        self.point_to_newest()
        if self.latest in self._used():
            self.fork()

    def end_update(self) -> None:
        """Count an update of the newest weights, and recycle the version before it unless it is used."""
        self.advance()
        self.recycle()

    def recycle(self) -> None:
        """Recycle all versions but the newest and those used; parameters never point to one that is recycled."""
        used = self._used()
        if self.pointed not in used:
            self.point_to_newest()
        for version in [v for v in self._held if v not in used and v != self.latest]:
            self._spare.append(self._held.pop(version))

    def _used(self) -> set[int]:
        later = () if self.keep_from is None else range(self.keep_from, self.latest + 1)
        return {*self.in_flight.values(), *later}

    def remove(self, gone: Set[int]) -> None:
        """Give up the parameters with the identities ``gone``, in all versions; nothing in flight uses them."""
        left = [parameter for parameter in self.trained if id(parameter) in gone]
        kept = [parameter for parameter in self.trained if id(parameter) not in gone]
        if not left:
            return
        self._under = list(map(torch.Tensor.untyped_storage, kept))
        self._views = [parameter.data for parameter in kept]
        found = {storage._cdata for storage in self._under}
        places = {at for at, storage in enumerate(self._own.storages) if storage._cdata not in found}
        self._own = self._own.without(places)
        self._held = {version: held.without(places) for version, held in self._held.items()}
        self._spare = []  # each is one block, which would be kept whole
        self._found = {key: storage for key, storage in self._found.items() if key in found}
        self.trained = tuple(kept)

    def unshared(self, tree: Any) -> Any:
        """``tree`` with copies of the tensors that share memory with a weight, now of the version pointed to."""
        if isinstance(tree, torch.Tensor):
            shares = tree.layout is torch.strided and tree.untyped_storage()._cdata in self._found
            return tree.clone() if shares else tree
        if isinstance(tree, (tuple, list)):
            items = map(self.unshared, tree)
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        return tree

    def has_all(self) -> bool:
        """Whether each parameter is on its storage, which has versions; ``p.data = values`` puts it on another."""
        return all(map(is_, map(torch.Tensor.untyped_storage, self.trained), self._under))

    def put_back(self) -> None:
        """Put parameters that are elsewhere, with the values of the version pointed to, on their storages again."""
        for parameter, under, view in zip(self.trained, self._under, self._views, strict=True):
            now = parameter.data
            alike = now.untyped_storage() is not under and (now.dtype, now.device) == (view.dtype, view.device)
            if alike and torch.equal(now, view):
                parameter.data = view
