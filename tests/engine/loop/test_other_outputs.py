"""Scripts that make their loss, and metrics, of what the model returns beside its loss."""

from __future__ import annotations

import gc
import io
import re
import weakref
from typing import Any, NamedTuple

import cases
import loops
import pytest
import torch
import toy
from script_losses import loss_known
from test_exactness import OPTIMIZERS, difference
from torch import nn
from worlds import Worlds

import ds_vpipe
from ds_vpipe.engine.loop.other_outputs import OthersOutput
from ds_vpipe.engine.loop.script_loss import LossGate
from ds_vpipe.errors import CallOrderError, VPipeError
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.pipeline import Pipeline

STAGES, ROUNDS, MICRO_BATCHES = 3, 14, 2
PARTITION = [4, 4, 3]


class Scored(nn.Module):
    """The toy model, which returns the losses of its samples too."""

    def __init__(self) -> None:
        super().__init__()
        *layers, last = loops.Whole().layers
        self.layers, self.last = nn.ModuleList(layers), last.layer

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        value: Any = (tokens, labels)
        early = []
        for layer in self.layers:
            value = layer(value)
            early.append(value[0])
        logits = self.last(value[0]).float()
        scores = nn.functional.cross_entropy(logits, labels, reduction="none")
        return {
            "loss": scores.mean(),
            "scores": scores,
            "right": logits.argmax(-1) == labels,
            "nothing": None,
            "early": early[1],
            "norm": early[0].norm(),
        }


def built(block: dict[str, Any], stages: int = STAGES) -> Any:
    ds_config = cases.config(MICRO_BATCHES, OPTIMIZERS["AdamW"][0], block, pipeline={"stages": stages})
    torch.manual_seed(0)
    return ds_vpipe.initialize(model=Scored(), config=ds_config)[0]


def train(block: dict[str, Any], own: bool) -> dict[str, Any]:
    """Every micro-batch counts differently, by what the script knows of it; ``own``: of the losses of samples."""
    engine = built(block)
    losses, right = [], []
    for number in range(ROUNDS):
        outputs = engine(*toy.micro_batch(number))
        weight = 1.0 + number % 3
        if own:
            loss = outputs.scores.mean() / torch.tensor(weight)
            right.append((outputs["right"].sum() / outputs.scores.numel()).item())
        else:
            loss = outputs.loss / weight
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    engine.drain()
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine), "losses": losses, "right": right}
    cases.end(engine)
    return report


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["bsp", "asp"])
def test_a_loss_of_the_script(worlds: Worlds, sync_mode: str) -> None:
    """It trains as the model's own does; all stages see the last one's numbers, of the micro-batch that is due."""
    block = {"partition": PARTITION, "sync_mode": sync_mode}
    reports, wanted = (worlds.run(STAGES, train, block, own) for own in (True, False))
    assert difference(cases.merged(reports), cases.merged(wanted)) == 0
    each, right = reports[-1]["losses"], reports[-1]["right"]
    assert each == wanted[-1]["losses"]
    assert len(set(right)) > 1
    pipeline = Pipeline("asp" if sync_mode == "asp" else "1f1b", STAGES, MICRO_BATCHES)
    for stage, report in enumerate(reports):
        known = [loss_known(pipeline, stage, Progress(handed, handed)) for handed in range(ROUNDS)]
        assert report["losses"] == [each[index] for index in known]
        assert report["right"] == [right[index] for index in known]


def short_batch() -> dict[str, Any]:
    """The first batch has one micro-batch, and the pipeline is not full yet."""
    engine, losses = built({"partition": PARTITION}), []
    for number in range(7):
        engine.set_gradient_accumulation_boundary(number % 2 == 0)
        outputs = engine(*toy.micro_batch(number))
        _ = getattr(outputs, "logits", None)
        loss = outputs.scores.mean() / (1.0 + number)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    engine.drain()
    cases.end(engine)
    return {"losses": losses}


@pytest.mark.mp
def test_micro_batches_that_complete_a_batch(worlds: Worlds) -> None:
    """Their outputs come too, as the next rounds may have none that are newer; their loss is the script's latest."""
    *earlier, last = worlds.run(STAGES, short_batch)
    for report in earlier:
        assert set(report["losses"]) <= set(last["losses"])


