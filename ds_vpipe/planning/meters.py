"""Meters of memory and time of tensor operations, on any device.

:class:`OpMeter` sees operations below autograd, so that backward passes are counted as well, on the meta device too. A
storage counts from the operation that returned it until it is freed; memory that an operation allocates and frees
within itself is not seen.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Roofline:
    """Speed of a device.

    An operation takes as long as its arithmetic, as fast as matrix products reach, or its memory traffic, whichever is
    longer (the roofline of Williams et al., CACM 2009).
    """

    flops_per_s: float = 100e12
    bytes_per_s: float = 1e12

    def __str__(self) -> str:
        return f"model of a device with {self.flops_per_s:.3g} FLOP/s and {self.bytes_per_s:.3g} bytes/s"

    def seconds(self, flops: float, traffic: float) -> float:
        """Seconds of one operation that reads and writes ``traffic`` bytes."""
        return max(flops / self.flops_per_s, traffic / self.bytes_per_s)


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages by keys that are theirs while they are alive.

    Addresses do not tell them apart on the meta device. A sparse tensor has none, but its indices and values do.
    """
    found = [tensor.untyped_storage() for tensor in tensors if torch._C._has_storage(tensor)]
    return {storage._cdata: storage for storage in found}


class OpMeter(TorchDispatchMode):
    """Meter of operations, while it is entered.

    Args:
        roofline: of the device whose time is added up; without one they take no time.
        outside: tensors whose storages do not count, such as inputs.
    """

    def __init__(self, roofline: Roofline | None = None, outside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0  # of storages that were allocated and are alive, and the most so far
        self.seconds = 0.0  # of all operations by ``roofline``
        self._roofline = roofline
        self._outside = list(outside)  # which also keeps their keys theirs
        self._known = set(storages_of(self._outside))

    def start_over(self) -> None:
        """Count seconds and the peak from here on. Storages that are alive stay counted."""
        self.peak_bytes, self.seconds = self.live_bytes, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for key, storage in storages_of(made).items():
            if key not in self._known:
                self._count(key, storage)
        if self._roofline is not None and not func.is_view and made:
            used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            traffic = sum(tensor.numel() * tensor.element_size() for tensor in (*used, *made))
            formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
            self.seconds += self._roofline.seconds(flops, traffic)
        return result

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size
