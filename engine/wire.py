"""The message format of the pipeline links: one byte buffer per message, tensors and None in tuples.

A message is a header of int64 words followed by the tensors' bytes, each aligned to 64 bytes::

    words   total bytes | header words | kind | micro-batch | note | tree ...
    tree    -1 None    -2 n tuple of n    -3 n list of n    dtype, requires_grad, ndim, dims... tensor

Metadata travel with every message, so shapes may change from micro-batch to micro-batch without a flag.
While they do not change nothing is computed again: a :class:`Packer` keeps the latest layouts and the
views into the buffers that it recycles, and :class:`Expected` has the views into a receive buffer ready before its
message comes. Reading copies nothing: tensors are views of the received buffer, which is freed with the last of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    NEWS = 7  # what updates told: after a batch's last gradient
    TIED = 8  # tied weights or their gradients
    QUIESCE = 9  # everything before it is dropped, here and there
    LOSS = 10  # of one micro-batch, while the pipeline is being filled

    @property
    def on_host(self) -> bool:
        """True if its tensors are never on an accelerator."""
        return self in _ON_HOST


_ON_HOST = frozenset({Message.END, Message.ABORT, Message.NEWS, Message.QUIESCE})


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message. Tensors in ``tree`` are views of the received buffer; ``words`` describe it."""

    kind: Message
    micro_batch: int
    note: int
    size: int
    tree: Tree
    words: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where everything of a message is.

    Attributes:
        words: the tree.
        offsets: of the tensors' bytes.
        size: bytes of the message.
    """

    words: tuple[int, ...]
    offsets: tuple[int, ...]
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
        words += (_DTYPE_CODE[tree.dtype], int(tree.requires_grad), tree.dim(), *tree.shape)
    elif isinstance(tree, (tuple, list)):
        words += (_TUPLE if isinstance(tree, tuple) else _LIST, len(tree))
        for item in tree:
            _describe(item, words)


def _align(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _view(data: torch.Tensor, offset: int, dtype: torch.dtype, shape: list[int]) -> tuple[torch.Tensor, int]:
    count = 1
    for dim in shape:
        count *= dim
    end = offset + count * dtype.itemsize
    return data[offset:end].view(dtype).view(shape), end


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
        tensors = (leaf for leaf in leaves(tree) if leaf is not None)
        for view, tensor in zip(packed.views, tensors, strict=True):
            view.copy_(tensor.detach(), non_blocking=self._pin)

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
            _view(data, start, tensor.dtype, list(tensor.shape))[0]
            for start, tensor in zip(layout.offsets, tensors, strict=True)
        ]
        return Packed(data, words, views, layout)


def _layout(words: tuple[int, ...], tensors: list[torch.Tensor]) -> Layout:
    offsets, offset = [], _align(8 * (_FIXED_WORDS + len(words)))
    for tensor in tensors:
        offsets.append(offset)
        offset = _align(offset + tensor.numel() * tensor.dtype.itemsize)
    return Layout(words, tuple(offsets), offset)


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
        self._tree, _, _ = _read(data, words, 0, _align(8 * num_words))

    def message(self) -> Received | None:
        """The message that has come into the buffer, if it looks as expected."""
        size, num_words, kind, micro_batch, note, *words = self._header.tolist()
        if num_words != len(self._header) or words != self._words:
            return None
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
    tree, _, _ = _read(data, words, 0, _align(8 * num_words))
    return Received(Message(kind), micro_batch, note, size, tree, words)


def _read(data: torch.Tensor, words: list[int], at: int, offset: int) -> tuple[Tree, int, int]:
    code = words[at]
    if code == _NONE:
        return None, at + 1, offset
    if code in (_TUPLE, _LIST):
        items, count = [], words[at + 1]
        at += 2
        for _ in range(count):
            item, at, offset = _read(data, words, at, offset)
            items.append(item)
        return (tuple(items) if code == _TUPLE else items), at, offset
    requires_grad, ndim = words[at + 1], words[at + 2]
    at += 3
    view, end = _view(data, offset, _DTYPES[code], words[at : at + ndim])
    tensor = view.data  # views share autograd's version counter: one that is changed in place would spoil the others
    return tensor.requires_grad_(bool(requires_grad)), at + ndim, _align(end)
