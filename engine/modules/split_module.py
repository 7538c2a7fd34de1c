"""A plain module as a pipeline module: its pieces are the layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import log_dist
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ds_vpipe.accelerators import stages_are_neighbours
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import STAGES_REMEDY, DeepSpeedJson
from ds_vpipe.engine.links.groups import Groups, Peer, check_local_device, use_local_device
from ds_vpipe.engine.modules.partitioned import VPipeModule
from ds_vpipe.engine.modules.piece_module import PieceModule
from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import from_data, split_in_process
from ds_vpipe.splitting.stage_model import StageModel, call_now


class SplitModule(VPipeModule, PieceModule):
    """A ``PipelineModule`` whose layers are the pieces of a plain module. Made by :func:`pipeline_from_module`.

    Its input is what :meth:`.StageModel.pack` returns, its output on the last stage the loss. It has no ``loss_fn``:
    the user's forward computes the loss.
    """

    def __init__(
        self, stage_model: StageModel, num_stages: int, partition_method: str | Sequence[int], topology: Any = None
    ) -> None:
        # PipelineModule's constructor registers layers, which needs these and comes before attributes can be set.
        self.__dict__["stage_model"] = stage_model
        super().__init__(
            layers=stage_model.pieces, num_stages=num_stages, partition_method=partition_method, topology=topology
        )

    def release(self) -> None:
        """Drop what belongs to other stages, after the last change of the split."""
        self.stage_model.release(torch.device(get_accelerator().device_name(self.local_rank)))
        self._synchronize_tied_weights()

    # As a list of layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage's pieces.

        Raises:
            SplitError: this is a call of the user's forward, which no stage can run alone.
        """
        if kwargs or len(args) != 1 or not isinstance(args[0], tuple):
            raise SplitError(
                "engine.module(...): a stage has only a part of the model, allowed is to call engine(...) on every "
                "rank; do that, in eval() mode to evaluate"
            )
        self.micro_offset += 1
        value, count, interval = args[0], len(self.forward_funcs), self.activation_checkpoint_interval
        if interval == 0:
            return self.run_several(0, count, value)
        portions = [(start, min(start + interval, count)) for start in range(0, count, interval)]
        caller = self._checkpointed if torch.is_grad_enabled() else call_now
        for number in self.in_portions(portions):
            value = self.run_several(*portions[number], value, caller)
        return value

    def _checkpointed(self, function: Callable[[Any], Any], value: Any) -> Any:
        return self.activation_checkpoint_func(lambda *inputs: function(inputs), *value)

    def _build(self) -> None:
        self.hold_layers(range(self._local_start, self._local_stop))

    def _count_layer_params(self) -> list[int]:
        return self.stage_model.trained_sizes()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model's blocks, each by itself; code between them runs as it is."""
        for block in self.stage_model.blocks:
            block.compile(*args, **kwargs)

    # As a module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "stage_model" not in self.__dict__:
                raise
        return getattr(self.user_module, name)  # scripts expect the model that they have made

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's."""
        return self.user_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's: this stage takes what it has."""
        return self.user_module.load_state_dict(*args, **kwargs)

    def own_state(self, path: str = "") -> dict[str, Any]:
        """This stage's part of the model's state dict, or of that of ``path``."""
        found: dict[str, Any] = self.stage_model.own_state(self.user_module.get_submodule(path).state_dict)
        return found

    def owners(self) -> dict[str, tuple[str, int]]:
        """Name and stage of every value in the model's state dict."""
        return {name: (there, self.stage_owner(piece)) for name, (there, piece) in self.stage_model.owners().items()}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SplitModule:
        self.stage_model.apply(fn)
        return self

    def train(self, mode: bool = True) -> SplitModule:
        """Set the mode of the user's model, once and not once per piece."""
        self.user_module.train(mode)
        self.training = mode
        for piece in self.forward_funcs:
            piece.training = mode
        return self

    # Scripts keep averages in a copy, and pair its parameters with the model's by their order.

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the user's model, as of a module that is no pipeline."""
        return copy.deepcopy(self.user_module, memo)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of the pieces, in the order of the user's model."""
        places = {id(parameter): place for place, parameter in enumerate(self.user_module.parameters(recurse))}
        yield from sorted(super().parameters(recurse), key=lambda one: places.get(id(one), len(places)))

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The user's model's, in its order, which a copy of it has too."""
        return self.user_module.buffers(recurse)

    # Tied weights

    def tied_layers(self) -> dict[str, list[int]]:
        """Pieces that use each tied parameter, by its first name."""
        return {name: list(uses) for name, uses in self.stage_model.ties().items()}

    def copies(self) -> dict[str, str]:
        """Names of repeated parameters in pieces' files, with the first one's."""
        return {
            f"{piece}.{name}": f"{min(names)}.{names[min(names)]}"
            for names in self.stage_model.ties().values()
            for piece, name in names.items()
            if piece != min(names)
        }

    def _index_tied_modules(self) -> dict[str, Any]:
        comms: dict[str, Any] = {}
        for name, uses in sorted(self.stage_model.ties().items()):
            names = {self.stage_owner(piece): used for piece, used in reversed(uses.items())}
            for replica in range(self._grid.data_parallel_size if len(names) > 1 else 0):
                ranks = [self._grid.stage_to_global(stage_id=stage, data=replica) for stage in sorted(names)]
                group = dist.new_group(ranks=ranks)
                if self.global_rank in ranks:
                    here = names[self.stage_id]
                    comms[name] = {"ranks": ranks, "group": group, "weight_attr": [here], "module": self.user_module}
                    if self.global_rank != ranks[0]:
                        self.user_module.get_parameter(here).ds_pipe_replicated = True  # type: ignore[attr-defined]
        return comms

    def _synchronize_tied_weights(self) -> None:
        if not any(weight.is_meta for weight, _ in self.get_tied_weights_and_groups()):  # else they get values later
            with torch.no_grad():
                super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """Tied weights of this stage with the groups that reduce their gradients."""
        comms = self.tied_comms.values()
        return [(self.user_module.get_parameter(comm["weight_attr"][0]), comm["group"]) for comm in comms]


def pipeline_from_module(
    model: torch.nn.Module,
    ds_config: Mapping[str, Any],
    config: VPipeConfig,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[SplitModule, Groups]:
    """Pipeline of a plain module whose forward returns the loss. All ranks call this, with or without a process group.

    The result has the engine's process groups beside it.

    The module becomes part of the result and keeps the parameters of this rank's stage only, once
    :meth:`SplitModule.release` has been called. An example of a call is taken from ``training_data``, if there is any.
    ``ds_config``, the DeepSpeed JSON, or the partition in its ``"vpipe"`` block says how many stages there are.

    Raises:
        SplitError: the model cannot be split; one line says why, where, and what to do.
        VPipeConfigError: the model is no module, or the number of stages is not given or does not fit the ranks.
    """
    if not isinstance(model, torch.nn.Module):
        given = type(model).__name__
        raise VPipeConfigError(f"initialize(model): got {given}, allowed is a torch.nn.Module; pass the model to train")
    if isinstance(model, OptimizedModule):
        raise SplitError(
            "model: got a module of torch.compile, allowed is a plain one; pass the one it was made from, and call "
            "engine.compile() after initialize()"
        )
    if model._compiled_call_impl is not None:
        log_dist(
            "ds_vpipe: model.compile(): a model that is split runs without it; call engine.compile() after "
            "initialize(), which compiles its blocks",
            ranks=[0],
            level=logging.WARNING,
        )
    if isinstance(model, DistributedDataParallel):
        raise SplitError("model: got a DistributedDataParallel, allowed is a plain module; pass its .module")
    parts = ("ds_id", "placements", "_is_flat_param")  # attributes by zero.Init(), fully_shard() and FSDP's wrapper
    sharded = next((name for name, one in model.named_parameters() if any(hasattr(one, part) for part in parts)), None)
    if sharded is not None:
        raise SplitError(
            f"model: got a parameter {sharded} that is divided among ranks, as by deepspeed.zero.Init() or FSDP, "
            f"allowed are whole ones; build the model without, under torch.device('meta') if it is large"
        )
    lazy = next((name for name, one in chain(model.named_parameters(), model.named_buffers()) if is_lazy(one)), None)
    if lazy is not None:
        raise SplitError(
            f"model: got a lazy module, whose {lazy} has no shape yet, allowed are modules that have been called; call "
            f"the model once before initialize()"
        )
    check_local_device()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    use_local_device()
    stages, ranks = stages_in(ds_config, config.partition, config.virtual_stages), dist.get_world_size()
    if ranks % stages:
        allowed = f"a number of stages that divides the {ranks} ranks"
        raise Refusal("pipeline.stages", stages, allowed, "change it, or start another number of ranks").error()
    axes = {"data": ranks // stages, "pipe": stages}
    names = ["data", "pipe"] if stages_are_neighbours(ds_config) else ["pipe", "data"]  # as DeepSpeed has them
    topology = ProcessTopology(names, [axes[name] for name in names])
    rank = dist.get_rank()
    groups = Groups(Peer(topology.get_coord(rank).pipe, rank), config.peer_timeout_s)
    with groups.building("the split of its model"):
        example = None if training_data is None else from_data(training_data, collate_fn)
        try:
            stage_model = split_in_process(model, stages, example)
        except SplitError as error:  # which other ranks, with the same model, have too
            groups.leave(f"{groups.me} cannot split its model: {error}")
            raise
        remedy = "build the same model on every rank, with the same parameters frozen"
        limit_s = default_pg_timeout.total_seconds()  # as for the first collective, which some ranks come to late
        groups.refuse_unlike("splits", stage_model.of_every_rank(), remedy, limit_s)
        if stage_model.remark is not None:
            log_dist(f"ds_vpipe: {stage_model.remark}", ranks=[0], level=logging.WARNING)
        return SplitModule(stage_model, stages, "parameters", topology), groups


def stages_in(ds_config: Mapping[str, Any], partition: Any, virtual_stages: int = 1) -> int:
    """Number of stages for a plain module: ``"pipeline": {"stages": K}`` in the DeepSpeed JSON, or by ``partition``."""
    json = DeepSpeedJson(ds_config)
    if json.stages is not None:
        return json.stages
    if isinstance(partition, Sequence) and not isinstance(partition, str):
        return len(partition) // virtual_stages
    given, allowed = json.get("pipeline.stages"), "an int >= 1, or a list in vpipe.partition"
    reason = "the model is a plain module, which does not say how many stages it shall have"
    raise Refusal("pipeline.stages", given, allowed, STAGES_REMEDY, reason).error()


def stages_of_json(ds_config: Mapping[str, Any]) -> int:
    """:func:`stages_in`, of a DeepSpeed JSON with a ``"vpipe"`` block."""
    config = VPipeConfig.parse(DeepSpeedJson(ds_config).block)
    return stages_in(ds_config, config.partition, config.virtual_stages)
