"""The message format of the pipeline links: one byte buffer per message, tensors and None in tuples.

A message is a header of int64 words followed by the tensors' bytes, each aligned to 64 bytes::

    words   total bytes | header words | kind | micro-batch | note | tree ...
    tree    -1 None    -2 n tuple of n    -3 n list of n    dtype, flags, ndim, dims..., strides... tensor

The flags are 1 for a tensor that requires gradients and 2 for a tensor on torch's device ``meta``, which has no bytes.
So a message can describe a tensor whose bytes go another way (:mod:`ds_vpipe.engine.links.nccl_payload`).

A tensor arrives with the strides that it was sent with, as results of kernels may depend on them in their last bits.
Gaps between its elements do not travel, and what is expanded travels once.

Metadata travel with every message, so shapes may change from micro-batch to micro-batch without a flag.
While they do not change nothing is computed again: a :class:`Packer` recycles the buffers of the latest layouts with
their views, and :class:`Expected` has the views into a receive buffer ready before its message comes. Reading copies
nothing: tensors are views of the received buffer, which is freed with the last of them.

What is no message ends in a :class:`MalformedMessageError`, before anything is allocated for what its header claims.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from ds_vpipe.engine.links.tensor_bytes import Stored, TensorBytes, aligned, fill, placed
from ds_vpipe.errors import VPipeError

Tree = Any  # None, a tensor, or a tuple or list of trees

_NONE, _TUPLE, _LIST = -1, -2, -3
_REQUIRES_GRAD, _ELSEWHERE = 1, 2
_FIXED_WORDS = 5
_LAYOUTS = 2  # kept by a sender; a batch's last gradient carries more than the others
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}

_FEWEST_BYTES = 8 * (_FIXED_WORDS + 1)

HEADER_BYTES = 4096
"""Size of the first receive buffer and of a message that only announces a larger one."""


MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Memory of this host, which no message is larger than."""


class MalformedMessageError(ValueError):
    """Bytes that are no message; the text says why."""


class Message(enum.IntEnum):
    """Kinds of messages."""

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
    LAYER = 11  # a layer that moves, with its optimizer state
    LAYER_GRADIENT = 12  # of a batch, after it has moved

    @property
    def on_host(self) -> bool:
        """Whether its tensors are never on an accelerator."""
        return self in (Message.END, Message.ABORT, Message.PEERS, Message.QUIESCE)


