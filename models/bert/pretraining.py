"""A pre-training run, from the command line to the validation loss."""

import time
from argparse import Namespace
from typing import Any

import torch
from torch import distributed
from transformers import BertConfig

import ds_vpipe
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.architecture import model_state
from ds_vpipe.models.bert.architecture import BERT
from ds_vpipe.models.bert.arguments import CHECKPOINTS, parse_arguments
from ds_vpipe.models.bert.batches import MicroBatches
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.report import Report
from ds_vpipe.models.bert.run_checkpoints import RunCheckpoints, identity_of, load_weights
from ds_vpipe.models.bert.sample import Samples
from ds_vpipe.models.bert.shared_data import prepare_together
from ds_vpipe.models.bert.sizes import bert_config
from ds_vpipe.models.bert.training_data import TrainingData
from ds_vpipe.models.bert.training_loop import train
from ds_vpipe.models.bert.validation import Validation
from ds_vpipe.models.model import model_of
from ds_vpipe.models.roberta.architecture import ROBERTA
from ds_vpipe.models.start import exit_code, read_ds_config, record_run, silence, start_process_group

DEFAULT_STEPS_PER_PRINT = 50


def main(arguments: list[str] | None = None) -> int:
    """Run the training script; the exit code is 2 after an error that its message explains, on any rank."""
    return exit_code(lambda: _run(parse_arguments(arguments)))


def _run(arguments: Namespace) -> None:
    ds_config = read_ds_config(arguments.deepspeed_config)
    model = model_of(
        arguments,
        (BERT, ROBERTA),
        lambda: bert_config(arguments.config_name, arguments.vocab_size, arguments.attn_implementation),
        tied=False,
    )
    rank, world = start_process_group()
    record_run(arguments.output_dir, ds_config)
    if rank == 0:
        print(f"Model: {model.description}", flush=True)
    data = _prepare(arguments, model.config, rank, world)
    # Taken out of the configuration: the engine's own progress lines would repeat the report's.
    every = ds_config.pop("steps_per_print", DEFAULT_STEPS_PER_PRINT)
    if not isinstance(every, int) or every < 1:
        raise VPipeConfigError(f"steps_per_print in {arguments.deepspeed_config}: {every!r} must be a positive integer")
    torch.manual_seed(arguments.seed + rank)  # dropout; the weights have seeds of their own
    loss = PretrainingLoss()
    engine = _engine(arguments, model.layers, ds_config, loss, world)
    print(f"[Rank {rank}] Stage: {engine.stage_id}, Rank in stage: {engine.grid.get_data_parallel_rank()}", flush=True)

    checkpoints = RunCheckpoints(
        engine,
        arguments.output_dir / CHECKPOINTS,
        arguments.save_strategy,
        arguments.save_steps,
        identity_of(arguments, data.digest),
        model_state(model.config),
    )
    if arguments.resume_from_checkpoint is not None:
        checkpoints.resume(arguments.resume_from_checkpoint)
    if arguments.initial_checkpoint is not None:
        load_weights(engine, arguments.initial_checkpoint)

    batches = _micro_batches(engine, data.training, arguments.seed, shuffle=True)
    held_out = data.held_out
    smallest = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
    validation = None
    if held_out is not None and len(held_out) >= smallest:
        validation = Validation(
            engine, loss, _micro_batches(engine, held_out, seed=0, shuffle=False), samples=len(held_out)
        )
    total = arguments.max_steps or max(
        1, arguments.num_train_epochs * batches.epoch_samples // engine.train_batch_size()
    )
    report = Report(
        arguments.output_dir if rank == 0 else None,
        total,
        engine.train_batch_size(),
        every,
        batches.epoch_samples / engine.train_batch_size(),
        done=engine.global_steps,
    )
    report.line(f"Data: {data.description}")
    report.line(f"Training: {total} updates of {engine.train_batch_size()} samples, {engine.num_stages} stages")
    if validation is None:
        report.line(
            f"No validation: {len(held_out or ())} held-out samples, a micro-batch on every replica is {smallest}"
        )
    if engine.global_steps:
        report.line(f"Resumed after update {engine.global_steps}")
    begin = time.monotonic()
    trained = train(engine, batches, validation, checkpoints, total, report, arguments)
    report.line(f"Finished {trained} updates in {time.monotonic() - begin:.1f} s")
    checkpoints.save()
    _conclude(engine.global_steps, validation, data, report, arguments)
    distributed.barrier()  # a rank that leaves early takes its connections with it
    distributed.destroy_process_group()


def _conclude(
    steps: int, validation: Validation | None, data: TrainingData, report: Report, arguments: Namespace
) -> None:
    """Validate for the last time, and tell the outcome."""
    result = None if validation is None else validation.run()
    if result is not None:
        report.validation(steps, result)
    report.close(data.unigram_entropy)
    if data.unigram_entropy is not None:
        report.line(f"unigram entropy of the corpus: {data.unigram_entropy:.4f} nats")
    if result is not None:
        report.line(f"validation loss (masked LM): {result.masked_lm_loss:.4f} nats")
        report.line(f"validation accuracy: {result.accuracies}")
    if result is not None and data.unigram_entropy is not None:
        report.line(f"below the unigram entropy by: {data.unigram_entropy - result.masked_lm_loss:.4f} nats")
    report.line(f"metrics and loss plot: {arguments.output_dir}")


def _prepare(arguments: Namespace, config: BertConfig, rank: int, world: int) -> TrainingData:
    begin = time.monotonic()
    if rank == 0:
        print("Preparing data (text is kept in a cache for the next run) ...", flush=True)
    data = prepare_together(arguments, config, _stages(arguments, world))
    if rank == 0:
        print(f"Data ready after {time.monotonic() - begin:.1f} s", flush=True)
    return data


def _stages(arguments: Namespace, world: int) -> int:
    stages: int = arguments.num_stages or world
    if world % stages:
        raise VPipeConfigError(f"--num_stages {stages}: must divide the number of ranks, {world}")
    return stages


def _engine(
    arguments: Namespace, layers: list[Any], ds_config: dict[str, Any], loss: PretrainingLoss, world: int
) -> Any:
    stages = _stages(arguments, world)
    with silence():
        model = ds_vpipe.VPipeModule(layers=layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
        engine, *_ = ds_vpipe.initialize(model=model, config=ds_config)
    return engine


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
        raise VPipeConfigError(f"{error}: give more text or lower train_micro_batch_size_per_gpu") from error
