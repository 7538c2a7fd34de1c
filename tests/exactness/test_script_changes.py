"""Scripts that write into weights between two batches, while micro-batches are in flight."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import reference
import test_exactness
import torch
import toy
from test_exactness import LAYERS, OPTIMIZERS, difference
from test_matrix import by_layer
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.errors import VPipeError
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.moves import Move, earliest_cut_over

pytestmark = pytest.mark.mp

STAGES, UPDATES, AFTER = 3, 9, (3, 6)
MOST = 0.3
BLOCKS = [{}, {"weight_sync": "vertical"}, {"weight_sync": "none"}, {"recompute_ratio": 0.5}, {"swap_ratio": 1}]
WAYS = ["in place", "data", "load_state_dict", "for a while"]


@torch.no_grad()
def limit(module: nn.Module, way: str) -> None:
    """Limit all weights, as scripts do."""
    if way == "load_state_dict":
        module.load_state_dict({name: value.clamp(-MOST, MOST) for name, value in module.state_dict().items()})
    for parameter in module.parameters():
        (parameter.data if way == "data" else parameter).clamp_(-MOST, MOST)


def changed(ds_configs: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """Train with weights that are limited after some updates, or evaluated so."""
    reports = []
    for ds_config in ds_configs:
        engine = cases.engine(ds_config, STAGES)
        iterator = toy.data()
        for update in range(1, UPDATES + 1):
            engine.train_batch(iterator)
            if update not in AFTER:
                continue
            kept = [parameter.detach().clone() for parameter in engine.module.parameters()]
            limit(engine.module, way)
            engine.eval_batch(toy.data(start=900))
            for parameter, value in zip(engine.module.parameters(), kept, strict=True):
                if way == "for a while":
                    with torch.no_grad():
                        parameter.copy_(value)
        reports.append({"parameters": cases.parameters(engine)})
        cases.end(engine)
    return reports


class Limited(reference.Replay):
    def snapshot(self) -> list[reference.Weights]:
        for layer in self.layers if len(getattr(self, "history", ())) in AFTER else ():
            limit(layer, "data")
        return super().snapshot()


@pytest.mark.parametrize("way", WAYS)
def test_equal_to_the_replay(worlds: Worlds, way: str) -> None:
    """Passes in flight keep the weights that they have used, the next ones use the changed ones."""
    ds_configs = [cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", **block}) for block in BLOCKS]
    ranks = worlds.run(STAGES, changed, ds_configs, way)
    for position, block in enumerate(BLOCKS):
        rule = {"vertical": block.get("weight_sync") == "vertical", "stash": block.get("weight_sync") != "none"}
        limited, plain = (
            kind(uniform_partition(LAYERS, STAGES), (2, 1, 0), 2, test_exactness.sgd, **rule).run(UPDATES).parameters()
            for kind in (Limited, reference.Replay)
        )
        assert difference(limited, plain) > 1e-2
        wanted = plain if way == "for a while" else limited
        assert difference(cases.merged([rank[position] for rank in ranks]), wanted) == 0, block


def changed_while_empty(ds_config: dict[str, Any], after: int) -> dict[str, Any]:
    """Train with tied weights that are limited in an empty pipeline, on the stages of all copies."""
    engine = cases.engine(ds_config, STAGES, loss_fn=toy.mean_over_positions, specs=toy.words_tied_specs)
    iterator = toy.data()
    for update in range(UPDATES):
        if update == after:
            engine.quiesce()
            limit(engine.module, "in place")
        engine.train_batch(iterator)
    engine.quiesce()
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine)}
    engine.destroy()
    return report


@pytest.mark.parametrize("after", [0, 4])
def test_tied_weights_stay_as_the_script_has_set_them(worlds: Worlds, after: int) -> None:
    """Before the first batch, such as pretrained ones, or later; copies do not go back to what they were."""

    class LimitedOnce(reference.Replay):
        def snapshot(self) -> list[reference.Weights]:
            for layer in self.layers if len(getattr(self, "history", ())) == after else ():
                limit(layer, "data")
            return super().snapshot()

    rest = {"ties": toy.TIES[:1], "criterion": toy.mean_over_positions, "refills": (0, after, UPDATES)}
    counts, depths = uniform_partition(LAYERS, STAGES), (2, 1, 0)
    limited, plain = (
        kind(counts, depths, 1, test_exactness.sgd, layers=toy.built_tied_layers(), **rest).run(UPDATES).parameters()
        for kind in (LimitedOnce, reference.Replay)
    )
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    found = by_layer(worlds.run(STAGES, changed_while_empty, ds_config, after))
    assert difference(limited, plain) > 1e-2
    assert difference(found, limited) == 0


def changed_in_flight(ds_config: dict[str, Any], evaluates: bool) -> None:
    engine = cases.engine(ds_config, STAGES, loss_fn=toy.mean_over_positions, specs=toy.words_tied_specs)
    iterator = toy.data()
    for _ in range(3):
        engine.train_batch(iterator)
        engine.eval_batch(toy.data(start=900))
    limit(engine.module, "in place")
    if evaluates:
        engine.eval_batch(toy.data(start=900))
    engine.train_batch(iterator)


@pytest.mark.parametrize("evaluates", [True, False])
def test_tied_weights_that_are_set_in_flight_are_refused(worlds: Worlds, evaluates: bool) -> None:
    """Copies get what the owner has sent before, for some updates."""
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, changed_in_flight, ds_config, evaluates)
    for error in failed.value.errors.values():
        assert "tied weights: got values that the script has written while micro-batches are in flight" in error
        assert "\n" not in error


class Bounded(nn.Module):
    """Adds embeddings whose norms the forward pass bounds in place, as those of ``nn.Embedding(max_norm=...)``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = toy.seeded(seed, lambda: nn.Embedding(toy.VOCABULARY, toy.HIDDEN, max_norm=0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.embedding((x[..., 0].detach() * 100).long() % toy.VOCABULARY)


class BoundedInEvaluation(Bounded):
    """Bounds norms while it does not train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.embedding.max_norm = None if self.training else 0.5
        return super().forward(x)


def bounded(
    tied: bool,
    positions: tuple[int, ...] = (2, 5),
    kind: type[nn.Module] = Bounded,
    first: type[nn.Module] | None = None,
) -> list[Any]:
    """The toy with layers of a ``kind`` in these positions, or of another in the ``first`` of them."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    specs = toy.layer_specs()
    for position in positions:
        spec = partial(TiedLayerSpec, "bounded", tied_weight_attr="embedding.weight") if tied else LayerSpec
        specs[position] = spec(first if first is not None and position == positions[0] else kind, 7)
    return specs


def largest_norms(ds_config: dict[str, Any], tied: bool, first: type[nn.Module] = Bounded) -> list[float]:
    """The largest norm of each table after training with a high rate, on its stage."""
    engine = cases.engine(ds_config, STAGES, specs=partial(bounded, tied, first=first))
    iterator = toy.data()
    for _ in range(4 * UPDATES):
        engine.train_batch(iterator)
    tables = [layer.embedding.weight for layer in engine.module.modules() if isinstance(layer, Bounded)]
    norms = [float(table.norm(dim=1).max()) for table in tables]
    cases.end(engine)
    return norms


@pytest.mark.parametrize("weight_sync", ["stash", "none"])
def test_forward_passes_may_write_into_the_newest_weights(worlds: Worlds, weight_sync: str) -> None:
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "weight_sync": weight_sync})
    for norms in worlds.run(STAGES, largest_norms, ds_config, False):
        assert all(norm < 1 for norm in norms)


