"""Calls of a user's forward as flat tuples of tensors, and the loss.

Keywords, nesting, strings and flags do not travel: every rank makes the same calls, so each knows them. A tuple begins
with an empty tensor whose shape is a fingerprint of all that, which tells a rank which of the calls that it has packed
this is. Numbers, which may be others in every call, travel as shapes of empty tensors too: that costs no transfer and
no look at values on a device.
"""

import hashlib
import struct
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ds_vpipe.splitting.meta_tensor import SplitError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Packed = tuple["torch.Tensor | None", ...]
_PLAIN = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)
_BITS = 60
_OWN_TRIALS, _MOST_FORMS = 4, 4096


class CallForm:
    """What all calls alike have in common: nesting, keywords, values that are neither tensors nor numbers."""

    def __init__(self, spec: TreeSpec, plain: list[Any]) -> None:
        self._spec, self._plain = spec, plain
        self.written: set[int] = set()  # travelling tensors that the forward writes to
        # Every rank has its own device, whose number another one cannot know.
        self._alike = [torch.device(value.type) if isinstance(value, torch.device) else value for value in plain]
        # The same on all ranks, and for no other form.
        self.fingerprint = _fingerprint(spec, self._alike)
        # Fingerprint of the forms that are tried out as one; and whether their strings differ in every call.
        self.trial, self.varies = self.fingerprint, False
        # How many travel, two for each number.
        self.num_tensors = sum(2 if value.number else 1 for value in plain if isinstance(value, _Travels))

    def kind(self) -> int:
        """Fingerprint of all forms that differ in strings alone."""
        return _fingerprint(self._spec, [str if isinstance(value, str) else value for value in self._alike])

    def parts(self, value: Packed) -> tuple[Packed, tuple[Any, ...]]:
        """What goes from piece to piece in a call, behind its mark: the call's own tensors, and the activations."""
        return value[1 : 1 + self.num_tensors], value[1 + self.num_tensors :]

    def rebuild(self, tensors: tuple[Any, ...]) -> Call:
        """Arguments and keyword arguments of the call with these tensors."""
        remaining = iter(tensors)
        leaves = [value.of(remaining) if isinstance(value, _Travels) else value for value in self._plain]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return tuple(_as_given(args)), _as_given(kwargs)


class _Travels(NamedTuple):
    """Place of a tensor or of a number, by a format of ``struct``, in a form."""

    number: str = ""

    def tensors(self, leaf: Any, samples: int) -> list[torch.Tensor]:
        if not self.number:
            return [leaf]
        words = struct.unpack("<II", struct.pack(self.number, leaf))
        return [torch.empty(samples, 0, word, dtype=torch.uint8, device="cpu") for word in words]

    def of(self, tensors: Iterator[Any]) -> Any:
        if not self.number:
            return next(tensors)
        return struct.unpack(self.number, struct.pack("<II", *(next(tensors).shape[-1] for _ in range(2))))[0]


def _place(leaf: Any) -> Any:
    """What a form has of an argument: itself, if it does not travel."""
    if isinstance(leaf, torch.Tensor):
        return _Travels()
    if isinstance(leaf, float):  # numpy's, too, of which the forward gets a float
        return _Travels("<d")
    if type(leaf) is int and -(2**63) <= leaf < 2**63:
        return _Travels("<q")
    return leaf


