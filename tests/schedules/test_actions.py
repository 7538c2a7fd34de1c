"""The text form of actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.schedules.actions import Action, Category, Kind

INDICES = st.integers(0, 10**12)

TEXTS = {
    "LOAD0": Action(Kind.LOAD, 0),
    "RECV_ACT12": Action(Kind.RECV_ACT, 12),
    "F7": Action(Kind.FORWARD, 7),
    "SEND_ACT1": Action(Kind.SEND_ACT, 1),
    "RECV_GRAD5": Action(Kind.RECV_GRAD, 5),
    "DROP_GRAD5": Action(Kind.DROP_GRAD, 5),
    "B10": Action(Kind.BACKWARD, 10),
    "SEND_GRAD7": Action(Kind.SEND_GRAD, 7),
    "REDUCE3": Action(Kind.REDUCE, 3),
    "STEP3": Action(Kind.STEP, 3),
    "SEND_TIED_GRAD2": Action(Kind.SEND_TIED_GRAD, 2),
    "RECV_TIED_GRAD2": Action(Kind.RECV_TIED_GRAD, 2),
    "SEND_TIED4": Action(Kind.SEND_TIED, 4),
    "RECV_TIED4": Action(Kind.RECV_TIED, 4),
    "SEND_PEERS6": Action(Kind.SEND_PEERS, 6),
    "RECV_PEERS6": Action(Kind.RECV_PEERS, 6),
    "SEND_LAYER_DOWN6": Action(Kind.SEND_LAYER_DOWN, 6),
    "RECV_LAYER_DOWN6": Action(Kind.RECV_LAYER_DOWN, 6),
    "SEND_LAYER_GRAD_DOWN6": Action(Kind.SEND_LAYER_GRAD_DOWN, 6),
    "RECV_LAYER_GRAD_DOWN6": Action(Kind.RECV_LAYER_GRAD_DOWN, 6),
    "SEND_LAYER_UP6": Action(Kind.SEND_LAYER_UP, 6),
    "RECV_LAYER_UP6": Action(Kind.RECV_LAYER_UP, 6),
    "SEND_LAYER_GRAD_UP6": Action(Kind.SEND_LAYER_GRAD_UP, 6),
    "RECV_LAYER_GRAD_UP6": Action(Kind.RECV_LAYER_GRAD_UP, 6),
    "STEP_LAYER6": Action(Kind.STEP_LAYER, 6),
}


def test_text_of_every_kind() -> None:
    assert {str(action): action for action in TEXTS.values()} == TEXTS
    assert {text: Action.parse(text) for text in TEXTS} == TEXTS
    assert {action.kind for action in TEXTS.values()} == set(Kind)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("5F7", Action(Kind.FORWARD, 7, 5)),
        ("0B0", Action(Kind.BACKWARD, 0, 0)),
        ("12SEND_ACT7", Action(Kind.SEND_ACT, 7, part=12)),
        ("3LOAD41", Action(Kind.LOAD, 41, 3)),
    ],
)
def test_text_with_a_part(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action
    assert action != Action(action.kind, action.index)


@given(kind=st.sampled_from(Kind), index=INDICES, part=st.none() | INDICES)
def test_round_trip(kind: Kind, index: int, part: int | None) -> None:
    action = Action(kind, index, part)
    assert Action.parse(str(action)) == action


@given(st.sampled_from(Kind), INDICES, st.sampled_from(Kind), INDICES)
def test_different_actions_have_different_texts(kind: Kind, index: int, other: Kind, number: int) -> None:
    assert (str(Action(kind, index)) == str(Action(other, number))) == ((kind, index) == (other, number))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "7",
        "f7",
        "F-1",
        "F7 ",
        " F7",
        "F7\n",
        "F 7",
        "F1.5",
        "FB7",
        "G7",
        "SEND7",
        "SEND_ACT",
        "_7",
        "F7F8",
        "05F7",
        "-1F7",
        "5 F7",
        "57",
    ],
)
def test_bad_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"^action .*: expected a kind and an index, such as ") as error:
        Action.parse(text)
    message = str(error.value)
    assert repr(text) in message
    assert "\n" not in message
    assert all(f"{kind.value}0" in message for kind in Kind)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("text", ["F07", "F00", "F\u0667"])
def test_only_one_text_for_an_action(text: str) -> None:
    with pytest.raises(ValueError, match="expected a kind and an index"):
        Action.parse(text)


def test_categories_and_counts() -> None:
    waits = {kind for kind in Kind if kind.category is Category.WAIT}
    assert waits == {kind for kind in Kind if kind.value.startswith(("RECV_", "DROP_"))}
    assert {kind for kind in Kind if kind.category is Category.TRANSFER} == {
        kind for kind in Kind if kind.value.startswith("SEND_")
    }
    assert [category for category in Category if not category.busy] == [Category.TRANSFER, Category.WAIT]
    per_batch = [kind for kind in Kind if kind.per_batch]
    assert per_batch == list(Kind)[list(Kind).index(Kind.REDUCE) :]
