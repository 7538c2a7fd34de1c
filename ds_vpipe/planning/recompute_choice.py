"""Which layers to recompute: what the engine can do, and advice beyond that.

The engine recomputes the last layers of a stage as one segment, by ratio. :func:`ratio_for` turns a number of layers
into a ratio, :func:`checkpoint_ratios` gives ready-made ratios, and :func:`cheapest_layers` says which single layers
would cost least per byte, which the engine does not do by itself: such layers can be checkpointed in their own
``forward``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_vpipe.profiles.layer_profile import ModelProfile
from ds_vpipe.refusal import Refusal, did_you_mean

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


@dataclass(frozen=True)
class Advice:
    """Layers to recompute one by one.

    Attributes:
        layers: their indices in the model, cheapest first.
        saved_bytes: per micro-batch in flight.
        seconds: what recomputing them adds to a backward pass.
    """

    layers: tuple[int, ...]
    saved_bytes: int
    seconds: float


def cheapest_layers(profile: ModelProfile, start: int, stop: int, needed_bytes: int) -> Advice:
    """Layers of a stage that save at least ``needed_bytes`` per micro-batch in flight, fewest seconds per byte first.

    A layer that is recomputed keeps its input, so it saves what it keeps of its own, but not what its neighbour needs.
    Layers that turn out not to be needed are left out again, dearest first. If all of them do not save enough, all
    are named.

    Args:
        profile: the model's layers.
        start: first layer of the stage.
        stop: layer after its last.
        needed_bytes: what to save.
    """
    saved, seconds = {}, {}
    for index in range(start, stop):
        layer = profile.layers[index]
        gain = layer.activation_bytes - layer.output_kept_bytes
        before = profile.layers[index - 1] if index > start else None
        if before is not None:  # whose output would have to be kept from now on
            gain -= max(0, before.boundary_bytes - max(before.output_kept_bytes, layer.input_kept_bytes))
        if gain > 0:
            saved[index], seconds[index] = gain, layer.forward_s
    chosen: list[int] = []
    for index in sorted(saved, key=lambda i: (seconds[i] / saved[i], i)):
        if sum(saved[i] for i in chosen) >= needed_bytes:
            break
        chosen.append(index)
    for index in sorted(chosen, key=lambda i: -seconds[i]):
        if sum(saved[i] for i in chosen) - saved[index] >= needed_bytes:
            chosen.remove(index)
    return Advice(tuple(chosen), sum(saved[i] for i in chosen), sum(seconds[i] for i in chosen))
