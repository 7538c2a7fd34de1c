"""Tensors without values: what a stage has in place of other stages' parameters and of what is computed from them.

An :class:`Absent` has shape, strides, type and device, so that code which asks for those runs; operations on it
cost no memory and compute nothing. Its :class:`Ledger` sees every operation: it says which parameters are used where,
and refuses operations whose result would depend on a value that is not there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ds_vpipe.errors import VPipeConfigError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_MOST_RESULTS = 4096
_DERIVED = "what is computed from"
_VALUE_FREE = {
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default,
}


class SplitError(VPipeConfigError):
    """A model cannot be split, or a call of it cannot be run in pieces; one line with reason, place and remedy."""


def place() -> str:
    """``file:line`` of the innermost code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "forward"
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"


class Ledger:
    """What operations on the absent values of one model mean at the moment.

    Attributes:
        strict: absent and present values must not meet: what the stage computes is real from now on.
        holder: who lacks the values, for messages.
        piece: in a trial pass the piece whose code is running, else None.
        touched: in a trial pass the pieces that use each parameter, by name.
    """

    def __init__(self) -> None:
        self.strict = False
        self.holder = "this stage"
        self.piece: int | None = None
        self.touched: dict[str, set[int]] = {}
        self._results: dict[Any, Any] = {}

    def bare_result(self, func: Any, args: Any, kwargs: dict[str, Any], in_place: bool) -> Any:
        """What ``func`` gives on the meta device; the same is not computed twice.

        Shapes repeat from micro-batch to micro-batch, and operations on the meta device take longer than a look-up.
        """
        if in_place:
            return func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        key = (func, spec, *map(_outline, leaves))
        if key not in self._results:
            if len(self._results) == _MOST_RESULTS:
                self._results.clear()
            self._results[key] = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
        return self._results[key]

    def note(self, func: Any, absent: list[Absent], written: bool, meets_present: bool) -> None:
        """See one operation.

        Raises:
            SplitError: it cannot be right.
        """
        if written:
            raise SplitError(
                f"{place()}: {func} writes {absent[0].origin} into a tensor, and {self.holder} does not have that "
                f"value; allowed before the blocks is to compute new tensors; use the form that does not work in place"
            )
        if self.strict and meets_present:
            raise SplitError(
                f"{place()}: {func} needs {absent[0].origin}, which {self.holder} does not have; allowed between and "
                f"after the blocks are the output of the block before, the call's inputs and parameters that code "
                f"before the blocks does not use; change the forward, or put these pieces on one stage"
            )
        if self.piece is not None:
            for value in absent:
                self._trace(func, value, self.piece)

    def _trace(self, func: Any, value: Absent, piece: int) -> None:
        if value.slot is not None:
            self.touched.setdefault(value.slot, set()).add(piece)
        elif value.made_in != piece and not (value.carried and value.made_in == piece - 1):
            raise SplitError(
                f"{place()}: {func} in piece {piece} needs {value.origin}, which piece {value.made_in} has made; "
                f"allowed is what the piece before hands on, the output of a block; change the forward to use the last "
                f"block's output only"
            )


class Absent(torch.Tensor):
    """A tensor without values.

    Attributes:
        bare: the same on the meta device.
        ledger: sees what is done with it.
        origin: which value is missing, for messages.
        slot: name of the parameter that it stands for, if it is one itself.
        made_in: in a trial pass the piece that made it.
        carried: it goes from ``made_in`` to the next piece.
    """

    bare: torch.Tensor
    ledger: Ledger
    origin: str
    slot: str | None
    made_in: int | None
    carried: bool

    @staticmethod
    def __new__(
        cls, bare: torch.Tensor, device: torch.device, ledger: Ledger, origin: str, slot: str | None = None
    ) -> Absent:
        """Stand for a tensor like ``bare`` on ``device``."""
        made: Absent = torch.Tensor._make_wrapper_subclass(
            cls, bare.shape, strides=bare.stride(), dtype=bare.dtype, device=device
        )
        made.bare, made.ledger, made.origin, made.slot = bare, ledger, origin, slot
        made.made_in, made.carried = ledger.piece, False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.origin}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Absent:
        return Absent(self.bare, self.device, self.ledger, self.origin, self.slot)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """On another rank it is a tensor of the meta device, which has a shape and a type alone too."""
        return _valueless, (tuple(self.shape), self.dtype)

    def handed_on(self, origin: str) -> Absent:
        """The same value as what a piece gives to the next."""
        made = Absent(self.bare, self.device, self.ledger, origin)
        made.carried = True
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        absent = [tensor for tensor in tensors if isinstance(tensor, Absent)]
        first = absent[0]
        device = kwargs.get("device")
        device = first.device if device is None else torch.device(device)
        if func in _VALUE_FREE:
            return func(*tree_map(_bare, args), **(tree_map(_bare, kwargs) | {"device": device}))
        target = _written(func, args, kwargs)
        present = any(not isinstance(t, Absent) for t in tensors)
        written = target is not None and not isinstance(target, Absent)
        first.ledger.note(func, absent, written, present)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        try:
            made = first.ledger.bare_result(func, args, kwargs, target is not None)
        except (RuntimeError, NotImplementedError) as error:
            if not _needs_values(func, error):
                raise
            raise SplitError(
                f"{place()}: {func} looks at the value of {first.origin}, which {first.ledger.holder} does not have; "
                f"allowed are branches on shapes, types and the call's own inputs; compute with torch.where, or "
                f"change the forward"
            ) from None
        if isinstance(target, Absent):
            target.made_in, target.carried = target.ledger.piece, False
            return target
        origin = first.origin if first.origin.startswith(_DERIVED) else f"{_DERIVED} {first.origin}"
        return tree_map(
            lambda value: Absent(value, device, first.ledger, origin) if isinstance(value, torch.Tensor) else value,
            made,
        )


def _valueless(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bare(value: Any) -> Any:
    if isinstance(value, Absent):
        return value.bare
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _outline(value: Any) -> Any:
    """What the result of an operation may depend on; numbers with their type, which decides that of the result."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return type(value), value if value.__hash__ is not None else repr(value)


def _written(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                return value
    return None


def _needs_values(func: Any, error: Exception) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(tags & set(func.tags)) or isinstance(error, NotImplementedError) or "meta" in str(error)
