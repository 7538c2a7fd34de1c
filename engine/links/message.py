"""The message format of the pipeline links: one byte buffer per message, tensors and None in tuples.

A message is a header of int64 words followed by the tensors' bytes, each aligned to 64 bytes::

    words   total bytes | header words | kind | micro-batch | note | tree ...
    tree    -1 None    -2 n tuple of n    -3 n list of n    dtype, requires_grad, ndim, dims..., strides... tensor

A tensor arrives with the strides that it was sent with, as results of kernels may depend on them in their last bits.
Gaps between its elements do not travel, and what is expanded travels once.

Metadata travel with every message, so shapes may change from micro-batch to micro-batch without a flag.
While they do not change nothing is computed again: a :class:`Packer` keeps the latest layouts and the
views into the buffers that it recycles, and :class:`Expected` has the views into a receive buffer ready before its
message comes. Reading copies nothing: tensors are views of the received buffer, which is freed with the last of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

Tree = Any  # None, a tensor, or a tuple or list of trees

_ALIGN = 64
_NONE, _TUPLE, _LIST = -1, -2, -3
_FIXED_WORDS = 5
_LAYOUTS = 2  # a batch's last gradient carries more than the others
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}

HEADER_BYTES = 4096
"""Size of the first receive buffer and of a message that only announces a larger one."""


class Message(enum.IntEnum):
    """What a message is."""

    ACTIVATION = 1
    GRADIENT = 2
    END = 3  # the data ended: in place of an activation
    ABORT = 4  # a stage failed: in place of anything
    OVERSIZE = 5  # the message itself follows on its own, it did not fit the posted buffer
    EVAL = 6
    PEERS = 7  # overflows and norms of updates: after a batch's last gradient
    TIED = 8  # tied weights or their gradients
    QUIESCE = 9  # everything before it is dropped, here and there
    LOSS = 10  # of one micro-batch, while the pipeline is being filled

    @property
    def on_host(self) -> bool:
        """True if its tensors are never on an accelerator."""
        return self in _ON_HOST


_ON_HOST = frozenset({Message.END, Message.ABORT, Message.PEERS, Message.QUIESCE})


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message. Tensors in ``tree`` are views of the received buffer; ``words`` describe it."""

    kind: Message
    micro_batch: int
    note: int
    size: int
    tree: Tree
    words: list[int]


