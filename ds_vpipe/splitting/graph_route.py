"""A model of any form, exported by ``torch.export`` and run piece by piece.

There is one graph for training and one for evaluation, which differ where dropout and normalisation do. Both are made
from an example of a call, while the whole model is there; later calls have the example's form, and shapes that differ
where the export says they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_vpipe.splitting.absent import SplitError
from ds_vpipe.splitting.call import CallForm
from ds_vpipe.splitting.graph_cut import CutGraph
from ds_vpipe.splitting.slots import Slot

Call = tuple[tuple[Any, ...], dict[str, Any]]


class GraphRoute:
    """Runs pieces of an exported model.

    Args:
        model: the user's, with all its parameters.
        slots: its parameters.
        form: of all calls.
        example: a call.
        pieces: the least number of pieces.

    Attributes:
        piece_names: one per piece.
        pieces_of: the pieces that use each slot, by name.
        buffer_piece: the piece of each buffer, by ``id`` of its module and its name there.

    Raises:
        SplitError: the model cannot be exported; says why.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], form: CallForm, example: Call, pieces: int) -> None:
        self._model, self._form, self._numbers = model, form, _numbers(example)
        mode = model.training
        names = [slot.name for slot in slots]
        try:
            self._graphs = {training: _Exported(model, example, training, names) for training in (True, False)}
        finally:
            model.train(mode)
        trained, evaluated = self._graphs[True].cut, self._graphs[False].cut
        trained.thin(pieces)
        if len(trained.names) < pieces:
            raise SplitError(
                f"{type(model).__name__}: got {pieces} stages, allowed are 1 to {len(trained.names)}, as many as it "
                f"has modules with parameters; use fewer stages"
            )
        self._same = evaluated.keep([cut.label for cut in trained.cuts])
        self.piece_names = trained.names
        self._parts: dict[tuple[bool, int, int], tuple[fx.GraphModule, list[str]]] = {}
        used: dict[str, list[int]] = {}
        for piece in range(len(self.piece_names)):
            for name in trained.used_attributes(piece, piece + 1):
                used.setdefault(name, []).append(piece)
        self._tensors: dict[str, tuple[dict[str, Any], str]] = {}
        self.pieces_of: dict[str, tuple[int, ...]] = {}
        self.buffer_piece: dict[tuple[int, str], int] = {}
        places: dict[tuple[int, str], list[int]] = {}
        for slot in slots:
            places.setdefault((id(slot.module), slot.key), []).extend(used.get(slot.name, ()))
            self._tensors[slot.name] = slot.module._parameters, slot.key
        for slot in slots:
            found = places[id(slot.module), slot.key]
            self.pieces_of[slot.name] = tuple(sorted(set(found))) or (len(self.piece_names) - 1,)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key in module._buffers:
                name = f"{prefix}.{key}" if prefix else key
                self._tensors[name] = module._buffers, key
                self.buffer_piece.setdefault((id(module), key), used.get(name, [len(self.piece_names) - 1])[-1])

    def check(self, form: CallForm, call: Call) -> None:
        """Compare a call with the example.

        Raises:
            SplitError: keywords, plain values or shapes differ in a way that the graphs do not allow.
        """
        if form.fingerprint != self._form.fingerprint or _numbers(call) != self._numbers:
            raise SplitError(
                f"{type(self._model).__name__}: got a call with other keywords, nesting or plain values than the "
                f"example that it was exported with, allowed are calls like the example; make all calls alike"
            )
        if not self._model.training and not self._same:
            raise SplitError(
                f"{type(self._model).__name__}: called in evaluation mode, in which its exported graph uses its "
                f"modules in another order than in training; allowed are calls in training mode; evaluate a saved "
                "checkpoint"
            )
        self._graphs[self._model.training].check(call)

    def run(
        self, form: CallForm, call: Call, activations: tuple[torch.Tensor, ...], start: int, stop: int, holder: str
    ) -> tuple[torch.Tensor, ...] | Any:
        """Run pieces ``start`` to ``stop - 1``; see :meth:`.forward_route.ForwardRoute.run`."""
        training = self._model.training
        graph, key = self._graphs[training], (training, start, stop)
        if key not in self._parts:
            self._parts[key] = graph.cut.part(start, stop)
        part, attributes = self._parts[key]
        values = [self._value(graph, name, call) for name in attributes]
        outputs = part(*values, *graph.leaves(call), *map(_unpacked, activations))
        if stop == len(self.piece_names):
            return graph.output(outputs)
        return tuple(map(_packed, outputs))

    def _value(self, graph: _Exported, name: str, call: Call) -> Any:
        if name not in self._tensors:
            return graph.constant(name, call)
        store, key = self._tensors[name]
        return store[key]


