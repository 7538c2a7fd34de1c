"""The updates of a run, with validation and checkpoints in between, on every rank."""

from argparse import Namespace
from typing import Any

import ds_vpipe
from ds_vpipe.models.bert.batches import MicroBatches
from ds_vpipe.models.bert.report import Report
from ds_vpipe.models.bert.run_checkpoints import RunCheckpoints
from ds_vpipe.models.bert.validation import Validation


def train(
    engine: Any,
    batches: MicroBatches,
    validation: Validation | None,
    checkpoints: RunCheckpoints,
    total: int,
    report: Report,
    arguments: Namespace,
) -> int:
    """Train until the run has had `total` updates.

    Args:
        engine: DeepSpeed's pipeline engine or ours, new or resumed.
        batches: micro-batches to train on; the run goes on after the samples that the engine has had.
        validation: None for none.
        checkpoints: of the run.
        total: updates of the whole run, those before it was resumed counted.
        report: what is told of it.
        arguments: of the training script.

    Returns:
        How many updates were done now.

    Raises:
        PipelinePeerError: another stage failed, is lost, or did not answer in time.
        VPipeError: data are broken, or a checkpoint cannot be written.
    """
    done = engine.global_steps
    size, length = engine.train_batch_size(), batches.epoch_samples
    position = engine.global_samples
    # One iterator for the whole run: the pipeline reads ahead in it and never has to drain.
    reads = engine.is_first_stage() or engine.is_last_stage()
    iterator = batches.after(position, (total - done) * engine.micro_batches) if reads else None
    step = done
    for step in range(done + 1, total + 1):
        batch_loss = engine.train_batch(iterator)
        before, position = position, position + size
        epoch = (position - 1) // length
        stages = engine.statistics() if isinstance(engine, ds_vpipe.VPipeEngine) else ()
        report.step(step, epoch, batch_loss, engine.get_lr()[0], stages)
        if step < total:
            with report.pause():
                checkpoints.after(epoch_ended=position // length > before // length)
                if validation is not None and arguments.eval_steps and step % arguments.eval_steps == 0:
                    report.validation(step, validation.run())
    return step - done
