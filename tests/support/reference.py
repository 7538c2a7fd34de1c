"""An independent replay of the asynchronous semantics in one process: no engine, no schedule, no stashing.

Every stage keeps the full history of its weights. Micro-batch ``j`` runs through all stages at once,
stage ``s`` with the version that design rule ``max(0, j - W_s) // M`` names, and the mean gradient of
each batch updates the newest weights. What a stage knows of another one's updates is looked up in the
full record of all updates, by the delays of the design.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import toy
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

Place = tuple[int, str]  # position of a layer and name of a parameter in it
Weights = dict[str, torch.Tensor]


@dataclass
class Scaler:
    """A dynamic loss scale: halved at an overflow, doubled after ``window`` updates without one."""

    scale: float
    window: int = 1000
    minimum: float = 1.0
    dynamic: bool = True
    iteration: int = 0
    last_overflow: int = -1

    def hear(self, overflow: bool) -> None:
        if self.dynamic and overflow:
            self.scale = max(self.scale / 2, self.minimum)
            self.last_overflow = self.iteration
        elif self.dynamic:
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                self.scale *= 2
        self.iteration += 1


@dataclass
class Replay:
    """One training run.

    Attributes:
        counts, depths, micro_batches: layers and warm-up depth of every stage, and M.
        make_optimizer: for the parameters of one stage.
        vertical: micro-batches use stage 0's version everywhere.
        newest: break the rule on purpose: every micro-batch uses the newest weights.
        stash: False for backward passes with the newest weights, on activations of the version.
        recomputed: without a stash, layers at the end of every stage that run again in the backward pass.
        replicas: data-parallel replicas.
        zero: reduce gradients as ZeRO does, which divides them first.
        clip: largest gradient norm; 0 for no clipping.
        scope: whose norm: ``stage``, or ``delayed_global``.
        order: position in the data of every micro-batch; default: its own number.
        refills: micro-batches before which the pipeline was empty.
        left_over: micro-batches of an incomplete batch that went through before a refill, if any; they bring norms.
        dtype: of the weights in forward and backward passes and of gradients; the optimizer's are fp32.
        adds_in: type in which the gradients of a batch are added; default: their own.
        autocast: run forward passes under bf16 autocast.
        reduces_linear_in: type that gradients of linear layers are reduced in.
        scaler: of fp16 losses.
        layers: the model, in fp32.
        criterion: loss from output and labels.
        ties: groups of places that are one weight, the owner's first.
        micro_batch: inputs and labels by number and replica.
        staleness: mitigations, as in the ``"vpipe"`` block.
        moves: layers that go to a neighbouring stage: position, old stage, new stage, first micro-batch; in order.
        depth_changes: other depths, each with the first micro-batch that has them; the pipeline is emptied before it.
        device: where it computes; default: on a GPU if engines of tests do.
    """

    counts: Sequence[int]
    depths: Sequence[int]
    micro_batches: int
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    vertical: bool = False
    newest: bool = False
    stash: bool = True
    recomputed: Sequence[int] | None = None
    replicas: int = 1
    zero: bool = False
    clip: float = 0.0
    scope: str = "stage"
    order: Sequence[int] | None = None
    refills: Sequence[int] = (0,)
    left_over: dict[int, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    adds_in: torch.dtype | None = None
    autocast: bool = False
    reduces_linear_in: torch.dtype | None = None
    scaler: Scaler | None = None
    layers: Sequence[nn.Module] = field(default_factory=toy.built_layers)
    criterion: Callable[[Any, Any], torch.Tensor] = field(default_factory=nn.CrossEntropyLoss)
    ties: Sequence[Sequence[Place]] = ()
    micro_batch: Callable[[int, int], Any] = toy.micro_batch
    staleness: dict[str, Any] = field(default_factory=dict)
    moves: Sequence[tuple[int, int, int, int]] = ()
    depth_changes: Sequence[tuple[int, Sequence[int]]] = ()
    device: str = "cuda" if os.environ.get("DS_VPIPE_TEST_DEVICE") == "cuda" else "cpu"

    def __post_init__(self) -> None:
        self.on_time = self.staleness.get("synchronous_updates", 0)
        self.drained = self.drained_at_first()
        self.refills = (*self.refills, *(batch * self.micro_batches for batch in self.drained))
        for first, _ in self.depth_changes:  # what was ahead there has told its norms, as if training went on
            self.refills = (*self.refills, first)
            self.left_over = {**self.left_over, first: max(self.depths_at(first - 1))}
        self.layers = [layer.to(self.device, self.dtype).float() for layer in self.layers]
        self.stage_of = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        self.copies = {copy: owner for owner, *copies in self.ties for copy in copies}
        for copy, owner in self.copies.items():
            self.parameter(copy).data.copy_(self.parameter(owner).data)
        self.owned: list[list[nn.Parameter]] = [[] for _ in self.counts]
        for position, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                if (position, name) not in self.copies:
                    self.owned[self.stage_of[position]].append(parameter)
        self.optimizers = [self.make_optimizer(parameters) for parameters in self.owned]
        if "nadam" in self.staleness:
            self.optimizers = [self.nadam(o) if self.delay(s) else o for s, o in enumerate(self.optimizers)]
        self.history = [self.snapshot()]
        self.losses: list[float] = []
        self.norms: list[list[float]] = []
        self.overflows: list[list[bool]] = []
        self.scales: list[float] = []
        self.heard = 0

    def parameter(self, place: Place) -> nn.Parameter:
        return self.layers[place[0]].get_parameter(place[1])

    def drained_at_first(self) -> list[int]:
        """Batches before which the pipeline is empty: all of the synchronous ones, then ever fewer."""
        batches, warmup = list(range(self.on_time + 1)), self.staleness.get("delay_warmup_updates", 0)
        most = max(self.delay(stage) for stage in range(len(self.counts)))
        while warmup and most and batches[-1] - self.on_time < warmup:
            share = Fraction(batches[-1] - self.on_time, warmup)
            batches.append(batches[-1] + 2 + math.floor(share * most))
        return batches

    def depths_at(self, j: int) -> Sequence[int]:
        return next((depths for first, depths in reversed(self.depth_changes) if first <= j), self.depths)

    def delay(self, stage: int, batch: int = 0) -> int:
        depths = self.depths_at(batch * self.micro_batches)
        return math.ceil(depths[0 if self.vertical else stage] / self.micro_batches)

    def nadam(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        group = optimizer.param_groups[0]
        options = {key: group[key] for key in ("lr", "eps", "weight_decay")}
        return torch.optim.NAdam(group["params"], betas=(0.99, 0.999), decoupled_weight_decay=True, **options)

    def snapshot(self) -> list[Weights]:
        return [{n: p.detach().to(self.dtype, copy=True) for n, p in layer.named_parameters()} for layer in self.layers]

    def data(self, j: int, replica: int) -> Any:
        """Inputs and labels of a micro-batch, where they are used."""
        found = self.micro_batch(j if self.order is None else self.order[j], replica)
        return tree_map_only(torch.Tensor, lambda one: one.to(self.device), found)

    def refill(self, micro_batch: int) -> int:
        return max(refill for refill in self.refills if refill <= micro_batch)

    def known(self, batch: int, stage: int, other: int) -> int:
        """How many updates of ``other`` a stage knows of in its update ``batch``."""
        depths = self.depths_at(batch * self.micro_batches)
        delay = math.ceil((depths[other] - depths[stage] + 1) / self.micro_batches)
        refill = self.refill((batch + 1) * self.micro_batches - 1)
        return max(refill // self.micro_batches, batch + 1 - delay)

    def norm_known(self, batch: int, stage: int, other: int) -> int:
        """How many of the other's updates have told their norm; during a drain no earlier stage's do any more."""
        if other > stage:
            return batch + 1
        end = min((drain for drain in self.refills if drain > batch * self.micro_batches), default=None)
        known = self.known(batch, stage, other)
        if end is None:
            return known
        told = (end + self.left_over.get(end, 0) - 1 - self.depths_at(end - 1)[other]) // self.micro_batches
        return max(self.refill(batch * self.micro_batches) // self.micro_batches, min(known, told))

    def run(self, batches: int) -> Replay:
        for batch in range(batches):
            self.train(batch)
        return self

    def train(self, batch: int) -> None:
        scale = 1.0 if self.scaler is None else self.scaler.scale
        self.scales.append(scale)
        totals = [0.0] * self.replicas
        gradients: list[dict[Place, torch.Tensor]] = [{} for _ in range(self.replicas)]
        for j in range(batch * self.micro_batches, (batch + 1) * self.micro_batches):
            for replica in range(self.replicas):
                loss, leaves = (self.forward if self.stash else self.unstashed)(j, batch, replica)
                totals[replica] += float(loss.detach())
                if self.stash:
                    self.scaled(loss).backward()
                for place, weight in leaves.items():
                    if weight.grad is not None:
                        before, found = gradients[replica].get(place), weight.grad.to(self.adds_in or self.dtype)
                        gradients[replica][place] = found if before is None else before + found
        self.losses.append(sum(totals) / self.replicas / self.micro_batches)
        for copy, owner in self.copies.items():
            for of_replica in gradients:
                if copy in of_replica:
                    moved = of_replica.pop(copy)
                    of_replica[owner] = of_replica[owner] + moved if owner in of_replica else moved
        for position, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                place = (position, name)
                found = [of_replica[place] for of_replica in gradients if place in of_replica]
                in_linear = type(layer.get_submodule(name.rpartition(".")[0])) is nn.Linear
                dtype = self.reduces_linear_in if in_linear else None
                parameter.grad = self.mean_over_replicas(found, dtype) if found else None
        self.update(batch, scale)
        self.history.append(self.snapshot())
        self.refresh_copies(batch)

    def mean_over_replicas(self, found: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
        """In the type of the gradients, where it matters what is done first: a sum may overflow."""
        gradients = torch.stack([gradient.to(dtype or gradient.dtype) for gradient in found])
        if self.zero:
            return (gradients / self.replicas).sum(0).float()
        return (gradients.sum(0) / self.replicas).float()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if self.scaler is None else self.scaler.scale
        return loss / self.micro_batches * scale if scale == 1.0 else loss.float() * scale / self.micro_batches

    def unstashed(self, j: int, batch: int, replica: int) -> tuple[torch.Tensor, dict[Place, torch.Tensor]]:
        """Both passes, part by part, each part with a graph of its own.

        The backward pass of a part finds new values in the weights, or runs the part again with them.
        """
        value, labels = self.data(j, replica)
        parts = []
        for positions, again in self.parts():
            received = value.detach().requires_grad_(value.is_floating_point())
            value, leaves = self.run_part(positions, received, lambda at: self.version(j, at))
            parts.append((positions, again, received, value, leaves))
        received = value.detach().requires_grad_()
        loss = self.criterion(received, labels)
        self.scaled(loss).backward()
        found: dict[Place, torch.Tensor] = {}
        for positions, again, before, after, leaves in reversed(parts):
            gradient, received = received.grad, before
            if again:
                received = before.detach().requires_grad_(before.is_floating_point())
                after, leaves = self.run_part(positions, received, lambda at: batch)
            for (position, name), weight in leaves.items():
                weight.data.copy_(self.history[batch][position][name])
            after.backward(gradient)
            found |= leaves
        return loss, found

    def parts(self) -> list[tuple[range, bool]]:
        """Positions of the layers of every stage that run once, and of those that run again."""
        found, start = [], 0
        for stage, count in enumerate(self.counts):
            again = self.recomputed[stage] if self.recomputed else 0
            cut, stop = start + count - again, start + count
            found += [(range(start, cut), False), (range(cut, stop), True)]
            start = stop
        return [(positions, again) for positions, again in found if positions]

    def run_part(
        self, positions: range, value: torch.Tensor, version: Callable[[int], int]
    ) -> tuple[torch.Tensor, dict[Place, torch.Tensor]]:
        leaves: dict[Place, torch.Tensor] = {}
        autocast = torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        for position in positions:
            held = self.history[version(position)][position]
            weights = {n: w.clone().requires_grad_() for n, w in held.items()}
            leaves.update({(position, n): w for n, w in weights.items()})
            with autocast:
                value = functional_call(self.layers[position], weights, (value,))
        return value, leaves

    def version(self, j: int, position: int) -> int:
        return max(self.refill(j), j - self.lag(position, j)) // self.micro_batches

    def forward(self, j: int, batch: int, replica: int) -> tuple[torch.Tensor, dict[Place, torch.Tensor]]:
        value, labels = self.data(j, replica)
        everywhere = range(len(self.layers))
        value, leaves = self.run_part(everywhere, value, lambda at: batch if self.newest else self.version(j, at))
        return self.criterion(value, labels), leaves

    def lag(self, position: int, j: int) -> int:
        """By how many micro-batches the version that ``j`` uses is behind.

        A layer that has moved to the next stage is as late as before until the old stage's last gradient has come
        there with an activation, or in a drain.
        """
        depths = self.depths_at(j)
        lag = depths[self.stage_of[position]]
        for layer, old, new, first in self.moves:
            if layer == position and j >= first:
                on_its_way = new > old and j < first + depths[old] and self.refill(j) < first
                lag = depths[old if on_its_way else new]
        return depths[0] if self.vertical else lag

    def update(self, batch: int, scale: float) -> None:
        overflows, norms = [], []
        for parameters in self.owned:
            found = [p.grad for p in parameters if p.grad is not None]
            overflows.append(any(not bool(torch.isfinite(g).all()) for g in found))
            norm = float(torch.stack([g.norm() for g in found]).norm()) / scale if found else 0.0
            norms.append(0.0 if overflows[-1] else norm)
        self.overflows.append(overflows)
        self.norms.append(norms)
        for stage, optimizer in enumerate(self.optimizers):
            if overflows[stage]:
                continue
            norm = norms[stage]
            if self.scope == "delayed_global":
                known = [self.norm_known(batch, stage, other) for other in range(len(self.counts))]
                others = [self.norms[k - 1][r] for r, k in enumerate(known) if r != stage and k > 0]
                norm = math.sqrt(norm**2 + sum(other**2 for other in others))
            divisor = scale * max(1.0, (norm + 1e-6) / self.clip) if self.clip else scale
            for parameter in self.owned[stage]:
                if parameter.grad is not None and divisor != 1.0:
                    parameter.grad *= 1.0 / divisor
            optimizer.step()
        if self.scaler is not None:
            last = len(self.counts) - 1
            count = sum(
                sum(self.overflows[t][r] for t in range(self.known(batch, last, r) if r != last else batch + 1))
                for r in range(last + 1)
            )
            self.scaler.hear(count > self.heard)
            self.heard = count

    def refresh_copies(self, batch: int) -> None:
        """Copies of tied weights follow their owners: with a delay, at a drain without."""
        drained = (batch + 1) * self.micro_batches in self.refills
        for copy, owner in self.copies.items():
            version = batch + 1
            if not drained:
                version = self.known(batch, self.stage_of[copy[0]], self.stage_of[owner[0]])
            if self.stage_of[copy[0]] == self.stage_of[owner[0]]:
                version = batch + 1
            self.history[batch + 1][copy[0]][copy[1]] = self.history[version][owner[0]][owner[1]].clone()

    def parameters(self, version: int = -1) -> Weights:
        """Weights by layer number and name."""
        return {
            f"{position}.{name}": value.float().cpu()
            for position, weights in enumerate(self.history[version])
            for name, value in weights.items()
        }


def replay(
    counts: Sequence[int],
    depths: Sequence[int],
    micro_batches: int,
    batches: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    **options: Any,
) -> tuple[Weights, list[float]]:
    """Train the toy model; returns final parameters by layer number and name, and the mean loss per batch."""
    run = Replay(counts, depths, micro_batches, make_optimizer, **options).run(batches)
    return run.parameters(), run.losses