_KINDS = frozenset(kind.value for kind in Message)


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message. Tensors in ``tree`` are views of the received buffer; ``words`` describe it."""

    kind: Message
    micro_batch: int
    note: int
    size: int
    tree: Tree
    words: list[int]


def leaves(tree: Tree) -> Iterator[torch.Tensor | None]:
    """Tensors and Nones of a tree from left to right."""
    if tree is None or isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    else:
        raise VPipeError(
            f"stage boundary: got {type(tree).__name__}, allowed are tensors, None and tuples or lists of them; "
            f"pass other values as tensors"
        )


def map_tree(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with ``function`` applied to its tensors; whatever else it holds stays."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = (map_tree(function, item) for item in tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def _tensors(tree: Tree) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in leaves(tree) if leaf is not None and not leaf.is_meta]


def _unfit(leaf: torch.Tensor) -> VPipeError:
    """The refusal of a tensor that is more than a block of memory with strides."""
    kind, remedy = f"tensor of layout {str(leaf.layout).removeprefix('torch.')}", "to_dense()"
    if leaf.is_nested:
        kind, remedy = "nested tensor", "to_padded_tensor(0)"
    return VPipeError(f"stage boundary: got a {kind}, allowed is a strided one; pass its .{remedy}")


def _describe(tree: Tree, words: list[int]) -> None:
    if isinstance(tree, (tuple, list)):
        words += (_TUPLE if isinstance(tree, tuple) else _LIST, len(tree))
        for item in tree:
            _describe(item, words)
        return
    (leaf,) = leaves(tree)
    if leaf is None:
        words.append(_NONE)
    elif leaf.is_nested or leaf.layout is not torch.strided:
        raise _unfit(leaf)
    elif leaf.dtype in _DTYPE_CODE:
        flags = _REQUIRES_GRAD * leaf.requires_grad + _ELSEWHERE * leaf.is_meta
        words += (_DTYPE_CODE[leaf.dtype], flags, leaf.dim(), *leaf.shape, *leaf.stride())
    else:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise VPipeError(f"stage boundary: got a tensor of dtype {leaf.dtype}, allowed are {names}; cast it before")


def host_memory(size: int) -> torch.Tensor:
    """Bytes of host memory."""
    return torch.empty(size, dtype=torch.uint8)


@dataclass(slots=True)
class Packed:
    """A send buffer with a view for each tensor."""

    data: torch.Tensor
    header: np.ndarray[Any, np.dtype[np.int64]]
    words: tuple[int, ...]
    views: list[tuple[Stored, torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return self.data.numel()

    def fill(self, kind: Message, micro_batch: int, tree: Tree, note: int) -> None:
        """Copy a tree of this layout into the buffer; tensors of an accelerator without waiting."""
        self.header[2:_FIXED_WORDS] = (kind, micro_batch, note)
        fill(self.views, _tensors(tree))


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of messages of one form: the header's words, then the tensors.

    Attributes:
        words: of the tree.
        tensors: layout of what follows the header.
        start: of that, in bytes.
    """

    words: tuple[int, ...]
    tensors: TensorBytes
    start: int

    @classmethod
    def of(cls, words: tuple[int, ...], tree: Tree) -> Layout:
        """Layout of ``tree``, which has ``words``."""
        return cls(words, TensorBytes.of(_tensors(tree)), aligned(8 * (_FIXED_WORDS + len(words))))

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return self.start + self.tensors.size

    def over(self, data: torch.Tensor) -> Packed:
        """A send buffer in ``data``, uint8 and at least as long as a message."""
        num_words = _FIXED_WORDS + len(self.words)
        header = data[: 8 * num_words].view(torch.int64).numpy()
        header[:2] = (self.size, num_words)
        header[_FIXED_WORDS:] = self.words
        data = data[: self.size]
        return Packed(data, header, self.words, self.tensors.views(data[self.start :]))


