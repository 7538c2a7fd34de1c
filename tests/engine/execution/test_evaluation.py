"""Evaluation between any two batches: its results, and that training does not notice it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

import ds_vpipe
from ds_vpipe.engine.execution.evaluation import evaluation_options, mean_of_trees

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
BF16 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
}
STAGES, MICRO_BATCHES = 4, 2
BATCHES_BEFORE_DRAIN, BATCHES = 5, 8

REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_micro_batches": 1},
    {"num_micro_batches": 5, "return_logits": True},
    {"bcast_loss": False},
    {"reduce_output": None, "num_micro_batches": 3},
    {"reduce_output": None, "bcast_loss": False, "return_logits": True},
    {"compute_loss": False, "reduce_output": None, "num_micro_batches": 3},
    {"compute_loss": False, "num_micro_batches": 4, "return_logits": True},
)


def uneven(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of other rows and another length than training's, and than its neighbours'."""
    generator = torch.Generator().manual_seed(index)
    rows, length = 1 + index % 4, 3 + (7 * index) % 5
    tokens = torch.randint(toy.VOCABULARY, (rows, length), generator=generator)
    return tokens, torch.randint(toy.CLASSES, (rows,), generator=generator)


def evaluation_data(request: dict[str, Any], start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches for a request: of different shapes, unless the mean of outputs is asked for."""
    count = request.get("num_micro_batches", MICRO_BATCHES)
    alike = not request.get("compute_loss", True) and request.get("reduce_output", "avg") is not None
    return [toy.micro_batch(start + i) if alike else uneven(start + i) for i in range(count)]


def noisy(items: list[Any]) -> Iterator[Any]:
    """Items from a data set that draws random numbers of every kind."""
    for item in items:
        torch.rand(1), random.random(), np.random.rand()
        yield item


def train(
    ds_config: dict[str, Any], requests: tuple[dict[str, Any], ...], stages: int, **module: Any
) -> dict[str, Any]:
    """Train with a drain in between; evaluate before the first batch, after every batch, twice after the drain."""
    torch.manual_seed(1234)
    random.seed(1)
    np.random.seed(1)
    trained = cases.engine(ds_config, stages, dropout=0.3, **module)
    losses, evaluations = [], []

    def evaluate() -> None:
        for _ in range(min(2, len(requests))):
            at = len(evaluations)
            request = requests[at % len(requests)]
            outer = trained.is_first_stage() or trained.is_last_stage()
            items = evaluation_data(request, 100 * at)
            result = trained.eval_batch(noisy(items) if outer else None, **request)
            evaluations.append((request, 100 * at, cases.parameters(trained), result))

    evaluate()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^train_batch\(\): called where torch keeps no gradients"):
        trained.train_batch(toy.data())
    for iterator, batches in (
        (toy.data(stop=BATCHES_BEFORE_DRAIN * MICRO_BATCHES), BATCHES_BEFORE_DRAIN),
        (toy.data(start=50), BATCHES - BATCHES_BEFORE_DRAIN),
    ):
        for _ in range(batches):
            losses.append(float(trained.train_batch(iterator)))
            evaluate()
        if batches == BATCHES_BEFORE_DRAIN:
            with pytest.raises(StopIteration):
                trained.train_batch(iterator)
            evaluate()
    randomness = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    report = {"losses": losses, "parameters": cases.parameters(trained), "randomness": randomness}
    cases.end(trained)
    return {**report, "evaluations": evaluations}


def with_and_without(ds_configs: list[dict[str, Any]], stages: int, **module: Any) -> list[Any]:
    """For each configuration: training alone, and training with evaluations."""
    return [train(ds_config, requests, stages, **module) for ds_config in ds_configs for requests in ((), REQUESTS)]


def single_process(weights: dict[str, torch.Tensor], items: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and losses of the toy model with these weights."""
    model = nn.Sequential(*toy.built_layers())
    model.load_state_dict(weights)
    with torch.no_grad():
        outputs = [model(tokens) for tokens, _ in items]
        losses = [nn.functional.cross_entropy(o, labels) for o, (_, labels) in zip(outputs, items, strict=True)]
    return outputs, losses


def close(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(close(g, w) for g, w in zip(got, wanted, strict=True))
    return torch.allclose(got, wanted, rtol=0, atol=1e-6)


def check_evaluation(request: dict[str, Any], start: int, weights: dict[str, torch.Tensor], results: list[Any]) -> None:
    """Results of all stages for one request, against one process with the same weights."""
    outputs, losses = single_process(weights, evaluation_data(request, start))
    wanted: Any = losses if request.get("compute_loss", True) else outputs
    if request.get("reduce_output", "avg") is not None:
        wanted = torch.stack(wanted).mean(0)
    everywhere = request.get("compute_loss", True) and request.get("bcast_loss", True)
    for stage, result in enumerate(results):
        last = stage == len(results) - 1
        if request.get("return_logits"):
            result, logits = result
            assert close(logits, outputs[-1]) if last else logits is None, request
        assert close(result, wanted) if last or everywhere else result is None, request


@pytest.mark.parametrize(
    ("stages", "blocks"),
    [(STAGES, [{}, {"recompute_ratio": 0.5, "weight_sync": "vertical"}]), (2, [{"sync_mode": "bsp"}])],
    ids=("asp", "bsp"),
)
def test_training_does_not_notice_and_results_are_one_process(
    worlds: Worlds, stages: int, blocks: list[dict[str, Any]]
) -> None:
    ds_configs = [cases.config(MICRO_BATCHES, ADAMW, block) for block in blocks]
    ranks = worlds.run(stages, with_and_without, ds_configs, stages, seed_layers=True, base_seed=7)
    for position in range(0, 2 * len(blocks), 2):
        for rank in ranks:
            plain, evaluated = rank[position], rank[position + 1]
            assert plain["losses"] == evaluated["losses"]
            assert plain["randomness"] == evaluated["randomness"]
            assert all(torch.equal(value, evaluated["parameters"][name]) for name, value in plain["parameters"].items())
        for of_ranks in zip(*(rank[position + 1]["evaluations"] for rank in ranks), strict=True):
            request, start, _, _ = of_ranks[0]
            weights = {name: value for _, _, mine, _ in of_ranks for name, value in mine.items()}
            check_evaluation(request, start, weights, [result for *_, result in of_ranks])
        assert len(ranks[0][position + 1]["evaluations"]) == 2 * (BATCHES + 2)


STOCK_REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_micro_batches": 3, "return_logits": True},
    {"bcast_loss": False},
    {"reduce_output": None, "bcast_loss": False},
    {"compute_loss": False, "return_logits": True},
    {"compute_loss": False, "reduce_output": None, "bcast_loss": False},
)


def evaluate_like_stock(ds_configs: list[dict[str, Any]]) -> list[Any]:
    """Results of :data:`STOCK_REQUESTS` between two batches, for each configuration."""
    reports = []
    for ds_config in ds_configs:
        trained = cases.engine(ds_config, 2)
        replica = trained.grid.data_parallel_id
        trained.train_batch(toy.data(replica=replica))
        results = []
        for request in STOCK_REQUESTS:
            trained.total_loss = None  # DeepSpeed adds outputs to what is left of earlier losses
            results.append(trained.eval_batch(toy.data(start=90, replica=replica), **request))
        reports.append((results, float(trained.train_batch(toy.data(start=30, replica=replica)))))
        cases.end(trained)
    return reports


def test_returns_what_deepspeed_returns_with_two_replicas(worlds: Worlds) -> None:
    ds_configs = [cases.config(MICRO_BATCHES, ADAMW, block) for block in (None, {"sync_mode": "bsp"})]
    for stock, ours in worlds.run(4, evaluate_like_stock, ds_configs):
        for request, wanted, got in zip(STOCK_REQUESTS, stock[0], ours[0], strict=True):
            assert same(got, wanted), request
        assert stock[1] == ours[1]


def same(got: Any, wanted: Any) -> bool:
    """Equal in structure and in the last bit. DeepSpeed's mean loss has one dimension except on the last stage."""
    if isinstance(wanted, (tuple, list)):
        return type(got) is type(wanted) and all(same(g, w) for g, w in zip(got, wanted, strict=True))
    if not isinstance(wanted, torch.Tensor):
        return got is wanted is None
    return torch.equal(got, wanted.squeeze(0) if wanted.shape == (1,) else wanted)


def evaluate_uneven(extra: dict[str, Any]) -> list[Any]:
    """Losses and evaluations with stages of 3 and 7 layers: of DeepSpeed's engine, which gets them by hand, and bsp."""
    from deepspeed.pipe import PipelineModule

    def split(module: Any, method: str) -> None:
        module.parts = [0, 3, 10]
        module._set_bounds(*module.parts[module.stage_id :][:2])

    reports = []
    for block in (None, {"sync_mode": "bsp", "partition": [3, 7]}):
        with nullcontext() if block else mock.patch.object(PipelineModule, "_partition_layers", split):
            ds_config = cases.config(MICRO_BATCHES, ADAMW, block, **extra)
            trained = cases.engine(ds_config, 2, specs=toy.tied_specs, loss_fn=toy.mean_over_positions)
        items, losses = toy.data(), []
        for step in range(4):
            losses += [float(trained.train_batch(items)), float(trained.eval_batch(toy.data(start=90 + step)))]
            losses.append(float(trained.eval_batch(toy.data(start=90), num_micro_batches=5)))
        reports.append((len(trained.module.forward_funcs), losses))
        cases.end(trained)
    return reports


@pytest.mark.parametrize("extra", [{}, BF16], ids=["fp32", "bf16-zero1"])
def test_uneven_stages_evaluate_as_deepspeeds(worlds: Worlds, extra: dict[str, Any]) -> None:
    """Ties, several micro-batches. Last bits depend on the split, so DeepSpeed's engine has the same one."""
    for rank, (stock, ours) in enumerate(worlds.run(2, evaluate_uneven, extra)):
        assert stock[0] == (3, 7)[rank]
        assert ours == stock


def with_signs(scores: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    return scores, [scores > 0, None]


def specs_with_signs() -> list[Any]:
    return [*toy.layer_specs(), with_signs]


class Untouched(torch.Tensor):
    """Data that nobody copies."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function.__name__} of data that this stage does not use")


def evaluate_halves() -> float:
    """A mean loss, of data of which each stage has what it uses alone."""
    trained = cases.engine(cases.config(MICRO_BATCHES, ADAMW, {}), 2)
    items, first = list(toy.data(stop=MICRO_BATCHES)), trained.is_first_stage()
    nothing = torch.zeros(1).as_subclass(Untouched)
    mean = float(
        trained.eval_batch(iter([(tokens, nothing) if first else (nothing, labels) for tokens, labels in items]))
    )
    assert mean == float(trained.eval_batch(iter(items)))
    cases.end(trained)
    return mean


def test_stages_keep_what_they_use_of_data_alone(worlds: Worlds) -> None:
    """They read all of an evaluation's data before it begins."""
    first, last = worlds.run(2, evaluate_halves)
    assert first == last


def evaluate_without_loss() -> dict[str, Any]:
    """Means, outputs and refusals of a module that has no loss function and returns a tree."""
    import deepspeed

    net = deepspeed.pipe.PipelineModule(specs_with_signs(), num_stages=2, partition_method="uniform")
    trained = ds_vpipe.initialize(model=net, config=cases.config(MICRO_BATCHES, ADAMW, {}))[0]
    report = {"mean": trained.eval_batch(toy.data()), "all": trained.eval_batch(toy.data(), reduce_output=None)}
    report["refused"] = []
    for request in ({"num_micro_batches": 0}, {"reduce_output": "sum"}, {"num_micro_batches": 2}):
        with pytest.raises(ds_vpipe.VPipeError) as caught:
            trained.eval_batch(iter([uneven(1), uneven(2)]), **request)
        report["refused"].append(str(caught.value))
    report["weights"] = cases.parameters(trained)
    return report


def test_module_without_loss_function(worlds: Worlds) -> None:
    reports = worlds.run(2, evaluate_without_loss)
    outputs, _ = single_process(
        {name: value for report in reports for name, value in report["weights"].items()},
        [toy.micro_batch(0), toy.micro_batch(1)],
    )
    for report in reports:
        scores, (signs, nothing) = report["mean"]
        assert nothing is None
        assert close(scores, (outputs[0] + outputs[1]) / 2)
        assert torch.equal(signs, sum((o > 0).float() for o in outputs) / 2)
        assert len(report["all"]) == 2
        assert all(close(got, wanted) for (got, _), wanted in zip(report["all"], outputs, strict=True))
        assert report["refused"][0].startswith("eval_batch(num_micro_batches): got 0, allowed is 1 or more")
        assert report["refused"][1].startswith("eval_batch(reduce_output): got 'sum', allowed are 'avg' and None")
    assert "got outputs with shapes [(2, 3), (3, 3)], allowed are equal ones" in reports[1]["refused"][2]
    assert "failed in evaluation" in reports[0]["refused"][2]


@pytest.mark.parametrize(
    ("trees", "given"),
    [
        ([(torch.ones(2), torch.ones(2)), torch.ones(2, 2)], "kinds ['tuple', 'Tensor']"),
        ([(None, torch.ones(2)), (torch.ones(2), torch.ones(2))], "kinds ['NoneType', 'Tensor']"),
        ([[torch.ones(2)], (torch.ones(2), None)], "numbers of tensors [1, 2]"),
    ],
)
def test_outputs_of_other_forms_have_no_mean(trees: list[Any], given: str) -> None:
    with pytest.raises(ds_vpipe.VPipeError) as refused:
        mean_of_trees(trees)
    assert f"got outputs with {given}, allowed are equal ones" in str(refused.value)


def test_options_that_are_none_or_given_twice() -> None:
    with pytest.raises(ds_vpipe.VPipeError, match=r"reduce_output\): got 5, allowed are 'avg' and None"):
        evaluation_options((), {"reduce_output": 5})
    with pytest.raises(ds_vpipe.VPipeError, match=r"got return_logits, allowed are return_logits, .*, each once"):
        evaluation_options((True,), {"return_logits": False})


def refused_list(call: str, ranks: tuple[int, ...]) -> str:
    """The refusal of data in a list on some ranks, and in an iterator on others."""
    trained = cases.engine(cases.config(MICRO_BATCHES, ADAMW, {}), 3)
    items = [toy.micro_batch(index) for index in range(9)]
    with pytest.raises(ds_vpipe.VPipeError) as caught:
        getattr(trained, call)(items if trained.global_rank in ranks else iter(items))
    return str(caught.value)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
def test_lists_are_refused_on_every_rank(worlds: Worlds, call: str) -> None:
    """Of a list every call would use the first micro-batches."""
    wanted = "data_iter: got list, allowed: an iterator; pass iter(...)"
    first, middle, last = worlds.run(3, refused_list, call, (0, 1, 2))
    assert first.startswith(wanted)
    assert last.startswith(wanted)
    assert "\n" not in first + middle + last
    texts = worlds.run(3, refused_list, call, (2,))
    assert texts[2].startswith(wanted)
