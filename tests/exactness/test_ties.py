"""Tied weights on several stages: owned by the first, copies follow with the delay of the design."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import cases
import deepspeed
import pytest
import reference
import torch
import toy
from test_exactness import OPTIMIZERS, adamw, difference
from worlds import Worlds

import ds_vpipe
from ds_vpipe.errors import VPipeError
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

KEYS = {"words": (0, 9), "scale": (2, 4), "linear": (5, 8)}
STAGES = {4: (3, 2, 3, 2), 2: (5, 5)}  # "scale" spans two stages of four and lies within one of two


def by_layer(report: dict[str, Any], counts: tuple[int, ...], parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Parameters of one stage by layer number, those of tied modules at every layer that uses them."""
    stage, named = report["stage"], {}
    start = sum(counts[:stage])
    mine = range(start, start + counts[stage])
    for name, value in parameters.items():
        if not name.startswith("other.tied_modules."):
            named[name] = value
            continue
        key, _, rest = name.removeprefix("other.tied_modules.").partition(".")
        named.update({f"{position}.{rest}": value for position in KEYS[key] if position in mine})
    return named


def run(
    worlds: Worlds, stages: int, micro_batches: int, batches: int, block: dict[str, Any], **extra: Any
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    counts = STAGES[stages]
    ds_config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], {"partition": list(counts), **block}, **extra)
    reports = worlds.run(
        stages, cases.train, ds_config, stages, batches,
        loss_fn=toy.mean_over_positions, specs=toy.tied_specs, keep_history=True,
    )  # fmt: skip
    return reports, counts


def replayed(counts: tuple[int, ...], depths: tuple[int, ...], micro_batches: int, **options: Any) -> reference.Replay:
    # Layers tied within a stage are one module there, with all of its parameters.
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    ties = list(toy.TIES)
    for first, second in ((2, 4), (5, 8)):
        if stage_of[first] == stage_of[second]:
            names = ("linear.weight", "linear.bias", "scale")
            ties = [tie for tie in ties if tie[0][0] != first] + [((first, name), (second, name)) for name in names]
    return reference.Replay(
        counts, depths, micro_batches, adamw,
        layers=toy.built_tied_layers(), criterion=toy.mean_over_positions, ties=ties, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "micro_batches", "sync"), [(4, 1, "stash"), (4, 4, "stash"), (2, 1, "stash"), (4, 1, "none")]
)
def test_tied_weights_against_the_replay(worlds: Worlds, stages: int, micro_batches: int, sync: str) -> None:
    batches = 16
    reports, counts = run(worlds, stages, micro_batches, batches, {"weight_sync": sync})
    depths = default_depths(stages)
    wanted = replayed(counts, depths, micro_batches, stash=sync == "stash").run(batches)
    histories = [
        [by_layer(report, counts, parameters) for parameters in (*report["history"], report["parameters"])]
        for report in reports
    ]
    for version in (1, 2, 10, batches):
        got = {name: value for history in histories for name, value in history[version].items()}
        expected = wanted.parameters(version)
        untied = [name for name in expected if name in got]
        off = difference({n: got[n] for n in untied}, {n: expected[n] for n in untied})
        assert off <= 1e-5, version
    for owner, copy in toy.TIES:
        stage, there = wanted.stage_of[copy[0]], wanted.stage_of[owner[0]]
        delay = math.ceil((depths[there] - depths[stage] + 1) / micro_batches) if stage != there else 0
        for version in range(batches + 1):
            mine = histories[stage][version][f"{copy[0]}.{copy[1]}"]
            owners = histories[there][max(0, version - delay)][f"{owner[0]}.{owner[1]}"]
            assert torch.equal(mine, owners), (copy, version)
    moved = histories[0][-1]["0.embedding.weight"] - histories[0][0]["0.embedding.weight"]
    assert float(moved.abs().max()) > 1e-2


def train_to_ends(ds_config: dict[str, Any], ends: list[int], batches: int) -> list[Any]:
    """Train on data that end once, in each of these places; parameters by end."""
    found = []
    for end in ends:
        trained = cases.engine(ds_config, 4, toy.mean_over_positions, specs=toy.tied_specs)
        iterator = toy.data(end)
        while trained.global_steps < batches:
            try:
                trained.train_batch(iterator)
            except StopIteration:
                iterator = toy.data(start=trained.consumed_micro_batches)
        found.append(by_layer({"stage": trained.stage_id}, STAGES[4], cases.parameters(trained)))
        cases.end(trained)
    return found


