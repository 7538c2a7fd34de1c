"""Mitigation of staleness at one stage of an asynchronous pipeline, from the ``"staleness"`` settings."""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.staleness import refuse_delays
from ds_vpipe.schedules.one_f_one_b import update_delays
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.delay_warmup import DelayWarmup
from ds_vpipe.staleness.mitigation import StalenessMitigation


class MitigationMixin(PipelineEngine):
    """Which delay a stage has, and what it does about it.

    Attributes:
        delay_warmup: drain intervals.
        mitigation: at stages with a delay, if the block asks for it, else None.
    """

    vpipe_config: VPipeConfig
    pipeline: Pipeline
    delay_warmup: DelayWarmup
    mitigation: StalenessMitigation | None

    def _delays(self, micro_batches: int) -> tuple[int, ...]:
        """Delay of every stage in updates, with so many micro-batches per batch."""
        return update_delays(self.pipeline.depths, micro_batches, self.pipeline.vertical)

    def _make_mitigation(self) -> StalenessMitigation | None:
        """Put it around the base optimizer, which must exist and is wherever DeepSpeed has put it.

        Raises:
            VPipeConfigError: the settings do not work with the model, the optimizer or the delays; on every rank.
        """
        settings = self.vpipe_config.staleness
        if settings is None or self.optimizer is None:
            return None
        delays = self._delays(self.micro_batches)
        refuse_delays(settings, delays)
        # Made on all stages, so that all refuse what cannot be.
        mitigation = StalenessMitigation(self.basic_optimizer, settings, delays[self.stage_id], self.delay_warmup)
        return mitigation if delays[self.stage_id] > 0 else None
