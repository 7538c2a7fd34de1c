"""Loss scale of fp16 training in a pipeline whose stages do not wait for each other.

The last stage decides the scale. It travels with the report of each batch, so that every stage unscales
a batch's gradients with exactly the scale they were made with. An overflow skips the update of the
stage that met it, and of no other; it reaches the last stage with the delay of
:func:`ds_vpipe.schedules.one_f_one_b.peer_delay`, which then lowers the scale for later batches.

DeepSpeed's optimizers change the scale inside their ``step()``, before they unscale the gradients, so
that a batch in which the scale grows is divided by the new one. Here the scale changes after the update.
"""

from typing import Any

import torch


class LossScaling:
    """The loss scale of one stage's fp16 or ZeRO optimizer. Its own changes of the scale are switched off."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._change = optimizer._update_scale
        optimizer._update_scale = lambda *args, **kwargs: None

    @property
    def scale(self) -> float:
        """Factor of the last stage's losses and divisor of this stage's gradients."""
        return float(self._optimizer.loss_scale)

    @scale.setter
    def scale(self, value: float) -> None:
        self._optimizer.loss_scale = value

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Loss for ``DeepSpeedEngine.backward()``, which scales it for ZeRO only."""
        if hasattr(self._optimizer, "scale_if_loss"):
            return loss
        return loss.float() * self.scale

    def after_update(self, overflow: bool) -> None:
        """Change the scale after an update, whose overflow it does not know yet."""
        self._change(overflow)

    def state(self) -> dict[str, Any]:
        """The scaler's plain values."""
        return {name: value for name, value in vars(self._scaler()).items() if isinstance(value, (bool, int, float))}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the :meth:`state` of this or another stage."""
        vars(self._scaler()).update(state)

    def _scaler(self) -> Any:
        config = getattr(self._optimizer, "loss_scale_config", None)
        return self._optimizer.loss_scaler if config is None else config