class Averaged(nn.Linear):
    """A frozen weight that forward passes move."""

    def __init__(self, seed: int) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        self.average = nn.Parameter(torch.zeros(toy.HIDDEN), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(dim=(0, 1)), alpha=0.1)
        return torch.tanh(super().forward(x))


def moved_and_trained(ds_config: dict[str, Any], layer: int, source: int, target: int, kind: type[nn.Module]) -> None:
    """A layer that writes moves to another stage."""
    engine = cases.engine(ds_config, STAGES, specs=partial(bounded, False, (layer,), kind))
    iterator = toy.data()
    for batch in range(4 * UPDATES):
        if batch == 3:
            engine.move_layer(Move(layer, source, target, earliest_cut_over(engine.pipeline, source, target, batch)))
        engine.train_batch(iterator)


def test_a_layer_that_has_moved_may_not_write_either(worlds: Worlds) -> None:
    """From the first stage, where every version is the newest, to the second."""
    block = {"partition": [3, 4, 3], "weight_sync": "vertical"}
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, moved_and_trained, cases.config(1, OPTIMIZERS["SGD"][0], block), 2, 0, 1, Bounded)
    assert "got a forward pass that writes into 2.embedding.weight" in str(failed.value)


def test_a_layer_that_moves_may_not_write(worlds: Worlds) -> None:
    """What is written after it has been sent would be lost."""
    ds_config = cases.config(3, OPTIMIZERS["SGD"][0], {"partition": [3, 4, 3]})
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, moved_and_trained, ds_config, 7, 2, 1, Averaged)
    errors = failed.value.errors.values()
    assert any("got a forward pass or a script that writes into 7.average while it moves" in error for error in errors)
    assert all("\n" not in error for error in errors)


