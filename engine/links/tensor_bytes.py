"""Tensors as bytes of one buffer, in whatever memory it is.

Gaps between a tensor's elements are left out, and what is expanded is stored once; with its shape and strides a tensor
is a view of the buffer again. Each begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

_ALIGN = 64
_GAPS = 8  # the most that a tensor may span, times its elements, to be copied with what is between them


def aligned(offset: int) -> int:
    """The next multiple of 64 bytes."""
    return -(-offset // _ALIGN) * _ALIGN


class Stored(NamedTuple):
    """Layout of a tensor in a message: without gaps, in the order of its strides.

    Attributes:
        shape: 1 where the tensor is expanded; flat, all that it spans, if its elements overlap.
        strides: of that.
        span: elements from the tensor's first to its last, those in gaps counted.
        gaps: whether the tensor itself has gaps, which it gets again on arrival.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    span: int = 0
    gaps: bool = False

    @classmethod
    @lru_cache(maxsize=64)  # there are few forms, and this takes longer than a small copy
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...]) -> Stored:
        shape = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            return cls(shape, strides)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        dense, count, reached = list(strides), 1, 1
        for dim in sorted(range(len(shape)), key=strides.__getitem__):
            if shape[dim] == 1:
                continue
            if strides[dim] < reached:
                return cls((span,), (1,), span)
            dense[dim] = count
            count *= shape[dim]
            reached += (shape[dim] - 1) * strides[dim]
        return cls(shape, dense, span, gaps=count < span)

    def elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of ``tensor`` that are stored."""
        if len(self.shape) != tensor.dim():
            return tensor.as_strided(self.shape, (1,))
        return tensor if tensor.shape == self.shape else tensor.as_strided(self.shape, tensor.stride())

    def view(self, data: torch.Tensor, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's bytes from ``offset`` on as a tensor."""
        return data[offset : offset + self.size(dtype)].view(dtype).as_strided(self.shape, self.strides)

    def size(self, dtype: torch.dtype) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * dtype.itemsize


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with all strides, which ``Tensor.to`` and ``clone`` change."""
    stored = Stored.of(tensor.shape, tensor.stride())
    elements = stored.elements(tensor)
    if stored.gaps and stored.span <= _GAPS * elements.numel():  # with them: in one piece, for which no host waits
        elements = tensor.as_strided((stored.span,), (1,))
    copy = torch.empty_strided(elements.shape, elements.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(elements, non_blocking=True).as_strided(tensor.shape, tensor.stride()).data


class TensorBytes(NamedTuple):
    """Layout of tensors in one buffer of bytes.

    Attributes:
        parts: every tensor, its elements in the buffer, and where they begin.
        size: of the buffer, in bytes.
    """

    parts: list[tuple[torch.Tensor, Stored, int]]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> TensorBytes:
        """Layout of ``tensors``, also of torch's device ``meta``."""
        parts, size = [], 0
        for tensor in tensors:
            stored = Stored.of(tensor.shape, tensor.stride())
            parts.append((tensor, stored, size))
            size = aligned(size + stored.size(tensor.dtype))
        return cls(parts, size)

    def pack(self, data: torch.Tensor) -> None:
        """Copy the tensors into ``data``, those of an accelerator without waiting."""
        for tensor, stored, begin in self.parts:
            view = stored.view(data, begin, tensor.dtype)
            view.copy_(stored.elements(tensor.detach()), non_blocking=True)

    def unpack(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in ``data``, of which the layout has descriptions; those with gaps are copies."""
        found = []
        for one, stored, begin in self.parts:
            view = stored.view(data, begin, one.dtype)
            if stored.gaps:
                spread = torch.empty_strided(stored.shape, one.stride(), dtype=one.dtype, device=data.device)
                view = spread.copy_(view, non_blocking=True)
            found.append(view.as_strided(one.shape, one.stride()).data.requires_grad_(one.requires_grad))
        return found


def placed(
    data: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A tensor on the bytes of ``data`` from ``offset`` on, which must have room for it.

    It is no view to autograd: those share a counter of changes, and one that is changed in place would spoil others.
    """
    begin = int(data.storage_offset()) + offset
    at, rest = divmod(begin, dtype.itemsize)
    if rest:
        raise RuntimeError(f"a tensor of {dtype} cannot begin at byte {begin}")
    made = torch.empty(0, dtype=dtype, device=data.device)
    return made.set_(data.untyped_storage(), at, shape, strides)
