"""SOAP in the engine: against an independent replay, and across checkpoints and splits."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, difference
from test_reshape import same, sessions, union
from test_resume import resume_everywhere
from torch import nn
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.staleness.soap import SOAP

pytestmark = pytest.mark.mp

PARAMS = {"lr": 3e-3, "eps": 1e-4, "precondition_frequency": 3}
OPTIMIZER = {"type": "SOAP", "params": PARAMS}
STAGES, BATCHES = 4, 12


def soap(parameters: Any) -> torch.optim.Optimizer:
    return SOAP(parameters, **PARAMS)  # type: ignore[arg-type]


def test_against_the_replay(worlds: Worlds) -> None:
    """M, weight_sync, bf16: engine and replay add up in the same order, so that fp32 agrees bit for bit."""
    half = {"bf16": {"enabled": True}}
    rows: list[tuple[int, str, dict[str, Any], float]] = [
        (1, "stash", {}, 0),
        (2, "stash", {}, 0),
        (1, "vertical", {}, 0),
        (1, "stash", half, 1e-2),
    ]
    configs = [
        cases.config(micro_batches, OPTIMIZER, {"partition": "uniform", "weight_sync": sync}, **extra)
        for micro_batches, sync, extra, _ in rows
    ]
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES, loss_fn=toy.float_cross_entropy)
    counts = uniform_partition(LAYERS, STAGES)
    for position, (micro_batches, sync, extra, tolerance) in enumerate(rows):
        options: dict[str, Any] = {"vertical": sync == "vertical", "criterion": toy.float_cross_entropy}
        options |= {"dtype": torch.bfloat16} if extra else {}
        wanted, _ = reference.replay(counts, (3, 2, 1, 0), micro_batches, BATCHES, soap, **options)
        off = difference(cases.merged([rank[position] for rank in ranks]), wanted)
        assert off <= tolerance, f"M={micro_batches}, {sync}, {extra}: parameters off by {off:.1e}"


def said_of(made_by_script: bool) -> str:
    """What an engine says of "staleness" at its start."""
    import deepspeed

    import ds_vpipe

    ds_config = cases.config(1, OPTIMIZER, {"staleness": "auto"})
    optimizer = soap if made_by_script else None
    module = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=3, loss_fn=nn.CrossEntropyLoss())
    if made_by_script:
        del ds_config["optimizer"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = ds_vpipe.initialize(model=module, config=ds_config, optimizer=optimizer)[0]
    engine.destroy()
    return "".join(line for line in printed.getvalue().splitlines() if "staleness" in line)


def test_one_that_the_script_makes_is_known(worlds: Worlds) -> None:
    """As the JSON's, to the choice of "staleness"."""
    (by_script, *_), (by_json, *_) = (worlds.run(3, said_of, by_script) for by_script in (True, False))
    assert by_script == by_json != ""


@pytest.mark.parametrize("fp16", [{}, {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3}}])
def test_resume(worlds: Worlds, tmp_path: Path, fp16: dict[str, Any]) -> None:
    """Also where updates are skipped: gradients that are not finite do not come to eigenvectors."""
    config = cases.config(1, OPTIMIZER, {"partition": "uniform"}, gradient_clipping=0.5, **fp16)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path), config, 3, (1, 5)):
        assert wrong == []


def test_another_split(worlds: Worlds, tmp_path: Path) -> None:
    """Bases follow their matrices: two batches after a new split are those of the old one."""
    bsp, folder = {"sync_mode": "bsp"}, str(tmp_path)

    def plan(block: dict[str, Any], batches: int, **more: Any) -> dict[str, Any]:
        return {"config": cases.config(2, OPTIMIZER, block), "stages": 2, "batches": batches, **more}

    ranks = worlds.run(
        2,
        sessions,
        plan(bsp, 5, save=folder),
        plan(bsp, 2, load=folder),
        plan(bsp | {"partition": [3, 7]}, 2, load=folder),
    )
    assert any(key.endswith("|rows_basis") for key in union(ranks, 0, "trained"))
    same(union(ranks, 0, "trained"), union(ranks, 2, "loaded"))
    same(union(ranks, 1, "trained"), union(ranks, 2, "trained"))


def refusal(client: bool) -> str:
    """Why SOAP next to ZeRO-1 is refused, as the script's optimizer or as the JSON's."""
    import deepspeed

    import ds_vpipe
    from ds_vpipe.errors import VPipeError

    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    config = cases.config(1, OPTIMIZER, {}, **zero)
    net = deepspeed.pipe.PipelineModule(toy.layer_specs(0.0), num_stages=2, loss_fn=torch.nn.CrossEntropyLoss())
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    try:
        if client:
            del config["optimizer"]
            ds_vpipe.initialize(model=net, optimizer=soap(parameters), config=config)
        else:
            ds_vpipe.initialize(model=net, config=config)
    except VPipeError as error:
        return str(error)
    finally:
        cases.close_groups()
    return "trains"


@pytest.mark.parametrize("client", [True, False])
def test_zero_is_refused(worlds: Worlds, client: bool) -> None:
    """It would hand over flat vectors, which SOAP trains without a word as NAdam does."""
    for line in worlds.run(2, refusal, client):
        assert line.startswith("zero_optimization.stage: got 1")
        assert "\n" not in line
