"""Optimizers and groups of a whole model are cut down to a stage, and stay what they are otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import by_identity
from torch import nn

from ds_vpipe.engine.updates.parameter_groups import (
    fill,
    follow,
    leave_out,
    listed,
    mark_states,
    members_by_layer,
    regroup,
    restricted,
)
from ds_vpipe.errors import VPipeError


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": decayed, "weight_decay": 0.1, "name": "decayed"}, {"params": others, "weight_decay": 0.0}]


def placeholder() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def ids(parameters: Any) -> list[int]:
    return [id(parameter) for parameter in parameters]


class Around(torch.optim.Optimizer):
    """An optimizer around another one that does not call its base's constructor, as there are some."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults


def test_states_of_an_optimizer_around_another_one_are_marked() -> None:
    one, other = (Around(torch.optim.SGD([placeholder()], lr=0.1)) for _ in range(2))
    mark_states(one, lambda: "stage 0")
    mark_states(other, lambda: "stage 1")
    assert not hasattr(Around.step, "hooked")  # the class is as it was, for other optimizers
    one.load_state_dict(one.state_dict())
    with pytest.raises(VPipeError, match="got the states of stage 0"):
        other.load_state_dict(one.state_dict())


def test_what_other_stages_have_is_left_out_and_other_groups_stay_the_same_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    first, bias, second = model.parameters()
    groups = [{"params": [first, second], "param_names": ["0", "1"]}, {"params": [bias]}]
    whole = groups[1]["params"]
    assert ids(leave_out(groups, by_identity([first, bias]))) == ids([second])
    assert (ids(groups[0]["params"]), groups[0]["param_names"]) == (ids([first]), ["0"])
    assert groups[1]["params"] is whole


def test_optimizer_keeps_groups_options_and_scheduler() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.Adagrad(two_groups(model), lr=0.5)  # has states from the start
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 0.1**t])
    assert ids(follow(optimizer, by_identity(model[1].parameters()))) == ids([model[0].weight, model[0].bias])
    fill(optimizer, placeholder, each_group=False)
    kept, empty = optimizer.param_groups
    assert ids(kept["params"]) == ids([model[1].weight])
    assert kept["weight_decay"] == 0.1
    assert kept["name"] == "decayed"
    assert [p.numel() for p in empty["params"]] == [1]
    assert ids(empty["params"])[0] not in ids(model.parameters())
    assert ids(optimizer.state) == ids([model[1].weight])
    model[1].weight.grad = torch.ones(2, 2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.25, 0.05])


def test_restricted_groups_and_lists() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = list(model[1].parameters())
    own = by_identity(stage)
    groups = restricted(two_groups(model), own, placeholder)
    assert [ids(group["params"]) for group in groups] == [ids([model[1].weight]), ids([model[1].bias])]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert ids(restricted(list(model.parameters()), own, placeholder)) == ids(stage)
    assert ids(restricted(list(model[0].parameters()), own, placeholder))[0] not in ids(model.parameters())


def test_iterators_are_read_before_the_split() -> None:
    model = nn.Linear(2, 2)
    assert listed(None) is None
    assert ids(listed(model.parameters()) or []) == ids(model.parameters())
    (group,) = listed({"params": iter([model.weight]), "lr": 0.1}) or []
    assert (ids(group["params"]), group["lr"]) == (ids([model.weight]), 0.1)
    (group,) = listed([{"params": model.weight}]) or []
    assert ids(group["params"]) == ids([model.weight])


def test_named_parameters_are_parameters() -> None:
    model = nn.Linear(2, 2)
    assert ids(listed(model.named_parameters()) or []) == ids(model.parameters())
    (group,) = listed([{"params": model.named_parameters(), "lr": 0.1}]) or []
    assert (ids(group["params"]), group["lr"]) == (ids(model.parameters()), 0.1)


def test_groups_follow_layers_to_other_stages() -> None:
    """Layer 1 stays, as another object, layer 0 goes and layer 2 comes; what is in no layer stays, in front of them."""
    layers = {number: nn.Linear(2, 2) for number in range(3)}
    before, outside = {0: layers[0], 1: layers[1]}, nn.Parameter(torch.ones(2))

    def groups_of(*numbers: int) -> list[dict[str, Any]]:
        weights = {f"{number}.weight": layers[number].weight for number in numbers}
        biases = {f"{number}.bias": layers[number].bias for number in numbers}
        return [{"params": list(group.values()), "param_names": list(group)} for group in (weights, biases)]

    groups, elsewhere = groups_of(0, 1), groups_of(2)
    members = members_by_layer(groups, before) | members_by_layer(elsewhere, {2: layers[2]})
    groups[0]["params"].append(outside)
    groups[0]["param_names"].append("loss.scale")
    layers[1] = nn.Linear(2, 2)
    now = {number: layers[number] for number in (1, 2)}
    regroup(groups, members, [parameter for layer in before.values() for parameter in layer.parameters()], now)
    (weights, biases), (wanted, wanted_biases) = groups, groups_of(1, 2)
    assert weights["param_names"] == ["loss.scale", *wanted["param_names"]]
    assert ids(weights["params"]) == ids([outside, *wanted["params"]])
    assert biases["param_names"] == wanted_biases["param_names"]
    assert ids(biases["params"]) == ids(wanted_biases["params"])
