"""Pipeline modules whose layers are split over the stages as the ``"vpipe"`` block says.

:class:`VPipeModule` is built with the right split from the start. :func:`repartition` moves layers of
a ``PipelineModule`` that a script has built with other bounds; weights go with their layers, so the
model is the same before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from ds_vpipe.engine.modules.interleaved import InterleavedMixin, interleave
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.partition import bounds, resolve_partition
from ds_vpipe.splitting.stage_model import Piece


class VPipeModule(PipelineModule):
    """A ``PipelineModule`` whose ``partition_method`` may also be a list of layer counts, one per stage.

    Raises:
        VPipeConfigError: the counts do not fit the layers or the stages.
    """

    def _partition_layers(self, method: str | Sequence[int] = "uniform") -> None:
        self.parts = bounds(stage_counts(self, method))
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _build(self) -> None:
        """As DeepSpeed's, which builds a tied module once per stage; here tied layers may be of several classes."""
        position = len(self.forward_funcs)
        super()._build()
        for index in range(self._local_start, self._local_stop):
            spec = self._layer_specs[index]
            if _is_tied(spec) and spec.forward_fn is None:
                first = self.tied_modules[spec.key]
                if type(first) is not spec.typename:
                    self._add_tied(index, position, first)
            position += 1

    def _add_tied(self, index: int, position: int, first: torch.nn.Module) -> None:
        spec = self._layer_specs[index]
        layer = spec.build()
        given = spec.tied_weight_attr
        for name in [given] if isinstance(given, str) else given:
            holder, _, key = name.rpartition(".")
            layer.get_submodule(holder).register_parameter(key, first.get_parameter(name))
        for parameter in layer.parameters():
            parameter.ds_pipe_replicated = False
        self.forward_funcs[position] = layer
        self.fwd_map[str(index)] = position
        self.add_module(str(index), layer)


@runtime_checkable
class Resplittable(Protocol):
    """A module that still has all its layers here and can be split anew without moving any."""

    def split_anew(self, counts: Sequence[int], virtual_stages: int = 1) -> bool:
        """Give every part the number of layers in ``counts``; False if it was so already."""


def stage_counts(module: PipelineModule, method: str | Sequence[int], virtual_stages: int = 1) -> tuple[int, ...]:
    """Layers per part by ``method``, as in the ``"vpipe"`` block; see :func:`ds_vpipe.partition.resolve_partition`.

    There are ``virtual_stages`` parts on every stage.
    """
    return resolve_partition(
        method,
        lambda: module._count_layer_params(),
        [_type_name(spec) for spec in module._layer_specs],
        module.num_stages * virtual_stages,
    )


def _type_name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return str(spec.typename.__name__)
    if isinstance(spec, Piece):
        return spec.kind
    return type(spec).__name__ if isinstance(spec, torch.nn.Module) else str(getattr(spec, "__name__", type(spec)))


def repartition(module: PipelineModule, counts: Sequence[int], virtual_stages: int = 1) -> bool:
    """Give every part the number of layers in ``counts``; all ranks call this. False if it was so already.

    Stage ``i`` of K holds parts ``i, i + K, ...``. Layers keep their weights: those that change hands are built from
    their specification and then receive the state of the layer they replace.

    Raises:
        VPipeConfigError: a layer was changed after it was built, so that it cannot be built again.
    """
    if isinstance(module, InterleavedMixin):
        raise VPipeConfigError(
            "model: got a PipelineModule that an engine has split into virtual stages before; allowed is a new one; "
            "build the module again"
        )
    if isinstance(module, Resplittable):
        return module.split_anew(counts, virtual_stages)
    old, new = list(module.parts), bounds(counts)
    if old == new and virtual_stages == 1:
        return False
    stage, stages = module.stage_id, module.num_stages
    built = dict(zip(range(old[stage], old[stage + 1]), module.forward_funcs, strict=True))
    for name in list(module._modules):
        if name in module.fwd_map:
            del module._modules[name]
    tied = dict(module.tied_modules.items())
    module.forward_funcs, module.fwd_map = [], {}
    module.tied_modules, module.tied_weight_attrs = torch.nn.ModuleDict(), {}
    module.parts = new
    specs = list(module._layer_specs)
    numbers, ends = list[int](), list[int]()
    for part in range(stage, len(counts), stages):
        module._set_bounds(start=new[part], stop=new[part + 1])
        for index in range(new[part], new[part + 1]):
            if index in built and isinstance(built[index], torch.nn.Module) and not _is_tied(specs[index]):
                module._layer_specs[index] = built[index]  # a module in place of its specification is used as it is
            numbers.append(index)
        module._build()
        ends.append(len(module.forward_funcs))
    module._layer_specs[:] = specs
    module.to(get_accelerator().device_name(module.local_rank))
    now = dict(zip(numbers, module.forward_funcs, strict=True))
    owners = [_owner(old, index) for index in range(len(specs))], [_owner(new, i) % stages for i in range(len(specs))]
    _check_layers(module, built, tied, now, owners)
    _move_states(module, built, tied, now, owners)
    complete(module, virtual_stages, numbers, ends)
    return True