class Packer:
    """Send buffers, those of the latest layouts recycled.

    Args:
        memory: allocates so many bytes of host memory, by default ordinary ones.
    """

    def __init__(self, memory: Callable[[int], torch.Tensor] = host_memory) -> None:
        self._memory = memory
        self._known: dict[tuple[int, ...], tuple[Layout, list[Packed]]] = {}  # each layout with its spare buffers

    def pack(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> Packed:
        """A buffer with a copy of ``tree``."""
        packed = self.reserve(self.layout(tree))
        packed.fill(kind, micro_batch, tree, note)
        return packed

    def layout(self, tree: Tree) -> Layout:
        """Layout of a message of ``tree``.

        Raises:
            VPipeError: the tree holds a value that is neither a tensor nor None, or an unknown dtype.
        """
        described: list[int] = []
        _describe(tree, described)
        words = tuple(described)
        if words not in self._known:
            if len(self._known) == _LAYOUTS:
                del self._known[next(iter(self._known))]
            self._known[words] = Layout.of(words, tree), []
        return self._known[words][0]

    def reserve(self, layout: Layout) -> Packed:
        """A buffer for a message of the layout that was asked for last."""
        spare = self._known[layout.words][1]
        return spare.pop() if spare else layout.over(self._memory(layout.size))

    def release(self, packed: Packed) -> None:
        """Take a buffer back once its message has been received."""
        if packed.words in self._known:
            self._known[packed.words][1].append(packed)


class Expected:
    """A receive buffer for a message like the one before.

    Args:
        data: the buffer, uint8, at least as long as that message.
        words: of that message's tree; None before the first message.

    Raises:
        MalformedMessageError: no tree has these words, or its tensors do not fit into the buffer.
    """

    def __init__(self, data: torch.Tensor, words: list[int] | None = None) -> None:
        words = words or [_NONE]
        num_words = _FIXED_WORDS + len(words)
        self.data = data
        self._header = data.numpy()[: 8 * num_words].view(np.int64)
        self._words = words
        self._gaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._room = MOST_BYTES
        self._offset = aligned(8 * num_words)
        rest = iter(words)
        try:
            self._tree = self._read(rest)
        except StopIteration:
            raise MalformedMessageError(f"its {len(words)} words describe more than they hold") from None
        except (RuntimeError, RecursionError) as error:  # torch's, of numbers that no tensor has
            raise MalformedMessageError(f"{type(error).__name__} where it is read") from error
        if next(rest, None) is not None:
            raise MalformedMessageError("words follow its tree")

    def message(self) -> Received:
        """The message in the buffer, also of another form.

        Raises:
            MalformedMessageError: there is none.
        """
        size, num_words, kind, micro_batch, note, *words = self._header.tolist()
        if num_words != len(self._header) or words != self._words:
            return unpack(self.data)
        if kind not in _KINDS:
            raise MalformedMessageError(f"kind {kind} is none of 1 to {len(_KINDS)}")
        if size < self._offset or (size > self._offset and kind != Message.OVERSIZE):
            raise MalformedMessageError(f"it says that it has {size} bytes, but its tensors end at {self._offset}")
        for tensor, view in self._gaps:
            tensor.copy_(view)
        return Received(Message(kind), micro_batch, note, size, self._tree, words)

    def _read(self, words: Iterator[int]) -> Tree:
        code = next(words)
        if code == _NONE:
            return None
        if code in (_TUPLE, _LIST):
            items = [self._read(words) for _ in range(next(words))]
            return tuple(items) if code == _TUPLE else items
        if not 0 <= code < len(_DTYPES):
            raise MalformedMessageError(f"{code} stands for no dtype")
        dtype, flags, ndim = _DTYPES[code], next(words), next(words)
        shape, strides = (tuple(islice(words, max(0, ndim))) for _ in range(2))
        if len(strides) != ndim or min((*shape, *strides), default=0) < 0:
            raise MalformedMessageError(f"a tensor of {ndim} dimensions with shape {shape[:8]}, strides {strides[:8]}")
        stored, elsewhere = Stored.of(shape, strides), bool(flags & _ELSEWHERE)
        begin, end, span = self._offset, self._offset + (0 if elsewhere else stored.size(dtype)), 0
        if (stored.gaps or elsewhere) and 0 not in shape:
            span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._room -= span * dtype.itemsize
        if end > len(self.data) or self._room < 0:
            raise MalformedMessageError(f"a tensor of shape {shape[:8]} and strides {strides[:8]} does not fit")
        requires_grad = bool(flags & _REQUIRES_GRAD)
        if elsewhere:
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad)
        self._offset = aligned(end)
        if not stored.gaps:
            return placed(self.data, begin, dtype, shape, strides).requires_grad_(requires_grad)
        spread = torch.empty_strided(stored.shape, strides, dtype=dtype, device=self.data.device)
        self._gaps.append((spread, stored.view(self.data, begin, dtype)))
        return spread.as_strided(shape, strides).data.requires_grad_(requires_grad)


def announcement(size: int) -> torch.Tensor:
    """The message before one of ``size`` bytes on its own."""
    packed = Packer().pack(Message.OVERSIZE, 0, None)
    packed.header[0] = size
    return packed.data


def unpack(data: torch.Tensor) -> Received:
    """The message in a buffer, which may be longer; tensors get the sender's ``requires_grad``.

    Raises:
        MalformedMessageError: there is none.
    """
    if len(data) < _FEWEST_BYTES:
        raise MalformedMessageError(f"{len(data)} bytes, the shortest has {_FEWEST_BYTES}")
    start = data.numpy()[: len(data) // 8 * 8].view(np.int64)
    num_words = int(start[1])
    if not _FEWEST_BYTES <= 8 * num_words <= len(data):
        raise MalformedMessageError(f"a header of {num_words} words in {len(data)} bytes")
    return Expected(data, start[_FIXED_WORDS:num_words].tolist()).message()
