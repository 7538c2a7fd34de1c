"""The whole model's weights, from a pipeline that trains them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_vpipe.engine.checkpoint.save_load import CheckpointMixin
from ds_vpipe.engine.checkpoint.whole_state import WholeStates
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.errors import VPipeError
from ds_vpipe.splitting.model_hooks import StateHooks, in_order


class SavingMixin(CheckpointMixin):
    """``full_state_dict()``, ``save_16bit_model()``, and ``state_dict()`` of a plain model that was split."""

    _whole_states: WholeStates | None = None  # with one stage there is nothing to gather

    def full_state_dict(
        self, rank0_only: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """A copy of the whole model's state dict in host memory; all ranks call it, where ``save_checkpoint()`` may be.

        Weights are the newest ones, with the types that they have in the model. Names are those of the plain model that
        the script has made, or ``LAYER.NAME`` and ``tied_modules.KEY.NAME`` as in ``PipelineModule.state_dict()``.

        Args:
            rank0_only: only the first stage's ranks get it, others an empty one, and need no memory for it.
            exclude_frozen_parameters: leave out what is not trained.

        Raises:
            VPipeError: other ranks do something else.
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        return self._gathered("full_state_dict()", rank0_only, exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's; all ranks call it. The file appears when it is complete.

        Raises:
            VPipeError: it cannot be written; or other ranks do something else.
            PipelinePeerError: the same on another rank; or one is lost, or did not answer in time.
        """
        what = f"save_16bit_model({str(save_dir)!r})"
        state_dict = self._gathered(what, True, exclude_frozen_parameters)
        with self._agreement.together(what):
            if self.global_rank == 0:
                path = Path(save_dir, save_filename)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{path.name}.part")
                torch.save(state_dict, part)
                os.replace(part, path)
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """For DeepSpeed and Accelerate: on rank 0 the whole state dict, elsewhere None."""
        found = self._gathered("_consolidated_16bit_state_dict()", True, exclude_frozen_parameters)
        return found if self.global_rank == 0 else None

    def come_to_rest(self, what: str) -> None:
        """Finish what is in flight, together with the other stages that do the same.

        Args:
            what: is to be done then.
        """
        self.quiesce()

    def weights_were_set(self) -> None:
        """At rest, the script has given the parameters other values, on all stages."""
        if self.ties is not None:
            self.ties.restart(self.state.progress.completed // self.micro_batches)

    def destroy(self) -> None:
        """As DeepSpeed's."""
        super().destroy()
        if self._whole_states is not None:
            self._whole_states.leave()

    def _make_states_whole(self) -> None:
        if self.num_stages == 1:
            return
        split = self.module if isinstance(self.module, SplitModule) else None
        homes = self._homes_of_layers if split is None else split.homes
        self._whole_states = WholeStates(self._agreement, self, self.stage_id, homes)
        if split is not None:
            split.stage_model.state_hooks = StateHooks(split.user_module, self._whole_states)

    def _homes_of_layers(self) -> Mapping[str, tuple[str, int]]:
        """What is in no layer, such as a loss function's parameters, is on all stages, and the last one trains it."""
        names = (name for name in self.module.state_dict() if not _in_layer(name))
        return {name: (name, self.num_stages - 1) for name in names}

    def _gathered(self, what: str, rank0_only: bool, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        if self.grid.get_slice_parallel_world_size() > 1:
            raise VPipeError(
                f"{what}: got a model whose tensors are sliced over {self.grid.get_slice_parallel_world_size()} ranks, "
                f"allowed are whole tensors; call save_checkpoint() and use python -m ds_vpipe.export"
            )
        module = self.module
        model = module.user_module if isinstance(module, SplitModule) else module
        own = module.own_state() if isinstance(module, SplitModule) else module.state_dict()
        if exclude_frozen:
            named = model.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in named if not parameter.requires_grad}
            own = {name: value for name, value in own.items() if name not in frozen}
        if self._whole_states is None:
            return {name: _copy(value) for name, value in own.items()}
        found = self._whole_states.gather(own, what, rank0_only=rank0_only)
        copies: dict[int, Any] = {}
        for mine, value in found.values():
            if id(value) not in copies:
                copies[id(value)] = value if mine is None else _copy(value)
        return {name: copies[id(found[name][1])] for name in in_order(model, found)}

    def _refuse_half_loaded(self, call: str) -> None:
        super()._refuse_half_loaded(call)
        if self._whole_states is not None:
            self._whole_states.refuse_written(call)


def _in_layer(name: str) -> bool:
    return name.partition(".")[0].isdecimal() or name.startswith("tied_modules.")


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
