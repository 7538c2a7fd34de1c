"""Evaluation between training batches, on links of its own, without draining and without a trace.

DeepSpeed's ``eval_batch()`` drives its inference schedule through the instructions defined here. They
use the newest weights, which are the same version on every stage between two ``train_batch()`` calls.
Random state and the module's micro-batch counter are put back afterwards, so that training goes on bit
for bit as if there had been no evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.engine.execution.data import NO_DATA, MicroBatchFeed, labels_to_device, own_copy, to_device
from ds_vpipe.engine.execution.in_flight import StageState
from ds_vpipe.engine.execution.instructions import InterleavedEvaluation
from ds_vpipe.engine.execution.results import map_tree, mean_of_trees
from ds_vpipe.engine.links.consensus import Agreement
from ds_vpipe.engine.links.message import Message, Tree, leaves
from ds_vpipe.engine.links.stage_links import Neighbours
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.errors import PipelinePeerError, VPipeError
from ds_vpipe.schedules.pipeline import Pipeline

_OPTIONS = ("return_logits", "compute_loss", "reduce_output", "bcast_loss", "num_micro_batches")
_EVALUATIONS_UNDER_WAY = 8  # messages to the next stage that may not have been received yet
_FAILED, _ENDED, _READY = range(3)  # what became of reading a rank's evaluation data, worst first


class EvaluationMixin(PipelineEngine):
    """``eval_batch()`` for an engine with :class:`~ds_vpipe.engine.links.stage_links.Neighbours`."""

    neighbours: Neighbours
    state: StageState
    ties: TiedWeights | None
    pipeline: Pipeline
    random_states: RandomStates
    _abort: Callable[[BaseException], None]
    _refuse_half_loaded: Callable[[str], None]
    _agreement: Agreement
    _feed: MicroBatchFeed
    asynchronous: bool
    data_iterator: Any

    def eval_batch(self, data_iter: Iterator[Any] | None, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.eval_batch()``; all ranks call it, between any two ``train_batch()`` calls.

        Returns:
            The mean loss over ``num_micro_batches`` (default: those of a training batch), on every rank with
            ``bcast_loss``, else on the last stage and None before it. With ``reduce_output=None`` the list of the
            micro-batches' losses in place of their mean. With ``compute_loss=False``, or a module without
            ``loss_fn``, outputs in place of losses; without losses nothing is handed to other stages. With
            ``return_logits`` a pair: that, and the last micro-batch's output, None before the last stage.

        Raises:
            StopIteration: on every rank, if ``data_iter`` holds too few micro-batches.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        if self.state.failure is not None:
            raise VPipeError(f"eval_batch() after a failure: {self.state.failure}; restart from a checkpoint")
        self._refuse_half_loaded("eval_batch()")
        given = dict(zip(_OPTIONS, args, strict=False)) | kwargs
        _check(given)
        micro_offset, training = self.module.micro_offset, self.module.training
        train_iterator, monitored = self.data_iterator, self.monitor.enabled
        self.state.doing = "evaluation"
        try:
            with self.random_states.kept(self.device), self._newest_ties():
                items = self._read_all(data_iter, given.get("num_micro_batches"))
                if not given.get("compute_loss", True) or given.get("reduce_output", "avg") is None:
                    self.monitor.enabled = False  # there is no mean loss to write
                result = super().eval_batch(items, **given)
            if self.neighbours.eval_out is not None:
                self.neighbours.eval_out.flush()
            return result
        except StopIteration:
            raise
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self.module.micro_offset = micro_offset
            self.module.train(training)
            self.data_iterator, self.monitor.enabled = train_iterator, monitored
            self.eval_return_logits, self._compute_loss = False, True

    def _newest_ties(self) -> AbstractContextManager[None]:
        """Copies of tied weights as new as everything else."""
        if self.ties is None:
            return nullcontext()
        return self.ties.newest(self.state.progress.completed // self.micro_batches)

    def _read_all(self, data_iter: Iterator[Any] | None, num_micro_batches: int | None) -> Any:
        """Read this evaluation's micro-batches, and stop every rank if one of them cannot."""
        wanted = self.micro_batches if num_micro_batches is None else num_micro_batches
        items: list[Any] | None = None
        failure: Exception | None = None
        if self.is_first_stage() or self.is_last_stage():
            try:
                items = [own_copy(item) for item in itertools.islice(self._evaluation_data(data_iter), wanted)]
            except Exception as error:  # whatever the user's data set raises: the other ranks have to hear of it
                failure = error
        state = _FAILED if failure is not None else _ENDED if items is not None and len(items) < wanted else _READY
        worst = self._agreement.lowest(state, "all ranks to read their evaluation data")
        if failure is not None:
            raise failure
        if worst == _FAILED:
            raise PipelinePeerError(f"{self.neighbours.me} waited for evaluation data: another rank has failed to read")
        if worst == _ENDED:
            raise StopIteration
        return None if items is None else iter(items)

    def _or_no_data(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        """What is read where the script gives no iterator: nothing, for ``batch_fn`` to make something of."""
        return NO_DATA if iterator is None and self.batch_fn is not None else iterator

    def _evaluation_data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        data = self._or_no_data(data_iter)
        if data is None or (self.asynchronous and data_iter is not None and data_iter is self.data_iterator):
            given = "None" if data_iter is None else "the iterator that train_batch() reads"
            raise VPipeError(
                f"eval_batch(data_iter): got {given}, allowed on the first and last stage is an iterator of "
                f"(inputs, labels) of its own; the stages are at different positions of the training data"
            )
        return data

    def _exec_load_eval(self, buffer_id: int) -> None:
        inputs, labels = self._feed.take(next(self.data_iterator), self.batch_fn)
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = to_device(inputs, self.device)
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = labels_to_device(labels, self.device)

    def _exec_recv_eval(self, buffer_id: int) -> None:
        assert self.neighbours.eval_in is not None
        message = self.neighbours.eval_in.receive("the input of an evaluation micro-batch")
        self.pipe_buffers["inputs"][buffer_id] = self._arrived(message.tree)

    def _inference_schedule(self, micro_batches: int) -> ds_schedule.PipeSchedule:
        if self.pipeline.virtual_stages > 1:
            return InterleavedEvaluation(self.pipeline, self.stage_id, micro_batches)
        return super()._inference_schedule(micro_batches)

    def _exec_forward_eval(self, buffer_id: int, part: int | None = None) -> None:
        last = self.is_last_stage() if part is None else part == self.pipeline.num_parts - 1
        if isinstance(self.module, InterleavedMixin) and part is not None:
            self.module.chunk = part // self.num_stages
        outputs = DeepSpeedEngine.forward(self, self.pipe_buffers["inputs"][buffer_id])
        self.pipe_buffers["inputs"][buffer_id] = None
        if not self.state.flights:
            ds_checkpointing.reset()  # its buffers are emptied by backward passes, of which there are none here
        if not last:
            self.pipe_buffers["outputs"][buffer_id] = outputs
            return
        if self.eval_return_logits:
            self.outputs = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            outputs = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
        self.fwd_outputs.append(map_tree(torch.Tensor.detach, outputs))

    def _exec_send_eval(self, buffer_id: int) -> None:
        assert self.neighbours.eval_out is not None
        self.neighbours.eval_out.send(Message.EVAL, buffer_id, self.pipe_buffers["outputs"][buffer_id])
        self.pipe_buffers["outputs"][buffer_id] = None
        if self.pipeline.virtual_stages == 1:
            self.neighbours.eval_out.keep_latest(_EVALUATIONS_UNDER_WAY)

    def _reduce_outputs(
        self,
        outputs: list[Tree],
        reduce: str | None = "avg",
        reduce_dp: bool = True,
        micro_batches: int | None = None,
    ) -> Any:
        """What ``reduce_output`` makes of the outputs or losses of all micro-batches: the list, or their mean."""
        if reduce is None:
            return outputs
        replicas = self.dp_world_size if reduce_dp else 1
        means = mean_of_trees(outputs)
        for leaf in leaves(means):
            if leaf is not None and replicas > 1:
                dist.all_reduce(leaf, group=self.mpu.get_data_parallel_group())
                leaf /= replicas
        return means

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Hand the last stage's result to the stages before it."""
        if self.is_last_stage():
            data = map_tree(lambda leaf: leaf.detach().to(self.device, dtype, copy=True), data)
        return self._arrived(self._handed_back(data))

    def _handed_back(self, tree: Tree) -> Tree:
        """The last stage's ``tree``, on every stage, neighbour by neighbour."""
        receiver, sender = self.neighbours.eval_loss_in, self.neighbours.eval_loss_out
        if receiver is not None and not self.is_last_stage():
            tree = receiver.receive("the result of an evaluation").tree
        if sender is not None and not self.is_first_stage():
            sender.send(Message.EVAL, 0, tree)
            sender.flush()
        return tree

    def _of_all_stages(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """What every stage of the pipeline passes, in order, on all of them; ``what`` is the name of the wait.

        By links, on which a stage that fails says so, and not by a collective.
        """
        receiver, sender = self.neighbours.eval_in, self.neighbours.eval_out
        known = () if receiver is None or self.is_first_stage() else receiver.receive(what).tree
        known = (*known, mine)
        if sender is not None and not self.is_last_stage():
            sender.send(Message.EVAL, 0, known)
            sender.flush()
        return list(self._handed_back(known))

    EVALUATION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        ds_schedule.LoadMicroBatch: _exec_load_eval,
        ds_schedule.RecvActivation: _exec_recv_eval,
        ds_schedule.ForwardPass: _exec_forward_eval,
        ds_schedule.SendActivation: _exec_send_eval,
    }


def _check(given: dict[str, Any]) -> None:
    """Refuse what no rank can carry out, before any of them has begun."""
    count, reduce = given.get("num_micro_batches"), given.get("reduce_output")
    if count is not None and count < 1:
        raise VPipeError(f"eval_batch(num_micro_batches): got {count}, allowed is 1 or more; leave it out for M")
    if reduce is not None and reduce.lower() != "avg":
        raise VPipeError(f"eval_batch(reduce_output): got {reduce!r}, allowed are 'avg' and None; take None for a list")
