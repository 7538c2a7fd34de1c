"""Schedule actions as DeepSpeed pipe instructions, and a stage's plan as a DeepSpeed schedule."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds_schedule

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import rank_actions


class StageInstruction(ds_schedule.PipeInstruction):
    """An instruction that carries out one :class:`~ds_vpipe.schedules.actions.Action`."""

    def __init__(self, action: Action, rank: int) -> None:
        super().__init__(index=action.index, part=rank if action.part is None else action.part)
        self.action = action

    def __repr__(self) -> str:
        return str(self.action)


class LoadMicroBatch(StageInstruction):
    """Read inputs (first stage) and labels (last stage)."""


class RecvActivation(StageInstruction):
    """Wait for the input of a micro-batch, or for the news that the data have ended."""


class Forward(StageInstruction):
    """Forward pass with the weights of the micro-batch's version."""


class SendActivation(StageInstruction):
    """Start sending the output to the next stage."""


class RecvGradient(StageInstruction):
    """Wait for the gradient of the output."""


class DropGradient(StageInstruction):
    """Wait for a gradient of a batch that the data leave incomplete, and forget it."""


class Backward(StageInstruction):
    """Backward pass with the weights that the forward pass used."""


class SendGradient(StageInstruction):
    """Start sending the gradient of the input to the previous stage."""


class ReduceGradients(StageInstruction):
    """Average a batch's gradients over the stage's replicas."""


class Update(StageInstruction):
    """One optimizer update of the stage."""


class SendTiedGradients(StageInstruction):
    """Start sending the gradients of copies of tied weights to their owners."""


class RecvTiedGradients(StageInstruction):
    """Wait for the copies' gradients and add them to the owner's."""


class SendTiedWeights(StageInstruction):
    """Start sending updated tied weights to the stages that hold copies."""


class RecvTiedWeights(StageInstruction):
    """Wait for the owner's weights of the version that is due."""


class SendNews(StageInstruction):
    """Start telling the previous stage what this and later stages' updates told."""


class RecvNews(StageInstruction):
    """Wait for what the later stages' updates told."""


INSTRUCTIONS: dict[Kind, type[StageInstruction]] = {
    Kind.LOAD: LoadMicroBatch,
    Kind.RECV_ACT: RecvActivation,
    Kind.FORWARD: Forward,
    Kind.SEND_ACT: SendActivation,
    Kind.RECV_GRAD: RecvGradient,
    Kind.DROP_GRAD: DropGradient,
    Kind.BACKWARD: Backward,
    Kind.SEND_GRAD: SendGradient,
    Kind.REDUCE: ReduceGradients,
    Kind.STEP: Update,
    Kind.SEND_TIED_GRAD: SendTiedGradients,
    Kind.RECV_TIED_GRAD: RecvTiedGradients,
    Kind.SEND_TIED: SendTiedWeights,
    Kind.RECV_TIED: RecvTiedWeights,
    Kind.SEND_NEWS: SendNews,
    Kind.RECV_NEWS: RecvNews,
}


class StageSchedule(ds_schedule.PipeSchedule):
    """The rest of the current batch at one stage, from ``progress`` on, one instruction a step."""

    def __init__(self, pipeline: Pipeline, rank: int, progress: Progress, exchanges: Exchanges) -> None:
        super().__init__(micro_batches=pipeline.micro_batches, stages=pipeline.num_stages, stage_id=rank)
        self._pipeline = pipeline
        self._progress = progress
        self._exchanges = exchanges

    def steps(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        """Instructions in the order in which the stage carries them out."""
        actions = rank_actions(self._pipeline, self.stage_id, self._progress, self._exchanges)
        for action in actions:
            yield [INSTRUCTIONS[action.kind](action, self.stage_id)]

    def num_pipe_buffers(self) -> int:
        """Micro-batches in flight at most; they are kept by number, not in DeepSpeed's buffers."""
        return self._pipeline.in_flight(self.stage_id)


class InterleavedEvaluation(ds_schedule.PipeSchedule):
    """An evaluation through several parts on every rank, one part after the other."""

    def __init__(self, pipeline: Pipeline, rank: int, micro_batches: int) -> None:
        super().__init__(micro_batches=micro_batches, stages=pipeline.num_stages, stage_id=rank)
        self._pipeline = pipeline

    def steps(self) -> Iterator[list[ds_schedule.PipeInstruction]]:
        """DeepSpeed's instructions; the passes name their part."""
        last = self._pipeline.num_parts - 1
        for part in self._pipeline.parts_of(self.stage_id):
            for buffer in range(self.micro_batches):
                if part > 0:
                    yield [ds_schedule.RecvActivation(buffer)]
                if part in (0, last):
                    yield [ds_schedule.LoadMicroBatch(buffer)]
                yield [ds_schedule.ForwardPass(buffer, part=part)]
                if part < last:
                    yield [ds_schedule.SendActivation(buffer)]

    def num_pipe_buffers(self) -> int:
        """All micro-batches go through a part before the next one."""
        return int(self.micro_batches)
