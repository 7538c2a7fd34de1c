"""What a DeepSpeed JSON or a script may ask of a pipeline beside the training itself, each against the stock engine."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing as mp
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from torch.utils.data import DistributedSampler
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.5}}
STAGES = 2


def build(ds_config: dict[str, Any], net: Any = None, **given: Any) -> Any:
    """An engine on ``net``, by default the toy model, with further arguments of ``initialize()``."""
    import deepspeed

    import ds_vpipe

    if net is None:
        net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=STAGES, loss_fn=nn.CrossEntropyLoss())
    return ds_vpipe.initialize(model=net, config=ds_config, **given)[0]


def assert_same(reports: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same parameters and losses on every rank, bit for bit."""
    for rank, (one, other) in enumerate(zip(reports, others, strict=True)):
        assert one["losses"] == other["losses"], f"rank {rank}"
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), f"rank {rank}: {name}"


def train(trained: Any, iterator: Iterator[Any] | None, batches: int) -> dict[str, Any]:
    losses = [float(trained.train_batch(iterator)) for _ in range(batches)]
    report = {"losses": losses, "parameters": cases.parameters(trained)}
    cases.end(trained)
    return report


# Learning-rate schedules

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.3, "warmup_num_steps": 5, "warmup_type": "linear"}}


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def rates(vpipe: dict[str, Any] | None, kind: str) -> list[Any]:
    import deepspeed

    ds_config = cases.config(2, SGD, vpipe)
    net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=STAGES, loss_fn=nn.CrossEntropyLoss())
    given: dict[str, Any] = {}
    if kind == "json":
        ds_config["scheduler"] = WARMUP
    elif kind == "callable":
        given["lr_scheduler"] = decay
    else:
        del ds_config["optimizer"]
        given["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.3)
        given["lr_scheduler"] = decay(given["optimizer"])
    trained = build(ds_config, net, **given)
    iterator, seen = toy.data(), []
    for _ in range(6):
        trained.train_batch(iterator)
        seen.append((trained.get_lr(), trained.global_steps, trained.global_samples))
    cases.end(trained)
    return seen


def rates_of_all() -> dict[tuple[str, str], list[Any]]:
    blocks = {"stock": None, "asp": {}, "bsp": {"sync_mode": "bsp"}}
    kinds = ("json", "callable", "object")
    return {(name, kind): rates(block, kind) for name, block in blocks.items() for kind in kinds}


def test_learning_rates_step_once_per_update_at_every_stage(worlds: Worlds) -> None:
    for rank in worlds.run(STAGES, rates_of_all):
        for kind in ("json", "callable", "object"):
            assert rank["asp", kind] == rank["bsp", kind] == rank["stock", kind]
        halves = [0.3 * 0.5**step for step in range(1, 7)]
        assert [lr[0] for lr, _, _ in rank["asp", "callable"]] == pytest.approx(halves)
        assert [lr[0] for lr, _, _ in rank["asp", "json"]] == pytest.approx([0.0, 0.06, 0.12, 0.18, 0.24, 0.3])
        samples = 2 * toy.MICRO_BATCH
        assert [(steps, count) for _, steps, count in rank["asp", "json"]] == [(i, i * samples) for i in range(1, 7)]


# Data loaders

SAMPLES = 10


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tokens[0], labels[0]) for tokens, labels in map(toy.micro_batch, range(SAMPLES))]