def of_other_data(sync_mode: str, labelled: bool, since: int) -> str:
    engine = built({"partition": PARTITION, "sync_mode": sync_mode})
    try:
        for number in range(4):
            tokens, labels = toy.micro_batch(engine.stage_id if number >= since else 100)
            outputs = engine(tokens, labels)
            own = (labels % 2).float() if labelled else 1.0
            engine.backward((outputs.scores * own).mean())
            engine.step()
        engine.drain()
    except VPipeError as error:
        return str(error)
    cases.end(engine)
    return "nothing"


@pytest.mark.mp
@pytest.mark.parametrize(
    ("sync_mode", "labelled", "since", "line"),
    [
        ("bsp", True, 0, "outputs: got mul() of a tensor"),
        ("bsp", True, 2, "outputs: got mul() of a tensor"),
        ("bsp", True, 4, "nothing"),
        ("bsp", False, 0, "nothing"),
        ("asp", False, 0, "nothing"),
    ],
)
def test_a_loss_of_outputs_and_of_other_data(
    worlds: Worlds, sync_mode: str, labelled: bool, since: int, line: str
) -> None:
    """Where ranks are handed different micro-batches it would be of the first one's tokens and the last one's labels.

    Outputs alone are all of the first one's.
    """
    found = worlds.run(STAGES, of_other_data, sync_mode, labelled, since)
    assert all(said.startswith(line) and "\n" not in said for said in found), found


def put_in_its_place(sync_mode: str, put: bool) -> dict[str, Any]:
    engine = built({"partition": PARTITION, "sync_mode": sync_mode})
    for number in range(ROUNDS):
        outputs = engine(*toy.micro_batch(number))
        loss = outputs.loss / (1.0 + number % 3)
        if put:
            outputs.loss = outputs.loss.to("cpu")
            assert outputs.loss is outputs, "nothing has changed"
            outputs.loss = loss
            assert outputs.loss is outputs["loss"] is outputs[0] is loss
            outputs["loss"] = None
            assert outputs.loss is None
            outputs.loss = outputs
            assert outputs.loss is outputs, "as before"
            outputs["loss"] = loss
            loss = outputs.loss
        engine.backward(loss)
        engine.step()
    engine.drain()
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine)}
    cases.end(engine)
    return report


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["bsp", "asp"])
def test_a_loss_in_its_place(worlds: Worlds, sync_mode: str) -> None:
    """Scripts write into what the model returns, as it is their own without a pipeline."""
    put, wanted = (worlds.run(STAGES, put_in_its_place, sync_mode, given) for given in (True, False))
    assert difference(cases.merged(put), cases.merged(wanted)) == 0


class Named(NamedTuple):
    scores: torch.Tensor
    total: torch.Tensor
    right: torch.Tensor


