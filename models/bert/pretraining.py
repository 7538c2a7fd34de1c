"""A pre-training run, from the command line to the validation loss."""

import contextlib
import io
import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed
from transformers import BertConfig

import ds_vpipe
from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert.architecture import BERT
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.batches import MicroBatch, MicroBatches
from ds_vpipe.models.bert.deadline import Deadline
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.report import Report
from ds_vpipe.models.bert.samples import Samples
from ds_vpipe.models.bert.sizes import bert_config
from ds_vpipe.models.bert.training_data import TrainingData, prepare
from ds_vpipe.models.model import model_of
from ds_vpipe.models.roberta.architecture import ROBERTA

VALIDATION_SAMPLES = 1024  # enough for two digits of the loss
DEFAULT_STEPS_PER_PRINT = 50


def main(arguments: list[str] | None = None) -> int:
    """Run the training script; the exit code is 2 after an error that its message explains, on any rank."""
    try:
        _run(parse_arguments(arguments))
    except VPipeError as error:
        print(f"[Rank {os.environ.get('RANK', '0')}] error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _run(arguments: Namespace) -> None:
    ds_config = read_ds_config(arguments.deepspeed_config)
    model = model_of(
        arguments,
        (BERT, ROBERTA),
        lambda: bert_config(arguments.bert_config, arguments.vocab_size, arguments.attention),
        tied=False,
    )
    rank, world = _start_process_group()
    if rank == 0:
        print(f"Model: {model.description}", flush=True)
    data = _prepare(arguments, model.config, rank)
    # Taken out of the configuration: the engine's own progress lines would repeat the report's.
    every = ds_config.pop("steps_per_print", DEFAULT_STEPS_PER_PRINT)
    if not isinstance(every, int) or every < 1:
        raise VPipeConfigError(f"steps_per_print in {arguments.deepspeed_config}: {every!r} must be a positive integer")
    torch.manual_seed(arguments.seed + rank)  # dropout; the weights have seeds of their own
    loss = PretrainingLoss()
    engine = _engine(arguments, model.layers, ds_config, loss, world)
    print(f"[Rank {rank}] Stage: {engine.stage_id}, Rank in stage: {engine.grid.get_data_parallel_rank()}", flush=True)

    batches = _micro_batches(engine, data.training, arguments.seed, shuffle=True)
    total = arguments.steps or max(1, arguments.epochs * batches.per_epoch // engine.micro_batches)
    report = Report(arguments.output if rank == 0 else None, total, engine.train_batch_size(), every)
    report.line(f"Data: {data.description}")
    report.line(f"Training: {total} updates of {engine.train_batch_size()} samples, {engine.num_stages} stages")
    begin = time.monotonic()
    steps = _train(engine, loss, batches, data.held_out, total, report, arguments)
    report.line(f"Finished {steps} updates in {time.monotonic() - begin:.1f} s")
    validation_loss = _validate(engine, loss, data.held_out)
    report.validation(steps, validation_loss)
    report.close(data.unigram_entropy)
    report.line(f"unigram entropy of the corpus: {data.unigram_entropy:.4f} nats")
    report.line(f"validation loss (masked LM): {validation_loss:.4f} nats")
    report.line(f"below the unigram entropy by: {data.unigram_entropy - validation_loss:.4f} nats")
    report.line(f"metrics and loss plot: {arguments.output}")
    distributed.barrier()  # a rank that leaves early takes its connections with it
    distributed.destroy_process_group()


def read_ds_config(path: str) -> dict[str, Any]:
    """The DeepSpeed JSON at `path`.

    Raises:
        VPipeConfigError: there is no such file, or it is not a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise VPipeConfigError(
            f"--deepspeed_config {path}: {error.strerror}; give an existing DeepSpeed JSON file"
        ) from error
    except ValueError as error:
        raise VPipeConfigError(f"--deepspeed_config {path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise VPipeConfigError(f"--deepspeed_config {path}: must hold a JSON object, not a {type(content).__name__}")
    return content


def _start_process_group() -> tuple[int, int]:
    if "RANK" not in os.environ:
        raise VPipeConfigError(
            "RANK is not set: start with a launcher, e.g. deepspeed --num_accelerators 4 models/bert/train.py ..."
        )
    with _silence():
        deepspeed.init_distributed()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    print(
        f"Finished initializing process group; backend: {distributed.get_backend()}, rank: {rank}, world_size: {world}",
        flush=True,
    )
    return rank, world


def _prepare(arguments: Namespace, config: BertConfig, rank: int) -> TrainingData:
    begin = time.monotonic()
    if rank == 0:
        print("Preparing data (kept in a cache for the next run) ...", flush=True)
    data = prepare(arguments, config, builder=int(os.environ.get("LOCAL_RANK", "0")) == 0)
    if rank == 0:
        print(f"Data ready after {time.monotonic() - begin:.1f} s", flush=True)
    digests: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, data.digest)
    if len(set(digests)) > 1:
        raise VPipeConfigError(
            f"ranks have different text ({digests}): stages would read different samples; install the same package"
            " versions on all machines or give them the same --text"
        )
    return data


def _engine(
    arguments: Namespace, layers: list[Any], ds_config: dict[str, Any], loss: PretrainingLoss, world: int
) -> Any:
    stages = arguments.stages or world
    if world % stages:
        raise VPipeConfigError(f"--stages {stages}: must divide the number of ranks, {world}")
    with _silence():
        model = ds_vpipe.VPipeModule(layers=layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
        engine, *_ = ds_vpipe.initialize(model=model, config=ds_config)
    return engine


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep back what DeepSpeed prints and warns of while it starts: every layer, and a scheduler not yet stepped."""
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        deepspeed_logger.setLevel(logging.WARNING)


def _micro_batches(engine: Any, samples: Samples, seed: int, shuffle: bool) -> MicroBatches:
    grid = engine.grid
    try:
        return MicroBatches(
            samples,
            engine.train_micro_batch_size_per_gpu(),
            replica=grid.get_data_parallel_rank(),
            replicas=grid.get_data_parallel_world_size(),
            seed=seed,
            shuffle=shuffle,
        )
    except ValueError as error:
        raise VPipeConfigError(f"{error}: give more --text or lower train_micro_batch_size_per_gpu") from error


def _read(engine: Any, batches: MicroBatches, count: int) -> Iterator[MicroBatch] | None:
    """The first `count` micro-batches on the stages that read them; the others need no iterator."""
    return batches.range(0, count) if engine.is_first_stage() or engine.is_last_stage() else None


def _train(
    engine: Any,
    loss: PretrainingLoss,
    batches: MicroBatches,
    held_out: Samples,
    total: int,
    report: Report,
    arguments: Namespace,
) -> int:
    """Train for at most `total` updates; returns how many were done, the same number on every rank."""
    # One iterator for the whole run: the pipeline reads ahead in it and never has to drain.
    iterator = _read(engine, batches, total * engine.micro_batches)
    deadline = Deadline(arguments.max_seconds)
    step = 0
    for step in range(1, total + 1):
        batch_loss = engine.train_batch(iterator)
        epoch = (step * engine.micro_batches - 1) // batches.per_epoch
        stages = engine.statistics() if isinstance(engine, ds_vpipe.VPipeEngine) else ()
        report.step(step, epoch, batch_loss, engine.get_lr()[0], stages)
        if arguments.validate_every and step % arguments.validate_every == 0 and step < total:
            report.validation(step, _validate(engine, loss, held_out))
        if deadline.passed(step):
            break
    deadline.close()
    return step


def _validate(engine: Any, loss: PretrainingLoss, held_out: Samples) -> float:
    """Masked-LM loss in nats over held-out samples, the same ones every time; all ranks call this."""
    batches = _micro_batches(engine, held_out, seed=0, shuffle=False)
    rounds = max(1, min(len(held_out), VALIDATION_SAMPLES) // engine.train_batch_size())
    iterator = _read(engine, batches, rounds * engine.micro_batches)
    with loss.masked_lm_only():
        return sum(engine.eval_batch(iterator).item() for _ in range(rounds)) / rounds
