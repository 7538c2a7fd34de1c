"""A loop with Megatron-DeepSpeed's calls, in 2 stages x 2 tensor slices: stock, bsp, asp."""

from __future__ import annotations

import functools
from typing import Any

import megatron_loop as loop
import pytest
import reference
import torch
from torch import nn
from torch.func import functional_call
from worlds import Worlds

pytestmark = pytest.mark.mp

RAMP = [1, 1, 2, 2, 2, 3]
EQUAL = [1] * 7
SAVED = 4
ASP = {"sync_mode": "asp", "peer_timeout_s": 60}


def every_run(folder: str) -> dict[str, Any]:
    both: Any = ["table", "scale"]
    run = functools.partial(loop.train, folder=folder)
    return {
        "stock": run(None, RAMP),
        "bsp": run({**ASP, "sync_mode": "bsp"}, RAMP),
        "bsp split": run({**ASP, "sync_mode": "bsp", "partition": [3, 4]}, RAMP),
        "asp": run(ASP, EQUAL, save_at=SAVED),
        "asp split": run({**ASP, "partition": [3, 4]}, EQUAL),
        "resumed": run(ASP, EQUAL, resume=True),
        "list": run(ASP, EQUAL, both, own_loader=False),
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    worlds = Worlds()
    yield worlds.run(4, every_run, str(tmp_path_factory.mktemp("megatron")))
    worlds.close()


def of(reports: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [report[name] for report in reports]


def test_bsp_is_deepspeeds_engine_bit_for_bit(reports: Any) -> None:
    """Losses, evaluations, rates and weights, with a batch size that grows."""
    for stock, ours in zip(of(reports, "stock"), of(reports, "bsp"), strict=True):
        for key in ("losses", "evals", "rates", "rank"):
            assert stock[key] == ours[key], key
        for name, (_, value) in stock["parameters"].items():
            assert torch.equal(value, ours["parameters"][name][1]), name


def test_a_partition_in_the_json_moves_the_scripts_optimizer_along(reports: Any) -> None:
    """With tied embeddings, two parameter groups and slices: in bsp the split changes no bit."""
    for stock, ours in zip(of(reports, "stock"), of(reports, "bsp split"), strict=True):
        for key in ("losses", "rates"):
            assert stock[key] == ours[key], key
        assert [mean for mean, _ in stock["evals"]] == [mean for mean, _ in ours["evals"]]
        assert any(name.startswith("3.") for name in ours["parameters"]) == (ours["rank"][0] == 1)


class Same(nn.Module):
    def forward(self, inputs: Any) -> Any:
        return loop.as_it_is(inputs)


class Head(loop.Words):
    def forward(self, inputs: Any) -> Any:
        return loop.logits(self, inputs)


class Adam(torch.optim.AdamW):
    """With the script's groups and rates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(loop.groups_of(parameters))
        self.updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = loop.rate(self.updates * loop.SAMPLES)
        self.updates += 1
        super().step(closure)


def replayed(tied: tuple[str, ...], refills: tuple[int, ...], counts: tuple[int, int]) -> reference.Replay:
    """The same training by the independent reference, with a model in one piece."""
    kinds: list[Any] = [lambda *_: Same(), loop.Words, loop.Attend, loop.Attend, loop.Attend, loop.Last, Head]
    return reference.Replay(
        counts,
        (1, 0),
        1,
        Adam,
        refills=refills,
        layers=[kind(seed, None) for kind, seed in zip(kinds, loop.SEEDS, strict=True)],
        criterion=loop.Criterion().mean,
        micro_batch=lambda index, _: loop.micro_batch(loop.sample(index)),
        ties=[((1, name), (6, name)) for name in tied],
    ).run(len(EQUAL))


def newest(run: reference.Replay, version: int) -> list[reference.Weights]:
    """Weights by layer after so many updates, in an empty pipeline: copies are their owners' equal."""
    weights = [dict(found) for found in run.history[version]]
    for (layer, name), (owner, owners_name) in run.copies.items():
        weights[layer][name] = weights[owner][owners_name]
    return weights


def evaluated(run: reference.Replay, version: int) -> list[float]:
    """Losses of the evaluations' four micro-batches with the newest weights after so many updates."""
    weights = newest(run, version)
    found = []
    for index in range(1000, 1004):
        value, labels = loop.micro_batch(loop.sample(index))
        for layer, own in zip(run.layers, weights, strict=True):
            value = functional_call(layer, own, (value,))
        found.append(float(run.criterion(value, labels)))
    return found


@pytest.mark.parametrize("name", ["asp", "asp split", "list"])
def test_asp_is_the_replay(reports: Any, name: str) -> None:
    """Every update, with tied embeddings, masks, slices, `set_train_batch_size()` and evaluations in between."""
    found = of(reports, name)
    tied, refills = ("table", "scale") if name == "list" else ("table",), (0, SAVED) if name == "asp" else (0,)
    counts = (3, 4) if name == "asp split" else (4, 3)
    run = replayed(tied, refills, counts)
    weights = loop.whole(found)
    for layer, own in enumerate(newest(run, -1)):
        stage = int(layer >= counts[0])
        place = f"{stage}.tied_modules.embed" if layer in (1, 6) else f"{stage}.{layer}"
        for parameter, value in own.items():
            if (layer, parameter) == (6, "positions"):
                continue  # nobody uses them; DeepSpeed lets them decay all the same
            assert torch.allclose(weights[f"{place}.{parameter}"], value, rtol=1e-4, atol=1e-6), (layer, parameter)
    for report in found:
        assert report["losses"] == pytest.approx(run.losses, rel=1e-5)
        assert report["rates"] == [loop.rate((number + 1) * loop.SAMPLES) for number in range(len(EQUAL))]
        evaluations = [evaluated(run, version) for version in (3, 6)]
        for (mean, each), wanted in zip(report["evals"], evaluations, strict=True):
            assert mean == pytest.approx(sum(wanted[:2]) / 2, rel=1e-5)
            assert each == (pytest.approx(wanted[2:], rel=1e-5) if report["rank"][0] == 1 else None)


def test_a_resume_with_the_scripts_own_loader_is_going_on(reports: Any) -> None:
    """From the client state that was saved, bit for bit."""
    for through, resumed in zip(of(reports, "asp"), of(reports, "resumed"), strict=True):
        assert resumed["losses"] == through["losses"][SAVED:]
        assert resumed["evals"] == through["evals"][1:]
        for name, (_, value) in through["parameters"].items():
            assert torch.equal(value, resumed["parameters"][name][1]), name


def test_the_grid_is_that_of_the_topology(reports: Any) -> None:
    assert [report["rank"] for report in of(reports, "asp")] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
