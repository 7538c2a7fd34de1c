"""Layers that keep what most do not: whole state dicts, checkpoints and exports have every one of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS
from torch import nn
from worlds import Worlds

from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint
from ds_vpipe.export import full_state_dict, main

pytestmark = pytest.mark.mp

LAST = 4  # number of the last layer


class Words(nn.Module):
    """Tied words, and what is not tied: a weight of two names, buffers, and extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = toy.seeded(seed, lambda: nn.Embedding(toy.VOCABULARY, toy.HIDDEN))
        self.one = toy.seeded(seed + 1, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN))
        self.two = nn.Linear(toy.HIDDEN, toy.HIDDEN, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("built", torch.zeros(2), persistent=False)
        self.note = 0

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.note += 2
        return self.two(self.one(self.embedding(x))) if x.dtype == torch.int64 else words(self, x)


def words(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.seen += 1
    layer.note += 1
    return layer.two(layer.one(x)) @ layer.embedding.weight.T


class Odd(nn.Module):
    """A weight of two names and one without dimensions, what is frozen, buffers in other layouts and types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.one = toy.seeded(seed, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN))
        self.two = nn.Linear(toy.HIDDEN, toy.HIDDEN)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.full((3,), float(seed)), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned += 1
        return x + torch.tanh(self.two(self.one(x))) * self.scale


class Weighted(nn.Module):
    """A loss function with a weight and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(toy.VOCABULARY))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy((outputs * self.weight).float().mean(1), labels)


def specs(**last: Any) -> Callable[[], list[Any]]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tie = "embedding.weight"
    odd = [LayerSpec(Odd, seed) for seed in (20, 30, 40)]
    first = TiedLayerSpec("words", Words, 10, tied_weight_attr=tie)
    return lambda: [first, *odd, TiedLayerSpec("words", Words, 50, tied_weight_attr=tie, **last)]


def state(engine: Any) -> dict[str, Any]:
    """This stage's layers and, on the last stage, the loss function by their own state dicts."""
    module, found = engine.module, {}
    for index in range(module._local_start, module._local_stop):
        layer = (
            module.tied_modules["words"] if index in (0, LAST) else module.forward_funcs[index - module._local_start]
        )
        found |= layer.state_dict(prefix=f"{index}.")
    if engine.is_last_stage():
        found |= module.loss_fn.state_dict(prefix="loss_fn.")
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def train_and_load(ds_config: dict[str, Any], last: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train and save; and load with the same split and with another one."""
    found: dict[str, Any] = {}
    for partition in ([2, 3], [2, 3], [4, 1]):
        ds_config["vpipe"]["partition"] = partition
        engine = cases.engine(ds_config, 2, loss_fn=Weighted(), specs=specs(**last))
        if found:
            engine.load_checkpoint(folder)
            found[f"loaded {partition}"] = state(engine)
        else:
            iterator = toy.data()
            for _ in range(3):
                engine.train_batch(iterator)
            engine.save_checkpoint(folder)
            found |= {"trained": state(engine), "whole": engine.full_state_dict()}
        cases.end(engine)
    return found


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> set[str]:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return isinstance(other, torch.Tensor) and torch.equal(one.to(other.dtype), other)
        return bool(one == other)

    return {name for name, value in wanted.items() if name not in found or not same(found[name], value)}


def of_layers(whole: dict[str, Any]) -> dict[str, Any]:
    """With the first tied layer's values under its number, and shared ones under both."""
    tied = {name[len("tied_modules.words.") :]: value for name, value in whole.items() if name.startswith("tied_")}
    shared = {f"{LAST}.embedding.weight": tied["embedding.weight"]}
    return {**{f"0.{name}": value for name, value in tied.items()}, **shared, **whole}


@pytest.mark.parametrize(("setting", "way"), [("fp32", "layer"), ("fp32", "function"), ("ZeRO-1", "function")])
def test_every_value_is_kept(worlds: Worlds, tmp_path: Path, setting: str, way: str, capsys: Any) -> None:
    """The last tied layer is DeepSpeed's to save, or, if it runs a function, ours."""
    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}} if setting == "ZeRO-1" else {}
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {}, **extra)
    last = {"forward_fn": words} if way == "function" else {}
    ranks = worlds.run(2, train_and_load, ds_config, last, str(tmp_path))
    wanted = {name: value for rank in ranks for name, value in rank["trained"].items()}
    assert not torch.equal(wanted["0.one.weight"], wanted[f"{LAST}.one.weight"])
    assert wanted["0._extra_state"] != wanted[f"{LAST}._extra_state"]
    for partition in ([2, 3], [4, 1]):
        loaded = {name: value for rank in ranks for name, value in rank[f"loaded {partition}"].items()}
        assert not differing(loaded, wanted), partition
    for rank in ranks:
        assert list(rank["whole"]) == list(ranks[0]["whole"])
        assert not differing(of_layers(rank["whole"]), wanted)
    checkpoint = PipelineCheckpoint(next(tmp_path.glob("global_step*")))
    by_layer = full_state_dict(checkpoint, by_layer=True)
    assert not differing(by_layer, wanted)
    assert by_layer.keys() == wanted.keys()
    assert main([str(tmp_path), str(tmp_path / "model.pt")]) == 0
    assert main([str(tmp_path), str(tmp_path / "model.safetensors")]) == 2
    assert "_extra_state, which is no tensor; allowed: a name that ends in .pt" in capsys.readouterr().err
