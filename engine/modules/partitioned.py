"""Pipeline modules partitioned as the ``"vpipe"`` block says.

:class:`VPipeModule` is built with that partition. :func:`repartition` moves layers of a ``PipelineModule`` that a
script has built with another one, with their weights.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist  # whose operations DeepSpeed does not log: at one that it has no rate for it ends
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import logger
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_vpipe.checkpoints.stage_layout import is_outside_layers
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.modules.built_layers import settings_of, structure_of
from ds_vpipe.engine.modules.interleaved import interleave
from ds_vpipe.engine.modules.piece_module import PieceModule
from ds_vpipe.engine.modules.recompute import layer_numbers, layers_by_number
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
        """As DeepSpeed's, which builds a tied module once per stage. Here tied layers may be of several classes."""
        first_position = len(self.forward_funcs)
        super()._build()
        for position, index in enumerate(range(self._local_start, self._local_stop), first_position):
            spec = self._layer_specs[index]
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is None:
                first = self.tied_modules[spec.key]
                if type(first) is not spec.typename:
                    self._add_tied(index, position, first)

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


def stage_counts(module: PipelineModule, method: str | Sequence[int], virtual_stages: int = 1) -> tuple[int, ...]:
    """Layers per part by ``method``, as in the ``"vpipe"`` block. See :func:`ds_vpipe.partition.resolve_partition`.

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
    """Give every part the number of layers in ``counts``. All ranks call this. False if it was so already.

    Stage ``i`` of K holds parts ``i, i + K, ...``. Layers keep their weights: those that change stages are built from
    their specification and then receive the state of the layer they replace.

    Raises:
        VPipeConfigError: a layer was changed after it was built, so that it cannot be built again.
        SplitError: the module has released the layers of other stages.
    """
    old, new = list(module.parts), bounds(counts)
    if old == new and virtual_stages == 1:
        return False
    stage, stages = module.stage_id, module.num_stages
    before = _modules(module, range(old[stage], old[stage + 1]))
    _clear(module, new)
    runs = [range(new[part], new[part + 1]) for part in range(stage, len(counts), stages)]
    numbers = list(chain(*runs))
    device = get_accelerator().device_name(module.local_rank)
    if isinstance(module, PieceModule):  # it still has all layers of the model here
        module._set_bounds(start=runs[0].start, stop=runs[0].stop)
        module.hold_layers(numbers)
        module.to(device)
    else:
        module.tied_modules, module.tied_weight_attrs = torch.nn.ModuleDict(), {}
        tied = {i for i, spec in enumerate(module._layer_specs) if isinstance(spec, TiedLayerSpec)}
        _build(module, runs, {i: layer for i, layer in before.items() if i not in tied})
        module.to(device)
        now = _modules(module, numbers)
        extra = _check_layers(module, before, now)
        _move_states(module, [(bisect(old, i) - 1, (bisect(new, i) - 1) % stages) for i in range(new[-1])], before, now)
        for index, state in extra.items():
            if index in now:
                now[index].load_state_dict(state, strict=False)
    if virtual_stages > 1:
        interleave(module, numbers, list(accumulate(map(len, runs))))
    module.tied_comms = module._index_tied_modules()
    module._synchronize_tied_weights()
    if module.activation_checkpoint_interval > 0:
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()
    return True


def hold(module: PipelineModule, counts: Sequence[int]) -> None:
    """Hold the layers of this stage in another split. Those that are here stay as they are, others are built.

    Only for splits in which tied layers stay where they are. Nothing is sent: layers that are built have the values
    that their specification gives them.
    """
    stage, kept = module.stage_id, layers_by_number(module)
    tied = {id(layer) for layer in module.tied_modules.values()}
    _clear(module, bounds(counts))
    run = range(module.parts[stage], module.parts[stage + 1])
    if isinstance(module, PieceModule):
        module._set_bounds(start=run.start, stop=run.stop)
        module.take_layers(run)
        return
    _build(module, [run], {i: layer for i, layer in kept.items() if id(layer) not in tied})
    for tie in module.tied_comms.values():  # as _index_tied_modules() has it
        for parameter in tie["module"].parameters():
            parameter.ds_pipe_replicated = module.global_rank != tie["ranks"][0]


def layers_here(module: PipelineModule) -> dict[int, torch.nn.Module]:
    """This rank's layers by number, those that are functions left out."""
    found = _modules(module, layer_numbers(module))
    return {number: layer for number, layer in found.items() if isinstance(layer, torch.nn.Module)}


