"""vPipe's learning-rate policies as the ``"scheduler"`` of a DeepSpeed JSON."""

from __future__ import annotations

from typing import Any

from ds_vpipe.errors import Refusal
from ds_vpipe.migration.remark import Remark
from ds_vpipe.migration.vpipe_file import VPipeFile

TOTAL_STEPS = 36320
"""Updates of the schedule that vPipe's BERT always trains with, whatever the YAML says; in its code."""
WARMUP_STEPS = TOTAL_STEPS // 5

_WARMUP = {"warmup_num_steps": WARMUP_STEPS}
_ENDING = {"total_num_steps": TOTAL_STEPS, **_WARMUP}
_BERT: dict[str, dict[str, Any]] = {
    "polynomial": {"type": "PolyWarmupLR", "params": {**_ENDING, "degree": 0.5}},
    "linear": {"type": "LinearWarmupLR", "params": _ENDING},
    "cosine": {"type": "CosineWarmupLR", "params": _ENDING},
    "constant": {"type": "ConstantWarmupLR", "params": _WARMUP},
}
_BY_EPOCH = {
    "step": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF 30 EPOCHS, "gamma": 0.1}}',
    "polynomial": '{"type": "PolyWarmupLR", "params": {"total_num_steps": UPDATES OF ALL EPOCHS, "degree": 2}}',
    "exponential_decay": '{"type": "StepWarmupLR", "params": {"step_size": UPDATES OF ONE EPOCH, "gamma": 0.97}}',
}


def scheduler(file: VPipeFile) -> tuple[dict[str, Any] | None, list[Remark]]:
    """The ``"scheduler"`` for a file, None where it depends on the size of the data, and what to say about it.

    Raises:
        VPipeConfigError: the policy is unknown.
    """
    known = _BERT if file.model_type == "bert" else _BY_EPOCH
    if file.learning_rate_policy not in (None, *_BERT, *_BY_EPOCH):
        name, remedy = f"{file.path}: learning_rate_policy", "write one of them"
        raise Refusal(name, file.learning_rate_policy, ", ".join(known), remedy).error()
    return _of_bert(file) if file.model_type == "bert" else _of_others(file)


def _of_bert(file: VPipeFile) -> tuple[dict[str, Any] | None, list[Remark]]:
    policy = file.learning_rate_policy
    found = _BERT.get(policy or "polynomial")
    remarks = []
    if found is None:
        why = f"it falls by epochs, whose updates are not known here: add {_BY_EPOCH[policy or '']}"
        remarks.append(Remark("dropped", "learning_rate_policy", policy, "", why))
    else:
        why = f"warm-up {WARMUP_STEPS} of {TOTAL_STEPS} updates, as in vPipe's code"
        if policy in ("polynomial", None):
            remarks.append(Remark("kept", "learning_rate_policy", policy, f"scheduler {found['type']}", why))
        else:
            why += "; vPipe's BERT did not read the field and trained with polynomial"
            remarks.append(Remark("changed", "learning_rate_policy", policy, f"scheduler {found['type']}", why))
    if "lr_warmup" in file.given:
        why = "vPipe's BERT has no such option; the schedule has a warm-up of its own"
        remarks.append(Remark("dropped", "lr_warmup", file.lr_warmup, "", why))
    return found, remarks


def _of_others(file: VPipeFile) -> tuple[dict[str, Any] | None, list[Remark]]:
    policy = file.learning_rate_policy or "step"
    if policy not in _BY_EPOCH:
        why = "vPipe knows this policy for BERT only"
        return None, [Remark("dropped", "learning_rate_policy", policy, "", why)]
    why = f'it goes by epochs, whose updates are not known here: add "scheduler": {_BY_EPOCH[policy]}'
    remarks = [Remark("dropped", "learning_rate_policy", file.learning_rate_policy, "", why)]
    if "lr_warmup" in file.given:
        why = "it lasts five epochs: add warmup_num_steps to the scheduler" if file.lr_warmup else "it is off"
        remarks.append(Remark("dropped", "lr_warmup", file.lr_warmup, "", why))
    return None, remarks
