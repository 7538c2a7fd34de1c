"""Asynchronous pipeline engine, as a subclass of DeepSpeed's.

:class:`VPipeEngine` replaces what DeepSpeed's ``PipelineEngine`` does within a batch and leaves the rest
to it: configuration, optimizers and precision, reduction over replicas, learning-rate schedules,
reporting, checkpoints. A call of ``train_batch()`` carries out the actions (:mod:`ds_vpipe.schedules`) of
this stage up to its next update::

    call t, stage s of K     F .. F              W warm-up passes, only after a start or a drain
                             F B  F B  ..  F B   M pairs; F is W micro-batches ahead of B
                             REDUCE STEP         update t of this stage

At the end of the data the first stage sends END in place of an activation, and every stage drains to
the last complete batch. The mean loss of a batch is sent with the gradient of its last micro-batch, so
that every stage has it before its own update without a further message. A failing stage sends ABORT on
all its links, in place of the message that its neighbours wait for.
"""

import atexit
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.pipe.schedule import PipeSchedule

from ds_vpipe.checkpoints.stage_layout import LAYOUT_KEY
from ds_vpipe.config.block import TimelineConfig
from ds_vpipe.engine.backend_threads import outlive_backend_threads
from ds_vpipe.engine.build import (
    Prepared,
    prepared_arguments,
    refuse_late_optimizer,
    stage_of,
    use_optimizer,
    with_staleness,
)
from ds_vpipe.engine.checkpoint.layer_moves import checked_split, refuse_moves, repartition
from ds_vpipe.engine.checkpoint.parameter_states import stage_layout
from ds_vpipe.engine.checkpoint.recovery import recovery_of, refuse_with_recovery
from ds_vpipe.engine.checkpoint.save_load import Checkpoints
from ds_vpipe.engine.checkpoint.whole_state import WholeModel
from ds_vpipe.engine.deepspeed_internals import (
    PatchedPipelineEngine,
    end_workers,
    own_schedule,
    refuse_own_instructions,
    training_at_less_cost,
)
from ds_vpipe.engine.execution.data import or_no_data
from ds_vpipe.engine.execution.drain import quiesce, restart_at
from ds_vpipe.engine.execution.ending import Failures, finish_sends
from ds_vpipe.engine.execution.evaluation import Evaluation, evaluation_options
from ds_vpipe.engine.execution.executor import Executor
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.execution.sizes import set_sizes, with_depths
from ds_vpipe.engine.links.groups import collective_groups
from ds_vpipe.engine.observe.balance import Balance
from ds_vpipe.engine.observe.history import history_of
from ds_vpipe.engine.observe.observers import Observation
from ds_vpipe.engine.observe.statistics import COLUMNS, StageStatistics
from ds_vpipe.engine.stage import DESTROYED, UNDER_WAY
from ds_vpipe.engine.updates.clipping import GradientClipping
from ds_vpipe.engine.updates.optimizers import reset_of_powers
from ds_vpipe.engine.updates.parameter_groups import listed
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.errors import PipelineProtocolError, Refusal, VPipeConfigError, VPipeError
from ds_vpipe.schedules.moves import Move
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.nadam import end_nadam


