"""A run from the command line to the validation loss."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import ds_vpipe
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.architecture import model_state
from ds_vpipe.models.gpt2.architecture import GPT2
from ds_vpipe.models.gpt2.blocks import TextBlocks
from ds_vpipe.models.gpt2.loss import causal_lm_loss
from ds_vpipe.models.gpt2.sizes import SIZE_NAMES, gpt2_config
from ds_vpipe.models.gpt2.text import SMALLEST_VOCABULARY, corpus_tokens
from ds_vpipe.models.model import Model, add_weight_arguments, model_of
from ds_vpipe.models.start import exit_code, read_ds_config, start_process_group, training_parser

HELD_OUT = 20  # the last 20th of the text, 5 %, is for validation
VALIDATION_BATCHES = 16


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (of this process if `arguments` is None).

    Raises:
        VPipeConfigError: an argument is unknown, missing or out of range.
    """
    parser = training_parser("Train a GPT-2 with an asynchronous pipeline.")
    parser.add_argument("--gpt2-config", default="tiny", help=f"{', '.join(SIZE_NAMES)}, or a GPT-2's config.json")
    add_weight_arguments(parser)
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="UTF-8; default: docstrings of packages")
    parser.add_argument("--vocab-size", type=int, help="of a new model, in place of the configuration's")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates; default: 300")
    parser.add_argument("--stages", type=int, help="pipeline stages (default: one per rank)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="save there at the end")
    parsed = parser.parse_args(arguments)
    if parsed.deepspeed_config is None:
        raise VPipeConfigError(
            "--deepspeed_config is missing: give a DeepSpeed JSON file, e.g. ds_configs/gpt2_tiny_cpu.json"
        )
    limits = {"seq_length": 2, "steps": 1, "stages": 1, "vocab_size": SMALLEST_VOCABULARY, "seed": 0}
    for name, least in limits.items():
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise VPipeConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Run the training script; the exit code is 2 after an error that its message explains, on any rank."""
    return exit_code(lambda: _run(parse_arguments(arguments)))


def _run(arguments: argparse.Namespace) -> None:
    ds_config = read_ds_config(arguments.deepspeed_config)
    model = model_of(arguments, (GPT2,), lambda: gpt2_config(arguments.gpt2_config, arguments.vocab_size), tied=True)
    if arguments.seq_length > model.config.max_position_embeddings:
        raise VPipeConfigError(
            f"--seq-length {arguments.seq_length}: the model has {model.config.max_position_embeddings} positions"
        )
    start_process_group()
    tokens = corpus_tokens(arguments.text, arguments.model_name_or_path, model.config.vocab_size)
    _say(f"Model: {model.description}; text: {len(tokens)} tokens")
    torch.manual_seed(arguments.seed + distributed.get_rank())  # dropout; the weights have seeds of their own
    engine = _engine(arguments, ds_config, model)
    grid, size = engine.grid, engine.train_micro_batch_size_per_gpu()
    place = (grid.get_data_parallel_rank(), grid.get_data_parallel_world_size())
    cut = len(tokens) - len(tokens) // HELD_OUT
    training = TextBlocks(tokens[:cut], arguments.seq_length, size, *place)
    held_out = TextBlocks(tokens[cut:], arguments.seq_length, size, *place)
    batches = training.micro_batches(arguments.seed)
    for _ in range(arguments.steps):
        loss = engine.train_batch(batches)
    rounds = max(1, min(VALIDATION_BATCHES, held_out.per_epoch // engine.micro_batches))
    batches = held_out.micro_batches(None)
    validation = sum(engine.eval_batch(batches).item() for _ in range(rounds)) / rounds
    _say(f"after {arguments.steps} updates: loss {loss.item():.4f} nats, validation loss {validation:.4f} nats")
    if arguments.checkpoint_dir is not None:
        engine.save_checkpoint(arguments.checkpoint_dir, client_state=model_state(model.config))
    engine.destroy()
    distributed.barrier()  # a rank that leaves early takes its connections with it
    distributed.destroy_process_group()


def _engine(arguments: argparse.Namespace, ds_config: dict[str, Any], model: Model) -> Any:
    stages = arguments.stages or distributed.get_world_size()
    if distributed.get_world_size() % stages:
        raise VPipeConfigError(f"--stages {stages}: must divide the number of ranks, {distributed.get_world_size()}")
    module = ds_vpipe.VPipeModule(
        layers=model.layers, num_stages=stages, loss_fn=causal_lm_loss, partition_method="uniform"
    )
    return ds_vpipe.initialize(model=module, config=ds_config)[0]


def _say(line: str) -> None:
    if distributed.get_rank() == 0:
        print(line, flush=True)
