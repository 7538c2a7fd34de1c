"""The message format of the pipeline links: one byte buffer per message, tensors and None in tuples.

A message is a header of int64 words followed by the tensors' bytes, each aligned to 64 bytes::

    words   total bytes | header words | kind | micro-batch | note | tree ...
    tree    -1 None    -2 n tuple of n    -3 n list of n    dtype, flags, ndim, dims..., strides... tensor

The flags are 1 for a tensor that requires gradients and 2 for a tensor on torch's device ``meta``, which has no bytes.
So a message can describe a tensor whose bytes go another way (:mod:`ds_vpipe.engine.links.nccl_link`).

A tensor arrives with the strides that it was sent with, as results of kernels may depend on them in their last bits.
Gaps between its elements do not travel, and what is expanded travels once.

Metadata travel with every message, so shapes may change from micro-batch to micro-batch without a flag. While they do
not change nothing is computed again: messages with the same words have one :class:`Form`, and a :class:`Packer`
recycles buffers of the latest forms with their views. Reading copies nothing: tensors are views of the received buffer,
which is freed with the last of them.

What is no message ends in a :class:`MalformedMessageError`, before anything is allocated for what its header claims.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_vpipe.engine.links.tensor_bytes import Stored, aligned, placed
from ds_vpipe.errors import VPipeError

Tree = Any  # None, a tensor, or a tuple or list of trees
Memory = Callable[[int], torch.Tensor]  # allocates so many bytes of the host
Holds = Callable[[torch.Tensor], bool]  # whether a tensor is in an accelerator's memory
Gaps = list[tuple[torch.Tensor, torch.Tensor]]  # copies of tensors with gaps, each with its elements in a message

_NONE, _TUPLE, _LIST = -1, -2, -3
_REQUIRES_GRAD, _ELSEWHERE = 1, 2
_FIXED_WORDS = 5
_FORMS = 2  # whose buffers a sender keeps; a batch's last gradient carries more than the others
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


_KINDS = {kind.value: kind for kind in Message}


@dataclass(slots=True)
class Received:
    """A decoded message. Tensors in ``tree`` are views of the received buffer."""

    kind: Message
    micro_batch: int
    note: int
    size: int
    tree: Tree


def leaves(tree: Tree) -> Iterator[torch.Tensor | None]:
    """Tensors and Nones of a tree from left to right."""
    if tree is None or isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    else:
        raise _no_tree(tree)


def _no_tree(value: object) -> VPipeError:
    return VPipeError(
        f"stage boundary: got {type(value).__name__}, allowed are tensors, None and tuples or lists of them; "
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


def left_out(tree: Tree, holds: Holds) -> tuple[Tree, tuple[torch.Tensor, ...]]:
    """A tree with descriptions of the tensors that ``holds`` is true of, on torch's device ``meta``; and these."""
    tensors: list[torch.Tensor] = []

    def description(tensor: torch.Tensor) -> torch.Tensor:
        if not holds(tensor):
            return tensor
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise _unfit(tensor)
        tensors.append(tensor)
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return empty.requires_grad_(tensor.requires_grad)

    return map_tree(description, tree), tuple(tensors)


def filled_in(tree: Tree, tensors: Iterable[torch.Tensor]) -> Tree:
    """The tree of :func:`left_out` with the tensors that it describes."""
    rest = iter(tensors)
    return map_tree(lambda one: next(rest) if one.is_meta else one, tree)


def _unfit(leaf: torch.Tensor) -> VPipeError:
    """The refusal of a tensor that is more than a block of memory with strides."""
    kind, remedy = f"tensor of layout {str(leaf.layout).removeprefix('torch.')}", "to_dense()"
    if leaf.is_nested:
        kind, remedy = "nested tensor", "to_padded_tensor(0)"
    return VPipeError(f"stage boundary: got a {kind}, allowed is a strided one; pass its .{remedy}")


def described(tree: Tree) -> tuple[Form, list[torch.Tensor]]:
    """Form of messages of ``tree``, and the tensors whose bytes they have.

    Raises:
        VPipeError: the tree holds a value that is neither a tensor nor None, or an unknown dtype, or is too large.
    """
    words: list[int] = []
    tensors: list[torch.Tensor] = []
    _describe(tree, words, tensors)
    try:
        return Form.of(tuple(words)), tensors
    except MalformedMessageError as error:
        raise VPipeError(
            f"stage boundary: got {error}, allowed is what fits into this host's memory; pass .contiguous() tensors"
        ) from error


