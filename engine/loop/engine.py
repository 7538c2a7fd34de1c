"""The engine for scripts that loop ``loss = engine(**batch); engine.backward(loss); engine.step()``.

It carries out the same stage programs as :class:`~ds_vpipe.engine.engine.VPipeEngine`, in the portions of
:mod:`ds_vpipe.schedules.rounds`: round ``n`` of the script hands in micro-batch ``n``. A script sees the same on all
ranks at the same line, whatever their stages have done by then: micro-batches and updates are counted as they are
handed in. What needs all stages at the same micro-batch (evaluation, checkpoints, the end of the script) drains the
pipeline first.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from deepspeed.utils import logger
from torch.utils._pytree import tree_map_only

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.execution.evaluation import outside_inference_mode
from ds_vpipe.engine.loop.call_order import check_loss
from ds_vpipe.engine.loop.evaluation import ScriptEvaluation
from ds_vpipe.engine.loop.rounds import Rounds
from ds_vpipe.engine.loop.script_end import ScriptEnd
from ds_vpipe.engine.loop.script_loss import check_graph
from ds_vpipe.engine.stage import DESTROYED
from ds_vpipe.engine.updates.parameter_groups import follow, mark_states, restricted
from ds_vpipe.errors import CallOrderError, Refusal, VPipeConfigError
from ds_vpipe.schedules.moves import Move


class VPipeLoopEngine(VPipeEngine):
    """DeepSpeed's engine of a plain module, as a pipeline.

    Built by :func:`ds_vpipe.initialize` from a module that is no ``PipelineModule``, which becomes a
    :class:`.SplitModule`.

    ``micro_steps``, ``global_steps`` and ``global_samples`` are as the script counts, alike on all ranks at the same
    line; the stage's own updates are ``stashing_optimizer.latest_version``.

    What is to be called between two batches, or two rounds, raises a :class:`.CallOrderError` elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pipeline.virtual_stages > 1:
            raise VPipeConfigError(
                f'vpipe.schedule: got "{self.pipeline.schedule}" for a module that is called micro-batch by '
                f'micro-batch; allowed: "1f1b" and "gpipe"; write "1f1b" and remove vpipe.virtual_stages'
            )
        if self.recovery is not None:
            every, fix = self.vpipe_config.recovery.every, "write 0, or call train_batch()"
            why = "the module is called micro-batch by micro-batch"
            raise Refusal("vpipe.recovery.every", every, "0 here", fix, why).error()
        self.rounds = Rounds(self)  # passes and updates in the portions in which the script asks for them
        self.script_evaluation = ScriptEvaluation(self, self.rounds)
        self.script_end = ScriptEnd(self, self.rounds, self.drain)  # what is left to do when the script ends
        self.failures.at_abort.append(self.script_end.forget)
        self.failures.refusals.append(self.whole_model.refuse_written)
        self._boundary: bool | None = None  # what the script has said
        self._stepped = False  # by backward(), where no batch ends: the script's own step() then does nothing
        self._packed: Any = ()  # the latest micro-batch
        self._scheduler = self.lr_scheduler  # when the pipeline was last empty, with which updates in flight go
        self._batch_began = 0.0
        timer = self.tput_timer.config
        if "synchronized" not in timer.model_fields_set:  # else it waits for the device in every micro-batch
            self.tput_timer.config = timer.model_copy(update={"synchronized": False})
        if (calls := self.module.stage_model.direct_calls) is not None:
            calls.engine = weakref.ref(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand in a micro-batch and run this stage's forward pass of it.

        In ``eval()`` mode, or without gradients, evaluate it instead.

        Args:
            args: what the module's ``forward`` takes. In training those of the first stage's rank are used, of the
                others the structure only; in an evaluation each rank gets what is returned for its own.
            kwargs: likewise.

        Returns:
            The loss: on the last stage of this micro-batch, on others of the newest one whose loss is known without
            a wait; while the pipeline is being filled they wait for this one's. In an evaluation everything that the
            module returns, on all stages.

        Raises:
            CallOrderError: ``backward()`` or ``step()`` is due.
        """
        self.failures.refuse("engine(...)")
        if self.fp16_auto_cast():
            args = tree_map_only(torch.Tensor, lambda x: x.half() if x.is_floating_point() else x, args)
        model = self.module.user_module  # scripts set its mode, too
        if not (model.training and torch.is_grad_enabled()):
            self.drain("evaluation")  # the first evaluation after a round does so, others find it drained
            with self.failures.aborting():
                return self.script_evaluation.run(args, kwargs)
        self.rounds.order.expect("engine(...)")
        self.tput_timer.start()
        self._stepped = False
        self.rounds.begin_batch_anew()
        if not self.rounds.in_batch:
            self._batch_began = time.perf_counter()
        with self.failures.aborting():
            self.stage.action = "engine(...)"
            self.module.stage_model.refuse_hooks("_backward_hooks")  # which a script may have registered since
            packed = self.module.stage_model.pack(args, kwargs)
            self._compare(packed)
            self._packed = packed
            if self.script_end.idle:
                self._scheduler = self.lr_scheduler
            self.script_end.expect()
            self.script_evaluation.round_begins()
            loss = self.rounds.run_forward(packed)
        self.rounds.order.done("engine(...)")
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward passes that are due on this stage. ``step()`` comes next.

        On the last stage ``loss`` is differentiated, whatever the script has made of what ``engine(...)`` returned.

        Args:
            loss: made of what ``engine(...)`` returned.
            retain_graph: False.
            scale_wrt_gas: divide by the micro-batches of a batch; else the script has done it.

        Returns:
            The loss, so divided, as DeepSpeed does.

        Raises:
            CallOrderError: another call is due, or ``loss`` is no scalar with a graph, or depends on tensors that
                require gradients other than by what ``engine(...)`` returned.
            VPipeConfigError: the engine has no optimizer, or no stage has a weight that is trained.
        """
        self.failures.refuse_closed("backward()")
        if self.basic_optimizer is None or not self.trains:
            self.refuse_untrained()
        if retain_graph:
            raise CallOrderError("backward(retain_graph): got True, allowed in a pipeline is False; leave it out")
        check_loss(loss)
        self.rounds.order.expect("backward()")
        ends_batch = self.rounds.ends_batch
        if self._boundary is False and ends_batch:
            raise CallOrderError(
                f"set_gradient_accumulation_boundary(False): the micro-batch in backward() is number "
                f"{self.micro_batches} of {self.micro_batches} of its batch, allowed is True; batches end by "
                f"gradient_accumulation_steps in the DeepSpeed JSON at the latest, so set it as those do"
            )
        if self.num_stages > 1:
            check_graph(loss)
            self.rounds.others.agree_on(loss)
        with self.failures.aborting():
            self.rounds.run_backward(loss if scale_wrt_gas else loss * self.micro_batches)
        self.rounds.order.done("backward()")
        if self._boundary is False:
            self.step()
            self._stepped = True
        return loss.detach() / self.micro_batches if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update this stage if a batch has ended here, and count the micro-batch.

        Raises:
            CallOrderError: another call is due, or gradients have been changed since ``backward()``.
        """
        self.failures.refuse_closed("step()")
        late = not self.pipeline.synchronous and self.pipeline.depths[0] > 0
        if lr_kwargs and late and self.lr_scheduler is not None:
            why = "the update that is due is that of an earlier batch"
            fix = "step a scheduler of your own, which initialize() does not know, with them"
            raise Refusal("step(lr_kwargs)", lr_kwargs, "None in asp", fix, why).error()
        if late and self.lr_scheduler is not self._scheduler:
            raise CallOrderError(
                "engine.lr_scheduler: got another one while micro-batches are in flight, allowed is to change it in an "
                "empty pipeline, since updates of earlier batches are due on some stages; call engine.drain() before, "
                "on every rank"
            )
        if self._stepped:
            self._stepped = False
            return
        self.rounds.order.expect("step()")
        self.rounds.refuse_step(self._boundary is True or self.rounds.ends_batch)
        self.lr_kwargs = lr_kwargs
        with self.failures.aborting(), outside_inference_mode():
            self.rounds.run_step()
            if self._boundary is True and self.rounds.in_batch:
                self.rounds.complete_batch(self._packed)
            if self.rounds.is_drain_due():
                self._drain()
        self.rounds.order.done("step()")
        self.tput_timer.stop(global_step=not self.rounds.in_batch, report_speed=self.global_rank == 0)
        if self.rounds.in_batch:
            return
        if self.balance is not None:
            self.balance.after_batch(self.global_steps, time.perf_counter() - self._batch_began)
        self.history.updated(self)

    # Drains, and calls that need one

    def train(self, mode: bool = True) -> None:
        """As DeepSpeed's. Drains before an evaluation where modules act on the mode, as LoRA's that merge weights."""
        model = self.module.user_module
        # A model's own method, such as that of every model of transformers, has no weights to act on.
        acts = any(part._parameters and type(part).train is not torch.nn.Module.train for part in model.modules())
        if acts and not mode and model.training and not self.stage.closed:
            self.drain("eval()")
        super().train(mode)

    def eval(self) -> None:
        """As :meth:`train` with False."""
        self.train(False)

    def drain(self, what: str = "drain()") -> None:
        """Train everything handed in on every stage. All ranks call it, between two rounds.

        Raises:
            PipelineProtocolError: the stages have been handed different numbers of micro-batches.
        """
        self.failures.refuse_closed(what)
        self.rounds.order.expect_between(what)
        if not self.script_end.idle:
            if self.stage.asynchronous and self.stage.in_flight:
                self.stage.drains.emptied(what, "do that less often", self.global_steps, 0)
            with self.failures.aborting():
                self._drain()

    def drain_before(self, what: str) -> None:
        """Drain, and meet the other stages even if nothing is in flight: one that goes on instead ends with a line."""
        self.failures.refuse_closed(what)
        self.rounds.order.expect_between(what)
        with self.failures.aborting():
            self._drain()

    def quiesce(self, what: str = "quiesce()") -> None:
        """Drains: what has been handed in cannot be set back."""
        self.drain(what)
        super().quiesce(what)

    def _drain(self) -> None:
        self.rounds.drain()
        self.script_end.forget()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; all ranks call it, after ``step()``. Drains; a batch that is not complete is forgotten."""
        found = super().load_checkpoint(*args, **kwargs)
        if found[0] is not None:
            self.rounds.loaded()
        return found

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's; all ranks call it, between two batches. Drains, if the size is another one."""
        if train_batch_size == self.train_batch_size():
            return
        self._refuse_in_batch(f"set_train_batch_size({train_batch_size})")
        super().set_train_batch_size(train_batch_size)
        self.tput_timer.batch_size = train_batch_size
        self.rounds.forget_batch()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """As DeepSpeed's; all ranks call it, between two batches. Nothing is read ahead of what the script hands in.

        Drains, if the size is another one.
        """
        if micro_batch_size == self.train_micro_batch_size_per_gpu():
            return
        self._refuse_in_batch(f"set_train_micro_batch_size({micro_batch_size})")
        self.drain("set_train_micro_batch_size()")
        PatchedPipelineEngine.set_train_micro_batch_size(self, micro_batch_size)
        self.tput_timer.batch_size = self.train_batch_size()

    def repartition(self, counts: Sequence[int], recompute_ratio: Sequence[float] | None = None) -> None:
        """As without rounds; all ranks call it, between two batches. Drains."""
        self._refuse_in_batch("repartition()")
        before = self.optimizer
        super().repartition(counts, recompute_ratio)
        if self.optimizer is not before:  # a wrapper made anew
            self.optimizer.zero_grad = partial(self._on_stage, self.optimizer.zero_grad)
        self.rounds.layers_changed()

    def set_depths(self, depths: Sequence[int]) -> None:
        """As without rounds; all ranks call it, between two batches. Drains."""
        self._refuse_in_batch("set_depths()")
        super().set_depths(depths)

    def _refuse_in_batch(self, call: str) -> None:
        if self.rounds.in_batch:
            raise CallOrderError(
                f"{call}: called after {self.rounds.in_batch} of a batch's {self.micro_batches} micro-batches; call it "
                f"where a batch has ended"
            )

    def destroy(self) -> None:
        """Train what is in flight, if between two rounds, and leave the pipeline."""
        if "rounds" in self.__dict__ and not self.forked:
            if self.rounds.order.between_rounds and self.stage.failure is None and not self.stage.closed:
                self.drain("destroy()")
            self.script_end.forget()
        super().destroy()

    # What DeepSpeed and scripts ask of the engine

    # With these and step() it is an optimizer for Fabric, which else calls the optimizer's own step().
    @property
    def param_groups(self) -> Any:
        """Those of the stage's optimizer."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        """Those of the stage's optimizer."""
        return getattr(self.basic_optimizer, "defaults", {})  # wrappers may have none

    @property
    def state(self) -> Any:
        """That of the stage's optimizer."""
        return self.optimizer.state

    def zero_grad(self) -> None:
        """Drop the gradients of the script's batch so far; each stage does so before its next backward pass."""
        self._on_stage(super().zero_grad)

    def is_gradient_accumulation_boundary(self) -> bool:
        """What the script has said, else whether its micro-batch ends a batch, on all ranks alike."""
        if "rounds" not in self.__dict__ or self.rounds.is_within_engine:
            return bool(super().is_gradient_accumulation_boundary())
        return self.rounds.ends_batch if self._boundary is None else self._boundary

    def was_step_applied(self) -> bool:
        """Whether the latest ``step()`` ended a batch for the script, on all ranks alike; in bsp without overflow."""
        ended = self.micro_steps > 0 and not self.rounds.in_batch
        return ended and (not self.pipeline.synchronous or bool(super().was_step_applied()))

    def _cast_inputs_half(self, inputs: Any) -> Any:
        return inputs  # of stages, among them float32 tensors that cross a cut; forward() has cast the script's

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's, as with DeepSpeed; all ranks call it. Within a save, the stage's part."""
        if self.__dict__.get("_curr_ckpt_path") is not None:
            return super().module_state_dict(*args, **kwargs)
        _refuse_options("module_state_dict()", args, kwargs)
        return self.module.user_module.state_dict()

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any) -> None:
        """Load the whole model's weights from ``checkpoint["module"]``; within a load, the stage's part."""
        if checkpoint.get("module") is not None:
            _refuse_options("load_module_state_dict()", args, kwargs)
            self.module.user_module.load_state_dict(checkpoint["module"], strict)
        else:
            super().load_module_state_dict(checkpoint, strict, *args, **kwargs)

    def _is_within_engine(self) -> bool:
        """Whether DeepSpeed asks, or, after ``destroy()``, a script that goes on without the engine."""
        return "rounds" in self.__dict__ and (self.rounds.is_within_engine or self.stage.closed == DESTROYED)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        own = self.module.stage_model.own_parameters
        if isinstance(client_optimizer, torch.optim.Optimizer):
            follow(client_optimizer, own)
        else:
            model_parameters = restricted(model_parameters, own, self.placeholder)
        super()._configure_optimizer(client_optimizer, model_parameters)
        if self.__dict__.get("_marked") is not self.basic_optimizer:  # once for each: a script may call this later
            self._marked = self.basic_optimizer
            mark_states(self._marked, partial(_owner, weakref.ref(self)))
        holders = (self.optimizer, self.basic_optimizer, self.module, self.module.user_module)
        for holder in {id(found): found for found in holders if found is not None}.values():
            holder.zero_grad = partial(self._on_stage, holder.zero_grad)

    def _on_stage(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call a ``zero_grad()`` where the stage comes to the line at which the script has called it."""
        if self._is_within_engine():
            zero_grad(*args, **kwargs)
        elif "rounds" in self.__dict__:
            self.rounds.zero_grad(partial(zero_grad, *args, **kwargs))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This stage's parameters, by their names in the script's model after ``module.``, as with DeepSpeed."""
        if not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        whole = f"{prefix}.module" if prefix else "module"
        return self.module.user_module.named_parameters(whole, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Those of the script's model, in its order."""
        return self.module.user_module.buffers(recurse)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether a batch ends, from now on, as DeepSpeed has it. It has to end one where the schedule does.

        It may end one earlier, as the last one of an epoch: what the schedule still lacks of that is run with the
        latest micro-batch, whose gradients then count for nothing. Rounds that are no boundary need no ``step()``.
        """
        self._boundary = bool(is_boundary)

    def train_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused with a CallOrderError: a plain module has no iterator of its own."""
        raise CallOrderError("train_batch(): the model was no PipelineModule; call engine(...), backward() and step()")

    def eval_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused with a CallOrderError: a plain module has no iterator of its own."""
        raise CallOrderError("eval_batch(): the model was no PipelineModule; call engine(...) in eval() mode")

    def move_layer(self, move: Move) -> NoReturn:
        """Refused with a CallOrderError: the script's calls set the order of passes."""
        raise CallOrderError("move_layer(): the model was no PipelineModule; give the partition in the vpipe block")

    def _compare(self, packed: Any) -> None:
        """Warning if stages are given different data: in the first round, and while the script uses outputs in bsp."""
        others = self.rounds.others
        if others.alike is not None and not (self.pipeline.synchronous and others.asked and others.alike):
            return
        others.alike = self.script_evaluation.alike(packed)
        if not others.alike and self.global_rank == 0:
            world, replicas = self.num_stages * self.dp_world_size, self.dp_world_size
            logger.warning(
                f"ds_vpipe: the {self.num_stages} stages of a pipeline were handed different micro-batches; those of "
                f"the first stage's rank are trained, so that an epoch of data that are dealt out to {world} ranks is "
                f"{replicas}/{world} of them; deal them out to {replicas}: num_replicas=engine.dp_world_size, "
                f"rank=torch.distributed.get_rank() % engine.dp_world_size, or pass training_data to initialize(); "
                f"data that differ by random numbers alone, as of Trainer's workers, are fine unless a loss is divided "
                f"by what another rank has counted, or made of outputs and the script's own tensors"
            )

    def _build_data_iter(self, dataset: Any) -> None:
        """Nothing: the script loops over ``training_dataloader`` itself, on every rank."""


def _refuse_options(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any((*args, *kwargs.values())):
        raise CallOrderError(f"{call}: got options, allowed is none of them; use the model's own state_dict()")


def _owner(engine: weakref.ref[VPipeLoopEngine]) -> str | None:
    """Whose the states of an engine's optimizer are, in a checkpoint of the script's own."""
    alive = engine()
    if alive is None or "stage" not in alive.__dict__ or alive.num_stages == 1:
        return None
    return f"stage {alive.stage_id} of layers {list(alive.pipeline.counts)}"
