"""Sizes that change while training runs: micro-batches per batch, and depths. Nothing is in flight then.

Versions and delays follow from the sizes and from where the pipeline was last empty, so that what comes after a change
is what a pipeline that begins there with the new sizes computes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import index
from typing import Any

from ds_vpipe.engine.links.wiring import MOST_AHEAD
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.check import check_pipeline
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.delay_warmup import DelayWarmup


def set_sizes(stage: Stage, pipeline: Pipeline) -> None:
    """Go on with other sizes; only while nothing is in flight.

    Raises:
        PipelineProtocolError: the schedule cannot be carried out with them.
    """
    check_pipeline(pipeline, stage.exchanges_by_rank)
    stage.pipeline = pipeline
    stage.ties.depths = pipeline.depths
    stage.links.keep_posted(pipeline)
    stage.delay_warmup = DelayWarmup.of(stage.staleness, pipeline.delays[0])


def with_depths(stage: Stage, depths: Sequence[int]) -> Pipeline:
    """The stage's pipeline with other depths; all ranks call this.

    Raises:
        VPipeConfigError: on every rank, with the reason for which it cannot have them.
    """
    try:
        given: tuple[Any, ...] = tuple(map(index, depths))
    except TypeError:
        given = (depths,)  # which is refused, on every rank
    shared = any(link.activations.payload in ("shared", "ipc") for link in stage.links.after)
    everywhere = stage.consensus.everyone.gather((given, shared), "all ranks in set_depths()")
    if any(other != given for other, _ in everywhere):
        raise _refusal(given, "and others on another rank, allowed is one list; pass the same on every rank")
    try:
        pipeline = replace(stage.pipeline, depth_map=given)
    except VPipeConfigError as error:
        raise VPipeConfigError(f"set_depths(): {error}") from None
    changes = zip(stage.pipeline.delays, pipeline.delays, strict=True)
    if stage.staleness is not None and any((before == 0) != (after == 0) for before, after in changes):
        raise _refusal(given, "with vpipe.staleness, allowed there are stages that stay late or on time; change one")
    if any(shared for _, shared in everywhere) and any(a - b >= MOST_AHEAD for a, b in pairwise(pipeline.depths)):
        most = f"allowed are neighbours that are {MOST_AHEAD - 1} micro-batches apart"
        raise _refusal(given, f'with links through shared memory, {most}; or set vpipe.link to "host"')
    return pipeline


def _refusal(depths: Sequence[Any], reason: str) -> VPipeConfigError:
    return VPipeConfigError(f"set_depths(): got {list(depths)} {reason}")
