"""Losses of ``python -m ds_vpipe forecast`` against those of a pipeline that trains the same.

``python scripts/bench/forecast.py`` forecasts a small BERT on the docstrings of the installed packages, or on
``--train-file``, then starts a rank per stage and trains the forecast's layers, split and data with the same JSON. The
model has no ties and no dropout, which a forecast has otherwise. Printed are both curves and their largest difference.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Say, close_groups, machine, parser_of, start
from deepspeed.pipe import PipelineModule

import ds_vpipe
from ds_vpipe.__main__ import main as command
from ds_vpipe.models.bert.example import training

SHOWN = 10  # points of a curve


def config_of(options: argparse.Namespace, partition: Sequence[int] | None = None) -> dict[str, Any]:
    """The JSON, with DeepSpeed's default of everything that it does not name."""
    rate = 1e-3
    warm_up = max(1, options.updates // 10)
    schedule = {"total_num_steps": options.updates, "warmup_num_steps": warm_up, "warmup_max_lr": rate}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "steps_per_print": 10**9,
        "vpipe": {} if partition is None else {"partition": partition},
    }


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the function that makes the model, here and in the forecast."""
    given = {"train_file": options.train_file, "max_seq_length": options.sequence, "tie_word_embeddings": False}
    return {key: value for key, value in given.items() if value is not None}


def forecast(options: argparse.Namespace) -> dict[str, Any]:
    """What the command says of the pipeline."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        path = Path(folder) / "ds_config.json"
        path.write_text(json.dumps(config_of(options)), encoding="utf-8")
        words = ["--model", "ds_vpipe.models.bert.example:training", "--stages", str(options.stages), "--json"]
        words += ["--updates", str(options.updates)]
        for key, value in model_options(options).items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        if command(["forecast", str(path), *words]) != 0:
            raise SystemExit("the forecast has failed")
    found: dict[str, Any] = json.loads(printed.getvalue())[-1]
    return found


def work(rank: int, say: Say, found: dict[str, Any], options: argparse.Namespace) -> None:
    """One rank: the run, and on the first one the comparison."""
    torch.manual_seed(0)
    made = training(options.batch, **model_options(options))
    module = PipelineModule(made["layers"], num_stages=options.stages, loss_fn=made["loss_fn"])
    engine = ds_vpipe.initialize(model=module, config=config_of(options, found["partition"]))[0]
    losses = [float(engine.train_batch(made["data"])) for _ in range(options.updates)]
    engine.destroy()
    close_groups()
    off = [abs(one - other) / one for one, other in zip(losses, found["losses"], strict=True)]
    step = max(1, options.updates // SHOWN)
    for update in range(step, options.updates + 1, step):
        say(f"update {update:5}: run {losses[update - 1]:.6f}, forecast {found['losses'][update - 1]:.6f}")
    worst = max(range(len(off)), key=off.__getitem__)
    say(f"largest difference: {off[worst]:.1e} of the loss, in update {worst + 1} of {len(off)}")


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=4, help="K")
parser.add_argument("--micro-batches", type=int, default=1, help="M")
parser.add_argument("--updates", type=int, default=300)
parser.add_argument("--batch", type=int, default=8, help="samples per micro-batch")
parser.add_argument("--sequence", type=int, default=32, help="tokens per sample")
parser.add_argument("--train-file", help="own text; default: docstrings of the installed packages")
parse = parser.parse_args


def main() -> None:
    """Forecast, train and compare."""
    options = parse()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    found = forecast(options)
    print(f"{machine()}; K={options.stages} M={options.micro_batches}, staleness {found['staleness']}", flush=True)
    start(work, options.stages, found, options)


if __name__ == "__main__":
    main()