def _describe(tree: Tree, words: list[int], tensors: list[torch.Tensor]) -> None:
    if isinstance(tree, (tuple, list)):
        words += (_TUPLE if isinstance(tree, tuple) else _LIST, len(tree))
        for item in tree:
            _describe(item, words, tensors)
    elif tree is None:
        words.append(_NONE)
    elif not isinstance(tree, torch.Tensor):
        raise _no_tree(tree)
    elif tree.is_nested or tree.layout is not torch.strided:
        raise _unfit(tree)
    elif tree.dtype in _DTYPE_CODE:
        flags = _REQUIRES_GRAD * tree.requires_grad + _ELSEWHERE * tree.is_meta
        words += (_DTYPE_CODE[tree.dtype], flags, tree.dim(), *tree.shape, *tree.stride())
        if not tree.is_meta:
            tensors.append(tree.detach())
    else:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise VPipeError(f"stage boundary: got a tensor of dtype {tree.dtype}, allowed are {names}; cast it before")


def host_memory(size: int) -> torch.Tensor:
    """Bytes of host memory."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class _Leaf(NamedTuple):
    """Form of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: Stored
    begin: int  # of its bytes in the message
    requires_grad: bool
    elsewhere: bool

    def in_message(self, data: torch.Tensor, gaps: Gaps, memory: Memory) -> torch.Tensor:
        """The tensor in a message. If it has gaps it is in ``memory``, and ``gaps`` gets it and its elements."""
        if self.elsewhere:
            found = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        elif self.stored.gaps:
            room = memory(self.stored.span * self.dtype.itemsize)
            spread = placed(room, 0, self.dtype, self.stored.shape, self.strides)
            gaps.append((spread, self.stored.view(data, self.begin, self.dtype)))
            found = spread.as_strided(self.shape, self.strides).data
        else:
            found = placed(data, self.begin, self.dtype, self.shape, self.strides)
        return found.requires_grad_() if self.requires_grad else found


@dataclass(frozen=True, slots=True, eq=False)  # of() has one for the same words
class Form:
    """Layout of messages with the same words.

    Attributes:
        words: of the tree.
        size: of a message, in bytes.
        num_words: of a message's header.
    """

    words: tuple[int, ...]
    size: int
    num_words: int
    _tree: Any  # with leaves in the place of tensors
    _leaves: list[_Leaf]  # of tensors whose bytes are in the message

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, words: tuple[int, ...]) -> Form:
        """Form of the messages with these words.

        Raises:
            MalformedMessageError: no tree has these words, or no message can be as large.
        """
        reader = _Reader(words)
        try:
            tree = reader.tree()
        except StopIteration:
            raise MalformedMessageError(f"its {len(words)} words describe more than they hold") from None
        except RecursionError as error:
            raise MalformedMessageError(f"{type(error).__name__} where it is read") from error
        if next(reader.rest, None) is not None:
            raise MalformedMessageError("words follow its tree")
        return cls(words, reader.end, _FIXED_WORDS + len(words), tree, reader.leaves)

    def over(self, data: torch.Tensor) -> Packed:
        """A send buffer in ``data``, uint8 and at least as long as a message."""
        header = data[: 8 * self.num_words].view(torch.int64).numpy()
        header[:2] = (self.size, self.num_words)
        header[_FIXED_WORDS:] = self.words
        data = data[: self.size]
        views = [(leaf.stored, leaf.stored.view(data, leaf.begin, leaf.dtype)) for leaf in self._leaves]
        return Packed(data, header, self, views)

    def tree(self, data: torch.Tensor, memory: Memory) -> tuple[Tree, Gaps]:
        """The tree in a message; and copies in ``memory`` of tensors with gaps, each with what is to be copied.

        Raises:
            MalformedMessageError: the message does not fit into ``data``, or is not aligned.
        """
        if self.size > data.nbytes:
            raise MalformedMessageError(f"a message of {self.size} bytes does not fit into {data.nbytes}")
        gaps: Gaps = []
        try:
            return _filled(self._tree, data, gaps, memory), gaps
        except RuntimeError as error:  # torch's, of numbers that no tensor has
            raise MalformedMessageError(f"{type(error).__name__} where it is read") from error


def _filled(tree: Any, data: torch.Tensor, gaps: Gaps, memory: Memory) -> Tree:
    if isinstance(tree, _Leaf):
        return tree.in_message(data, gaps, memory)
    if tree is None:
        return None
    items = [_filled(item, data, gaps, memory) for item in tree]
    return items if isinstance(tree, list) else tuple(items)