def written_while_it_moves(ds_config: dict[str, Any]) -> list[str]:
    """What a script is told that writes into all weights, beside a move to the previous stage and one to the next."""
    lines = []
    for layer, source, target in ((3, 1, 0), (2, 0, 1)):
        engine = cases.engine(ds_config, STAGES)
        iterator, line = toy.data(), ""
        try:
            for batch in range(4 * UPDATES):
                if batch == 3:
                    cut_over = earliest_cut_over(engine.pipeline, source, target, batch)
                    engine.move_layer(Move(layer, source, target, cut_over))
                limit(engine.module, "in place")
                engine.train_batch(iterator)
            cases.end(engine)
        except VPipeError as error:
            line = str(error)
        lines.append(line)
    return lines


def test_scripts_may_write_where_no_pass_in_flight_would_find_it(worlds: Worlds) -> None:
    """A layer that goes to the next stage is behind it for some updates: its newest weights are in use."""
    ranks = worlds.run(STAGES, written_while_it_moves, cases.config(1, OPTIMIZERS["SGD"][0], {"partition": [3, 4, 3]}))
    assert [up for up, _ in ranks] == [""] * STAGES
    assert any("a tensor (one of the variables" in down and "\n" not in down for _, down in ranks)


@pytest.mark.parametrize(
    ("weight_sync", "tied", "first"),
    [("vertical", False, Bounded), ("stash", True, Bounded), ("stash", True, BoundedInEvaluation)],
)
def test_forward_passes_that_write_where_it_is_lost_are_refused(
    worlds: Worlds, weight_sync: str, tied: bool, first: type[nn.Module]
) -> None:
    """The version after an older one does not have what was written, and neither have copies, nor the owner of one."""
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "weight_sync": weight_sync})
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, largest_norms, ds_config, tied, first)
    errors = failed.value.errors.values()
    name = "tied_modules.bounded.embedding.weight" if tied else "5.embedding.weight"
    assert any(f"weights: got a forward pass that writes into {name}, as that of" in error for error in errors)
    assert all("\n" not in error for error in errors)


def evaluated_bounds(ds_config: dict[str, Any], tied: bool) -> list[float]:
    """Largest norms of each table before and after an evaluation."""
    engine = cases.engine(ds_config, STAGES, specs=partial(bounded, tied, kind=BoundedInEvaluation))
    engine.train_batch(toy.data())
    tables = [layer.embedding.weight for layer in engine.module.modules() if isinstance(layer, Bounded)]
    norms = [float(table.detach().norm(dim=1).min()) for table in tables]
    engine.eval_batch(toy.data(start=50))
    norms += [float(table.detach().norm(dim=1).min()) for table in tables]
    cases.end(engine)
    return norms


