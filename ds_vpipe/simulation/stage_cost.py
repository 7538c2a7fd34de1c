"""What one part of the model costs: the numbers that a simulation runs on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ds_vpipe.errors import Refusal


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one part of the model costs per micro-batch, in seconds and bytes.

    Attributes:
        forward_s: one forward pass.
        backward_s: one backward pass, recomputation included.
        send_activation_s: transfer of its output to the next part.
        send_gradient_s: transfer of its input's gradient to the previous part.
        update_s: reduction and update, once per batch.
        host_s: what sending a message of this part takes of the rank's own time, and receiving one.
        activation_bytes: kept from the forward to the backward pass of a micro-batch.
        static_bytes: always held: weights, gradients, optimizer states, buffers.
        version_bytes: one more version of the weights, held while a micro-batch in flight uses it.
        recompute_bytes: held in addition during a backward pass.
    """

    forward_s: float
    backward_s: float
    send_activation_s: float = 0.0
    send_gradient_s: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    activation_bytes: int = 0
    static_bytes: int = 0
    version_bytes: int = 0
    recompute_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise Refusal(field.name, value, "a finite number >= 0", "change it").error()
