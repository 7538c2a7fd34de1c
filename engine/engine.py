"""The asynchronous pipeline engine: stage programs of :mod:`ds_vpipe.schedules`, carried out inside DeepSpeed.

:class:`VPipeEngine` replaces what DeepSpeed's ``PipelineEngine`` does within a batch and leaves the rest
to it: configuration, optimizers and precision, reduction over replicas, learning-rate schedules,
reporting, checkpoints. A call of ``train_batch()`` runs this stage's program up to its next update::

    call t, stage s of K     F .. F   (warm-up, after a start or a drain only)
                             F B  F B  ..  F B   M pairs; forwards run W micro-batches ahead
                             REDUCE STEP         this stage's own update t

Data end in band: in place of an activation the first stage sends END, and every stage drains to the
last complete batch. The mean loss of a batch rides with the gradient of its last micro-batch, so that
every stage has it before its own update without a message or a wait of its own. A failing stage sends
ABORT on all its links, in place of whatever its neighbours wait for.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeSchedule

from ds_vpipe.engine.backend_threads import outlive_backend_threads
from ds_vpipe.engine.build import Prepared, prepared_arguments
from ds_vpipe.engine.checkpoint.saving import SavingMixin
from ds_vpipe.engine.execution import instructions as instr
from ds_vpipe.engine.execution.batch_loss import BatchLoss
from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.execution.drain_watch import RestWatch
from ds_vpipe.engine.execution.draining import EndOfData
from ds_vpipe.engine.execution.evaluation import EvaluationMixin
from ds_vpipe.engine.execution.executor import ExecutionMixin
from ds_vpipe.engine.execution.in_flight import StageState
from ds_vpipe.engine.handshake import without_handshake
from ds_vpipe.engine.links.groups import collective_groups
from ds_vpipe.engine.links.link import is_of_collective
from ds_vpipe.engine.links.sender import Sender, abort_all
from ds_vpipe.engine.links.stage_links import Neighbours
from ds_vpipe.engine.modules.activation_checkpointing import use_sound_checkpointing
from ds_vpipe.engine.modules.fast_walks import training_by_list
from ds_vpipe.engine.observe.observers import Observation, ObservationMixin
from ds_vpipe.engine.updates.tied import TiedWeights, tied_stages
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError
from ds_vpipe.schedules.check import check_pipeline
from ds_vpipe.schedules.one_f_one_b import exchanges_by_rank
from ds_vpipe.staleness.delay_warmup import DelayWarmup

_EXIT_GRACE_S = 60.0


class VPipeEngine(EvaluationMixin, ExecutionMixin, SavingMixin, ObservationMixin):
    """DeepSpeed's pipeline engine with an asynchronous 1F1B schedule and weight stashing.

    Built by :func:`ds_vpipe.initialize`, or in the place of ``PipelineEngine`` with its arguments.
    ``train_batch()``, ``eval_batch()`` and the rest of the interface are ``PipelineEngine``'s.

    Args:
        prepared: what :func:`ds_vpipe.engine.build.prepare` has made of the arguments, if they have been there.

    Attributes:
        stashing_optimizer: the versions of this stage's weights, around ``optimizer``.
        depth: this stage's warm-up depth.
        state: how far this stage has come, and its micro-batches in flight.
        plan: what the planner has found, with predicted bytes of every stage, where the block left something to it.
    """

    def __init__(self, *args: Any, prepared: Prepared | None = None, **kwargs: Any) -> None:
        if prepared is None:
            kwargs, prepared = prepared_arguments(args, kwargs)
            args = ()
        with without_handshake():
            super().__init__(*args, **kwargs)
        self._list_modules()
        self.vpipe_config = prepared.config
        self.pipeline = prepared.pipeline
        self.plan = prepared.plan
        self.random_states = prepared.random_states
        self.asynchronous = self.vpipe_config.sync_mode == "asp"
        self.groups, self._agreement = prepared.groups, prepared.agreement
        self._plan()
        self.state = StageState()
        self.neighbours = Neighbours(self.grid, self.pipeline, self.groups, self.device)
        self.mitigation = self._make_mitigation()
        self.stashing_optimizer = self._make_stashing_optimizer()
        self._vertical = self.pipeline.vertical
        use_sound_checkpointing(self.module, self.asynchronous, self.random_states)
        self.ties = self._make_ties()
        self._prepare_updates()
        self._feed = MicroBatchFeed(self.device, inputs=self.is_first_stage(), labels=self.is_last_stage())
        self._sets_back = self.asynchronous and self.num_stages > 1
        self._rests = RestWatch(self.global_rank == 0)
        self._make_states_whole()
        self._observation = Observation(self)
        for group in collective_groups(self.grid, self.module):
            self.groups.failures.breaks(group)
        outlive_backend_threads()
        atexit.register(_at_exit, weakref.ref(self))

    def _broadcast_model(self) -> None:
        # DeepSpeed 0.19.8 sends views as bytes, which tensors without dimensions do not have.
        scalars = [parameter for parameter in self.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        super()._broadcast_model()
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    # Batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train this stage up to its next update and return the mean loss of exactly that batch.

        The first stage reads up to its depth of micro-batches ahead; pass the same iterator in every
        call. Only the first stage uses inputs and only the last labels.

        Args:
            data_iter: iterator over ``(inputs, labels)`` micro-batches, which may refill its buffers; None on stages
                in between, to use the data set given to ``initialize()``, or where ``batch_fn`` makes them of None.

        Raises:
            StopIteration: on every rank, if the data do not suffice for the batch. All complete batches
                have been trained, and training may go on with a new iterator.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        if self.optimizer is None:
            raise VPipeConfigError(
                "optimizer: got none, allowed is one that initialize() is given or that the DeepSpeed JSON names; "
                'add "optimizer": {"type": ..., "params": {...}} to the JSON'
            )
        if self.state.failure is not None:
            raise VPipeError(f"train_batch() after a failure: {self.state.failure}; restart from a checkpoint")
        self._refuse_half_loaded("train_batch()")
        reads = self.is_first_stage() or self.is_last_stage()
        self._feed.next_call(
            self._or_no_data(self.data_iterator if data_iter is None else data_iter) if reads else None,
            self._agreement.all_have,
        )
        try:
            with training_by_list(self.module, self._parts):
                loss: torch.Tensor = super().train_batch(data_iter)
            self._publish_statistics()
            return loss
        except StopIteration:
            self.timers(TRAIN_BATCH_TIMER).reset()
            raise
        except BaseException as error:
            self._abort(error)
            raise

    def _train_schedule(self) -> PipeSchedule:
        progress, drain = self.state.progress, self._next_drain(self.global_steps)
        if drain is not None and progress.limit is None:
            end = progress.completed // self.micro_batches + drain - self.global_steps
            self.state.progress = dataclasses.replace(progress, limit=end * self.micro_batches)
        return instr.StageSchedule(self.pipeline, self.stage_id, self.state.progress, self._exchanges)

    def _next_drain(self, batch: int) -> int | None:
        """The first batch after a given one before which the pipeline is to be empty; None if there is none.

        Batches are numbered from 0 since the start of training.
        """
        return self.delay_warmup.drain_interval(batch)[1] if self.asynchronous else batch + 1

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        if not isinstance(pipe_schedule, instr.StageSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        state = self.state
        state.report = None
        if self.is_last_stage():
            state.batch_loss = BatchLoss(self.micro_batches, self.mpu.get_data_parallel_group(), self.dp_world_size)
        end = (state.progress.completed // self.micro_batches + 1) * self.micro_batches
        try:
            while True:
                known = self._carry_out_all(pipe_schedule)
                if state.progress.completed == end:
                    break
                if known:
                    self._refill()
                pipe_schedule = self._train_schedule()
        finally:
            self.stashing_optimizer.load_new_params()
        if self.ties is not None and state.progress.completed == state.progress.limit:
            self.ties.catch_up(state.progress.completed // self.micro_batches)

    def _carry_out_all(self, pipe_schedule: PipeSchedule) -> bool:
        """Carry out a schedule; False if the data have ended meanwhile, which changes the rest of it."""
        try:
            for step in pipe_schedule:
                for instruction in step:
                    self.state.doing = instruction
                    self._carry_out(instruction)
        except EndOfData:
            return False
        return True

    def _aggregate_total_loss(self) -> torch.Tensor:
        if self.state.report is None:
            raise PipelineProtocolError(f"{self.neighbours.me}: batch without a loss")
        losses = torch.from_numpy(self.state.report.losses).to(self.device, torch.float32)
        self.dp_group_loss, mean, *additional = losses.unbind()
        names = self.module.get_additional_losses()
        if names is None and len(losses) == 2:
            self.agg_additional_losses = None
        elif len(names or ()) == len(losses) - 2:
            self.agg_additional_losses = OrderedDict(zip(names, additional, strict=True))
        else:
            raise VPipeError(
                f"get_additional_losses(): got {sorted(names or ())} on {self.neighbours.me}, {len(losses) - 2} losses "
                f"on the last stage; return the same names on every stage, with zeros where they are not computed"
            )
        return mean

    def _plan(self) -> None:
        """What all stages do from here on, and whether it can be done."""
        config = self.vpipe_config
        self.pipeline = dataclasses.replace(self.pipeline, micro_batches=self.micro_batches)
        self._clips_globally = (
            self.asynchronous
            and self.num_stages > 1
            and config.gradient_clipping_scope == "delayed_global"
            and self.gradient_clipping() > 0
        )
        tied = tied_stages(self.module).values() if self.asynchronous else ()
        exchanges = exchanges_by_rank(self.num_stages, tied, self._clips_globally)
        check_pipeline(self.pipeline, exchanges)
        self._exchanges = exchanges[self.stage_id]
        self.depths = self.pipeline.depths
        self.depth = self.depths[self.stage_id]
        self.delay_warmup = DelayWarmup.of(config.staleness, max(self._delays(self.micro_batches)))

    def _make_ties(self) -> TiedWeights | None:
        if not self.asynchronous or not tied_stages(self.module):
            return None
        if self.using_bf16_optimizer:
            raise VPipeConfigError(
                'data_types.grad_accum_dtype: got "fp32" for a model with weights tied across stages, whose gradients '
                'travel before DeepSpeed\'s optimizer adds them in fp32; allowed: "bf16", or "fp32" in "bsp"; remove '
                "the key"
            )
        return TiedWeights(self.module, self.grid, self.depths, self.groups, self.device)

    def register_random_state(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Let recomputation, evaluation and checkpoints put back a random state that is not torch's own.

        Python's, NumPy's and those of DeepSpeed's and Megatron's trackers are known without.

        Args:
            name: in checkpoints.
            get: returns the state, which later draws do not change.
            put: makes such a state the current one.
        """
        self.random_states.register(name, get, put)

    def destroy(self) -> None:
        """Leave the pipeline: let the neighbours have what was sent, and drop the micro-batches in flight."""
        if "state" in self.__dict__:
            self._finish_sends()
            self._end_observation()
            self._leave()
            # Their graphs refer to the engine through hooks, in cycles that Python cannot see.
            self.state.flights.clear()
        super().destroy()

    def _abort(self, error: BaseException) -> None:
        """Tell all ranks why this one stops.

        Raises:
            PipelinePeerError: the error is that of a collective of DeepSpeed's which another rank's failure has ended.
        """
        failures, me = self.groups.failures, self.neighbours.me
        reason = error.reason if isinstance(error, PipelinePeerError) else None
        elsewhere = None
        if reason is None and is_of_collective(error):
            elsewhere = reason = failures.reason()
        if reason is None:
            text = " ".join(str(error).split())
            reason = f"{me} failed in {self.state.doing}: {type(error).__name__}: {text}"
        self.state.failure = reason
        failures.tell(reason)
        abort_all(tuple(self._links_to_abort()), reason)
        failures.wait_until_seen()
        self._end_observation()
        if elsewhere is not None:
            raise PipelinePeerError(f"{me} stopped waiting in {self.state.doing}: {reason}", reason) from error

    def _links_to_abort(self) -> Iterable[Sender]:
        """The sending ends on whose other ends somebody may wait."""
        links = () if self.ties is None else (*self.ties.weights_out, *self.ties.gradients_out)
        return (*self.neighbours.senders, *links)

    def _leave(self) -> None:
        self.neighbours.courier.stop()
        self.groups.failures.stop()

    def _finish_sends(self) -> None:
        """A stage that is done stays until its neighbours have what they still need of it."""
        if self.state.failure is not None:
            return
        deadline = time.monotonic() + _EXIT_GRACE_S
        needed = [self.neighbours.gradients_out, *(() if self.ties is None else self.ties.gradients_out)]
        if self.state.progress.drained:  # the news that the data have ended, and the final tied weights
            needed += [self.neighbours.activations_out, *(() if self.ties is None else self.ties.weights_out)]
        for sender in needed:
            if sender is not None:
                sender.wait_for_all(deadline)

    _INSTRUCTION_MAP = {  # noqa: RUF012 - the name and the form are DeepSpeed's
        **PipelineEngine._INSTRUCTION_MAP,
        **EvaluationMixin.EVALUATION_MAP,
        **ExecutionMixin.EXECUTION_MAP,
    }


def _at_exit(engine: weakref.ref[VPipeEngine]) -> None:
    alive = engine()
    if alive is not None:
        alive._finish_sends()
        alive._end_observation()
        alive._leave()
