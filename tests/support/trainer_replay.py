"""Runs a script with Hugging Face's Trainer in one process, trained by the reference of asynchronous updates.

Data, schedule, evaluation and saving are the Trainer's; every batch goes to the replay, whose weights the script's
model then gets.

    python tests/support/trainer_replay.py SAVED PARTITION SCRIPT ...

compares with what a pipeline of that partition has saved in ``SAVED``, by ``--save_strategy steps`` after its last
update. ``SCRIPT ...`` is the pipeline's line without ``--deepspeed``, with a batch as large as that of all replicas.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from plain_reference import Groups, ScriptReplay, flat, scheduled
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer


def stages_of_names(saved: Path, partition: Sequence[int]) -> dict[str, int]:
    """Stage of every parameter in the newest checkpoint of a pipeline, by name."""
    stage_of_layer = [stage for stage, count in enumerate(partition) for _ in range(count)]
    newest = max(saved.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    files = newest.glob("global_step*/layer_*-model_states.pt")
    return {
        name: stage_of_layer[int(file.name.split("_")[1].split("-")[0])] for file in files for name in torch.load(file)
    }


class TrainerReplay(ScriptReplay):
    """The reference with the Trainer's optimizer, schedule, clipping and share of a micro-batch in its batch.

    Attributes:
        shares: of every micro-batch; 0 for those that fill up the last batch of an epoch.
    """

    def __init__(self, trainer: Trainer, stage_of: dict[str, int]) -> None:
        model, args = trainer.model, trainer.args
        self.shares: list[float] = []
        whole, scheduler = trainer.optimizer.optimizer, trainer.lr_scheduler
        names = {id(p): flat(name) for name, p in model.named_parameters()}
        group_of = {names[id(p)]: at for at, group in enumerate(whole.param_groups) for p in group["params"]}

        def of_stage(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            here: Groups = [{**group, "params": []} for group in whole.param_groups]
            for name, parameter in named:
                here[group_of[name]]["params"].append(parameter)
            return scheduled(whole, here, scheduler)

        owners = {id(p): name for name, p in model.named_parameters()}
        copies = {
            name: stage_of[name]
            for name, p in model.named_parameters(remove_duplicate=False)
            if stage_of[name] != stage_of[owners[id(p)]]
        }
        micro_batches = args.gradient_accumulation_steps
        super().__init__(model, stage_of, copies, micro_batches, args.max_grad_norm, of_stage)

    def forward(self, j: int, batch: int, replica: int) -> Any:
        loss, leaves = super().forward(j, batch, replica)
        return loss * self.shares[j] * self.micro_batches, leaves

    def accumulate(self, trainer: Trainer, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        """A micro-batch; with the last of its batch, the update, which the script's model gets. Returns the loss."""
        by_items, count = (
            trainer.model_accepts_loss_kwargs and items is not None,
            trainer.current_gradient_accumulation_steps,
        )
        self.calls.append(((), {**inputs, "num_items_in_batch": items} if by_items else dict(inputs)))
        self.shares.append(1.0 if by_items else 1 / count)
        if len(self.calls) % self.micro_batches != count % self.micro_batches:
            return torch.tensor(0.0)
        while len(self.calls) % self.micro_batches:
            self.calls.append(self.calls[-1])
            self.shares.append(0.0)
        self.model.train()
        self.train(len(self.calls) // self.micro_batches - 1)
        newest = self.named()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(newest[name])
        return torch.tensor(self.losses[-1])


def replaying(stage_of: dict[str, int]) -> Any:
    """A patch of the Trainer, under which it trains by the replay."""
    made: list[TrainerReplay] = []

    def step(trainer: Trainer, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        if not made:
            made.append(TrainerReplay(trainer, stage_of))
        return made[0].accumulate(trainer, inputs, num_items_in_batch)

    return mock.patch.object(Trainer, "training_step", step)


def main(saved: str, partition: str, script: str, *arguments: str) -> None:
    """Run the script as the replay; print how far the pipeline's weights and results are from it."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    with replaying(stages_of_names(Path(saved), json.loads(f"[{partition}]"))):
        runpy.run_path(script, run_name="__main__")
    output = arguments[arguments.index("--output_dir") + 1]
    theirs, ours = (load_file(Path(folder) / "model.safetensors") for folder in (saved, output))
    assert theirs.keys() == ours.keys()
    print(f"weights: {max(float((ours[name] - value).abs().max()) for name, value in theirs.items()):.1e}")
    found, wanted = (json.loads((Path(folder) / "all_results.json").read_text()) for folder in (saved, output))
    for name in ("eval_loss", "eval_accuracy"):
        print(f"{name}: {found[name]:.6f} of the pipeline, {wanted[name]:.6f} of the replay")


if __name__ == "__main__":
    main(*sys.argv[1:])