class Listing(Scored):
    """Returns its losses and metrics in a tuple, in a dict without a loss, or the loss alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        found = super().forward(tokens, labels)
        scores, right = found["scores"], found["right"].sum()
        first, second = scores[:1].sum(), scores[1:].sum()
        if self.way == "tuple":
            return scores.detach(), first + second, right, None
        if self.way == "named":
            return Named(scores.detach(), first + second, right)
        if self.way == "dict":
            return {"first": first, "second": second, "right": right, "none": None, "scores": scores.detach()}
        if self.way == "nested":
            return {"first": (first, right), "second": {"loss": [second], "scores": scores.detach()}}
        return first + second


def taken_apart(way: str, sync_mode: str) -> dict[str, Any]:
    ds_config = cases.config(
        MICRO_BATCHES, OPTIMIZERS["AdamW"][0], {"partition": PARTITION, "sync_mode": sync_mode},
        pipeline={"stages": STAGES},
    )  # fmt: skip
    torch.manual_seed(0)
    engine = ds_vpipe.initialize(model=Listing(way), config=ds_config)[0]
    seen: list[Any] = []
    for number in range(ROUNDS):
        outputs = engine(*toy.micro_batch(number))
        if way == "tuple":
            scores, loss, right, nothing = outputs
            assert nothing is None
            assert outputs[1] is loss
            assert outputs[-2:][0] is right
            assert len(outputs) == 4
            total = scores.sum()
        elif way == "named":
            loss, right, total = outputs.total, outputs.right, outputs.scores.sum()
        elif way == "dict":
            loss = sum(value for key, value in outputs.items() if key in ("first", "second"))
            total = sum(outputs.get("scores"))
            assert "loss" not in outputs
        elif way == "nested":
            first, right = outputs["first"]
            loss, total = first + outputs["second"]["loss"][0], dict(outputs)["second"]["scores"].sum()
        else:
            loss = outputs
        assert [hasattr(outputs, name) for name in ("keys", "items", "get")] == [way in ("dict", "nested")] * 3
        engine.backward(loss)
        engine.step()
        if way == "dict":
            outputs["right"] = outputs["right"].item()  # as scripts log their metrics
            assert list(outputs) == ["first", "second", "right", "none", "scores"]
            assert outputs.get("absent", 1) == 1
            assert outputs["none"] is None
            loss, right = outputs["first"] + outputs["second"], outputs["right"]
        seen.append((loss.item(), *([] if way == "loss" else [int(right), round(total.item(), 3)])))
    engine.drain()
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine), "seen": seen}
    cases.end(engine)
    return report


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["bsp", "asp"])
def test_outputs_one_after_the_other(worlds: Worlds, sync_mode: str) -> None:
    """A tuple is unpacked and a dict gone through as without a pipeline; several losses are added up by the script."""
    wanted = worlds.run(STAGES, taken_apart, "loss", sync_mode)
    found = {way: worlds.run(STAGES, taken_apart, way, sync_mode) for way in ("tuple", "named", "dict", "nested")}
    for reports in found.values():
        assert difference(cases.merged(reports), cases.merged(wanted)) == 0
        *earlier, last = reports
        assert [(loss,) for loss, *_ in last["seen"]] == wanted[-1]["seen"]
        assert len({right for _, right, _ in last["seen"]}) > 1
        assert all(abs(loss - total) < 2e-3 for report in reports for loss, _, total in report["seen"])
        for report in earlier:
            assert set(report["seen"]) <= set(last["seen"]), "of one micro-batch"
            assert sync_mode == "asp" or report["seen"] == last["seen"]
    seen = {way: [report["seen"] for report in reports] for way, reports in found.items()}
    assert seen["tuple"] == seen["named"] == seen["dict"] == seen["nested"]


class Changing(Scored):
    """Returns other entries in later calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, late: bool = False) -> Any:
        scores = super().forward(tokens, labels)["scores"]
        first, second = scores[:1].sum(), scores[1:].sum()
        if self.how == "none":
            return second, first if late else None
        if self.how == "absent":
            return {"b": second, **({"a": first} if late else {})}
        return {"a": first if late or self.how == "whole" else first.detach(), "b": second}


def changing(how: str, sync_mode: str) -> None:
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"sync_mode": sync_mode}, pipeline={"stages": 2})
    engine = ds_vpipe.initialize(model=Changing(how), config=ds_config)[0]
    for number in range(6):
        outputs = engine(*toy.micro_batch(number), late=number > 2)
        if how == "whole":
            loss = outputs.mean()
        elif how == "none":
            loss = sum(one for one in outputs if one is not None)
        else:
            loss = sum(outputs.values())
        engine.backward(loss)
        engine.step()


@pytest.mark.mp
@pytest.mark.parametrize("sync_mode", ["bsp", "asp"])
@pytest.mark.parametrize("how", ["none", "absent", "another loss", "whole"])
def test_losses_that_would_be_left_out_are_refused(worlds: Worlds, how: str, sync_mode: str) -> None:
    """Stages before the last go by the first micro-batch's outputs, and have one of several losses."""
    *_, last = worlds.outcomes(2, changing, how, sync_mode)
    wanted = "for a forward that returns several losses" if how == "whole" else "got other entries than forward() has"
    assert last.text.startswith("CallOrderError: ")
    assert wanted in last.text


def kept_after_a_round() -> bool:
    engine = built({"partition": PARTITION})
    outputs = engine(*toy.micro_batch(0))
    handed = weakref.ref(outputs)
    engine.backward(outputs.loss)
    del outputs
    gc.collect()
    return handed() is not None


@pytest.mark.mp
def test_nothing_keeps_a_graph_until_the_next_round(worlds: Worlds) -> None:
    assert not any(worlds.run(STAGES, kept_after_a_round))


def stepped_as_an_optimizer() -> bool:
    engine = built({"partition": PARTITION})
    engine.backward(engine(*toy.micro_batch(0)))
    groups = engine.param_groups is engine.optimizer.param_groups and engine.state is engine.optimizer.state
    engine.step()
    return groups and engine.defaults["lr"] == engine.param_groups[0]["lr"]


