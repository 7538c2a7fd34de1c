"""Walks over all modules, done over lists: the same outcome, and modules with a will of their own are asked."""

from __future__ import annotations

import torch
from torch import nn

from ds_vpipe.engine.module_walks import switch_modes_by_list


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(2)))


def test_all_modules_get_the_mode() -> None:
    module = model()
    switch_modes_by_list(module)
    assert module.eval() is module
    assert not any(part.training for part in module.modules())
    module[1][0].train()
    assert module.train() is module
    assert all(part.training for part in module.modules())
    module[1].eval()
    assert not module[1][1].training
    module.train()
    assert module[1][1].training


def test_only_modules_that_differ_are_touched() -> None:
    class Counting(nn.Linear):
        sets = 0

        def __setattr__(self, name: str, value: object) -> None:
            if name == "training":
                Counting.sets += 1
            super().__setattr__(name, value)

    module = nn.Sequential(Counting(2, 2))
    switch_modes_by_list(module)
    before = Counting.sets
    module.train()
    assert Counting.sets == before
    module.eval()
    assert Counting.sets == before + 1


def test_a_module_that_stays_in_its_mode_is_asked() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    module = nn.Sequential(Frozen(2), nn.Dropout())
    switch_modes_by_list(module)
    module.train()
    assert not module[0].training
    assert module[1].training
    torch.testing.assert_close(module[0].running_mean, torch.zeros(2))