def refuse_training_outside_layers(module: PipelineModule) -> None:
    """Refuse gradients of parameters that belong to no layer, on a stage before the last.

    Every stage has such parameters, and the last one's, such as those of a loss function, are those of the model. What
    an earlier stage has trained would be in no checkpoint.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    of_layers = {id(parameter) for name, parameter in named if not is_outside_layers(name)}

    def refuse(name: str, _: torch.Tensor) -> None:
        raise VPipeConfigError(
            f"model: got a gradient of {name}, which belongs to no layer, on stage {module.stage_id} of "
            f"{module.num_stages}; allowed is one on the last stage alone; make it a parameter of a layer, tied if "
            f"several layers use it (TiedLayerSpec)"
        )

    for name, parameter in named:
        if id(parameter) not in of_layers and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(refuse, name))


def _modules(module: PipelineModule, numbers: Iterable[int]) -> dict[int, Any]:
    """Layers here by number. Of a tied layer with a ``forward_fn``, a function, the module that it calls."""
    layers = {}
    for number, layer in zip(numbers, module.forward_funcs, strict=True):
        spec = module._layer_specs[number]
        is_function = isinstance(spec, TiedLayerSpec) and not isinstance(layer, torch.nn.Module)
        layers[number] = module.tied_modules[spec.key] if is_function else layer
    return layers


def _clear(module: PipelineModule, parts: list[int]) -> None:
    """Take all layers out of ``module``, which gets others of the split ``parts``."""
    for name in module.fwd_map:
        module._modules.pop(name, None)
    module.forward_funcs, module.fwd_map, module.parts = [], {}, parts


def _build(module: PipelineModule, runs: Iterable[range], kept: Mapping[int, Any]) -> None:
    """Build the layers of ``runs``. Modules in ``kept`` are used as they are."""
    specs = list(module._layer_specs)
    for index, layer in kept.items():
        if isinstance(layer, torch.nn.Module):
            module._layer_specs[index] = layer
    try:
        for run in runs:
            module._set_bounds(start=run.start, stop=run.stop)
            module._build()
    finally:
        module._layer_specs[:] = specs


def _check_layers(module: PipelineModule, before: Mapping[int, Any], now: Mapping[int, Any]) -> dict[int, Any]:
    """Compare layers before and after they are built again, on all ranks. What was frozen stays frozen.

    Returns:
        Extra state of layers that have some, as they were.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    mine = [{i: _describe(layer) for i, layer in side.items()} for side in (before, now)]
    dist.all_gather_object(everywhere, as_bytes(mine))  # extra state may hold tensors of a device
    described = [from_bytes(one) for one in everywhere]
    described[dist.get_rank()] = mine
    layouts_before, layouts_now = ({i: d for rank in described for i, d in rank[side].items()} for side in (0, 1))
    for index, spec in enumerate(module._layer_specs):
        (form, settings, trained, _), (form_now, settings_now, *_) = layouts_before[index], layouts_now[index]
        changed = [name for name in {**form, **form_now} if form.get(name) != form_now.get(name)]
        changed += sorted(settings.keys() ^ settings_now.keys())
        where = f"vpipe.partition: got bounds {list(module.parts)}, which move layers, but layer {index} "
        where += f"({_type_name(spec)})"
        if changed:
            raise VPipeConfigError(
                f"{where} was changed after it had been built ({changed[0]}) and cannot be built again; allowed are "
                f"the module's own bounds; build the module with this partition"
            )
        # Layers may number themselves, or know their device: such values are right as they are built again.
        pairs = ((name, value, settings_now.get(name)) for name, value in settings.items())
        other = [f"{name} {value} as {again}" for name, value, again in pairs if value != again]
        if other and dist.get_rank() == 0:
            logger.warning(
                f"ds_vpipe: {where} has {', '.join(other)} where it is built again; if the script has set that after "
                f"it had been built, build the module with this partition"
            )
        if isinstance(now.get(index), torch.nn.Module):
            for name, parameter in now[index].named_parameters():
                parameter.requires_grad_(trained[name])
    return {index: extra for index, (*_, extra) in layouts_before.items() if extra}


