"""The layout written beside a stage's states, and what can be told without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vpipe.checkpoints.stage_layout import LAYOUT_KEY, StageLayout, has_layout, infer_groups
from ds_vpipe.errors import VPipeError

LAYERS = {
    0: {"weight": (4, 3), "bias": (4,)},
    1: {},
    2: {"weight": (4,), "mean": (4,)},
    10: {"weight": (2, 4), "bias": (2,)},
}
NAMES = ["0.weight", "0.bias", "2.weight", "10.weight", "10.bias"]


def test_layout_survives_as_plain_values(tmp_path: Any) -> None:
    layout = StageLayout(
        1, (0, 2, 5), 2, 0, 1, [[("2.weight", (4, 3)), ("3.scale", ())], []], {0: "word", 4: "word"}, {"3.b": "3.a"},
        {"0.c": "tied_modules.word.c"}, {"4.b": "0.a"},
    )  # fmt: skip
    torch.save({LAYOUT_KEY: {**layout.plain(), "position": 7}}, tmp_path / "file")
    read = torch.load(tmp_path / "file", weights_only=True)
    assert has_layout(read)
    assert StageLayout.from_plain(read[LAYOUT_KEY]) == layout
    assert layout.names == ["2.weight", "3.scale"]
    assert not has_layout({})
    assert not has_layout({LAYOUT_KEY: {"position": 7}})


def stage(names: list[str], *, flat: bool = False, groups: int = 1) -> dict[str, Any]:
    """What a stage of the stock engine saves without ZeRO."""
    shapes = [LAYERS[int(name.split(".")[0])][name.split(".")[1]] for name in names]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW([{"params": parameters[at::groups]} for at in range(groups)])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved: dict[str, Any] = optimizer.state_dict()
    if flat:
        elements = sum(parameter.numel() for parameter in parameters)
        saved = {"optimizer_state_dict": saved, "fp32_groups_flat": [torch.ones(elements)], "clip_grad": 0}
    return {"optimizer": saved, "param_shapes": None, "buffer_names": ["2.mean"]}


@pytest.mark.parametrize("flat", [False, True])
def test_order_without_a_layout(flat: bool) -> None:
    found = infer_groups([stage(NAMES[:2], flat=flat), stage(NAMES[2:], flat=flat)], LAYERS)
    assert [[[name for name, _ in group] for group in groups] for groups in found] == [[NAMES[:2]], [NAMES[2:]]]
    assert found[1][0][1] == ("10.weight", (2, 4))


def test_zero_files_say_the_order() -> None:
    shapes = [{"3.b": torch.Size([2])}, {"3.a": torch.Size([2, 2])}]
    assert infer_groups([{"param_shapes": shapes}], {}) == [[[("3.b", (2,))], [("3.a", (2, 2))]]]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([stage(NAMES, groups=2)], id="groups"),
        pytest.param([stage(NAMES[:4])], id="too few"),
        pytest.param([stage([*NAMES, "0.bias"])], id="too many"),
        pytest.param([stage([NAMES[1], NAMES[0], *NAMES[2:]])], id="other order"),
        pytest.param([stage(NAMES[:1], flat=True), stage(NAMES[2:], flat=True)], id="frozen"),
        pytest.param([stage(NAMES), {"optimizer": None, "param_shapes": None}], id="no optimizer"),
    ],
)
def test_what_is_not_clear_is_refused(stages: list[dict[str, Any]]) -> None:
    with pytest.raises(VPipeError, match=r"got optimizer states of stage \d without the names") as refusal:
        infer_groups(stages, LAYERS)
    assert "\n" not in str(refusal.value)