def complete(module: Any, virtual_stages: int, numbers: list[int], ends: list[int]) -> None:
    """What a pipeline module does once its layers are there: parts, tied weights, activation checkpointing."""
    if virtual_stages > 1:
        interleave(module, numbers, ends)
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()
    if module.activation_checkpoint_interval > 0:
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()


def _is_tied(spec: Any) -> bool:
    return isinstance(spec, TiedLayerSpec)


def _module_of(spec: Any, layer: Any, tied: Any) -> Any:
    """The module of a layer; a tied layer with a ``forward_fn`` is a function of the tied module."""
    return tied[spec.key] if _is_tied(spec) and not isinstance(layer, torch.nn.Module) else layer


def _owner(parts: Sequence[int], index: int) -> int:
    return next(stage for stage in range(len(parts) - 1) if parts[stage] <= index < parts[stage + 1])


def _check_layers(
    module: PipelineModule,
    built: dict[int, Any],
    tied: dict[str, torch.nn.Module],
    layers: dict[int, Any],
    owners: tuple[list[int], list[int]],
) -> None:
    """Compare layers as they were and as they are built again, on all ranks alike; what was frozen stays frozen."""
    before, after, now = {}, {}, {}
    for index, spec in enumerate(module._layer_specs):
        if owners[0][index] == module.stage_id:
            before[index] = _describe(_module_of(spec, built[index], tied))
        if owners[1][index] == module.stage_id:
            now[index] = _module_of(spec, layers[index], module.tied_modules)
            after[index] = _describe(now[index])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (before, after))
    for known_before, known_after in everywhere:
        before.update(known_before)
        after.update(known_after)
    for index, spec in enumerate(module._layer_specs):
        if before[index][0] != after[index][0]:
            raise VPipeConfigError(
                f"vpipe.partition: got bounds {list(module.parts)}, which move layers, but layer {index} "
                f"({_type_name(spec)}) was changed after it had been built (parameters, buffers or their types) and "
                f"cannot be built again; allowed are the module's own bounds; build the module with this partition"
            )
        if isinstance(now.get(index), torch.nn.Module):
            for name, parameter in now[index].named_parameters():
                parameter.requires_grad_(before[index][1][name])


def _describe(layer: Any) -> tuple[list[tuple[str, tuple[int, ...], str]], dict[str, bool]]:
    """What :func:`_move_states` sends of a layer, and which of its parameters are trained."""
    if not isinstance(layer, torch.nn.Module):
        return [], {}
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in layer.state_dict().items()]
    return layout, {name: parameter.requires_grad for name, parameter in layer.named_parameters()}


def _move_states(
    module: PipelineModule,
    built: dict[int, Any],
    tied: dict[str, torch.nn.Module],
    layers: dict[int, Any],
    owners: tuple[list[int], list[int]],
) -> None:
    stage = module.stage_id
    for index, spec in enumerate(module._layer_specs):
        source, target = owners[0][index], owners[1][index]
        if stage not in (source, target):
            continue
        before = _module_of(spec, built[index], tied) if stage == source else None
        now = _module_of(spec, layers[index], module.tied_modules) if stage == target else None
        if source == target:
            if isinstance(now, torch.nn.Module) and isinstance(before, torch.nn.Module) and now is not before:
                now.load_state_dict(before.state_dict())
        elif stage == source and isinstance(before, torch.nn.Module):
            for tensor in before.state_dict().values():
                dist.send(tensor.contiguous(), module._grid.stage_to_global(target))
        elif stage == target and isinstance(now, torch.nn.Module):
            for tensor in now.state_dict().values():
                dist.recv(tensor, module._grid.stage_to_global(source))
