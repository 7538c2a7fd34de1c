"""What slows the pipeline down in every batch is said once, and the batch size that it has already empties nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import loops
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import Worlds

from ds_vpipe.engine.observe.observers import PauseWatch
from ds_vpipe.engine.stage import DrainWatch

CONFIG = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
BATCHES = 6


@pytest.mark.parametrize(
    ("batches", "warned"),
    [((0, 1, 2), True), ((5, 6, 7), True), ((0, 1, 3, 4, 6, 7), False), ((0, 0, 0, 1), False), ((0, 0, 1, 1, 2), True)],
)
def test_three_batches_in_a_row(batches: tuple[int, ...], warned: bool) -> None:
    with mock.patch("ds_vpipe.engine.stage.logger.warning") as said:
        watch = DrainWatch(speaks=True)
        for batch in batches:
            watch.emptied("save_checkpoint()", "call it less often", batch, 6)
    assert watch.warned == warned
    assert said.call_count == int(warned)


def test_said_once_with_cause_and_cost_on_one_rank() -> None:
    with mock.patch("ds_vpipe.engine.stage.logger.warning") as said:
        for speaks in (True, False):
            watch = DrainWatch(speaks)
            for batch in range(10):
                watch.emptied("save_checkpoint()", "call it less often", batch, 6)
    ((line,), _), = said.call_args_list  # fmt: skip
    assert line.startswith(
        "ds_vpipe: save_checkpoint() has emptied the pipeline in 3 batches in a row: 6 forward passes"
    )
    assert line.endswith("; call it less often")
    assert "\n" not in line


@pytest.mark.parametrize(("pauses", "lines"), [([2.0] * 60, 1), ([0.2] * 60, 0), (([2.0] * 19 + [0.2]) * 3, 0)])
def test_a_script_that_takes_long_in_every_batch(pauses: list[float], lines: int) -> None:
    """Twenty times in a row, which an evaluation or a save now and then is not."""
    with mock.patch("ds_vpipe.engine.stage.logger.warning") as said:
        watch, now = PauseWatch(), 100.0
        for pause in (0.0, *pauses):
            watch.after_batch(now + pause, now + pause + 1)
            now += pause + 1
    assert said.call_count == lines
    assert all("took 67% of the time on the last stage" in call.args[0] for call in said.call_args_list)


def train(before_batch: Any, per_call: bool = False) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine, iterator = cases.engine(CONFIG, 2), toy.data()
    for number in range(BATCHES):
        before_batch(engine, number)
        engine.train_batch(toy.data(start=number, stop=number + 1) if per_call else iterator)
    found = cases.parameters(engine), [stage.staleness for stage in engine.statistics()]
    cases.end(engine)
    return found


def evaluate_in_every_round() -> None:
    engine = loops.engine(CONFIG, 2)
    for number in range(BATCHES):
        loops.rounds(engine, number, 1)
        with torch.no_grad():
            engine(*toy.micro_batch(number))
    engine.destroy()


def all_causes(folder: str) -> tuple[Any, Any, list[list[str]]]:
    with mock.patch("ds_vpipe.engine.stage.logger.warning") as said:
        lines = []

        def heard() -> None:
            lines.append([call.args[0] for call in said.call_args_list])
            said.reset_mock()

        plain = train(lambda *_: None)
        same_size = train(lambda engine, _: engine.set_train_batch_size(toy.MICRO_BATCH))
        heard()
        train(lambda engine, number: engine.set_train_batch_size((1 + number % 2) * toy.MICRO_BATCH))
        heard()
        train(lambda engine, _: engine.full_state_dict())
        heard()
        train(lambda engine, _: engine.save_checkpoint(folder, tag="latest_one"))
        heard()
        train(lambda *_: None, per_call=True)
        heard()
        evaluate_in_every_round()
        heard()
        with mock.patch("ds_vpipe.engine.observe.observers._PAUSES_IN_A_ROW", 3):
            train(lambda *_: time.sleep(0.2))
        heard()
    return plain, same_size, lines


def paused_on_a_device() -> int:
    """Lines of a script that waits long for its own device to read a loss, as it were."""
    with (
        mock.patch("ds_vpipe.engine.observe.observers._PAUSES_IN_A_ROW", 3),
        mock.patch("ds_vpipe.engine.stage.logger.warning") as said,
    ):
        engine, iterator = cases.engine(CONFIG, 2, device="simulated"), toy.data()
        for _ in range(BATCHES):
            float(engine.train_batch(iterator))
            time.sleep(0.2)
        engine.destroy()
    return said.call_count


@pytest.mark.mp
def test_who_waits_for_a_device_is_not_warned(worlds: Worlds) -> None:
    assert worlds.run(2, paused_on_a_device) == [0, 0]


@pytest.mark.mp
def test_every_cause(worlds: Worlds, tmp_path: Path) -> None:
    reports = worlds.run(2, all_causes, str(tmp_path))
    for plain, same_size, _ in reports:
        assert difference(plain[0], same_size[0]) == 0
        assert plain[1] == same_size[1]
    assert reports[0][0][1][0] == 1  # the first stage is ahead of its updates
    nothing, *heard, of_pauses = reports[0][2]
    assert nothing == []
    causes = [
        "set_train_batch_size()",
        "full_state_dict()",
        "save_checkpoint()",
        "the end of an iterator",
        "evaluation",
    ]
    for lines, cause in zip(heard, causes, strict=True):
        (line,) = lines
        assert line.startswith(f"ds_vpipe: {cause}")
    assert of_pauses == []
    *others, (line,) = reports[1][2]
    assert others == [[]] * 6
    assert line.startswith("ds_vpipe: in 3 batches in a row the script took")
