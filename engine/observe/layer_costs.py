"""Measured costs of one stage's layers, in the planner's form."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.modules.recompute import layer_numbers
from ds_vpipe.engine.observe.layer_probe import LayerProbe, Sample
from ds_vpipe.engine.stage import Stage
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.meters import Roofline
from ds_vpipe.planning.profiler import common_dtype, copy_of, parameters_of, profile_layers, tensors_of, tree_bytes


class LayerCosts:
    """Costs of one stage's layers, from what a probe has measured; activations count if they are ``sized``."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, probe: LayerProbe, sized: bool) -> None:
        self._engine, self._stage, self._probe, self._sized = engine, stage, probe, sized
        self.updates: list[float] = []  # seconds of the optimizer's steps since the last look
        self._sizes: dict[Any, ModelProfile] = {}
        self._largest: Sample | None = None  # since :meth:`start_over`, which is to fit the memory

    def start_over(self) -> None:
        """Forget what was measured with other layers."""
        self.updates, self._largest = [], None

    def profile(self) -> ModelProfile | None:
        """Profile of this stage's layers, the medians of all samples; None without any."""
        stage, module, probe = self._stage, self._stage.module, self._probe
        samples = [sample for sample in probe.samples if probe.is_done(sample)]
        if not samples:
            return None
        numbers, layers = layer_numbers(module), list[LayerProfile]()
        known = filter(None, (self._largest, *samples))
        largest = self._largest = max(known, key=lambda sample: tree_bytes(sample.inputs))
        sizes = self._bytes(largest)
        weights = [parameters_of(layer) for layer in module.forward_funcs]
        trained = [tree_bytes([p for p in found if p.requires_grad]) for found in weights]
        # In bsp an update also waits for other stages, and on a device it is only queued.
        timed = stage.asynchronous and stage.device.type == "cpu" and self.updates and sum(trained)
        update_s = median(self.updates) / stage.pipeline.micro_batches if timed else 0.0
        for position, layer in enumerate(module.forward_funcs):
            is_last = stage.is_last and position == len(numbers) - 1
            seconds = [probe.seconds(sample, position, is_last) for sample in samples]
            costs = LayerProfile(
                name=type(layer).__name__,
                forward_s=median(forward for forward, _ in seconds),
                backward_s=median(backward for _, backward in seconds),
                parameter_bytes=tree_bytes(weights[position]),
                activation_bytes=0,
                boundary_bytes=largest.output_bytes[position],
                frozen_bytes=tree_bytes(weights[position]) - trained[position],
                largest_weight_bytes=max((tree_bytes(p) for p in weights[position] if p.requires_grad), default=0),
            )
            if sizes is not None:
                times = {name: getattr(costs, name) for name in ("forward_s", "backward_s", "boundary_bytes")}
                costs = dataclasses.replace(sizes.layers[position], **times)
            share = update_s * trained[position] / sum(trained) if timed else 0.0
            layers.append(dataclasses.replace(costs, backward_s=costs.backward_s + share))
        return ModelProfile(
            layers=tuple(layers),
            input_bytes=tree_bytes(largest.inputs),
            micro_batch_size=self._engine.train_micro_batch_size_per_gpu(),
            device=stage.device.type,
            dtype=common_dtype(parameter.dtype for found in weights for parameter in found),
            source="measured",
        )

    def _bytes(self, sample: Sample) -> ModelProfile | None:
        """Bytes of this stage's layers for such inputs, computed once; None where memory has no limit."""
        if not self._sized:
            return None
        stage, module = self._stage, self._stage.module
        shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in tensors_of((sample.inputs, sample.labels))]
        frozen = tuple(p.requires_grad for layer in module.forward_funcs for p in parameters_of(layer))
        key = (module._local_start, module._local_stop, *shapes, frozen)
        if key not in self._sizes:
            # Another loss is the script's own, and may keep what it is given.
            score = module.loss_fn if stage.is_last and isinstance(module.loss_fn, torch.nn.Module) else None
            with stage.random_states.kept(stage.device):
                self._sizes[key] = self._counted(sample, score)
        return self._sizes[key]

    def _counted(self, sample: Sample, score: Any) -> ModelProfile:
        layers = list(self._stage.module.forward_funcs)
        count = partial(profile_layers, inputs=sample.inputs, labels=sample.labels)
        with suppress(Exception):  # of any kind, from a layer or a loss that looks at values
            return count(layers, loss_fn=score, roofline=Roofline())
        copies, copied = [_Copied(layer) for layer in layers], None if score is None else _Copied(score)
        try:
            return count(copies, loss_fn=copied, device=self._stage.device, micro_batches=1, warm_up=0)
        except Exception:
            if score is None:
                raise
            return self._counted(sample, None)  # it does not take what is made up, or cannot be copied

    def passes(self) -> list[tuple[float, float]]:
        """Seconds of the stage's passes in every measured micro-batch, with their share of an update."""
        timed = self.updates and self._stage.device.type == "cpu"
        update_s = median(self.updates) / self._stage.pipeline.micro_batches if timed else 0.0
        found = (self._probe.passes(sample) for sample in self._probe.samples if self._probe.is_done(sample))
        return [(forward, backward + update_s) for forward, backward in found]


@dataclasses.dataclass(frozen=True)
class _Copied:
    """Specification of a layer's copy: micro-batches in flight use the layer's own buffers."""

    layer: Any

    def build(self) -> Any:
        """The copy, of which no more than one exists at a time."""
        return copy_of(self.layer, meta=False)