class _Exported:
    """One graph."""

    def __init__(self, model: nn.Module, example: Call, training: bool, names: Sequence[str]) -> None:
        model.train(training)
        shapes = torch.export.ShapesCollection()
        for leaf in tree_leaves(example):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                shapes[leaf] = {dim: torch.export.Dim.AUTO for dim, size in enumerate(leaf.shape) if size > 1}
        args, kwargs = example
        try:
            dynamic = shapes.dynamic_shapes(model, args, kwargs)
            with torch.random.fork_rng(devices=[]):
                exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic)
            module = exported.module()
        except Exception as error:  # whatever export raises means the same to the user
            raise SplitError(
                f"{type(model).__name__}: torch.export cannot trace its forward: {_one_line(error)}; allowed is a "
                f"forward without branches on values of tensors; change it, or train without a vpipe block"
            ) from None
        graph = module.graph
        info: Any = graph._codegen.pytree_info  # type: ignore[attr-defined]
        self._in_spec, self._out_spec = info.in_spec, info.out_spec
        self._guards = getattr(module, "_guards_fn", None)
        self._module = module
        self._constants = {str(n.target): _attribute(module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        self._constants = {name: value for name, value in self._constants.items() if name not in set(names)}
        self.cut = CutGraph.of(graph, names)

    def leaves(self, call: Call) -> list[Any]:
        """Leaves of a call in the order of the graph's inputs."""
        args, kwargs = call
        order = self._in_spec.child(1).context or []
        return tree_flatten((args, {name: kwargs[name] for name in order}))[0]

    def check(self, call: Call) -> None:
        if self._guards is None:
            return
        try:
            self._guards(*self.leaves(call))
        except (AssertionError, RuntimeError) as error:
            raise SplitError(
                f"forward: got inputs that the exported graph does not allow: {_one_line(error)}; allowed are shapes "
                f"like the example's; pass batches of two or more samples in the example, and inputs of the same kind "
                "later"
            ) from None

    def constant(self, name: str, call: Call) -> Any:
        value = self._constants[name]
        device = next((leaf.device for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)), None)
        if isinstance(value, torch.Tensor) and device is not None and value.device != device:
            value = self._constants[name] = value.to(device)
        return value

    def output(self, leaves: Any) -> Any:
        return tree_unflatten(list(leaves) if isinstance(leaves, (tuple, list)) else [leaves], self._out_spec)


def _numbers(call: Call) -> list[str]:
    """Numbers in a call, which an exported graph has as constants."""
    return [repr(leaf) for leaf in tree_leaves(call) if isinstance(leaf, (int, float))]


def _attribute(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _packed(value: Any) -> torch.Tensor:
    """A number, such as a size, as a tensor whose shape it is; numbers need no look at a device then."""
    return value if isinstance(value, torch.Tensor) else torch.empty(0, int(value), dtype=torch.bool)


def _unpacked(value: torch.Tensor) -> Any:
    return value.shape[1] if value.dim() == 2 and value.shape[0] == 0 and value.dtype == torch.bool else value


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return " ".join(f"{lines[0] if lines else type(error).__name__} {where}".split())[:300]
