"""How much to recompute, as the engine can: the last layers of a stage as one segment, by ratio."""

from __future__ import annotations

import math

from ds_vpipe.errors import Refusal, did_you_mean

CHECKPOINT_MODES = ("always", "except_last", "never")


def ratio_for(recomputed: int, num_layers: int) -> float:
    """The shortest decimal r for which int(r * num_layers) is ``recomputed``.

    Raises:
        ValueError: ``recomputed`` is not among 0 to ``num_layers``.
    """
    if not 0 <= recomputed <= num_layers:
        raise ValueError(f"recomputed layers: got {recomputed}; allowed: 0 to {num_layers}")
    for digits in range(1, 10):
        scale = 10**digits
        above = -(-recomputed * scale // num_layers)
        for ratio in (above / scale, (above + 1) / scale):  # the product of the first may be rounded down
            if ratio <= 1 and int(ratio * num_layers) == recomputed:
                return ratio
    return math.nextafter(recomputed / num_layers, 2)


def checkpoint_ratios(mode: str, num_stages: int) -> tuple[float, ...]:
    """Recompute ratios of torchgpipe's checkpoint modes.

    ``always`` recomputes everything, ``never`` nothing. ``except_last`` spares what would be recomputed right after it
    was computed: in gpipe that is the last micro-batch, in 1F1B, which the engine runs, all micro-batches of the last
    stage (Kim et al., torchgpipe, 2020, section 3).

    Raises:
        VPipeConfigError: another mode.
    """
    if mode not in CHECKPOINT_MODES:
        allowed = ", ".join(CHECKPOINT_MODES)
        raise Refusal("checkpoint", mode, allowed, f"use one of these{did_you_mean(mode, CHECKPOINT_MODES)}").error()
    if mode == "never":
        return (0.0,) * num_stages
    return (1.0,) * (num_stages - 1) + (1.0 if mode == "always" else 0.0,)
