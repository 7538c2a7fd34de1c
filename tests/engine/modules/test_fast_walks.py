"""Faster walks over modules and parameters: the same outcome, and modules with a will of their own are asked."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine, training_at_less_cost
from ds_vpipe.errors import VPipeConfigError


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


def test_modules_of_torch_jit_get_it_too() -> None:
    """They have their mode, and traced ones their parts, elsewhere than other modules."""
    scripted, traced = torch.jit.script(nn.Dropout()), torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    module = nn.Sequential(scripted, traced)
    module.eval()
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


class Engine(PatchedPipelineEngine):
    """The parts of an engine that look at parameters."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.param_names = module, {p: name for name, p in module.named_parameters()}
        self.optimizer = self.basic_optimizer = torch.optim.SGD([{"params": [p]} for p in module.parameters()], lr=0.1)
        self._left_out, self.using_bf16_optimizer, self.is_data_parallel = (), False, False
        self.layers_changed()

    def zero_optimization(self) -> bool:
        return False


@pytest.mark.parametrize("place", ["0.weight", "1.1.bias"])
@pytest.mark.parametrize("what", ["replaced", "removed", "none"])
def test_parameters_that_are_replaced_or_removed_are_refused(place: str, what: str) -> None:
    """Also the last one, after which there is nothing."""
    module = model()
    engine = Engine(module)
    engine.refuse_replaced()
    layer, _, name = place.rpartition(".")
    if what == "removed":
        delattr(module.get_submodule(layer), name)
    else:
        other = nn.Parameter(torch.ones_like(module.get_parameter(place))) if what == "replaced" else None
        setattr(module.get_submodule(layer), name, other)
    with pytest.raises(VPipeConfigError, match=place):
        engine.refuse_replaced()


def test_parameters_of_torch_jit_that_are_replaced_are_refused() -> None:
    module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    engine = Engine(module)
    engine.refuse_replaced()
    module[0].bias = nn.Parameter(torch.ones(2))
    with pytest.raises(VPipeConfigError, match=r"0\.bias"):
        engine.refuse_replaced()


def test_what_is_put_behind_all_parameters_is_seen_once() -> None:
    module = model()
    engine = Engine(module)
    added = module[1][1].extra = nn.Parameter(torch.zeros(2))
    engine.refuse_replaced()
    assert engine._placed[-2] is added
    engine.basic_optimizer.add_param_group({"params": [added]})
    with pytest.raises(VPipeConfigError, match=r"1\.1\.extra"):
        engine.reduce_gradients(together=False)


def test_groups_may_be_put_in_another_order_and_left_out() -> None:
    engine = Engine(model())
    groups = engine.basic_optimizer.param_groups
    groups.reverse()
    engine.reduce_gradients(together=False)
    del groups[-1]
    engine.reduce_gradients(together=False)
    groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    with pytest.raises(VPipeConfigError, match=r"shape \[3\]"):
        engine.reduce_gradients(together=False)
