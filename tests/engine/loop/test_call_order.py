"""Calls out of order are refused in one line, and nothing has been done by then; what a script may do with its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vpipe.engine.loop.call_order import CallOrder, check_loss
from ds_vpipe.engine.loop.script_loss import LossGate
from ds_vpipe.errors import CallOrderError, VPipeError

CALLS: tuple[Any, ...] = ("engine(...)", "backward()", "step()")


@pytest.mark.parametrize("due", range(3))
def test_only_the_call_that_is_due(due: int) -> None:
    order = CallOrder()
    for call in CALLS[:due]:
        order.expect(call)
        order.done(call)
    for call in CALLS:
        if call != CALLS[due]:
            with pytest.raises(CallOrderError, match=r"; call engine\(\.\.\.\), engine\.backward\(loss\) and") as error:
                order.expect(call)
            assert "\n" not in str(error.value)
    order.expect(CALLS[due])


def test_lines() -> None:
    order = CallOrder()
    with pytest.raises(CallOrderError, match=r"^backward\(\): called where engine\(\.\.\.\) is due; call"):
        order.expect("backward()")
    order.done("engine(...)")
    with pytest.raises(CallOrderError, match=r"^engine\(\.\.\.\): called twice in a row; .*; evaluate in eval"):
        order.expect("engine(...)")
    with pytest.raises(CallOrderError, match=r"^save: called where backward\(\) is due; call it after"):
        order.expect_between("save")
    order.done("backward()")
    with pytest.raises(CallOrderError, match=r"^backward\(\): called twice in a row"):
        order.expect("backward()")
    order.done("step()")
    order.expect_between("save")


def test_kind_of_error_is_deepspeeds() -> None:
    assert issubclass(CallOrderError, AssertionError)
    assert issubclass(CallOrderError, VPipeError)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (1.0, "got float, allowed is a scalar"),
        (torch.ones(2, requires_grad=True) * 1, r"got a tensor of shape \(2,\), allowed is a scalar"),
        (torch.ones(()), r"without a graph, .* engine\.train\(\)"),
    ],
)
def test_what_backward_cannot_start_from(given: Any, line: str) -> None:
    with pytest.raises(CallOrderError, match=line):
        check_loss(given)


def test_loss_is_an_ordinary_tensor() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    for loss in (LossGate().gated(weight * 2), LossGate().gated(torch.tensor(6.0))):
        check_loss(loss)
        check_loss(loss.mean() / 4)
        assert f"{loss:.2f}" == "6.00"
        assert loss.item() == float(loss.detach()) == 6
        for backward in (loss.backward, (loss / 2).backward):
            with pytest.raises(CallOrderError, match=r"^loss\.backward\(\): .* allowed is engine\.backward\(loss\)"):
                backward()
    assert weight.grad is None


def test_loss_is_taken_out_of_itself() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    handed = LossGate()
    outputs = handed.gated(weight * 2)
    for loss in (outputs.loss, outputs["loss"], outputs[0], next(iter(outputs))):
        check_loss(loss)
        assert loss.item() == 6
    for wrong, kind in (
        (lambda: outputs.logits, AttributeError),
        (lambda: outputs[1], IndexError),
        (lambda: outputs["logits"], KeyError),
        (lambda: list(outputs), ValueError),
    ):
        with pytest.raises(kind, match=r"in training a pipeline gives the loss alone, .* in evaluation every rank"):
            wrong()
    handed.open = True
    outputs.loss.backward()
    assert weight.grad == 2


def test_gate_lets_the_pipelines_backward_pass_through() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    handed = LossGate()
    loss = handed.gated(weight * 2) * 0.5
    handed.open = True
    assert not handed.used
    loss.backward()
    assert handed.used
    assert weight.grad == 1
