"""Parameter groups of one stage, cut from a script's optimizer or groups, with placeholders for what would be empty.

Scripts group parameters by name, such as those without weight decay, before there are stages. The split keeps the
``Parameter`` objects of a stage, so a group's members are found by identity. An optimizer stays the same object, with
its groups, their order and options: a learning-rate scheduler or the script may refer to it.

Optimizers refuse an empty list of parameters, DeepSpeed drops empty groups, schedulers and layers that move go by their
number, and in a synchronous pipeline every group takes part in the gradient norm. A placeholder never gets a gradient
of the model, belongs to no layer and is in no model checkpoint.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ds_vpipe.errors import VPipeError

Own = Callable[[Iterable[Any]], list[Any]]
"""Of parameters of the whole model those that the stage has, in the same order."""

_OWNER = "vpipe_owner"

Placeholder = Callable[[], torch.nn.Parameter]


def follow(optimizer: torch.optim.Optimizer, own: Own) -> list[torch.Tensor]:
    """Take out of an optimizer, in place, parameters that the stage does not have, with their states; return them."""
    left = leave_out(optimizer.param_groups, own)
    for parameter in left:
        optimizer.state.pop(parameter, None)
    return left


def leave_out(groups: Sequence[Any], own: Own) -> list[torch.Tensor]:
    """Take out of an optimizer's groups, in place, the parameters that the stage does not have, and return them.

    Groups may become empty, which :func:`fill` and :func:`trainable` look after.
    """
    left: list[torch.Tensor] = []
    for group in groups:
        kept = own(group["params"])
        there = {id(parameter) for parameter in kept}
        gone = [parameter for parameter in group["params"] if id(parameter) not in there]
        if not gone:
            continue  # and an optimizer, or the script, may go on with this very list
        left += gone
        if "param_names" in group:
            named = zip(group["param_names"], group["params"], strict=True)
            group["param_names"] = [name for name, parameter in named if own([parameter])]
        group["params"] = kept
    return left


def mark_states(optimizer: torch.optim.Optimizer, owner: Callable[[], Any]) -> None:
    """Let an optimizer's state dicts say whose they are, and refuse another's: a stage has its own parameters' alone.

    ``owner`` says whose they are now, in what a checkpoint may hold; None for all.
    """

    def mark(_: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        if (me := owner()) is not None:
            states[_OWNER] = me

    def check(_: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        given, me = states.get(_OWNER), owner()
        if given is not None and given != me:
            raise VPipeError(
                f"optimizer.load_state_dict(): got the states of {given}, allowed on {me} are its own; let "
                f"engine.save_checkpoint() and load_checkpoint() keep optimizers"
            )

    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        # A class around another optimizer need not have called super().__init__().
        vars(optimizer).setdefault(f"_optimizer_{kind}_hooks", OrderedDict())
    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)


def members_by_layer(
    groups: Sequence[Mapping[str, Any]], layers: Mapping[int, torch.nn.Module]
) -> dict[tuple[int, str], int]:
    """Number of the group of each parameter of ``layers``, by the layer's number and the name in it."""
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    return {
        (index, name): group_of[id(parameter)]
        for index, layer in layers.items()
        for name, parameter in layer.named_parameters()
        if id(parameter) in group_of
    }


def regroup(
    groups: Sequence[dict[str, Any]],
    members: Mapping[tuple[int, str], int],
    before: Iterable[torch.nn.Parameter],
    now: Mapping[int, torch.nn.Module],
) -> None:
    """Put the parameters of the layers ``now`` into the groups in place of those ``before``; others stay."""
    named = {id(p): (p, (index, name)) for index, layer in now.items() for name, p in layer.named_parameters()}
    gone = {id(parameter) for parameter in before}
    for number, group in enumerate(groups):
        stay = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in gone]
        mine = [(p, place) for p, place in named.values() if members.get(place) == number]
        if "param_names" in group:
            names = [group["param_names"][at] for at in stay]
            group["param_names"] = names + [f"{index}.{name}" for _, (index, name) in mine]
        group["params"] = [group["params"][at] for at in stay] + [parameter for parameter, _ in mine]


def restricted(model_parameters: Sequence[Any], own: Own, placeholder: Placeholder) -> list[Any]:
    """Parameters, or groups of them, reduced to the stage's own."""
    if not any(isinstance(item, dict) for item in model_parameters):
        return own(model_parameters) or [placeholder()]
    return [{**group, "params": own(group["params"]) or [placeholder()]} for group in model_parameters]


def trainable(model_parameters: Sequence[Any], placeholder: Placeholder, *, each_group: bool) -> list[Any]:
    """Parameters, or groups of them, with placeholders in empty groups and in place of frozen parameters.

    They are as :func:`listed` returns them. Frozen ones stay where others have something to train, and with
    ``each_group`` where others of their group have.
    """
    keeps_frozen = not each_group and any(parameter.requires_grad for parameter in all_members(model_parameters))
    return restricted(model_parameters, list if keeps_frozen else _unless_frozen, placeholder)


def has_trained(model_parameters: Sequence[Any], stage_parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether parameters, or groups of them, hold one of the stage's that is trained."""
    mine = {id(parameter) for parameter in stage_parameters}
    return any(p.requires_grad and id(p) in mine for p in all_members(model_parameters))


def all_members(model_parameters: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters, also those in groups of them."""
    return [p for item in model_parameters for p in (item["params"] if isinstance(item, dict) else [item])]


def fill(optimizer: torch.optim.Optimizer, placeholder: Placeholder, *, each_group: bool) -> None:
    """:func:`trainable` for an optimizer that a script has made; frozen parameters stay without ``each_group``."""
    for group in optimizer.param_groups:
        if not (_unless_frozen(group["params"]) if each_group else group["params"]):
            group["params"] = [placeholder()]
            if "param_names" in group:
                group["param_names"] = ["placeholder"]


def _unless_frozen(parameters: Iterable[Any]) -> list[Any]:
    """All of them, or none: wrappers leave out what is frozen, and what has no elements."""
    found = list(parameters)
    return found if any(parameter.requires_grad and parameter.numel() for parameter in found) else []


def listed(model_parameters: Any) -> list[Any] | None:
    """Parameters, or groups of them, as lists without names, which a split of the model does not change."""
    if model_parameters is None:
        return None
    given = [model_parameters] if isinstance(model_parameters, dict) else list(model_parameters)
    return [{**item, "params": _list(item["params"])} if isinstance(item, dict) else _unnamed(item) for item in given]


def _list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(map(_unnamed, parameters))


def _unnamed(parameter: Any) -> Any:
    """A parameter, also of a pair with its name, as ``named_parameters()`` gives it."""
    return parameter[1] if isinstance(parameter, tuple) else parameter
