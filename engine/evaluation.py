"""Evaluation between training batches, on links of its own, without draining and without a trace.

DeepSpeed's ``eval_batch()`` drives its inference schedule through the instructions defined here. They
use the newest weights, which are the same version on every stage between two ``train_batch()`` calls.
Random state and the module's micro-batch counter are put back afterwards, so that training goes on bit
for bit as if there had been no evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.engine.admission import Agreement
from ds_vpipe.engine.feed import labels_to_device, to_device
from ds_vpipe.engine.flight import StageState
from ds_vpipe.engine.neighbours import Neighbours
from ds_vpipe.engine.wire import Message
from ds_vpipe.errors import PipelinePeerError, VPipeError

_FAILED, _ENDED, _READY = range(3)  # what became of reading a rank's evaluation data, worst first


class EvaluationMixin(PipelineEngine):
    """``eval_batch()`` for an engine with :class:`~ds_vpipe.engine.neighbours.Neighbours`."""

    neighbours: Neighbours
    state: StageState
    _abort: Callable[[BaseException], None]
    _agreement: Agreement
    data_iterator: Any

    def eval_batch(self, data_iter: Iterator[Any] | None, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.eval_batch()``; all ranks call it, between any two ``train_batch()`` calls.

        Returns:
            The mean loss over ``num_micro_batches`` (default: those of a training batch), on every rank
            with ``bcast_loss``; with ``return_logits`` also the last stage's outputs.

        Raises:
            StopIteration: on every rank, if ``data_iter`` holds too few micro-batches.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        if self.state.failure is not None:
            raise VPipeError(f"eval_batch() after a failure: {self.state.failure}; restart from a checkpoint")
        devices = [self.device] if self.device.type == "cuda" else []
        micro_offset, training = self.module.micro_offset, self.module.training
        train_iterator = self.data_iterator
        self.state.doing = "evaluation"
        try:
            with torch.random.fork_rng(devices=devices, device_type=self.device.type if devices else "cuda"):
                items = self._read_all(data_iter, args, kwargs)
                result = super().eval_batch(items, *args, **kwargs)
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
            self.data_iterator = train_iterator
            self.eval_return_logits, self._compute_loss = False, True

    def _read_all(self, data_iter: Iterator[Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read this evaluation's micro-batches, and stop every rank if one of them cannot."""
        given = args[4] if len(args) > 4 else kwargs.get("num_micro_batches")
        wanted = self.micro_batches if given is None else given
        items: list[Any] | None = None
        failure: Exception | None = None
        if self.is_first_stage() or self.is_last_stage():
            try:
                items = list(itertools.islice(self._evaluation_data(data_iter), wanted))
            except Exception as error:  # whatever the user's data set raises: the other ranks have to hear of it
                failure = error
        state = _FAILED if failure is not None else _ENDED if items is not None and len(items) < wanted else _READY
        worst = self._agreement.lowest(state)
        if failure is not None:
            raise failure
        if worst == _FAILED:
            raise PipelinePeerError(f"{self.neighbours.me} waited for evaluation data: another rank has failed to read")
        if worst == _ENDED:
            raise StopIteration
        return None if items is None else iter(items)

    def _evaluation_data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is None or data_iter is self.data_iterator:
            given = "None" if data_iter is None else "the iterator that train_batch() reads"
            raise VPipeError(
                f"eval_batch(data_iter): got {given}, allowed on the first and last stage is an iterator of "
                f"(inputs, labels) of its own; the stages are at different positions of the training data"
            )
        return data_iter

    def _exec_load_eval(self, buffer_id: int) -> None:
        inputs, labels = self._next_batch()
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = to_device(inputs, self.device)
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = labels_to_device(labels, self.device)

    def _exec_recv_eval(self, buffer_id: int) -> None:
        assert self.neighbours.eval_in is not None
        message = self.neighbours.eval_in.receive("the input of an evaluation micro-batch")
        self.pipe_buffers["inputs"][buffer_id] = self._arrived(message.tree)

    def _exec_forward_eval(self, buffer_id: int) -> None:
        outputs = DeepSpeedEngine.forward(self, self.pipe_buffers["inputs"][buffer_id])
        self.pipe_buffers["inputs"][buffer_id] = None
        if not self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = outputs
            return
        if self.eval_return_logits:
            self.outputs = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            outputs = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
        is_tensor = isinstance(outputs, torch.Tensor)
        self.fwd_outputs.append(outputs.detach() if is_tensor else [output.detach() for output in outputs])

    def _exec_send_eval(self, buffer_id: int) -> None:
        assert self.neighbours.eval_out is not None
        self.neighbours.eval_out.send(Message.EVAL, buffer_id, self.pipe_buffers["outputs"][buffer_id])
        self.pipe_buffers["outputs"][buffer_id] = None

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Hand the last stage's result to the stages before it, neighbour by neighbour."""
        receiver, sender = self.neighbours.eval_loss_in, self.neighbours.eval_loss_out
        if receiver is None:
            result = data.clone().detach().type(dtype).to(self.device)
        else:
            result = self._arrived(receiver.receive("the loss of an evaluation").tree)
        if sender is not None:
            sender.send(Message.EVAL, 0, result)
            sender.flush()
        return result

    EVALUATION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        ds_schedule.LoadMicroBatch: _exec_load_eval,
        ds_schedule.RecvActivation: _exec_recv_eval,
        ds_schedule.ForwardPass: _exec_forward_eval,
        ds_schedule.SendActivation: _exec_send_eval,
    }
