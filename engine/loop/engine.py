"""The engine for scripts that loop ``loss = engine(**batch); engine.backward(loss); engine.step()``.

It carries out the same stage programs as :class:`~ds_vpipe.engine.engine.VPipeEngine`, in the portions of
:mod:`ds_vpipe.schedules.rounds`: round ``n`` of the script hands in micro-batch ``n``. A script sees the same on all
ranks at the same line, whatever their stages have done by then: micro-batches and updates are counted as they are
handed in. What needs all stages at the same micro-batch (evaluation, checkpoints, the end of the script) drains the
pipeline first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from deepspeed.utils import logger

from ds_vpipe.engine.loop.call_order import check_loss
from ds_vpipe.engine.loop.evaluation import LoopEvaluationMixin
from ds_vpipe.engine.loop.optimizer import LoopOptimizerMixin
from ds_vpipe.engine.loop.script_loss import check_graph
from ds_vpipe.errors import CallOrderError, VPipeConfigError


class VPipeLoopEngine(LoopOptimizerMixin, LoopEvaluationMixin):
    """DeepSpeed's engine of a plain module, as a pipeline.

    Built by :func:`ds_vpipe.initialize` from a module that is no ``PipelineModule``. The pipeline module has
    ``pack(args, kwargs)``, which gives the first stage's input, and a loss as its last layer's output. It may have
    ``own_parameters(given)``, which gives of the whole model's parameters the stage's own, and ``take_output()``, which
    gives on the last stage everything that the module's ``forward`` has returned in an evaluation.

    Attributes:
        micro_steps, global_steps, global_samples: as the script counts, alike on all ranks at the same line. The
            stage's own updates are ``stashing_optimizer.latest_version``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.pipeline.virtual_stages > 1:
            raise VPipeConfigError(
                f'vpipe.schedule: got "{self.pipeline.schedule}" for a module that is called micro-batch by '
                f'micro-batch; allowed: "1f1b" and "gpipe"; write "1f1b" and remove vpipe.virtual_stages'
            )
        self._boundary: bool | None = None  # what the script has said
        self._stepped = False  # a round that the script has said is no boundary may have its step() or not
        self._compared = self.num_stages == 1  # what the stages are handed

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
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        self._refuse_after_failure("engine(...)")
        self._refuse_half_loaded("engine(...)")
        model: Any = getattr(self.module, "user_module", self.module)  # scripts set its mode, too
        if not (model.training and torch.is_grad_enabled()):
            return self._evaluate(args, kwargs)
        self._order.expect("engine(...)")
        self._stepped = False
        with self._aborting():
            self.state.doing = "engine(...)"
            packed = self.module.pack(args, kwargs)
            self._compare_once(packed)
            self._await_end()
            loss = self._run_forward(self._begin_round(packed))
        self._order.done("engine(...)")
        return loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward passes that are due on this stage; ``step()`` comes next.

        On the last stage ``loss`` is differentiated, whatever the script has made of what ``engine(...)`` returned.

        Args:
            loss: made of what ``engine(...)`` returned.
            retain_graph: False.
            scale_wrt_gas: divide by the micro-batches of a batch; else the script has done it.

        Returns:
            The loss, so divided, as DeepSpeed does.

        Raises:
            CallOrderError: another call is due, or ``loss`` is no scalar with a graph, or depends on parameters of
                the stage other than by what ``engine(...)`` returned.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        self._refuse_after_failure("backward()")
        if self.optimizer is None:
            raise CallOrderError(
                "backward(): got no optimizer; name one in the DeepSpeed JSON, or pass one to initialize()"
            )
        if retain_graph:
            raise CallOrderError("backward(retain_graph): got True, allowed in a pipeline is False; leave it out")
        check_loss(loss)
        self._order.expect("backward()")
        ends_batch = self.is_gradient_accumulation_boundary()
        if self._boundary not in (None, ends_batch):
            raise CallOrderError(
                f"set_gradient_accumulation_boundary({self._boundary}): the micro-batch in backward() is number "
                f"{self._in_batch + 1} of {self.micro_batches} of its batch, allowed is {ends_batch}; batches end by "
                f"gradient_accumulation_steps in the DeepSpeed JSON, so set it as those do"
            )
        if self.num_stages > 1:
            check_graph(loss, self.module.parameters())
        with self._aborting():
            self._run_backward(loss if scale_wrt_gas else loss * self.micro_batches)
        self._order.done("backward()")
        if self._boundary is False:
            self.step()
            self._stepped = True
        return loss.detach() / self.micro_batches if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update this stage if a batch has ended here, and count the micro-batch.

        Raises:
            CallOrderError: another call is due, or gradients have been changed since ``backward()``.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        self._refuse_after_failure("step()")
        if self._stepped:
            self._stepped = False
            return
        self._order.expect("step()")
        self._lr_kwargs = lr_kwargs
        with self._aborting():
            self._run_step()
        self._order.done("step()")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This stage's parameters, by their names in the script's model after ``module.``, as with DeepSpeed."""
        whole = getattr(self.module, "user_module", None)
        if whole is None or not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return whole.named_parameters(f"{prefix}.module" if prefix else "module", recurse, remove_duplicate)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether a batch ends, from now on, as DeepSpeed has it; it has to be where the schedule ends one.

        ``backward()`` refuses what is not. Rounds that are no boundary need no ``step()``.
        """
        self._boundary = bool(is_boundary)

    def train_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a plain module has no iterator of its own.

        Raises:
            CallOrderError: always.
        """
        raise CallOrderError("train_batch(): the model was no PipelineModule; call engine(...), backward() and step()")

    def eval_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a plain module has no iterator of its own.

        Raises:
            CallOrderError: always.
        """
        raise CallOrderError("eval_batch(): the model was no PipelineModule; call engine(...) in eval() mode")

    def _compare_once(self, packed: Any) -> None:
        """In the first round, say so if the stages of a pipeline are handed different data."""
        if self._compared:
            return
        self._compared = True
        if not self._alike(packed) and self.global_rank == 0:
            world, replicas = self.num_stages * self.dp_world_size, self.dp_world_size
            logger.warning(
                f"ds_vpipe: the {self.num_stages} stages of a pipeline were handed different micro-batches; those of "
                f"the first stage's rank are trained, so that an epoch of data that are dealt out to {world} ranks is "
                f"{replicas}/{world} of them; deal them out to {replicas}: num_replicas=engine.dp_world_size, "
                f"rank=torch.distributed.get_rank() % engine.dp_world_size, or pass training_data to initialize()"
            )

    def _build_data_iter(self, dataset: Any) -> None:
        """Nothing: the script loops over ``training_dataloader`` itself, on every rank."""