@pytest.mark.mp
def test_the_engine_is_an_optimizer(worlds: Worlds) -> None:
    """For Fabric, which calls the engine's ``step()`` only if it has what optimizers have."""
    assert all(worlds.run(STAGES, stepped_as_an_optimizer))


def refused(what: str) -> str:
    engine = built({"partition": PARTITION, "peer_timeout_s": 3 if what == "alone" else 300})
    try:
        for number in range(ROUNDS):
            outputs = engine(*toy.micro_batch(number))
            loss = outputs.loss
            if what == "mixed":
                loss = (outputs.scores * torch.ones(toy.MICRO_BATCH)).mean()
            elif what == "absent":
                assert getattr(outputs, "logits", 5) == getattr(outputs, "nothing", 5) == 5
                _ = outputs.logits
            elif what == "early":
                with pytest.raises(KeyError, match="a tensor of earlier layers"):
                    outputs["early"]
                _ = getattr(outputs, "early", None)
            elif what == "probed" and number >= 6:
                assert not hasattr(outputs, "aux_loss")
                assert "scores" in outputs
                assert "aux_loss" not in outputs
                with pytest.raises(KeyError, match="has returned no tensor by this name"):
                    outputs["aux_loss"]
            elif what == "late" and number >= 6:
                _ = getattr(outputs, "scores", None)  # which is no question of whether it is there
            elif what == "alone" and engine.is_first_stage():
                _ = outputs.scores
            engine.backward(loss)
            if what == "gone":
                _ = outputs.scores
            engine.step()
    except VPipeError as error:
        return str(error)
    return "nothing"


@pytest.mark.mp
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("mixed", "outputs: got mul() of a tensor that forward() has returned in training and of other values"),
        ("absent", "outputs.logits: forward() has returned no tensor by this name"),
        (
            "early",
            "outputs.early: forward() has returned a tensor of earlier layers there, which stages do not have in",
        ),
        ("late", "outputs.scores: asked for later than in the first micro-batch"),
        ("probed", "nothing"),
        ("gone", "outputs.scores: what forward() returns beside its loss is there until engine.backward()"),
    ],
)
def test_what_stages_do_not_have(worlds: Worlds, what: str, line: str) -> None:
    """Refused on all of them; in asp also what would be of two micro-batches."""
    reports = worlds.run(STAGES, refused, what)
    assert all(said.startswith(line) and len(said.splitlines()) == 1 for said in reports), reports


@pytest.mark.mp
def test_what_one_rank_asks_for(worlds: Worlds) -> None:
    """It waits for ``peer_timeout_s``, and says what for; the others wait for it."""
    said, *others = worlds.run(STAGES, refused, "alone")
    assert re.search("wait(ed|ing) .*for outputs.scores, which all ranks have to ask for, of", said), said
    assert all("nothing came within 3 s" in line and len(line.splitlines()) == 1 for line in (said, *others))


def test_a_saved_loss_is_a_tensor_for_anyone() -> None:
    """Scripts save it beside their weights, and other programs read that."""
    file, handed = io.BytesIO(), LossGate().gated(torch.tensor(2.5, requires_grad=True))
    handed.others = lambda name: handed
    torch.save({"loss": handed, "score": torch.ones(2).as_subclass(OthersOutput)}, file)
    file.seek(0)
    loss, score = torch.load(file, weights_only=True).values()
    assert type(score) is torch.Tensor
    assert type(loss) is torch.Tensor
    assert loss.item() == 2.5


def test_values_of_another_micro_batch() -> None:
    """Numbers may be taken out of them, and nothing that would be compared with the script's own data."""
    source = torch.arange(6.0).reshape(2, 3).requires_grad_()
    handed = LossGate()
    found = handed.gated_output(source).as_subclass(OthersOutput)
    loss = -found[:, 1:].exp().log().sum() / torch.as_tensor(4).clamp(min=1)
    assert type(loss) is torch.Tensor
    handed.open = True
    loss.backward()
    assert source.grad is not None
    assert source.grad.tolist() == [[0, -0.25, -0.25]] * 2
    for wrong in (
        lambda: found - source, lambda: torch.zeros(2, 3).copy_(found), lambda: found[source > 0], found.tolist,
        lambda: found.detach().cpu().numpy(), lambda: torch.cat([source, found]),
    ):  # fmt: skip
        with pytest.raises(CallOrderError, match="as they may be of another micro-batch"):
            wrong()
