"""Evaluation between training batches, on links of its own, without draining and without a trace.

DeepSpeed's ``eval_batch()`` runs its schedule here: forward actions for the loop of
:mod:`ds_vpipe.engine.execution.executor`, with meanings of their own. They use the newest weights, which are the same
version on every stage between two ``train_batch()`` calls. Random state and the module's micro-batch counter are put
back afterwards, so that training goes on bit for bit as if there had been no evaluation.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from types import NoneType
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.data import labels_to_device, or_no_data, own_copy, to_device
from ds_vpipe.engine.execution.executor import carry_out, choose_part, refuse_writes
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.links.message import Message, Tree, leaves, map_tree
from ds_vpipe.engine.stage import InFlight, Key, Stage
from ds_vpipe.errors import PipelinePeerError, VPipeError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import with_communication
from ds_vpipe.schedules.pipeline import Pipeline

_OPTIONS = ("return_logits", "compute_loss", "reduce_output", "bcast_loss", "num_micro_batches")
_EVALUATIONS_UNDER_WAY = 8  # messages to the next stage that may not have been received yet
_FAILED, _ENDED, _READY = range(3)  # what became of reading a rank's evaluation data, worst first


def evaluation_actions(pipeline: Pipeline, rank: int, micro_batches: int) -> Iterator[Action]:
    """Actions of one rank in an evaluation; with several parts groups of micro-batches go through all, one by one.

    A group of one micro-batch per stage comes round when the first stage has finished with it.
    """
    several = pipeline.virtual_stages > 1
    group = pipeline.num_stages if several else max(1, micro_batches)
    passes = (
        Action(Kind.FORWARD, index, part if several else None)
        for start in range(0, micro_batches, group)
        for part in pipeline.parts_of(rank)
        for index in range(start, min(start + group, micro_batches))
    )
    return with_communication(passes, rank, pipeline.num_stages, virtual_stages=pipeline.virtual_stages)


class Evaluation:
    """Evaluation on one stage, of which nothing is changed. DeepSpeed's engine runs passes and keeps outputs."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, moves: LiveMoves) -> None:
        self._engine, self._stage, self._moves = engine, stage, moves
        self._in_flight: dict[Key, InFlight] = {}
        self.has_read = False  # whether eval_batch() has read the micro-batches
        self._methods: dict[Kind, Callable[[int, int], None]] = {
            Kind.LOAD: self._load,
            Kind.RECV_ACT: self._receive,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACT: self._send,
        }

    def eval_batch(
        self, deepspeed_eval: Callable[..., Any], data_iter: Iterator[Any] | None, given: dict[str, Any]
    ) -> Any:
        """``PipelineEngine.eval_batch()`` over data that all ranks have been able to read; see the engine's."""
        engine, stage = self._engine, self._stage
        training, monitored = engine.module.training, engine.monitor.enabled
        stage.action = "evaluation"
        try:
            with outside_inference_mode(), stage.random_states.kept(stage.device), self.newest_weights():
                items = self._read_all(data_iter, given.get("num_micro_batches") or engine.micro_batches)
                self.has_read = True
                # DeepSpeed writes a mean of one tensor, and there may be none, or several losses.
                engine.monitor.enabled = False
                writes = monitored and given.get("compute_loss", True) and given.get("reduce_output", "avg") is not None
                if writes:
                    given = {**given, "bcast_loss": True}  # as DeepSpeed does
                result = deepspeed_eval(items, **given)
            if writes and engine.global_rank == 0:
                losses = result[0] if given.get("return_logits") else result
                if (first := next((leaf for leaf in leaves(losses) if leaf is not None), None)) is not None:
                    events = [("Train/Samples/eval_loss", first.float().mean().item(), engine.global_samples)]
                    engine.monitor.write_events(events)
            self.flush()
            return result
        finally:
            engine.module.train(training)
            engine.monitor.enabled = monitored
            self.has_read = False

    def run_schedule(self, micro_batches: int) -> None:
        """Forward passes of DeepSpeed's inference schedule, over ``engine.data_iterator``.

        A subclass's own method may ask for them: then the micro-batches are read here.
        """
        if self.has_read:
            self.run(micro_batches)
            return
        engine, stage = self._engine, self._stage
        stage.action = "evaluation"
        with outside_inference_mode(), stage.random_states.kept(stage.device), self.newest_weights():
            engine.data_iterator = self._read_all(engine.data_iterator, micro_batches)
            self.run(micro_batches)
        self.flush()
        # What the script does next may be a collective of its own, which the failure of another rank would not end.
        stage.consensus.everyone.minimum(0, "all ranks to evaluate")

    def run(self, micro_batches: int) -> None:
        """Forward passes over micro-batches that have been read; results are in the engine's ``fwd_outputs``."""
        self._engine.fwd_outputs = []
        actions = evaluation_actions(self._stage.pipeline, self._stage.number, micro_batches)
        try:
            carry_out(self._stage, actions, self._methods)
        finally:
            self._stage.action = "evaluation"  # what fails has this name
            self._in_flight.clear()

    @contextmanager
    def newest_weights(self) -> Iterator[None]:
        """Tied weights and layers that move as new as everything else, and the module's count of passes put back."""
        stage = self._stage
        micro_offset, updates = stage.module.micro_offset, stage.progress.completed // stage.pipeline.micro_batches
        stage.ties.refuse_written(stage.weights.written())
        self._moves.catch_up(updates)
        try:
            with stage.under_way(), stage.weights.evaluation(), stage.ties.newest(updates):
                yield
        finally:
            stage.module.micro_offset = micro_offset

    def flush(self) -> None:
        """Wait until the next stage has received everything."""
        for link in self._stage.links.after:  # with several parts the last stage has one, too
            link.evaluation.flush()

    def _read_all(self, data_iter: Iterator[Any] | None, wanted: int) -> Any:
        """Read this evaluation's micro-batches, and stop every rank if one of them cannot."""
        stage = self._stage
        items: list[Any] | None = None
        failure: Exception | None = None
        if stage.is_first or stage.is_last:
            try:
                keep = own_copy if self._engine.batch_fn else stage.feed.used_copy
                items = [keep(item) for item in itertools.islice(self._data(data_iter), wanted)]
            except Exception as error:  # whatever the user's data set raises: the other ranks have to hear of it
                failure = error
        state = _FAILED if failure is not None else _ENDED if items is not None and len(items) < wanted else _READY
        worst = stage.consensus.everyone.minimum(state, "all ranks to read their evaluation data")
        if failure is not None:
            raise failure
        if worst == _FAILED:
            raise PipelinePeerError(f"{stage.links.me} waited for evaluation data: another rank has failed to read")
        if worst == _ENDED:
            raise StopIteration
        return None if items is None else iter(items)

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        data = or_no_data(data_iter, self._engine.batch_fn)
        if data is None or (self._stage.may_withdraw and self._stage.feed.reads(data_iter)):
            given = "None" if data_iter is None else "the iterator that train_batch() reads"
            raise VPipeError(
                f"eval_batch(data_iter): got {given}, allowed on the first and last stage is an iterator of "
                f"(inputs, labels) of its own; the stages are at different positions of the training data"
            )
        return data

    # Actions

    def _load(self, index: int, part: int) -> None:
        stage = self._stage
        inputs, labels, _ = stage.feed.take(next(self._engine.data_iterator), self._engine.batch_fn)
        record = self._in_flight.setdefault((index, part), InFlight(0))
        if part == 0:
            record.inputs = to_device(inputs, stage.copies)
        if part == stage.pipeline.num_parts - 1:
            record.labels = labels_to_device(labels, stage.copies)

    def _receive(self, index: int, part: int) -> None:
        message = self._stage.links.previous.evaluation.receive("the input of an evaluation micro-batch")
        self._in_flight[index, part] = InFlight(0, self._stage.arrived(message.tree))

    def _forward(self, index: int, part: int) -> None:
        engine, stage = self._engine, self._stage
        choose_part(stage, part)
        record = self._in_flight.pop((index, part))
        with refuse_writes(stage.ties.weights, engine):
            output = engine.run_forward(record.inputs)
        if not stage.in_flight:
            ds_checkpointing.reset()  # its buffers are emptied by backward passes, of which there are none here
        if part < stage.pipeline.num_parts - 1:
            self._in_flight[index, part] = InFlight(0, output=engine.as_sent(output))
            return
        if engine.eval_return_logits:
            engine.outputs = output
        if engine._compute_loss and stage.module.loss_fn is not None:
            output = stage.module.loss_fn(output, record.labels)
        engine.fwd_outputs.append(map_tree(torch.Tensor.detach, output))

    def _send(self, index: int, part: int) -> None:
        evaluation = self._stage.links.next.evaluation
        evaluation.send(Message.EVAL, index, self._in_flight.pop((index, part)).output)
        if self._stage.pipeline.virtual_stages == 1:
            evaluation.throttle(_EVALUATIONS_UNDER_WAY)

    # Results

    def reduced(self, outputs: list[Tree], reduce: str | None, replicas: int) -> Any:
        """The list of outputs or losses of all micro-batches, or their mean over these and replicas."""
        if reduce is None:
            return outputs
        means = mean_of_trees(outputs)
        for leaf in leaves(means):
            if leaf is not None and replicas > 1:
                dist.all_reduce(leaf, group=self._engine.mpu.get_data_parallel_group())
                leaf /= replicas
        return means

    def broadcast(self, data: Any, dtype: torch.dtype) -> Any:
        """The last stage's result on every stage."""
        device = self._stage.device
        if self._stage.is_last:
            data = map_tree(lambda leaf: leaf.detach().to(device, dtype, copy=True), data)
            return self._stage.links.from_last_stage(data)
        return self._stage.arrived(self._stage.links.from_last_stage(None))


