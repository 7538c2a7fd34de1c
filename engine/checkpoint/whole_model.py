"""The whole model's weights, from a pipeline that trains them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_vpipe.engine.checkpoint.whole_state import Engine, WholeStates
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import VPipeError
from ds_vpipe.splitting.model_hooks import StateHooks, in_order


class WholeModel:
    """Weights of the whole model, gathered from all stages.

    Args:
        engine: comes to rest before weights are gathered.
        stage: its stage.

    Attributes:
        states: gathers them; None with one stage.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._stage = stage
        self.states: WholeStates | None = None
        if stage.pipeline.num_stages == 1:
            return
        split = stage.module if isinstance(stage.module, SplitModule) else None
        homes = self._homes_of_layers if split is None else split.homes
        self.states = WholeStates(stage.consensus, engine, stage.number, homes)
        if split is not None:
            split.stage_model.state_hooks = StateHooks(split.user_module, self.states)

    def save(self, save_dir: str, save_filename: str, exclude_frozen: bool) -> None:
        """Gather the weights on rank 0 and write them; the file appears when it is complete."""
        what = f"save_16bit_model({str(save_dir)!r})"
        state_dict = self.gather(what, True, exclude_frozen)
        with self._stage.consensus.all_or_none(what):
            if self._stage.links.me.rank == 0:
                path = Path(save_dir, save_filename)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{path.name}.part")
                torch.save(state_dict, part)
                os.replace(part, path)

    def leave(self) -> None:
        """The engine is done; it is at rest from now on."""
        if self.states is not None:
            self.states.leave()

    def _homes_of_layers(self) -> Mapping[str, tuple[str, int]]:
        """What is in no layer, such as a loss function's parameters, is on all stages, and the last one trains it."""
        names = (name for name in self._stage.module.state_dict() if not _in_layer(name))
        return {name: (name, self._stage.pipeline.num_stages - 1) for name in names}

    def gather(self, what: str, rank0_only: bool, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        """A copy of the whole state dict in host memory; see ``VPipeEngine.full_state_dict()``."""
        module = self._stage.module
        slices = module.mpu().get_slice_parallel_world_size()
        if slices > 1:
            raise VPipeError(
                f"{what}: got a model whose tensors are sliced over {slices} ranks, "
                f"allowed are whole tensors; call save_checkpoint() and use python -m ds_vpipe.export"
            )
        model = module.user_module if isinstance(module, SplitModule) else module
        own = module.own_state() if isinstance(module, SplitModule) else module.state_dict()
        if exclude_frozen:
            named = model.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in named if not parameter.requires_grad}
            own = {name: value for name, value in own.items() if name not in frozen}
        if self.states is None:
            return {name: _copy(value) for name, value in own.items()}
        found = self.states.gather(own, what, rank0_only=rank0_only)
        copies: dict[int, Any] = {}
        for mine, value in found.values():
            if id(value) not in copies:
                copies[id(value)] = value if mine is None else _copy(value)
        return {name: copies[id(found[name][1])] for name in in_order(model, found)}


def _in_layer(name: str) -> bool:
    return name.partition(".")[0].isdecimal() or name.startswith("tied_modules.")


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
