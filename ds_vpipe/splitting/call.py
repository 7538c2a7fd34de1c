"""Calls of a user's forward as flat tuples of tensors, which travel from stage to stage, and back.

Keywords, nesting, strings and flags do not travel: every rank makes the same calls, so each knows them. A tuple begins
with an empty tensor whose shape is a fingerprint of all that, which tells a rank which of the calls that it has packed
this is. Numbers, which may be others in every call, travel as shapes of empty tensors too: that costs no transfer and
no look at values on a device.
"""

from __future__ import annotations

import hashlib
import struct
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_vpipe.splitting.absent import SplitError

Packed = tuple["torch.Tensor | None", ...]
_PLAIN = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)
_BITS = 60
_NUMBERS: dict[type, str] = {int: "<q", float: "<d"}  # how their 64 bits are read


class CallForm:
    """What all calls alike have in common: nesting, keywords, values that are neither tensors nor numbers.

    Attributes:
        fingerprint: the same on all ranks, and for no other form.
        num_tensors: how many travel, two for each number.
    """

    def __init__(self, spec: TreeSpec, plain: list[Any]) -> None:
        self._spec, self._plain = spec, plain
        text = repr((spec, [repr(value) for value in plain]))
        self.fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)
        self.num_tensors = sum(value.tensors for value in plain if isinstance(value, _Travels))

    def rebuild(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments of the call with these tensors."""
        remaining = iter(tensors)
        leaves = [value.of(remaining) if isinstance(value, _Travels) else value for value in self._plain]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return tuple(_as_given(args)), _as_given(kwargs)


class _Travels(NamedTuple):
    """The place of a tensor or of a number of this type in a form."""

    kind: type

    @property
    def tensors(self) -> int:
        return 2 if self.kind in _NUMBERS else 1

    def of(self, tensors: Iterator[Any]) -> Any:
        if self.kind not in _NUMBERS:
            return next(tensors)
        return struct.unpack(_NUMBERS[self.kind], struct.pack("<II", *(next(tensors).shape[-1] for _ in range(2))))[0]


def _travels(leaf: Any) -> _Travels | None:
    if isinstance(leaf, torch.Tensor):
        return _Travels(torch.Tensor)
    fits = type(leaf) is float or (type(leaf) is int and -(2**63) <= leaf < 2**63)
    return _Travels(type(leaf)) if fits else None


def _as_tensors(leaf: Any, samples: int) -> tuple[torch.Tensor, ...]:
    if isinstance(leaf, torch.Tensor):
        return (leaf,)
    words = struct.unpack("<II", struct.pack(_NUMBERS[type(leaf)], leaf))
    return tuple(torch.empty(samples, 0, word, dtype=torch.uint8) for word in words)


class CallForms:
    """The forms of all calls so far."""

    def __init__(self) -> None:
        self._known: dict[int, CallForm] = {}

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Packed, CallForm]:
        """The tuple that travels, and its form.

        Raises:
            SplitError: an argument is neither a tensor nor a plain value nor a dict, list or tuple of those.
        """
        leaves, spec = tree_flatten((_plain_dicts(list(args)), dict(sorted(_plain_dicts(kwargs).items()))))
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise SplitError(
                    f"forward: got an argument of type {type(leaf).__name__}, allowed are tensors, numbers, strings, "
                    f"None, and dicts, lists and tuples of them; pass what the model needs of it as tensors"
                )
        form = CallForm(spec, [_travels(leaf) or leaf for leaf in leaves])
        form = self._known.setdefault(form.fingerprint, form)
        travelling = [leaf for leaf in leaves if _travels(leaf)]
        samples = next((leaf.shape[0] for leaf in travelling if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
        tensors = [tensor for leaf in travelling for tensor in _as_tensors(leaf, samples)]
        return (torch.empty(samples, 0, form.fingerprint, dtype=torch.uint8), *tensors), form

    def form_of(self, value: Packed) -> CallForm:
        """The form of a tuple that has arrived.

        Raises:
            SplitError: this rank has made no such call.
        """
        mark = value[0] if isinstance(value, tuple) and value else None
        if not isinstance(mark, torch.Tensor) or mark.dim() != 3 or mark.numel():
            raise SplitError(
                "pipeline input: got something that pack() has not made; allowed is its result; call it first"
            )
        form = self._known.get(mark.shape[2])
        if form is None:
            raise SplitError(
                "forward: got a call from the first stage with other keywords, nesting, strings or flags than this "
                "rank's own calls; allowed is the same call on every rank; make the script pass the same arguments "
                "everywhere"
            )
        return form


class _Other(NamedTuple):
    """A mapping of a class of its own, such as a tokenizer's batch."""

    kind: type
    items: dict[str, Any]


def _plain_dicts(value: Any) -> Any:
    if isinstance(value, UserDict):
        return _Other(type(value), _plain_dicts(value.data))
    if type(value) is dict:
        return {key: _plain_dicts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_dicts(item) for item in value)
    return value


def _as_given(value: Any) -> Any:
    if isinstance(value, _Other):
        return value.kind(_as_given(value.items))
    if type(value) is dict:
        return {key: _as_given(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_given(item) for item in value)
    return value