def test_evaluations_that_write_into_tied_weights_are_refused(worlds: Worlds) -> None:
    """Into others they may: it is the newest version that they use."""
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    for norms in worlds.run(STAGES, evaluated_bounds, ds_config, False):
        assert all(norm > 0.6 for norm in norms[: len(norms) // 2])
        assert all(norm < 0.51 for norm in norms[len(norms) // 2 :])
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, evaluated_bounds, ds_config, True)
    errors = failed.value.errors.values()
    name = "tied_modules.bounded.embedding.weight"
    assert any(f"weights: got a forward pass that writes into {name}, as that of" in error for error in errors)
    assert all("\n" not in error for error in errors)


class WiderInEvaluation(Bounded):
    """Computes in another type while it does not train, as Megatron's embeddings do with a flag."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.embedding.max_norm = None
        if not self.training:
            self.embedding.to(torch.float64)
        output = super().forward(x)
        self.embedding.to(torch.float32)
        return output.to(x.dtype)


def evaluated_in_another_type(ds_configs: list[dict[str, Any]], tied: bool) -> list[dict[str, torch.Tensor]]:
    """Weights of training without and with evaluations in which layers put their weights on other memory."""
    reports = []
    for ds_config in ds_configs:
        for evaluates in (False, True):
            engine = cases.engine(ds_config, STAGES, specs=partial(bounded, tied, kind=WiderInEvaluation))
            iterator = toy.data()
            for _ in range(3):
                engine.train_batch(iterator)
                if evaluates:
                    engine.eval_batch(toy.data(start=50))
            cases.end(engine)
            reports.append(cases.parameters(engine))
    return reports


@pytest.mark.parametrize("tied", [False, True])
def test_evaluations_may_leave_equal_weights_on_other_memory(worlds: Worlds, tied: bool) -> None:
    """As ``layer.to()`` and back does."""
    blocks: list[dict[str, Any]] = [{}, {"sync_mode": "bsp"}]
    ds_configs = [cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", **block}) for block in blocks]
    for plain, evaluated, plain_bsp, evaluated_bsp in worlds.run(STAGES, evaluated_in_another_type, ds_configs, tied):
        assert difference(plain, evaluated) == 0
        assert difference(plain_bsp, evaluated_bsp) == 0


def at_the_end(ds_config: dict[str, Any], sizes: list[int], what: str) -> list[str]:
    """Train over data that end, twice; what is said of a change by the script after some calls."""
    specs = toy.layer_specs()
    if what == "unfrozen":
        specs[:] = [spec.build().requires_grad_(at % 3 != 0) for at, spec in enumerate(specs)]
    engine = cases.engine(ds_config, STAGES, specs=lambda: specs)
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    said = []
    for size in sizes:
        iterator = toy.data(size)
        try:
            for number in range(100):
                engine.train_batch(iterator)
                if what == "data" and number == 2:
                    engine.quiesce()
                    _on_other_memory(engine.module)
                if what == "size" and number == 2:
                    said.append(_said(lambda: engine.set_train_micro_batch_size(toy.MICRO_BATCH)))
                    said.append(_said(lambda: engine.set_train_micro_batch_size(8)))
        except StopIteration:
            if what == "size":
                said.append(_said(lambda: engine.set_train_micro_batch_size(toy.MICRO_BATCH)))
            if what == "data":
                _on_other_memory(engine.module)
            for parameter in frozen if what == "unfrozen" else ():
                parameter.requires_grad_(True)
    assert engine.global_steps == sum(sizes)
    cases.end(engine)
    return said


def _on_other_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except VPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("weight_sync", ["stash", "vertical"])
@pytest.mark.parametrize("what", ["data", "unfrozen"])
def test_the_end_of_the_data_is_a_place_for_changes(worlds: Worlds, what: str, weight_sync: str) -> None:
    """Nothing is in flight, and older versions are gone, as after a rest."""
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "weight_sync": weight_sync})
    worlds.run(STAGES, at_the_end, ds_config, [5, 6], what)


def test_the_size_of_micro_batches_changes_on_all_ranks_or_on_none(worlds: Worlds) -> None:
    """The first stage knows of the end of the data before the others do, while old ones are in flight."""
    for mode in ("asp", "bsp"):
        ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "sync_mode": mode})
        for same, midst, after, *_ in worlds.run(STAGES, at_the_end, ds_config, [4, 4], "size"):
            assert same == ""
            why = "set_train_micro_batch_size(): got 8; micro-batches of the old size have been read ahead"
            assert midst.startswith(why) if mode == "asp" else midst == ""
            assert after == ""


class Heat(nn.Module):
    """A buffer and a frozen weight that the script makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.ones(toy.HIDDEN))
        self.gain = nn.Parameter(torch.ones(toy.HIDDEN), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.heat * self.gain)


def heated() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    specs = toy.layer_specs()
    specs[2] = specs[5] = LayerSpec(Heat)
    return specs


def cooled(ds_config: dict[str, Any], name: str, way: str) -> list[float]:
    """Losses of training with a buffer or a frozen weight that changes before every batch."""
    engine = cases.engine(ds_config, STAGES, specs=heated)
    iterator, losses = toy.data(), []
    for _ in range(UPDATES):
        if way in ("empty", "another"):
            engine.quiesce()
        for layer in (layer for layer in engine.module.modules() if isinstance(layer, Heat)):
            value = getattr(layer, name)
            if way in ("another", "another in flight"):
                setattr(layer, name, type(value)(value * 0.9, *[False] * (name == "gain")))
            else:
                value.mul_(0.9)
        losses.append(float(engine.train_batch(iterator)))
    engine.destroy()
    return losses


@pytest.mark.parametrize("name", ["heat", "gain"])
@pytest.mark.parametrize("ratio", [0, 1])
def test_what_has_no_versions_changes_in_an_empty_pipeline(worlds: Worlds, name: str, ratio: int) -> None:
    """Else one line on every rank: a layer that is run again would find other values than its forward pass.

    Of small buffers it has copies.
    """
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", "recompute_ratio": ratio})
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, large, ds_config, name)
    for error in failed.value.errors.values():
        assert "changed in place since the forward pass, allowed is to change buffers and weights" in error
        assert "\n" not in error
        assert (f"got {name!r} of recomputed layers" in error) == bool(ratio)
    empty, other = (worlds.run(STAGES, cooled, ds_config, name, way) for way in ("empty", "another"))
    assert empty == other
    if name == "heat" and ratio:
        small, other = (worlds.run(STAGES, cooled, ds_config, name, way) for way in ("in place", "another in flight"))
        assert small == other != empty


def large(ds_config: dict[str, Any], name: str) -> list[float]:
    with mock.patch("ds_vpipe.engine.modules.run_again._SMALL_BYTES", 0):
        return cooled(ds_config, name, "in place")


class Scaled(nn.Linear):
    """A number that the script makes smaller, as it does with rates of dropout, and by which a part has its mode."""

    def __init__(self) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        self.scale, self.part = 1.0, nn.Identity()

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.part.train(mode and self.scale > 0.3)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x) * self.scale + self.part.training)


