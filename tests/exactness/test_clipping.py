"""Gradient clipping by the norm of the stage, of all stages as far as they are known, and of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import deepspeed
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, OPTIMIZERS, difference, sgd
from torch import nn
from worlds import Worlds

import ds_vpipe
from ds_vpipe.engine.updates.clipping import fp32_norms
from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import default_depths, with_communication

CLIP = 0.3
HALVES = (torch.bfloat16, torch.float16)
ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}}


def replayed(micro_batches: int, batches: int, **options: Any) -> dict[str, torch.Tensor]:
    counts = uniform_partition(LAYERS, 4)
    return reference.Replay(counts, default_depths(4), micro_batches, sgd, **options).run(batches).parameters()


def test_norms_of_all_kinds_of_gradients() -> None:
    torch.manual_seed(0)
    sparse = nn.Embedding(5, 3, sparse=True)
    sparse(torch.tensor([1, 4, 1])).pow(2).sum().backward()
    rows = sparse.weight.grad
    assert rows is not None
    assert rows.is_sparse
    kinds = [torch.randn(7, 3), torch.randn(300, dtype=torch.float64), *(torch.randn(9).to(t) for t in HALVES)]
    strided = torch.randn(6, 4)[::2, 1:]
    for gradients in (kinds, [kinds[0], rows, kinds[2]], [rows], [torch.zeros(0), strided], []):
        norms = fp32_norms(gradients)
        assert [norm.dtype for norm in norms] == [torch.float32] * len(gradients)
        wanted = [float(gradient.to_dense().float().norm()) for gradient in gradients]
        assert [float(norm) for norm in norms] == wanted
    for dtype in (torch.complex64, torch.complex128):
        assert float(fp32_norms([torch.tensor([3.0, 4.0j], dtype=dtype)])[0]) == 5.0


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scopes(worlds: Worlds, micro_batches: int) -> None:
    batches = 12
    wanted: list[dict[str, torch.Tensor]] = []
    configs = []
    for scope in ("stage", "delayed_global"):
        for extra, options in (
            ({}, {}),
            ({**ZERO_1, "bf16": {"enabled": True}}, {"dtype": torch.bfloat16}),
            ({"bf16": {"enabled": True}}, {"dtype": torch.bfloat16}),
            ({**ZERO_1, **FP16}, {"dtype": torch.float16, "scaler": reference.Scaler(2.0**20, window=4)}),
        ):
            block = {"partition": "uniform", "gradient_clipping_scope": scope}
            configs.append(
                cases.config(micro_batches, OPTIMIZERS["SGD"][0], block, **{"gradient_clipping": CLIP, **extra})
            )
            wanted.append(
                replayed(micro_batches, batches, clip=CLIP, scope=scope, criterion=toy.float_cross_entropy, **options)
            )
    assert difference(wanted[0], wanted[4]) > 1e-2
    assert difference(replayed(micro_batches, batches, criterion=toy.float_cross_entropy), wanted[0]) > 1e-2
    ranks = worlds.run(4, cases.train_each, configs, 4, batches, loss_fn=toy.float_cross_entropy)
    for position, expected in enumerate(wanted):
        off = difference(cases.merged([rank[position] for rank in ranks]), expected)
        assert off <= (1e-5, 1e-2, 1e-2, 2e-3)[position % 4], configs[position]


@pytest.mark.mp
def test_delayed_global_over_a_drain(worlds: Worlds) -> None:
    """During a drain no earlier stage's norms come any more; after it everything is known."""
    block = {"partition": "uniform", "gradient_clipping_scope": "delayed_global"}
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block, gradient_clipping=CLIP)
    reports = worlds.run(4, cases.train_twice, ds_config, 4, 7, 6)
    order = [*range(7), *range(6)]
    wanted = replayed(1, 13, clip=CLIP, scope="delayed_global", order=order, refills=(0, 7, 13))
    assert difference(cases.merged(reports), wanted) <= 1e-5
    assert difference(replayed(1, 13, clip=CLIP, scope="delayed_global", order=order), wanted) > 1e-3


