"""Optimizer states by parameter: every form in which DeepSpeed keeps them gives and takes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from ds_vpipe.checkpoints.optimizer_states import ParameterState, _is_spread, carry_scale, form_of, pack, unpack
from ds_vpipe.errors import VPipeError

SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "1.scale": (), "2.weight": (2, 3, 1)}
STAGES = [[["0.weight", "1.scale"], ["0.bias"]], [["2.weight"], []]]  # names per stage and parameter group
KINDS = ("plain", "flat", "list")


def members(names: list[list[str]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(name, SHAPES[name]) for name in group] for group in names]


def optimizer(kind: str, names: list[list[str]], seed: int, steps: int, monkeypatch: Any, lr: float = 0.1) -> Any:
    """An AdamW, alone or in one of DeepSpeed's wrappers, after some updates with random gradients."""
    import deepspeed.comm
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    generator = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda *args: 0)
    dtype = torch.float32 if kind == "plain" else torch.float16
    filled = [names for names in names if names]
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(SHAPES[n], generator=generator).to(dtype)) for n in group]}
        for group in filled
    ]
    base = torch.optim.AdamW(groups, lr=lr)
    wrapped: Any = base
    if kind == "flat":
        wrapped = FP16_Optimizer(base, dynamic_loss_scale=True)
    if kind == "list":
        wrapped = FP16_UnfusedOptimizer(base, dynamic_loss_scale=True)
    for _ in range(steps):
        for group in base.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        base.step()
    return wrapped


def equal(one: ParameterState, other: ParameterState) -> None:
    assert one.state.keys() == other.state.keys() != set()
    for key, value in one.state.items():
        assert other.state[key].shape == value.shape
        assert torch.equal(other.state[key], value), key
    if one.master is not None and other.master is not None:
        assert torch.equal(one.master, other.master)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_states_move_between_stages_and_forms(source: str, target: str, monkeypatch: Any) -> None:
    states: dict[str, ParameterState] = {}
    for stage, names in enumerate(STAGES):
        filled = [group for group in names if group]
        saved = optimizer(source, filled, stage, 3, monkeypatch).state_dict()
        states |= unpack([saved], members(filled), stage)
    assert states.keys() == SHAPES.keys()
    for name, state in states.items():
        assert state.state["exp_avg"].shape == SHAPES[name]
        assert state.state["exp_avg"].abs().max() > 1e-3
        assert (state.master is None) == (source == "plain")
    assert not torch.equal(states["0.bias"].state["exp_avg"], states["0.weight"].state["exp_avg"][:, 0])
    together = [["2.weight", "0.weight", "1.scale"], ["0.bias"]]
    live = optimizer(target, together, 9, 0, monkeypatch)
    packed = pack(live.state_dict(), states, members(together), warn=pytest.fail)
    live.load_state_dict(packed)
    again = unpack([live.state_dict()], members(together))
    for name, state in states.items():
        equal(state, again[name])
    base = getattr(live, "optimizer", live)
    for group in base.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    base.step()  # every parameter counts its own steps, once
    steps = {float(state.state["step"]) for state in unpack([live.state_dict()], members(together)).values()}
    assert steps == {float(states["0.bias"].state["step"]) + 1}


def test_lists_of_tensors_are_refused_within_flat_groups(monkeypatch: Any) -> None:
    """Whose parts are whose parameter's is not known."""
    live = optimizer("flat", STAGES[0], 0, 1, monkeypatch)
    for state in live.optimizer.state.values():
        state["history"] = [torch.zeros(3)]
    with pytest.raises(VPipeError, match="state 'history': got a list with tensors, allowed with ZeRO-1"):
        unpack([live.state_dict()], members(STAGES[0]))