@pytest.mark.parametrize(
    ("sync", "micro_batches", "depths"),
    [("vertical", 2, (4, 2, 1, 0)), ("stash", 4, (6, 2, 2, 0))],
)
def test_copies_are_the_owners_newest_after_data_that_end_in_a_batch(
    worlds: Worlds, sync: str, micro_batches: int, depths: tuple[int, ...]
) -> None:
    """The last pass before the end may be a backward pass with older weights, of a micro-batch that is left over."""
    block = {"partition": list(STAGES[4]), "weight_sync": sync, "stage_to_depth_map": list(depths)}
    ds_config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], block)
    ends, batches = [3 * micro_batches + more for more in range(1, micro_batches)], 6
    ranks = worlds.run(4, train_to_ends, ds_config, ends, batches)
    for position in range(len(ends)):
        refills = (0, 3 * micro_batches)
        wanted = replayed(STAGES[4], depths, micro_batches, refills=refills, vertical=sync == "vertical").run(batches)
        got = {name: value for rank in ranks for name, value in rank[position].items()}
        expected = wanted.parameters()
        assert difference(got, {name: expected[name] for name in got}) <= 1e-5, ends[position]


def unfrozen(late: bool) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Ties that a script has frozen until after initialize(); then one that it trains on one stage alone."""
    torch.manual_seed(1)
    net = deepspeed.pipe.PipelineModule(toy.tied_specs(), num_stages=2, loss_fn=toy.mean_over_positions)
    shared = [p for module in net.tied_modules.values() for p in module.parameters()]
    for parameter in shared:
        parameter.requires_grad_(not late)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ds_config = {**cases.config(1, {}, {"partition": list(STAGES[2])})}
    del ds_config["optimizer"]
    engine = ds_vpipe.initialize(model=net, optimizer=optimizer, config=ds_config)[0]
    shared = [p for module in engine.module.tied_modules.values() for p in module.parameters()]
    for parameter in shared:
        parameter.requires_grad_(True)
    iterator, losses, line = toy.data(), list[float](), ""
    for _ in range(6):
        losses.append(float(engine.train_batch(iterator)))
    engine.quiesce()
    weights = cases.parameters(engine)
    if engine.stage_id == 1:
        for parameter in shared:
            parameter.requires_grad_(False)
    try:
        for _ in range(4):
            engine.train_batch(iterator)
    except VPipeError as error:
        line = str(error)
    cases.end(engine)
    return losses, weights, line


def destroy_after_the_data(batches: int) -> float:
    """Seconds that the end takes after as many calls as there are data, which the last stage does not know of."""
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", "link": "host"})
    engine = cases.engine(ds_config, 2, specs=toy.tied_specs, loss_fn=toy.mean_over_positions)
    data = toy.data(batches)
    for _ in range(batches):
        engine.train_batch(data)
    begin = time.monotonic()
    engine.destroy()
    taken = time.monotonic() - begin
    torch.distributed.barrier()  # a stage that has ended stays there: the other one finds no link closed
    return taken


def test_an_owner_does_not_wait_for_a_copy_that_has_ended(worlds: Worlds) -> None:
    assert max(worlds.run(2, destroy_after_the_data, 4)) < 30  # of 60 that it waits for one that has not


def test_ties_that_are_trained_later(worlds: Worlds) -> None:
    for (losses, weights, _), (late_losses, late_weights, line) in zip(
        worlds.run(2, unfrozen, False), worlds.run(2, unfrozen, True), strict=True
    ):
        assert losses == late_losses
        assert all(torch.equal(weights[name], late_weights[name]) for name in weights)
        assert "that require gradients here and" in line


def frozen_with_masters(ds_config: dict[str, Any]) -> list[torch.Tensor]:
    """Tied weights some updates after a script has frozen them, and then after a move."""
    engine = cases.engine(ds_config, 2, specs=toy.words_tied_specs, loss_fn=toy.mean_over_positions)
    iterator, found = toy.data(), []
    for frozen in (False, True):
        engine.quiesce()
        engine.module.tied_modules["words"].embedding.weight.requires_grad_(not frozen)
        for _ in range(3):
            engine.train_batch(iterator)
    engine.quiesce()
    found.append(engine.module.tied_modules["words"].embedding.weight.detach().float().clone())
    engine.repartition([4, 6])
    found.append(engine.module.tied_modules["words"].embedding.weight.detach().float().clone())
    cases.end(engine)
    return found


@pytest.mark.parametrize("extra", [{"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}])
def test_ties_that_are_frozen_later_stay_the_owners(worlds: Worlds, extra: dict[str, Any]) -> None:
    """Though optimizers with master weights go on writing them."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}
    ds_config = {**cases.config(1, optimizer, {"partition": list(STAGES[2])}), **extra}
    (owner, moved), (copy, moved_copy) = worlds.run(2, frozen_with_masters, ds_config)
    assert torch.equal(owner, copy)
    assert torch.equal(moved, moved_copy)