def annealed(ratios_and_intervals: list[tuple[int, int]]) -> list[list[float]]:
    """Losses of training with numbers that change before every batch."""
    from deepspeed.pipe import LayerSpec

    found = []
    for ratio, interval in ratios_and_intervals:
        torch.manual_seed(1234)
        specs = toy.layer_specs()
        specs[2] = specs[5] = LayerSpec(Scaled)
        block = {"partition": "uniform", "recompute_ratio": ratio}
        ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block, pipeline={"activation_checkpoint_interval": interval})
        engine, iterator = cases.engine(ds_config, STAGES, specs=lambda specs=specs: specs), toy.data()
        found.append([])
        for _ in range(UPDATES):
            for layer in (layer for layer in engine.module.modules() if isinstance(layer, Scaled)):
                layer.scale *= 0.7
            found[-1].append(float(engine.train_batch(iterator)))
        cases.end(engine)
    return found


def test_layers_that_run_again_find_the_numbers_of_their_forward_pass(worlds: Worlds) -> None:
    for kept, recomputed, by_interval, by_two in worlds.run(STAGES, annealed, [(0, 0), (1, 0), (0, 1), (0, 2)]):
        assert kept == recomputed == by_interval == by_two


def frozen_in_flight(ratios: list[int]) -> list[list[float]]:
    """Losses of training with layers that the script freezes, and others that do it in their forward pass."""
    from deepspeed.pipe import LayerSpec

    found = []
    for ratio in ratios:
        torch.manual_seed(1234)
        specs = toy.layer_specs()
        specs[2], specs[5] = LayerSpec(Scaled), LayerSpec(Freezing)
        ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform", "recompute_ratio": ratio})
        engine, iterator = cases.engine(ds_config, STAGES, specs=lambda specs=specs: specs), toy.data()
        found.append([])
        for update in range(UPDATES):
            for layer in (layer for layer in engine.module.modules() if isinstance(layer, Scaled)):
                layer.requires_grad_(update < 3)
            found[-1].append(float(engine.train_batch(iterator)))
        cases.end(engine)
    return found


class Freezing(nn.Linear):
    """Trained in its first passes."""

    def __init__(self) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.weight.requires_grad_(self.passes < 4)
        return torch.tanh(super().forward(x))


def test_layers_that_run_again_are_trained_as_in_their_forward_pass(worlds: Worlds) -> None:
    for kept, recomputed in worlds.run(STAGES, frozen_in_flight, [0, 1]):
        assert kept == recomputed


