"""The three batch sizes of a DeepSpeed JSON, of which two say the third.

Their relation holds for the number of replicas, which is that of ranks over stages. A JSON that gave all three for
plain data parallelism on the same ranks is therefore wrong for a pipeline. Scripts that compute it so, as most do, are
not edited for one: for them the total is corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ds_vpipe.deepspeed_json import MICRO, STEPS, TOTAL
from ds_vpipe.errors import Refusal

_PARTS = (MICRO, STEPS)


def corrected_batch_sizes(ds_config: dict[str, Any], ranks: int, num_stages: int) -> tuple[dict[str, Any], str]:
    """``ds_config`` with the total for ``ranks / num_stages`` replicas where it is exactly that for ``ranks``.

    Returns:
        The configuration, and one line about what has been changed, empty if nothing has.
    """
    total, parts = ds_config.get(TOTAL), [ds_config.get(key) for key in _PARTS]
    numbers = [value for value in parts if type(value) is int]
    if num_stages == 1 or len(numbers) < len(parts) or total != prod(numbers) * ranks:
        return ds_config, ""
    right = total // num_stages
    return {**ds_config, TOTAL: right}, (
        f"{TOTAL}: got {total} for {ranks} replicas, but {ranks} ranks in {num_stages} stages are "
        f"{ranks // num_stages}; an update is of {right} samples; for {total} write {_PARTS[1]} "
        f"{numbers[1] * num_stages}"
    )


def refuse_batch_sizes(ds_config: Mapping[str, Any], ranks: int, num_stages: int) -> None:
    """Refuse batch sizes that contradict each other on ``ranks / num_stages`` replicas.

    Raises:
        VPipeConfigError: they do; one line says what to write.
    """
    total = ds_config.get(TOTAL)
    given = {key: ds_config[key] for key in _PARTS if ds_config.get(key) is not None}
    if not given or not all(type(value) is int and value > 0 for value in (total, *given.values())):
        return  # nothing to compare, or for DeepSpeed to refuse
    replicas = ranks // num_stages
    unit = prod(given.values()) * replicas
    if total == unit or (len(given) < len(_PARTS) and total % unit == 0):
        return
    factors = " x ".join([*(f"{key} {value}" for key, value in given.items()), f"{replicas} replicas"])
    whole = len(given) == len(_PARTS)
    allowed = f"{'' if whole else 'a multiple of '}{unit}, which is {factors}"
    reason = f"{ranks} ranks in {num_stages} stages are {replicas} replicas"
    remedy = f"write {unit}, or remove the key" if whole else f"change it, or {next(iter(given))}"
    raise Refusal(TOTAL, total, allowed, remedy, reason).error()
