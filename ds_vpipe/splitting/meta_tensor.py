"""Tensors without values: what a stage has in place of other stages' parameters and of what is computed from them.

A :class:`MetaTensor` has shape, strides, type and device, so that code which asks for those runs; operations on it
cost no memory and compute nothing. Its :class:`AccessLog` sees every operation, tells a dry run of it and refuses
those whose result would depend on a value that is not there.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from ds_vpipe.errors import VPipeConfigError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_MOST_RESULTS = 4096
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_DERIVED = "what is computed from"
_UNIFORM = "a random number between 0 and 1"
_VALUE_FREE = {
    getattr(torch.ops.aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
}

_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_PUTS = {torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_SCATTERS = {torch.ops.aten.masked_scatter.default, torch.ops.aten.masked_scatter_.default}
_BY_MASKS = {_INDEX, _SELECT} | _PUTS | _SCATTERS

# Of what torch computes of values alone. The lengths decide the shape of a second result, which is for backward passes.
_SHAPES = {
    torch.ops.aten._ctc_loss.Tensor: lambda values, *_: (values.new_empty(values.shape[1]), values.new_empty(0)),
    torch.ops.aten._use_cudnn_ctc_loss.Tensor: lambda *_: False,
}


class SplitError(VPipeConfigError):
    """A model cannot be split, or a call of it cannot be run in pieces. One line with reason, place and remedy."""


class ValueNeededError(SplitError):
    """Use of a meta tensor's value, or a write of it into a real tensor."""