class Seen(nn.Module):
    """A count of evaluations."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen.add_(1)
        return torch.tanh(x)


def evaluated(ds_configs: list[dict[str, Any]]) -> list[list[float]]:
    from deepspeed.pipe import LayerSpec

    found = []
    for ds_config in ds_configs:
        specs = toy.layer_specs()
        specs[2] = specs[5] = LayerSpec(Seen)
        specs[8] = LayerSpec(Seen, 2000)  # of which no copy is made, on the stage that has nothing in flight
        engine, iterator, losses = cases.engine(ds_config, STAGES, specs=lambda specs=specs: specs), toy.data(), []
        for _ in range(5):
            losses.append(float(engine.train_batch(iterator)))
            engine.eval_batch(toy.data(start=900))
        engine.destroy()
        found.append(losses)
    return found


def test_recomputed_layers_may_count_in_evaluations(worlds: Worlds) -> None:
    blocks = [{"partition": "uniform", "recompute_ratio": ratio} for ratio in (0, 1)]
    configs = [cases.config(2, OPTIMIZERS["SGD"][0], block) for block in blocks]
    for plain, recomputed in worlds.run(STAGES, evaluated, configs):
        assert plain == recomputed


class Gained(nn.Linear):
    """A layer with a frozen gain, or one that the script adds."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(toy.HIDDEN, toy.HIDDEN)
        if frozen:
            self.gain = nn.Parameter(torch.ones(toy.HIDDEN), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(super().forward(x)) * getattr(self, "gain", 1.0)).to(x.dtype)