class _Stored(NamedTuple):
    """How a tensor lies in a message: without gaps, in the order of its strides.

    Attributes:
        shape: 1 where the tensor is expanded; flat, all that it spans, if its elements overlap.
        strides: of that.
        gaps: whether the tensor itself has gaps, which it gets again on arrival.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    gaps: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> _Stored:
        shape = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
        dense, count, span = list(strides), 1, 1
        for dim in sorted(range(len(shape)), key=strides.__getitem__):
            if shape[dim] == 0:
                return cls(shape, strides)
            if shape[dim] == 1:
                continue
            if strides[dim] < span:
                whole = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
                return cls((1 + whole,), (1,))
            dense[dim] = count
            count *= shape[dim]
            span += (shape[dim] - 1) * strides[dim]
        return cls(shape, dense, count < span)

    def view(self, data: torch.Tensor, offset: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The tensor's part of a message, and where it ends."""
        end = offset + math.prod(self.shape) * dtype.itemsize
        return data[offset:end].view(dtype).as_strided(self.shape, self.strides), end


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where everything of a message is.

    Attributes:
        words: the tree.
        offsets: of the tensors' bytes.
        stored: how each tensor lies there.
        size: bytes of the message.
    """

    words: tuple[int, ...]
    offsets: tuple[int, ...]
    stored: tuple[_Stored, ...]
    size: int


@dataclass(slots=True)
class Packed:
    """A buffer on the sending side with the views through which it is filled."""

    data: torch.Tensor
    words: np.ndarray[Any, np.dtype[np.int64]]
    views: list[torch.Tensor]
    layout: Layout

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return self.layout.size


def leaves(tree: Tree) -> Iterator[torch.Tensor | None]:
    """The tensors and Nones of a tree from left to right."""
    if tree is None or isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    else:
        raise TypeError(
            f"stage boundary: got {type(tree).__name__}, allowed are tensors, None and tuples or lists of them; "
            f"pass other values as tensors"
        )


def _describe(tree: Tree, words: list[int]) -> None:
    if tree is None:
        words.append(_NONE)
    elif isinstance(tree, torch.Tensor):
        if tree.dtype not in _DTYPE_CODE:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise TypeError(f"stage boundary: got a tensor of dtype {tree.dtype}, allowed are {names}")
        words += (_DTYPE_CODE[tree.dtype], int(tree.requires_grad), tree.dim(), *tree.shape, *tree.stride())
    elif isinstance(tree, (tuple, list)):
        words += (_TUPLE if isinstance(tree, tuple) else _LIST, len(tree))
        for item in tree:
            _describe(item, words)


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _what_travels(tensor: torch.Tensor, stored: _Stored) -> torch.Tensor:
    """A tensor without what is expanded in it; flat if its elements overlap."""
    if len(stored.shape) != tensor.dim():
        return tensor.as_strided(stored.shape, (1,))
    return tensor if tensor.shape == stored.shape else tensor.as_strided(stored.shape, tensor.stride())


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides, gaps and expanded dimensions, which ``Tensor.to`` and ``clone`` change."""
    travels = _what_travels(tensor, _Stored.of(tensor.shape, tensor.stride()))
    copy = torch.empty_strided(travels.shape, travels.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(travels, non_blocking=True).as_strided(tensor.shape, tensor.stride()).data


class Packer:
    """Turns trees into buffers, and keeps released buffers of the latest layouts for further messages.

    Args:
        pin: allocate page-locked host memory, for tensors that come from an accelerator.
    """

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._spare: dict[Layout, list[Packed]] = {}

    def pack(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> Packed:
        """Copy ``tree`` into a buffer.

        Raises:
            TypeError: the tree holds something that is neither a tensor nor None, or an unknown dtype.
        """
        packed = self.reserve(tree)
        self.fill(packed, kind, micro_batch, tree, note)
        return packed

    def reserve(self, tree: Tree) -> Packed:
        """A buffer for a message of ``tree``.

        Raises:
            TypeError: as :meth:`pack`.
        """
        described: list[int] = []
        _describe(tree, described)
        words = tuple(described)
        layout = self._layouts.get(words)
        if layout is None:
            if len(self._layouts) == _LAYOUTS:
                del self._spare[self._layouts.pop(next(iter(self._layouts)))]
            layout = self._layouts[words] = _layout(words, [leaf for leaf in leaves(tree) if leaf is not None])
            self._spare[layout] = []
        spare = self._spare[layout]
        return spare.pop() if spare else self._allocate(layout, [leaf for leaf in leaves(tree) if leaf is not None])

    def fill(self, packed: Packed, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> None:
        """Copy ``tree`` into the buffer that was reserved for it; any thread may do that."""
        packed.words[2:_FIXED_WORDS] = (kind, micro_batch, note)
        tensors = (leaf.detach() for leaf in leaves(tree) if leaf is not None)
        for view, stored, tensor in zip(packed.views, packed.layout.stored, tensors, strict=True):
            view.copy_(_what_travels(tensor, stored), non_blocking=self._pin)

    def release(self, packed: Packed) -> None:
        """Take a buffer back once its message has been delivered."""
        spare = self._spare.get(packed.layout)
        if spare is not None:
            spare.append(packed)

    def _allocate(self, layout: Layout, tensors: list[torch.Tensor]) -> Packed:
        num_words = _FIXED_WORDS + len(layout.words)
        data = torch.empty(layout.size, dtype=torch.uint8, pin_memory=self._pin)
        words = data[: 8 * num_words].view(torch.int64).numpy()
        words[:2] = (layout.size, num_words)
        words[_FIXED_WORDS:] = layout.words
        views = [
            stored.view(data, start, tensor.dtype)[0]
            for start, stored, tensor in zip(layout.offsets, layout.stored, tensors, strict=True)
        ]
        return Packed(data, words, views, layout)


def _layout(words: tuple[int, ...], tensors: list[torch.Tensor]) -> Layout:
    offsets, offset = [], _align(8 * (_FIXED_WORDS + len(words)))
    stored = tuple(_Stored.of(tensor.shape, tensor.stride()) for tensor in tensors)
    for tensor, lies in zip(tensors, stored, strict=True):
        offsets.append(offset)
        offset = _align(offset + math.prod(lies.shape) * tensor.dtype.itemsize)
    return Layout(words, tuple(offsets), stored, offset)


class Expected:
    """A receive buffer with what the next message is expected to look like, which is the one before it.

    Args:
        data: the buffer, uint8, at least as long as that message.
        words: of that message's tree.
    """

    def __init__(self, data: torch.Tensor, words: list[int]) -> None:
        num_words = _FIXED_WORDS + len(words)
        self._header = data[: 8 * num_words].view(torch.int64).numpy()
        self._words = words
        self._gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tree, _, _ = _read(data, words, 0, _align(8 * num_words), self._gaps)

    def message(self) -> Received | None:
        """The message that has come into the buffer, if it looks as expected."""
        size, num_words, kind, micro_batch, note, *words = self._header.tolist()
        if num_words != len(self._header) or words != self._words:
            return None
        for tensor, view in self._gaps:
            tensor.copy_(view)
        return Received(Message(kind), micro_batch, note, size, self._tree, words)


def announcement(size: int) -> torch.Tensor:
    """The small message that stands for one of ``size`` bytes which follows on its own."""
    data = torch.zeros(_align(8 * (_FIXED_WORDS + 1)), dtype=torch.uint8)
    data[: 8 * (_FIXED_WORDS + 1)].view(torch.int64).copy_(
        torch.tensor((size, _FIXED_WORDS + 1, int(Message.OVERSIZE), 0, 0, _NONE))
    )
    return data


def unpack(data: torch.Tensor) -> Received:
    """Decode a received buffer, which may be longer than the message. Tensors get the sender's
    ``requires_grad``."""
    size, num_words, kind, micro_batch, note = data[: 8 * _FIXED_WORDS].view(torch.int64).tolist()
    words = data[8 * _FIXED_WORDS : 8 * num_words].view(torch.int64).tolist()
    gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
    tree, _, _ = _read(data, words, 0, _align(8 * num_words), gaps)
    for tensor, view in gaps:
        tensor.copy_(view)
    return Received(Message(kind), micro_batch, note, size, tree, words)


def _read(
    data: torch.Tensor, words: list[int], at: int, offset: int, gaps: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Tree, int, int]:
    """A tree with its end in the words and in the data; ``gaps`` gets tensors that have to be filled from views."""
    code = words[at]
    if code == _NONE:
        return None, at + 1, offset
    if code in (_TUPLE, _LIST):
        items, count = [], words[at + 1]
        at += 2
        for _ in range(count):
            item, at, offset = _read(data, words, at, offset, gaps)
            items.append(item)
        return (tuple(items) if code == _TUPLE else items), at, offset
    requires_grad, ndim = words[at + 1], words[at + 2]
    shape, strides = words[at + 3 : at + 3 + ndim], words[at + 3 + ndim : at + 3 + 2 * ndim]
    stored = _Stored.of(shape, strides)
    view, end = stored.view(data, offset, _DTYPES[code])
    if stored.gaps:
        view, travelled = torch.empty_strided(stored.shape, strides, dtype=view.dtype, device=data.device), view
        gaps.append((view.data, travelled))
    # Views share autograd's version counter: one that is changed in place would spoil the others.
    tensor = view.as_strided(shape, strides).data
    return tensor.requires_grad_(bool(requires_grad)), at + 3 + 2 * ndim, _align(end)
