"""A faster walk over all modules: the same outcome, and modules with a will of their own are asked."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ds_vpipe.engine.deepspeed_internals import training_at_less_cost


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(2)))


def train(module: nn.Module) -> None:
    with training_at_less_cost(module):
        assert module.train() is module


def test_all_modules_get_the_mode() -> None:
    module = model()
    module.eval()
    module[1][0].train()
    train(module)
    assert all(part.training for part in module.modules())
    module[1].eval()
    train(module)
    assert module[1][1].training


def test_modules_that_a_script_adds_or_exchanges_get_it_too() -> None:
    module = model()
    train(module)
    module.eval()
    module[1][0], module[0].adapter = nn.Dropout(0.1).eval(), nn.Linear(2, 2).eval()
    module.register_module("none", None)
    train(module)
    assert all(part.training for part in module.modules())


def test_only_modules_that_differ_are_touched() -> None:
    class Counting(nn.Linear):
        sets = 0

        def __setattr__(self, name: str, value: object) -> None:
            if name == "training":
                Counting.sets += 1
            super().__setattr__(name, value)

    module = nn.Sequential(Counting(2, 2))
    before = Counting.sets
    train(module)
    assert Counting.sets == before
    module.eval()
    train(module)
    assert Counting.sets == before + 2


def test_the_module_is_as_it_was() -> None:
    """Copies switch themselves and not the original, and can be pickled, also when the batch has failed."""
    module = model()
    train(module)
    with pytest.raises(ValueError, match="in a layer"), training_at_less_cost(module):
        raise ValueError("in a layer")
    copied = copy.deepcopy(module)
    copied.eval()
    assert all(part.training for part in module.modules())
    assert not any(part.training for part in copied.modules())
    pickle.loads(pickle.dumps(module)).eval()
    module.eval()
    assert not any(part.training for part in module.modules())


def test_a_module_that_stays_in_its_mode_is_asked() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    module = nn.Sequential(Frozen(2), nn.Dropout())
    module.eval()
    train(module)
    assert not module[0].training
    assert module[1].training
    torch.testing.assert_close(module[0].running_mean, torch.zeros(2))
    frozen = module[0]
    frozen.eval()
    train(frozen)
    assert not frozen.training