def peers_before_the_update(ds_config: dict[str, Any]) -> str:
    """Build an engine whose schedule sends what an update told before that."""

    def wrong(*args: Any, **kwargs: Any) -> Iterator[Action]:
        actions = list(with_communication(*args, **kwargs))
        return iter(sorted(actions, key=lambda a: a.kind is Kind.STEP and a.index == 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_vpipe.schedules.program.with_communication", wrong)
        with pytest.raises(PipelineProtocolError) as error:
            cases.engine(ds_config, 2)
    return str(error.value)


@pytest.mark.mp
def test_norms_sent_out_of_order_are_refused_at_start(worlds: Worlds) -> None:
    """What is checked before anything is trained is what will run, exchanges of other stages included."""
    block = {"partition": "uniform", "gradient_clipping_scope": "delayed_global"}
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block, gradient_clipping=CLIP)
    lines = worlds.run(2, peers_before_the_update, ds_config)
    assert lines[0] == lines[1]
    assert "rank 1, position 14, SEND_PEERS1: STEP1 is next; this is a defect in ds_vpipe" in lines[0]


@pytest.mark.mp
@pytest.mark.parametrize("zero", [False, True])
def test_whole_model_in_bsp(worlds: Worlds, zero: bool) -> None:
    extra: dict[str, Any] = ZERO_1 if zero else {}
    ds_config = cases.config(
        2, OPTIMIZERS["SGD"][0], {"sync_mode": "bsp", "partition": "uniform"}, gradient_clipping=CLIP, **extra
    )
    reports = worlds.run(4, cases.train, ds_config, 4, 12)
    wanted = reference.Replay((LAYERS,), (0,), 2, sgd, clip=CLIP).run(12).parameters()
    assert difference(cases.merged(reports), wanted) <= 1e-5


class TiedTwice(nn.Module):
    """A plain model with two layers that are used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.turn = nn.Embedding(toy.VOCABULARY, toy.HIDDEN), nn.Linear(toy.HIDDEN, toy.HIDDEN)
        self.layers = nn.ModuleList([nn.Linear(toy.HIDDEN, toy.HIDDEN) for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.turn(self.words(tokens))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.turn(hidden) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())


def norms_of_both_ways(on_meta: bool, extra: dict[str, Any]) -> tuple[float, float]:
    """The norm that the engine clips by, and that of the whole model in one process."""
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"sync_mode": "bsp"}, gradient_clipping=CLIP, **extra)
    tokens = toy.micro_batch(0)[0]
    with torch.device("meta" if on_meta else "cpu"):
        plain = TiedTwice()
    trained = ds_vpipe.initialize(model=plain, config={**ds_config, "pipeline": {"stages": 2}})[0]
    whole = TiedTwice()
    whole.load_state_dict(trained.full_state_dict())
    whole(tokens).backward()
    trained.backward(trained(tokens))
    trained.step()
    norm = float(trained.get_global_grad_norm())
    cases.end(trained)
    return norm, float(nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]))


def norms_of_all(ways: list[tuple[bool, dict[str, Any]]]) -> list[tuple[float, float]]:
    return [norms_of_both_ways(*way) for way in ways]


@pytest.mark.mp
def test_weights_that_several_stages_have_count_once_in_bsp(worlds: Worlds) -> None:
    """Also if there are several, and where they have got their values after the split; without the loss scale."""
    scaled = {"fp16": {"enabled": True, "loss_scale": 64.0}}
    ways = [(on_meta, extra) for on_meta in (False, True) for extra in ({}, ZERO_1)]
    ways += [(False, scaled), (False, scaled | ZERO_1)]
    for report in worlds.run(2, norms_of_all, ways):
        for way, (norm, wanted) in zip(ways, report, strict=True):
            assert norm == pytest.approx(wanted, rel=1e-2 if "fp16" in way[1] else 1e-5), way


def trained_with_frozen(sync_mode: str, frozen: str, grouped: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Half precision without ZeRO, where DeepSpeed sums norms group by group; the first stage is frozen, or biases."""
    from deepspeed.pipe import PipelineModule

    block = {"partition": "uniform", "sync_mode": sync_mode, "peer_timeout_s": 10}
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], block, gradient_clipping=CLIP, bf16={"enabled": True})
    net = PipelineModule(toy.layer_specs(), 2, loss_fn=toy.float_cross_entropy, partition_method="uniform")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(net.stage_id == 1 or (frozen == "biases" and not name.endswith("bias")))
    named = [(name.endswith("bias"), parameter) for name, parameter in net.named_parameters()]
    groups = [{"params": [p for is_bias, p in named if is_bias == biases]} for biases in (False, True)]
    given = {"model_parameters": groups} if grouped else {}
    trained, iterator = ds_vpipe.initialize(model=net, config=ds_config, **given)[0], toy.data()
    losses = [float(trained.train_batch(iterator)) for _ in range(4)]
    found = losses, cases.parameters(trained)
    cases.end(trained)
    return found


@pytest.mark.mp
@pytest.mark.parametrize("grouped", [False, True])
def test_a_stage_without_gradients_keeps_nobody_waiting_in_bsp(worlds: Worlds, grouped: bool) -> None:
    (losses, _), (_, last) = worlds.run(2, trained_with_frozen, "bsp", "stage", grouped)
    (wanted, _), (_, of_asp) = worlds.run(2, trained_with_frozen, "asp", "stage", grouped)  # the last is never late
    assert losses == wanted
    assert difference(last, of_asp) == 0


@pytest.mark.mp
def test_a_group_without_gradients_keeps_nobody_waiting_in_bsp(worlds: Worlds) -> None:
    """Biases of the first stage are frozen, and in a group of their own."""
    reports, wanted = (worlds.run(2, trained_with_frozen, "bsp", "biases", grouped) for grouped in (True, False))
    for (losses, found), (wanted_losses, wanted_values) in zip(reports, wanted, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=1e-2)
        assert difference(found, wanted_values) <= 1e-2


def norms_of_stock_after(blocks: list[dict[str, Any] | None]) -> list[tuple[float, float]]:
    """Members of ``engine.mpu``'s model-parallel group, and the norm of the stock engine's first batch on that module.

    The module has been in an engine with each of the ``blocks`` before.
    """
    import deepspeed

    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.1}
    found = []
    for block in blocks:
        net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=toy.float_cross_entropy)
        ones = torch.ones(1)
        for vpipe in (block, None):
            trained = ds_vpipe.initialize(model=net, config=cases.config(1, OPTIMIZERS["AdamW"][0], vpipe, **extra))[0]
            if vpipe is block:
                torch.distributed.all_reduce(ones, group=trained.mpu.get_model_parallel_group())
            else:
                trained.train_batch(toy.data())
                found.append((float(ones), float(trained.get_global_grad_norm())))
            trained.destroy()
        cases.close_groups()
    return found


@pytest.mark.mp
def test_groups_and_norms_of_a_module_stay_deepspeeds(worlds: Worlds) -> None:
    first, second = worlds.run(2, norms_of_stock_after, [{}, {"sync_mode": "bsp"}])
    assert first[0] == first[1] == second[0] == second[1]
    assert first[0][0] == 2