def place() -> str:
    """``file:line`` of the innermost code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "forward"
    return _line(frame, frame.f_lineno)


def place_of(error: BaseException) -> str:
    """:func:`place` where an error has been raised."""
    lines = [
        _line(frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)
    ]
    return lines[-1] if lines else "forward"


def _line(frame: FrameType, number: int) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{number}"


class AccessLog:
    """Operations on the meta tensors of one model."""

    def __init__(self) -> None:
        self.dry_run: Any = None  # the DryRun that is going on, or None
        self.dry_runs = 0  # so far
        self.forward_pass: Any = None  # the ForwardPass that is going on, or None
        self.made_up = False  # code that looks at values sees made-up ones
        self.bare_results: dict[Any, Any] = {}  # of operations, on the meta device

    @property
    def piece(self) -> int | None:
        """The piece whose code is running in a dry run."""
        piece: int | None = None if self.dry_run is None else self.dry_run.piece
        return piece

    @property
    def holder(self) -> str:
        """Who lacks the values, for messages."""
        return "this stage" if self.forward_pass is None else str(self.forward_pass.holder)

    def refusal(self, line: str, kind: type[SplitError] | None = None) -> SplitError:
        """An error to be raised, which the forward may catch."""
        error = (kind or SplitError)(line)
        if self.forward_pass is not None:
            self.forward_pass.note_refusal(error)
        return error

    def note(self, func: Any, absent: list[MetaTensor], targets: Sequence[torch.Tensor], meets_present: bool) -> None:
        """Note an operation on ``absent`` tensors that may write to ``targets``.

        Raises:
            SplitError: it cannot be right.
        """
        if not all(isinstance(target, MetaTensor) for target in targets):
            raise self.refusal(
                f"{place()}: {func} writes {absent[0].origin} into a tensor, and {self.holder} does not have that "
                f"value; allowed outside the blocks is to compute new tensors; use an operation that makes one",
                ValueNeededError,
            )
        # What the stage computes in pieces of its own is real.
        if meets_present and self.forward_pass is not None and self.forward_pass.piece >= self.forward_pass.start:
            raise self.refusal(
                f"{place()}: {func} needs {absent[0].origin}, which {self.holder} does not have; allowed are values "
                f"and parameters whose use was seen when such a call was tried out; make the forward use the same ones "
                f"in every call, put these pieces on one stage, or branch on a flag of the call (True or False), which "
                f"is tried out, and not on a number"
            )
        if self.dry_run is not None:
            for value in absent:
                self.dry_run.use(value)
            for target in targets:
                self.dry_run.write(func, target)
        for target in targets if self.forward_pass is not None else ():
            assert isinstance(target, MetaTensor)
            name = target.slot if target.root is None else target.root.slot
            if name is not None:
                self.forward_pass.note_write(func, name)


class MetaTensor(torch.Tensor):
    """A tensor without values."""

    bare: torch.Tensor  # the same on the meta device
    access_log: AccessLog  # sees what is done with it
    origin: str  # which value is missing, for messages
    slot: str | None  # name of the parameter that it stands for, if it is one itself
    made_in: int | None  # in a dry run the piece that made it
    made_by: int  # number of the latest dry run
    first_use: int | None = None  # in a dry run the first piece that uses it
    source: Any = None  # the Source that it comes from, if it can be found again
    guess: torch.Tensor | None = None  # a made-up value, inside of a block that looks at values
    root: MetaTensor | None = None  # what it is a view of
    views: Sequence[weakref.ref[MetaTensor]] = ()  # of it, as weak references

    @staticmethod
    def __new__(
        cls, bare: torch.Tensor, device: torch.device, log: AccessLog, origin: str, slot: str | None = None,
        requires_grad: bool = False,
    ) -> MetaTensor:  # fmt: skip
        """Stand for a tensor like ``bare`` on ``device``."""
        if bare.is_conj() or bare.is_neg():  # which what stands for it cannot be
            bare = torch.empty_strided(bare.shape, bare.stride(), dtype=bare.dtype, device="meta")
        made: MetaTensor = torch.Tensor._make_wrapper_subclass(
            cls, bare.shape, strides=bare.stride(), dtype=bare.dtype, device=device, requires_grad=requires_grad
        )
        made.__dict__.update(
            bare=bare, access_log=log, origin=origin, slot=slot, made_in=log.piece, made_by=log.dry_runs
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MetaTensor({self.origin}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> MetaTensor:
        return self.again()

    def again(self) -> MetaTensor:
        """Another one like it, as a leaf."""
        return MetaTensor(self.bare, self.device, self.access_log, self.origin, self.slot, self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a tensor of the meta device."""
        return _valueless, (tuple(self.shape), self.dtype)

    def looked_at(self, func: Any) -> SplitError:
        """The refusal of a look at the value."""
        allowed = (
            "allowed outside a call of the whole model are shapes and types; call that and no part of it, and take "
            "weights from its state_dict()"
            if self.access_log.forward_pass is None
            else "allowed are branches on shapes, types and the call's own inputs, and on any value inside a block; "
            "compute with torch.where, or change the forward"
        )
        which = f"{self.origin}, which {self.access_log.holder} does not have"
        line = f"{place()}: {func} looks at the value of {which}; {allowed}"
        return self.access_log.refusal(line, ValueNeededError)

    @property
    def data(self) -> torch.Tensor:
        """As torch's. To put it on other memory is a write."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        new = value if isinstance(value, MetaTensor) else MetaTensor.like(value, self.access_log, self.origin)
        self.access_log.note(".data", [self, new], [self], False)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.bare = new.bare

    def register_hook(self, hook: Any) -> RemovableHandle:
        """None is kept: gradients are computed where the value is."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        piece, first = self.access_log.piece, self.first_use
        if piece is not None and first is not None and first < piece:
            raise self.access_log.refusal(
                f"{place()}: puts a hook on {self.origin}, which piece {first} has used, so that piece {piece} has "
                f"only a part of its gradient; allowed are hooks where the value is made; register it there"
            )
        return RemovableHandle(OrderedDict())

    def retain_grad(self) -> None:
        """As with :meth:`register_hook`."""
        self.register_hook(None)

    def storage(self) -> Any:
        """None is there; safetensors asks for it."""
        raise self.access_log.refusal(
            f"{place()}: asks for the memory of {self.origin}, which {self.access_log.holder} does not have; allowed "
            f"is to write on the rank that has it, such as save_pretrained(FOLDER, is_main_process=rank == 0)"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """A look at the value, of which no operation tells. numpy's functions take this, too."""
        if not self.access_log.made_up:
            raise self.looked_at("numpy()")
        with no_dispatch():
            return self.guessed().detach().cpu().numpy().copy()

    def tolist(self) -> Any:
        """By operations, which torch's does without."""
        return [part.tolist() for part in self] if self.dim() else self.item()

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.item(), spec)

    def guessed(self) -> torch.Tensor:
        """A made-up value, zeros if none has been computed."""
        if self.guess is not None:
            return self.guess
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride(), strict=True) if size)
        zeros = torch.zeros(span, dtype=self.dtype, device=self.device).as_strided(self.shape, self.stride())
        if self.slot is None:  # code may write to it, and parameters may be large
            self.guess = zeros
        return zeros

    def reshape_in_place(self, func: Any, args: Any, kwargs: Any) -> MetaTensor:
        """What ``func``, such as ``transpose_``, does to this tensor."""
        self.bare = self.bare.detach()  # the old one is others', too
        func(*tree_map(bare_of, args), **tree_map(bare_of, kwargs))
        with no_dispatch():
            func(*args, **kwargs)
        return self

    def note_views(self, func: Any, results: Any) -> None:
        """Note that ``func`` has made these of it: of a parameter always, which is known by the root of its views."""
        root = self if self.root is None else self.root
        dry_run = self.access_log.dry_run is not None
        if (dry_run or root.slot is not None) and any(r.alias_info is not None for r in func._schema.returns):
            for view in (leaf for leaf in tree_leaves(results) if isinstance(leaf, MetaTensor)):
                view.root = root
                if dry_run:
                    root.views = [*root.views, weakref.ref(view)]

    @staticmethod
    def looks_at_values(func: Any, args: Any) -> bool:
        """Whether an operation gives numbers to Python, or values decide the shape of its result."""
        by_values = torch.Tag.dynamic_output_shape in func.tags and (func is not _INDEX or any(map(_is_mask, args[1])))
        return by_values or torch.Tag.data_dependent_output in func.tags

    @classmethod
    def drawn(cls, values: Any, log: AccessLog, func: Any) -> Any:
        """Stand for values that ``func`` has drawn."""
        origin = _UNIFORM if func is torch.ops.aten.rand.default else f"what {func} has drawn"
        return tree_map_only(torch.Tensor, lambda value: cls.like(value, log, origin), values)

    @classmethod
    def like(cls, value: torch.Tensor, log: AccessLog, origin: str) -> MetaTensor:
        """Stand for ``value``."""
        return cls(bare_of(value), value.device, log, origin)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        absent = [tensor for tensor in tensors if isinstance(tensor, MetaTensor)]
        first, log = absent[0], absent[0].access_log
        device = kwargs.get("device")
        device = first.device if device is None else torch.device(device)
        if func in _VALUE_FREE:
            return func(*tree_map(bare_of, args), **(tree_map(bare_of, kwargs) | {"device": device}))
        if func is torch.ops.aten.lt.Scalar and first.origin == _UNIFORM and args[1] <= 0:
            return torch.zeros(first.shape, dtype=torch.bool, device=device)  # as where layers are dropped at rate 0
        targets = written(func, args, kwargs)
        target = targets[0] if targets else None
        log.note(func, absent, targets, len(absent) < len(tensors))
        if torch.Tag.inplace_view in func.tags and isinstance(target, MetaTensor):
            return target.reshape_in_place(func, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        shaping, given = func, args
        if func in _BY_MASKS:
            with torch._C.DisableTorchFunction():  # what is called is no function of the forward's
                shaping, given = _with_indices(func, args)
        try:
            made = _computed_bare(shaping, given, kwargs, log.bare_results if target is None else {})
        except (RuntimeError, NotImplementedError) as error:
            if not _needs_values(func, error):
                raise
            mask = next(filter(_is_mask, absent), first)  # whose values alone are looked at, if there is one
            raise mask.looked_at(func) from None
        if target is not None:
            return target if func._schema.returns else None
        origin = first.origin if first.origin.startswith(_DERIVED) else f"{_DERIVED} {first.origin}"
        results = tree_map_only(torch.Tensor, lambda value: MetaTensor(value, device, log, origin), made)
        first.note_views(func, results)
        return results


class _Computed(torch.autograd.Function):
    """Meta tensors with a graph, as code sees it that asks for their ``requires_grad``."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, like: list[MetaTensor], origin: str) -> tuple[MetaTensor, ...]:
        return tuple(MetaTensor.like(one, one.access_log, origin) for one in like)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None


def renewed(leaves: Sequence[Any], origin: str, kept: Collection[int] = ()) -> list[Any]:
    """``leaves`` with new meta tensors, those in ``kept`` left as they are.

    Those that require a gradient have a graph; what occurs twice is one tensor again.
    """
    old = {id(leaf): leaf for leaf in leaves if isinstance(leaf, MetaTensor) and id(leaf) not in kept}
    computed = [one for one in old.values() if one.requires_grad]
    with_graph = iter(
        _Computed.apply(torch.empty(0, device="cpu", requires_grad=True), computed, origin) if computed else ()
    )
    made = {
        key: next(with_graph) if one.requires_grad else MetaTensor.like(one, one.access_log, origin)
        for key, one in old.items()
    }
    return [made.get(id(leaf), leaf) for leaf in leaves]


def _valueless(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bare_of(value: Any) -> Any:
    """A tensor without values, of whatever class, as a plain one on the meta device; another value itself."""
    if isinstance(value, MetaTensor):
        return value.bare
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, strides_of(value), dtype=value.dtype, device="meta")
    return value


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of any tensor: parameters may have an attribute `stride`, as those of Megatron's parallel layers have."""
    return torch.Tensor.stride(tensor)


def _computed_bare(func: Any, args: Any, kwargs: dict[str, Any], known: dict[Any, Any]) -> Any:
    """What ``func`` gives on the meta device. The same is not computed twice.

    Shapes repeat from micro-batch to micro-batch, and operations on the meta device take longer than a look-up.
    """
    leaves, spec = tree_flatten((args, kwargs))
    key = (func, spec, *map(_outline, leaves))
    if key not in known:
        if len(known) == _MOST_RESULTS:
            known.clear()
        known[key] = _SHAPES.get(func, func)(*tree_map(bare_of, args), **tree_map(bare_of, kwargs))
    return known[key]


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _with_indices(func: Any, args: Any) -> tuple[Any, Any]:
    """One of the operations with masks, with indices in the place of those that have values.

    Raises:
        RuntimeError: it writes another number or type of values. Torch sees that only where values are, and code may
            catch it.
        IndexError: likewise a mask of another shape.
    """
    if func in _SCATTERS | {_SELECT} and not isinstance(args[1], MetaTensor):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        mask = args[1].expand(shape).reshape(-1)
        if func in _SCATTERS and args[2].numel() < mask.count_nonzero():
            raise RuntimeError("Number of elements of source < number of ones in mask")
        if func is _SELECT:
            func, args = _INDEX, (bare_of(args[0]).expand(shape).reshape(-1), [mask])
    if func is not _INDEX and func not in _PUTS:
        return func, args
    indices: list[Any] = []
    for index in args[1]:
        known = _is_mask(index) and index.dim() and not isinstance(index, MetaTensor)
        if known and index.shape != args[0].shape[len(indices) : len(indices) + index.dim()]:
            raise IndexError(f"The shape of the mask {list(index.shape)} does not match {list(args[0].shape)}")
        indices += index.nonzero().unbind(1) if known else [index]
    if func in _PUTS and args[0].dtype != args[2].dtype:
        raise RuntimeError("Index put requires the source and destination dtypes match")
    if func in _PUTS and not any(map(_is_mask, indices)):
        bare_of(args[2]).expand(_INDEX(bare_of(args[0]), [*map(bare_of, indices)]).shape)
    return func, (args[0], indices, *args[2:])


def _outline(value: Any) -> Any:
    """What the result of an operation may depend on. Numbers with their type, which decides that of the result."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), strides_of(value), value.dtype
    return type(value), value if value.__hash__ is not None else repr(value)


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that an operation writes to, by its schema."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else (value,)
            found += [one for one in values if isinstance(one, torch.Tensor)]
    return found


def _needs_values(func: Any, error: Exception) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(tags & set(func.tags)) or isinstance(error, NotImplementedError) or "meta" in str(error)


def put_value(absent: torch.Tensor, value: torch.Tensor) -> None:
    """Turn ``absent``, in place, into a writable view of ``value``."""
    if (absent.shape, absent.dtype) != (value.shape, value.dtype):
        raise SplitError(
            f"{absent!r}: got a value of shape {list(value.shape)} and {value.dtype} from the stage before; allowed "
            f"are shapes and types that follow from those of the call's arguments; change the forward"
        )
    if absent.requires_grad != value.requires_grad:
        raise SplitError(
            f"{absent!r}: got a value with requires_grad={value.requires_grad} from the stage before, allowed is "
            f"{absent.requires_grad}, as when the model was split; freeze parameters before initialize(), on every rank"
        )
    # The cut may be in a no_grad region, behind which the value is differentiated.
    with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        alias = torch.ops.aten.alias.default(value)  # view_as() changes strides of dimensions of size 1
    # What torch.utils.swap_tensors does, but that graphs of what is absent may go on to refer to the old tensor.
    alias.__class__, absent.__class__ = absent.__class__, alias.__class__
    alias.__dict__, absent.__dict__ = absent.__dict__, alias.__dict__
    torch._C._swap_tensor_impl(absent, alias)