def partitions(
    saved: dict[str, Any], replicas: int, paddings: list[list[int]], padded: bool = False
) -> list[dict[str, Any]]:
    """The state dict of FP16_Optimizer as ZeRO-1, or BF16_Optimizer, with ``replicas`` ranks would have cut it."""
    base = saved["optimizer_state_dict"]
    result: list[dict[str, Any]] = []

    def spread(flat: torch.Tensor, shapes: list[tuple[int, ...]], gaps: list[int]) -> torch.Tensor:
        pieces = []
        for piece, gap in zip(flat.split([torch.Size(s).numel() for s in shapes]), gaps, strict=True):
            pieces += [piece, torch.full((gap,), 7.0)]
        return torch.cat(pieces)

    for rank in range(replicas):
        masters, lost, state = [], [], {}
        for group, shapes in enumerate([SHAPES[n] for n in names] for names in STAGES[0]):
            whole = spread(saved["fp32_groups_flat"][group].detach(), shapes, paddings[group])
            size = -(-whole.numel() // (2 * replicas)) * 2
            start = min(rank * size, whole.numel())
            lean = whole[start : start + size]
            lost.append(size - lean.numel())
            masters.append(torch.cat([lean, torch.full((lost[-1],), 3.0)]) if padded else lean)
            inner = dict(base["state"][group])
            for key in ("exp_avg", "exp_avg_sq"):
                values = spread(inner[key], shapes, paddings[group])
                values = torch.cat([values, torch.full((size * replicas - values.numel(),), 5.0)])
                inner[key] = values[rank * size : (rank + 1) * size]
            state[group] = inner
        result.append(
            {
                "base_optimizer_state": {"state": state, "param_groups": base["param_groups"]},
                "single_partition_of_fp32_groups": masters,
                "group_paddings": lost,
                "param_alignment_paddings": paddings,
                **({} if padded else {"loss_scaler": f"scaler of rank {rank}", "zero_stage": 1}),
            }
        )
    return result


@pytest.mark.parametrize(
    ("paddings", "padded"),
    [([[0, 0], [0]], False), ([[4, 0], [0]], False), ([[0, 0], [0]], True)],
    ids=["dense", "aligned", "padded"],
)
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_partitions_of_any_number_of_replicas(
    replicas: int, paddings: list[list[int]], padded: bool, monkeypatch: Any
) -> None:
    names = members(STAGES[0])
    saved = optimizer("flat", STAGES[0], 0, 3, monkeypatch).state_dict()
    states = unpack([saved], names)
    cut = partitions(saved, replicas, paddings, padded)
    joined = unpack(cut, names)
    for name, state in states.items():
        equal(state, joined[name])
    other = optimizer("flat", STAGES[0], 5, 1, monkeypatch).state_dict()
    packed = [pack(t, states, names, rank) for rank, t in enumerate(partitions(other, replicas, paddings, padded))]
    for one, expected in zip(packed, cut, strict=True):
        sizes = [master.numel() for master in expected["single_partition_of_fp32_groups"]]
        assert [master.numel() for master in one["single_partition_of_fp32_groups"]] == sizes
    for name, state in unpack(packed, names).items():
        equal(state, states[name])


def test_a_number_that_stages_disagree_about_is_the_largest(monkeypatch: Any) -> None:
    states = unpack([optimizer("flat", [["0.weight"]], 0, 3, monkeypatch).state_dict()], members([["0.weight"]]), 0)
    behind = optimizer("flat", [["0.bias"]], 0, 2, monkeypatch).state_dict()
    states |= unpack([behind], members([["0.bias"]]), 1)
    both = [["0.bias", "0.weight"]]
    lines: list[str] = []
    live = optimizer("flat", both, 1, 0, monkeypatch)
    packed = pack(live.state_dict(), states, members(both), warn=lines.append)
    assert float(packed["optimizer_state_dict"]["state"][0]["step"]) == 4  # one from the wrapper's start
    assert len(lines) == 1
    assert "step: parameters that are now in one group have 3 to 4" in lines[0]
    plain = optimizer("plain", both, 1, 0, monkeypatch)
    kept = pack(plain.state_dict(), states, members(both), warn=lines.append)["state"]
    assert [float(state["step"]) for state in kept.values()] == [3, 4]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("key", "values", "shapes", "spread"),
    [
        ("mu_product", [torch.zeros(()), torch.zeros(())], [(), (3, 4)], False),
        ("exp_avg", [torch.zeros(()), torch.zeros(3, 4)], [(), (3, 4)], True),
        ("eta", [torch.zeros(())], [()], False),
        ("exp_avg", [torch.zeros(())], [()], True),
        ("step", [None, torch.zeros(())], [(3,), ()], False),
    ],
)
def test_numbers_are_no_entries_of_scalar_parameters(key: str, values: Any, shapes: Any, spread: bool) -> None:
    assert _is_spread(key, values, shapes) is spread