def mean_of_trees(trees: Sequence[Tree]) -> Tree:
    """The mean of trees of one form, tensor by tensor: summed in order, then divided.

    Raises:
        VPipeError: shapes differ, or the trees are of different forms.
    """
    first = trees[0]
    several, nothing = ({isinstance(tree, kinds) for tree in trees} for kinds in ((tuple, list), NoneType))
    if len(several) > 1 or len(nothing) > 1:
        raise VPipeError(_different("kinds", [type(tree).__name__ for tree in trees]))
    if first is None:
        return None
    if isinstance(first, (tuple, list)):
        if any(len(tree) != len(first) for tree in trees):
            raise VPipeError(_different("numbers of tensors", [len(tree) for tree in trees]))
        means = [mean_of_trees(items) for items in zip(*trees, strict=True)]
        return means if isinstance(first, list) else tuple(means)
    if any(tree.shape != first.shape for tree in trees):
        raise VPipeError(_different("shapes", [tuple(tree.shape) for tree in trees]))
    return sum(trees) / len(trees)


def _different(what: str, given: object) -> str:
    return (
        f"eval_batch(reduce_output='avg'): got outputs with {what} {given}, allowed are equal ones; "
        f"take reduce_output=None, which returns the outputs one by one"
    )


def evaluation_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``eval_batch()`` after the first, by name.

    Raises:
        VPipeError: no rank can carry them out; none has begun.
    """
    given = dict(zip(_OPTIONS, args, strict=False)) | kwargs
    if more := [*kwargs.keys() - set(_OPTIONS[len(args) :]), *args[len(_OPTIONS) :]]:
        got, allowed = ", ".join(map(str, more)), ", ".join(_OPTIONS)
        raise VPipeError(f"eval_batch(): got {got}, allowed are {allowed}, each once; leave the others out")
    count, reduce = given.get("num_micro_batches"), given.get("reduce_output")
    if count is not None and (not isinstance(count, Integral) or int(count) < 1):
        raise VPipeError(f"eval_batch(num_micro_batches): got {count}, allowed is 1 or more; leave it out for M")
    if reduce is not None and str(reduce).lower() != "avg":
        raise VPipeError(f"eval_batch(reduce_output): got {reduce!r}, allowed are 'avg' and None; take None for a list")
    return given


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context in which tensors are usable later, whatever the script's mode: buffers of messages are used again."""
    with_graph = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_graph):
        yield