class _Reader:
    """Reader of a tree's words, which may be of any content."""

    def __init__(self, words: tuple[int, ...]) -> None:
        self.rest = iter(words)
        self.end = aligned(8 * (_FIXED_WORDS + len(words)))
        self.leaves: list[_Leaf] = []
        self._room = MOST_BYTES

    def tree(self) -> Any:
        """The next tree, with leaves in the place of tensors."""
        code = next(self.rest)
        if code == _NONE:
            return None
        if code in (_TUPLE, _LIST):
            items = [self.tree() for _ in range(next(self.rest))]
            return tuple(items) if code == _TUPLE else items
        if not 0 <= code < len(_DTYPES):
            raise MalformedMessageError(f"{code} stands for no dtype")
        return self._leaf(_DTYPES[code], next(self.rest), next(self.rest))

    def _leaf(self, dtype: torch.dtype, flags: int, ndim: int) -> _Leaf:
        shape, strides = (tuple(islice(self.rest, max(0, ndim))) for _ in range(2))
        if len(strides) != ndim or min((*shape, *strides), default=0) < 0:
            raise MalformedMessageError(f"a tensor of {ndim} dimensions with shape {shape[:8]}, strides {strides[:8]}")
        stored, elsewhere = Stored.of(shape, strides), bool(flags & _ELSEWHERE)
        self._room -= stored.span * dtype.itemsize if stored.gaps or elsewhere else 0
        self._room -= 0 if elsewhere else stored.size(dtype)
        if self._room < 0:
            raise MalformedMessageError(f"a tensor of shape {shape[:8]} and strides {strides[:8]} does not fit")
        leaf = _Leaf(dtype, shape, strides, stored, self.end, bool(flags & _REQUIRES_GRAD), elsewhere)
        if not elsewhere:
            self.leaves.append(leaf)
            self.end = aligned(self.end + stored.size(dtype))
        return leaf


@dataclass(slots=True)
class Packed:
    """A send buffer with a view for each tensor."""

    data: torch.Tensor
    header: np.ndarray[Any, np.dtype[np.int64]]
    form: Form
    views: list[tuple[Stored, torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes of the message."""
        return self.form.size

    def fill(
        self, kind: Message, micro_batch: int, tensors: Sequence[torch.Tensor], note: int, holds: Holds | None = None
    ) -> None:
        """Copy the tensors of a tree of this form into the buffer; those that an accelerator holds without waiting."""
        self.header[2:_FIXED_WORDS] = (kind, micro_batch, note)
        for (stored, view), tensor in zip(self.views, tensors, strict=True):
            elements = stored.elements(tensor)
            if holds is not None and (stored.gaps or elements.is_conj() or elements.is_neg()) and holds(elements):
                # Dense and resolved on the device: torch would do both on the host, before the bytes have come.
                dense = torch.empty_strided(stored.shape, stored.strides, dtype=view.dtype, device=elements.device)
                elements = dense.copy_(elements)
            view.copy_(elements, non_blocking=True)


class Packer:
    """Send buffers, those of the latest forms recycled.

    Args:
        memory: allocates so many bytes of host memory, by default ordinary ones.
    """

    def __init__(self, memory: Memory = host_memory) -> None:
        self._memory = memory
        self._spare: dict[Form, list[Packed]] = {}

    def pack(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> Packed:
        """A buffer with a copy of ``tree``."""
        form, tensors = described(tree)
        packed = self.reserve(form)
        packed.fill(kind, micro_batch, tensors, note)
        return packed

    def reserve(self, form: Form) -> Packed:
        """A buffer for a message."""
        spare = self._spare.get(form)
        if spare is None:
            if len(self._spare) == _FORMS:
                del self._spare[next(iter(self._spare))]
            spare = self._spare[form] = []
        return spare.pop() if spare else form.over(self._memory(form.size))

    def release(self, packed: Packed) -> None:
        """Take a buffer back once its message has been received."""
        if packed.form in self._spare:
            self._spare[packed.form].append(packed)


def cleared(data: torch.Tensor) -> torch.Tensor:
    """A receive buffer that holds no message."""
    data[:8].zero_()
    return data


def has_come(data: torch.Tensor) -> bool:
    """Whether the beginning of a message is in a receive buffer, if not all of it; gloo is asked by waiting alone."""
    return bool(data[:8].any())


def announcement(size: int) -> torch.Tensor:
    """The message before one of ``size`` bytes on its own."""
    packed = Packer().pack(Message.OVERSIZE, 0, None)
    packed.header[0] = size
    return packed.data


def unpack(data: torch.Tensor, memory: Memory = host_memory) -> Received:
    """The message in a buffer, which may be longer; tensors that have gaps are in ``memory``.

    Raises:
        MalformedMessageError: there is none.
    """
    room = data.nbytes  # len() of a tensor is a function of Python
    if room < _FEWEST_BYTES:
        raise MalformedMessageError(f"{room} bytes, the shortest has {_FEWEST_BYTES}")
    start = data.numpy()[: room // 8 * 8].view(np.int64)
    num_words = int(start[1])
    if not _FEWEST_BYTES <= 8 * num_words <= room:
        raise MalformedMessageError(f"a header of {num_words} words in {room} bytes")
    size, _, code, micro_batch, note, *words = start[:num_words].tolist()
    form, kind = Form.of(tuple(words)), _KINDS.get(code)
    tree, gaps = form.tree(data, memory)
    if kind is None:
        raise MalformedMessageError(f"kind {code} is none of 1 to {len(_KINDS)}")
    if size < form.size or (size > form.size and kind is not Message.OVERSIZE):
        raise MalformedMessageError(f"it says that it has {size} bytes, but its tensors end at {form.size}")
    for tensor, view in gaps:
        tensor.copy_(view)
    return Received(kind, micro_batch, note, size, tree)
