"""Parameters of one stage of a checkpoint, in the order of its optimizer.

DeepSpeed saves weights by layer, but optimizer states by position. The layout gives the positions their
names. We write it beside each stage's states; for checkpoints of the stock engine it is put together from
what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from ds_vpipe.checkpoints.optimizer_states import Groups, form_of
from ds_vpipe.errors import VPipeError

LAYOUT_KEY = "vpipe"
"""Key of a stage's ``mp_rank`` file under which :meth:`StageLayout.plain` is stored, alone or among other entries."""

PLACEHOLDER = "vpipe_placeholder"
"""Name of the parameter in the optimizer of a stage with nothing to train (``engine/updates/parameter_groups.py``)."""


@dataclass(frozen=True)
class StageLayout:
    """Parameters of one stage, seen from one slice (tensor-parallel rank)."""

    stage: int
    # Part p holds layers bounds[p] to bounds[p + 1] - 1. Stage s of K holds parts s, s + K, ...; there is one for each
    # unless the schedule is interleaved.
    bounds: tuple[int, ...]
    replicas: int  # data-parallel ranks
    slice_index: int
    slices: int
    groups: Groups  # the optimizer's parameters; a stage with nothing to train has PLACEHOLDER
    ties: Mapping[int, str]  # layers that are TiedLayerSpec, with their key
    aliases: Mapping[str, str]  # further names of shared parameters, with the name that groups has
    # Untied parameters inside tied layers: from the layer-qualified name used in groups to the module's name, which is
    # the same on every stage of the tie.
    untied: Mapping[str, str]
    # Tied parameters of a plain module: from their names in later pieces to the first one's; None for a PipelineModule.
    copies: Mapping[str, str] | None = None
    files: tuple[int, ...] = field(default=(), compare=False)  # layers with a file

    @property
    def names(self) -> list[str]:
        """Names of all parameters of the model that the optimizer trains."""
        return [name for group in self.groups for name, _ in group if name != PLACEHOLDER]

    def plain(self) -> dict[str, Any]:
        """As a dict of numbers, strings, lists and dicts."""
        mappings = {name: dict(value) for name, value in vars(self).items() if isinstance(value, Mapping)}
        groups = [[[name, list(shape)] for name, shape in group] for group in self.groups]
        return {**asdict(self), **mappings, "bounds": list(self.bounds), "files": list(self.files), "groups": groups}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StageLayout:
        """The inverse of :meth:`plain`. Other keys are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__}
        known["bounds"], known["files"] = tuple(known["bounds"]), tuple(known["files"])
        known["groups"] = [[(name, tuple(shape)) for name, shape in group] for group in known["groups"]]
        return cls(**known)


def is_outside_layers(name: str) -> bool:
    """Whether a parameter or buffer belongs to no layer: every stage has it, and the last one trains it."""
    return not name.partition(".")[0].isdecimal() and not name.startswith("tied_modules.")


def first_owners(stages: Iterable[Groups]) -> dict[str, tuple[int, int]]:
    """Owner of each parameter, its stage and group: a tied one's is the first stage, a loss function's the last."""
    owners: dict[str, tuple[int, int]] = {}
    for stage, groups in enumerate(stages):
        for number, members in enumerate(groups):
            for name, _ in members:
                if name != PLACEHOLDER and (name not in owners or is_outside_layers(name)):
                    owners[name] = stage, number
    return owners


def has_layout(model_states: Mapping[str, Any]) -> bool:
    """Whether the content of an ``mp_rank`` file has a layout."""
    ours = model_states.get(LAYOUT_KEY)
    return isinstance(ours, Mapping) and "groups" in ours


def infer_groups(
    model_states: Sequence[Mapping[str, Any]], layers: Mapping[int, Mapping[str, Sequence[int]]]
) -> list[Groups]:
    """Order of parameters in a checkpoint of the stock engine.

    With ZeRO the files say it. Else it is clear if each stage trains all of its layers' parameters in one
    group and none are tied: then the order is that of the layers, and the number of parameters, or of
    elements in a flat vector, tells where a stage ends. ``model_states`` are the contents of the ``mp_rank`` files,
    ``layers`` the shapes by name in each layer's file, in order.

    Raises:
        VPipeError: it is not clear.
    """
    if all(state.get("param_shapes") is not None for state in model_states):
        return [
            [[(name, tuple(shape)) for name, shape in group.items()] for group in state["param_shapes"]]
            for state in model_states
        ]
    buffers = {name for state in model_states for name in state.get("buffer_names") or ()}
    waiting = [
        (f"{index}.{name}", tuple(shape))
        for index in sorted(layers)
        for name, shape in layers[index].items()
        if f"{index}.{name}" not in buffers
    ]
    result: list[Groups] = []
    for stage, state in enumerate(model_states):
        members = []
        missing = _size(state.get("optimizer"))
        while missing > 0 and waiting:
            name, shape = waiting.pop(0)
            members.append((name, shape))
            missing -= prod(shape) if form_of(state["optimizer"]).flat else 1
        if missing != 0 or not _fits(state["optimizer"], members):
            raise _unclear(stage)
        result.append([members])
    if waiting:
        raise _unclear(len(model_states) - 1)
    return result


def _size(optimizer: Mapping[str, Any] | None) -> int:
    """Parameters of an optimizer with one group. Elements, if it is flat. -1 if there are more groups or none."""
    if optimizer is None:
        return -1
    form = form_of(optimizer)
    groups = form.inner(optimizer)["param_groups"]
    if len(groups) != 1:
        return -1
    return int(optimizer[form.masters][0].numel()) if form.flat and form.masters else len(groups[0]["params"])


def _fits(optimizer: Mapping[str, Any], members: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether master weights or moments, one per parameter, have the parameters' shapes."""
    form = form_of(optimizer)
    if form.flat:
        return True
    base = form.inner(optimizer)
    for key, (_, shape) in zip(base["param_groups"][0]["params"], members, strict=True):
        moments = base["state"].get(key, {})
        if any(name in moments and tuple(moments[name].shape) != shape for name in ("exp_avg", "exp_avg_sq")):
            return False
    return True


def _unclear(stage: int) -> VPipeError:
    return VPipeError(
        f"checkpoint: got optimizer states of stage {stage} without the names of their parameters (saved by "
        f"DeepSpeed's own engine), allowed are ZeRO-1, or fp32 and fp16 with one parameter group over all untied "
        f"parameters; load it with the stages it was saved with and save it with ds_vpipe, or load weights only "
        f"(load_optimizer_states=False)"
    )