def saved_in_no_group(folder: str) -> None:
    torch.manual_seed(1)
    net = deepspeed.pipe.PipelineModule(toy.words_tied_specs(), num_stages=2, loss_fn=toy.mean_over_positions)
    trained = [parameter for name, parameter in net.named_parameters() if "tied" not in name]
    ds_config = cases.config(1, {}, {})
    del ds_config["optimizer"]
    engine = ds_vpipe.initialize(model=net, optimizer=torch.optim.AdamW(trained), config=ds_config)[0]
    engine.train_batch(toy.data())
    engine.save_checkpoint(folder)
    weights = cases.parameters(engine)
    engine.train_batch(toy.data())
    engine.load_checkpoint(folder)
    loaded = cases.parameters(engine)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    cases.end(engine)


def test_ties_that_the_optimizer_does_not_have_can_be_saved(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, saved_in_no_group, str(tmp_path))


def built_with_lamb(specs: Any) -> str:
    extra = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    ds_config = cases.config(1, {"type": "Lamb", "params": {"lr": 0.01}}, {"partition": [5, 5]}, **extra)
    try:
        cases.end(cases.engine(ds_config, 2, specs=specs, loss_fn=toy.mean_over_positions))
    except VPipeError as error:
        return str(error)
    return ""


def test_lamb_of_a_vector_with_copies_is_refused(worlds: Worlds) -> None:
    """ZeRO's vector is one tensor to LAMB, and the copy's part of it is nobody's weight."""
    why = "LAMB's steps would depend on a stage's whole vector, the copy of a tied weight in it"
    for line in worlds.run(2, built_with_lamb, toy.words_tied_specs):
        assert line.startswith(f"zero_optimization.stage: got 1; {why}; allowed: 0 next to optimizer.type")
        assert "\n" not in line
    assert worlds.run(2, built_with_lamb, toy.layer_specs) == ["", ""]


class SparseEmbed(toy.Embed):
    """The toy model's word embeddings, with sparse gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.embedding.sparse = True


def decode_by_rows(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As :func:`toy.decode`, with a sparse gradient."""
    rows = torch.arange(toy.VOCABULARY)
    return x @ torch.nn.functional.embedding(rows, module.embedding.weight, sparse=True).T


def sparse_ties(decode: Any) -> list[Any]:
    specs = toy.words_tied_specs()
    for position, forward_fn in ((0, None), (9, decode)):
        specs[position] = deepspeed.pipe.TiedLayerSpec(
            "words", SparseEmbed, 100, forward_fn=forward_fn, tied_weight_attr="embedding.weight"
        )
    return specs


def trained_sparsely(ds_config: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Weights with dense gradients, with sparse ones of the owner, and with sparse ones of the copy too."""
    found = []
    for specs in (toy.words_tied_specs, lambda: sparse_ties(toy.decode), lambda: sparse_ties(decode_by_rows)):
        engine = cases.engine(ds_config, 2, specs=specs, loss_fn=toy.mean_over_positions)
        iterator = toy.data()
        for _ in range(5):
            engine.train_batch(iterator)
        found.append(cases.parameters(engine))
        cases.end(engine)
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sparse_gradients_of_embeddings_are_those_of_dense_ones(worlds: Worlds, micro_batches: int) -> None:
    config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], {"partition": [5, 5]})
    for dense, *others in worlds.run(2, trained_sparsely, config):
        for other in others:
            assert difference(other, dense) < 1e-6
