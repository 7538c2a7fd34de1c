"""A pre-training run, from the command line to the validation loss."""

import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import ds_vpipe
from ds_vpipe.config.deepspeed_json import DeepSpeedJson, parse_deepspeed_json
from ds_vpipe.errors import Refusal, VPipeConfigError, read_json, show
from ds_vpipe.models.bert.arguments import CHECKPOINTS, parse_arguments
from ds_vpipe.models.bert.data import TrainingData, micro_batches_of, prepare_on_readers
from ds_vpipe.models.bert.loss import PretrainingLoss, validate
from ds_vpipe.models.bert.metrics import Metrics
from ds_vpipe.models.bert.model import Model, model_of
from ds_vpipe.models.hugging_face import model_state
from ds_vpipe.models.start import exit_code, record_run, silence, start_process_group
from ds_vpipe.tables import counted

DEFAULT_STEPS_PER_PRINT = 50

_STATE = "bert_pretraining"  # in checkpoints
_IDENTITY = ("seed", "max_seq_length", "max_predictions_per_seq", "mlm_probability", "whole_word_masking", "keep_order")


def main(arguments: list[str] | None = None) -> int:
    """Run the training script. The exit code is 2 after an error that its message explains, on any rank."""
    return exit_code(lambda: _run(parse_arguments(arguments)), f"[Rank {os.environ.get('RANK', '0')}] ")


