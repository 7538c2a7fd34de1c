"""The data on the ranks that read them, and their numbers on all others.

Only the first and the last pipeline stage read samples. The others learn how many there are, which tells them how
long the run is. A rank that cannot read its data makes all ranks end with its message, and ranks that would read
different data end at once.
"""

import os
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert.cache import WAIT_SECONDS
from ds_vpipe.models.bert.sample import CountedSamples
from ds_vpipe.models.bert.training_data import TrainingData, prepare


@dataclass(frozen=True)
class _Outcome:
    """What became of preparing the data on a rank: what everyone needs to know of them, or an error."""

    training: int
    held_out: int | None
    unigram_entropy: float | None
    description: str
    digest: str
    error: str | None = None


def prepare_together(arguments: Namespace, config: BertConfig, stages: int) -> TrainingData:
    """Prepare the data on the ranks that need files; all ranks call this.

    Args:
        arguments: of the training script.
        config: of the model.
        stages: pipeline stages; ranks are numbered stage by stage, as DeepSpeed numbers them.

    Returns:
        On ranks that read no samples, `CountedSamples` in their place.

    Raises:
        VPipeConfigError: on every rank: an argument does not fit, the data are broken, or they differ.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    stage = rank // (world // stages)
    # Text is tokenised once per machine, by its first rank, whichever stage that is.
    builder = int(os.environ.get("LOCAL_RANK", "0")) == 0
    needed = stage in (0, stages - 1) or (builder and arguments.data_dir is None)
    # Over gloo, whatever training uses: this waits for a text to be tokenised, and for no device.
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    data: TrainingData | None = None
    mine: _Outcome | None = None
    known: dict[int, _Outcome] = {}
    # Builders first, so that nobody waits for what a builder has failed to build.
    for turn in (True, False):
        if needed and builder == turn:
            data, mine = _attempt(arguments, config, builder)
        known = _gather(mine, group)
        for number, outcome in known.items():
            if outcome.error is not None:
                raise VPipeConfigError(outcome.error if number == rank else f"rank {number}: {outcome.error}")
    if len({outcome.digest for outcome in known.values()}) > 1:
        digests = ", ".join(f"rank {number}: {outcome.digest}" for number, outcome in known.items())
        raise VPipeConfigError(
            f"ranks have different data ({digests}): stages would read different samples; give all machines the same"
            " --data_dir or --train_file, or install the same package versions on them"
        )
    if data is not None:
        return data
    told = known[0]
    return TrainingData(
        CountedSamples(told.training),
        None if told.held_out is None else CountedSamples(told.held_out),
        told.unigram_entropy,
        told.description,
        told.digest,
    )


def _attempt(arguments: Namespace, config: BertConfig, builder: bool) -> tuple[TrainingData | None, _Outcome]:
    try:
        data = prepare(arguments, config, builder)
    except VPipeError as error:
        return None, _Outcome(0, None, None, "", "", error=str(error))
    held_out = None if data.held_out is None else len(data.held_out)
    return data, _Outcome(len(data.training), held_out, data.unigram_entropy, data.description, data.digest)


def _gather(mine: _Outcome | None, group: Any) -> dict[int, _Outcome]:
    """What the ranks that have prepared data tell, by rank."""
    outcomes: list[_Outcome | None] = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(outcomes, mine, group=group)
    except RuntimeError as error:
        raise VPipeConfigError(
            f"waited up to {WAIT_SECONDS:.0f} s for all ranks to prepare their data, and one is lost or too slow: see"
            " the other ranks' output; prepare large texts with python -m ds_vpipe.models.bert.prepare"
        ) from error
    return {number: outcome for number, outcome in enumerate(outcomes) if outcome is not None}
