"""Functions that a launcher calls on every rank train as scripts do, in any thread: ``ds_vpipe.pipelines()``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cases
import loops
import pytest
import torch
import toy
from worlds import Worlds

import ds_vpipe
from ds_vpipe.errors import VPipeError

pytestmark = pytest.mark.mp

UPDATES = 6


def in_a_thread(function: Callable[[], Any]) -> Any:
    """As of a launcher whose processes have a thread of their own for what they wait for."""
    found: list[Any] = []

    def keep() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    return found[0]


def train(rank_that_fails: int | None, end: str = "") -> Any:
    """What becomes of a function that ends with micro-batches in flight, or in another way, on this rank."""
    import deepspeed

    original, kept = deepspeed.initialize, list[Any]()

    def function() -> None:
        with ds_vpipe.pipelines():
            whole = loops.Whole()
            sgd = {"type": "SGD", "params": {"lr": 0.1}}
            config = {**cases.config(1, sgd, {"peer_timeout_s": 60}), "pipeline": {"stages": 2}}
            engine, *_ = deepspeed.initialize(model=whole, model_parameters=whole.parameters(), config=config)
            kept.append(engine)
            for number in range(UPDATES):
                if number == 4 and torch.distributed.get_rank() == rank_that_fails:
                    raise ValueError("boom")
                engine.backward(engine(*toy.micro_batch(number)))
                engine.step()
            if end == "drained":
                engine.drain()
            if end in ("drained", "saving") and torch.distributed.get_rank() == 0:
                kept.append(len(whole.state_dict()))
            if end == "exit":
                raise SystemExit(0)

    error = in_a_thread(function)
    assert deepspeed.initialize is original
    engine, *saved = kept
    with pytest.raises(VPipeError, match=r"destroy|after a failure"):
        engine(*toy.micro_batch(0))
    updates, flying = engine.stashing_optimizer.latest_version, len(engine.stage.in_flight)
    return None if error is None else f"{type(error).__name__}: {error}", updates, flying, saved


def test_what_is_in_flight_at_the_end_is_trained(worlds: Worlds) -> None:
    assert worlds.run(2, train, None) == [(None, UPDATES, 0, [])] * 2


@pytest.mark.parametrize("end", ["saving", "drained", "exit"])
def test_the_end_of_a_block_is_that_of_a_script(worlds: Worlds, end: str) -> None:
    """A rank may still save, also where nothing is in flight; an exit without an error is no failure."""
    saved = [] if end == "exit" else [len(loops.Whole().state_dict())]
    error = "SystemExit: 0" if end == "exit" else None
    assert worlds.run(2, train, None, end) == [(error, UPDATES, 0, saved), (error, UPDATES, 0, [])]


def test_an_error_ends_training_on_all_ranks(doomed: Worlds) -> None:
    (there, *_), (here, *_) = doomed.run(2, train, 1)
    assert here == "ValueError: boom"
    assert there is not None
    assert there.startswith("PipelinePeerError: ")
    assert there.endswith("stage 1 (rank 1) failed in the script: ValueError: boom")