def test_hyperparameters_follow_and_are_never_merged_in_silence(monkeypatch: Any) -> None:
    one = unpack([optimizer("plain", [["0.weight"]], 0, 1, monkeypatch, lr=0.3).state_dict()], members([["0.weight"]]))
    two = optimizer("plain", [["1.scale"], ["0.bias"]], 0, 1, monkeypatch, lr=0.2).state_dict()
    states = one | unpack([two], members([["1.scale"], ["0.bias"]]), 1)
    live = optimizer("plain", [["0.weight", "1.scale"], ["0.bias"]], 1, 0, monkeypatch)
    live.load_state_dict(pack(live.state_dict(), states, members([["0.weight", "1.scale"], ["0.bias"]])))
    assert [group["lr"] for group in live.param_groups] == [0.3, 0.2]
    mixed = [["0.weight", "0.bias"]]
    live = optimizer("plain", mixed, 1, 0, monkeypatch)
    with pytest.raises(VPipeError, match=r"parameter group 0: got lr 0.3 for 0.weight and 0.2 for 0.bias.*one value"):
        pack(live.state_dict(), states, members(mixed))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([["0.weight"]], "got 2 parameter groups, allowed is 1"),
        ([["0.weight"], ["0.bias"]], "in group 0, allowed is 1"),
        ([["0.weight", "0.bias"], ["0.bias"]], "got master weights with 13 elements in group 0, allowed is 15"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(names: list[list[str]], text: str, monkeypatch: Any) -> None:
    kind = "flat" if "master" in text else "plain"
    saved = optimizer(kind, STAGES[0], 0, 1, monkeypatch).state_dict()
    with pytest.raises(VPipeError, match="optimizer state: got ") as refusal:
        unpack([saved], members(names))
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_states_that_cannot_be_cut_are_refused(monkeypatch: Any) -> None:
    names = members([["0.weight"]])
    saved = optimizer("flat", [["0.weight"]], 0, 1, monkeypatch).state_dict()
    saved["optimizer_state_dict"]["state"][0]["rows"] = torch.ones(3)
    with pytest.raises(VPipeError, match=r"got rows of shape \(3,\) in group 0, allowed is \(12,\)"):
        unpack([saved], names)
    plain = optimizer("plain", [["0.weight"]], 0, 1, monkeypatch).state_dict()
    plain["state"][0]["rows"] = torch.ones(3)
    states = unpack([plain], names)
    live = optimizer("flat", [["0.weight"]], 0, 0, monkeypatch).state_dict()
    with pytest.raises(VPipeError, match="rows in a shape of its own"):
        pack(live, states, names)
    with pytest.raises(VPipeError, match="optimizer state: got keys"):
        form_of({"base_optimizer_state": [{}], "single_partition_of_fp32_groups": []})


def test_loss_scale_is_taken_over(monkeypatch: Any) -> None:
    saved = optimizer("flat", [["0.weight"]], 0, 1, monkeypatch)
    saved.loss_scale, saved.clip_grad = 1024.0, 0.5
    target = optimizer("flat", [["0.bias"]], 0, 1, monkeypatch)
    state = target.state_dict()
    carry_scale(state, saved.state_dict())
    target.load_state_dict(state)
    assert (target.loss_scale, target.clip_grad) == (1024.0, 0.5)
    assert target.fp32_groups_flat[0].numel() == 3
    other = optimizer("list", [["0.bias"]], 0, 1, monkeypatch).state_dict()
    carry_scale(other, saved.state_dict())
    assert other["cur_scale"] == 1024.0
    scaler = DynamicLossScaler(2.0, 2.0, 1000, 1.0, 1, False)  # type: ignore[no-untyped-call]
    zero = {"base_optimizer_state": saved.optimizer.state_dict(), "single_partition_of_fp32_groups": []}
    zero |= {"zero_stage": 1, "dynamic_loss_scale": True, "loss_scaler": scaler}
    carry_scale(zero, saved.state_dict())
    assert (zero["loss_scaler"].cur_scale, scaler.cur_scale) == (1024.0, 2.0)
    other["cur_scale"] = 2.0
    carry_scale(other, zero)
    assert other["cur_scale"] == 1024.0
    other["dynamic_loss_scale"] = False  # the scale is the configuration's
    other["cur_scale"] = 2.0
    carry_scale(other, saved.state_dict())
    assert other["cur_scale"] == 2.0


def test_updates_that_are_counted_in_the_last_parameter_alone() -> None:
    """As DeepSpeed's FusedAdam does it: another split must not begin the count, and the bias correction, anew."""
    names = [["0.weight", "0.bias", "1.scale"]]
    state = {
        key: {"step": 3 if key == 2 else 0, "exp_avg": torch.full(SHAPES[name], float(key))}
        for key, name in enumerate(names[0])
    }
    saved = {"state": state, "param_groups": [{"lr": 0.1, "step": 0, "params": [0, 1, 2]}]}
    states = unpack([saved], members(names))
    assert [states[name].state["step"] for name in names[0]] == [3, 3, 3]
    assert state[0]["step"] == 0, "what was read is left as it is"
    packed = pack({"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}, states, members([["0.weight"]]))
    assert packed["state"][0]["step"] == 3
    assert packed["param_groups"] == [{"lr": 0.1, "params": [0]}], "which another Adam does not count in"
    for number, entry in state.items():  # which it has taken over from torch's Adam
        entry["step"] = torch.tensor(5.0 if number == 1 else 3.0)
    taken = [one.state["step"] for one in unpack([saved], members(names)).values()]
    assert taken == [5, 5, 5]
    taken[0] += 1
    assert taken[1] == 5


def test_updates_that_are_counted_by_parameter() -> None:
    """As most optimizers count them; a parameter that was frozen for a while has had fewer."""
    names = [["0.weight", "0.bias"]]
    state = {0: {"step": 2, "exp_avg": torch.ones(3, 4)}, 1: {"step": 7, "exp_avg": torch.ones(3)}}
    saved = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    states = unpack([saved], members(names))
    assert [states[name].state["step"] for name in names[0]] == [2, 7]
