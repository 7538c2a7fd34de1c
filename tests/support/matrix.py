"""The combinations that are held against the replay, or refused: data for the tests and for docs/compatibility.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STAGES = 2
BATCHES = 6
CLIP = 0.3

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16, dynamic scale": {
        "fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    },
    "fp16, static scale": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "bf16 autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16 autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}
TOLERANCES = {
    "fp32": 1e-5,
    "bf16": 5e-3,
    "fp16, dynamic scale": 2e-3,
    "fp16, static scale": 2e-3,
    "bf16 autocast": 1e-4,
}
"""Largest deviation of a parameter from the replay, relative to the largest entry of its tensor."""

ZERO = (0, 1, 2, 3)
REPLICAS = (1, 2)
CLIPPING = ("none", "stage", "delayed_global")
TIED = (False, True)
RECOMPUTE = (0.0, 0.5)
MICRO_BATCHES = (1, 2)


@dataclass(frozen=True)
class Cell:
    """One combination."""

    precision: str
    zero: int
    replicas: int
    clipping: str
    tied: bool
    recompute: float
    micro_batches: int

    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration, for the toy model."""
        block: dict[str, Any] = {"partition": "uniform", "recompute_ratio": self.recompute, "peer_timeout_s": 60}
        if self.clipping != "none":
            block["gradient_clipping_scope"] = self.clipping
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0 if self.clipping == "none" else CLIP,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
            **PRECISIONS[self.precision],
            "vpipe": block,
        }

    def refusal(self) -> str | None:
        """The line that refuses this combination at start, or None."""
        from ds_vpipe.config import VPipeConfig
        from ds_vpipe.config.deepspeed_json import DeepSpeedJson
        from ds_vpipe.config.unsupported import refuse_unsupported
        from ds_vpipe.errors import VPipeConfigError

        ds_config = self.ds_config()
        try:
            refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig.parse(ds_config["vpipe"]), STAGES)
        except VPipeConfigError as error:
            return str(error)
        return None


def rows() -> Iterator[tuple[str, int, int]]:
    """Precision, ZeRO stage and replicas: what a test runs at once and the page has a line for."""
    yield from itertools.product(PRECISIONS, ZERO, REPLICAS)


def cells(precision: str, zero: int, replicas: int) -> list[Cell]:
    """The combinations of one row."""
    others = itertools.product(CLIPPING, TIED, RECOMPUTE, MICRO_BATCHES)
    return [Cell(precision, zero, replicas, *other) for other in others]
