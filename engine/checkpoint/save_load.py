"""Checkpoints of an asynchronous pipeline: one version per stage, written whole or not at all, resumed exactly.

The files are DeepSpeed's own. Beside them every rank writes what they leave out: random states, the
number of forward passes (which seeds layers), and what is known of other stages' updates. So going on
after a save and going on from the saved checkpoint are the same training, bit for bit.

A checkpoint is written under another name and renamed when it is complete, and ``latest`` is replaced
after that, so that a run that is killed at any moment leaves the one before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed.utils import logger

from ds_vpipe.config.staleness import refuse_delays
from ds_vpipe.engine.checkpoint import rank_state
from ds_vpipe.engine.checkpoint.folders import clean, put_in_place, put_own_in_place, recover
from ds_vpipe.engine.checkpoint.reshape import ReshapingMixin
from ds_vpipe.engine.checkpoint.tied_states import saved_as, with_owners_states
from ds_vpipe.engine.execution.quiesce import QuiesceMixin
from ds_vpipe.engine.links.consensus import Agreement
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.mitigation import MitigationMixin
from ds_vpipe.engine.updates.tied import tied_stages
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.errors import PipelinePeerError, VPipeError


class CheckpointMixin(QuiesceMixin, ReshapingMixin, MitigationMixin):
    """``save_checkpoint()``, ``load_checkpoint()`` and ``set_train_batch_size()`` between any two batches."""

    asynchronous: bool
    loss_scaling: LossScaling | None
    _agreement: Agreement
    _unwritten: Exception | None = None
    _half_loaded = False

    @property
    def consumed_micro_batches(self) -> int:
        """Micro-batches that this pipeline has trained, look-ahead not counted: where a resumed run's data begin."""
        return self.global_samples // (self.train_micro_batch_size_per_gpu() * self.dp_world_size)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's; all ranks call it, between any two batches.

        Micro-batches in flight are set back and trained afterwards. The folder appears under its name, and
        ``latest`` names it, only when it is complete. It is the first rank's: scripts that put the time into the name
        of a folder have another one on a rank that started a second later.

        Raises:
            VPipeError: files cannot be written; the checkpoint before is still there, and training may go on.
            PipelinePeerError: the same on another rank; or one is lost, or did not answer in time.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint(save_dir): got {save_dir!r}, allowed is the path of a folder; name one")
        self._refuse_half_loaded("save_checkpoint()")
        self.quiesce("save_checkpoint()")
        self._equalize_scale()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        mine = str(save_dir), tag
        save_dir, tag = self._agreement.of_first_rank(mine)
        folder = Path(save_dir, tag)
        if mine != (save_dir, tag):
            logger.warning(
                f"ds_vpipe: save_checkpoint: got the folder {str(Path(*mine))!r} on rank {self.global_rank} and "
                f"{str(folder)!r} on rank 0, which is used; allowed is one folder; give all ranks the same"
            )
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        what = f"save_checkpoint({str(folder)!r})"
        with self._agreement.together(what):
            if self.local_rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
        with self._agreement.together(what):
            if self.global_rank == 0:
                unfinished.mkdir(parents=True)
        name = os.path.join(os.path.dirname(tag), unfinished.name)
        self._unwritten = None
        with self._agreement.together(what):
            states = None if self.ties is None else with_owners_states(self, self.ties, self._agreement.of_replicas)
        with saved_as(self.optimizer, states):
            super().save_checkpoint(save_dir, name, client_state or {}, False, exclude_frozen_parameters)
        with self._agreement.together(what):
            if self._unwritten is not None:
                error, self._unwritten = self._unwritten, None
                raise error
            rank_state.save(self, unfinished)
        latest = Path(save_dir, "latest") if save_latest else None
        with self._agreement.together(what):
            if self.global_rank == 0:
                put_in_place(unfinished, folder, latest)
        with self._agreement.together(what):
            if self.local_rank == 0 and self.global_rank != 0:
                put_own_in_place(unfinished, folder, latest, self.global_rank)
        with self._agreement.together(what):
            if self.local_rank == 0:
                clean(folder)
        return True

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._write(super()._save_checkpoint, *args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._write(super()._save_zero_checkpoint, *args, **kwargs)

    def _write(self, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Write files, and keep a failure until all ranks are past DeepSpeed's own waiting for each other."""
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._unwritten = self._unwritten or error

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """As DeepSpeed's; all ranks call it, between any two batches.

        Data go on at :attr:`consumed_micro_batches`, where the caller's iterator has to begin. Micro-batches
        read ahead before are trained only if the same iterator is passed on, as if nothing had been read.

        Raises:
            VPipeError: the checkpoint is of another model, or files are lost. Load another one before anything else.
            PipelinePeerError: the same on another rank; or one is lost, or did not answer in time.
        """
        self.quiesce("load_checkpoint()")
        self._feed.start_over()
        what = f"load_checkpoint({str(load_dir)!r})"
        latest = Path(load_dir, "latest_universal" if self.load_universal_checkpoint() else "latest")
        if not self._agreement.is_same(int(tag is not None or latest.is_file()), f"all ranks in {what}"):
            raise VPipeError(
                f"{what}: got a file {latest.name!r} on some machines only, allowed is one on each; copy it there"
            )
        with self._agreement.together(what):
            if tag is None and latest.is_file():
                tag = latest.read_text().strip()
            if tag is not None and self.local_rank == 0:
                recover(Path(load_dir, tag))
        options = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        try:
            with self._agreement.together(what):
                path, client_state = super().load_checkpoint(load_dir, tag, *options)
        except VPipeError:  # on every rank; some may have loaded their weights
            with suppress(PipelinePeerError):
                self._half_loaded = self._agreement.lowest(-int(self._half_loaded), f"all ranks after {what}") < 0
            raise
        if path is None:
            return path, client_state
        if tied_stages(self.module):
            self.module._synchronize_tied_weights()
        with self._agreement.together(what):
            rank_state.restore_outside(self, Path(load_dir, str(tag)))
            weights_only = load_module_only or not load_optimizer_states
            if weights_only and hasattr(self.optimizer, "refresh_fp32_params"):
                self.optimizer.refresh_fp32_params()  # DeepSpeed may keep the old, which the next update would restore
            # Loading may have replaced what the versions point to.
            self.stashing_optimizer = self._make_stashing_optimizer()
            self._restart_at(self.global_steps)
            if not load_module_only:
                rank_state.restore(self, Path(load_dir, str(tag)))
        self._half_loaded = False
        return path, client_state

    def _refuse_half_loaded(self, call: str) -> None:
        if self._half_loaded:
            raise VPipeError(
                f"{call} after load_checkpoint() has failed half-way: weights and states may be of different "
                f"checkpoints; load one that is complete"
            )

    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, on all ranks or on none."""
        self._half_loaded = True
        synchronize = self.module._synchronize_tied_weights
        with self._agreement.together("load_checkpoint(): weights"):
            self.module._synchronize_tied_weights = lambda: None  # which would wait for a rank that has failed
            try:
                super().load_module_state_dict(*args, **kwargs)
            finally:
                del self.module._synchronize_tied_weights
        synchronize()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's; all ranks call it, between any two batches. The size that it is already changes nothing.

        Raises:
            ValueError: the size is not a multiple of micro-batch size and replicas.
            VPipeConfigError: a mitigation of staleness does not work with the delay that it gives.
        """
        if train_batch_size == self.train_batch_size():
            return  # scripts with a ramp-up call it before every batch
        replicas_batch = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        refuse_delays(self.vpipe_config.staleness, self._delays(max(1, train_batch_size // replicas_batch)))
        self.quiesce("set_train_batch_size()")
        super().set_train_batch_size(train_batch_size)
        self._plan()
        if self.mitigation is not None:
            self.mitigation.delay = self._delays(self.micro_batches)[self.stage_id]
            self.mitigation.warmup = self.delay_warmup
            self.stashing_optimizer = self._make_stashing_optimizer()
        self._restart_at(self.stashing_optimizer.latest_version)

    def _make_stashing_optimizer(self) -> WeightStashingOptimizer:
        stash = self.vpipe_config.weight_sync != "none"
        parameters = self.module.parameters()
        return WeightStashingOptimizer(self.optimizer, parameters, stash=stash, version=self.global_steps)

    def _equalize_scale(self) -> None:
        """Give every stage the last one's loss scaler, as DeepSpeed expects it."""
        if self.num_stages > 1 and self.asynchronous and self.loss_scaling is not None:
            last = self.grid.stage_to_global(self.num_stages - 1)
            self.loss_scaling.restore(self._agreement.of_pipeline(self.loss_scaling.state(), last))
