"""An asynchronous pipeline's training in one process: the same updates without processes, messages or a schedule.

What an asynchronous pipeline computes depends on which version of its weights each stage uses for each micro-batch,
and that is a formula: stage s runs micro-batch j with version max(0, j - W_s) // M
(:func:`ds_vpipe.schedules.one_f_one_b.version_used`). So the micro-batches can run one after the other through all
stages at once, each stage's parameters pointed to the version that is due. It costs what training in one process
costs, and a copy of every stage's weights per update that it is late by. Depth and delay can then be studied without
a cluster: K, W, M, mitigations of staleness, clipping and learning-rate schedule are those of the engine, and so are
the updates. K = 1 is synchronous training.

Left out: dropout draws other numbers than the engine's ranks do; weights tied across stages; data-parallel replicas;
reduced precision; recomputation, which changes what ``weight_sync: "none"`` computes and nothing else.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import nn

from ds_vpipe.config.staleness import Staleness
from ds_vpipe.schedules.one_f_one_b import default_depths, update_delay, version_used
from ds_vpipe.schedules.pipeline import WeightSync
from ds_vpipe.staleness.delay_warmup import DelayWarmup
from ds_vpipe.staleness.nadam import use_nadam

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ReplayedStage:
    """Weight versions of one stage, and its optimizer; see :class:`Replay`.

    ``delay`` is the number of updates between the version that a batch's first micro-batch uses and the newest.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make_optimizer: MakeOptimizer,
        delay: int,
        staleness: Staleness | None,
        clip: float,
        factor: Callable[[int], float] | None,
        stash: bool,
    ) -> None:
        self.parameters = parameters
        # No optimizer takes an empty list, as of a stage of activations alone.
        self.optimizer = make_optimizer(parameters or [nn.Parameter(torch.empty(0, device="cpu"))])
        self.updates = 0
        self._delay = delay
        self._clip = clip
        self._factor = factor
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        use_nadam(self.optimizer, staleness, delay)
        self._newest = [parameter.data for parameter in parameters]
        self._versions: deque[list[torch.Tensor]] = deque(maxlen=delay + 1)  # the last is the newest
        self._versions.append(self._copy())
        # Autograd keeps views of weights too, which see what is written here between a forward and a backward pass.
        self._one_place = None
        if parameters and delay and not stash:
            self._one_place = [torch.empty_like(value) for value in self._newest]

    def point_to(self, version: int) -> None:
        """Make the parameters refer to a version.

        Raises:
            IndexError: it is too old to be kept.
        """
        weights = self._versions[version - self.updates - 1]
        if self._one_place is not None:
            torch._foreach_copy_(self._one_place, weights)
        self._refer_to(self._one_place or weights)

    def begin_backward(self) -> None:
        """Without a stash, put the newest values where the forward pass has found its version."""
        if self._one_place is not None:
            torch._foreach_copy_(self._one_place, self._newest)

    def point_to_newest(self) -> None:
        """Make the parameters refer to the weights that updates go to."""
        self._refer_to(self._newest)

    def update(self) -> None:
        """Update the newest weights from the parameters' gradients, and clear these."""
        self.point_to_newest()
        for parameter in self.parameters:
            if parameter.grad is None:  # as a reduction over replicas leaves it
                parameter.grad = torch.zeros_like(parameter)
        self._clip_gradients()
        if self._factor is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._factor(self.updates + 1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        self._versions.append(self._copy())

    def _copy(self) -> list[torch.Tensor]:
        """The newest weights as a version, copied if a later update may find it in use."""
        return [value.clone() for value in self._newest] if self._delay else self._newest

    def _clip_gradients(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._clip <= 0 or not gradients:
            return
        norm = torch.stack([gradient.norm() for gradient in gradients]).pow(2.0).sum().pow(0.5)
        torch._foreach_mul_(gradients, torch.clamp(self._clip / (norm + 1e-6), max=1.0))

    def _refer_to(self, weights: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.data = value


class Replay:
    """A pipeline of K stages, replayed in this process.

    Args:
        layers: the model, in order; trained in place.
        partition: layers of each stage; ``[len(layers)]`` trains synchronously.
        micro_batches: micro-batches per batch, M.
        make_optimizer: a base optimizer for the trainable parameters of one stage.
        loss_fn: a scalar from output and labels.
        depths: W of every stage, default K-1-s.
        weight_sync: as in the ``"vpipe"`` block.
        staleness: mitigations, as the ``"staleness"`` object of a ``"vpipe"`` block or made of one.
        clip: largest norm of one stage's gradient, as ``gradient_clipping``; 0 for no limit.
        factor: of the learning rate in an update, numbered from 1, such as
            :meth:`ds_vpipe.lr_policies.LRPolicy.factor`.

    Raises:
        ValueError: the partition does not fit, or stages share a weight.
        VPipeConfigError: NAdam's direction for an optimizer that has no moments.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        partition: Sequence[int],
        micro_batches: int,
        make_optimizer: MakeOptimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        depths: Sequence[int] | None = None,
        weight_sync: WeightSync = "stash",
        staleness: Staleness | dict[str, Any] | None = None,
        clip: float = 0.0,
        factor: Callable[[int], float] | None = None,
    ) -> None:
        if sum(partition) != len(layers) or min(partition, default=0) < 1:
            raise ValueError(
                f"partition: got {list(partition)}, allowed are counts > 0 that sum to the {len(layers)} layers"
            )
        self.layers = nn.ModuleList(layers)
        self.micro_batches = micro_batches
        self.loss_fn = loss_fn
        self.batches = 0  # trained so far
        depths = default_depths(len(partition)) if depths is None else depths
        if len(depths) != len(partition):
            raise ValueError(f"depths: got {list(depths)}, allowed is one of each of the {len(partition)} stages")
        self._depths = [depths[0] if weight_sync == "vertical" else depth for depth in depths]
        settings = Staleness.model_validate(staleness) if isinstance(staleness, dict) else staleness
        delays = [update_delay(depth, micro_batches) for depth in self._depths]
        self._warmup = DelayWarmup.of(settings, max(delays))
        parts = [list(layers[start:stop]) for start, stop in pairwise(accumulate(partition, initial=0))]
        owned = [
            list(dict.fromkeys(p for layer in part for p in layer.parameters() if p.requires_grad)) for part in parts
        ]
        if len({id(p) for members in owned for p in members}) != sum(map(len, owned)):
            raise ValueError("layers: got a weight that two stages share, allowed are stages without; untie it")
        self.stages = [
            ReplayedStage(members, make_optimizer, delay, settings, clip, factor, weight_sync != "none")
            for members, delay in zip(owned, delays, strict=True)
        ]

    def train_batch(self, data: Iterator[tuple[Any, Any]]) -> float:
        """Train one batch and return its mean loss, as ``engine.train_batch()`` does.

        Args:
            data: yields ``(inputs, labels)``; M of them are read.

        Raises:
            StopIteration: there are fewer; what there was is not trained.
        """
        items = list(islice(data, self.micro_batches))
        if len(items) < self.micro_batches:
            raise StopIteration
        first, total = self.batches * self.micro_batches, 0.0
        filled_from = self._warmup.drain_interval(self.batches)[0] * self.micro_batches
        for micro_batch, (inputs, labels) in enumerate(items, first):
            for stage, depth in zip(self.stages, self._depths, strict=True):
                stage.point_to(version_used(micro_batch, depth, self.micro_batches, filled_from))
            loss = self.loss_fn(self._forward(inputs), labels)
            for stage in self.stages:
                stage.begin_backward()
            (loss / self.micro_batches).backward()
            total += float(loss.detach())
        for stage in self.stages:
            stage.update()
        self.batches += 1
        return total / self.micro_batches

    @torch.no_grad()
    def evaluate(self, data: Iterable[tuple[Any, Any]]) -> float:
        """Mean loss of ``data`` under the newest weights, with the layers in evaluation mode."""
        modes = {part: part.training for part in self.layers.modules()}
        for stage in self.stages:
            stage.point_to_newest()
        self.layers.eval()
        try:
            losses = [float(self.loss_fn(self._forward(inputs), labels)) for inputs, labels in data]
        finally:
            for part, mode in modes.items():
                part.training = mode
        return sum(losses) / len(losses)

    def _forward(self, value: Any) -> Any:
        for layer in self.layers:
            value = layer(value)
        return value