def _describe(layer: Any) -> tuple[dict[str, object], dict[str, str], dict[str, bool], dict[str, Any]]:
    """Form of a layer, which are its tensors and hooks, its settings, trained parameters and extra state, by name."""
    if not isinstance(layer, torch.nn.Module):
        return {}, {}, {}, {}
    tensors, extra = _tensors(layer).items(), {n: value for n, value in layer.state_dict().items() if _is_extra(n)}
    form: dict[str, object] = {
        n: (place, *tensor.shape, str(tensor.dtype)) for place, (n, tensor) in enumerate(tensors)
    }
    form |= {f"hooks of {name}": len(parameter._backward_hooks or ()) for name, parameter in layer.named_parameters()}
    form |= structure_of(layer)
    del form["class"]  # of tied layers DeepSpeed takes the first one's
    own = {at for at, part in layer.named_modules() if type(part).get_extra_state is torch.nn.Module.get_extra_state}
    settings = {
        f"{at}.{key}".lstrip("."): repr(value)
        for (at, key), value in settings_of(layer).items()
        if at in own and key != "training" and not key.startswith("_")
    }
    return form, settings, {name: parameter.requires_grad for name, parameter in layer.named_parameters()}, extra


def _tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that are not persistent too."""
    return {name: tensor for name, tensor in layer.state_dict().items() if not _is_extra(name)} | _unsaved(layer)


def _unsaved(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are in no state dict, those that can be sent."""
    found, saved = dict(layer.named_buffers()), layer.state_dict().keys()
    able = {name for name, buffer in found.items() if buffer.layout is torch.strided and not buffer.is_quantized}
    return {name: found[name] for name in found if name in able and name not in saved}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX  # any object, or a tensor that is a copy of something


def _move_states(
    module: PipelineModule, owners: Iterable[tuple[int, int]], before: Mapping[int, Any], now: Mapping[int, Any]
) -> None:
    """Send every layer's state from its stage before to its stage now."""
    for index, (source, target) in enumerate(owners):
        sent, received = before.get(index), now.get(index)
        if source == target:
            if isinstance(received, torch.nn.Module) and isinstance(sent, torch.nn.Module) and received is not sent:
                received.load_state_dict(sent.state_dict())
                for name, buffer in _unsaved(sent).items():
                    _replace(received, name, buffer)
        elif isinstance(sent, torch.nn.Module):
            for tensor in _tensors(sent).values():
                dist.send(tensor.contiguous(), module._grid.stage_to_global(target))
        elif isinstance(received, torch.nn.Module):
            unsaved = _unsaved(received)
            for name, tensor in _tensors(received).items():
                arrived = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                dist.recv(arrived, module._grid.stage_to_global(source))
                if name in unsaved:
                    _replace(received, name, arrived)
                else:
                    tensor.copy_(arrived)


def _replace(layer: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Put another buffer in the place of one that may be expanded, which cannot be written into."""
    holder, _, key = name.rpartition(".")
    layer.get_submodule(holder)._buffers[key] = buffer
