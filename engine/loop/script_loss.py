"""The tensor that a training script gets as its loss.

It is a tensor without dimensions, with a graph, so that a script may compute with it. On the last stage the graph is
the model's: what the script hands to ``engine.backward()`` is what is differentiated. On the others it ends at the
number, which came from the last stage. Everywhere the graph is behind a gate that is open in ``engine.backward()``
only: a backward pass is the pipeline's, with the weights that its forward pass used.

Scripts whose module returns its loss among other things take it out as ``outputs.loss``, ``outputs["loss"]`` or
``outputs[0]``. No stage but the last has the other things; so the tensor is its own ``loss``. Tensors among them that
the script takes by name, by position or one after the other come from the last stage, as the loss does: a script that
makes its own loss of them differentiates there, and computes the same numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ds_vpipe.errors import CallOrderError, OutputError

_ALONE = (
    "in training a pipeline gives the loss alone, as what else forward() returns is on the last stage only; write "
    "loss = engine(...), or outputs.loss, or the name of another tensor; in evaluation every rank gets everything"
)
INSIDE = "\0"  # between the names of an entry and of what is in it
TENSORS = ("tensor", "scalar")  # kinds of entries that a script may have
_GONE = "what forward() returns beside its loss is there until engine.backward(); read it before"


def not_in_training(name: str, kind: str) -> str:
    """The line for an entry of a kind that a script has in evaluation only."""
    return (
        f"outputs.{name}: forward() has returned a {kind} there, which stages do not have in training; allowed are "
        f"tensors that are made behind the last block, and None; compute it there in forward(), or write outputs.loss"
    )


class LossTensor(torch.Tensor):
    """Loss as a script gets it, which stands for forward()'s other outputs too."""

    # What is computed from it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    others: Callable[[str], torch.Tensor] | None = None  # gives what else forward() has returned, until backward()
    names: Collection[str] = ()  # of that
    kinds: Mapping[str, str] = MappingProxyType({})  # of what a dict, tuple or list that forward() returned has, nested
    by_key = False  # a dict
    among: torch.Tensor | None = None  # the loss, where this is one of several and may not be trained for them all
    look: Callable[[], None] | None = None  # refuses other entries than those of ``kinds``
    own: Mapping[str, Any] = MappingProxyType({})  # scalars, which stay, and what the script has written

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # files and queues get the number alone

    def __format__(self, format_spec: str) -> str:
        return format(self.detach(), format_spec)

    @property
    def loss(self) -> Any:
        """Itself, or what the script has put in its place, as ``outputs.loss = outputs.loss / 2`` does."""
        return self.__dict__.get("_replaced", self)

    @loss.setter
    def loss(self, value: Any) -> None:
        self.__dict__.pop("_replaced", None)
        if value is not self:  # as .to() returns it, and a cycle would keep the graph
            self.__dict__["_replaced"] = value

    def let_go(self) -> None:
        """Keep numbers alone: what the script has put in its place may have a graph that refers back to this."""
        self.others = self.among = self.look = None
        self.own = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in self.own.items()}
        if isinstance(replaced := self.__dict__.get("_replaced"), torch.Tensor):
            self.__dict__["_replaced"] = replaced.detach()

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == "loss":
            self.loss = value
        elif isinstance(key, str):
            self.kinds, self.own = {**(self.kinds or {"loss": "loss"}), key: "tensor"}, {**self.own, key: value}
        else:
            super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        if self.dim() or not isinstance(key, (int, str, slice)):
            return super().__getitem__(key)
        # A dict's loss is at 0 too: code that asks for the class finds none.
        first = "loss" in self.kinds if self.by_key else next(iter(self.kinds.values()), "loss") == "loss"
        if (key == "loss" and (first or not self.by_key)) or (key == 0 and first):
            return self.loss
        if isinstance(key, str) and (key in self or self.others is not None):
            try:
                return self._entry(key)
            except OutputError as error:
                raise KeyError(str(error)) from None
        order = [] if self.by_key else list(self._inside())
        if isinstance(key, slice) and order:
            return tuple(map(self._entry, order[key]))
        if isinstance(key, int) and 0 <= key + len(order) * (key < 0) < len(order):
            return self._entry(order[key])
        given = "" if isinstance(key, slice) else repr(key)
        raise (KeyError if isinstance(key, str) else IndexError)(f"outputs[{given or ':'}]: {_ALONE}")

    def __contains__(self, key: Any) -> bool:
        if not isinstance(key, str):
            return super().__contains__(key)
        known = self.kinds or ("loss", *self.names)
        if key not in known or self.kinds.get(key) == "None":
            self._looks()
        return key in known

    def __len__(self) -> int:
        return len(self._inside()) if self.kinds else super().__len__()

    def __iter__(self) -> Iterator[Any]:
        """As of what forward() has returned. Of a loss alone once; a script that goes on expects more."""
        if order := self._inside():
            yield from order if self.by_key else map(self._entry, order)
            return
        yield self.loss
        raise ValueError(f"loss, ... = outputs: {_ALONE}")

    def __getattr__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        if self.kinds.get(name) == "loss":  # a field of a named tuple
            return self._entry(name)
        if self.by_key and name in ("keys", "items", "get"):  # of dicts alone: scripts ask whether there are any
            return getattr(self, f"_{name}")
        if self.others is None or name.startswith("_"):
            raise OutputError(f"outputs.{name.replace(INSIDE, '.')}: {_GONE if name in self.names else _ALONE}")
        return self.others(name)

    def values(self) -> Any:
        """Of all keys of a dict: all tensors are asked for. Elsewhere torch's method of this name."""
        return list(map(self._entry, self._keys())) if self.by_key else super().values()

    def _keys(self) -> list[str]:
        return list(self._inside())

    def _items(self) -> list[tuple[str, Any]]:
        return [(key, self._entry(key)) for key in self._inside()]

    def _get(self, key: str, default: Any = None) -> Any:
        return self._entry(key) if key in self else default

    def _inside(self, of: str = "") -> dict[str, str]:
        """Keys of the entries of an entry, or of all, with their whole names."""
        self._looks()
        parts = ((full.rpartition(INSIDE), full) for full in self.kinds)
        return {key: full for (before, _, key), full in parts if before == of}

    def _looks(self) -> None:
        if self.look is not None:
            self.look()

    def _entry(self, name: str) -> Any:
        self._looks()
        kind = self.kinds.get(name, "loss" if name == "loss" else "tensor")
        if kind == "loss":
            return self.loss if self.among is None or "_replaced" in self.__dict__ else self.among
        if name in self.own or kind == "None":
            return self.own.get(name)
        if kind in ("dict", "tuple", "list"):
            entries = {key: self._entry(full) for key, full in self._inside(name).items()}
            return entries if kind == "dict" else (list if kind == "list" else tuple)(entries.values())
        if kind not in TENSORS:
            raise OutputError(not_in_training(name.replace(INSIDE, "."), kind))
        return self.__getattr__(name)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
        ctx.enter = enter
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.enter()
        return gradients[0], None