def _run(arguments: Namespace) -> None:
    path = arguments.deepspeed_config
    allowed, fix = "a DeepSpeed JSON", "give an existing DeepSpeed JSON file"
    ds_config = read_json(path, "--deepspeed_config", allowed, fix, parse_deepspeed_json)
    model = model_of(arguments)
    rank, world = start_process_group()
    record_run(arguments.output_dir, ds_config)
    every = take_steps_per_record(ds_config, path)
    stages: int = arguments.num_stages or world
    if world % stages:
        raise VPipeConfigError(f"--num_stages {stages}: must divide the number of ranks, {world}")
    if rank == 0:
        print(f"Model: {model.description}\nPreparing data (text is kept in a cache for the next run) ...", flush=True)
    begin = time.monotonic()
    data = prepare_on_readers(arguments, model.config, stages)
    if rank == 0:
        print(f"Data ready after {time.monotonic() - begin:.1f} s", flush=True)
    torch.manual_seed(arguments.seed + rank)  # dropout; the weights have seeds of their own
    loss = PretrainingLoss()
    with silence():
        module = ds_vpipe.VPipeModule(layers=model.layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
        engine, *_ = ds_vpipe.initialize(model=module, config=ds_config)
    place = f"Stage: {engine.stage_id}, Rank in stage: {engine.grid.get_data_parallel_rank()}"
    print(f"[Rank {rank}] {place}\n", end="", flush=True)  # in one write: all ranks print theirs at once
    _Run(engine, loss, arguments, data, model).train(every if rank == 0 else None)
    distributed.barrier()  # a rank that leaves early takes its connections with it
    distributed.destroy_process_group()


def take_steps_per_record(ds_config: dict[str, Any], path: str) -> int:
    """Updates between two records: ``steps_per_print``, which stays in the configuration for DeepSpeed's timers only.

    The engine's own progress lines would repeat those of the metrics.

    Raises:
        VPipeConfigError: it is no positive integer.
    """
    every = ds_config.get("steps_per_print", DEFAULT_STEPS_PER_PRINT)
    if not isinstance(every, int) or every < 1:
        raise VPipeConfigError(f"steps_per_print in {path}: {every!r} must be a positive integer")
    if not DeepSpeedJson(ds_config).on("wall_clock_breakdown"):
        ds_config.pop("steps_per_print", None)
    return every


class _Run:
    """Updates, validations and checkpoints of a run, on every rank alike.

    The engine's checkpoint holds weights, optimizer, schedule, random states and the data position. Added is which
    data the position counts in, so that a run does not go on at the right place of the wrong samples.
    """

    def __init__(
        self, engine: Any, loss: PretrainingLoss, arguments: Namespace, data: TrainingData, model: Model
    ) -> None:
        self._engine = engine
        self._loss = loss
        self._arguments = arguments
        self._data = data
        self._identity = {"data": data.digest} | {name: getattr(arguments, name) for name in _IDENTITY}
        self._state = {_STATE: self._identity, **model_state(model.config)}
        self._folder: Path = arguments.output_dir / CHECKPOINTS
        self._saved_at = -1
        self._smallest = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        if len(data.training) < self._smallest:
            replicas = counted(engine.dp_world_size, "replica")
            raise VPipeConfigError(
                f"{len(data.training)} samples are too few for {replicas} of micro-batch size "
                f"{engine.train_micro_batch_size_per_gpu()}: give more text or lower train_micro_batch_size_per_gpu"
            )
        self._goes_on = self._load()

    def train(self, every: int | None) -> None:
        """Train until the run has had all its updates, earlier ones counted. Validate and save.

        Args:
            every: updates between two records of the metrics; None on ranks that write nothing.

        Raises:
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
            VPipeError: data are broken, or a checkpoint cannot be written.
        """
        engine, arguments, data = self._engine, self._arguments, self._data
        done, position, size = engine.global_steps, engine.global_samples, engine.train_batch_size()
        to_come = (arguments.num_train_epochs * len(data.training) - position) // size
        total = arguments.max_steps or done + max(0 if done else 1, to_come)
        folder, kept = None if every is None else arguments.output_dir, done if self._goes_on else 0
        metrics = Metrics(folder, total, size, every or 1, done, kept)
        metrics.line(f"Data: {data.description}")
        metrics.line(f"Training: {total} updates of {size} samples, {engine.num_stages} stages")
        held_out = data.held_out if len(data.held_out or ()) >= self._smallest else None
        if held_out is None:
            given = f"{len(data.held_out or ())} held-out samples"
            metrics.line(f"No validation: {given}, a micro-batch on every replica is {self._smallest}")
        if done:
            metrics.line(f"Resumed after update {done}")
        begin = time.monotonic()
        # One iterator for the whole run: the pipeline reads ahead in it and never has to drain.
        left = max(0, total - done) * engine.micro_batches
        batches = micro_batches_of(engine, data.training, arguments.seed, left, position)
        for step in range(done + 1, total + 1):
            loss = engine.train_batch(batches)
            before, position = position, position + size
            stages = engine.statistics() if isinstance(engine, ds_vpipe.VPipeEngine) else ()
            metrics.step(step, (position - 1) // len(data.training), loss, engine.get_lr()[0], stages)
            if step == total:
                break
            epoch_ended = position // len(data.training) > before // len(data.training)
            with metrics.pause():
                if epoch_ended if arguments.save_strategy == "epoch" else step % arguments.save_steps == 0:
                    self._save()
                if held_out is not None and arguments.eval_steps and step % arguments.eval_steps == 0:
                    metrics.validation(step, validate(engine, self._loss, held_out))
        metrics.line(f"Finished {max(0, total - done)} updates in {time.monotonic() - begin:.1f} s")
        with metrics.pause():
            self._save()
            result = None if held_out is None else validate(engine, self._loss, held_out)
            if result is not None:
                metrics.validation(engine.global_steps, result)
        metrics.close(data.unigram_entropy)
        if (entropy := data.unigram_entropy) is not None:  # what a model without context would reach
            below = "" if result is None else f", validation is {entropy - result['masked_lm_loss']:.4f} below it"
            metrics.line(f"unigram entropy of the corpus: {entropy:.4f} nats{below}")
        metrics.line(f"metrics and loss plot: {arguments.output_dir}")

    def _load(self) -> bool:
        """Go on from states in memory or from a checkpoint, or take its weights, as the command line says.

        Returns whether it is the output folder's run that goes on.
        """
        engine, arguments = self._engine, self._arguments
        resumed, weights = arguments.resume_from_checkpoint, arguments.initial_checkpoint
        recovers = isinstance(engine, ds_vpipe.VPipeEngine) and engine.recovery is not None
        if recovers and engine.recover():
            return True  # of the same command, in which a rank has failed
        own, again = resumed == self._folder, os.environ.keys() & {"DS_VPIPE_RESTART", "DS_VPIPE_REPLAY"}
        if again == {"DS_VPIPE_RESTART"} and arguments.save_strategy != "no" and not (own or recovers):
            given, allowed = resumed and str(resumed), f"{self._folder} with --restarts, if it saves"
            remedy, reason = "give it without a folder, or --save_strategy no", "a restart loses what has been saved"
            raise Refusal("--resume_from_checkpoint", given, allowed, remedy, reason).error()
        path, state = (None, {}) if resumed is None else engine.load_checkpoint(str(resumed))
        if path is None and (resumed is None or (own and again)):  # nothing has been saved yet
            if weights is not None:
                options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
                engine.load_checkpoint(str(weights), load_module_only=True, **options)
            return False
        if path is None:
            raise VPipeConfigError(
                f"--resume_from_checkpoint: there is no checkpoint in {resumed}, or no file 'latest' that names one"
            )
        before = state.get(_STATE)
        if before is None:
            raise VPipeConfigError(
                f"--resume_from_checkpoint: the checkpoint in {resumed} is not of this training script; take its"
                " weights with --model_name_or_path"
            )
        for key, value in self._identity.items():
            if before.get(key) != value:
                raise VPipeConfigError(
                    f"--resume_from_checkpoint: the run in {resumed} had {key} {show(before.get(key))}, now it is"
                    f" {show(value)}: it would go on with other samples; give the same, or begin anew with"
                    " --model_name_or_path"
                )
        if own:
            self._saved_at = self._engine.global_steps
        return own

    def _save(self) -> None:
        """Save, unless nothing has been trained since the last time."""
        if self._arguments.save_strategy != "no" and self._saved_at != self._engine.global_steps:
            self._engine.save_checkpoint(str(self._folder), client_state=self._state)
            self._saved_at = self._engine.global_steps
