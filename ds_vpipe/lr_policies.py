"""Learning-rate policies of vPipe and PipeDream runs, as pure functions of the update's number.

A DeepSpeed JSON selects one like DeepSpeed's own schedules; the learning rate that it scales is the optimizer's::

    "scheduler": {"type": "PolyWarmupLR", "params": {"total_num_steps": 36320, "warmup_num_steps": 7264}}

With n the number of an update, counted from 1, w = ``warmup_num_steps`` and T = ``total_num_steps``, the learning rate
of update n is that of the optimizer times n / w while n < w, after that times the decay in :data:`LR_POLICIES`, and 0
after update T, where there is a T. The polynomial is that of NVIDIA's BERT, which vPipe's runs use: it counts from the
first update and not from the end of the warm-up, so that the rate falls by a step there. The trapezoid is
warmup-stable-decay (Haegele et al., NeurIPS 2024).
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ds_vpipe.errors import Refusal, did_you_mean


def _to_come(n: int, p: SimpleNamespace) -> float:
    """Share of the updates after the warm-up that are still to come."""
    return max(0.0, (p.total_num_steps - n) / max(1, p.total_num_steps - p.warmup_num_steps))


LR_POLICIES: dict[str, tuple[dict[str, Any], Callable[[int, SimpleNamespace], float]]] = {
    "ConstantWarmupLR": ({}, lambda n, p: 1.0),
    "PolyWarmupLR": (
        {"total_num_steps": None, "degree": 0.5},
        lambda n, p: max(0.0, 1.0 - n / p.total_num_steps) ** p.degree,
    ),
    "LinearWarmupLR": ({"total_num_steps": None}, _to_come),
    "CosineWarmupLR": ({"total_num_steps": None}, lambda n, p: 0.5 * (1.0 - math.cos(math.pi * _to_come(n, p)))),
    "TrapezoidWarmupLR": (
        {"total_num_steps": None, "decay_num_steps": None},
        lambda n, p: min(1.0, max(0.0, (p.total_num_steps - n) / p.decay_num_steps)),
    ),
    "StepWarmupLR": ({"step_size": None, "gamma": 0.1}, lambda n, p: p.gamma ** ((n - 1) // p.step_size)),
}
"""Name -> (parameters besides ``warmup_num_steps`` with defaults, None for required; decay after the warm-up)."""

# Parameter -> (type, check, accepted values). A check sees the parameters checked before it, in this order.
_PARAMETERS: dict[str, tuple[type, Callable[[Any, dict[str, Any]], bool], str]] = {
    "total_num_steps": (int, lambda v, p: v >= 1, "an int >= 1, the updates of the whole run"),
    "warmup_num_steps": (  # Trainer's "auto" is 1 at least, which is none
        int,
        lambda v, p: 0 <= v < max(2, p.get("total_num_steps", math.inf)),
        "an int >= 0, less than total_num_steps, or 1",
    ),
    "decay_num_steps": (
        int,
        lambda v, p: 1 <= v <= max(1, p["total_num_steps"] - p["warmup_num_steps"]),
        "an int >= 1, with warmup_num_steps not more than total_num_steps",
    ),
    "degree": (float, lambda v, p: 0 < v < math.inf, "a number > 0"),
    "step_size": (int, lambda v, p: v >= 1, "an int >= 1, updates between two falls"),
    "gamma": (float, lambda v, p: 0 < v <= 1, "a number in (0, 1]"),
}


class LRPolicy:
    """Learning-rate policy with its parameters.

    Raises:
        VPipeConfigError: a parameter is missing, unknown or wrong.
    """

    def __init__(self, name: str, **params: Any) -> None:
        self.name = name
        own, self._decay = LR_POLICIES[name]
        defaults = {"warmup_num_steps": 0, **own}
        for key in params.keys() - defaults.keys():
            fix = f"remove the key{did_you_mean(key, defaults)}"
            raise Refusal(f"scheduler.params.{key}", params[key], f"{', '.join(defaults)} of {name}", fix).error()
        checked: dict[str, Any] = {}
        for key in (key for key in _PARAMETERS if key in defaults):
            kind, accepts, allowed = _PARAMETERS[key]
            value = params.get(key, defaults[key])
            if key not in params and value is None:
                raise Refusal(f"scheduler.params.{key}", None, allowed, f"add the key, which {name} needs").error()
            number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            if not number or not accepts(value, checked):
                raise Refusal(f"scheduler.params.{key}", value, allowed, "correct the number").error()
            checked[key] = value
        self._params = SimpleNamespace(**checked)

    def factor(self, update: int) -> float:
        """Share of the optimizer's learning rate in an update, numbered from 1."""
        warmup = self._params.warmup_num_steps
        return float(update / warmup if update < warmup else self._decay(update, self._params))


def lr_policy(ds_config: dict[str, Any]) -> LRPolicy | None:
    """Policy that the ``"scheduler"`` of a DeepSpeed JSON names. None for a schedule of DeepSpeed's own.

    Raises:
        VPipeConfigError: a parameter is missing, unknown or wrong.
    """
    block = ds_config.get("scheduler")
    name = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(name, str) or name not in LR_POLICIES:
        return None
    given = block.get("params", {})
    if not isinstance(given, dict):
        keys = ", ".join(("warmup_num_steps", *LR_POLICIES[name][0]))
        raise Refusal("scheduler.params", given, f"an object with {keys}", "give one").error()
    return LRPolicy(name, **given)