def _fingerprint(spec: TreeSpec, plain: list[Any]) -> int:
    text = repr((spec, [repr(value) for value in plain]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)


class CallForms:
    """The forms of the latest calls.

    Where calls differ in strings again and again, as batches do that hold the names of their samples, they are tried
    out as one form, each call of which may go another way.
    """

    def __init__(self) -> None:
        self._known: dict[int, CallForm] = {}
        self._kinds: dict[int, list[CallForm]] = {}  # but for strings

    def pack(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_training: bool = False
    ) -> tuple[Packed, CallForm]:
        """The tuple that travels, and its form.

        Raises:
            SplitError: an argument is neither a dense tensor nor a plain value nor a dict, list or tuple of those, or
                it is ``for_training`` and would need a gradient, which does not come back from the stages.
        """
        leaves, spec = tree_flatten((_plain(list(args)), dict(sorted(_plain(kwargs).items()))))
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                remedy = "pass what the model needs of it as tensors"
                if hasattr(leaf, "cross_attention_cache"):  # Transformers', of decoders that are called by themselves
                    remedy = "generate in one process, with the saved model"
                elif any(kind.__name__ == "Cache" for kind in type(leaf).__mro__):
                    remedy = "pass use_cache=False"
                raise SplitError(
                    f"forward: got an argument of type {type(leaf).__name__}, allowed are tensors, numbers, strings, "
                    f"None, and dicts, lists and tuples of them; {remedy}"
                )
            if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
                kind = "nested tensor" if leaf.is_nested else f"tensor with layout {leaf.layout}"
                raise SplitError(
                    f"forward: got a {kind} as an argument, allowed are dense ones; pass its indices and values, and "
                    f"build it in the model's forward"
                )
            if for_training and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise SplitError(
                    f"forward: got an argument of shape {list(leaf.shape)} with requires_grad=True, allowed in "
                    f"training are tensors without, as no gradient comes back to the script; compute it inside the "
                    f"model's forward, or pass its .detach()"
                )
        places = [_place(leaf) for leaf in leaves]
        form = CallForm(spec, places)
        form = self._known.pop(form.fingerprint) if form.fingerprint in self._known else self._first(form)
        self._known[form.fingerprint] = form
        samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
        travelling = [(at, leaf) for at, leaf in zip(places, leaves, strict=True) if isinstance(at, _Travels)]
        tensors = [tensor for at, leaf in travelling for tensor in at.tensors(leaf, samples)]
        return (torch.empty(samples, 0, form.fingerprint, dtype=torch.uint8, device="cpu"), *tensors), form

    def _first(self, form: CallForm) -> CallForm:
        """A form that has not been seen, or not lately."""
        if len(self._known) > _MOST_FORMS and (old := next((f for f in self._known.values() if f.varies), None)):
            del self._known[old.fingerprint]
        kind = form.kind()
        alike = self._kinds.setdefault(kind, [])
        if len(alike) <= _OWN_TRIALS:
            alike.append(form)
        if len(alike) > _OWN_TRIALS:
            form.trial, form.varies, form.written = kind, True, alike[-1].written
        return form

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


class _Mapping(NamedTuple):
    """A mapping of a class of its own, such as a tokenizer's batch."""

    kind: type
    items: dict[str, Any]


def _plain(value: Any) -> Any:
    """With mappings of their own classes in a form that pytree walks."""
    return tree_map(lambda leaf: _Mapping(type(leaf), _plain(leaf.data)) if isinstance(leaf, UserDict) else leaf, value)


def _as_given(value: Any) -> Any:
    return tree_map(
        lambda node: node.kind(_as_given(node.items)) if isinstance(node, _Mapping) else node,
        value,
        is_leaf=lambda node: isinstance(node, _Mapping),
    )


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar that training minimises: ``output`` itself, its ``loss``, that of a tuple, or None.

    Of several in a tuple or a dict without a loss it is the first one with a graph; the script adds them up.
    """
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    elif hasattr(output, "loss"):
        output = output.loss
    elif not isinstance(output, torch.Tensor):
        scalars = [item for item in tree_leaves(output) if _is_scalar(item)]
        output = next((item for item in scalars if item.requires_grad), scalars[0] if scalars else None)
    return output if _is_scalar(output) else None


def loss_of(output: Any, model: str) -> torch.Tensor:
    """:func:`find_loss`, of the forward of ``model``.

    Raises:
        SplitError: there is none.
    """
    loss = find_loss(output)
    if loss is None:
        raise SplitError(
            f"{model}: forward returned {_describe(output)} without a loss, allowed is a scalar, alone, as .loss or "
            f'["loss"], or in a tuple or dict; pass the labels to the model, or wrap it in a module that computes the '
            f"loss"
        )
    return loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with {', '.join(map(str, output))}"
    return f"a {type(output).__name__}"
