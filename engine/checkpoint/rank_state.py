"""Each rank's small file beside DeepSpeed's checkpoint, which makes resuming exact."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch.utils._pytree import tree_map_only

from ds_vpipe.checkpoints.pipeline_checkpoint import outside_layers, rank_file
from ds_vpipe.checkpoints.stage_layout import is_outside_layers
from ds_vpipe.engine.checkpoint.parameter_states import untied_names
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.modules.recompute import layers_by_number
from ds_vpipe.engine.stage import Stage


def save(engine: PatchedPipelineEngine, stage: Stage, folder: Path, exclude_frozen_parameters: bool) -> None:
    """Write this rank's file into the checkpoint's folder."""
    torch.save(
        {
            "parts": _parts(engine),
            "micro_offset": engine.module.micro_offset,
            "first_partition": stage.first_partition,
            "recompute_ratio": stage.pipeline.recompute_ratio,
            "depths": None if stage.pipeline.synchronous else stage.pipeline.depths,
            "peers": None if stage.peers is None else stage.peers.state(),
            "outside": dict(tree_map_only(torch.Tensor, _copy, list(_outside_layers(engine.module).values()))),
            "random": random_of(stage),
            "left_out": _frozen(engine.module) if exclude_frozen_parameters else [],
        },
        _file(engine, folder, engine.grid.data_parallel_id),
    )


class SavedSplit(NamedTuple):
    """Layers, recompute ratios and depths of every stage in a checkpoint."""

    first_counts: Sequence[int]  # layers where the run began
    counts: Sequence[int]
    recompute_ratio: Sequence[float] | None
    depths: Sequence[int] | None


def saved_split(engine: PatchedPipelineEngine, folder: Path) -> SavedSplit | None:
    """Split and depths of a checkpoint; None if it is of other stages."""
    file = _file(engine, folder, 0)
    state = torch.load(file, weights_only=False, map_location="cpu") if file.is_file() else {}
    stages, *edges = state.get("parts") or [0]
    if stages != engine.num_stages or len(edges) != stages + 1:
        return None
    counts = [stop - start for start, stop in pairwise(edges)]
    return SavedSplit(state.get("first_partition", counts), counts, state.get("recompute_ratio"), state.get("depths"))


def restore_outside(engine: PatchedPipelineEngine, folder: Path) -> None:
    """Take over what is in no layer's file."""
    names = {name: saved_as for name, (saved_as, _) in _outside_layers(engine.module).items()}
    saved = outside_layers(folder, engine.grid.get_slice_parallel_rank()) if names else {}
    if found := {name: saved[saved_as] for name, saved_as in names.items() if saved_as in saved}:
        engine.module.load_state_dict(found, strict=False)


def restore(engine: PatchedPipelineEngine, stage: Stage, folder: Path) -> None:
    """Restore this rank's file, but for weights.

    Replicas that the saving run did not have get everything but the random states from the first one: what
    decides about updates must be the same on all replicas of a stage. Without a file, as of DeepSpeed's engine, or
    with one of other stages, this starts as in a new run.
    """
    engine.module.micro_offset = 0
    if stage.peers is not None:
        stage.peers.forget()
    own, first = (_file(engine, folder, replica) for replica in (engine.grid.data_parallel_id, 0))
    state = torch.load(first, weights_only=False, map_location="cpu") if first.is_file() else None
    if state is None or state["parts"] != _parts(engine):
        return
    engine.module.micro_offset = state["micro_offset"]
    if stage.peers is not None and state["peers"] is not None:
        stage.peers.restore(state["peers"])
    if own.is_file():
        mine = state if own == first else torch.load(own, weights_only=False, map_location="cpu")
        restore_random(stage, mine["random"])


def random_of(stage: Stage) -> dict[str, Any]:
    """All random states of a rank."""
    return {
        "torch": torch.get_rng_state(),
        "accelerator": get_accelerator().get_rng_state() if stage.device.type != "cpu" else None,
        **stage.random_states.read(),
    }


def restore_random(stage: Stage, states: dict[str, Any]) -> None:
    """The inverse of :func:`random_of`."""
    torch.set_rng_state(states["torch"])
    if states["accelerator"] is not None and stage.device.type != "cpu":
        get_accelerator().set_rng_state(states["accelerator"])
    stage.random_states.put_back(states)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)  # all of the storage that a view is of would be written


def _parts(engine: PatchedPipelineEngine) -> list[int]:
    """Layout that a rank file belongs to: stage count and part bounds."""
    return [engine.num_stages, *engine.module.parts]


def _file(engine: PatchedPipelineEngine, folder: Path, replica: int) -> Path:
    return folder / rank_file(engine.stage_id, replica, engine.grid.get_slice_parallel_rank())


def _frozen(module: PipelineModule) -> list[str]:
    """Parameters that DeepSpeed leaves out of the layers' files, which say nothing of them."""
    return [
        f"{number}.{name}"
        for number, layer in layers_by_number(module).items()
        if isinstance(layer, torch.nn.Module)
        for name, parameter in layer.named_parameters()
        if not parameter.requires_grad
    ]


def _outside_layers(module: PipelineModule) -> dict[str, tuple[str, Any]]:
    """This stage's part of :func:`outside_layers`, by the module's names: names in the file, and values."""
    found: dict[str, Any] = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
    for name, part in module.named_children():
        if is_outside_layers(f"{name}."):
            part.state_dict(destination=found, prefix=f"{name}.")
    layers = [layer for layer in module.forward_funcs if isinstance(layer, torch.nn.Module)]
    for key, part in module.tied_modules.items():
        if not any(layer is part for layer in layers):
            part.state_dict(destination=found, prefix=f"tied_modules.{key}.")
    untied: dict[str, str] = untied_names(module)
    return {
        name: (untied.get(name, name), value)
        for name, value in found.items()
        if is_outside_layers(name) or name in untied
    }