def batched(order: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of the samples in ``order``."""
    chosen = [samples()[index] for index in order]
    for start in range(0, len(order), toy.MICRO_BATCH):
        tokens, labels = zip(*chosen[start : start + toy.MICRO_BATCH], strict=True)
        yield torch.stack(tokens), torch.stack(labels)


def load() -> dict[str, dict[str, Any]]:
    from deepspeed.utils import RepeatingLoader

    ds_config = cases.config(1, SGD, {})
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # DeepSpeed's loader starts processes
    try:
        reports = {"training_data": train(build(ds_config, training_data=samples()), None, 7)}
    finally:
        mp.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    order = list(range(SAMPLES))
    reports["in order"] = train(build(ds_config), itertools.cycle(batched(order)), 7)

    trained, dataset = build(ds_config), samples()
    sampler = DistributedSampler(dataset, 1, 0, shuffle=True, seed=3)  # type: ignore[arg-type,var-annotated]
    loader = RepeatingLoader(trained.deepspeed_io(dataset, data_sampler=sampler, num_local_io_workers=0))
    reports["shuffled"] = train(trained, loader, 7)
    reports["shuffled order"] = train(build(ds_config), itertools.cycle(batched(list(sampler))), 7)
    return reports


def test_loaders_of_deepspeed_are_read_in_their_order(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, load)
    assert_same([rank["training_data"] for rank in ranks], [rank["in order"] for rank in ranks])
    assert_same([rank["shuffled"] for rank in ranks], [rank["shuffled order"] for rank in ranks])
    assert ranks[0]["shuffled"]["losses"] != ranks[0]["in order"]["losses"]


# Losses


class Parts(nn.Module):
    """A loss with parts that the model reports; remembers them for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = {"largest": torch.zeros(()), "entropy": torch.zeros(())}
        self.history: list[dict[str, float]] = []

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        entropy = torch.distributions.Categorical(logits=outputs).entropy().mean()
        self.latest = {"largest": outputs.detach().max(), "entropy": entropy}
        self.history.append({name: float(value) for name, value in self.latest.items()})
        return nn.functional.cross_entropy(outputs, labels) - 0.1 * entropy


class LossOnly(nn.Module):
    """A last layer that returns the loss."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean().reshape(self.shape)


def square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def additional(vpipe: dict[str, Any] | None) -> dict[str, Any]:
    from deepspeed.pipe import PipelineModule

    class Reporting(PipelineModule):
        def get_additional_losses(self) -> dict[str, torch.Tensor]:
            return self.loss_fn.latest

    torch.manual_seed(1)
    parts = Parts()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        net = Reporting(toy.layer_specs(), num_stages=STAGES, loss_fn=parts)
        trained = build(cases.config(2, SGD, vpipe, steps_per_print=2), net)
        iterator, means = toy.data(), []
        for _ in range(6):
            trained.train_batch(iterator)
            means.append({name: float(value) for name, value in trained.get_additional_losses().items()})
    printed = [text for text in output.getvalue().splitlines() if text.startswith("steps: 6 loss")]
    cases.end(trained)
    return {"means": means, "history": parts.history, "printed": printed}


def without_loss_fn(vpipe: dict[str, Any] | None, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    net = PipelineModule([*toy.layer_specs(), LayerSpec(LossOnly, shape)], num_stages=STAGES, loss_fn=None)
    return train(build(cases.config(2, SGD, vpipe), net), toy.data(), 6)


def losses() -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    specs = [*toy.layer_specs(), LayerSpec(nn.Identity)]  # as many layers as with the loss as the last
    with_loss_fn = build(cases.config(2, SGD, {}), PipelineModule(specs, num_stages=STAGES, loss_fn=square))
    bsp = {"sync_mode": "bsp"}
    return {
        "additional": {"stock": additional(None), "bsp": additional(bsp), "asp": additional({})},
        "none": {"stock": without_loss_fn(None), "bsp": without_loss_fn(bsp), "asp": without_loss_fn({})},
        "one element": {"bsp": without_loss_fn(bsp, (1,)), "asp": without_loss_fn({}, (1, 1))},
        "square": train(with_loss_fn, toy.data(), 6),
    }


def test_losses_that_the_model_reports_or_returns(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, losses)
    history = ranks[-1]["additional"]["asp"]["history"]
    by_hand = [
        {name: (one[name] + two[name]) / 2 for name in ("largest", "entropy")}
        for one, two in zip(history[::2], history[1::2], strict=True)
    ]
    for rank in ranks:
        modes = rank["additional"]
        assert modes["bsp"]["means"] == modes["stock"]["means"]
        for mean, wanted in zip(modes["asp"]["means"], by_hand, strict=True):
            assert list(mean) == ["largest", "entropy"]
            assert mean == pytest.approx(wanted, rel=1e-6)
        assert modes["asp"]["means"] != modes["bsp"]["means"], "other weights"
    assert "entropy: " in ranks[0]["additional"]["asp"]["printed"][0]

    assert_same([rank["none"]["bsp"] for rank in ranks], [rank["none"]["stock"] for rank in ranks])
    assert_same([rank["none"]["asp"] for rank in ranks], [rank["square"] for rank in ranks])
    for mode in ("bsp", "asp"):
        assert_same([rank["one element"][mode] for rank in ranks], [rank["none"][mode] for rank in ranks])


# Masks, and what scripts read after a batch


class Masked(nn.Module):
    """Embeddings, and a mask of another type than bool unless ``as_bool``."""

    def __init__(self, as_bool: bool) -> None:
        super().__init__()
        self.as_bool = as_bool
        self.embed = toy.Embed(100)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (tokens > 3).to(torch.uint8)
        return self.embed(tokens), mask.bool() if self.as_bool else mask


class Unmasked(nn.Module):
    """A last layer in which a mask of bools and one of bytes mean different things."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = toy.Pool(110)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.pool(inputs[0] * (~inputs[1])[..., None])


def masked(vpipe: dict[str, Any] | None, as_bool: bool = False) -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    specs = [LayerSpec(Masked, as_bool), LayerSpec(Unmasked)]
    trained = build(
        cases.config(2, SGD, vpipe), PipelineModule(specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss())
    )
    trained.set_has_attention_mask(not as_bool)
    iterator, evaluated, seen = toy.data(), [], []
    for _ in range(3):
        trained.train_batch(iterator)
        seen.append((float(trained.loss), [float(loss) for loss in trained.fwd_outputs]))
        evaluated.append(float(trained.eval_batch(toy.data())))
    return {**train(trained, iterator, 3), "evaluated": evaluated, "seen": seen}


def all_masked() -> dict[str, dict[str, Any]]:
    return {
        "stock": masked(None),
        "bsp": masked({"sync_mode": "bsp"}),
        "asp": masked({}),
        "asp, bools": masked({}, as_bool=True),
    }


def test_a_mask_may_be_absent() -> None:
    from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine

    told: Any = SimpleNamespace(has_attention_mask=True, has_bool_tensors=False)
    assert PatchedPipelineEngine.as_sent(told, (1, None)) == (1, None)
    assert PatchedPipelineEngine.as_sent(told, (1, torch.ones(1)))[1].dtype == torch.bool


def test_masks_become_bools_and_losses_can_be_read(worlds: Worlds) -> None:
    """Where the script has told DeepSpeed of a mask. Stages before the last have no losses."""
    ranks = worlds.run(STAGES, all_masked)
    for one, other in (("bsp", "stock"), ("asp", "asp, bools")):
        assert_same([rank[one] for rank in ranks], [rank[other] for rank in ranks])
        for rank in ranks:
            assert rank[one]["evaluated"] == rank[other]["evaluated"]
            assert rank[one]["seen"] == rank[other]["seen"]
    assert ranks[0]["bsp"]["seen"] == [(0.0, [])] * 3
    assert all(loss == losses[-1] > 0 and len(losses) == 2 for loss, losses in ranks[1]["bsp"]["seen"])


class HandingOn(nn.Module):
    """Embeddings, and a mask of floats as it has come with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = toy.Embed(100)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embed(inputs[0]), inputs[1]


class Weighing(Unmasked):
    """The same last layer for a mask of floats."""

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.pool(inputs[0] * inputs[1][..., None])


def floats_handed_on(vpipe: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    specs = [LayerSpec(HandingOn), LayerSpec(Weighing)]
    module = PipelineModule(specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss())
    iterator = (((tokens, (tokens <= 3).float()), labels) for tokens, labels in toy.data())
    return train(build(cases.config(2, SGD, vpipe), module), iterator, 3)


def floats_and_bools() -> dict[str, dict[str, Any]]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    reports = {}
    for mode in ("bsp", "asp"):
        specs = [LayerSpec(Masked, True), LayerSpec(Unmasked)]
        module = PipelineModule(specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss())
        config = cases.config(2, SGD, {"sync_mode": mode})
        reports[f"{mode}, bools"] = train(build(config, module), toy.data(), 3)
        reports[mode] = floats_handed_on({"sync_mode": mode})
    return reports


def test_inputs_of_floats_may_be_handed_on(worlds: Worlds) -> None:
    """They need no gradient, for which DeepSpeed's engine asks."""
    ranks = worlds.run(STAGES, floats_and_bools)
    for mode in ("bsp", "asp"):
        assert_same([rank[mode] for rank in ranks], [rank[f"{mode}, bools"] for rank in ranks])


# Compilation and activation checkpointing


def compiled() -> dict[str, dict[str, Any]]:
    reports = {}
    for name in ("plain", "eager", "aot_eager", "inductor", "newest weights"):
        trained = build(cases.config(1, SGD, {"weight_sync": "none"} if name == "newest weights" else {}))
        if name not in ("plain", "newest weights"):
            trained.compile(backend=name)
            assert trained.is_compiled
        reports[name] = train(trained, toy.data(), 10)
    return reports


def test_a_compiled_module_keeps_its_versions(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, compiled)
    plain = [rank["plain"] for rank in ranks]
    assert_same([rank["eager"] for rank in ranks], plain)
    assert_same([rank["aot_eager"] for rank in ranks], plain)
    for rank in ranks:  # inductor adds up in another order
        for name, weight in rank["plain"]["parameters"].items():
            torch.testing.assert_close(rank["inductor"]["parameters"][name], weight, rtol=1e-5, atol=1e-5)
        assert rank["inductor"]["losses"] == pytest.approx(rank["plain"]["losses"], rel=1e-5)
    assert ranks[0]["newest weights"]["losses"] != pytest.approx(plain[0]["losses"], rel=1e-3), "it would notice"


@pytest.mark.parametrize("curriculum", [True, False])
def test_workers_of_deepspeeds_loader_end(curriculum: bool) -> None:
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

    from ds_vpipe.engine.deepspeed_internals import end_workers

    before = mp.active_children()
    loader = DeepSpeedDataLoader(range(8), 2, False, -1, None, num_local_io_workers=1)
    loader.curriculum_learning_enabled = curriculum
    repeated = RepeatingLoader(loader)
    if curriculum:
        loader.data_sampler = [[0, 1], [2, 3], [4, 5]]
        iter(loader)
    next(repeated.loader)
    (worker,) = set(mp.active_children()) - set(before)
    end_workers(repeated)
    assert not worker.is_alive()


# Modules of a class of the script's own


def with_names() -> dict[str, dict[str, Any]]:
    """Training of a module that has attributes named as ours, and of one that has not."""
    import deepspeed

    class Named(deepspeed.pipe.PipelineModule):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.numbers, self.run_timed, self.chunk = [1, 2, 3], "no", 5

        def pack(self) -> None: ...

        run_several = hold_layers = take_layers = tied_layers = copies = own_parameters = take_output = pack

    interleaved = {"schedule": "interleaved", "sync_mode": "bsp", "virtual_stages": 2}
    blocks: dict[str, dict[str, Any]] = {
        "plain": {},
        "recompute": {"recompute_ratio": 0.5},
        "other partition": {"partition": [4, 6]},
        "virtual stages": {"partition": [3, 3, 2, 2], **interleaved},
    }
    reports = {}
    for name, block in blocks.items():
        for kind in (Named, deepspeed.pipe.PipelineModule):
            given = {"loss_fn": nn.CrossEntropyLoss(), "partition_method": "uniform", "seed_layers": True}
            net = kind(toy.layer_specs(0.3), num_stages=STAGES, **given)
            trained = build(cases.config(2, SGD, block), net)
            reports[f"{name}, {kind.__name__}"] = train(trained, toy.data(), 4)
    return reports


def test_modules_may_have_attributes_of_any_name(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, with_names)
    for name in ("plain", "recompute", "other partition", "virtual stages"):
        assert_same(*([rank[f"{name}, {kind}"] for rank in ranks] for kind in ("Named", "PipelineModule")))


def with_forward(vpipe: dict[str, Any] | None, how: str, then: dict[str, Any] | None = None) -> dict[str, Any]:
    """Training of a module whose forward the script has doubled: of its class, or of the module, before or later."""
    from deepspeed.pipe import PipelineModule

    class Mine(PipelineModule):
        def forward(self, inputs: Any) -> Any:
            return 2 * super().forward(inputs)

    def double(module: Any) -> None:
        theirs = module.forward
        module.forward = lambda inputs: 2 * theirs(inputs)

    kind = Mine if how == "class" else PipelineModule
    given = {"loss_fn": nn.CrossEntropyLoss(), "partition_method": "uniform"}
    net = kind(toy.layer_specs(), num_stages=STAGES, **given)
    if how == "module" or (how == "second stage" and net.stage_id == 1):
        double(net)
    trained = build(cases.config(2, SGD, vpipe), net)
    if how == "later":
        double(trained.module)
    iterator = toy.data()
    losses = [float(trained.train_batch(iterator)) for _ in range(3)]
    if then is not None:
        trained.repartition(**then)
    report = train(trained, iterator, 3)
    return {**report, "losses": losses + report["losses"]}


def with_forwards() -> dict[str, dict[str, Any]]:
    blocks: dict[str, dict[str, Any] | None] = {"stock": None, "bsp": {"sync_mode": "bsp"}, "asp": {}}
    found = {f"{name}, {how}": with_forward(blocks[name], how) for name in blocks for how in ("class", "module")}
    again = {"counts": [3, 7], "recompute_ratio": [0.5, 0.5]}
    found["split, class"] = with_forward({}, "class", {"counts": [3, 7]})
    found["split, later"] = with_forward({}, "later", {"counts": [3, 7]})
    found["recomputed, later"] = with_forward({}, "later", again)
    return found


def test_a_forward_of_the_script_runs(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, with_forwards)
    for how in ("class", "module"):
        assert_same([rank[f"bsp, {how}"] for rank in ranks], [rank[f"stock, {how}"] for rank in ranks])
        assert_same([rank[f"asp, {how}"] for rank in ranks], [rank["asp, class"] for rank in ranks])
    for name in ("split, later", "recomputed, later"):
        assert_same([rank[name] for rank in ranks], [rank["split, class"] for rank in ranks])


def refusals_of_forwards() -> list[str]:
    interleaved = {"schedule": "interleaved", "sync_mode": "bsp", "virtual_stages": 2}
    cases_of = [
        ("class", {"recompute_ratio": 0.5}, None),
        ("second stage", {"recompute_ratio": [0.5, 0]}, None),
        ("module", {"swap_ratio": 0.5}, None),
        ("module", interleaved, None),
        ("class", {"replan": {"every": 4}}, None),
        ("second stage", {}, {"counts": [3, 7], "recompute_ratio": [0.5, 0]}),
    ]
    found = []
    for how, block, then in cases_of:
        try:
            with_forward(block, how, then)
        except VPipeConfigError as error:
            found.append(str(error))
    return found


def test_what_passes_a_forward_of_the_script_by_is_refused(worlds: Worlds) -> None:
    first, second = worlds.run(STAGES, refusals_of_forwards)
    assert [line.partition(";")[0] for line in first] == [
        "vpipe.recompute_ratio: got 0.5",
        "vpipe.recompute_ratio: got [0.5, 0.0]",
        "vpipe.swap_ratio: got 0.5",
        "vpipe.virtual_stages: got 2",
        "vpipe.replan.every: got 4",
        "repartition(recompute_ratio): got [0.5, 0]",
    ]
    assert first == second
    assert all("with a forward of the script's; allowed: " in line for line in first)