def with_gains(
    frozen: bool, runs: list[tuple[int, dict[str, Any], dict[str, Any]]]
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Lines of training with a gain that the last stage trains after some updates, and all gains."""
    import deepspeed
    from deepspeed.pipe import LayerSpec

    import ds_vpipe

    found = []
    for after, block, extra in runs:
        torch.manual_seed(1234)
        specs = toy.layer_specs()
        specs[6] = specs[7] = LayerSpec(Gained, frozen)
        net = deepspeed.pipe.PipelineModule(
            specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
        )
        ds_config = cases.config(1, {}, {"partition": "uniform", **block}, **extra)
        del ds_config["optimizer"]
        engine = ds_vpipe.initialize(
            model=net,
            config=ds_config,
            optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        )[0]
        iterator, line = toy.data(), ""
        try:
            for update in range(UPDATES):
                if update == after:
                    engine.quiesce()
                    layers = [layer for layer in engine.module.modules() if isinstance(layer, Gained)]
                    for layer in layers:
                        layer.gain = layer.gain if frozen else nn.Parameter(torch.ones(toy.HIDDEN))
                        layer.gain.requires_grad_(True)
                        engine.basic_optimizer.add_param_group({"params": [layer.gain]})
                engine.train_batch(iterator)
        except VPipeError as error:
            line = str(error)
        found.append((line, {name: p for name, p in cases.parameters(engine).items() if name.endswith(".gain")}))
        cases.end(engine)
    return found


def test_parameters_that_a_script_adds_are_refused_and_unfrozen_ones_trained(worlds: Worlds) -> None:
    """In asp and bsp, with flat vectors too: else their gradients would be added up for ever."""
    wrapped = [
        (4, {}, {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}),
        (4, {}, {"bf16": {"enabled": True}}),
    ]
    runs: list[tuple[int, dict[str, Any], dict[str, Any]]] = [(0, {}, {}), (4, {}, {}), (0, {"sync_mode": "bsp"}, {})]
    for frozen, refused in ((False, runs + wrapped), (True, wrapped)):
        for rank in worlds.run(STAGES, with_gains, frozen, refused):
            for (line, _), run in zip(rank, refused, strict=True):
                those = "it had" if run in wrapped else "the stage's layers had"
                assert 'optimizer.param_groups: got "' in line
                assert f"it has come since; allowed: those that {those} after initialize()" in line
                assert "\n" not in line
    ranks = worlds.run(STAGES, with_gains, True, runs)
    for at in range(3):
        assert [rank[at][0] for rank in ranks] == [""] * STAGES
        gains = [gain for rank in ranks for gain in rank[at][1].values()]
        assert len(gains) == 2
        assert all(not torch.equal(gain, torch.ones(toy.HIDDEN)) for gain in gains)


REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "micro_batches: got 0; allowed: a whole number >= 1": ("set_train_batch_size", (0,), {}),
    "micro_batches: got 2.0; allowed: a whole number >= 1": ("set_train_batch_size", (2.0 * toy.MICRO_BATCH,), {}),
    "set_train_micro_batch_size(): got 8; micro-batches of the": ("set_train_micro_batch_size", (8,), {}),
    "vpipe.partition: got 5; allowed: 3 counts >= 1 that sum to 10": ("repartition", (5,), {}),
    "vpipe.partition: got [4.0, 3, 3]; allowed: 3 counts >= 1": ("repartition", ([4.0, 3, 3],), {}),
    "recompute_ratio: got [0.5]; allowed: 3 numbers": ("repartition", ([4, 3, 3],), {"recompute_ratio": 0.5}),
    'move_layer(): got "3"; allowed: a ds_vpipe.schedules.moves.Move': ("move_layer", (3,), {}),
    "eval_batch(num_micro_batches): got 2.5, allowed is 1 or more": ("eval_batch", (None,), {"num_micro_batches": 2.5}),
    "eval_batch(): got more, allowed are return_logits,": ("eval_batch", (None,), {"more": 1}),
}


def misused(ds_config: dict[str, Any], folder: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Lines of wrong calls, and what comes of training between them."""
    engine = cases.engine(ds_config, STAGES)
    iterator, lines = toy.data(), []
    for name, args, kwargs in REFUSED.values():
        engine.train_batch(iterator)
        with pytest.raises(VPipeError) as refused:
            getattr(engine, name)(*args, **kwargs)
        lines.append(str(refused.value))
    parameters = cases.parameters(engine)
    engine.save_checkpoint(folder, tag=5)  # type: ignore[arg-type]
    engine.load_checkpoint(folder, tag=5)
    engine.destroy()
    return lines, parameters


def test_wrong_calls_end_in_a_line_and_change_nothing(worlds: Worlds, tmp_path: Path) -> None:
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    reports = worlds.run(STAGES, misused, ds_config, str(tmp_path))
    for lines, _ in reports:
        assert all(text in line and "\n" not in line for text, line in zip(REFUSED, lines, strict=True)), lines
    found = cases.merged([{"parameters": parameters} for _, parameters in reports])
    counts = uniform_partition(LAYERS, STAGES)
    wanted = reference.Replay(counts, (2, 1, 0), 1, test_exactness.sgd).run(len(REFUSED)).parameters()
    assert difference(found, wanted) == 0


def flipped(item: Any) -> Any:
    """The micro-batch with its sequences in another order."""
    return item[0].flip(0), item[1].flip(0)


def with_other_function(ds_config: dict[str, Any], changes: bool) -> list[float]:
    engine = cases.engine(ds_config, STAGES)
    engine.set_batch_fn(lambda item: item)
    losses, iterator = [], toy.data()
    for update in range(UPDATES):
        if changes and update == 4:
            engine.set_batch_fn(flipped)
        if update in (5, 7):  # what is in flight is admitted again
            engine.quiesce()
        losses.append(float(engine.train_batch(iterator)))
    cases.end(engine)
    return losses


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_inputs_and_labels_are_made_by_one_function(worlds: Worlds, micro_batches: int) -> None:
    """The loss is that of the pairs in any order, while the first stage has read ahead of the change."""
    ds_config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], {})
    found = [worlds.run(STAGES, with_other_function, ds_config, changes)[0] for changes in (False, True)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def evaluated_in_modes(ds_config: dict[str, Any], modes: list[bool]) -> list[float]:
    engine = cases.engine(ds_config, STAGES)
    losses, iterator = [], toy.data()
    for inference in modes:
        losses.append(float(engine.train_batch(iterator)))
        with torch.inference_mode(inference):
            losses.append(float(engine.eval_batch(toy.data(start=900))))
    cases.end(engine)
    return losses


@pytest.mark.parametrize("block", [{}, {"link": "host"}, {"sync_mode": "bsp"}], ids=str)
def test_evaluations_in_inference_mode_now_and_then(worlds: Worlds, block: dict[str, Any]) -> None:
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block)
    found = [worlds.run(STAGES, evaluated_in_modes, ds_config, modes) for modes in ([True, False] * 2, [False] * 4)]
    assert found[0] == found[1]


