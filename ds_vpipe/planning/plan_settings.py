"""What a model is planned for, and how a DeepSpeed JSON says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ds_vpipe.config import VPipeConfig
from ds_vpipe.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.optimizer_bytes import NO_OPTIMIZER, OptimizerBytes, configured_optimizer_bytes
from ds_vpipe.planning.pace import FREE_LINK, Link
from ds_vpipe.planning.residency import Residency, residency
from ds_vpipe.schedules.pipeline import Schedule
from ds_vpipe.schedules.schedule import default_depths


@dataclass(frozen=True)
class PlanSettings:
    """What a model is planned for.

    Attributes:
        num_stages: K, ranks of the pipeline.
        micro_batches: M, micro-batches per batch.
        schedule: ``asp``, ``1f1b``, ``gpipe`` or ``interleaved``.
        budget: bytes per device, one number or one for each rank; None for no limit.
        depths: W_s of every stage, ``"default"``, or ``"auto"`` for the smallest that hide transfers, if that fits.
        weight_sync: ``stash``, ``vertical`` or ``none``, for ``asp``.
        virtual_stages: parts per rank, for ``interleaved``.
        optimizer: what training needs per byte of weights.
        link: between two stages.
        host_transfers: messages are kept in the memory that is planned, as on the CPU.
        kept_weights: sets of weights that mitigations of staleness hold besides the versions, where gradients are late.
    """

    num_stages: int
    micro_batches: int
    schedule: Schedule = "asp"
    budget: int | Sequence[int] | None = None
    depths: Sequence[int] | Literal["default", "auto"] = "default"
    weight_sync: str = "stash"
    virtual_stages: int = 1
    optimizer: OptimizerBytes = NO_OPTIMIZER
    link: Link = FREE_LINK
    host_transfers: bool = False
    kept_weights: int = 0

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.num_stages * self.virtual_stages

    def part_budgets(self) -> list[int | None]:
        """Bytes for each part: the device's, shared evenly by its parts.

        Raises:
            VPipeConfigError: there is not one budget per rank, or one is not above 0.
        """
        if self.budget is None:
            return [None] * self.parts
        given = [self.budget] * self.num_stages if isinstance(self.budget, int) else list(self.budget)
        if len(given) != self.num_stages or min(given) <= 0:
            allowed = f"bytes > 0, one number or one for each of {self.num_stages} ranks"
            raise Refusal("memory budget", self.budget, allowed, "correct the numbers").error()
        return [given[part % self.num_stages] // self.virtual_stages for part in range(self.parts)]

    def known_depths(self) -> tuple[int, ...] | None:
        """W_s of every stage if the schedule has any; the default ones for ``"auto"``."""
        if self.schedule not in ("asp", "1f1b"):
            return None
        if self.schedule == "1f1b" or isinstance(self.depths, str):
            return default_depths(self.num_stages)
        return tuple(self.depths)

    def residencies(self) -> tuple[Residency, ...]:
        """What stays on each part; see :func:`ds_vpipe.planning.residency.residency`."""
        found = residency(
            self.schedule,
            self.num_stages,
            self.micro_batches,
            self.known_depths() if self.schedule == "asp" else None,
            self.weight_sync,
            self.virtual_stages,
            self.host_transfers,
        )
        return tuple(replace(r, versions=r.versions + self.kept_weights * (r.versions > 1)) for r in found)


def configured_settings(
    block: VPipeConfig,
    ds_config: Mapping[str, Any],
    num_stages: int,
    micro_batches: int,
    *,
    replicas: int = 1,
    device_bytes: int | None = None,
    host_transfers: bool = False,
) -> PlanSettings:
    """What to plan for, from the JSON that training reads.

    Args:
        block: the ``"vpipe"`` block. Transfers are free unless it has a ``link_bandwidth``.
        ds_config: the JSON around it.
        num_stages: K.
        micro_batches: M.
        replicas: data-parallel ranks per stage, among which ZeRO-1 divides.
        device_bytes: budget per device if the block has none; None for no limit.
        host_transfers: messages are kept in the memory that is planned, as on the CPU.
    """
    asynchronous = block.sync_mode == "asp"
    return PlanSettings(
        num_stages=num_stages,
        micro_batches=micro_batches,
        schedule="asp" if asynchronous else block.schedule,
        budget=device_bytes if block.memory_budget is None else block.memory_budget,
        depths=block.stage_to_depth_map if asynchronous else "default",
        weight_sync=block.weight_sync if asynchronous else "none",
        virtual_stages=block.virtual_stages,
        optimizer=configured_optimizer_bytes(DeepSpeedJson(ds_config), replicas),
        link=FREE_LINK if block.link_bandwidth is None else Link(bytes_per_s=block.link_bandwidth),
        host_transfers=host_transfers,
        kept_weights=0 if block.staleness is None else block.staleness.kept_weights,
    )
