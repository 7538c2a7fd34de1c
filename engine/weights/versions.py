"""Weight versions of one stage: immutable storages that parameters are pointed to and away from.

Autograd keeps references into parameter storages from a forward pass to its backward pass, some as
views that stay with the old storage, some through the parameter itself. Both see the right weights
only if a storage that a micro-batch in flight has used never changes, and if the parameter points to
that storage again while the backward pass runs. Hence an update that would overwrite such a storage is
preceded by a fork: the values are copied into a spare storage, everything that aliases the old one is
pointed to the spare, and the update happens there.

What aliases a parameter's storage depends on the optimizer: nothing else for plain fp32, flat buffers
and their partitions and fragments for ZeRO-1 and the mixed-precision wrappers. :func:`find_aliases`
looks for tensors that share a parameter's storage instead of knowing their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

_MAX_DEPTH = 8


def find_aliases(roots: Iterable[object], storages: set[int]) -> list[torch.Tensor]:
    """Tensors on ``storages`` (addresses) that ``roots`` lead to.

    Follows containers, and the attributes of optimizers and of DeepSpeed's own objects, but no modules.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(item: object, depth: int) -> None:
        if depth > _MAX_DEPTH or id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.layout is torch.strided and item.untyped_storage().data_ptr() in storages:
                found[id(item)] = item
            children: Iterable[object] = [getattr(item, "__dict__", None)]
        elif isinstance(item, Mapping):
            children = chain.from_iterable(item.items())
        elif isinstance(item, (list, tuple, set, frozenset)):
            children = item
        elif isinstance(item, torch.optim.Optimizer) or _is_of_deepspeed(item):
            children = [vars(item)]
        else:
            return
        for child in children:
            visit(child, depth + 1)

    for root in roots:
        visit(root, 0)
    return list(found.values())


def _is_of_deepspeed(item: object) -> bool:
    other = isinstance(item, (torch.nn.Module, type)) or not hasattr(item, "__dict__")
    return not other and type(item).__module__.startswith("deepspeed.")


class _Alias(NamedTuple):
    tensor: torch.Tensor
    storage: int  # position among the version's storages

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """The same view on another storage."""
        source = self.tensor
        view = torch.empty(0, dtype=source.dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), source.storage_offset(), source.size(), source.stride())


class _Weights(NamedTuple):
    """Storages of a version with all aliases' views, parameters first."""

    flats: list[torch.Tensor]
    views: list[torch.Tensor]


class WeightVersions:
    """Live versions of trainable weights by number of updates.

    Args:
        parameters: the stage's parameters; those that do not require gradients never change and are left alone.
        holders: objects that may hold further references to the parameters' storages, such as the optimizer.
        version: number of updates that the parameters have had already.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], holders: Iterable[object] = (), version: int = 0
    ) -> None:
        unique = {id(p): p for p in parameters if p.requires_grad}
        self.parameters = list(unique.values())
        positions: dict[int, int] = {}
        for parameter in self.parameters:
            positions.setdefault(parameter.untyped_storage().data_ptr(), len(positions))
        others = [
            tensor
            for tensor in find_aliases([*holders, *(vars(p) for p in self.parameters)], set(positions))
            if id(tensor) not in unique
        ]
        self._aliases = [
            _Alias(tensor, positions[tensor.untyped_storage().data_ptr()]) for tensor in (*self.parameters, *others)
        ]
        self._latest = self._pointed = version
        self._spare: list[_Weights] = []
        self._alive = {version: self._on(self._flats(len(positions)))}

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
        return tuple(sorted(self._alive))

    @property
    def allocated(self) -> int:
        """Sets of storages in memory: those alive and the spare ones."""
        return len(self._alive) + len(self._spare)

    def point_to(self, version: int) -> None:
        """Make the parameters refer to ``version``, which must be alive."""
        if version != self._pointed:
            for parameter, view in zip(self.parameters, self._alive[version].views, strict=False):
                parameter.data = view
            self._pointed = version

    def point_to_newest(self) -> None:
        """Make the parameters refer to the newest weights."""
        self.point_to(self._latest)

    def fork(self) -> None:
        """Move the newest weights to spare storages for an update.

        The parameters refer to them from now on, whatever they referred to before. The old storages belong to the
        version that :meth:`advance` leaves behind.
        """
        source = self._alive[self._latest]
        target = self._spare.pop() if self._spare else self._on([torch.empty_like(flat) for flat in source.flats])
        if source.flats:
            torch._foreach_copy_(target.flats, source.flats)
        for alias, view in zip(self._aliases, target.views, strict=True):
            alias.tensor.data = view
        self._alive[self._latest + 1] = target
        self._pointed = self._latest

    def advance(self) -> None:
        """Count an update of the newest weights. Without a :meth:`fork` before it, the previous version is gone."""
        if self._latest + 1 not in self._alive:
            self._alive[self._latest + 1] = self._alive.pop(self._latest)
        self._latest += 1
        self._pointed = self._latest

    def keep_only(self, versions: set[int]) -> None:
        """Recycle all versions but ``versions`` and the newest."""
        for version in [v for v in self._alive if v not in versions and v != self._latest]:
            self._spare.append(self._alive.pop(version))

    def _flats(self, num_storages: int) -> list[torch.Tensor]:
        flats: list[Any] = [None] * num_storages
        for alias in self._aliases:
            if flats[alias.storage] is None:
                storage, dtype = alias.tensor.untyped_storage(), alias.tensor.dtype
                flat = torch.empty(0, dtype=dtype, device=alias.tensor.device)
                flats[alias.storage] = flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        return flats

    def _on(self, flats: list[torch.Tensor]) -> _Weights:
        return _Weights(flats, [alias.on(flats[alias.storage]) for alias in self._aliases])