class VPipeEngine(PatchedPipelineEngine):
    """DeepSpeed's pipeline engine with an asynchronous 1F1B schedule and weight stashing.

    Built by :func:`ds_vpipe.initialize`, or in the place of ``PipelineEngine`` with its arguments.
    ``train_batch()``, ``eval_batch()`` and the rest of the interface are ``PipelineEngine``'s. Calls that all ranks
    make raise :class:`.PipelinePeerError` where another rank failed, is lost, or did not answer in time.

    Args:
        prepared: result of :func:`ds_vpipe.engine.build.prepare`; by default it is called here.
    """

    def __init__(self, *args: Any, prepared: Prepared | None = None, **kwargs: Any) -> None:
        if prepared is None:
            kwargs, prepared = prepared_arguments(args, kwargs)
            args = ()
        with prepared.groups.building("its engine"):
            super().__init__(*args, optimizer_grid=prepared.optimizer_grid, left_out=prepared.left_out, **kwargs)
        refuse_own_instructions(self)
        self._own_instructions = dict(self._INSTRUCTION_MAP)
        self.fwd_outputs: list[Any] = []  # losses of the latest batch, on the last stage
        prepared = with_staleness(self, prepared)
        self.vpipe_config = prepared.config
        self.plan = prepared.plan  # with predicted bytes of every stage; None if the block leaves nothing to plan
        with prepared.groups.building("its links"):
            self.stage = stage_of(self, prepared)  # state of this rank, its links and its weights
        self.failures, self._process = Failures(self.stage), os.getpid()
        self._ended_in = -1  # the latest call of train_batch() that has met the end of the data
        self.clipping = self._clipping()
        self.moves = LiveMoves(self, self.stage)  # of layers from and to this stage
        self.executor = Executor(self, self.stage, COLUMNS, self.moves)  # carries out the stage's actions
        self.evaluation = Evaluation(self, self.stage, self.moves)
        self.checkpoints = Checkpoints(self, self.stage)
        self.whole_model = WholeModel(self.stage, self.drain_before)
        self.history = history_of(self, self.stage, prepared.config)  # recorded, replayed, or neither
        timeline = TimelineConfig() if self.history.replays else prepared.config.timeline
        self.observation = Observation(self, self.stage, timeline, prepared.plan)
        self.failures.at_abort.append(self.observation.end)
        self.executor.watchers = self.observation.watchers
        self.executor.watchers += self.history.watchers
        self.observation.at_loss += self.history.at_loss
        self.balance: Balance | None = None  # with "replan": measures layers, and changes split and depths
        if prepared.config.replan.every:
            self.balance = Balance(self, prepared)
            self.executor.watchers += [] if self.history.replays else [self.balance]
        every = prepared.config.recovery.every
        self.recovery = recovery_of(self, self.stage, every) if every else None
        self.executor.watchers[:0] = [] if self.recovery is None else [self.recovery]  # its copies are no pass
        for group in collective_groups(self.grid, self.module):
            self.stage.groups.failures.breaks(group)
        outlive_backend_threads()
        atexit.register(_at_exit, weakref.ref(self))

    def _clipping(self) -> GradientClipping:
        peers = self.stage.peers if self.stage.exchanges.peers else None  # else they carry overflows alone
        return GradientClipping(self, self.pipeline.synchronous, peers, self.stage.loss_scaling)

    @property
    def pipeline(self) -> Pipeline:
        """Schedule, sizes and split of the model."""
        return self.stage.pipeline

    @property
    def depth(self) -> int:
        """Warm-up depth of this stage."""
        return self.pipeline.depths[self.stage_id]

    @property
    def stashing_optimizer(self) -> WeightStashingOptimizer:
        """Versions of this stage's weights, around ``optimizer``."""
        return self.stage.weights

    @property
    def consumed_micro_batches(self) -> int:
        """Micro-batches, of the present size, that this pipeline has trained: where the data of a resumed run begin."""
        return self.global_samples // (self.train_micro_batch_size_per_gpu() * self.dp_world_size)

    # Batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train this stage up to its next update and return the mean loss of exactly that batch.

        The first stage reads up to its depth of micro-batches ahead; pass the same iterator in every call.

        Args:
            data_iter: iterator over ``(inputs, labels)`` micro-batches, which may reuse its buffers. None on stages
                in between, for the data set given to ``initialize()``, or if ``batch_fn`` makes micro-batches of None.

        Raises:
            StopIteration: on every rank, if the data end before the batch is complete. All complete batches have
                been trained, and training may go on with a new iterator.
            VPipeConfigError: the engine has no optimizer, or no stage has a weight that is trained.
        """
        self._refuse_training()
        if not torch.is_grad_enabled():
            raise VPipeError(
                "train_batch(): called where torch keeps no gradients, as under torch.no_grad(); allowed is outside of "
                "that; call eval_batch() to evaluate"
            )
        self.observation.log_messages()
        begin = time.perf_counter()
        with self.failures.aborting(), training_at_less_cost(self.module):
            loss: torch.Tensor = super().train_batch(data_iter)
            self.observation.publish()
        if self.steps_per_print() is None:
            self.timers(TRAIN_BATCH_TIMER).reset()  # no line takes the times, which would be kept for ever
        self.observation.after_batch(begin)
        if self.balance is not None:
            self.balance.after_batch(self.global_steps, time.perf_counter() - begin)
        if self.history.replays:
            self.history.updated(self)
        return loss

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        # Called by train_batch() and eval_batch(), DeepSpeed's or a subclass's. Of the schedule, type and size count.
        stage = self.stage
        if self._own_instructions != self._INSTRUCTION_MAP:  # to look at each takes long for every batch
            refuse_own_instructions(self)
        if type(pipe_schedule) is ds_schedule.InferenceSchedule:
            self._evaluate(pipe_schedule.micro_batches)
            return
        size = self.pipeline.micro_batches
        if type(pipe_schedule) is not ds_schedule.TrainSchedule or pipe_schedule.micro_batches != size:
            raise own_schedule(pipe_schedule, size)
        self._refuse_training()
        self.refuse_replaced()
        data = or_no_data(self.data_iterator, self.batch_fn)
        with self.failures.aborting():
            if self.recovery is not None:
                self.recovery.keep()
            stage.feed.next_call(data if stage.is_first or stage.is_last else None, self.batch_fn)
            try:
                with stage.under_way():
                    self.executor.train_batch()
            except StopIteration:
                self._ended_in = stage.feed.call  # on all ranks, with nothing in flight
                if (timer := self.timers(TRAIN_BATCH_TIMER)).started_:
                    timer.stop()  # with the time of batches that are not printed yet
                if self.recovery is not None:
                    self.recovery.withdraw()
                raise

    def _evaluate(self, micro_batches: int) -> None:
        if not self.evaluation.has_read:  # else eval_batch() has asked
            self.failures.refuse("evaluation")
        with self.failures.aborting():
            self.evaluation.run_schedule(micro_batches)

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        with self.executor.updating():
            super()._take_model_step(lr_kwargs)

    def clip_fp32_gradients(self) -> None:
        """Clip gradients; DeepSpeed's own method uses the norm of the first stage's alone."""
        self._global_grad_norm = self.clipping.clip(self.gradient_clipping())

    def _aggregate_total_loss(self) -> torch.Tensor:
        report, me, names = self.stage.report, self.stage.links.me, self.module.get_additional_losses()
        if report is None:
            raise PipelineProtocolError(f"{me}: batch without a loss")
        self.dp_group_loss, mean, *additional = report.losses.float().unbind()
        if len(names or ()) != len(additional):
            raise VPipeError(
                f"get_additional_losses(): got {sorted(names or ())} on {me}, {len(additional)} losses on the last "
                f"stage; return the same names on every stage, with zeros where they are not computed"
            )
        self.agg_additional_losses = None if names is None else OrderedDict(zip(names, additional, strict=True))
        return mean

    def eval_batch(self, data_iter: Iterator[Any] | None, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.eval_batch()``; all ranks call it, between any two ``train_batch()`` calls.

        Returns:
            The mean loss over ``num_micro_batches`` on every rank with ``bcast_loss``, else on the last stage, and None
            on the others. With ``reduce_output=None`` the micro-batches' losses. With ``compute_loss=False``, or
            without ``loss_fn``, outputs, on the last stage only. With ``return_logits`` a pair of this and the last
            micro-batch's output, which is None before the last stage.

        Raises:
            StopIteration: on every rank, if ``data_iter`` holds too few micro-batches.
        """
        self.failures.refuse("eval_batch()")
        options = evaluation_options(args, kwargs)
        with self.failures.aborting():
            return self.evaluation.eval_batch(super().eval_batch, data_iter, options)

    def quiesce(self, what: str = "quiesce()") -> None:
        """Empty the pipeline and keep one weight version; all ranks call it, between two batches.

        Micro-batches in flight are run again later. Copies of tied weights are equal to their owner's afterwards.

        Args:
            what: the call that needs an empty pipeline, named in a warning if it comes in every batch.

        Raises:
            VPipeError: the pipeline has failed before.
        """
        self.failures.refuse_closed(what)
        if self.stage.in_flight:
            self.stage.drains.emptied(what, "call it less often", self.global_steps, sum(self.pipeline.depths))
        self.stage.action = "QUIESCE"
        with self.failures.aborting():
            quiesce(self.stage, self.moves, what)
        if self.recovery is not None:
            self.recovery.emptied()
        self.history.event("emptied", self.global_steps)

    def move_layer(self, move: Move) -> None:
        """Let a layer go to a neighbouring stage while training runs; all ranks call it, between the same two batches.

        The pipeline does not drain; docs/semantics.md names the version of the layer that each micro-batch uses.

        Raises:
            VPipeConfigError: the move is not possible, on every rank.
        """
        self.failures.refuse("move_layer()")
        refuse_with_recovery(self.recovery, "move_layer()", str(move))
        if not isinstance(move, Move):
            raise Refusal("move_layer()", repr(move), "a ds_vpipe.schedules.moves.Move", "make one").error()
        if self.balance is not None:
            key, value = "vpipe.replan.every", self.vpipe_config.replan.every
            raise Refusal(key, value, "0 with move_layer()", "remove one of them", "it moves layers itself").error()
        refuse_moves(self, self.stage, "move_layer()")
        self.stage.action = "MOVE_LAYER"
        self.moves.give(move)
        self.history.event("move_layer", self.global_steps, until=move.micro_batch // self.pipeline.micro_batches)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's; all ranks call it, between any two batches. The current size changes nothing.

        Raises:
            ValueError: the size is not a multiple of micro-batch size and replicas.
            VPipeConfigError: it is not one batch at least.
        """
        if train_batch_size == self.train_batch_size():
            return  # scripts with a ramp-up call it before every batch
        replicas_batch = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        size, rest = divmod(train_batch_size, replicas_batch)
        pipeline = replace(self.pipeline, micro_batches=size)  # which checks the size, before anything changes
        if rest == 0:  # else DeepSpeed refuses it
            self._empty("set_train_batch_size()")
        super().set_train_batch_size(train_batch_size)
        set_sizes(self.stage, pipeline)
        restart_at(self.stage, self.stage.weights.latest_version)
        self._measure_anew()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """As DeepSpeed's, where no micro-batch of the old size has been read ahead. The current size changes nothing.

        Raises:
            VPipeConfigError: training has begun, and the latest call of ``train_batch()`` has not met the data's end.
        """
        if micro_batch_size == self.train_micro_batch_size_per_gpu():
            return
        late = not self.pipeline.synchronous and max(self.pipeline.depths) > 0
        if self.global_steps and late and self._ended_in != self.stage.feed.call:
            raise Refusal(
                "set_train_micro_batch_size()",
                micro_batch_size,
                "before the first batch, and after StopIteration",
                "write train_micro_batch_size_per_gpu in the JSON",
                "micro-batches of the old size have been read ahead",
            ).error()
        super().set_train_micro_batch_size(micro_batch_size)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; all ranks call it, between any two batches. Empties the pipeline."""
        self._move_states("offload_states()")
        super().offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; all ranks call it, between any two batches. Empties the pipeline."""
        self._move_states("reload_states()")
        super().reload_states(*args, **kwargs)

    def _move_states(self, call: str) -> None:
        if not hasattr(self.optimizer, "offload_states"):
            fix = 'write "zero_optimization": {"stage": 1}, and no data_types.grad_accum_dtype'
            raise Refusal(call, type(self.optimizer).__name__, "the optimizer of ZeRO-1", fix).error()
        self._empty(call)  # weights will be on other memory

    def set_depths(self, depths: Sequence[int]) -> None:
        """Let stages run ahead by other numbers of forward passes; all ranks call it, between any two batches.

        The pipeline is emptied (:meth:`quiesce`) and filled again with the new depths. A resumed run begins with those
        of its JSON.

        Args:
            depths: of every stage, as ``"stage_to_depth_map"`` has them; the same on all ranks.

        Raises:
            VPipeConfigError: they do not fit, or not with ``"staleness"`` or the links; on every rank.
        """
        self.failures.refuse("set_depths()")
        found = with_depths(self.stage, depths).depths
        self._empty("set_depths()")  # which completes a move that has begun
        with self.failures.aborting():
            set_sizes(self.stage, replace(self.pipeline, depth_map=found))
        self._measure_anew()

    def repartition(self, counts: Sequence[int], recompute_ratio: Sequence[float] | None = None) -> None:
        """Split the model anew while it trains; all ranks call it, between any two batches.

        The pipeline is emptied (:meth:`quiesce`). Training goes on as after a resume with the new split, but random
        states go on as they are. Parameters of layers that have moved are other objects afterwards.

        Args:
            counts: layers of every stage, the same on all ranks.
            recompute_ratio: of every stage; default: as it is.

        Raises:
            VPipeConfigError: the counts do not fit, or layers cannot move in this configuration.
        """
        self.failures.refuse_closed("repartition()")
        refuse_with_recovery(self.recovery, "repartition()", counts)
        refuse_moves(self, self.stage, "repartition()")
        found, ratios = checked_split(self.stage, counts, recompute_ratio)
        with self.failures.aborting():
            if repartition(self, self.stage, lambda: self._empty("repartition()"), found, ratios):
                self.clipping = self._clipping()
        self._measure_anew()

    def _empty(self, what: str) -> None:
        self.quiesce(what)
        self.moves.give_up()

    def _measure_anew(self) -> None:
        if self.balance is not None:
            self.balance.start_over()

    def recover(self) -> bool:
        """Go on from the states that ``"recovery"`` has kept before this start; all ranks call it, before they train.

        The caller's iterator has to begin at :attr:`consumed_micro_batches`, as after :meth:`load_checkpoint`, which is
        to be called if this returns False: nothing is kept, not by all ranks, or of other sizes.

        Raises:
            VPipeError: the engine has trained.
        """
        if self.recovery is None:
            return False
        self.failures.refuse("recover()")
        self._refuse_training()
        if self.global_steps or self.stage.in_flight:
            raise VPipeError(
                f"recover(): got an engine whose count of updates is {self.global_steps}, allowed is 0; call it before "
                f"train_batch() and load_checkpoint()"
            )
        with self.failures.aborting():
            return self.recovery.recover()

    def register_random_state(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Random state that recomputation, evaluation and checkpoints restore.

        Those of torch, Python, NumPy and DeepSpeed's and Megatron's trackers are registered already.

        Args:
            name: its name in checkpoints.
            get: returns a copy of the state, which later draws do not change.
            put: makes such a state the current one.

        Raises:
            VPipeError: the name is taken.
        """
        self.stage.random_states.register(name, get, put)

    # Checkpoints and weights

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's; all ranks call it, between any two batches.

        The pipeline is emptied (:meth:`quiesce`). The folder gets its name, and ``latest`` the name of the folder,
        only when it is complete. All ranks use the first rank's name: there may be the time in it.

        Raises:
            VPipeConfigError: a tag that names no folder in ``save_dir``, tags that differ and ``tag_validation`` is
                Fail, or a key of ``client_state`` that the engine has. Nothing is written.
            VPipeError: files cannot be written; the previous checkpoint is still there, and training may go on.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint(save_dir): got {save_dir!r}, allowed is the path of a folder; name one")
        self.failures.refuse("save_checkpoint()")
        if not self.history.writes(save_dir):
            reset_of_powers(self)()
            return True
        self.quiesce("save_checkpoint()")
        with self.failures.aborting_if_lost("save_checkpoint()"):
            tag = self.checkpoints.save(
                super().save_checkpoint, save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )
        reset_of_powers(self)()  # as a run has them that goes on from here
        self.history.event("saved", self.global_steps, folder=os.path.abspath(save_dir), tag=tag)
        return True

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

        With ``"replan"`` layers take the split of a checkpoint whose run began with the split that this one began with.
        The caller's iterator has to begin at :attr:`consumed_micro_batches`; the one used before goes on with the
        micro-batches that were read ahead, which are else dropped.

        Raises:
            VPipeError: the checkpoint is of another model, or files are lost. Load another one before anything else.
        """
        if custom_load_fn is not None:
            raise Refusal(
                "load_checkpoint(custom_load_fn)", custom_load_fn, "None, since every stage has layers of its own",
                "leave it out and change the weights after loading",
            ).error()  # fmt: skip
        tag = None if tag is None else str(tag)  # save_checkpoint() takes numbers, too
        if load_optimizer_states and not load_module_only:
            found = self.history.checkpoint(load_dir, tag)
            if found is None:
                return None, None  # as where there is none
            load_dir, tag = found
        self._empty("load_checkpoint()")
        balance = None if load_module_only or self.vpipe_config.replan.dry_run else self.balance
        try:
            with self.failures.aborting_if_lost("load_checkpoint()"):
                return self.checkpoints.load(
                    super().load_checkpoint,
                    load_dir,
                    tag,
                    follow=None if balance is None else balance.follow,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                )
        finally:
            if self.recovery is not None:
                self.recovery.forget()
            self._measure_anew()
            reset_of_powers(self)()
            self.history.event("loaded", self.global_steps)

    def full_state_dict(
        self, rank0_only: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """A copy of the whole model's state dict in host memory; all ranks call it, where ``save_checkpoint()`` may be.

        Weights are the newest ones. Names are those of the script's plain model, or as in
        ``PipelineModule.state_dict()``.

        Args:
            rank0_only: only the first stage's ranks get it; others get an empty one and need no memory for it.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Raises:
            VPipeError: another rank makes another call.
        """
        return self.whole_model.full_state_dict("full_state_dict()", rank0_only, exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's; all ranks call it. The file appears when it is complete.

        Raises:
            VPipeError: the file cannot be written, or another rank makes another call.
        """
        if self.history.writes(save_dir):
            self.whole_model.save(save_dir, save_filename, exclude_frozen_parameters)
        else:
            self.full_state_dict(rank0_only=True)  # which drains, as in the run
        return True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the whole model can be gathered, as Accelerate asks before it does: always."""
        return True

    def drain_before(self, what: str) -> None:
        """Empty the pipeline before ``what``, which all stages do together."""
        self.quiesce(what)

    # Observation, and the end

    def statistics(self) -> list[StageStatistics]:
        """Measurements of the latest batch: every stage's record on the first stage, elsewhere the stage's own.

        The records are those of this rank's pipeline; other replicas have their own. Empty before the first batch.
        """
        return self.observation.statistics()

    def save_timeline(self) -> Path | None:
        """Write this rank's recording so far to ``timeline.path``, as is also done when the engine ends.

        Returns:
            The file of this rank, or None if nothing is recorded.
        """
        return self.observation.save_timeline()

    def destroy(self) -> None:
        """Leave the pipeline: wait until neighbours have received what they need, drop micro-batches in flight.

        Raises:
            VPipeError: within a batch or an evaluation, such as from a layer or a signal handler.
        """
        if "observation" in self.__dict__ and not self.forked:
            if self.stage.closed == UNDER_WAY and self.stage.failure is None:
                self.failures.refuse_closed("destroy()")
            self.stage.closed = DESTROYED
            end_nadam(self.basic_optimizer)
            self._end()
            # Their autograd graphs refer to the engine through hooks, in cycles that the garbage collector cannot see.
            self.stage.in_flight.clear()
            self.whole_model.leave()
        super().destroy()

    @property
    def forked(self) -> bool:
        """Whether this process is a child that the engine's has forked, which has no part in the pipeline."""
        return os.getpid() != self._process

    def _end(self) -> None:
        finish_sends(self.stage)
        self.observation.end()
        self.history.end()
        try:
            self.stage.wiring.stop()
        finally:
            self.stage.groups.failures.stop()

    def _refuse_training(self) -> None:
        if self.basic_optimizer is None or not self.trains:
            self.refuse_untrained()
        self.failures.refuse("train_batch()")

    def refuse_untrained(self) -> NoReturn:
        """Refuse to train without an optimizer, or weights for one; evaluations need neither."""
        if self.basic_optimizer is None:
            raise VPipeConfigError(
                "optimizer: got none, allowed is one that initialize() is given or that the DeepSpeed JSON names; "
                'add "optimizer": {"type": ..., "params": {...}} to the JSON'
            )
        raise VPipeConfigError(
            "optimizer: got no parameter that is trained, on any stage; allowed is one at least; look at what selects "
            "model_parameters, let parameters require gradients before initialize(), or make an optimizer anew that "
            "another engine has used"
        )

    # DeepSpeed's hooks

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if "stage" not in self.__dict__:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        # A script may call this after initialize(), when it knows batch sizes and replicas.
        self.quiesce("_configure_optimizer()")
        model_parameters = listed(model_parameters)  # which may be iterators, and are looked at twice
        refuse_late_optimizer(self, self.stage, client_optimizer, model_parameters)
        end_nadam(self.basic_optimizer)
        super()._configure_optimizer(client_optimizer, model_parameters)
        self.note_parameters()
        use_optimizer(self, self.stage, self.vpipe_config)
        self.stage.weights.take_over(self.optimizer, self.module.parameters())
        self.clipping = self._clipping()

    def _reduce_outputs(
        self, outputs: list[Any], reduce: str | None = "avg", reduce_dp: bool = True, micro_batches: int | None = None
    ) -> Any:
        return self.evaluation.reduced(outputs, reduce, self.dp_world_size if reduce_dp else 1)

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        return self.evaluation.broadcast(data, dtype)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoints.write(super()._save_checkpoint, *args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoints.write(super()._save_zero_checkpoint, *args, **kwargs)

    def _common_checkpoint_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._common_checkpoint_state(*args, **kwargs), LAYOUT_KEY: stage_layout(self).plain()}

    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, on all ranks or on none."""
        self.checkpoints.load_module(super().load_module_state_dict, *args, **kwargs)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        found = self.whole_model.full_state_dict("_consolidated_16bit_state_dict()", True, exclude_frozen_parameters)
        return found if self.global_rank == 0 else None


def _at_exit(engine: weakref.ref[VPipeEngine]) -> None:
    alive = engine()
    if alive is not None and not alive.forked:
        alive._end()
        end_workers(alive.training_dataloader)
        end_workers(alive.data_iterator)  # where DeepSpeed keeps it once another iterator has been given
