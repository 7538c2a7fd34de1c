"""The forms in which DeepSpeed's optimizers and their wrappers save what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_vpipe.errors import VPipeError

Members = Sequence[tuple[str, Sequence[int]]]
"""Names and shapes of one parameter group's parameters, in the order in which the optimizer holds them."""

Groups = Sequence[Members]
"""The same for all groups of one optimizer."""

PADDINGS = "param_alignment_paddings"
"""Key of the gaps after each parameter of a ZeRO group's vector, in elements."""


@dataclass(frozen=True)
class Form:
    """How a state dict is laid out.

    Attributes:
        base: key of the inner optimizer's own state dict; None if there is no wrapper around it.
        masters: key of the fp32 master weights per group; None if the weights themselves are trained.
        flat: parameters of a group are one vector, master weights and state alike.
        partitioned: the vectors are cut into equal partitions, one per replica.
        scale: further keys that belong to training rather than to a parameter: loss scale, clipping.
    """

    base: str | None
    masters: str | None
    flat: bool
    partitioned: bool
    scale: tuple[str, ...]

    def inner(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inner optimizer's own state dict."""
        return saved if self.base is None else saved[self.base]

    def vector_size(self, saved: Mapping[str, Any], index: int) -> int:
        """Elements of a flat form's state vectors; partitioned master weights are saved without their padding."""
        assert self.masters is not None
        padding = saved["group_paddings"][index] if self.partitioned else 0
        return int(saved[self.masters][index].numel() + padding)


_SCALE = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_FORMS = (
    Form(
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        flat=True,
        partitioned=True,
        scale=("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"),
    ),
    Form("optimizer_state_dict", "fp32_groups_flat", flat=True, partitioned=False, scale=(*_SCALE, "clip_grad")),
    Form("optimizer_state_dict", "fp32_groups", flat=False, partitioned=False, scale=_SCALE),
    Form(None, None, flat=False, partitioned=False, scale=()),
)


def form_of(saved: Mapping[str, Any]) -> Form:
    """The form of an optimizer's state dict, told by its keys.

    Raises:
        VPipeError: none of the forms that are known.
    """
    for form in _FORMS:
        base = saved if form.base is None else saved.get(form.base)
        known = isinstance(base, Mapping) and "param_groups" in base and "state" in base
        if known and (form.masters is None or form.masters in saved):
            return form
    raise VPipeError(
        f"optimizer state: got keys {sorted(map(str, saved))}, allowed are those of a torch optimizer, "
        f"FP16_Optimizer, FP16_UnfusedOptimizer or ZeRO-1 (without elastic_checkpoint); save it from one of these"
    )


def carry_scale(target: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take over loss scale and the like from ``saved`` if it has the same form as ``target``."""
    form = form_of(target)
    if form_of(saved) == form:
        target.update({key: saved[key] for key in form.scale if key in saved})


def misfit(found: str, expected: str) -> VPipeError:
    """The error, to be raised, that a state does not have the form that it should have."""
    return VPipeError(
        f"optimizer state: got {found}, allowed is {expected}; the file does not belong to these layers"
        f" or this optimizer"
    )
