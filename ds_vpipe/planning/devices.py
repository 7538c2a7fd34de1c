"""Memory, links and optimizer that a plan counts with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.optimizer_bytes import NO_OPTIMIZER, OptimizerBytes, configured_optimizer_bytes
from ds_vpipe.planning.pace import FREE_LINK, Link
from ds_vpipe.schedules.counts import StageLoad, stage_loads
from ds_vpipe.schedules.pipeline import Pipeline


@dataclass(frozen=True)
class Devices:
    """Devices that a plan is for.

    Attributes:
        budget: bytes of each, one number or one for each rank; None for no limit.
        optimizer: bytes that training needs per byte of weights.
        link: between two stages.
        host_transfers: messages are kept in the memory that is planned, as on the CPU.
        kept_weights: sets of weights that mitigations of staleness hold besides the versions, where gradients are late.
    """

    budget: int | tuple[int, ...] | None = None
    optimizer: OptimizerBytes = NO_OPTIMIZER
    link: Link = FREE_LINK
    host_transfers: bool = False
    kept_weights: int = 0

    @classmethod
    def of(
        cls,
        config: VPipeConfig,
        json: DeepSpeedJson,
        *,
        replicas: int = 1,
        device_bytes: int | None = None,
        host_transfers: bool = False,
        latency_s: float = 0.0,
    ) -> Devices:
        """Devices as the JSON that training reads describes them.

        Args:
            config: the ``"vpipe"`` block. Transfers are free unless it has a ``link_bandwidth``.
            json: the JSON around it.
            replicas: data-parallel ranks per stage, among which ZeRO-1 divides.
            device_bytes: budget per device if the block has none; None for no limit.
            host_transfers: see above.
            latency_s: seconds of every transfer.
        """
        free = FREE_LINK.bytes_per_s
        return cls(
            budget=device_bytes if config.memory_budget is None else config.memory_budget,
            optimizer=configured_optimizer_bytes(json, replicas),
            link=Link(latency_s, free if config.link_bandwidth is None else config.link_bandwidth),
            host_transfers=host_transfers,
            kept_weights=0 if config.staleness is None else config.staleness.kept_weights,
        )

    def budgets(self, pipeline: Pipeline) -> list[int | None]:
        """Bytes for each virtual stage: the device's, shared evenly by those that it holds.

        Raises:
            VPipeConfigError: there is not one budget per rank, or one is not above 0.
        """
        if self.budget is None:
            return [None] * pipeline.num_parts
        ranks = pipeline.num_stages
        given = (self.budget,) * ranks if isinstance(self.budget, int) else self.budget
        if len(given) != ranks or min(given) <= 0:
            allowed = f"bytes > 0, one number or one for each of {ranks} ranks"
            raise Refusal("memory budget", self.budget, allowed, "correct the numbers").error()
        return [given[pipeline.rank_of(part)] // pipeline.virtual_stages for part in range(pipeline.num_parts)]

    def loads(self, pipeline: Pipeline) -> tuple[StageLoad, ...]:
        """Most that each virtual stage holds."""
        found = stage_loads(pipeline, self.host_transfers)
        return tuple(replace(load, versions=load.versions + self.kept_weights * (load.versions > 1)) for load in found)
