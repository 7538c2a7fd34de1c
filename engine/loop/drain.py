"""Bringing the pipeline of a looping script to rest: before checkpoints and evaluation, and at the end of the script.

Between two rounds the stages are at different micro-batches. A drain runs the backward passes that are left, so that
every stage has finished what was handed in; every rank comes to it at the same line and knows how much that is. A
mark goes from the first stage to the last, in the place of an activation, and back at the end: ranks that have been
handed different numbers of micro-batches meet it where they do not expect it. A batch that is not complete keeps the
gradients of its micro-batches and no update is made of them. After a drain the pipeline is filled again, with the
versions that follow from where it was empty.
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from deepspeed.utils import logger

from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.loop.rounds import LoopRoundMixin
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.errors import CallOrderError, PipelineProtocolError, VPipeError
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.rounds import drain_actions


class LoopRestMixin(LoopRoundMixin):
    """Drains, and what needs one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resting = True  # nothing has been handed in since the last drain
        super().__init__(*args, **kwargs)
        whole: Any = getattr(self.module, "user_module", self.module)
        self._switched = tuple(dict.fromkeys((*self.modules(), *whole.modules())))
        self._modes = [module.training for module in self._switched]
        atexit.register(serve_at_end, weakref.ref(self))

    def drain(self, what: str = "drain()") -> None:
        """Train everything handed in on every stage; all ranks call it, between two rounds.

        Args:
            what: begins the line of a refusal.

        Raises:
            CallOrderError: in the middle of a round.
            PipelineProtocolError: the stages have been handed different numbers of micro-batches.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        self._refuse_after_failure(what)
        self._order.expect_between(what)
        if not self._resting:
            if self.asynchronous and self.state.flights:
                self._rests.emptied(what, "do that less often", self.global_steps, 0)
            with self._aborting():
                self._drain()

    def come_to_rest(self, what: str) -> None:
        """Drain, and meet the other stages even if nothing is in flight: one that goes on instead ends with a line."""
        self._refuse_after_failure(what)
        self._order.expect_between(what)
        with self._aborting():
            self._drain()

    def quiesce(self, what: str = "quiesce()") -> None:
        """Drains: what has been handed in cannot be set back."""
        self.drain(what)
        super().quiesce(what)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """As DeepSpeed's; all ranks call it, after ``step()``. Drains."""
        self.drain("save_checkpoint()")
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; all ranks call it, after ``step()``. Drains; a batch that is not complete is forgotten."""
        self.drain("load_checkpoint()")
        found = super().load_checkpoint(*args, **kwargs)
        if found[0] is not None:
            self._rates.forget()
            self._begin_batch()
            self._own_counts = self.global_steps, self.global_samples
        return found

    def _run_step(self) -> None:
        super()._run_step()
        ended = self.asynchronous and not self._in_batch
        if ended and self._next_drain(self.global_steps - 1) == self.global_steps:
            self._drain()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's; all ranks call it, between two batches. Drains, if the size is another one.

        Raises:
            CallOrderError: in the middle of a batch.
        """
        if train_batch_size == self.train_batch_size():
            return
        if self._in_batch:
            raise CallOrderError(
                f"set_train_batch_size({train_batch_size}): called after {self._in_batch} of a batch's "
                f"{self.micro_batches} micro-batches; call it where a batch has ended"
            )
        self.drain("set_train_batch_size()")
        super().set_train_batch_size(train_batch_size)
        self._begin_batch()

    def destroy(self) -> None:
        """Train what has been handed in, if the script is between two rounds, and leave the pipeline."""
        if "_order" in self.__dict__ and self._order.between_rounds and self.state.failure is None:
            self.drain("destroy()")
        self._forget_end()
        super().destroy()

    # Parts of them

    def _begin_round(self, packed: Any) -> int:
        self._modes = [module.training for module in self._switched]
        return super()._begin_round(packed)

    def _drain(self) -> None:
        # Wherever the script asks for it, these are passes and updates of training.
        plain = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), plain, self._as_in_training():
            self._finish_all()

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """The modes of the latest round, for layers that are run again: eval() may have been called since."""
        present = [module.training for module in self._switched]
        self._switch(self._modes)
        try:
            yield
        finally:
            self._switch(present)

    def _switch(self, modes: list[bool]) -> None:
        for module, mode in zip(self._switched, modes, strict=True):
            if module.training is not mode:
                module.training = mode

    def _finish_all(self) -> None:
        state, neighbours = self.state, self.neighbours
        state.doing = "DRAIN"
        handed = state.progress.forwarded
        if neighbours.activations_in is not None:
            message = neighbours.activations_in.receive("the mark of a drain from the first stage on")
            if message.kind is not Message.END or message.micro_batch != handed:
                before = f"{message.micro_batch} micro-batches" if message.kind is Message.END else "more"
                raise PipelineProtocolError(
                    f"{neighbours.me} drains after {handed} micro-batches, stage {self.stage_id - 1} has been handed "
                    f"{before}; every rank has to run the same number of rounds before it evaluates, saves or ends"
                )
        if neighbours.activations_out is not None:
            neighbours.activations_out.send(Message.END, handed, torch.tensor([handed, handed, 0, False]))
        self._carry_out_actions("drain", drain_actions(self.pipeline, self.stage_id, state.progress, self._exchanges))
        if neighbours.gradients_in is not None:
            neighbours.gradients_in.receive("the mark of a drain from the last stage on")
        if neighbours.gradients_out is not None:
            neighbours.gradients_out.send(Message.END, handed, None)
        state.progress = Progress(handed, handed, None, refill=handed)
        if self.ties is not None:
            self.ties.catch_up(handed // self.micro_batches)
        for sender in self._loss_links.senders.values():
            sender.flush()
        self._forget_end()

    def _end_of_data(self, limit: int, read: int, call: int, unlabelled: int = 0, asked: bool = True) -> NoReturn:
        """A drain of the stage before where a micro-batch was expected: the script has gone on here."""
        raise PipelineProtocolError(
            f"{self.neighbours.me} was handed micro-batch {read}, before which stage {self.stage_id - 1} drains; every "
            f"rank has to run the same number of rounds before it evaluates, saves or ends"
        )

    def _begin_batch(self) -> None:
        """Forget a batch that is not complete."""
        with self._inside_instruction():
            self.zero_grad()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        self._in_batch = 0
        self._newest = None

    # The end of the script

    def _await_end(self) -> None:
        """Something is in flight from now on. Until it is not, the interpreter keeps the engine for its end."""
        if self._resting:
            self._resting = False
            atexit.register(self._at_end_of_script)

    def _forget_end(self) -> None:
        self._resting = True
        atexit.unregister(self._at_end_of_script)

    def _abort(self, error: BaseException) -> None:
        self._forget_end()
        super()._abort(error)

    def _serve(self, at_rest: bool) -> None:
        """Take part in what ranks still call whose scripts have not come to their end."""
        states, split = self._whole_states, self.module
        if states is None or not isinstance(split, SplitModule):
            return
        with suppress(VPipeError):  # they have a line of their own
            states.serve(split.own_state, at_rest)
        states.leave()
        self._whole_states = None

    def _at_end_of_script(self) -> None:
        """Train what is still in flight, if the script has come to its end between two rounds."""
        if not torch.distributed.is_initialized():
            logger.warning(
                "ds_vpipe: the process group was destroyed with micro-batches in flight, which are not trained on all "
                "stages; call engine.destroy() before"
            )
            gc.freeze()  # collected while the interpreter goes down, graphs in flight would end it with torch's abort
            return
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if failed is not None:
            self.state.doing = "the script"
            self._abort(failed)
        elif self._order.between_rounds:
            try:
                self.drain("the end of the script")
                self._serve(True)
            except Exception as error:
                logger.error(f"ds_vpipe: the last micro-batches are not trained on all stages: {error}")
        else:
            logger.warning(
                "ds_vpipe: the script ended between engine(...) and engine.step(), so that the micro-batches in flight "
                "are not trained on all stages; call engine.backward(loss) and engine.step() first"
            )
            gc.freeze()


def serve_at_end(engine: weakref.ref[LoopRestMixin]) -> None:
    """At the end of the script, let ranks have what they need whose scripts are still saving."""
    alive = engine()
    if alive is None or alive.state.failure is not None or not torch.distributed.is_initialized():
        return
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if failed is None and alive._order.between_rounds and alive._resting:
        alive._serve(False)