def with_other_parameters(ds_config: dict[str, Any], change: str) -> tuple[str, int]:
    """The line of a call after a script's change, and how many weights two more updates change."""
    engine = cases.engine(ds_config, STAGES)
    iterator = toy.data()
    engine.train_batch(iterator)
    engine.quiesce()
    layer = next(part for part in engine.module.modules() if isinstance(part, nn.LayerNorm | nn.Linear))
    if change == "assign":
        engine.module.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()}, assign=True)
    elif change == "attribute":
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    elif change == "parametrization":
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    elif change == "frozen":
        layer.weight.requires_grad_(False)
        engine.train_batch(iterator)
        engine.quiesce()
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    before, line = [parameter.detach().clone() for parameter in engine.module.parameters()], ""
    try:
        for _ in range(2):
            engine.train_batch(iterator)
    except VPipeError as error:
        line = str(error)
    after = engine.module.parameters()
    changed = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    engine.destroy()
    return line, len(before) - changed


@pytest.mark.parametrize("block", [{}, {"sync_mode": "bsp"}], ids=str)
def test_parameters_that_nothing_would_train_are_refused(worlds: Worlds, block: dict[str, Any]) -> None:
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block)
    for change in ("assign", "attribute"):
        for line, _ in worlds.run(STAGES, with_other_parameters, ds_config, change):
            assert 'engine.module: got "another parameter, or none, for ' in line
            assert "\n" not in line
    for change, unchanged in (("parametrization", 0), ("frozen", 1)):
        assert worlds.run(STAGES, with_other_parameters, ds_config, change) == [("", unchanged)] * STAGES


def saves_beside_training(folder: str) -> str:
    """The first rank trains on where the others save; the first rank's log of the start."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = cases.engine(cases.config(2, OPTIMIZERS["SGD"][0], {"peer_timeout_s": 3}), STAGES)
    lines = said.getvalue()
    engine.train_batch(toy.data())
    if engine.global_rank == 0:
        torch.distributed.barrier()  # until the others have given up
        return lines
    try:
        engine.save_checkpoint(folder)
    except VPipeError as error:
        lines = str(error)
    torch.distributed.barrier()
    return lines


def test_a_call_that_others_do_not_make_is_named(worlds: Worlds, tmp_path: Path) -> None:
    start, second, _ = worlds.run(STAGES, saves_beside_training, str(tmp_path))
    assert "ds_vpipe: asp, 3 stages of layers [4, 3, 3], depths [2, 1, 0], M = 2" in start
    assert "ds_vpipe: links from each stage to the next: 0 " in start
    assert "the mark of save_checkpoint(), which every rank has to call, from stage 0 (rank 0)" in second


def under_other_defaults(ds_configs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train, save and move a layer in a script with a default device and type of its own, and without."""
    reports = []
    data = [toy.micro_batch(index) for index in range(60)]
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    for ds_config in ds_configs:
        for others in (False, True):
            engine = cases.engine(ds_config, STAGES)
            pairs = iter(data)
            try:
                if others:  # where nothing can be read, and a count ends at 256
                    torch.set_default_device("meta")
                    torch.set_default_dtype(torch.bfloat16)
                for _ in range(3):
                    engine.train_batch(pairs)
                engine.save_checkpoint(folder)
                if not ds_config["vpipe"].get("swap_ratio"):
                    torch.set_default_device(device)  # on which layers are built
                    engine.repartition([3, 5, 2])
                engine.train_batch(pairs)
                loss = engine.eval_batch(iter(data[:4]))
            finally:
                torch.set_default_device(device)
                torch.set_default_dtype(dtype)
            states = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
            types = {str(value.dtype) for value in states if torch.is_tensor(value)}
            reports.append({"parameters": cases.parameters(engine), "loss": float(loss), "types": types})
            cases.end(engine)
    return reports


def test_default_device_and_type_of_a_script_change_nothing(worlds: Worlds, tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    blocks = [{"staleness": {"nadam": True}, "swap_ratio": 1}, {"recompute_ratio": 0.5, "link": "host"}]
    ds_configs = [cases.config(2, adam, block, gradient_clipping=0.1) for block in blocks]
    for rank in worlds.run(STAGES, under_other_defaults, ds_configs, str(tmp_path)):
        for plain, other in zip(rank[::2], rank[1::2], strict=True):
            assert other["types"] == {"torch.float32"}
            # Evaluated under a default device torch's attention goes another way, with other last bits.
            assert other["loss"] == pytest.approx(plain["loss"], rel=1e-6)
            assert difference(other["parameters"], plain["parameters"]) == 0
