"""Pipelines under comparison: DeepSpeed's, torch's and ours, each as a function that trains a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import REAL_BATCH, build, ds_config, endless, engine_for, micro_batch

VIRTUAL = 2  # parts per rank, of schedules that have several
LATENCY = 0.05  # of a message between two processes, in units of a stage's compute
Train = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """Work of one comparison.

    Attributes:
        kind: ``emulated`` or ``real`` layers, two per stage.
        stages: K.
        micro_batches: M.
        stage_ms: emulated compute per stage and micro-batch.
        link: seconds that an activation is on its way, in units of ``stage_ms``.
        device: ``cpu`` or ``cuda``.
    """

    kind: str
    stages: int
    micro_batches: int
    stage_ms: float
    link: float = 0.0
    device: str = "cpu"

    def layers(self) -> list[Any]:
        """Specs of the model's layers."""
        count = VIRTUAL * self.stages
        return build(self.kind, count, self.stage_ms / VIRTUAL)


def deeper(case: Case) -> list[int]:
    """The smallest depths that hide transfers, as the planner finds them; a message that takes no time takes some."""
    from ds_vpipe.planning.pace import hiding_depths

    round_trip = 2 * (case.link + LATENCY)
    return list(hiding_depths([1.0] * case.stages, [round_trip] * (case.stages - 1)))


def refusal(arm: str, case: Case) -> str | None:
    """Why an arm cannot do a case, or None."""
    stages, micro_batches = case.stages, case.micro_batches
    if arm in ("dualpipev", "torch-zbv") and micro_batches < 2 * stages:
        return "needs M >= 2K"
    if arm == "torch-1f1b" and micro_batches < stages:
        return "needs M >= K"
    if arm in ("interleaved", "torch-interleaved") and micro_batches % stages:
        return "needs M divisible by K"
    return None


def deepspeed_arm(case: Case, vpipe: dict[str, Any] | None, module_class: str = "PipelineModule") -> tuple[Any, Train]:
    """An engine of DeepSpeed or of ours, and a function that trains a batch."""
    samples = REAL_BATCH if case.kind == "real" else 1
    engine = engine_for(case.layers(), case.stages, ds_config(case.micro_batches, vpipe, samples), None, module_class)
    iterator = endless(case.kind)
    return engine, lambda: engine.train_batch(iterator)


def torch_arm(case: Case, schedule: str) -> Train:
    """A schedule of ``torch.distributed.pipelining`` with SGD after every batch."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    torch.manual_seed(0)
    rank, stages, specs = dist.get_rank(), case.stages, case.layers()
    parts = stages if schedule == "torch-1f1b" else VIRTUAL * stages
    mine = {
        "torch-1f1b": [rank],
        "torch-interleaved": [rank, rank + stages],
        "torch-zbv": [rank, parts - 1 - rank],
    }[schedule]
    per_part = len(specs) // parts
    device = torch.device(case.device)
    modules = [
        torch.nn.Sequential(*[spec.build() for spec in specs[part * per_part : (part + 1) * per_part]]).to(device)
        for part in mine
    ]
    made = [pipelining.PipelineStage(module, part, parts, device) for part, module in zip(mine, modules, strict=True)]
    loss = torch.nn.functional.mse_loss
    runs: Any = {
        "torch-1f1b": lambda: pipelining.Schedule1F1B(made[0], case.micro_batches, loss),
        "torch-interleaved": lambda: pipelining.ScheduleInterleaved1F1B(made, case.micro_batches, loss),
        "torch-zbv": lambda: ScheduleZBVZeroBubble(made, case.micro_batches, loss),
    }[schedule]()
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-4)
    inputs, labels = (torch.cat([value] * case.micro_batches).to(device) for value in micro_batch(case.kind))
    arguments = (inputs,) if 0 in mine else ()
    target = {"target": labels, "losses": []} if parts - 1 in mine else {}

    def train() -> None:
        runs.step(*arguments, **target)
        optimizer.step()
        optimizer.zero_grad()

    return train


OURS: dict[str, Callable[[Case], dict[str, Any] | None]] = {
    "stock": lambda case: None,
    "bsp": lambda case: {"sync_mode": "bsp"},
    "gpipe": lambda case: {"sync_mode": "bsp", "schedule": "gpipe"},
    "interleaved": lambda case: {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": VIRTUAL},
    "asp": lambda case: {},
    "asp-deeper": lambda case: {"stage_to_depth_map": deeper(case)},
}
ARMS = ("stock", "dualpipev", "torch-1f1b", "torch-interleaved", "torch-zbv", *list(OURS)[1:])


def trainer(arm: str, case: Case) -> tuple[Any, Train]:
    """The engine of an arm, None for torch's, and a function that trains a batch."""
    if arm in OURS:
        return deepspeed_arm(case, OURS[arm](case))
    if arm == "dualpipev":
        return deepspeed_arm(case, None, "DualPipeVModule")
    return None, torch_arm(case, arm)


def slots(arm: str, case: Case) -> float:
    """About how many times a stage's compute a batch takes, to choose how many to measure."""
    asynchronous = arm.startswith("asp")
    return case.micro_batches + (0 if asynchronous else (case.stages - 1) * (1 + 2 * case.link))