class _Whole(_Gate):
    """Gate of what stands for several losses."""


def check_graph(loss: torch.Tensor) -> None:
    """Refuse a loss with terms made of parameters: one stage alone would train them."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or isinstance(node, _Gate._backward_cls):
            continue
        seen.add(node)
        if isinstance(node, _Whole._backward_cls):
            raise CallOrderError(
                "backward(loss): got what engine(...) returned, for a forward that returns several losses; allowed is "
                "what the script makes of them; take each out by its key or position"
            )
        if hasattr(node, "variable"):
            raise CallOrderError(
                "backward(loss): got a loss with terms made of parameters, or of other tensors that require gradients, "
                "which one stage alone would have; allowed is what is computed from what engine(...) returned; compute "
                "what is not to be trained under torch.no_grad(), put other terms and their parameters into the "
                "model's forward, or use weight_decay"
            )
        nodes += [following for following, _ in node.next_functions]


class LossGate:
    """Gate of one micro-batch's loss: open only in a backward pass of the pipeline."""

    def __init__(self) -> None:
        self.open = False  # a backward pass of the pipeline is under way
        self.used = False  # it has come through here

    def gated(self, loss: torch.Tensor, one_of_several: bool = False) -> LossTensor:
        """The loss as the script gets it. ``loss`` is the model's, or a number from elsewhere."""
        among = self.gated_output(loss)
        with torch.enable_grad():
            whole = _Whole.apply(among, self._enter) if one_of_several else among
            handed: LossTensor = whole.as_subclass(LossTensor)
        handed.among = among if one_of_several else None
        return handed

    def gated_output(self, value: torch.Tensor) -> torch.Tensor:
        """As :meth:`gated`, of what a script may make a loss of."""
        source = value if value.requires_grad else value.detach().clone().requires_grad_()
        with torch.enable_grad():
            handed: torch.Tensor = _Gate.apply(source, self._enter)
        return handed

    def _enter(self) -> None:
        if not self.open:
            raise CallOrderError(
                "loss.backward(): called on what engine(...) returned; allowed is engine.backward(loss), which runs "
                "the backward pass that is due on every stage"
            )
        self.used = True
