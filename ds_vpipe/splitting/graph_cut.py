"""An exported graph as a list of pieces that run one after the other.

A piece begins where the graph first uses the parameters of another module. Nodes that depend on the call's arguments
alone are no part of any piece: whoever needs them computes them. Cuts that more than one tensor would have to
cross, inside residual connections for example, are left out as long as enough pieces remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Cut:
    """A place between two nodes.

    Attributes:
        position: of the first node behind it among the nodes that belong to pieces.
        module: whose parameters that node is the first to use.
        visit: how often the graph has begun with that module's before.
    """

    position: int
    module: str
    visit: int

    @property
    def label(self) -> tuple[str, int]:
        """The same in the graphs for training and for evaluation."""
        return self.module, self.visit


@dataclass
class CutGraph:
    """A graph, its nodes in pieces, and what crosses from piece to piece.

    Attributes:
        graph: of an exported module, with parameters as ``get_attr`` nodes.
        nodes: that belong to pieces, in order.
        cuts: between the pieces.
        first: module that the first piece begins with.
    """

    graph: fx.Graph
    nodes: list[fx.Node] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    first: str = "begin"

    @classmethod
    def of(cls, graph: fx.Graph, parameters: Sequence[str]) -> CutGraph:
        """The graph with all cuts that are possible.

        Args:
            graph: to be cut.
            parameters: names of those ``get_attr`` targets that are parameters.
        """
        made = cls(graph)
        names = set(parameters)
        free = _free_nodes(graph)
        made.nodes = [node for node in graph.nodes if node not in free and node.op in ("call_function", "call_method")]
        owner, visits = None, dict[str, int]()
        for position, node in enumerate(made.nodes):
            used = [str(i.target) for i in node.all_input_nodes if i.op == "get_attr" and i.target in names]
            if not used or used[0].rpartition(".")[0] == owner:
                continue
            owner = used[0].rpartition(".")[0]
            if position and made._movable(position):
                made.cuts.append(Cut(position, owner, visits.get(owner, 0)))
            elif not made.cuts and not position:
                made.first = owner
            visits[owner] = visits.get(owner, 0) + 1
        return made

    def _movable(self, position: int) -> bool:
        """Whether no tensor from before is written to behind, which its other names there would not see."""
        before = set(self.nodes[:position])
        return not any(node in before for later in self.nodes[position:] for node in _written(later))

    def live(self, position: int) -> list[fx.Node]:
        """Nodes whose values cross the place before ``position``."""
        behind = set(self.nodes[position:])
        output = next(node for node in self.graph.nodes if node.op == "output")
        behind.add(output)
        return [node for node in self.nodes[:position] if any(user in behind for user in node.users)]

    def thin(self, pieces: int) -> None:
        """Leave cuts out that more than the least number of tensors cross, if ``pieces`` remain without them."""
        counts = [len(self.live(cut.position)) for cut in self.cuts]
        for least in sorted(set(counts)):
            kept = [cut for cut, count in zip(self.cuts, counts, strict=True) if count <= least]
            if len(kept) + 1 >= pieces:
                self.cuts = kept
                return

    def keep(self, labels: Sequence[tuple[str, int]]) -> bool:
        """Leave all other cuts out; False if one of these is not there."""
        self.cuts = [cut for cut in self.cuts if cut.label in set(labels)]
        return [cut.label for cut in self.cuts] == list(labels)

    @property
    def names(self) -> list[str]:
        """Of the pieces: the modules that they begin with."""
        return [self.first, *(cut.module for cut in self.cuts)]

    def bounds(self) -> list[int]:
        """Positions where pieces begin, and the end."""
        return [0, *(cut.position for cut in self.cuts), len(self.nodes)]

    def used_attributes(self, start: int, stop: int) -> list[str]:
        """``get_attr`` targets that pieces ``start`` to ``stop - 1`` use."""
        bounds = self.bounds()
        needed = self._needed(self.nodes[bounds[start] : bounds[stop]], stop == len(bounds) - 1)
        return list(dict.fromkeys(str(node.target) for node in needed if node.op == "get_attr"))

    def _needed(self, nodes: Sequence[fx.Node], last: bool) -> list[fx.Node]:
        """Those nodes with what they need that no piece has, in the graph's order."""
        pieces, wanted = set(self.nodes), set(nodes)
        waiting = [i for node in nodes for i in node.all_input_nodes]
        if last:
            waiting += next(node for node in self.graph.nodes if node.op == "output").all_input_nodes
        while waiting:
            node = waiting.pop()
            if node not in wanted and node not in pieces:
                wanted.add(node)
                waiting += node.all_input_nodes
        return [node for node in self.graph.nodes if node in wanted]

    def part(self, start: int, stop: int) -> tuple[fx.GraphModule, list[str]]:
        """Pieces ``start`` to ``stop - 1`` as a function, and the attributes that it takes first.

        It takes values of those attributes, then the call's leaves, then what piece ``start - 1`` hands on. It returns
        what piece ``stop - 1`` hands on, or after the last piece the leaves of the model's output.
        """
        bounds = self.bounds()
        last = stop == len(bounds) - 1
        inside = self.nodes[bounds[start] : bounds[stop]]
        needed = self._needed(inside, last)
        new, known = fx.Graph(), dict[fx.Node, fx.Node]()
        attributes = self.used_attributes(start, stop)
        values = {name: new.placeholder(f"attribute_{index}") for index, name in enumerate(attributes)}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known[node] = new.placeholder(f"leaf_{node.name}")
        for index, node in enumerate(self.live(bounds[start]) if start else ()):
            known[node] = new.placeholder(f"activation_{index}")
        for node in needed:
            if node.op == "get_attr":
                known[node] = values[str(node.target)]
            elif node.op != "placeholder":
                known[node] = new.node_copy(node, known.__getitem__)
        if last:
            output = next(node for node in self.graph.nodes if node.op == "output")
            new.output(fx.map_arg(output.args[0], known.__getitem__))
        else:
            new.output(tuple(known[node] for node in self.live(bounds[stop])))
        return fx.GraphModule(torch.nn.Module(), new), attributes


def _free_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the call's leaves and on constants alone, change nothing and draw no random numbers."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            free.add(node)
        elif node.op == "call_function" and not _is_special(node):
            inputs = node.all_input_nodes
            if all(i in free for i in inputs):
                free.add(node)
    return free


def _is_special(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags or "dropout" in str(node.target)
    return random or (schema is not None and schema.is_mutable)


def _written(node: fx.Node) -> list[fx.Node]:
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node) and value.op != "get_attr":
                found.append(value)
    return found
