"""One round of a script that loops over forward, backward and step, carried out: passes, updates, losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.execution import instructions as instr
from ds_vpipe.engine.execution.batch_loss import BatchLoss
from ds_vpipe.engine.links.loss_links import LossLinks
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.engine.loop.call_order import CallOrder
from ds_vpipe.engine.loop.script_loss import HandedLoss
from ds_vpipe.engine.loop.script_rates import ScriptRates
from ds_vpipe.engine.modules.stage_random import own_random_numbers
from ds_vpipe.errors import CallOrderError, VPipeError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.rounds import Round, next_round, waits_for_loss

_NOTHING = Round((), (), ())


class LoopRoundMixin(VPipeEngine):
    """The rounds of one stage, under two counts: the script's, alike on all ranks, and inside an update the stage's.

    Attributes:
        global_steps, global_samples: outside of an update, what the script has handed in.
    """

    global_steps: int
    global_samples: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inside = False  # an instruction is being carried out: DeepSpeed asks, not the script
        super().__init__(*args, **kwargs)
        self._sets_back = False  # a drain finishes what is in flight
        self._order = CallOrder()
        self._round = _NOTHING
        self._waits = False  # for the loss of the round's own micro-batch
        self._handed: dict[int, HandedLoss] = {}  # on the last stage, by micro-batch
        self._newest: tuple[int, torch.Tensor] | None = None  # loss that is known here, and whose
        self._in_batch = 0  # micro-batches of the script's batch that have had their step()
        self._own_counts = (0, 0)
        self._lr_kwargs: dict[str, Any] | None = None
        self._rates = ScriptRates()
        self._written: list[tuple[torch.Tensor, int]] = []
        self._loss_links = LossLinks(self.grid, self.groups, self.device)
        self._feed.next_call(itertools.repeat((None, None)))  # labels travel with the inputs

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the script's micro-batch ends a batch, on all ranks alike."""
        if self._inside:
            return bool(super().is_gradient_accumulation_boundary())
        return self._in_batch + 1 == self.micro_batches

    # A round

    def _begin_round(self, packed: Any) -> int:
        """Begin the round of the next micro-batch, of which the first stage has the inputs, and return its number."""
        progress = self.state.progress
        self._round = next_round(self.pipeline, self.stage_id, progress, self._exchanges)
        self._waits = waits_for_loss(self.pipeline, self.stage_id, progress)
        if self.is_last_stage() and progress.forwarded % self.micro_batches == 0:
            group = self.mpu.get_data_parallel_group()
            self.state.batch_loss = BatchLoss(self.micro_batches, group, self.dp_world_size)
        if self.is_first_stage():
            self._feed.read_again([(self._feed.call, self._feed.take((packed, None), None))])
        return progress.forwarded

    def _run_forward(self, micro_batch: int) -> torch.Tensor:
        """The forward portion of the round, and the loss that the script gets."""
        self._carry_out_actions("forward", self._round.forward)
        if self.is_last_stage():
            loss = self.state.flights[micro_batch].loss
            assert loss is not None
            return self._handed[micro_batch].gated(loss)
        if self._waits:
            self._newest = (micro_batch, self._loss_links.wait(micro_batch))
        assert self._newest is not None
        return HandedLoss().gated(self._newest[1].to(self.device))

    def _run_backward(self, loss: torch.Tensor) -> None:
        """The backward portion of the round; ``loss`` is what the script makes of the loss."""
        if self.is_last_stage():
            self.state.flights[self.state.progress.forwarded - 1].loss = loss
        self._carry_out_actions("backward", self._round.backward)
        if self.num_stages > 1:
            gradients = (parameter.grad for parameter in self.module.parameters())
            self._written = [(gradient, gradient._version) for gradient in gradients if gradient is not None]

    def _run_step(self) -> None:
        """The update of the stage that is due in the round, if there is one, and the script's counts."""
        self._refuse_other_gradients()
        ends_batch = self.is_gradient_accumulation_boundary()
        if ends_batch and self.lr_scheduler is None and self.optimizer is not None:
            self._rates.hand_in(self.optimizer.param_groups)
        self._carry_out_actions("step", self._round.step)
        if ends_batch:
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self._in_batch = (self._in_batch + 1) % self.micro_batches
        self.micro_steps += 1

    def _refuse_other_gradients(self) -> None:
        """Nobody but the engine writes into gradients, which are of another batch on every stage, and in part."""
        if any(gradient._version != version for gradient, version in self._written):
            raise CallOrderError(
                "step(): got gradients that were changed after backward(), allowed are those of backward(), which need "
                'not be of a whole batch on this stage; clip by "gradient_clipping" in the DeepSpeed JSON'
            )
        self._written = []

    def _carry_out_actions(self, portion: str, actions: Iterable[Action]) -> None:
        """Carry out a portion; afterwards the parameters are the newest, as the script expects them."""
        try:
            with self._random_numbers(portion):
                for action in actions:
                    instruction = instr.INSTRUCTIONS[action.kind](action, self.stage_id)
                    self.state.doing = instruction
                    with self._inside_instruction():
                        if action.kind is Kind.STEP:
                            self._carry_out_update(instruction)
                        else:
                            self._carry_out(instruction)
        finally:
            self.stashing_optimizer.load_new_params()

    def _random_numbers(self, *what: int | str) -> AbstractContextManager[None]:
        """The stage's own random numbers; without other stages the script's, as with DeepSpeed."""
        if self.num_stages == 1:
            return nullcontext()
        return own_random_numbers(self.device, self.stage_id, self.global_samples, self._in_batch, *what)

    def _carry_out_update(self, instruction: instr.StageInstruction) -> None:
        """An update and what is told of it, under the stage's own counts."""
        seen_by_script = self.global_steps, self.global_samples
        self.global_steps, self.global_samples = self._own_counts
        try:
            with self._rates.of_next_update(self.optimizer.param_groups):
                self._carry_out(instruction)
            self.agg_train_loss = self._aggregate_total_loss()
            if self.global_rank == 0 and self.monitor.enabled:
                event = ("Train/Samples/train_loss", self.agg_train_loss.item(), self.global_samples)
                self.monitor.write_events([event])
            self._publish_statistics()
            self.state.report = None
        finally:
            self._own_counts = self.global_steps, self.global_samples
            self.global_steps, self.global_samples = seen_by_script

    @contextmanager
    def _inside_instruction(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """What fails inside ends training on every rank."""
        try:
            yield
        except BaseException as error:
            self._abort(error)
            raise

    def _links_to_abort(self) -> Iterable[Sender]:
        return (*super()._links_to_abort(), *self._loss_links.senders.values())

    def _refuse_after_failure(self, call: str) -> None:
        if self.state.failure is not None:
            raise VPipeError(f"{call} after a failure: {self.state.failure}; restart from a checkpoint")

    # Instructions

    def _exec_forward_of_round(self, index: int, part: int) -> None:
        self._exec_forward(index, part)
        if not self.is_last_stage():
            return
        flight, refill = self.state.flights[index], self.state.progress.refill
        assert flight.loss is not None
        flight.told = flight.loss.detach().float()
        self._handed[index] = HandedLoss()
        there = Progress(index, index, None, refill)
        waiting = (stage for stage in range(self.num_stages - 1) if waits_for_loss(self.pipeline, stage, there))
        self._loss_links.tell(index, flight.told, waiting)

    def _exec_recv_gradient_and_loss(self, index: int, part: int) -> None:
        self._exec_recv_gradient(index, part)
        told = self.state.flights[index].told
        assert told is not None
        if self._newest is None or index > self._newest[0]:
            self._newest = (index, told)

    def _exec_backward_of_handed(self, index: int, part: int) -> None:
        if not self.is_last_stage():
            self._exec_backward(index, part)
            return
        handed = self._handed.pop(index)
        handed.open = True
        self._exec_backward(index, part)
        handed.open = False
        if not handed.used:
            raise CallOrderError(
                f"backward(loss): got a tensor that is not made of the loss of micro-batch {index}; allowed is what "
                f"engine(...) returned last, or what is computed from it"
            )

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        super()._exec_optimizer_step(self._lr_kwargs if lr_kwargs is None else lr_kwargs)

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **VPipeEngine._INSTRUCTION_MAP,
        instr.Forward: _exec_forward_of_round,
        instr.RecvGradient: _exec_recv_gradient_and_loss,
        instr.Backward: _exec_backward_of_handed,
    }
